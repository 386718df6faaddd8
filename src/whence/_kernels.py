"""What the compiled kernels take and leave: statistics of one tensor, and the comparison of many
pairs in one call without the GIL.

The kernels are C++ (`native/`), in the extension `whence._compiled`, which pip builds where there
is a compiler. Without it, or with WHENCE_KERNELS=numpy, `compiled` is None, and callers take numpy:
the same counts and extremes, sums to 1e-12.

How a pair is compared. Each tensor is walked in blocks of 2048 elements that stay in the
first-level cache, each block by several simple loops: bytes equal? -> decode to float scratch ->
integer pass over the bits (differences, signs, non-finite) -> figures of each side -> errors ->
relative error, thresholds, histogram, ULP. Everything is summed in float64 and in sixteen lanes:
element i of a block goes to lane i % 16, and lanes are added by halves. So every processor gives
the same bits. Pairs of 8-bit types go through the joint histogram of their 256 x 256 codes.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]

BLOCK = 2048
THRESHOLDS = np.array([1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8])
BINS = 64

# Columns of a result row, float64. Sums over the finite elements of one side; "pair" sums over
# places finite on both.
F_NAMES = (
    "r_sum", "t_sum", "r_sq", "t_sq", "r_m2", "t_m2", "r_min", "r_max", "t_min", "t_max", "rr",
    "tt", "rt", "dd", "d_sum", "ad_sum", "ad_max", "rel_sum", "rel_max", "ulp_sum", "ulp_max",
    "row_worst", "channel_worst", "row_dd", "row_rr", "r_scale", "t_scale", "rr_scale",
    "tt_scale", "dd_scale",
)  # fmt: skip
# Columns of a result row, int64. Thresholds: the last eight.
I_NAMES = (
    "n", "r_finite", "t_finite", "pairs", "r_nan", "t_nan", "nan_both", "nan_mismatch", "r_inf",
    "t_inf", "inf_match", "inf_mismatch", "sign", "bytes_differ", "values_differ", "close",
    "rel_skipped", "ad_index", "bad_index", "row_index", "channel_index", "ad_block", "over_0",
    "over_1", "over_2", "over_3", "over_4", "over_5", "over_6", "over_7",
)  # fmt: skip
NF, NI = len(F_NAMES), len(I_NAMES)
PAIR = (
    *("r_address", "t_address", "n", "r_code", "t_code", "channels"),
    *("d_channels", "r_channels", "path"),
)
"""What `compare` takes: int64, one row a tensor, or a chunk of one that begins at a row. n:
elements, with PATH_SAME bytes. channels: length of the last axis, or 0. d_channels, r_channels:
addresses where a chunk leaves its sums of squares by channel, of the difference and the reference;
0 for a whole tensor.
"""
PATH_32, PATH_64, PATH_8, PATH_SAME = 0, 1, 2, 3

# Words of XXH3's default secret, as its long form reads them: at every eighth byte, then eight at
# byte 121 (the last stripe), eight at 11 and eight at 117 (both halves of the end).
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET_PARTS = (0, 192), (121, 64), (11, 64), (117, 64)
SECRET_WORDS = np.concatenate(
    [np.frombuffer(_SECRET[start : start + size], "<u8") for start, size in _SECRET_PARTS]
)
DIGEST_BYTES = 241
"""Contents from here on get a digest from `describe_many`; XXH3 has other ways for shorter ones."""

# Columns of its results: uint64 (the digest in two halves, counts), and float64.
COUNTS = "low", "high", "finite", "nan", "inf", "zero", "checksum"
FIGURES = "min", "max", "sum", "squares", "deviations", "absolute", "cube", "fourth"

HASH_BLOCK = 1024
"""Bytes that XXH3 takes in between two scrambles of its accumulators."""
UNIT_BYTES = 32 * HASH_BLOCK
"""Of a content that a device describes by itself, in one row of `UNIT`."""
UNIT = (
    *("nan", "inf", "zero", "checksum"),
    *("min", "max", "sum", "squares", "deviations", "absolute", "cube", "fourth"),
)
"""Of its finite elements: four uint64, and float64 as in `FIGURES`. deviations: squared, from the
mean of the unit. `join_units` makes one content of them: at its address lie the last 64 bytes of
the content, eight uint64 for each HASH_BLOCK that it has or begins (what its whole stripes add to
the accumulators; that of the last byte is none), and, but with code -1, a row for each UNIT_BYTES.
"""

_INSTALL = "install whence again where there is a C++ compiler, or from a wheel"


def _loaded() -> tuple[ModuleType | None, str]:
    """The extension, or why there is none."""
    asked = os.environ.get("WHENCE_KERNELS", "")
    if asked == "numpy":
        return None, "WHENCE_KERNELS=numpy asks for it"
    try:
        extension = importlib.import_module("whence._compiled")
    except ImportError as error:
        if asked == "compiled":
            raise
        is_there = not isinstance(error, ModuleNotFoundError)
        why = f"they cannot be loaded ({error})" if is_there else "they were not built"
        return None, f"{why}: {_INSTALL}"
    names = [part.split() for part in extension.COLUMNS.split(";")]
    if names != [list(PAIR), list(F_NAMES), list(I_NAMES)]:
        return None, f"they were built from another version of the source: {_INSTALL}"
    return extension, ""


compiled, _why_not = _loaded()
"""The extension; None where numpy does its work. Its functions are documented there."""


def needed() -> ModuleType:
    """The extension. Raises ImportError where it is not in use."""
    if compiled is None:
        raise ImportError(f"whence has no compiled kernels: {_why_not}")
    return compiled


def chosen(kernels: bool | None) -> ModuleType | None:
    """The extension, or None for numpy. kernels: None for what is here, True to demand the
    extension, False for numpy. Raises ImportError where it is demanded and not in use.
    """
    if kernels is None:
        return compiled
    return needed() if kernels else None


def about() -> str:
    """Which kernels are in use; of numpy's, how to get the others."""
    if compiled is None:
        return f"numpy, which is slower than the compiled kernels; {_why_not}"
    return "compiled"


def checksum(data: Bytes, itemsize: int) -> int:
    """The checksum of `describe` with numpy alone: sum modulo 2^64 over the mixed bits of each
    element.

    data: 1-D uint8 array, C-contiguous, canonical bytes. itemsize: 1, 2, 4, 8, or 16, where the
    second word is added to the mixed first and mixed again. Equal for equal multisets of elements,
    whatever their order; else different but for one chance in 2^64.
    """
    if itemsize == 1:
        table = _mix_plain(np.arange(256, dtype=np.uint64))
        return int(
            (np.bincount(data, minlength=256).astype(np.uint64) * table).sum(dtype=np.uint64)
        )
    total = 0
    step = (1 << 16) * itemsize
    for o in range(0, data.size, step):
        part = data[o : o + step]
        if itemsize == 16:
            pair = part.view(np.uint64).reshape(-1, 2)
            mixed = _mix_plain(_mix_plain(pair[:, 0]) + pair[:, 1])
        else:
            mixed = _mix_plain(part.view(f"u{itemsize}").astype(np.uint64))
        total += int(mixed.sum(dtype=np.uint64))
    return total % (1 << 64)


def _mix_plain(z: Words) -> Words:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
