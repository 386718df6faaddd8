"""Which input of a joined call is which of the call that it is paired with: a joined call reads in
the order in which its members ran, a fused one as its kernel takes them. Parameters alike.
"""

from __future__ import annotations

import msgspec

from whence.records import Call, Record, Ref, Run
from whence.records.slots import is_input, is_param

_CLOSE = 1e-3
"""How far sums over the elements of one tensor may lie apart in two runs that round: figures of two
tensors that are not the same lie further apart, or nothing is changed.
"""


def ordered_like(run: Run, call: Call, other_run: Run, other: Call) -> Call:
    """The call with its inputs in the order of another's, where each is like exactly one of those
    by its figures, whatever its shape; the call as it is anywhere else.
    """
    inputs, across = call.slots("input"), other.slots("input")
    if len(inputs) < 2 or len(inputs) != len(across):
        return call
    places: list[int] = []
    for ref in across:
        record = other_run.records[ref.record]
        own = [run.records[ref.record] for ref in inputs]
        alike = [k for k, o in enumerate(own) if record.hash and _key(o) == _key(record)]
        if len(alike) != 1:
            alike = [k for k, o in enumerate(own) if _alike(o, record)]
        if len(alike) != 1:
            return call
        places += alike
    if sorted(places) != list(range(len(inputs))) or places == sorted(places):
        return call
    records = iter([inputs[k].record for k in places])
    refs = tuple(Ref(r.slot, next(records)) if is_input(r.slot) else r for r in call.refs)
    return msgspec.structs.replace(call, refs=refs, files={})


def parameters_like(run: Run, call: Call, other_run: Run, other: Call) -> Call:
    """The call with its numbered parameters in the order of another's: those of equal elements in
    the places of these, the others in the places that are left, as they came.
    """
    own, across = call.slots("param"), other.slots("param")
    if len(own) < 2 or len(own) != len(across):
        return call
    left = [ref.record for ref in own]
    placed: list[int] = []
    for ref in across:
        sought = other_run.records[ref.record]
        key = sought.hash, sought.dtype, sought.shape
        same = (r for r in left if _key(run.records[r]) == key and sought.hash)
        record = next(same, -1)
        placed.append(record)
        if record >= 0:
            left.remove(record)
    waiting = iter(left)
    records = iter([r if r >= 0 else next(waiting) for r in placed])
    refs = tuple(Ref(r.slot, next(records)) if is_param(r.slot) else r for r in call.refs)
    return call if refs == call.refs else msgspec.structs.replace(call, refs=refs, files={})


def _key(record: Record) -> tuple[str, str, tuple[int, ...]]:
    return record.hash, record.dtype, record.shape


def _alike(a: Record, b: Record) -> bool:
    """May two tensors hold the same elements, but for rounding and their order?"""
    if a.count != b.count or a.sketch is None or b.sketch is None:
        return False
    if a.sketch.checksum == b.sketch.checksum:
        return True
    sums = (
        (a.sketch.abs_sum, b.sketch.abs_sum),
        (a.sketch.fourth_sum, b.sketch.fourth_sum),
    )
    return all(
        x is not None and y is not None and abs(x - y) <= _CLOSE * max(abs(x), abs(y))
        for x, y in sums
    )
