"""Level 1: judges a region from two dumps alone, by how much the relative error grows from its
inputs to its outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.judge.limits import (
    DWARFED,
    DWARFS,
    LIMITS,
    LONE_COUNT,
    LONE_SHARE,
    U32,
    UNLIKE_INPUTS,
)
from whence.judge.precision import is_mask_fill, mask_fill
from whence.judge.statistics_drift import Drift, drift, resolution
from whence.records import Record
from whence.results import Evidence, Measured, VerdictKind


@dataclass(frozen=True, slots=True)
class PairError:
    """Relative error of one pair of tensors, as far as it is known.

    value: ||t - g|| / ||g||; 1 for integers that differ; None when nothing could be measured.
    evidence: "two dumps" or "statistics". spread: the same between runs of the reference, where
    there are several. drift: how far its statistics moved, where known. lone: where one element
    holds most of the error, that error over the element itself or over the tensor's root mean
    square, whichever is larger; 0 where no element does. codes: for integers that were rounded from
    something (`judge.codes`); coarse: the size of their steps, or of the last digit of statistics,
    for the calls that read them. count,
    last: number of elements, and length of the last axis.
    """

    value: float | None
    evidence: Evidence = Evidence.TWO_DUMPS
    exact: bool = False
    u: float = 0.0
    why: str = ""
    spread: float = 0.0
    drift: Drift | None = None
    lone: float = 0.0
    codes: bool = False
    coarse: float = 0.0
    count: int = 0
    last: int = 1

    @property
    def inherited(self) -> float | None:
        """The error that calls inherit when they read the tensor."""
        return None if self.value is None else max(self.value, self.coarse)


@dataclass(frozen=True, slots=True)
class ErrorGrowth:
    """The judgement of a region. verdict: identical, noise, inherited, amplified, introduced or
    undetermined. growth: e_out / max(e_in + 2u, spread).

    spread: of the output that grew most. moved: the kind of statistic that moved furthest, and
    `by`: how far, in units of its limit. repeats: number of calls like this one with the same bits
    on both sides, where the verdict is based on that. visible: by kind, the smallest fault that
    would have been named here (`judge.power`), where a pass could hide one. count: elements of the
    largest output.
    """

    verdict: VerdictKind
    growth: float
    e_in: float
    e_out: float
    evidence: Evidence
    spread: float = 0.0
    moved: str = ""
    by: float = 0.0
    repeats: int = 0
    visible: Mapping[str, float] = field(default_factory=dict)
    count: int = 0

    def score(self) -> float:
        """The error in units of its limit; above 1 it is introduced."""
        if self.evidence == Evidence.STATISTICS and self.moved and math.isfinite(self.e_out):
            return self.by
        return max(self.growth / (LIMITS.amplified if self.repeats else LIMITS.growth), self.by)


def lone_element(measured: Measured) -> tuple[int, ...] | None:
    """The index of the element that holds most of its tensor's squared error; None when the error
    is spread over many.
    """
    values = measured.values
    largest, rmse, count = values.get("max_abs_err"), values.get("rmse"), values.get("compared")
    if (
        measured.identical
        or not largest
        or not rmse
        or not count
        or count < LONE_COUNT
        or not math.isfinite(largest)
    ):
        return None
    # the squares would overflow
    return measured.max_abs_index if (largest / rmse) ** 2 > LONE_SHARE * count else None


def between(reference: Array, target: Array, u: float) -> PairError:
    """The error of a pair without the elements that are fill values of the same sign on both sides
    (|v| >= 0.9 of the dtype's largest number).

    Masks are filled with the smallest number of their dtype. That number differs by dtype and
    dominates every norm. Source: VERDICT.md. Fill values may match although their bits differ; the
    pair is exact only where all bits are equal.
    """
    a, b = reference.astype(np.float64), target.astype(np.float64)
    sentinel = is_mask_fill(reference) & is_mask_fill(target) & (np.signbit(a) == np.signbit(b))
    x, y = a[~sentinel], b[~sentinel]
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return PairError(math.inf, u=u)
    size, error = float(np.linalg.norm(x)), float(np.linalg.norm(x - y))
    is_exact = reference.dtype == target.dtype and reference.tobytes() == target.tobytes()
    return PairError(
        error / size if size else (0.0 if error == 0 else math.inf), exact=is_exact, u=u
    )


def below_masks(reference: Array, target: Array, error: PairError) -> PairError:
    """The error without elements that dwarf all others, where both sides have them at the same
    places; otherwise `error` unchanged.

    A mask of -10000 makes up most of the norm of the scores it was added to. The error of the
    scores then looks negligible, and softmax, which drops masked elements, looks like its cause. An
    element dwarfs the others if it has at least half of the largest magnitude and no element lies
    between that and a tenth of it.
    """
    a, b = reference.astype(np.float64), target.astype(np.float64)
    if not (a.size and np.isfinite(a).all() and np.isfinite(b).all()):
        return error
    size, size_target = np.abs(a), np.abs(b)
    big = size >= DWARFS * size.max()
    agree = np.array_equal(big, size_target >= DWARFS * size_target.max()) and np.array_equal(
        np.signbit(a[big]), np.signbit(b[big])
    )
    below = max(size[~big].max(initial=0.0), size_target[~big].max(initial=0.0))
    if not agree or big.sum() < 2 or below == 0.0 or below > DWARFED * size[big].min():
        return error
    x, y = a[~big], b[~big]
    visible = float(np.linalg.norm(x - y)) / (float(np.linalg.norm(x)) or below)
    return dataclasses.replace(error, value=max(error.value or 0.0, visible), drift=None)


def may_be_masked(record: Record) -> bool:
    """Whether the statistics of a tensor without stored elements look like masked scores, so that
    they tell nothing about the scores.
    """
    s = record.statistics
    return (
        s is not None
        and s.min is not None
        and s.max is not None
        and s.min < 0
        and -s.min * DWARFED > abs(s.max)
    )


def is_filled(record: Record) -> bool:
    """Whether the extremes of a tensor reach the fill value of a mask in its dtype."""
    figures, kind = record.statistics, dtypes.DTYPES.get(record.dtype)
    return (
        figures is not None
        and kind is not None
        and figures.min is not None
        and figures.max is not None
        and max(-figures.min, figures.max) >= mask_fill(kind)
    )


def error_of(measured: Measured, reference: Record, target: Record, u: float) -> PairError:
    """The error of a pair from its elements, or else from both sides' statistics. u: unit roundoff
    of the coarser side (0: exact dtype).
    """
    if measured.identical:
        return PairError(0.0, exact=True, u=u)
    if (u or reference.dtype != target.dtype) and is_filled(reference) and is_filled(target):
        return PairError(
            None, u=u, why="filled with the smallest number of each side's dtype, as masks are"
        )
    if measured.tier != "none":
        return _of_elements(measured, reference, target, u)
    content, other = ((r.hash, r.dtype, r.shape) for r in (reference, target))
    if reference.hash and content == other:
        return PairError(0.0, exact=True, u=u)
    return _of_statistics(measured.why, reference, target, u)


def _of_elements(measured: Measured, reference: Record, target: Record, u: float) -> PairError:
    """The error of a pair whose elements were compared."""
    values = measured.values
    if values.get("nan_mismatch") or values.get("inf_mismatch"):
        return PairError(math.inf, u=u)
    equal, value = values.get("equal_count") or 0, values.get("rel_l2")
    if u == 0.0:
        return PairError(float(equal < reference.count), u=u)
    return PairError(
        0.0 if value is None and equal == reference.count else value,
        u=u,
        why=measured.whys.get("rel_l2", ""),
        drift=drift(reference, target),
        count=reference.count,
        last=reference.shape[-1] if reference.shape else 1,
    )


def _of_statistics(why: str, reference: Record, target: Record, u: float) -> PairError:
    """The error of a pair without elements. why: there are none."""
    a, b = reference.statistics, target.statistics
    if a is None or b is None or reference.shape != target.shape:
        return PairError(None, why=why)
    if (a.nan, a.inf) != (b.nan, b.inf):
        return PairError(math.inf, Evidence.STATISTICS, u=u)
    if u == 0.0:
        # a dump may have some of the statistics only
        figures = ((a.min, b.min), (a.max, b.max), (a.mean, b.mean), (a.norm, b.norm))
        parted = any(x != y for x, y in figures if None not in (x, y))
        # without checksums, equal statistics do not show equal elements
        return PairError(float(parted or _are_hashed(reference, target)), Evidence.STATISTICS, u=u)
    moved = drift(reference, target)
    if moved is None:
        return PairError(None, why="no finite element to take statistics of")
    size = max(moved.extreme, moved.mean, moved.moment)
    coarse = resolution(reference, target)
    return PairError(
        size, Evidence.STATISTICS, u=u, drift=moved, coarse=coarse, count=reference.count
    )


def _are_hashed(reference: Record, target: Record) -> bool:
    """Do both tensors have checksums of one kind?"""
    kinds = [r.hash.rpartition(":")[0] if r.hash else None for r in (reference, target)]
    return None not in kinds and kinds[0] == kinds[1]


def grow(
    inputs: Sequence[PairError], outputs: Sequence[PairError], u: float, terms: float = 0.0
) -> ErrorGrowth:
    """Judge a region by the errors of its inputs and outputs. u: the coarser side's unit roundoff
    for its outputs. terms: number of products that each output element sums, 0 where unknown. The
    error of a plain loop grows as the root of `terms` (times 0.29, in roundings of float32,
    measured on 4,096), that of tuned kernels grows less.

    Integer inputs that differ count as e_in = 1: another index legitimately selects another row.
    Integer outputs that differ prove nothing when any input differs: the scores beside them tell
    which of two near ties is chosen rightly.
    """
    known_in = [e.inherited for e in inputs if e.inherited is not None]
    if any(known_in):
        unflipped = [e for e in outputs if not (e.u == 0 and e.value == 1.0)]
        if len(unflipped) < len(outputs) and not any(e.value for e in unflipped):
            return ErrorGrowth(
                VerdictKind.UNDETERMINED, 0.0, max(known_in), 1.0, Evidence.TWO_DUMPS
            )
        outputs = unflipped
    known_out = [e.value for e in outputs if e.value is not None]
    if not known_out:
        return ErrorGrowth(VerdictKind.UNDETERMINED, 0.0, 0.0, 0.0, Evidence.NONE)
    kinds = {e.evidence for e in (*inputs, *outputs)}
    evidence = Evidence.STATISTICS if Evidence.STATISTICS in kinds else Evidence.TWO_DUMPS
    e_in, e_out = max(known_in, default=0.0), max(known_out)
    if all(e.exact for e in outputs):
        return ErrorGrowth(VerdictKind.IDENTICAL, 0.0, e_in, 0.0, evidence)
    if e_out == 0.0 or math.isinf(e_in):
        verdict = VerdictKind.NOISE if e_out == 0.0 else VerdictKind.INHERITED
        return ErrorGrowth(verdict, 0.0, e_in, e_out, evidence)
    # Statistics of a tensor move less than its elements; twice the band avoids false findings on
    # correct pairs.
    band = e_in + (4 if evidence == Evidence.STATISTICS else 2) * u
    band += LIMITS.sum * math.sqrt(terms) * min(u, U32)
    worst = max((e for e in outputs if e.value is not None), key=lambda e: _over(e, band))
    result = ErrorGrowth(
        VerdictKind.UNDETERMINED, _over(worst, band), e_in, e_out, evidence, worst.spread
    )
    if all(e.value is None or e.value <= LIMITS.spread * e.spread for e in outputs):
        return dataclasses.replace(result, verdict=_passed(e_out, e_in > 0, u))
    return _grown(result, inputs, outputs, u, band)


def _passed(e_out: float, is_inherited: bool, u: float) -> VerdictKind:
    """The verdict of an error that is no more than what comes in and rounding make."""
    return VerdictKind.INHERITED if is_inherited and e_out > 2 * u else VerdictKind.NOISE


def _grown(
    result: ErrorGrowth,
    inputs: Sequence[PairError],
    outputs: Sequence[PairError],
    u: float,
    band: float,
) -> ErrorGrowth:
    """`result` with the verdict of an error that runs of the reference do not spread by. band: what
    comes in and rounding.
    """
    unlike = result.e_in >= UNLIKE_INPUTS and result.evidence == Evidence.TWO_DUMPS
    room = max((_size(e) for e in inputs if e.value is not None), default=0.0) + 4 * u
    moved, by = ("", 0.0) if unlike else _moved(inputs, outputs, u, room)
    result = dataclasses.replace(result, moved=moved, by=by)
    knows_all = all(e.inherited is not None for e in inputs)
    if not knows_all and (result.growth > LIMITS.amplified or by > 1):
        verdict = VerdictKind.UNDETERMINED
    elif result.score() > 1:
        verdict = VerdictKind.INTRODUCED
    elif result.growth > LIMITS.amplified:
        verdict = VerdictKind.AMPLIFIED
    else:
        verdict = _passed(result.e_out, True, u)
    is_told = knows_all and not unlike
    visible = _visible(inputs, outputs, band, room, result.evidence) if is_told else {}
    count = max(e.count for e in outputs)
    return dataclasses.replace(result, verdict=verdict, visible=visible, count=count)


def _visible(
    inputs: Sequence[PairError],
    outputs: Sequence[PairError],
    band: float,
    room: float,
    evidence: Evidence,
) -> dict[str, float]:
    """By kind, the smallest fault that would have been named at all these outputs: one that adds to
    the error, as unrelated errors do, until it meets its limit. From statistics only a scale can be
    told.
    """
    sizes: dict[str, float] = {}
    no_lone = all(e.lone == 0 for e in inputs)
    for error in outputs:
        if error.exact or error.codes or not error.u or not error.count or error.value is None:
            continue
        scale = math.inf
        if error.drift is not None:
            scale = LIMITS.moment * max(room, error.spread) + error.drift.moment
        kinds = {"scale": scale}
        if evidence != Evidence.STATISTICS:
            largest = LIMITS.growth * max(band, error.spread)
            noise = math.sqrt(max(0.0, largest**2 - error.value**2))
            element = noise * math.sqrt(error.count)
            if no_lone and error.count >= LONE_COUNT:
                alone = error.value * math.sqrt(error.count)
                element = min(element, max(LIMITS.lone * max(band, error.spread), alone))
            channel = noise * math.sqrt(error.last)
            kinds = {"scale": min(scale, noise), "channel": channel}
            kinds |= {"element": element, "noise": noise}
        for kind, size in kinds.items():
            sizes[kind] = max(size, sizes.get(kind, 0.0))
    return {kind: size for kind, size in sizes.items() if math.isfinite(size)}


def _size(error: PairError) -> float:
    """How far the statistics of an input moved; without them, its error."""
    return max(error.drift[:3]) if error.drift is not None else error.inherited or 0.0


def _moved(
    inputs: Sequence[PairError], outputs: Sequence[PairError], u: float, band: float
) -> tuple[str, float]:
    """(kind, distance in units of its limit) of the statistic that moved furthest. band: how far
    differing inputs and rounding may move it.
    """
    worst = ("", 0.0)
    no_lone = all(e.lone == 0 for e in inputs)
    for error in outputs:
        if error.lone and no_lone and (u or band):
            largest = max((e.inherited or 0.0 for e in inputs), default=0.0)
            by = error.lone / max(largest + 2 * u, error.spread) / LIMITS.lone
            worst = max(worst, ("lone", by), key=lambda item: item[1])
        if error.drift is None or error.exact or band == 0:
            continue
        room = max(band, error.spread)
        for kind in ("mean", "moment", "higher"):
            by = getattr(error.drift, kind) / room / getattr(LIMITS, kind)
            worst = max(worst, (kind, by), key=lambda item: item[1])
    return worst


def _over(error: PairError, band: float) -> float:
    """An output's error over the band; the output's own run-to-run spread may widen the band."""
    band = max(band, error.spread)
    return (error.value or 0.0) / band if band > 0 else math.inf
