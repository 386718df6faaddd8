"""Converts device layouts of Ascend to logical axes: joins blocks and cuts off padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from whence.dtypes import Array
from whence.readers.encodings import limits

FORMATS = {
    0: "NCHW", 1: "NHWC", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 5: "NC1C0HWPAD", 6: "NHWC1C0",
    7: "FSR_NCHW", 8: "FRACTAL_DECONV", 9: "C1HWNC0", 10: "FRACTAL_DECONV_TRANSPOSE",
    11: "FRACTAL_DECONV_SP_STRIDE_TRANS", 12: "NC1HWC0_C04", 13: "FRACTAL_Z_C04", 14: "CHWN",
    15: "FRACTAL_DECONV_SP_STRIDE8_TRANS", 16: "HWCN", 17: "NC1KHKWHWC0", 18: "BN_WEIGHT",
    19: "FILTER_HWCK", 25: "C1HWNCoC0", 26: "MD", 27: "NDHWC", 28: "FRACTAL_ZZ", 29: "FRACTAL_NZ",
    30: "NCDHW", 31: "DHWCN", 32: "NDC1HWC0", 33: "FRACTAL_Z_3D", 34: "CN", 35: "NC", 36: "DHWNC",
    37: "FRACTAL_Z_3D_TRANSPOSE", 38: "FRACTAL_ZN_LSTM", 39: "FRACTAL_Z_G", 40: "RESERVED",
    41: "ALL", 42: "NULL", 43: "ND_RNN_BIAS", 44: "FRACTAL_ZN_RNN", 45: "YUV", 46: "YUV_A",
    47: "NCL", 48: "FRACTAL_Z_WINO", 49: "C1HWC0",
}  # fmt: skip
# Formats that permute axes without splitting them: these are plain tensors.
_PLAIN = frozenset({
    "NCHW", "NHWC", "ND", "CHWN", "HWCN", "MD", "NDHWC", "NCDHW", "DHWCN", "CN", "NC", "DHWNC",
    "ALL", "NCL",
})  # fmt: skip


class Layout(NamedTuple):
    """How a tensor is stored. shape: logical. apply: stored array -> logical array. why: the reason
    if it keeps its stored shape although the logical shape differs, else "".
    """

    shape: tuple[int, ...]
    apply: Callable[[Array], Array]
    why: str = ""


def logical(
    code: int, stored: tuple[int, ...], original: tuple[int, ...], groups: int = 1
) -> Layout:
    """Returns the logical layout of a tensor stored in a device format.

    code: aclFormat or GE format. stored: shape on the device. original: logical shape, () when not
    stated; then blocks are joined and the padding stays.
    """
    name = FORMATS.get(code, f"format {code}")
    if name in _PLAIN or code < 0 or limits.count(stored) == 0:
        return Layout(stored, _same)
    if groups > 1 and name.startswith("FRACTAL_Z"):
        return Layout(stored, _same, f"{name} of {groups} groups is kept as it is on the device")
    layout = _WAYS[name](stored, original) if name in _WAYS else None
    if layout is None:
        return Layout(
            stored,
            _same,
            f"{name} {list(stored)} of logical {list(original)} is kept as it is on the device",
        )
    return layout


def _same(array: Array) -> Array:
    return array


def _moved(
    stored: tuple[int, ...],
    split: tuple[int, ...],
    axes: tuple[int, ...],
    whole: tuple[int, ...],
    cut: tuple[int, ...],
) -> Layout:
    """Returns a layout that splits into blocks, reorders and joins them to `whole`, and cuts to
    `cut`.
    """

    def apply(array: Array) -> Array:
        joined = array.reshape(split).transpose(axes).reshape(whole)
        return joined[tuple(slice(extent) for extent in cut)]

    return Layout(cut, apply)


def _fits(cut: tuple[int, ...], whole: tuple[int, ...], free: tuple[int, ...]) -> bool:
    """Whether `cut` is `whole` without the padding of its `free` axes."""
    return len(cut) == len(whole) and all(
        c <= w if axis in free else c == w for axis, (c, w) in enumerate(zip(cut, whole))
    )


def _fractal_nz(stored: tuple[int, ...], original: tuple[int, ...]) -> Layout | None:
    if len(stored) < 4:
        return None
    *front, c1, n1, n0, c0 = stored
    k = len(front)
    whole = (*front, n1 * n0, c1 * c0)
    logical_shape = (1, *original) if len(original) == 1 else original
    if not original:
        cut: tuple[int, ...] = whole
    elif _fits(logical_shape, whole, (k, k + 1)):
        cut = logical_shape
    elif len(logical_shape) > 2 and limits.count(logical_shape[:-2]) == limits.count(tuple(front)):
        cut = (*front, *logical_shape[-2:])  # leading axes in another grouping
        if not _fits(cut, whole, (k, k + 1)):
            return None
    else:
        return None
    way = _moved(stored, stored, (*range(k), k + 1, k + 2, k, k + 3), whole, cut)
    final = original or cut
    return Layout(final, lambda array: way.apply(array).reshape(final))


def _channel_blocks(stored: tuple[int, ...], original: tuple[int, ...]) -> Layout | None:
    """Returns the layout (N, [D,] C1, H, W, C0), also for a logical tensor with channels last."""
    if len(stored) not in (5, 6):
        return None
    n, *deep, c1, h, w, c0 = stored
    d = len(deep)
    first = (n, c1 * c0, *deep, h, w)
    last = (n, *deep, h, w, c1 * c0)
    if not original or _fits(original, first, (1,)):
        return _moved(
            stored,
            stored,
            (0, 1 + d, 4 + d, *range(1, 1 + d), 2 + d, 3 + d),
            first,
            original or first,
        )
    if _fits(original, last, (3 + d,)):
        return _moved(
            stored, stored, (0, *range(1, 1 + d), 2 + d, 3 + d, 1 + d, 4 + d), last, original
        )
    return None


def _fractal_z(stored: tuple[int, ...], original: tuple[int, ...]) -> Layout | None:
    """([D,] C1*H*W, N1, N0, C0) of weights (N, C, [D,] H, W), or of ([D,] H, W, C, N)."""
    if len(stored) != 4 or len(original) not in (4, 5) or not limits.count(original):
        return None
    rows, n1, n0, c0 = stored
    d = len(original) - 4
    for channels_first in (True, False):
        n, c = original[:2] if channels_first else (original[-1], original[-2])
        deep, (h, w) = (
            (original[2 : 2 + d], original[2 + d :])
            if channels_first
            else (original[:d], original[d : d + 2])
        )
        blocks = rows // (limits.count(deep) * h * w)
        whole_n, whole_c = n1 * n0, blocks * c0
        if (
            blocks * limits.count(deep) * h * w != rows
            or n > whole_n
            or c > whole_c
            or whole_c - c >= c0
            or whole_n - n >= n0
        ):
            continue
        split = (*deep, blocks, h, w, n1, n0, c0)
        deeps, (b, y, x, i, j, k) = tuple(range(d)), range(d, d + 6)
        if channels_first:
            return _moved(
                stored, split, (i, j, b, k, *deeps, y, x), (whole_n, whole_c, *deep, h, w), original
            )
        return _moved(
            stored, split, (*deeps, y, x, b, k, i, j), (*deep, h, w, whole_c, whole_n), original
        )
    return None


_WAYS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], Layout | None]] = {
    "FRACTAL_NZ": _fractal_nz, "NC1HWC0": _channel_blocks, "NC1HWC0_C04": _channel_blocks,
    "NDC1HWC0": _channel_blocks, "FRACTAL_Z": _fractal_z, "FRACTAL_Z_3D": _fractal_z,
}  # fmt: skip
