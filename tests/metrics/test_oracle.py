"""Every metric, every dtype, both passes, against an independent computation (metric_oracle.py)."""

from __future__ import annotations

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from metric_oracle import check

from whence import dtypes
from whence.metrics import measure, measure_many, numpy_pass

pairs = sys.modules["whence.metrics.measure"]  # the package has a function of this name

SIZES = (1, 7, 1000, 2047, 2048, 2049, 5000)
SHAPES = {
    1: (1, 1),
    7: (7,),
    1000: (10, 100),
    2047: (2047,),
    2048: (2, 1024),
    2049: (3, 683),
    5000: (50, 10, 10),
}
PASSES = pytest.mark.parametrize("kernels", [False, True], ids=["numpy", "kernels"])


def values(kind, n, rng):
    """Values that fit the type, with equal neighbours, zeros and small and large ones."""
    if kind.kind == "bool":
        return rng.integers(0, 2, n).astype(np.bool_)
    if kind.kind in ("int", "uint"):
        info = np.iinfo(kind.numpy)
        small = rng.integers(max(info.min, -50), 50, n)
        anything = rng.integers(info.min, info.max, n, dtype=kind.numpy, endpoint=True)
        return np.where(rng.random(n) < 0.9, small.astype(kind.numpy), anything)
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-3, 1, n)
    if kind.kind == "complex":
        x = x + 1j * rng.standard_normal(n)
    x[rng.random(n) < 0.05] = 0
    return x.astype(kind.numpy)


def near(x, kind, rng):
    """Mostly equal, otherwise off by rounding, by a lot, or of the other sign."""
    n = x.size
    if kind.kind == "bool":
        return x ^ (rng.random(n) < 0.2)
    y = x.copy()
    for share, factor in ((0.6, 1.001), (0.1, 1.5), (0.05, -1.0)):
        where = rng.random(n) < share
        if kind.kind in ("int", "uint"):
            y[where] = np.roll(x, 3)[where]
        else:
            y[where] = (
                x[where].astype(np.complex128 if kind.kind == "complex" else np.float64) * factor
            ).astype(kind.numpy)
    return y


def poison(x, kind, rng):
    """NaN, both infinities where the type has them, -0.0, the smallest and the largest number."""
    if kind.kind not in ("float", "complex"):
        return x
    x = x.copy()
    with np.errstate(all="ignore"):
        info = ml_dtypes.finfo(kind.numpy if kind.kind == "float" else np.float32)
        for value in (
            np.nan,
            np.inf,
            -np.inf,
            -0.0,
            float(info.smallest_subnormal),
            float(info.max),
        ):
            x[rng.random(x.size) < 0.02] = np.asarray(value).astype(kind.numpy)
        if kind.kind == "complex" and x.size > 4:
            x[3] = complex(np.nan, np.inf)
            x[4] = complex(1, -np.inf)
    return x


@PASSES
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_one_dtype(name, special, kernels):
    kind = dtypes.named(name)
    rng = np.random.default_rng(len(name) + special)
    made = []
    for n in SIZES:
        r = values(kind, n, rng)
        t = near(r, kind, rng)
        if special:
            if n > 8:
                shared = poison(np.zeros(n, kind.numpy), kind, rng)
                odd = shared != shared if kind.kind == "complex" else ~(shared == 0)
                r, t = np.where(odd, shared, r), np.where(odd, shared, t)
            r, t = poison(r, kind, rng), poison(t, kind, rng)
        made.append((r.reshape(SHAPES[n]), t.reshape(SHAPES[n])))
    with np.errstate(over="ignore", invalid="ignore"):
        for (r, t), measured in zip(made, measure_many(made, kernels=kernels)):
            check(measured, r, t)


@PASSES
def test_every_pair_of_dtypes(kernels):
    rng = np.random.default_rng(3)
    made = []
    for a, b in itertools.permutations(dtypes.DTYPES, 2):
        r, t = (
            poison(values(dtypes.named(x), 60, rng), dtypes.named(x), rng).reshape(6, 10)
            for x in (a, b)
        )
        with np.errstate(all="ignore"):
            if rng.random() < 0.5 and dtypes.named(b).kind == "float":
                t = (r.astype(np.complex128).real * 1.01).astype(dtypes.named(b).numpy)
        made.append((r, t))
    for (r, t), measured in zip(made, measure_many(made, kernels=kernels)):
        with np.errstate(over="ignore", invalid="ignore"):
            check(measured, r, t)


@PASSES
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "float8_e4m3fn", "int8"])
def test_large(name, kernels):
    kind = dtypes.named(name)
    rng = np.random.default_rng(5)
    r = values(kind, 300001, rng)
    t = poison(near(r, kind, rng), kind, rng)
    check(measure(r, t, kernels=kernels), r, t)


@PASSES
def test_chunks_of_a_large_tensor_agree_with_the_whole(kernels, monkeypatch):
    rng = np.random.default_rng(6)
    made = []
    for name, shape in (
        ("float32", (40, 97, 33)),
        ("bfloat16", (1500, 70)),
        ("float64", (90001,)),
        ("int8", (300, 512)),
        ("int64", (200, 100)),
    ):
        kind = dtypes.named(name)
        r = values(kind, int(np.prod(shape)), rng)
        t = poison(near(r, kind, rng), kind, rng)
        t[: t.size // 3] = r[: t.size // 3]
        made.append((r.reshape(shape), t.reshape(shape)))
    monkeypatch.setattr(pairs, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(pairs, "BATCH_BYTES", 20_000)
    monkeypatch.setattr(numpy_pass, "CHUNK", 3000)
    for threads in (1, 3):
        for (r, t), measured in zip(made, measure_many(made, kernels=kernels, threads=threads)):
            check(measured, r, t)


@PASSES
def test_joint_histogram_of_small_codes(kernels, monkeypatch):
    """8-bit pairs above 65536 elements take a pass of their own; here it is made to take small ones
    too.
    """
    monkeypatch.setattr(pairs, "JOINT_FROM", 1)
    rng = np.random.default_rng(8)
    names = ["int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"]
    made = []
    for a, b in itertools.product(names, repeat=2):
        for shape in ((1,), (7,), (13, 31), (4096,)):
            x, y = dtypes.named(a), dtypes.named(b)
            n = int(np.prod(shape))
            r = poison(values(x, n, rng), x, rng)
            t = near(r, x, rng) if a == b else poison(values(y, n, rng), y, rng)
            made.append((r.reshape(shape), t.reshape(shape)))
    for (r, t), measured in zip(made, measure_many(made, kernels=kernels)):
        check(measured, r, t)


@PASSES
@pytest.mark.parametrize("name", [n for n, d in dtypes.DTYPES.items() if d.bits <= 16])
def test_every_code_is_decoded(name, kernels):
    """All 256 or 65536 numbers of a type against float64, and against themselves in another
    order.
    """
    kind = dtypes.named(name)
    codes = np.arange(2 if kind.kind == "bool" else 1 << kind.bits, dtype=f"u{kind.itemsize}")
    x = codes.view(kind.numpy)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = x.astype(np.float64)
    for a, b in ((x, wide), (wide, x)):
        values = measure(a, b, kernels=kernels).values
        assert values["values_equal"] == 1.0
        assert values["nan_matched"] == np.isnan(wide).sum()
        assert values["inf_matched"] == np.isinf(wide).sum()
    if kind.kind == "float":
        check(measure(x, x[::-1].copy(), kernels=kernels), x, x[::-1].copy())
