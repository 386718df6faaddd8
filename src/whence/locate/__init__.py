"""Verdicts + data flow -> findings."""

from whence.locate.findings import GUILTY, Judged, between, findings, order_and_taint, remarks
from whence.locate.patched import declare_patched
from whence.locate.programs import Parting, first_parting, only_operator, other_function, written_anew
from whence.locate.programs import difference as program_difference
from whence.locate.status import decide

__all__ = [
    "GUILTY",
    "Judged",
    "Parting",
    "between",
    "decide",
    "declare_patched",
    "findings",
    "first_parting",
    "only_operator",
    "order_and_taint",
    "other_function",
    "program_difference",
    "remarks",
    "written_anew",
]
