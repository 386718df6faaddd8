"""`msprobe compare` on tensors: compare_result_*.csv. NPU is the target, Bench the reference."""

from __future__ import annotations

import json
from collections.abc import Callable

from whence.records.slots import split_slot
from whence.report.cells import Cell, Columns, reference, shape, target, torch_dtype
from whence.results import Shown, ViewRow

_KINDS = {"param": "parameters"}


def _name(side: Shown) -> str:
    """As msprobe names it, which is also how it names its files."""
    file = side.file.rpartition("/")[2].removesuffix(".pt").removesuffix(".npy")
    if f".{side.phase}." in file:
        return file
    kind, slot = split_slot(side.slot)
    call = f"{side.name}.{side.occurrence}.{side.phase}"
    if side.kind == "module":
        call = f"Module.{side.name}.{side.op_type}.{side.phase}.{side.occurrence}"
    return f"{call}.{_KINDS.get(kind, kind)}.{slot}"


def _metric(name: str) -> Callable[[int, ViewRow], Cell]:
    def cell(_: int, row: ViewRow) -> Cell:
        value = row.figures.get(name)
        return value if value is not None else row.why if row.why == "shape unmatched" else "N/A"

    return cell


def _files(_: int, row: ViewRow) -> str:
    return str(
        [
            s.file.rpartition("/")[2] if s is not None and s.file else "-1"
            for s in (row.target, row.reference)
        ]
    )


def _source(_: int, row: ViewRow) -> str:
    side = row.target or row.reference
    return side.source if side is not None and side.source else "N/A"


def _or(text: str, make: Callable[[int, ViewRow], Cell]) -> Callable[[int, ViewRow], Cell]:
    """The cell, or this text where the side is missing."""

    def made(index: int, row: ViewRow) -> Cell:
        value = make(index, row)
        return text if value is None else value

    return made


COLUMNS: Columns = {
    "NPU Name": _or("N/A", target(_name)),
    "Bench Name": _or("N/A", reference(_name)),
    "NPU Dtype": _or("N/A", target(torch_dtype)),
    "Bench Dtype": _or("N/A", reference(torch_dtype)),
    "NPU Tensor Shape": _or("N/A", target(shape)),
    "Bench Tensor Shape": _or("N/A", reference(shape)),
    "NPU Requires_grad": lambda *_: "N/A",
    "Bench Requires_grad": lambda *_: "N/A",
    "Cosine": _metric("cosine"),
    "EucDist": _metric("euc_dist"),
    "MaxAbsErr": _metric("max_abs_err"),
    "MaxRelativeErr": _metric("max_relative_err"),
    "One Thousandth Err Ratio": _metric("one_thousandth"),
    "Five Thousandths Err Ratio": _metric("five_thousandths"),
    "NPU max": _or("N/A", target(lambda s: s.max)),
    "NPU min": _or("N/A", target(lambda s: s.min)),
    "NPU mean": _or("N/A", target(lambda s: s.mean)),
    "NPU l2norm": _or("N/A", target(lambda s: s.norm)),
    "Bench max": _or("N/A", reference(lambda s: s.max)),
    "Bench min": _or("N/A", reference(lambda s: s.min)),
    "Bench mean": _or("N/A", reference(lambda s: s.mean)),
    "Bench l2norm": _or("N/A", reference(lambda s: s.norm)),
    "Requires_grad Consistent": lambda *_: "N/A",
    "Result": lambda _, row: row.result,
    "Err_message": lambda _, row: json.dumps(
        [f"{row.result}: {row.message}"] if row.message else [row.why] if row.why else []
    ),
    "NPU_Stack_Info": _source,
    "Data_name": _files,
}
