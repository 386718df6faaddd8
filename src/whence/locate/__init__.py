"""Verdicts + data flow -> findings."""

from whence.locate.findings import GUILTY, Judged, between, findings, order_and_taint
from whence.locate.patched import declare_patched
from whence.locate.programs import difference as program_difference
from whence.locate.programs import first_parting, only_operator
from whence.locate.status import decide

__all__ = [
    "GUILTY",
    "Judged",
    "between",
    "decide",
    "declare_patched",
    "findings",
    "first_parting",
    "only_operator",
    "order_and_taint",
    "program_difference",
]
