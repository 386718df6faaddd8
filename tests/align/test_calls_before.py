"""Kernels of a compiled graph against the operators that they carry out, both as arrays alone: what
a kernel is given belongs to the first of these operators.
"""

from pathlib import Path

import numpy as np
import pytest

from whence import compare

TIME = 20260101000000000000


class Graphs:
    """The same network run operator by operator and as kernels, in files that torchair's tools
    write. dtype: of every tensor; kernels round once, where operators round each.
    """

    def __init__(self, folder: Path, dtype: type, weight: str) -> None:
        self.operators = folder / "data_dump"
        self.kernels = folder / "dump_20260101_000000"
        self._eager = self.operators / "1" / f"gm_{TIME}_dump"
        self._compiled = self.kernels / "20260101000000" / "0" / "graph_1" / "1" / "0"
        for path in (self._eager, self._compiled):
            path.mkdir(parents=True)
        self._count = [0, 0]
        self._dtype = dtype
        rng = np.random.default_rng(5)
        self.x, self.left, self.right = (
            self.cast(rng.standard_normal(shape) / shape[-2] ** 0.5)
            for shape in ((2, 6, 16), (16, 32), (32, 16))
        )
        plain = np.ones(16) if weight == "ones" else rng.uniform(0.5, 1.5, 16)
        self.weight, self.bias = self.cast(plain), self.cast(np.zeros(16))

    def cast(self, values):
        return np.asarray(values).astype(self._dtype)

    def operator(self, name, kind, inputs, value):
        self._count[0] += 1
        time = TIME + self._count[0]
        out = self.cast(value)
        for k, array in enumerate(inputs):
            np.save(self._eager / f"{name}-aten.{kind}.INPUT.{k}.{time}.npy", array)
        np.save(self._eager / f"{name}-aten.{kind}.OUTPUT.0.{time}.npy", out)
        return out

    def kernel(self, name, kind, inputs, value):
        self._count[1] += 1
        out = self.cast(value)
        stem = f"{kind}.{name}.{self._count[1]}.0.{TIME // 10000 + self._count[1]}"
        for k, array in enumerate(inputs):
            np.save(self._compiled / f"{stem}.input.{k}.npy", array)
        np.save(self._compiled / f"{stem}.output.0.npy", out)
        return out


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


def network(graphs: Graphs, factor: float) -> None:
    """A norm, a product, a gate, a product and a sum; the kernel of the norm errs by a factor."""
    g, x, w, b = graphs, graphs.x, graphs.weight, graphs.bias
    square = g.operator("pow_1", "pow.Tensor_Scalar", [x], wide(x)[0] ** 2)
    mean = g.operator("mean", "mean.dim", [square], wide(square)[0].mean(-1, keepdims=True))
    shifted = g.operator("add_8", "add.Tensor", [mean], wide(mean)[0] + 1e-6)
    root = g.operator("rsqrt", "rsqrt.default", [shifted], 1 / np.sqrt(wide(shifted)[0]))
    scaled = g.operator("mul_4", "mul.Tensor", [x, root], np.multiply(*wide(x, root)))
    weighted = g.operator("mul_5", "mul.Tensor", [scaled, w], np.multiply(*wide(scaled, w)))
    normed = g.operator("add_9", "add.Tensor", [weighted, b], np.add(*wide(weighted, b)))
    flat = normed.reshape(12, 16)
    up = g.operator("mm", "mm.default", [flat, g.left], np.matmul(*wide(flat, g.left)))
    gate = g.operator("tanh", "tanh.default", [up], np.tanh(wide(up)[0]))
    gated = g.operator("mul_7", "mul.Tensor", [up, gate], np.multiply(*wide(up, gate)))
    down = g.operator("mm_1", "mm.default", [gated, g.right], np.matmul(*wide(gated, g.right)))
    there = down.reshape(2, 6, 16)
    g.operator("add_12", "add.Tensor", [x, there], np.add(*wide(x, there)))

    wide_x, wide_w, wide_b = wide(x, w, b)
    normed = wide_x / np.sqrt((wide_x**2).mean(-1, keepdims=True) + 1e-6) * wide_w + wide_b
    normed = g.kernel("add_9", "Add", [x, w, b], normed * factor)
    up = g.kernel("mm", "Mm", [normed, g.left], np.matmul(*wide(normed.reshape(12, 16), g.left)))
    wide_up = wide(up)[0]
    gated = g.kernel("mul_7", "Mul", [up], wide_up * np.tanh(wide_up))
    down = g.kernel("mm_1", "Mm", [gated, g.right], np.matmul(*wide(gated, g.right)))
    g.kernel("add_12", "Add", [x, down], wide_x + wide(down)[0].reshape(2, 6, 16))


@pytest.mark.parametrize("weight", ["ones", "drawn"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_kernels_that_do_the_operators_before_them_too_are_the_same(tmp_path, dtype, weight):
    graphs = Graphs(tmp_path, dtype, weight)
    network(graphs, 1.0)
    answer = compare(graphs.operators, graphs.kernels)
    assert (answer.status, answer.findings) == ("same", ())
    # what only the operators left is seen in what the kernels made of it
    assert answer.coverage.measured < answer.coverage.calls
    assert answer.coverage.measured + answer.coverage.covered == answer.coverage.calls
    assert not any(v.verdict == "other-form" for v in answer.verdicts)


@pytest.mark.parametrize("weight", ["ones", "drawn"])
@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 1.001), (np.float16, 1.02)])
def test_a_wrong_kernel_is_named_with_the_operators_it_carries_out(tmp_path, dtype, factor, weight):
    graphs = Graphs(tmp_path, dtype, weight)
    network(graphs, factor)
    answer = compare(graphs.operators, graphs.kernels)
    assert answer.status == "different"
    assert (answer.findings[0].name, answer.findings[0].slot) == ("add_9", "output.0")
    assert "mul_5" in answer.origin.among
    assert len(answer.findings) == 1
