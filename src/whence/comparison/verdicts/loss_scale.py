"""A loss that is scaled otherwise, and whose scale is taken out again before the optimiser: divided
by the number of micro-batches or started from with that gradient, with another scale of a loss
scaler or without one. What the optimiser takes is the same, so nothing computes something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array
from whence.records import Call, Run
from whence.records.slots import INVERSE_SCALE, is_input, is_of_child, is_output, split_child
from whence.results import GUILTY, SlotPair, Verdict, VerdictKind

Verdicts = dict[tuple[int, int], Verdict]

_LOSS, _GRADIENTS = "loss", "gradients"
"""Names of the calls of a training step (docs/training.md)."""
_UNDONE = "undone_scale"
"""By how much a loss was off, among the numbers of a verdict that is withdrawn."""
_AGREES = 1e-3
"""By how much of what the loss is off by the gradients may be, in size and direction."""

_FACTOR = 0.01
"""What 16 bits leave where tensors differ by a factor alone, over their 2-norm."""


class _Fit(NamedTuple):
    """The least squares target = scale x reference of all gradients; residual: what is left, over
    the 2-norm of the reference's.
    """

    scale: float
    residual: float

    def agrees(self, factor: float) -> bool:
        """Do gradients agree that would be off by this factor if a loss's scale reached them?"""
        limit = _AGREES * min(abs(factor - 1), abs(1 / factor - 1), 1.0)
        return abs(self.scale - 1) <= limit and self.residual <= limit


def undone(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, without those of losses whose other scale does not reach the optimiser.

    Gradients before they are clipped count: clipping takes any scale out.
    """
    differing = [
        (key, verdict, slots)
        for key, verdict in verdicts.items()
        if verdict.verdict in (*GUILTY, VerdictKind.UNDETERMINED)
        and (slots := list(_of_loss(paired, key, verdict)))
    ]
    if not differing:
        return verdicts
    out, fits = dict(verdicts), dict(_fits(paired))
    for key, verdict, slots in differing:
        call = paired.calls[key[0]]
        factor = _factor(paired, slots)
        fit = fits.get((call.rank, call.root, call.step))
        if factor is not None and fit is not None and fit.agrees(factor):
            words = f"{factor:.6g} times the reference's, which does not reach the optimiser"
            out[key] = verdict.withdrawn(
                VerdictKind.NOISE,
                f"{words}; {verdict.sentence}",
                numbers={**verdict.numbers, _UNDONE: factor},
            )
    return out


def notes(verdicts: Iterable[Verdict], paired: PairedRuns) -> Iterator[str]:
    """What is said of losses whose other scale is taken out again."""
    factors = [
        factor
        for verdict in verdicts
        if (factor := verdict.numbers.get(_UNDONE)) is not None
        and paired.calls[paired.plan.pairs[verdict.pair].reference].phase == "forward"
    ]
    if factors:
        yield (
            f"the loss is {factors[0]:.6g} times the reference's; the scale does not reach the "
            "optimiser: gradients before clipping are of one scale"
        )


def _of_loss(paired: PairedRuns, key: tuple[int, int], verdict: Verdict) -> Iterator[SlotPair]:
    """The tensors that a verdict is about where it is one about a loss, its backward pass, or a
    number that it is given, as a loss scaler's scale.
    """
    call, stretch = key
    if paired.calls[call].op == _LOSS:
        yield from (s for n, s in paired.slots[verdict.pair].items() if is_output(n))
    elif is_of_child(verdict.slot) and 0 <= stretch < len(paired.kids.get(call, ())):
        child = paired.kids[call][stretch]
        index = paired.pair_of.get(child)
        slots = paired.slots[index] if index is not None else {}
        slot = slots.get(split_child(verdict.slot)[1])
        is_of_loss = paired.calls[child].op == _LOSS
        if is_of_loss and slot and paired.reference.records[slot.reference_record].count == 1:
            yield slot


def _factor(paired: PairedRuns, slots: Sequence[SlotPair]) -> float | None:
    """How many times the reference's these tensors are; None where they are off by more than a
    factor.
    """
    pairs = [paired.arrays(s) for s in slots]
    fit = _fit([pair for pair in pairs if pair is not None], (1.0, 1.0))
    if fit is None or None in pairs or not fit.scale or fit.residual > _FACTOR * abs(fit.scale):
        return None
    return fit.scale


def _fits(paired: PairedRuns) -> Iterator[tuple[tuple[int, str, int], _Fit]]:
    """By (rank, root, step), of gradients as the last backward pass left them, without a loss
    scaler's scale. Steps of which a gradient has no partner are left out.
    """
    for index, pair in enumerate(paired.plan.pairs):
        call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
        lone = {*pair.only_reference, *pair.only_target} - {INVERSE_SCALE}
        if call.op != _GRADIENTS or any(map(is_input, lone)):
            continue
        scales = _inverse_scale(paired.reference, call), _inverse_scale(paired.target, partner)
        slots = (s for name, s in paired.slots[index].items() if is_input(name))
        pairs = [paired.arrays(s) for s in slots if s.reference_slot != INVERSE_SCALE]
        fit = _fit([pair for pair in pairs if pair is not None], scales)
        if fit is not None and None not in pairs:
            yield (call.rank, call.root, call.step), fit


def _fit(pairs: Sequence[tuple[Array, Array]], scales: tuple[float, float]) -> _Fit | None:
    if any(a.shape != b.shape for a, b in pairs):
        return None
    product = own = others = 0.0
    for arrays in pairs:
        a, b = (x.astype(np.float64) * s for x, s in zip(arrays, scales, strict=True))
        product += float(np.vdot(a, b))
        own += float(np.vdot(a, a))
        others += float(np.vdot(b, b))
    if not own > 0 or not math.isfinite(own + others):
        return None
    # |b - s a|^2 with s = (a, b) / (a, a)
    left = max(0.0, others - product * product / own)
    return _Fit(product / own, math.sqrt(left / own))


def _inverse_scale(run: Run, call: Call) -> float:
    """What a loss scaler multiplied the gradients of a call by; 1 where there was none."""
    record = next((r.record for r in call.refs if r.slot == INVERSE_SCALE), None)
    return 1.0 if record is None else float(run.array(record).reshape(-1)[0])
