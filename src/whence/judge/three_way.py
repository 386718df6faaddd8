"""Three-way: how far reference and target each are from a third run, the reference in higher
precision.

The reference's own error against it is a yardstick for noise that needs no program: a target that
is as right as the reference errs about as much. `Limits.third` = 3 is the multiple that torch's
benchmarks allow 16-bit results (torch/_dynamo/utils.py, `same`: RMSE of the result against float64
at most 3 times that of eager; 2 times in float32), and what AWS's three-way tests of vLLM on Neuron
allow at every module. Where it is passed depends on what came in: the change of the ratio from call
to call names the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.judge.limits import LIMITS
from whence.judge.power import without_visible
from whence.judge.precision import mask_fill
from whence.results import CauseKind, Confidence, Evidence, Verdict, VerdictKind

_CHUNK = 1 << 20  # elements widened at once
_CELLS = 1 << 15  # sign-less upper half of a float32
_JUDGED = (
    VerdictKind.NOISE,
    VerdictKind.INHERITED,
    VerdictKind.AMPLIFIED,
    VerdictKind.INTRODUCED,
    VerdictKind.UNDETERMINED,
)


@dataclass(frozen=True, slots=True)
class ThreeWay:
    """2-norms of reference - third, target - third and third, over elements that are ordinary
    numbers in all three.

    overlap: 1 - the two-sample Kolmogorov-Smirnov statistic of the absolute errors, 1 when both
    runs err alike and 0 when no error of one is as small as any of the other. u: unit roundoff of
    the reference, 0 where the target's is another: then the reference's error is not a yardstick
    for it. count: how many elements.
    """

    reference: float
    target: float
    third: float
    overlap: float
    u: float
    count: int

    @property
    def limit(self) -> float:
        """The limit of the ratio, which is larger for few elements, where chance matters more.

        Half the logarithm of F(n, n) has the variance 1 / n (Fisher), and five standard deviations
        come once in 3 million.
        """
        return max(LIMITS.third, math.exp(5 / math.sqrt(self.count)))

    @property
    def ratio(self) -> float:
        """Root-mean-square error of the target over that of the reference; 1 for 0/0, inf when only
        the reference has none.
        """
        if self.reference == 0.0:
            return 1.0 if self.target == 0.0 else math.inf
        return self.target / self.reference

    @property
    def beyond(self) -> float:
        """The ratio, with half a unit roundoff as the least error a reference is taken to have: it
        may be exact by luck.
        """
        floor = max(self.reference, 0.5 * self.u * self.third)
        return self.target / floor if floor > 0 else self.ratio


def three_way(reference: Array, target: Array, third: Array) -> ThreeWay | None:
    """Compare three arrays of one shape, floating or complex; None when their errors say nothing.

    That is: another shape or an exact dtype, nothing finite, or NaN and infinities at other places
    in the target than in the reference. Equal masks (infinite, or 0.9 of the largest finite value
    and more) are left out. Reads a chunk at a time.

    overlap: max over x of |F_target(x) - F_reference(x)|, F being the shares of absolute errors up
    to x, errors cut to 8 significant bits. Source: Hodges, The significance probability of the
    Smirnov two-sample test, 1958.
    """
    kinds = [dtypes.of(a) for a in (reference, target, third)]
    if (
        not all(k.is_floating for k in kinds)
        or not reference.shape == target.shape == third.shape
        or reference.size == 0
    ):
        return None
    sums = np.zeros(3)
    cells = np.zeros((2, _CELLS), np.int64)
    for g, t, h in zip(*(_chunks(a) for a in (reference, target, third))):
        parts = [_ordinary(a, k) for a, k in zip((g, t, h), kinds)]
        if not np.array_equal(parts[0], parts[1]):
            return None
        keep = parts[0] & parts[2]
        if not keep.all():
            g, t, h = g[keep], t[keep], h[keep]
        for row, error in enumerate((g - h, t - h)):
            sums[row] += float(np.einsum("i,i->", error, error))
            with np.errstate(over="ignore", under="ignore"):
                upper = np.abs(error).astype(np.float32).view(np.uint32) >> 16
            cells[row] += np.bincount(upper, minlength=_CELLS)
        sums[2] += float(np.einsum("i,i->", h, h))
    count = int(cells[0].sum())
    if count == 0 or not np.isfinite(sums).all():
        return None
    distance = int(np.abs(np.cumsum(cells[0] - cells[1])).max()) / count
    norms = np.sqrt(sums)
    is_same = kinds[0].unit_roundoff == kinds[1].unit_roundoff
    return ThreeWay(
        float(norms[0]),
        float(norms[1]),
        float(norms[2]),
        1.0 - distance,
        (kinds[0].unit_roundoff or 0.0) if is_same else 0.0,
        count,
    )


def with_third(verdict: Verdict, outputs: Sequence[ThreeWay]) -> Verdict:
    """The verdict with the numbers of the output that has the largest ratio. Infinite: None."""
    worst = max(outputs, key=lambda o: o.ratio)
    size = worst.third or math.nan
    figures = {
        "third_ratio": worst.ratio,
        "third_overlap": worst.overlap,
        "third_reference_err": worst.reference / size,
        "third_target_err": worst.target / size,
    }
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return verdict.replace(numbers={**verdict.numbers, **finite})


def judge_third(
    verdict: Verdict,
    inputs: Sequence[ThreeWay] | None,
    outputs: Sequence[ThreeWay],
) -> Verdict:
    """The verdict of a region that two dumps judged, looked at again with the third run.

    inputs: of those tensors it read that differ, or of all that came before it where nothing tells
    what it read; None when not all of them are known. The target's error at the outputs, in units
    of the reference's (the ratio), up to its `limit` is noise or inherited. Beyond, it is inherited
    where the ratio of an input was beyond already, and introduced, at most "likely", where the
    ratio rose by `limits.third_rise` on the way; else nobody knows where it comes from. Where the
    runs' precisions differ, and where the reference is off by more than `limits.yardstick`, the two
    dumps' verdict stays.
    """
    verdict = with_third(verdict, outputs)
    if verdict.evidence == Evidence.REPLAY or verdict.verdict not in _JUDGED:
        return verdict
    if any(o.u == 0.0 or o.reference > LIMITS.yardstick * o.third for o in outputs):
        return verdict
    worst = max(outputs, key=lambda o: o.beyond / o.limit)
    out, came_in = worst.beyond, max([1.0, *(i.beyond for i in inputs or ())])
    rise = out / came_in if math.isfinite(came_in) else 1.0
    sentence = f"{out:.3g} times the reference's own error against the third run"
    if inputs is not None:
        sentence += f", {came_in:.3g} times at its inputs"
    if out <= worst.limit:
        name = verdict.verdict
        if name in (VerdictKind.INTRODUCED, VerdictKind.UNDETERMINED):
            name = VerdictKind.NOISE
        return _by_third(verdict, name, sentence)
    if inputs is not None and rise > LIMITS.third_rise:
        return without_visible(verdict).replace(
            verdict=VerdictKind.INTRODUCED,
            evidence=Evidence.THREE_WAY,
            confidence=Confidence.LIKELY,
            score=out / worst.limit if math.isfinite(out) else None,
            cause=CauseKind.UNKNOWN,
            sentence=f"{sentence}; {verdict.sentence}",
        )
    if any(i.beyond > i.limit for i in inputs or ()):
        return _by_third(verdict, VerdictKind.INHERITED, sentence)
    if verdict.verdict == VerdictKind.INTRODUCED:
        return verdict
    words = f"{sentence}: where that comes in cannot be told"
    return _by_third(verdict, VerdictKind.UNDETERMINED, words)


def _by_third(verdict: Verdict, name: VerdictKind, words: str) -> Verdict:
    withdrawn = without_visible(verdict).withdrawn(name, f"{words}; {verdict.sentence}")
    return withdrawn.replace(evidence=Evidence.THREE_WAY)


def _chunks(array: Array) -> Iterator[npt.NDArray[np.float64]]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        if np.iscomplexobj(part):
            yield part.astype(np.complex128).view(np.float64)
        else:
            yield part.astype(np.float64)


def _ordinary(values: npt.NDArray[np.float64], kind: dtypes.DType) -> npt.NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        out: npt.NDArray[np.bool_] = np.abs(values) < mask_fill(kind)
    return out
