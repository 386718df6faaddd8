"""Compares the logits of one token in two runs: the distance between them, and the margin by which
each run chose its token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whence.dtypes import Array
from whence.errors import UsageError

Floats = npt.NDArray[np.float64]


class LogitFigures(NamedTuple):
    """Figures of one token, all in float64, over the entries that are finite on both sides.

    first, other: token ids of the largest logit of the reference and of the target (the first of
    equal ones). margin: the reference's largest logit minus its second; gap: minus the reference's
    logit of the target's choice (0 where both choose the same). logit_err: root mean square of
    target - reference without its mean, which changes neither softmax nor argmax; scale: the same
    of the reference itself; rel_logit_err: their ratio. kl: divergence of softmax(reference) from
    softmax(target), in nats. rank: number of tokens that the target puts before `first`. top5:
    share of the reference's five best that are among the target's. nonfinite: entries that are NaN
    in either run, or infinite in one run and different in the other. rest: rel_logit_err once the
    reference is multiplied by the one factor that brings it nearest to the target.
    """

    first: int
    other: int
    margin: float
    gap: float
    logit_err: float
    scale: float
    rel_logit_err: float
    rel_l2: float
    cosine_similarity: float
    kl: float
    rank: int
    top5: float
    nonfinite: int
    rest: float = float("inf")

    @property
    def agree(self) -> bool:
        """Whether both runs choose the same token."""
        return self.first == self.other


def of_token(reference: Array, target: Array) -> LogitFigures:
    """The figures of one pair of logits.

    reference, target: (vocabulary,), any floating dtype. Vocabularies of different sizes are
    compared up to the shorter one, since the padding holds no tokens. Equal infinities (forbidden
    tokens) are left out. If no entry is finite on both sides, every error is NaN. Raises UsageError
    for empty logits or more than one axis.
    """
    if reference.ndim != 1 or target.ndim != 1 or not min(reference.size, target.size):
        raise UsageError(
            f"logits of a token have one axis: reference {reference.shape}, target {target.shape}"
        )
    n = min(reference.size, target.size)
    x, y = reference[:n].astype(np.float64), target[:n].astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    nonfinite = int(np.count_nonzero(~finite & ~((x == y) & np.isinf(x))))
    first, other = _best(x), _best(y)
    gap = float(x[first] - x[other]) if first != other else 0.0
    if not finite.any():
        nan = float("nan")
        return LogitFigures(first, other, nan, gap, nan, nan, nan, nan, nan, nan, 0, 0.0, nonfinite)
    a, b = x[finite], y[finite]
    error, spread = b - a, float(np.std(a))
    logit_err, norm = float(np.std(error)), float(np.linalg.norm(a))
    factor = _ratio(float(a @ b), norm * norm, 1.0)
    return LogitFigures(
        first,
        other,
        _margin(a),
        gap,
        logit_err,
        spread,
        _ratio(logit_err, spread),
        _ratio(float(np.linalg.norm(error)), norm),
        _ratio(float(a @ b), norm * float(np.linalg.norm(b)), 1.0),
        _kl(a, b),
        int(np.count_nonzero(y > y[first])),
        _overlap(x, y),
        nonfinite,
        _ratio(float(np.std(b - factor * a)), spread),
    )


def _best(x: Floats) -> int:
    return int(np.argmax(np.where(np.isnan(x), -np.inf, x)))


def _margin(x: Floats) -> float:
    if x.size < 2:
        return float("inf")
    second, best = np.partition(x, -2)[-2:]
    return float(best - second)


def _ratio(value: float, by: float, both_zero: float = 0.0) -> float:
    if by:
        return value / by
    return both_zero if value == 0 else float("inf")


def _kl(x: Floats, y: Floats) -> float:
    p, q = x - x.max(), y - y.max()
    p -= np.log(np.exp(p).sum())
    q -= np.log(np.exp(q).sum())
    return max(float(np.exp(p) @ (p - q)), 0.0)


def _overlap(x: Floats, y: Floats) -> float:
    k = min(5, x.size)
    best = [
        set(np.argpartition(np.where(np.isnan(v), -np.inf, v), -k)[-k:].tolist()) for v in (x, y)
    ]
    return len(best[0] & best[1]) / k
