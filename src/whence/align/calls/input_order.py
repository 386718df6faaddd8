"""Which input of a joined call is which of the call that it is paired with: a joined call reads in
the order in which its members ran, a fused one as its kernel takes them. Parameters alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from whence.records import Call, Record, Ref, Run
from whence.records.slots import is_param, slot_kind

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
    own = [run.records[ref.record] for ref in inputs]
    for ref in across:
        record = other_run.records[ref.record]
        alike = [k for k, o in enumerate(own) if record.hash and _key(o) == _key(record)]
        if len(alike) != 1:
            alike = [k for k, o in enumerate(own) if _alike(o, record)]
        if len(alike) != 1:
            return call
        places += alike
    return _reordered(call, "input", places)


def _reordered(call: Call, kind: str, places: Sequence[int]) -> Call:
    """The call with tensors of a kind in this order of their present places."""
    own = call.slots(kind)
    if sorted(places) != list(range(len(own))) or list(places) == sorted(places):
        return call
    records = iter([own[k].record for k in places])
    refs = tuple(Ref(r.slot, next(records)) if slot_kind(r.slot) == kind else r for r in call.refs)
    return msgspec.structs.replace(call, refs=refs, files={})


def results_like(
    call: Call, other: Call, names: Mapping[int, str], other_names: Mapping[int, str]
) -> Call:
    """The call with its outputs in the order of another's, where all are known by name.

    names, other_names: what the models return, by record.
    """
    own = [names.get(r.record, "") for r in call.slots("output")]
    across = [other_names.get(r.record, "") for r in other.slots("output")]
    if len(own) < 2 or not all(own) or sorted(own) != sorted(across) or len(set(own)) < len(own):
        return call
    return _reordered(call, "output", [own.index(name) for name in across])


def results_of(run: Run) -> dict[int, str]:
    """What the models of a run return: record -> slot."""
    return {
        r.record: r.slot for call in run.calls if call.parent == -1 for r in call.slots("output")
    }


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
