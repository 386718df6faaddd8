"""torch_xray `compare`: result.csv, with the names of both sides in one column."""

from __future__ import annotations

from whence.records.slots import split_slot
from whence.report.cells import Columns, figure
from whence.results import Shown, ViewRow

_KINDS = {
    "param": "params",
    "input": "input",
    "output": "output",
    "mutated": "mutated",
    "grad": "grad",
}


def dataset(file: str) -> tuple[str, str]:
    """(step, name) of the dataset that a tensor lies in, as the .h5 file has them; "" for what lies
    elsewhere. file: as `Record.file`.
    """
    step, _, name = file.partition(",")[2].strip("/").partition("/")
    return (
        (step, name.replace("/", ".").replace("%2F", "/")) if step.isdigit() and name else ("", "")
    )


def _key(side: Shown | None) -> str:
    if side is None:
        return "-"
    if named := dataset(side.file)[1]:
        return named
    kind, slot = split_slot(side.slot)
    call = ".".join(part for part in (side.name, side.op_type, str(side.occurrence)) if part)
    return f"{call}.{side.phase}_{_KINDS.get(kind, kind)}.{slot}"


def _module(_: int, row: ViewRow) -> str:
    bench, target = _key(row.reference), _key(row.target)
    return bench if bench == target else f"{bench}/{target}"


def _count(_: int, row: ViewRow) -> int | None:
    value = row.figures.get("gt_num")
    return int(value) if isinstance(value, float) else None


COLUMNS: Columns = {
    "Index": lambda index, _: index,
    "Status": lambda _, row: "" if row.result == "Pass" or row.rel_l2 == 0.0 else "Fail",
    "Module (Bench/Target)": _module,
    "Cosine": figure("cosine"),
    "RMSE": figure("rmse"),
    "IsClose (%)": figure("is_close"),
    "Max Err (t)": figure("max_err"),
    "GtNum": _count,
}
