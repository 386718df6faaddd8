"""Reports on a terminal how tensors use the range of floating-point formats."""

from __future__ import annotations

from collections.abc import Callable

from whence import dtypes
from whence.report.document import Document, answering, few
from whence.report.tables import count, spaced
from whence.results import FormatUse, Ranges, TensorRange

_MOST_TENSORS = 3


@answering
def ranges_text(result: Ranges, most: int = _MOST_TENSORS) -> Document:
    """The answer as text. most: number of tensors named for each format and kind of loss."""
    read = sum(tensor.elements for tensor in result.tensors)
    yield "RANGES", f"{count(len(result.tensors), 'tensor')}, {count(read, 'element')} read"
    if result.unread:
        unread = count(result.unread, "tensor")
        yield f"note: {unread} with statistics alone, which tell only what overflows"
    if result.unmeasured:
        yield f"note: {count(result.unmeasured, 'tensor')} without elements and statistics left out"
    yield ""
    yield _row("format", "overflow", "become zero", "keep fewer bits")
    for number, name in enumerate(result.formats):
        yield _total(name, [tensor.formats[number] for tensor in result.tensors], read)
    for number, name in enumerate(result.formats):
        losses = list(_losses(result.tensors, number, most))
        if losses:
            yield from ("", name, *losses)
    own = list(_own(result.tensors, most))
    if own:
        yield from ("", "at the ends of their own dtype", *own)


def _row(name: str, overflow: str, zero: str, subnormal: str) -> str:
    return f"{name:<25} {overflow:<18} {zero:<18} {subnormal}"


def _total(name: str, uses: list[FormatUse], read: int) -> str:
    overflowing = sum(use.overflows for use in uses)
    return _row(
        name,
        count(overflowing, "tensor") if overflowing else "none",
        _share(sum(use.zero for use in uses), read),
        _share(sum(use.subnormal for use in uses), read),
    )


def _losses(tensors: tuple[TensorRange, ...], number: int, most: int) -> Document:
    """Lines on the tensors that overflow most, and on those of which most elements become zero."""

    def overflows(tensor: TensorRange) -> str:
        words = f"largest {tensor.largest:.4g} at step {tensor.step}"
        if tensor.elements:
            words += f", {_share(tensor.formats[number].overflow, tensor.elements)} too large"
        return words

    def zero(tensor: TensorRange) -> str:
        share = _share(tensor.formats[number].zero, tensor.elements)
        return f"{share} become zero; {_extent(tensor)}"

    over = [tensor for tensor in tensors if tensor.formats[number].overflows]
    over.sort(key=lambda tensor: -tensor.largest)
    lost = _by_share(tensors, lambda tensor: tensor.formats[number].zero)
    yield from _named("  overflow", over, overflows, most)
    yield from _named("  become zero", lost, zero, most)


def _own(tensors: tuple[TensorRange, ...], most: int) -> Document:
    """Tensors with elements at the ends of the range of their own dtype."""

    def saturated(tensor: TensorRange) -> str:
        limit = dtypes.named(tensor.dtype).max_finite
        share = _share(tensor.saturated, tensor.elements)
        return f"{share} are {limit:.6g}, the largest {tensor.dtype}"

    def subnormal(tensor: TensorRange) -> str:
        share = _share(tensor.subnormal, tensor.elements)
        return f"{share} are subnormal {tensor.dtype}; {_extent(tensor)}"

    full = _by_share(tensors, lambda tensor: tensor.saturated)
    small = _by_share(tensors, lambda tensor: tensor.subnormal)
    yield from _named("  saturated", full, saturated, most)
    yield from _named("  subnormal", small, subnormal, most)


def _by_share(
    tensors: tuple[TensorRange, ...], elements: Callable[[TensorRange], int]
) -> list[TensorRange]:
    """Tensors with such elements, those with the largest share first."""
    some = filter(elements, tensors)
    return sorted(some, key=lambda tensor: -elements(tensor) / tensor.elements)


def _named(
    title: str, tensors: list[TensorRange], words: Callable[[TensorRange], str], most: int
) -> Document:
    """The first tensors by name, and how many more there are."""

    def line(tensor: TensorRange) -> str:
        phase = tensor.phase if tensor.phase != "forward" else ""
        return spaced(tensor.scope, tensor.op_type, tensor.slot, phase, words(tensor))

    if tensors:
        yield title, few(tensors, most, line, "more tensor")


def _extent(tensor: TensorRange) -> str:
    low = "-" if tensor.smallest is None else f"{tensor.smallest:.3g}"
    return f"magnitudes {low} to {tensor.largest:.3g}"


def _share(part: int, whole: int) -> str:
    """A share of the elements read, as "none", "0.013 %" or "< 0.001 %"; "-" where none were
    read.
    """
    if not whole:
        return "-"
    if not part:
        return "none"
    percent = 100 * part / whole
    if percent >= 99.5:
        return f"{percent:.3g} %"
    return f"{percent:.2g} %" if percent >= 0.001 else "< 0.001 %"
