"""The error and verdict of each node, by name, for viewers of graphs."""

from __future__ import annotations

from typing import NamedTuple

from whence.records.slots import is_output
from whence.results import Comparison, VerdictKind, severity


class NodeError(NamedTuple):
    """error: relative 2-norm of the worst output over all steps and ranks; None where no output was
    measured. verdict: the worst of its calls.
    """

    error: float | None
    verdict: VerdictKind


def node_errors(result: Comparison) -> dict[str, NodeError]:
    """Node errors by the name of the call in the reference, in execution order."""
    known: dict[str, NodeError] = {}
    for row in result.rows:
        error, verdict = known.get(row.name, NodeError(None, VerdictKind(row.verdict)))
        if is_output(row.reference_slot):
            errors = (error, row.measured.values.get("rel_l2"))
            error = max((value for value in errors if value is not None), default=None)
        worst = max(verdict, VerdictKind(row.verdict), key=severity)
        known[row.name] = NodeError(error, worst)
    return known
