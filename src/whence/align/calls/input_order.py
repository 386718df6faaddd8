"""Which input of a joined call is which of the call that it is paired with: a joined call reads in
the order in which its members ran, a fused one as its kernel takes them.
"""

from __future__ import annotations

import msgspec

from whence.records import Call, Record, Run
from whence.records.slots import is_input

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
        alike = [k for k, own in enumerate(inputs) if _alike(run.records[own.record], record)]
        if len(alike) != 1:
            return call
        places += alike
    if sorted(places) != list(range(len(inputs))) or places == sorted(places):
        return call
    ordered = iter([inputs[k] for k in places])
    refs = tuple(next(ordered) if is_input(r.slot) else r for r in call.refs)
    return msgspec.structs.replace(call, refs=refs)


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
