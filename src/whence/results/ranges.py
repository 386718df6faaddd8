"""How the tensors of a run use the range of floating-point formats."""

from __future__ import annotations

import msgspec

from whence.display import Described


class FormatUse(msgspec.Struct, frozen=True):
    """How one tensor fits a format.

    format: "float16", "float8_e4m3fn scaled" (scaled so that the largest magnitude of each tensor
    is the largest of the format). overflows: whether its largest magnitude is too large for it.
    overflow, zero, subnormal: elements that are not finite any more, that become zero, and that
    keep fewer bits; of the elements that were read.
    """

    format: str
    overflows: bool
    overflow: int = 0
    zero: int = 0
    subnormal: int = 0


class TensorRange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of a call over all steps, micro-batches and ranks: the first call that ended with
    it, so that an output is named and not what reads it.

    times: how often it was seen. elements: how many of them were read, 0 with statistics alone;
    zeros, subnormal, saturated: how many of these are zero, subnormal, or the largest finite number
    of the dtype itself. infinite: of all. largest, smallest: magnitudes of finite elements;
    smallest is of elements that are not zero, None where none was read. step: where the largest one
    is. formats: in the order that was asked for.
    """

    scope: str
    root: str
    op_type: str
    slot: str
    phase: str
    dtype: str
    times: int
    elements: int
    largest: float
    step: int
    smallest: float | None = None
    zeros: int = 0
    subnormal: int = 0
    saturated: int = 0
    infinite: int = 0
    formats: tuple[FormatUse, ...] = ()


class Ranges(Described, msgspec.Struct, frozen=True):
    """How the tensors of a run use the range of floating-point formats.

    formats: names, as in `FormatUse.format`. tensors: in the order of execution. unread: how many
    of them are known by statistics alone, which say what overflows and not what becomes zero.
    unmeasured: records that have neither.
    """

    run: str
    formats: tuple[str, ...]
    tensors: tuple[TensorRange, ...]
    unread: int
    unmeasured: int
