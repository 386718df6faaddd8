"""Products of matrices, and what is fused behind them."""

from __future__ import annotations

from whence.replay.onnx_translation.activations import activated
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def _matmul(w: Writer) -> Tensor:
    return w(0) @ w(1)


def swapped(value: Tensor, swap: int) -> Tensor:
    """Exchanges the last two axes."""
    return value.transpose(-2, -1) if swap else value


def _gemm(w: Writer) -> Tensor:
    if not w.is_float(0) and (w.number("alpha", 1.0) != 1 or w.number("beta", 1.0) != 1):
        raise w.refuse("of integers with factors it is not known to whence")
    a, b = swapped(w(0), w.whole("transA", 0)), swapped(w(1), w.whole("transB", 0))
    product = a @ b * w.number("alpha", 1.0)
    if not w.has(2):
        return product
    return product + w(2) * w.number("beta", 1.0)


def _fused_gemm(w: Writer) -> Tensor:
    parameters = [
        w.number(f"activation_{n}", None)
        for n in ("alpha", "beta", "gamma")
        if w.attribute(f"activation_{n}", None) is not None
    ]
    return activated(w, _gemm(w), w.text("activation", ""), parameters)


def _fused_matmul(w: Writer) -> Tensor:
    sides = []
    for place, side in enumerate("AB"):
        value, rank = w(place), w.rank(place)
        if w.whole(f"transBatch{side}", 0):
            if rank < 3:
                raise w.refuse("a batch that is not there is transposed")
            value = value.permute([*range(1, rank - 1), 0, rank - 1])
        sides.append(swapped(value, w.whole(f"trans{side}", 0) and rank > 1))
    return sides[0] @ sides[1] * w.number("alpha", 1.0)


def _einsum(w: Writer) -> Tensor:
    equation = w.text("equation").replace(" ", "")
    return w.do("einsum", equation, [w(place) for place in range(w.count)])


KNOWN: dict[str, Writes] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Det": lambda w: w(0).linalg_det(),
    "com.microsoft.Inverse": lambda w: w(0).linalg_inv(),
    "com.microsoft.FusedGemm": _fused_gemm,
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.TransposeMatMul": _fused_matmul,
}
