"""Cells of table views: those that several tools write in the same form, and whence's own
columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from whence.records.slots import is_input, is_param
from whence.report.tables import cell, csv_text
from whence.results import GUILTY, Shown, VerdictKind, ViewRow

Cell = str | float | int | None
Columns = dict[str, Callable[[int, ViewRow], Cell]]


def figure(name: str) -> Callable[[int, ViewRow], Cell]:
    """A figure in Python's notation; empty where it is missing."""
    return lambda _, row: row.figures.get(name)


def reference(make: Callable[[Shown], Cell]) -> Callable[[int, ViewRow], Cell]:
    """A cell about the reference's tensor; empty without one."""
    return lambda _, row: make(row.reference) if row.reference is not None else None


def target(make: Callable[[Shown], Cell]) -> Callable[[int, ViewRow], Cell]:
    """A cell about the target's tensor; empty without one."""
    return lambda _, row: make(row.target) if row.target is not None else None


def either(make: Callable[[Shown], Cell]) -> Callable[[int, ViewRow], Cell]:
    """A cell about the reference's tensor, or about the target's where only the target has one."""

    def made(_: int, row: ViewRow) -> Cell:
        side = row.reference or row.target
        return make(side) if side is not None else None

    return made


def path(side: Shown) -> str:
    """The path of a tensor in its dump; its name where it has no file."""
    return side.path or name(side)


def name(side: Shown) -> str:
    """A tensor by call and slot: "layers.0.mlp.output.0", with "#2" after the call for its third
    execution in the step.
    """
    occurrence = f"#{side.occurrence}" if side.occurrence else ""
    return f"{side.name}{occurrence}.{'backward.' if side.phase == 'backward' else ''}{side.slot}"


def torch_dtype(side: Shown) -> str:
    return f"torch.{side.dtype}"


def shape(side: Shown) -> str:
    return str(list(side.shape))


def guarded(value: Cell) -> Cell:
    """A cell that no spreadsheet reads as a formula. Numbers stay numbers."""
    if isinstance(value, float):
        return repr(value)
    return cell(value) if isinstance(value, str) else value


def table(columns: Columns, rows: Iterable[ViewRow]) -> str:
    """The table as CSV. Text that a spreadsheet would read as a formula is quoted."""
    makes = columns.values()
    cells = ([guarded(make(index, row)) for make in makes] for index, row in enumerate(rows))
    return csv_text([columns, *cells])


def status(row: ViewRow) -> str:
    """`Fail` at the fault, empty where there is none, `Unknown` where it cannot be told. This
    follows whence's verdict and not the tolerance of the imitated tool.
    """
    if row.verdict in GUILTY:
        is_meant = is_param(row.slot) == (row.verdict == VerdictKind.PARAM_DIFF)
        return "Fail" if is_meant and not is_input(row.slot) and row.rel_l2 != 0.0 else ""
    is_open = row.verdict in ("", VerdictKind.UNDETERMINED) or row.rel_l2 is None
    return "Unknown" if is_open else ""


OWN: Columns = {
    "whence_call": either(name),
    "whence_verdict": lambda _, row: row.verdict,
    "whence_status": lambda _, row: status(row),
    "whence_rel_l2": lambda _, row: row.rel_l2,
    "whence_max_abs_err": lambda _, row: row.max_abs_err,
    "whence_note": lambda _, row: row.note,
}
