"""The result of one pass over a pair: a row of sums, counts and extremes from which every metric
follows.

The passes (`whence._compiled.compare`, `numpy_pass.accumulate`) fill rows, `join` merges the rows
of the chunks of a large tensor, and the metric files read columns by name. Columns are listed in
`whence._kernels` (F_NAMES, I_NAMES).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence._kernels import BINS, F_NAMES, I_NAMES, NF, NI

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

F: dict[str, int] = {name: i for i, name in enumerate(F_NAMES)}
I: dict[str, int] = {name: i for i, name in enumerate(I_NAMES)}  # noqa: E741

_F_EMPTY = np.zeros(NF)
_F_EMPTY[[F["r_min"], F["t_min"]]] = np.inf
_F_EMPTY[[F["r_max"], F["t_max"]]] = -np.inf
_F_EMPTY[[F["ad_max"], F["row_worst"], F["channel_worst"]]] = -1.0
SCALES = [F[name] for name in ("r_scale", "t_scale", "rr_scale", "tt_scale", "dd_scale")]
"""Factors by which the values were multiplied before they were summed: for each side, and over the
elements that are finite on both sides.
"""
_F_EMPTY[SCALES] = 1.0
_I_EMPTY = np.zeros(NI, np.int64)
_PLACES = [I[name] for name in ("ad_index", "bad_index", "row_index", "channel_index", "ad_block")]
_I_EMPTY[_PLACES] = -1
_F_SUMS = [
    F[n]
    for n in (
        "r_sum",
        "t_sum",
        "r_sq",
        "t_sq",
        "rr",
        "tt",
        "rt",
        "dd",
        "d_sum",
        "ad_sum",
        "rel_sum",
        "ulp_sum",
    )
]
_I_SUMS = [i for i in range(NI) if i not in _PLACES]


@dataclass(slots=True)
class Accumulators:
    """Rows of k pairs: floats (k, NF), ints (k, NI), histogram (k, BINS), and the properties of the
    arrays that metrics need.

    channels: length of the last axis where rows and channels were measured, else 0. ulp: whether
    both sides have one float dtype. signed: whether opposite signs have a meaning (not for
    complex). r_top, t_top: largest finite magnitude of the dtype where reaching it means saturation
    (floating-point), else inf. permuted: 1, 0, or NaN where it was not checked.
    """

    floats: Floats
    ints: Ints
    histogram: Ints
    channels: Ints
    ulp: np.ndarray[Any, np.dtype[np.bool_]]
    signed: np.ndarray[Any, np.dtype[np.bool_]]
    r_top: Floats
    t_top: Floats
    permuted: Floats

    def __getitem__(self, column: str) -> Floats:
        """A column of the pass as float64, one value per pair. Raises KeyError."""
        place = F.get(column)
        return (
            self.floats[:, place]
            if place is not None
            else self.ints[:, I[column]].astype(np.float64)
        )


def empty(count: int) -> Accumulators:
    """Rows as the passes expect them at the start."""
    return Accumulators(
        np.tile(_F_EMPTY, (count, 1)),
        np.tile(_I_EMPTY, (count, 1)),
        np.zeros((count, BINS), np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.bool_),
        np.ones(count, np.bool_),
        np.full(count, np.inf),
        np.full(count, np.inf),
        np.zeros(count),
    )


@np.errstate(all="ignore")
def join(whole: Accumulators, part: Accumulators, offset: int, rows_before: int) -> None:
    """Merge row 0 of `part`, a chunk that begins at flat element `offset` and row `rows_before`,
    into row 0 of `whole`.

    Chunks come in order, so that the first of equal extremes wins. Squared deviations are merged by
    the formula of Chan, Golub and LeVeque (1979). Worst channels are not merged here: they follow
    from the sums over all chunks.
    """
    wf, wi, pf, pi = whole.floats[0], whole.ints[0], part.floats[0], part.ints[0]
    for side in ("r", "t"):
        n0, n1 = float(wi[I[side + "_finite"]]), float(pi[I[side + "_finite"]])
        m2, total = F[side + "_m2"], F[side + "_sum"]
        gap = pf[total] / n1 - wf[total] / n0 if n0 and n1 else 0.0
        wf[m2] += pf[m2] + (gap * gap * (n0 * n1 / (n0 + n1)) if n0 and n1 else 0.0)
        wf[F[side + "_min"]] = min(wf[F[side + "_min"]], pf[F[side + "_min"]])
        wf[F[side + "_max"]] = max(wf[F[side + "_max"]], pf[F[side + "_max"]])
    wf[_F_SUMS] += pf[_F_SUMS]
    wi[_I_SUMS] += pi[_I_SUMS]
    whole.histogram[0] += part.histogram[0]
    for largest in ("rel_max", "ulp_max"):
        wf[F[largest]] = max(wf[F[largest]], pf[F[largest]])
    for largest, place, start in (
        ("ad_max", "ad_index", offset),
        ("row_worst", "row_index", rows_before),
    ):
        if pf[F[largest]] > wf[F[largest]]:
            wf[F[largest]] = pf[F[largest]]
            wi[I[place]] = pi[I[place]] + start if pi[I[place]] >= 0 else -1
    if wi[I["bad_index"]] < 0 <= pi[I["bad_index"]]:
        wi[I["bad_index"]] = pi[I["bad_index"]] + offset


def worst_channel(whole: Accumulators, errors: Floats, references: Floats) -> None:
    """Set row 0's worst channel from the 2-norms of error and reference, both (channels,)."""
    with np.errstate(all="ignore"):
        ratio = np.where(errors == 0.0, 0.0, errors / references)
    place = int(ratio.argmax())
    with np.errstate(over="ignore"):
        whole.floats[0, F["channel_worst"]] = np.square(ratio[place])
    whole.ints[0, I["channel_index"]] = place


def edges() -> tuple[float, ...]:
    """Lower edges of the bins of `Measured.histogram`; bin k counts edges[k] <= |t - r| < edges[k +
    1].

    Bin 0 counts exact zeros only, bin 1 all errors below 2^-46, and the last bin all errors from
    2^15 up. Only elements that are finite on both sides are counted.
    """
    return (0.0, math.ulp(0.0), *(2.0 ** (k - 48) for k in range(2, BINS)))
