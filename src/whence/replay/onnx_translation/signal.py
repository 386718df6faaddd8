"""Fourier transforms, and windows."""

from __future__ import annotations

import math

from whence.replay.onnx_translation.elementwise import stored
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def _transform(w: Writer) -> Tensor:
    rank, parts = w.rank(0), w.extent(0, -1)
    inverse, onesided = bool(w.whole("inverse", 0)), bool(w.whole("onesided", 0))
    if w.opset < 20:
        axis = w.axis(w.whole("axis", 1), rank)
    else:
        axis = w.axis(int(w.number_of(2)) if w.has(2) else -2, rank)
    if axis == rank - 1:
        raise w.refuse("over the parts of complex numbers")
    extent = w.extent(0, axis)
    shortened = 2 * (extent - 1) if inverse and onesided else extent
    count = int(w.number_of(1)) if w.has(1) else shortened
    if parts == 2:
        x = w(0).contiguous().view_as_complex()
    else:
        x = w(0).select(-1, 0)
    if inverse and onesided:
        return x.fft_irfft(count, axis).unsqueeze(-1)
    out = w.do("fft_ifft.default" if inverse else "fft_fft.default", x, count, axis)
    if onesided:
        out = out.part(axis, 0, count // 2 + 1)
    return out.view_as_real()


def _short_time(w: Writer) -> Tensor:
    """STFT(signal, frame_step, window, frame_length)"""
    step = int(w.number_of(1))
    length = int(w.number_of(3)) if w.has(3) else w.extent(2, 0)
    if w.has(2) and w.extent(2, 0) != length:
        raise w.refuse("a window of another length than the frames is not known to whence")
    onesided = bool(w.whole("onesided", 1))
    if w.rank(0) == 3 and w.extent(0, -1) == 2:
        if onesided:
            raise w.refuse("one side of a complex signal")
        x = w(0).contiguous().view_as_complex()
    else:
        x = w(0).select(-1, 0) if w.rank(0) == 3 else w(0)
    frames = x.unfold(1, length, step)
    frames = frames * w(2) if w.has(2) else frames
    out = frames.fft_fft(length, -1)
    out = out.part(-1, 0, length // 2 + 1) if onesided else out
    return out.view_as_real()


def _window(factors: tuple[float, ...]) -> Writes:
    """Returns a sum of cosines at multiples of the angle 2 pi n / steps, weighted by `factors`."""

    def write(w: Writer) -> Tensor:
        size = int(w.number_of(0))
        steps = size if w.whole("periodic", 1) else size - 1
        dtype = stored(w, w.whole("output_datatype", 1))
        if dtype not in ("float32", "float64") or steps < 1:
            raise w.refuse("of this length or element type it is not known to whence")
        angle = w.counted(size).to(dtype) * (2 * math.pi / steps)
        total: Tensor | None = None
        for k, factor in enumerate(factors[1:], 1):
            term = (angle * k).cos() * factor
            total = term if total is None else total + term
        assert total is not None
        return total + factors[0]

    return write


KNOWN: dict[str, Writes] = {
    "DFT": _transform,
    "STFT": _short_time,
    "HannWindow": _window((0.5, -0.5)),
    "HammingWindow": _window((25 / 46, -21 / 46)),
    "BlackmanWindow": _window((0.42, -0.5, 0.08)),
}
