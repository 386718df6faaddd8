"""Products of matrices, and what is fused behind them."""

from __future__ import annotations

from whence.replay.onnx_translation.activations import activated
from whence.replay.onnx_translation.writer import Value, Writer, Writes


def _matmul(w: Writer) -> Value:
    return w.matmul(w(0), w(1))


def swapped(w: Writer, value: Value, swap: int) -> Value:
    """The last two axes exchanged."""
    return w.do("transpose.int", value, -2, -1) if swap else value


def _gemm(w: Writer) -> Value:
    if not w.is_float(0) and (w.number("alpha", 1.0) != 1 or w.number("beta", 1.0) != 1):
        raise w.refuse("of integers with factors it is not known to whence")
    a, b = swapped(w, w(0), w.whole("transA", 0)), swapped(w, w(1), w.whole("transB", 0))
    product = w.times(w.matmul(a, b), w.number("alpha", 1.0))
    if not w.has(2):
        return product
    return w.add(product, w.times(w(2), w.number("beta", 1.0)))


def _fused_gemm(w: Writer) -> Value:
    parameters = [w.number(f"activation_{n}", None) for n in ("alpha", "beta", "gamma")
                  if w.attribute(f"activation_{n}", None) is not None]  # fmt: skip
    return activated(w, _gemm(w), w.text("activation", ""), parameters)


def _fused_matmul(w: Writer) -> Value:
    sides = []
    for place, side in enumerate("AB"):
        value, rank = w(place), w.rank(place)
        if w.whole(f"transBatch{side}", 0):
            if rank < 3:
                raise w.refuse("a batch that is not there is transposed")
            value = w.permute(value, [*range(1, rank - 1), 0, rank - 1])
        sides.append(swapped(w, value, w.whole(f"trans{side}", 0) and rank > 1))
    return w.times(w.matmul(*sides), w.number("alpha", 1.0))


def _einsum(w: Writer) -> Value:
    equation = w.text("equation").replace(" ", "")
    return w.do("einsum.default", equation, [w(place) for place in range(w.count)])


KNOWN: dict[str, Writes] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Det": lambda w: w.do("linalg_det.default", w(0)),
    "com.microsoft.Inverse": lambda w: w.do("linalg_inv.default", w(0)),
    "com.microsoft.FusedGemm": _fused_gemm,
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.TransposeMatMul": _fused_matmul,
}
