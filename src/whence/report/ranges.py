"""How tensors use the range of floating-point formats, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from whence import dtypes
from whence.report.tables import clean, count, headed
from whence.results import FormatUse, Ranges, TensorRange

_MOST_TENSORS = 3
_COLUMNS = (25, 18, 18)


def ranges_text(result: Ranges, most: int = _MOST_TENSORS) -> str:
    """The answer as text. most: tensors named for each format and kind of loss."""
    return "\n".join(_lines(result, most)) + "\n"


def _lines(result: Ranges, most: int) -> Iterator[str]:
    read = sum(tensor.elements for tensor in result.tensors)
    yield headed("RANGES", f"{count(len(result.tensors), 'tensor')}, {count(read, 'element')} read")
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
        losses = list(_losses(result, number, most))
        if losses:
            yield from ("", name, *losses)
    own = list(_own(result, most))
    if own:
        yield from ("", "at the ends of their own dtype", *own)


def _row(*cells: str) -> str:
    *first, last = cells
    return "".join(f"{cell:<{width}} " for cell, width in zip(first, _COLUMNS, strict=True)) + last


def _total(name: str, uses: list[FormatUse], read: int) -> str:
    overflowing = sum(use.overflows for use in uses)
    return _row(
        name,
        count(overflowing, "tensor") if overflowing else "none",
        _share(sum(use.zero for use in uses), read),
        _share(sum(use.subnormal for use in uses), read),
    )


def _losses(result: Ranges, number: int, most: int) -> Iterator[str]:
    """Tensors that overflow most, then those of which most becomes zero."""
    over = [tensor for tensor in result.tensors if tensor.formats[number].overflows]
    over.sort(key=lambda tensor: -tensor.largest)
    for place, tensor in enumerate(over[:most]):
        words = f"largest {tensor.largest:.4g} at step {tensor.step}"
        if tensor.elements:
            words += f", {_share(tensor.formats[number].overflow, tensor.elements)} too large"
        yield headed("  overflow" if not place else "", f"{_name(tensor)}   {words}")
    yield from _more(len(over), most)
    zero = [tensor for tensor in result.tensors if tensor.formats[number].zero]
    zero.sort(key=lambda tensor: -tensor.formats[number].zero / tensor.elements)
    for place, tensor in enumerate(zero[:most]):
        share = _share(tensor.formats[number].zero, tensor.elements)
        words = f"{share} become zero; {_extent(tensor)}"
        yield headed("  become zero" if not place else "", f"{_name(tensor)}   {words}")
    yield from _more(len(zero), most)


def _own(result: Ranges, most: int) -> Iterator[str]:
    """Tensors whose elements lie at the ends of the dtype that they have."""
    full = [tensor for tensor in result.tensors if tensor.saturated]
    full.sort(key=lambda tensor: -tensor.saturated / tensor.elements)
    for place, tensor in enumerate(full[:most]):
        limit = dtypes.named(tensor.dtype).max_finite
        share = _share(tensor.saturated, tensor.elements)
        words = f"{share} are {limit:.6g}, the largest {clean(tensor.dtype)}"
        yield headed("  saturated" if not place else "", f"{_name(tensor)}   {words}")
    yield from _more(len(full), most)
    small = [tensor for tensor in result.tensors if tensor.subnormal]
    small.sort(key=lambda tensor: -tensor.subnormal / tensor.elements)
    for place, tensor in enumerate(small[:most]):
        share = _share(tensor.subnormal, tensor.elements)
        words = f"{share} are subnormal {clean(tensor.dtype)}; {_extent(tensor)}"
        yield headed("  subnormal" if not place else "", f"{_name(tensor)}   {words}")
    yield from _more(len(small), most)


def _more(total: int, most: int) -> Iterator[str]:
    if total > most:
        yield headed("", f"and {count(total - most, 'more tensor')}")


def _name(tensor: TensorRange) -> str:
    words = [tensor.scope, tensor.op_type, tensor.slot]
    if tensor.phase != "forward":
        words.append(tensor.phase)
    return "   ".join(map(clean, words))


def _extent(tensor: TensorRange) -> str:
    low = "-" if tensor.smallest is None else f"{tensor.smallest:.3g}"
    return f"magnitudes {low} to {tensor.largest:.3g}"


def _share(part: int, whole: int) -> str:
    """ "none", "0.013 %", "< 0.001 %" of what was read; "-" where nothing was."""
    if not whole:
        return "-"
    if not part:
        return "none"
    percent = 100 * part / whole
    return (
        f"{percent:.2g} %"
        if percent >= 0.001 and percent < 99.5
        else ("< 0.001 %" if percent < 1 else f"{percent:.3g} %")
    )
