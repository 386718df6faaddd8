"""Parameters that part before the step of an optimiser and meet again behind it: weight decay that
one run writes by hand and the optimiser of the other applies. What the next step reads is the same.
"""

from __future__ import annotations

import numpy as np

from whence import dtypes, judge
from whence.comparison.paired_runs import PairedRuns
from whence.records.slots import is_of_child, split_child
from whence.records.training import OPTIMIZER
from whence.results import GUILTY, Evidence, SlotPair, Verdict, VerdictKind

Verdicts = dict[tuple[int, int], Verdict]

_ROUNDINGS = 4.0
"""Roundings of the step that may lie between two ways of writing it, in units of its parameter."""
_SHRUNK = 0.01
"""What may be left of a difference: more says that the step did not see to it."""
_BEFORE, _BEHIND = "input.param", "output.param"


def withdrawn(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, without those of code before a step whose parameters meet again behind it."""
    out = dict(verdicts)
    for key, verdict in verdicts.items():
        call = paired.calls[key[0]]
        step = _step(paired, key, verdict)
        if (
            verdict.verdict in GUILTY
            and verdict.evidence == Evidence.TWO_DUMPS
            and call.phase == OPTIMIZER
            and step is not None
            and _meet(paired, step)
        ):
            words = "the parameter parts before its step and meets again behind it"
            out[key] = verdict.withdrawn(VerdictKind.NOISE, f"{words}; {verdict.sentence}")
    return out


def _step(paired: PairedRuns, key: tuple[int, int], verdict: Verdict) -> int | None:
    """The pair of the step that reads the parameter of a verdict, None where it is about another
    tensor.
    """
    if not is_of_child(verdict.slot):
        return None
    child, slot = split_child(verdict.slot)
    children = paired.kids.get(key[0], ())
    if slot != _BEFORE or child >= len(children):
        return None
    return paired.pair_of.get(children[child])


def _meet(paired: PairedRuns, index: int) -> bool:
    """Did the parameter of a step part before it, and is it equal but for rounding behind it?"""
    slots = paired.slots[index]
    before, behind = slots.get(_BEFORE), slots.get(_BEHIND)
    if before is None or behind is None:
        return False
    parted, left = _apart(paired, before), _apart(paired, behind)
    u = judge.unit_roundoff(paired.reference.records[behind.reference_record].dtype)
    if parted is None or left is None or not u:
        return False
    return left <= _ROUNDINGS * u and left <= _SHRUNK * parted


def _apart(paired: PairedRuns, slot: SlotPair) -> float | None:
    """The relative 2-norm of the difference, None where elements are missing."""
    arrays = paired.arrays(slot)
    if arrays is None:
        return None
    a, b = (np.asarray(dtypes.widen(array), np.float64) for array in arrays)
    size = float(np.linalg.norm(a))
    return float(np.linalg.norm(a - b)) / size if size else None
