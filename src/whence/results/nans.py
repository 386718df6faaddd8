"""Where the first values that are not finite come from, in one run."""

from __future__ import annotations

import msgspec

from whence.display import Described


class Range(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor that a call read: its slot, dtype and the range of its finite elements; None where
    it was not measured or has none. infinite: how many elements are +-Inf.
    """

    slot: str
    dtype: str
    low: float | None = None
    high: float | None = None
    infinite: int = 0


class NotFinite(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor with NaN or infinities that nothing before it had.

    scope, op_type, phase, step, rank, order: of the call that made it. slot: in that call; of what
    a container's own code handed to a child, "K:input.0". nan, infinite, count: elements. largest:
    the largest finite number of the dtype. read: what the call was given. operator: of the program
    that the call ran, the first that makes it when it is run again ("log"); "" where that is not
    known.
    """

    scope: str
    root: str
    op_type: str
    slot: str
    step: int
    rank: int
    order: int
    nan: int
    infinite: int
    count: int
    dtype: str
    largest: float | None
    phase: str = "forward"
    source: str = ""
    read: tuple[Range, ...] = ()
    operator: str = ""


class Nans(Described, msgspec.Struct, frozen=True):
    """What is not finite in a run.

    first: the first tensor with NaN, or the first that overflowed where there is no NaN or the NaN
    was made of infinities; None where all is finite. then: the NaN that such an overflow became.
    overflowed: tensors with infinities, and no NaN, that calls made of finite inputs, in order.
    after: calls behind the first one that hold NaN or infinities. calls: how many there are.
    unmeasured: tensors without statistics.
    """

    run: str
    first: NotFinite | None
    then: NotFinite | None
    overflowed: tuple[NotFinite, ...]
    after: int
    calls: int
    unmeasured: int
