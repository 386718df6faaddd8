"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from whence.replay.onnx_translation.activations import activated
from whence.replay.onnx_translation.windows import windows
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def convolved(
    w: Writer,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    extents: Sequence[int],
    kernel: Sequence[int],
) -> Tensor:
    """Returns the convolution that the node's attributes describe; tensors have channels first."""
    if len(kernel) not in (1, 2, 3):
        raise w.refuse(f"over {len(kernel)} axes it is not known to whence")
    if list(w.integers("kernel_shape", list(kernel))) != list(kernel):
        raise w.refuse("its kernel is of another shape than it says")
    window = windows(w, extents, kernel)
    pads: Sequence[int] = window.before
    if window.before != window.behind:
        x, pads = x.padded(window.before, window.behind), [0] * len(kernel)
    return x.convolution(
        weight,
        bias,
        list(window.strides),
        list(pads),
        list(window.dilations),
        False,
        [0] * len(kernel),
        w.whole("group", 1),
    )


def _conv(w: Writer) -> Tensor:
    return convolved(w, w(0), w(1), w.optional(2), w.shape(0)[2:], w.shape(1)[2:])


def _fused_conv(w: Writer) -> Tensor:
    return _finished(w, _conv(w))


def _channels_last(w: Writer) -> Tensor:
    """Convolves a tensor whose channels are its last axis."""
    rank = w.rank(0)
    x = w(0).channels_first(rank)
    out = convolved(w, x, w(1), w.optional(2), w.shape(0)[1:-1], w.shape(1)[2:])
    return _finished(w, out.channels_last(rank))


def _finished(w: Writer, out: Tensor) -> Tensor:
    return activated(
        w, w.plus(out, 3), w.text("activation", ""), w.attribute("activation_params", ())
    )


def _conv_transpose(w: Writer) -> Tensor:
    extents, kernel = w.shape(0)[2:], w.shape(1)[2:]
    count = len(kernel)
    if count not in (1, 2, 3):
        raise w.refuse(f"over {count} axes it is not known to whence")
    strides = w.integers("strides", [1] * count)
    dilations = w.integers("dilations", [1] * count)
    extra = w.integers("output_padding", [0] * count)
    full = [
        s * (n - 1) + (k - 1) * d + 1 for s, n, k, d in zip(strides, extents, kernel, dilations)
    ]
    before, behind = _transposed_pads(w, [f + e for f, e in zip(full, extra)], extents, strides)
    zeros = [0] * count
    group = w.whole("group", 1)
    out = w(0).convolution(w(1), None, strides, zeros, dilations, True, zeros, group)
    out = out.padded([-n for n in before], [e - n for e, n in zip(extra, behind)])
    return out + w(2).reshape([-1, *[1] * count]) if w.has(2) else out


def _transposed_pads(
    w: Writer, full: Sequence[int], extents: Sequence[int], strides: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Returns how many elements are cut off at the beginning and at the end of each axis. full:
    extents of the whole result.
    """
    count = len(full)
    auto = w.text("auto_pad", "NOTSET")
    wanted = w.attribute("output_shape", None)
    if wanted is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = list(w.made().shape[2:])  # an engine makes no more than there is
        said = [n * s for n, s in zip(extents, strides)]
        if any(n not in (a, min(a, f)) for n, a, f in zip(wanted, said, full)):
            raise w.refuse(f"it made {wanted}, and says {said}")
    if wanted is None:
        pads = w.integers("pads", [0] * (2 * count)) if auto == "NOTSET" else [0] * (2 * count)
        return pads[:count], pads[count:]
    wanted = list(wanted)[-count:]
    totals = [max(f - n, 0) for f, n in zip(full, wanted)]
    before = [n // 2 if auto == "SAME_UPPER" else n - n // 2 for n in totals]
    return before, [f - n - b for f, n, b in zip(full, wanted, before)]


def _col2im(w: Writer) -> Tensor:
    image, block = w.integers_of(1), w.integers_of(2)
    if len(image) != 2:
        raise w.refuse(f"over {len(image)} axes it is not known to whence")
    strides, dilations = w.integers("strides", [1, 1]), w.integers("dilations", [1, 1])
    pads = w.integers("pads", [0] * 4)
    if pads[:2] != pads[2:]:
        raise w.refuse("uneven pads are not known to whence")
    return w(0).col2im(image, block, dilations, pads[:2], strides)


KNOWN: dict[str, Writes] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Col2Im": _col2im,
    "com.microsoft.FusedConv": _fused_conv,
    "com.microsoft.nchwc.Conv": _fused_conv,  # shown with channels first
    "com.microsoft.NhwcFusedConv": _channels_last,
    "com.microsoft.NhwcConv": _channels_last,
}
