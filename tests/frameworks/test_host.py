"""Statistics, sketch and digest of host memory: against an independent computation, and the
compiled pass against numpy.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whence import _kernels, dtypes
from whence.frameworks import host

SIZES = (0, 1, 7, 1000, 2047, 2048, 2049, 5000, 70001)
PASSES = pytest.mark.parametrize("kernels", [False, True], ids=["numpy", "kernels"])
MASK = (1 << 64) - 1


def bytes_of(x):
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def expected(x):
    """Figures in extended precision over the whole array at once."""
    with np.errstate(all="ignore"):
        if x.dtype.kind == "c":
            nan = np.isnan(x.real) | np.isnan(x.imag)
            inf = (np.isinf(x.real) | np.isinf(x.imag)) & ~nan
            values = np.abs(x.astype(np.clongdouble))
        else:
            values = x.astype(np.int64 if x.dtype == bool else x.dtype)
            values = (
                values.astype(np.longdouble)
                if x.dtype.kind in "iuf"
                else values.astype(np.float64).astype(np.longdouble)
            )
            nan, inf = np.isnan(values), np.isinf(values)
        values = values[~(nan | inf)]
        out = {
            "count": x.size,
            "nan": int(nan.sum()),
            "inf": int(inf.sum()),
            "zero": int((values == 0).sum()),
        }
        if values.size:
            out.update(
                min=values.min(),
                max=values.max(),
                mean=values.mean(),
                std=values.std(),
                norm=np.sqrt((values**2).sum()),
            )
        else:
            out.update(min=None, max=None, mean=None, std=None, norm=None)
        sums = {
            "abs_sum": np.abs(values).sum(),
            "cube_sum": (values**3).sum(),
            "fourth_sum": (values**4).sum(),
        }
        # a sum may only be as good as the terms that cancel in it
        slack = {"mean": 1e-13 * (out["norm"] or 0), "cube_sum": 1e-13 * np.abs(values**3).sum()}
    return out, sums, slack


def mix(code):
    z = (code + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def checksum(x):
    """Sum of splitmix64 over the codes, in Python integers."""
    total = 0
    for raw in bytes_of(x).reshape(-1, x.dtype.itemsize):
        words = [int.from_bytes(raw[o : o + 8].tobytes(), "little") for o in range(0, len(raw), 8)]
        z = mix(words[0])
        for word in words[1:]:
            z = mix((z + word) & MASK)
        total += z
    return total & MASK


def check(x, name, kernels):
    figures, sketch = host.statistics(bytes_of(x), name, kernels=kernels)
    want, sums, slack = expected(x)
    for field, value in want.items():
        got = getattr(figures, field)
        if value is None:
            assert got is None, field
        elif field in ("count", "nan", "inf", "zero") or (
            field in ("min", "max") and x.dtype.kind != "c"
        ):
            assert got == float(value), field
        else:
            np.testing.assert_allclose(
                got,
                float(value),
                rtol=1e-12,
                atol=min(float(slack.get(field, 0)), 1e300),
                err_msg=field,
            )
    for field, value in sums.items():
        got = getattr(sketch, field)
        if abs(float(value)) > 1e307:
            assert got is None or got > 1e307, field
        else:
            np.testing.assert_allclose(
                got,
                float(value),
                rtol=1e-12,
                atol=min(float(slack.get(field, 0)), 1e300),
                err_msg=field,
            )
    return sketch


def sample(name, n, special):
    kind = dtypes.named(name)
    rng = np.random.default_rng(n + special)
    if kind.kind == "bool":
        return rng.integers(0, 2, n).astype(bool)
    if kind.kind in ("int", "uint"):
        info = np.iinfo(kind.numpy)
        return rng.integers(info.min, info.max, n, dtype=kind.numpy, endpoint=True)
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-2, 1, n)
    if kind.kind == "complex":
        x = x + 1j * rng.standard_normal(n)
    x[rng.random(n) < 0.1] = 0
    if special:
        for value in (np.nan, np.inf, -np.inf, -0.0, 1e-40):
            x[rng.random(n) < 0.03] = value
        if kind.kind == "complex" and n > 3:
            x[0], x[1], x[2] = complex(np.nan, np.inf), complex(np.inf, 0), complex(1, -np.inf)
    with np.errstate(all="ignore"):
        return x.astype(kind.numpy)


@PASSES
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_against_extended_precision(name, special, kernels):
    for n in SIZES:
        x = sample(name, n, special)
        sketch = check(x, name, kernels)
        if n <= 2049:
            assert sketch.checksum == checksum(x), n


@pytest.mark.parametrize("name", [n for n, d in dtypes.DTYPES.items() if d.bits <= 16])
@PASSES
def test_every_code(name, kernels):
    kind = dtypes.named(name)
    x = np.arange(2 if kind.kind == "bool" else 1 << kind.bits, dtype=f"u{kind.itemsize}").view(
        kind.numpy
    )
    check(x, name, kernels)


@PASSES
@pytest.mark.parametrize("size", [1e300, 1e-300, 1e308, 5e-324])
def test_squares_out_of_range(size, kernels):
    check(np.array([size, -size, 0.0, size]), "float64", kernels)


@PASSES
def test_the_norm_of_many_largest_numbers_has_no_float(kernels):
    figures, sketch = host.statistics(bytes_of(np.full(9, 1.7e308)), "float64", kernels=kernels)
    assert (
        figures.norm is None and figures.max == 1.7e308 and figures.mean == pytest.approx(1.7e308)
    )
    assert (sketch.abs_sum, sketch.cube_sum, sketch.fourth_sum) == (None, None, None)


@PASSES
def test_mean_far_from_zero(kernels):
    x = 1e9 + np.arange(5000.0)
    assert host.statistics(bytes_of(x), "float64", kernels=kernels)[0].std == pytest.approx(
        np.arange(5000.0).std(), rel=1e-12
    )
    assert (
        host.statistics(bytes_of(np.full(5000, 0.1, np.float32)), "float32", kernels=kernels)[0].std
        < 1e-12
    )


@PASSES
def test_nothing_finite(kernels):
    figures, sketch = host.statistics(
        bytes_of(np.array([np.nan, np.inf], np.float32)), "float32", kernels=kernels
    )
    assert (
        figures.min,
        figures.max,
        figures.mean,
        figures.std,
        figures.norm,
        figures.nan,
        figures.inf,
    ) == (*(None,) * 5, 1, 1)
    assert sketch.abs_sum == 0.0
    empty, sketch = host.statistics(np.empty(0, np.uint8), "bfloat16", kernels=kernels)
    assert empty.count == 0 and empty.min is None and sketch.checksum == 0


@settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.sampled_from(list(dtypes.DTYPES)), st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_any_bytes_in_any_order(name, n, seed):
    """Both passes agree on random bits, and a shuffle changes nothing but the content hash."""
    kind = dtypes.named(name)
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, kind.itemsize), dtype=np.uint8)
    if kind.kind == "bool":
        raw &= 1
    (a, sketch), (b, other) = (
        host.statistics(raw.reshape(-1), name, kernels=k) for k in (False, True)
    )
    assert (a.count, a.min, a.max, a.nan, a.inf, a.zero) == (
        b.count,
        b.min,
        b.max,
        b.nan,
        b.inf,
        b.zero,
    )
    assert sketch.checksum == other.checksum
    shuffled = rng.permutation(raw)
    again = host.statistics(shuffled.reshape(-1), name, kernels=True)[1]
    assert again.checksum == sketch.checksum
    changed = raw.copy()
    changed[rng.integers(n)] ^= 1
    assert host.statistics(changed.reshape(-1), name, kernels=True)[1].checksum != sketch.checksum


@pytest.fixture(params=[False, True], ids=["numpy", "kernels"])
def compiled(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(_kernels, "compiled", None)
    return request.param


def test_by_address_and_unaligned(compiled):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    raw = bytes_of(x)
    odd = np.empty(raw.size + 1, np.uint8)[1:]
    odd[:] = raw
    want = host.statistics(raw, "float32", kernels=False)
    got = [host.statistics(raw, "float32"), host.statistics(odd, "float32")]
    got += [host.statistics_at(d.ctypes.data, d.size, "float32") for d in (raw, odd)]
    for figures, sketch in got:
        assert figures.mean == pytest.approx(want[0].mean, rel=1e-12)
        assert sketch.checksum == want[1].checksum
    assert host.statistics_at(0, 0, "int8")[0].count == 0
    wide = np.array([1 + 2j, 3j])
    assert host.statistics_at(wide.ctypes.data, wide.nbytes, "complex128")[0].max == 3.0
    big = np.full(4, 1e300)
    figures, _ = host.statistics_at(big.ctypes.data, big.nbytes, "float64")
    assert figures.norm == pytest.approx(2e300)


def test_read_only_bytes():
    raw = bytes_of(np.arange(9.0))
    raw.flags.writeable = False
    assert host.statistics(raw, "float64", kernels=True)[0].max == 8.0


def test_unknown_dtype():
    with pytest.raises(KeyError):
        host.statistics(np.empty(0, np.uint8), "float128")


def test_digest():
    for n in (0, 1, 4096):
        raw = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
        want = xxhash.xxh3_128(raw.tobytes()).digest()
        assert host.digest(raw) == want and len(want) == 16
        assert host.digest_at(raw.ctypes.data, n) == want
    assert host.digest_at(0, 0) == host.digest(np.empty(0, np.uint8))


def test_sign_of_zero_and_finite_types():
    figures, _ = host.statistics(bytes_of(np.array([-0.0, 0.0])), "float64", kernels=False)
    assert figures.zero == 2 and figures.norm == 0.0
    x = np.array([448, -448]).astype(ml_dtypes.float8_e4m3fn)
    assert host.statistics(bytes_of(x), "float8_e4m3fn", kernels=True)[0].norm == pytest.approx(
        448 * math.sqrt(2)
    )


def test_many_at_once_are_as_one_by_one(compiled):
    rng = np.random.default_rng(0)
    names = [n for n, d in dtypes.DTYPES.items() if d.itemsize <= 8 and not n.startswith("complex")]
    lengths = (0, 8, 232, 240, 248, 1016, 1024, 1032, 1088, 2048, 5000, 70_000)
    contents, arrays = [], []
    for n, nbytes in enumerate((*lengths, *range(241, 330), *range(1020, 1110))):
        dtype = names[n % len(names)] if nbytes % 8 == 0 else ("int8", "")[n % 2]
        room = np.zeros(nbytes + 8, np.uint8)
        data = room[-room.ctypes.data % 8 :][:nbytes]
        data[:] = rng.integers(0, 256, nbytes)
        arrays.append(data)
        contents.append((data.ctypes.data if nbytes else 0, nbytes, dtype))
    got = host.describe_many(contents)
    assert host.describe_many([]) == []
    for data, (_, nbytes, dtype), (digest, figures) in zip(arrays, contents, got, strict=True):
        assert digest == xxhash.xxh3_128_digest(data.tobytes()), nbytes
        if not compiled or not dtype:
            assert figures is None
            continue
        one = host.statistics(data, dtype, kernels=True)
        # Squares that leave the range of float64 are left to the way of one by one.
        assert figures == one or (figures is None and one[0].norm not in (None, 0.0))
    taken = [f is not None for f, (_, _, dtype) in zip([f for _, f in got], contents) if dtype]
    assert sum(taken) >= 0.8 * len(taken) * compiled


def test_complex_ones_among_many_have_a_digest_only():
    data = np.arange(512, dtype=np.complex64)
    (got,) = host.describe_many([(data.ctypes.data, data.nbytes, "complex64")])
    assert got == (xxhash.xxh3_128_digest(data.tobytes()), None)
