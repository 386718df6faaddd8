"""Measures the distance of a target's output from a wide replay on the target's own inputs, in
units of the operator's own rounding noise.

Source of the figures: VERDICT.md level 2. All arrays are widened to float64; rows are vectors along
the last axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array, unit_roundoff
from whence.judge import noise_model
from whence.judge.error_structure import (
    Basis,
    Structure,
    beyond_own,
    norm,
    structure,
    weaker,
)
from whence.judge.limits import (
    FLOOR_ROUNDING,
    FLOOR_SUM,
    LIMITS,
    ROUNDS_BETWEEN,
    STRUCTURE_BINS,
    SUM_IN_ORDER,
    U32,
)
from whence.judge.precision import mask_fill
from whence.judge.ties import Choice

F64 = npt.NDArray[np.float64]
_TINY = 1e-300
_NONE: F64 = np.zeros(0)
_SIZES = ("rho", "z")
_SAMPLE = 4093  # a prime, so that samples do not always hit the same channels


@dataclass(frozen=True, slots=True)
class ReplayError:
    """Figures of one output. score > 1 is beyond this operator's own rounding.

    rho: ||y - r|| / E0, the error in units of the floor. z: worst element in units of its row's or
    column's rounding. z_index: where. structure: whether the difference to the working-dtype replay
    follows rows, channels, values or one scale. error_rel, floor_rel, spread_rel: ||y - r||, E0 and
    the run-to-run spread, over ||r||. With g what the reference made and r_g the wide replay on its
    inputs, y - g = (r - r_g) + (y - r) - (g - r_g) = inherited + introduced by the target +
    introduced by the reference: inherited_rel and reference_rel are the first and the last over
    ||g||, None where they are not known. mismatch: elements that are non-finite on one side only.
    whole: of a stretch of computation of which only the ends are seen (judge.whole).
    integer_mismatch: for exact dtypes, elements that agree with neither replay. choices: what chose
    otherwise than the reference's operators do, on the way to this output (judge.ties).
    outputs: how many are judged in the comparison. count, rows: elements, and vectors along the
    last axis. rho_others: rho without the worst element. residual_rel: ||y - w|| over ||r||.
    element_rel: what rounding makes of one element in twenty at least, over the root mean square of
    r.
    """

    score: float
    rho: float = 0.0
    z: float = 0.0
    z_index: tuple[int, ...] | None = None
    structure: Structure = Structure()  # noqa: RUF009 - frozen
    error_rel: float = 0.0
    floor_rel: float = 0.0
    inherited_rel: float | None = None
    reference_rel: float | None = None
    mismatch: int = 0
    integer_mismatch: int = 0
    u: float = 0.0
    whole: bool = False
    spread_rel: float = 0.0
    outputs: int = 1
    choices: tuple[Choice, ...] = ()
    count: int = 0
    rows: int = 0
    rho_others: float = 0.0
    residual_rel: float = 0.0
    element_rel: float = 0.0

    def parts(self) -> dict[str, float]:
        """Every statistic over its limit, by name; the score is the largest of them."""
        if self.whole:
            return {"rho": self.rho / LIMITS.whole, "z": self.z / LIMITS.whole_z}
        s = self.structure
        parts = {
            "rho": self.rho / LIMITS.size(self.u),
            "z": self._outlying / self._element().limit(self.outputs),
            "row": s.row / LIMITS.row if s.row_effect >= self.bias() else 0.0,
        }
        return parts | {
            name: score / noise_model.limit(tests, self.outputs)
            for name, (score, tests) in self._averages().items()
        }

    @property
    def _outlying(self) -> float:
        """z of the worst element, over rho of the other elements where they are noisier than their
        floor.
        """
        return self.z / max(1.0, self.rho_others) if math.isfinite(self.rho_others) else self.z

    def _element(self) -> noise_model.Tail:
        return noise_model.ELEMENT[dtypes.is_half_roundoff(self.u)]

    def bias(self) -> float:
        """Relative size of a systematic error that a correct kernel may have."""
        is_half = dtypes.is_half_roundoff(self.u)
        allowed = max(LIMITS.effect, LIMITS.effect_16 * self.u if is_half else 0.0)
        return max(allowed, LIMITS.spread * self.spread_rel)

    def _averages(self) -> dict[str, tuple[float, int]]:
        """By name, each averaged statistic of the residual in standard deviations, and the number
        of averages tested.
        """
        s, bias = self.structure, self.bias()
        slope = max(0.0, abs(s.slope) - bias) / s.slope_error if s.slope_error > 0 else 0.0
        channel = s.channel if s.channel_effect >= bias else 0.0
        value = s.value if s.value_effect >= bias else 0.0
        return {
            "slope": (noise_model.normal_score(slope, s.clusters - 1), 1),
            "channel": (noise_model.normal_score(channel, s.rows - 1), max(s.channels, 1)),
            "value": (value, STRUCTURE_BINS),
        }

    def chance(self) -> float:
        """Share of comparisons of correct targets, with as many outputs, in which rounding goes
        this far at some output; in 0..1 (docs/verdicts.md, "How rare it is").
        """
        if self.mismatch or self.integer_mismatch:
            return 0.0
        if self.whole:
            return 1.0
        size = noise_model.SIZE[dtypes.is_half_roundoff(self.u)]
        smallest = min(
            size.chance(self.rho, self.outputs),
            self._element().chance(self._outlying, self.outputs),
            *(
                noise_model.chance(score, tests, self.outputs)
                for score, tests in self._averages().values()
            ),
        )
        return min(1.0, noise_model.ASPECTS * smallest)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the squared error between both sides: inherited, introduced by the target,
        introduced by the reference.
        """
        if self.inherited_rel is None or self.reference_rel is None:
            return {}
        parts = {
            "inherited": self.inherited_rel**2,
            "target": self.error_rel**2,
            "reference": self.reference_rel**2,
        }
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()} if 0 < total < math.inf else {}


def highest(errors: Mapping[str, ReplayError]) -> float:
    """The largest score of all outputs."""
    return max(error.score for error in errors.values())


def measure(
    output: Array,
    wide: Array,
    working: Array,
    *,
    reduction_length: int = 1,
    reference: Array | None = None,
    reference_wide: Array | None = None,
    spread: Array | None = None,
    written_out: bool = False,
    outputs: int = 1,
) -> ReplayError:
    """Judge `output` (what the target produced) against `wide` and `working`, replays of the
    reference's program on the target's inputs.

    All of one shape. output: any dtype; its unit roundoff sets the scale. wide: the replay in
    float64 (float32 for 16-bit targets). working: the replay in the target's dtype; where it comes
    wider it is rounded once. reduction_length: the most terms that one output element sums.
    reference, reference_wide: what the reference made, and the wide replay on its inputs where
    they are others, for the shares of the error. spread: by how much each element differs between
    runs of the reference on equal inputs: it widens the floor, and a structure below
    `limits.spread` times it is no evidence; of an exact kind, `limits.spread` times as many
    elements may differ. written_out: `working` rounds at more steps than the program does, so that
    its own rounding is not a measure of patterns. outputs: how many are judged in the comparison:
    the more, the further one of them strays by chance.
    """
    kind = dtypes.of(output)
    if not kind.is_floating:
        return _exact(output, wide, working, spread)
    u, fill = unit_roundoff(kind.name), mask_fill(kind)
    y, r = flat(output), flat(wide)
    w = flat(working if dtypes.of(working).name == kind.name else rounded(working, kind))
    keep, mismatch = comparable(y, r, w, fill)
    s = flat(spread) if spread is not None and spread.shape == output.shape else _NONE
    if not keep.all():
        y, r, w, s = (np.where(keep, a, 0.0) if a.size else a for a in (y, r, w, s))
    if y.size == 0:
        return ReplayError(0.0, u=u)
    parts = y.size // output.size  # real and imaginary parts lie side by side
    last = output.shape[-1] * parts if output.ndim > 1 else y.size
    e, f, d, size = y - r, w - r, y - w, norm(r)
    error, strays = norm(e), norm(s)
    floor = max(norm(f), noise_floor(kind, size, reduction_length), strays)
    sums = sums_in_order(kind, reduction_length)
    noise = element_noise(f, r, u, last, s, sums)
    if written_out:  # steps may round single elements alone, as where a logistic function is small
        np.maximum(noise, np.abs(f), out=noise)
    basis = Basis(r, noise, last)
    # A deviation that the working replay shares is not a fault, however far it is from the wide
    # replay.
    z, place = worst(e, d, noise)
    if mismatch:
        place = int(np.argmax(~(keep | same_fill(flat(output), flat(wide), fill))))
    local = ReplayError(
        0.0,
        ratio(error, floor),
        z,
        index_of(place // parts, output) if output.ndim else (),
        _structure(y, w, d, basis, kind),
        ratio(error, size),
        floor / size if size else 0.0,
        *_shares(reference, reference_wide, r, keep, fill),
        mismatch,
        u=u,
        spread_rel=ratio(strays, size),
        outputs=outputs,
        count=y.size,
        rows=y.size // last,
        rho_others=ratio(math.sqrt(max(0.0, error**2 - float(e[place]) ** 2)), floor),
        residual_rel=ratio(norm(d), size),
        element_rel=ratio(_usual_largest(noise) * math.sqrt(y.size), size),
    )
    if mismatch:
        return dataclasses.replace(local, score=math.inf)
    if any(value > 1 for name, value in local.parts().items() if name not in _SIZES):
        own = structure(f, basis)
        patterns = beyond_own(local.structure, own, written_out=written_out)
        local = dataclasses.replace(local, structure=patterns)
    return dataclasses.replace(local, score=max(local.parts().values()))


def _exact(output: Array, wide: Array, working: Array, spread: Array | None) -> ReplayError:
    """Judge an output of an exact kind, which rounding does not touch."""
    differs = (output != wide.astype(output.dtype)) & (output != working.astype(output.dtype))
    count = int(np.count_nonzero(differs))
    if spread is not None and count <= LIMITS.spread * np.count_nonzero(spread):
        count = 0
    index = index_of(int(np.argmax(differs)), output) if count and output.ndim else None
    return ReplayError(math.inf if count else 0.0, z_index=index, integer_mismatch=count)


def _shares(
    reference: Array | None,
    reference_wide: Array | None,
    r: F64,
    keep: npt.NDArray[np.bool_],
    fill: float,
) -> tuple[float | None, float | None]:
    """(inherited_rel, reference_rel) of a `ReplayError`; None without a reference of that size."""
    g = flat(reference) if reference is not None else _NONE
    if reference is None or g.size != r.size:
        return None, None
    r_g = flat(reference_wide) if reference_wide is not None else r
    visible = keep & (np.abs(g) < fill)
    if not visible.all():
        g, r_g = np.where(visible, g, 0.0), np.where(visible, r_g, 0.0)
    r = r if keep.all() else np.where(keep, r, 0.0)
    size = norm(g)
    return ratio(norm(r - r_g), size), ratio(norm(g - r_g), size)


def _usual_largest(noise: F64) -> float:
    """The 95 % quantile of the noise, over a sample of elements."""
    sample = noise[:: max(1, noise.size // _SAMPLE)]
    place = (19 * sample.size) // 20
    return float(np.partition(sample, place)[place])


def less_suspect(error: ReplayError, written_out: ReplayError) -> ReplayError:
    """The error against a program that rounds once or, where the target rounds in between, against
    the program written out step by step; the latter's error is then about as large as these steps
    cause.
    """
    rounds_between = written_out.rho >= ROUNDS_BETWEEN and written_out.score < error.score
    return written_out if rounds_between else error


def noise_floor(kind: dtypes.DType, size: float, reduction_length: int) -> float:
    """Least rounding error (2-norm) of an operator whose result has the 2-norm `size`: half a unit
    roundoff, or the error of sums of `reduction_length` terms in their accumulating dtype,
    whichever is larger.
    """
    return size * max(
        FLOOR_ROUNDING * unit_roundoff(kind.name), _of_sums(kind, max(reduction_length, 1))
    )


def _of_sums(kind: dtypes.DType, terms: int) -> float:
    """Rounding error of a sum of `terms` terms, relative to the size of the result.

    It holds for any algorithm: Winograd's, blocked or reordered kernels round several times as much
    as the one that the replay happens to run.
    """
    accumulate = 2.0**-53 if kind.name in ("float64", "complex128") else U32
    return FLOOR_SUM * math.sqrt(terms) * accumulate


def sums_in_order(kind: dtypes.DType, terms: int) -> float:
    """As `_of_sums`, of one element where a kernel sums in order; 0 where nothing is summed."""
    return SUM_IN_ORDER * _of_sums(kind, terms) if terms > 1 else 0.0


def ratio(error: float, size: float) -> float:
    """error / size; inf for an error where size is 0, 0 where both are 0."""
    return error / size if size > 0 else (0.0 if error == 0 else math.inf)


def index_of(place: int, array: Array) -> tuple[int, ...]:
    """The index of an element, from its position in the flat array."""
    return tuple(int(i) for i in np.unravel_index(place, array.shape))


def _structure(y: F64, w: F64, d: F64, basis: Basis, kind: dtypes.DType) -> Structure:
    """The structure of d = y - w, y against the working replay; at 16 bits, the less significant of
    that and of y against the wide replay rounded once.

    Code may round inside (as the working replay does) or compute wide and round once. One recording
    does not show which of the two, and the wrong one causes a structure of its own (a scale for
    every row of a norm).
    """
    pattern = structure(d, basis)
    if not dtypes.is_half(kind.name) or kind.kind == "complex":
        return pattern
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = basis.r.astype(kind.numpy).astype(np.float64)
    if np.array_equal(rounded, w):
        return pattern
    once = np.where(np.isfinite(rounded), rounded, w)
    return weaker(pattern, structure(y - once, basis))


def flat(array: Array) -> F64:
    if np.iscomplexobj(array):
        return np.ascontiguousarray(array.astype(np.complex128)).reshape(-1).view(np.float64)
    return array.astype(np.float64, copy=False).reshape(-1)


def rounded(array: Array, kind: dtypes.DType) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(kind.numpy)


def same_fill(a: F64, b: F64, fill: float) -> npt.NDArray[np.bool_]:
    """Mask of elements where both sides are NaN, or a mask's fill value or infinity of the same
    sign.
    """
    with np.errstate(invalid="ignore"):
        filled = (np.abs(a) >= fill) & (np.abs(b) >= fill) & (np.signbit(a) == np.signbit(b))
    out: npt.NDArray[np.bool_] = filled | (np.isnan(a) & np.isnan(b))
    return out


def comparable(y: F64, r: F64, w: F64, fill: float) -> tuple[npt.NDArray[np.bool_], int]:
    """(mask of elements that are ordinary numbers on all sides, a single True where all are, and
    number of others that the replay does not explain).

    A NaN or Inf that the replay yields too is inherited, not introduced; the working-dtype replay
    may overflow where the wide one does not.
    """
    with np.errstate(invalid="ignore"):
        if y.size and all(-fill < x.min() and x.max() < fill for x in (y, r, w)):
            return np.ones(1, np.bool_), 0
        fine = (np.abs(y) < fill) & (np.abs(r) < fill) & (np.abs(w) < fill)
    wrong = ~fine & ~same_fill(y, r, fill) & ~same_fill(y, w, fill)
    # Where the wide and the working replay disagree and the target agrees with neither, a finite
    # target next to an overflowing replay is correct.
    with np.errstate(invalid="ignore"):
        wrong &= ~((np.abs(y) < fill) & (np.abs(r) < fill))
    return fine, int(np.count_nonzero(wrong))


def element_noise(
    f: F64, r: F64, u: float, last: int, spread: F64 = _NONE, sums: float = 0.0
) -> F64:
    """The expected rounding error of each element: the root mean square of f over its row or its
    column, whichever is larger, + u |r| + 1e-3 u rms(r).

    f: the program's own rounding. spread: run-to-run spread of the elements, or empty; f^2 +
    spread^2 replaces f^2, and spread is added. sums: relative rounding error of sums (`_of_sums`);
    f^2 is at least (sums r)^2.
    """
    square = (f * f).reshape(-1, last)
    if sums:
        least = sums * r.reshape(-1, last)
        np.maximum(square, np.square(least, out=least), out=square)
    if spread.size:
        square += (spread * spread).reshape(-1, last)
    noise: F64 = np.maximum(
        np.sqrt(square.mean(1, keepdims=True)), np.sqrt(square.mean(0, keepdims=True))
    ).reshape(-1)
    own = np.abs(r)
    own *= u
    noise += own
    if spread.size:
        noise += spread
    noise += 1e-3 * u * norm(r) / math.sqrt(r.size) + _TINY
    return noise


def worst(e: F64, d: F64, noise: F64) -> tuple[float, int]:
    """(max_i of the smaller of |e_i| and |d_i|, over noise_i; its flat index)."""
    z = np.abs(e)
    np.minimum(z, np.abs(d), out=z)
    z /= noise
    place = int(z.argmax())
    return float(z[place]), place
