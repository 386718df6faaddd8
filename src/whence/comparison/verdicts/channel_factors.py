"""Tensors that differ by a factor per channel, and parameters that do not follow such a change.

Folding or smoothing changes a model's parameters but not its results, if every parameter of a
channel takes part: a norm's weight and its bias are both divided by the factor that the next layer
is multiplied by. If one parameter was left out, or also changed in some other way, the model gives
right results once that parameter is changed like the others. Then this parameter is the fault, and
the changes of the others are another form of the same computation.
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

_FEW, _ONE_FACTOR = 8, 1e-3  # fewest elements that show a factor; largest relative residual
_CHANNELS, _ROWS = 512, 64  # most channels whose order is searched; rows that are compared for it
_NEAR = 0.1  # largest relative distance of a wrong parameter's factors from the expected ones


class Changed(NamedTuple):
    """A parameter of the reference's call that differs between the runs. factors: arrays of one
    factor per channel, target = factor x reference; empty if no such factors exist.
    """

    call: int
    slot: str
    pair: SlotPair
    factors: tuple[Any, ...]


class Uneven(NamedTuple):
    """A parameter (call, slot, record of the reference) that did not follow the change of another
    one. changed: the value it would have if it had followed; words: what is wrong.
    """

    call: int
    slot: str
    record: int
    changed: Array
    words: str


def changed_parameters(paired: PairedRuns, call: Call) -> list[Changed]:
    """The parameters of a call that differ between the runs and have one shape. Their elements are
    not kept, since all of them together may not fit in memory.
    """
    return [
        Changed(call.id, slot, pair, _exact(*both))
        for slot, pair in paired.slots_of(call.id).items()
        if is_param(slot) and not paired.is_equal(pair)
        if (both := paired.arrays_of_one_shape(pair)) is not None
    ]


def uneven_parameters(
    paired: PairedRuns, call: Call, changed: Sequence[Changed]
) -> Iterator[Uneven]:
    """The parameters of a call that may not have followed the change of others. changed: the
    differing parameters of all calls.
    """
    own = {one.slot: one for one in changed if one.call == call.id}
    for slot, pair in paired.slots_of(call.id).items():
        if not is_param(slot) or slot in own or (both := paired.arrays(pair)) is None:
            continue
        for one in own.values():
            factors = next((f for f in one.factors if both[0].shape == f.shape), None)
            if factors is not None and not np.allclose(factors, 1.0):
                names = param_name(one.slot), param_name(slot)
                words = "{} is multiplied channel by channel, and {} is not multiplied with it"
                moved = _times(both[0], factors, 0)
                yield Uneven(call.id, slot, pair.reference_record, moved, words.format(*names))
    yield from _forgotten(paired, call, [f for one in own.values() for f in one.factors])
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
                yield Uneven(call.id, one.slot, one.pair.reference_record, moved, words)


def _forgotten(paired: PairedRuns, call: Call, factors: Sequence[Any]) -> Iterator[Uneven]:
    """The unchanged weights of calls that read what this call reads, once multiplied as its own."""
    read = {ref.record for ref in call.slots("input")}
    for number in paired.kids.get(call.parent, ()) if factors else ():
        beside = paired.calls[number]
        if number == call.id or not any(ref.record in read for ref in beside.slots("input")):
            continue
        for slot, pair in paired.slots_of(number).items():
            if not is_param(slot) or not paired.is_equal(pair):
                continue
            array = paired.reference.array(pair.reference_record)
            for own in factors if array.ndim > 1 else ():
                if len(own) == array.shape[-1]:
                    words = f"{param_name(slot)} is not multiplied channel by channel as that of"
                    words = f"{words} {call.scope}, which reads the same tensor"
                    moved = _times(array, own, array.ndim - 1)
                    yield Uneven(number, slot, pair.reference_record, moved, words)


def _shared(factors: Any, size: int) -> Iterator[Any]:
    """The factors and their reciprocals, repeated for `size` channels: several query heads, in
    blocks of any size, share the factor of one key head.
    """
    count = len(factors)
    if size % count or not factors.all():  # zeros, as of a new bias, are no factors
        return
    places = np.arange(size)
    for block in (k for k in range(1, count + 1) if count % k == 0):
        order = places // (size // count * block) * block + places % block
        yield from (factors[order], 1 / factors[order])


def _exact(reference: Array, target: Array) -> tuple[Any, ...]:
    """The factors per channel, along the first or the last axis, that turn the reference into the
    target.
    """
    sizes = dict.fromkeys(reference.shape[:1] + reference.shape[-1:])
    known = (_factors(reference, target, size) for size in sizes)
    return tuple(factors for factors in known if factors is not None)


def _factors(reference: Array, target: Array, size: int, axes: Sequence[int] = (0, -1)) -> Any:
    """The factor of each of `size` channels along one of these axes; None if the target is not the
    reference times such factors.
    """
    if not dtypes.of(reference).is_floating:
        return None
    for axis in (k for k in axes if reference.ndim and reference.shape[k] == size):
        before, after = _rows(reference, axis), _rows(target, axis)
        with np.errstate(all="ignore"):
            factors = (before * after).sum(axis=1) / (before * before).sum(axis=1)
            rest = np.linalg.norm(after - factors[:, None] * before)
        rounded = max(_ONE_FACTOR, dtypes.of(target).unit_roundoff or 0.0)
        if np.isfinite(factors).all() and rest <= rounded * np.linalg.norm(after):
            return factors
    return None


def _rows(array: Array, axis: int) -> Any:
    """The array in float64 as (channel, element)."""
    return np.moveaxis(array, axis, 0).astype(np.float64).reshape(array.shape[axis], -1)


def _times(array: Array, factors: Any, axis: int) -> Array:
    """The array with each channel along `axis` multiplied by its factor, in its own dtype."""
    shape = [1] * array.ndim
    shape[axis] = -1
    times: Array = (array.astype(np.float64) * factors.reshape(shape)).astype(array.dtype)
    return times


def factor_in_words(reference: Array, target: Array) -> str:
    """ "a factor of 2" or "a factor per channel" if that is how two tensors differ, else ""."""
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
    """The permutation of channels (last axis) that turns `made` into `array`; None if there is
    none, or if it leaves every channel in place.
    """
    if made.shape != array.shape or not array.ndim or not 1 < array.shape[-1] <= _CHANNELS:
        return None
    if not dtypes.of(array).is_floating:
        return None
    before, after = (a.reshape(-1, a.shape[-1])[:_ROWS].astype(np.float64).T for a in (made, array))
    order: Array = abs(after[:, None] - before[None]).sum(axis=-1).argmin(axis=1)
    is_order = sorted(order.tolist()) == [*range(len(order))] != order.tolist()
    return order if is_order else None
