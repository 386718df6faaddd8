"""The kernel that reads tensors where they lie on a device: what digest and figures need of them.

XXH3 is a chain over blocks of 1024 bytes, but what a block adds to its eight accumulators depends
on its bytes alone. So the device sums these up, and the figures of every unit of 32; the host,
which gets a sixteenth of the bytes, ends the chain and joins the figures
(`_kernels.join_units`). Written in Triton: a program reads a unit at a time, as 64-bit words that
hold elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from whence.frameworks import host

PROGRAMS = 16
"""Number of programs for each row of the table; each takes every sixteenth unit."""
_SHORT = tl.constexpr(host.DIGEST_BYTES)
_BLOCK = tl.constexpr(host.HASH_BLOCK)
_STEP = tl.constexpr(4 * host.HASH_BLOCK)
_UNIT = tl.constexpr(host.UNIT_BYTES)
_ROW = tl.constexpr(len(host.UNIT))


@triton.jit
def _mixed(z):
    """As `_kernels._mix`."""
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _value(bits, code, unused):
    """Elements in float64, from their bits in 64-bit words. code: of the kernels, as `_decode` has
    them; all types but float64. unused: how many upper bits of the word an element has not.
    """
    signed = (bits << unused).to(tl.int64, bitcast=True) >> unused.to(tl.int64)
    is_signed = (code == 5) | (code == 8) | (code == 10) | (code == 12)
    whole = tl.where(is_signed, signed.to(tl.float64), bits.to(tl.float64))
    single = tl.where(code == 1, bits << 16, bits).to(tl.uint32).to(tl.float32, bitcast=True)
    # An e5m2 is the upper byte of a half; an e4m3fn times 2^-8 is one, 0x7f and 0xff are NaN.
    low = bits & 0x7F
    half = tl.where(code == 3, bits << 8, bits)
    half = tl.where(code == 4, ((bits & 0x80) << 8) | (low << 7), half)
    halved = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    halved = tl.where(code == 4, tl.where(low == 0x7F, float("nan"), halved * 256.0), halved)
    real = tl.where(code < 2, single, halved).to(tl.float64)
    return tl.where(code < 5, real, whole)


@triton.jit
def _words(data, at, n):
    """The words at these bytes of a content of n, 0 behind its end."""
    return tl.load(data + (at >> 3), mask=at < n, other=0)


@triton.jit
def _describe(data, unit, n, code, size, row):
    """Write the figures of one unit. size: of an element; row: address of the figures."""
    bits = (8 * size).to(tl.uint64)
    unused = 64 - bits
    steps = tl.arange(0, _STEP // 8).to(tl.int64) * 8
    first = unit * _UNIT
    end = tl.minimum(first + _UNIT, n)
    check = tl.zeros_like(steps).to(tl.uint64)
    nan, inf, zero = tl.zeros_like(steps), tl.zeros_like(steps), tl.zeros_like(steps)
    none = steps.to(tl.float64) * 0.0
    least, most = none + float("inf"), none - float("inf")
    total, squares, absolute, cube, fourth = none, none, none, none, none
    for start in range(first, end, _STEP):
        at = start + steps
        words = _words(data, at, n)
        for k in range(8 // size):
            pattern = (words >> (k * bits)) << unused >> unused
            is_there = at + k * size < n
            x = _value(pattern, code, unused)
            is_inf = (tl.abs(x) == float("inf")) & is_there
            is_nan = (x != x) & is_there
            counts = is_there & (is_inf == 0) & (is_nan == 0)
            nan += is_nan.to(tl.int64)
            inf += is_inf.to(tl.int64)
            zero += ((x == 0) & is_there).to(tl.int64)
            check += tl.where(is_there, _mixed(pattern), 0)
            least = tl.minimum(least, tl.where(counts, x, float("inf")))
            most = tl.maximum(most, tl.where(counts, x, float("-inf")))
            x = tl.where(counts, x, 0.0)
            total += x
            squares += x * x
            absolute += tl.abs(x)
            cube += x * x * x
            fourth += (x * x) * (x * x)
    unit_nan, unit_inf, unit_total = tl.sum(nan, 0), tl.sum(inf, 0), tl.sum(total, 0)
    finite = (end - first) // size - unit_nan - unit_inf
    mean = unit_total / tl.maximum(finite, 1).to(tl.float64)
    deviations = none
    for start in range(first, end, _STEP):
        at = start + steps
        words = _words(data, at, n)
        for k in range(8 // size):
            x = _value((words >> (k * bits)) << unused >> unused, code, unused)
            gap = tl.where((at + k * size < n) & (tl.abs(x) < float("inf")), x - mean, 0.0)
            deviations += gap * gap
    counted = row.to(tl.pointer_type(tl.int64))
    tl.store(counted, unit_nan)
    tl.store(counted + 1, unit_inf)
    tl.store(counted + 2, tl.sum(zero, 0))
    tl.store(row.to(tl.pointer_type(tl.uint64)) + 3, tl.sum(check, 0))
    real = row.to(tl.pointer_type(tl.float64))
    tl.store(real + 4, tl.min(least, 0))
    tl.store(real + 5, tl.max(most, 0))
    tl.store(real + 6, unit_total)
    tl.store(real + 7, tl.sum(squares, 0))
    tl.store(real + 8, tl.sum(deviations, 0))
    tl.store(real + 9, tl.sum(absolute, 0))
    tl.store(real + 10, tl.sum(cube, 0))
    tl.store(real + 11, tl.sum(fourth, 0))


@triton.jit
def _copy(source, destination, n, most: tl.constexpr):
    """n <= most bytes from one address to another."""
    i = tl.arange(0, most)
    data = tl.load(source.to(tl.pointer_type(tl.uint8)) + i, mask=i < n, other=0)
    tl.store(destination.to(tl.pointer_type(tl.uint8)) + i, data, mask=i < n)


@triton.jit
def _hash(data, unit, n, sums, secret):
    """Write what the whole stripes of each block of one unit add to the accumulators. sums: address
    of those of the first block.
    """
    i = tl.arange(0, _STEP // 8)
    secrets = tl.load(secret + ((i >> 3) & 15) + (i & 7))
    first = unit * _UNIT
    for start in range(first, tl.minimum(first + _UNIT, n), _STEP):
        at = start + i.to(tl.int64) * 8
        counts = at // 64 < (n - 1) // 64
        swapped = tl.load(data + ((at >> 3) ^ 1), mask=counts, other=0)
        key = _words(data, at, n) ^ secrets
        added = tl.where(counts, swapped + (key & 0xFFFFFFFF) * (key >> 32), 0)
        blocks = tl.sum(tl.reshape(added, (_STEP // _BLOCK, _BLOCK // 64, 8)), 1)
        block = start // _BLOCK + tl.arange(0, _STEP // _BLOCK)
        place = sums.to(tl.pointer_type(tl.uint64)) + 8 * block[:, None] + tl.arange(0, 8)[None, :]
        tl.store(place, blocks, mask=(block <= (n - 1) // _BLOCK)[:, None])


@triton.jit(do_not_specialize=["table"])
def read_units(table, secret, columns: tl.constexpr, programs: tl.constexpr):
    """Read what the rows of a table mean: (rows, programs) of it.

    table: address of rows of int64 as `device_figures.COLUMNS`; each address must be readable by
    the device, that of a content of at least DIGEST_BYTES divisible by 8. secret: the first words
    of `_kernels.SECRET_WORDS`, on the device.
    """
    row = table.to(tl.pointer_type(tl.int64)) + columns * tl.program_id(0)
    address, n, code, size = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    out, first, end = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    program = tl.program_id(1)
    if n < _SHORT:
        if program == 0:
            _copy(address, out, n, 256)
    else:
        if (program == 0) & (first == 0):
            _copy(address + n - 64, out, 64, 64)
        data = address.to(tl.pointer_type(tl.uint64))
        sums = out + 64
        rows = sums + 64 * ((n - 1) // _BLOCK + 1)
        for unit in range(first + program, end, programs):
            _hash(data, unit, n, sums, secret)
            if code >= 0:
                _describe(data, unit, n, code, size, rows + 8 * _ROW * unit)
