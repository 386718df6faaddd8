"""Host memory: the content hash and the figures of one tensor, from its canonical bytes.

Canonical bytes are the elements in C order, little endian. Capture calls this for every tensor of a
program, so there is a way in by address (`statistics_at`, `digest_at`) that makes no array, and the
compiled pass is used where it is here. Without it numpy gives the same figures: counts, extremes
and checksum exactly, sums to 1e-12.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import xxhash

from whence import _kernels, dtypes
from whence.records import Sketch, Statistics

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

DIGEST_BYTES, HASH_BLOCK = _kernels.DIGEST_BYTES, _kernels.HASH_BLOCK
UNIT, UNIT_BYTES, SECRET_WORDS = _kernels.UNIT, _kernels.UNIT_BYTES, _kernels.SECRET_WORDS
"""What `join_units` is made of, for who computes it on a device."""
_CHUNK = 1 << 16
_VIEWS = (
    1 << 12
    # views of memory that are kept: a program uses the same places again, and a view costs more to
    # make than to find
)
_WIDTH: dict[str, tuple[int, int]] = {
    name: (d.code, d.itemsize) for name, d in dtypes.DTYPES.items()
}

_READ = 0x100  # PyBUF_READ
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def digest(data: Bytes) -> bytes:
    """xxh3_128 of the bytes, 16 bytes (its hex form is `Record.hash`). data: contiguous; empty is
    fine.
    """
    return xxhash.xxh3_128_digest(cast(Any, data))


def digest_at(address: int, nbytes: int) -> bytes:
    """xxh3_128 of `nbytes` bytes at an address, which must stay valid for the call. nbytes = 0: the
    address is not looked at.
    """
    return xxhash.xxh3_128_digest(memory_at(address, nbytes) if nbytes else b"")


@functools.lru_cache(maxsize=_VIEWS)
def memory_at(address: int, nbytes: int) -> memoryview:
    """The `nbytes` > 0 bytes at an address, read-only. To be read only while they are there."""
    return cast(memoryview, _view(address, nbytes, _READ))


@functools.lru_cache(maxsize=_VIEWS)
def bytes_at(address: int, nbytes: int) -> Bytes:
    """The bytes at an address as an array, read-only, without a copy. nbytes = 0: the address is
    not looked at.
    """
    return np.frombuffer(memory_at(address, nbytes), np.uint8) if nbytes else np.empty(0, np.uint8)


def statistics(
    data: Bytes, dtype: str, *, kernels: bool | None = None
) -> tuple[Statistics, Sketch]:
    """Figures and sketch of one tensor, in one pass.

    data: 1-D contiguous uint8, the canonical bytes; never written. dtype: a name in
    `dtypes.DTYPES`; any. Figures are over the finite elements, in float64, of |z| for complex (NaN
    if either part is, else Inf if either part is). No finite element, or none at all: min, max,
    mean, std and norm are None. Squares that leave the range of float64 are taken scaled. 64-bit
    integers are rounded to float64, except for counts and checksum. Sketch sums are None when they
    overflow. kernels: None takes the compiled pass where it is here; True demands it; False is
    numpy. Raises KeyError for an unknown dtype, ImportError where there is no compiled pass.
    """
    code, itemsize = _WIDTH[dtype]
    compiled = _kernels.chosen(kernels)
    if code < 0 or compiled is None:
        return _plain(data, dtype)
    address = data.__array_interface__["data"][0]
    if address % itemsize:
        data = data.copy()
        address = data.__array_interface__["data"][0]
    count = data.size // itemsize
    return _structs(count, compiled.describe(address, count, code, 1)) or _plain(data, dtype)


def statistics_at(address: int, nbytes: int, dtype: str) -> tuple[Statistics, Sketch]:
    """`statistics` of the tensor whose canonical bytes lie at an address: the fastest way in, no
    array is made.

    The memory must stay valid and unchanged for the call.
    """
    code, itemsize = _WIDTH[dtype]
    compiled = _kernels.compiled
    if compiled is not None and code >= 0 and address % itemsize == 0:
        count = nbytes // itemsize
        figures = _structs(count, compiled.describe(address, count, code, 1))
        if figures:
            return figures
    return _plain(bytes_at(address, nbytes), dtype)


def describe_many(
    contents: Sequence[tuple[int, int, str]],
) -> list[tuple[bytes, tuple[Statistics, Sketch] | None]]:
    """Digest and figures of many contents: (address, bytes, dtype). dtype "": no figures.

    An address that has bytes must be divisible by the size of an element, and its memory stay valid
    and unchanged for the call. With the compiled pass one call without the GIL, in one pass over
    the bytes; without it digests only. No figures of dtypes that the compiled pass does not take.
    """
    if _kernels.compiled is None:
        return [(digest_at(address, nbytes), None) for address, nbytes, _ in contents]
    return _described(_kernels.compiled.describe_many, contents)


def check_units() -> None:
    """Raise ImportError where there is no `join_units`."""
    _kernels.needed()


def units_bytes(nbytes: int, dtype: str) -> int:
    """Bytes of what `join_units` reads of a content. dtype "": no figures."""
    blocks = (nbytes - 1) // _kernels.HASH_BLOCK + 1
    units = -(-nbytes // _kernels.UNIT_BYTES) if dtype else 0
    return 64 + 64 * blocks + 8 * len(_kernels.UNIT) * units


def join_units(
    contents: Sequence[tuple[int, int, str]],
) -> list[tuple[bytes, tuple[Statistics, Sketch] | None]]:
    """`describe_many` of contents of at least DIGEST_BYTES, from what a device made of
    their bytes: (address of `units_bytes`, bytes of the content, dtype). In one call without the
    GIL. dtype: any that the compiled pass takes, but not float64. Raises ImportError where there is
    no compiled pass.
    """
    return _described(_kernels.needed().join_units, contents) if contents else []


def _described(
    kernel: Callable[..., None], contents: Sequence[tuple[int, int, str]]
) -> list[tuple[bytes, tuple[Statistics, Sketch] | None]]:
    """What a kernel that fills rows of `COUNTS` and `FIGURES` says of contents."""
    table = np.array(
        [(a, nbytes, _WIDTH[dtype][0] if dtype else -1) for a, nbytes, dtype in contents], np.int64
    )
    counts = np.zeros((len(contents), len(_kernels.COUNTS)), np.uint64)
    figures = np.zeros((len(contents), len(_kernels.FIGURES)))
    words = _kernels.SECRET_WORDS
    kernel(
        *(table.ctypes.data, len(contents), words.ctypes.data, counts.ctypes.data),
        figures.ctypes.data,
    )
    described: list[tuple[bytes, tuple[Statistics, Sketch] | None]] = []
    for (address, nbytes, dtype), whole, real in zip(contents, counts.tolist(), figures.tolist()):
        if nbytes >= _kernels.DIGEST_BYTES:
            name = (whole[1] << 64 | whole[0]).to_bytes(16, "big")
        else:
            name = digest_at(address, nbytes)
        taken = None
        if dtype and _WIDTH[dtype][0] >= 0:
            taken = _structs(nbytes // _WIDTH[dtype][1], (*whole[2:6], *real, whole[6]))
        described.append((name, taken))
    return described


def _structs(count: int, row: tuple[Any, ...]) -> tuple[Statistics, Sketch] | None:
    """A row of the compiled pass as structs; None when squares left the range of float64 and must
    be taken scaled.
    """
    n, nan, inf, zero, lo, hi, total, squares, spread, absolute, cube, fourth, check = row
    if n == 0:
        return Statistics(count, None, None, None, None, None, nan, inf, zero), Sketch(
            check, 0.0, 0.0, 0.0
        )
    if not 1e-280 < squares < 1e300 and (lo != 0.0 or hi != 0.0):
        return None
    figures = Statistics(
        count, lo, hi, total / n, math.sqrt(spread / n), math.sqrt(squares), nan, inf, zero
    )
    if fourth < 1e300:  # then no smaller power overflowed either
        return figures, Sketch(check, absolute, cube, fourth)
    return figures, Sketch(check, _bounded(absolute), _bounded(cube), _bounded(fourth))


def _bounded(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _chunks(data: Bytes, dtype: dtypes.DType) -> Iterator[tuple[Floats, int, int]]:
    """Finite magnitudes or values in float64, a chunk at a time, with how many were NaN and how
    many Inf.
    """
    step = _CHUNK * dtype.itemsize
    if data.size and data.__array_interface__["data"][0] % dtype.itemsize:
        data = data.copy()
    for start in range(0, data.size, step):
        part = data[start : start + step].view(dtype.numpy)
        if dtype.kind == "complex":
            wide = part.astype(np.complex128)
            nan = np.isnan(wide.real) | np.isnan(wide.imag)
            values = np.hypot(wide.real, wide.imag)
            inf = ~nan & (np.isinf(wide.real) | np.isinf(wide.imag))
        elif dtype.kind == "float":
            values = part.astype(np.float64)
            nan, inf = np.isnan(values), np.isinf(values)
        else:
            yield part.astype(np.float64), 0, 0
            continue
        yield values[~(nan | inf)], int(nan.sum()), int(inf.sum())


def _plain(data: Bytes, dtype_name: str) -> tuple[Statistics, Sketch]:
    """The same with numpy, 65536 elements at a time."""
    dtype = dtypes.named(dtype_name)
    count = data.size // dtype.itemsize
    aligned = data.copy() if data.size and data.__array_interface__["data"][0] % 8 else data
    check = _kernels.checksum(aligned, dtype.itemsize)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scale, row = 1.0, _accumulate(data, dtype, 1.0)
        n, nan, inf, zero, lo, hi, total, squares, spread, absolute, cube, fourth = row
        if n and not 1e-280 < squares < 1e300 and (lo != 0.0 or hi != 0.0):
            scale = math.ldexp(1.0, -min(max(math.frexp(max(abs(lo), abs(hi)))[1], -1000), 1000))
            total, squares, spread = _accumulate(data, dtype, scale)[6:9]
    sketch = Sketch(check, *(_bounded(v) for v in (absolute, cube, fourth)))
    if n == 0:
        return Statistics(count, None, None, None, None, None, nan, inf, zero), sketch
    mean, std, norm = total / n / scale, math.sqrt(spread / n) / scale, math.sqrt(squares) / scale
    return Statistics(count, lo, hi, _clip(mean), _clip(std), _clip(norm), nan, inf, zero), sketch


def _clip(value: float) -> float | None:
    """The norm of many values near the top of float64 has no float64: None rather than inf."""
    return value if math.isfinite(value) else None


def _accumulate(
    data: Bytes, dtype: dtypes.DType, scale: float
) -> tuple[int, int, int, int, float, float, float, float, float, float, float, float]:
    """n finite, nan, inf, zero, min, max (unscaled), then sum, squares, squared deviations
    (scaled), |x|, x^3, x^4 (unscaled).
    """
    n = nan = inf = zero = 0
    lo, hi = math.inf, -math.inf
    total = squares = spread = absolute = cube = fourth = 0.0
    for values, chunk_nan, chunk_inf in _chunks(data, dtype):
        nan, inf = nan + chunk_nan, inf + chunk_inf
        m = values.size
        if m == 0:
            continue
        zero += m - int(np.count_nonzero(values))
        lo, hi = min(lo, float(values.min())), max(hi, float(values.max()))
        square = values * values
        absolute += float(np.abs(values).sum())
        cube += float((square * values).sum())
        fourth += float((square * square).sum())
        if scale != 1.0:
            values = values * scale
            square = values * values
        chunk_total = float(values.sum())
        mean = chunk_total / m
        chunk_spread = float(np.square(values - mean).sum())
        if n:
            gap = mean - total / n
            chunk_spread += gap * gap * (n * m / (n + m))
        spread += chunk_spread
        total += chunk_total
        squares += float(square.sum())
        n += m
    return n, nan, inf, zero, lo, hi, total, squares, spread, absolute, cube, fourth
