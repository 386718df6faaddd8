"""Tensors that differ by a factor per channel, and parameters that do not follow such a change.

A model that is folded or smoothed holds other parameters and computes the same, if every parameter
of a channel takes part: a norm's weight and its bias are both divided by what the next layer is
multiplied by. Where one was left out, or was changed in another way besides, the model is right
again with it changed as the others were; then it is the fault, and what the others changed is
another form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array
from whence.records import Call
from whence.records.slots import is_param, param_name
from whence.results import SlotPair

_FEW, _ONE_FACTOR = 8, 1e-3  # elements that show a factor; how closely they follow it
_CHANNELS, _ROWS = 512, 64  # whose order is looked for; that show it
_NEAR = 0.1  # so far from a factor is what a wrong parameter shows of it


class Changed(NamedTuple):
    """A parameter of the reference's call that differs. factors: per channel, those that make the
    target's of the reference's; none where it differs in another way.
    """

    call: int
    slot: str
    pair: SlotPair
    factors: tuple[Any, ...]


class Uneven(NamedTuple):
    """A parameter (slot, record of the reference) that is not what it would be if it had been
    changed as another was. words: what is wrong.
    """

    slot: str
    record: int
    changed: Array
    words: str


def changed_parameters(paired: PairedRuns, call: Call) -> list[Changed]:
    """The parameters of a call that differ, of the same shape in both runs. Their elements are not
    kept: a model may hold more of them than memory does.
    """
    return [
        Changed(call.id, slot, pair, _exact(*both))
        for slot, pair in paired.slots[paired.pair_of[call.id]].items()
        if is_param(slot) and not paired.is_equal(pair)
        if (both := paired.arrays(pair)) is not None and both[0].shape == both[1].shape
    ]


def uneven_parameters(
    paired: PairedRuns, call: Call, changed: Sequence[Changed]
) -> Iterator[Uneven]:
    """The parameters of a call that may not have been changed as others were. changed: of all
    calls.
    """
    own = {one.slot: one for one in changed if one.call == call.id}
    for slot, pair in paired.slots[paired.pair_of[call.id]].items():
        if not is_param(slot) or slot in own or (both := paired.arrays(pair)) is None:
            continue
        for one in own.values():
            factors = next((f for f in one.factors if both[0].shape == f.shape), None)
            if factors is not None and not np.allclose(factors, 1.0):
                names = param_name(one.slot), param_name(slot)
                words = "{} is multiplied channel by channel, and {} is not multiplied with it"
                moved = _times(both[0], factors, 0)
                yield Uneven(slot, pair.reference_record, moved, words.format(*names))
    others = [f for one in changed if one.call != call.id for f in one.factors]
    for one in own.values() if others else ():
        if (both := paired.arrays(one.pair)) is None:
            continue
        for axis in range(both[0].ndim):
            shared = [m for f in others for m in _shared(f, both[0].shape[axis])]
            before, after = (_rows(array, axis) for array in both)
            with np.errstate(all="ignore"):
                seen = np.median(after / before, axis=1)
                apart = [float(np.median(abs(m / seen - 1))) for m in shared]
            if min(apart, default=np.inf) <= _NEAR:
                moved = _times(both[0], shared[int(np.argmin(apart))], axis)
                words = f"{param_name(one.slot)} is multiplied channel by channel as another layer"
                words = f"{words} needs it, and differs besides"
                yield Uneven(one.slot, one.pair.reference_record, moved, words)


def _shared(factors: Any, size: int) -> Iterator[Any]:
    """Factors, and what takes them back, for so many channels, of which several share one: heads of
    queries, in blocks of any size, share one of keys.
    """
    count = len(factors)
    if size % count:
        return
    places = np.arange(size)
    for block in (k for k in range(1, count + 1) if count % k == 0):
        order = places // (size // count * block) * block + places % block
        yield from (factors[order], 1 / factors[order])


def _exact(reference: Array, target: Array) -> tuple[Any, ...]:
    """The factors per channel of the first or the last axis that make one of the other."""
    sizes = dict.fromkeys(reference.shape[:1] + reference.shape[-1:])
    known = (_factors(reference, target, size) for size in sizes)
    return tuple(factors for factors in known if factors is not None)


def _factors(reference: Array, target: Array, size: int, axes: Sequence[int] = (0, -1)) -> Any:
    """What multiplies each of so many channels, of one of these axes; None where that does not make
    the one of the other.
    """
    if not dtypes.of(reference).is_floating:
        return None
    for axis in (k for k in axes if reference.ndim and reference.shape[k] == size):
        before, after = _rows(reference, axis), _rows(target, axis)
        with np.errstate(all="ignore"):
            factors = (before * after).sum(axis=1) / (before * before).sum(axis=1)
            rest = np.linalg.norm(after - factors[:, None] * before)
        if np.isfinite(factors).all() and rest <= _ONE_FACTOR * np.linalg.norm(after):
            return factors
    return None


def _rows(array: Array, axis: int) -> Any:
    """An array as one row a channel, in float64."""
    return np.moveaxis(array, axis, 0).astype(np.float64).reshape(array.shape[axis], -1)


def _times(array: Array, factors: Any, axis: int) -> Array:
    """An array with its channels multiplied."""
    shape = [1] * array.ndim
    shape[axis] = -1
    times: Array = (array.astype(np.float64) * factors.reshape(shape)).astype(array.dtype)
    return times


def factor_in_words(reference: Array, target: Array) -> str:
    """ "a factor of 2" or "a factor per channel" where that is how two tensors differ, else ""."""
    if reference.shape != target.shape or reference.size < _FEW or not reference.ndim:
        return ""
    if reference.dtype.kind != "f" or not dtypes.of(target).is_floating:
        return ""
    if reference.size == reference.shape[-1]:
        return ""
    factors = _factors(reference, target, reference.shape[-1], (-1,))
    if factors is None or np.allclose(factors, 1.0, rtol=0, atol=_ONE_FACTOR):
        return ""
    if np.ptp(factors) <= _ONE_FACTOR * abs(factors).max():
        return f"a factor of {factors.mean():.4g}"
    return "a factor per channel"


def channel_order(made: Array, array: Array) -> Array | None:
    """The order, another than their own, in which the channels of one tensor (last axis) are those
    of another, each once; None for none.
    """
    if made.shape != array.shape or not 1 < array.shape[-1] <= _CHANNELS:
        return None
    if not dtypes.of(array).is_floating:
        return None
    before, after = (a.reshape(-1, a.shape[-1])[:_ROWS].astype(np.float64).T for a in (made, array))
    order: Array = abs(after[:, None] - before[None]).sum(axis=-1).argmin(axis=1)
    is_order = sorted(order.tolist()) == [*range(len(order))] != order.tolist()
    return order if is_order else None
