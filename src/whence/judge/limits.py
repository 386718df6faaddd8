"""The limits on which verdicts are based. The fields of `Limits` were measured together
(docs/verdicts.md, "The limits and where they come from"). The constants below are grouped by the
question they answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from whence.dtypes import is_half_roundoff

U32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a difference may be before it is flagged. Scores are statistics divided by these
    limits.

    rho: error of the target against a wide replay on its own inputs, in units of the replay's own
    rounding (2-norm); fp32 and wider, and 16 bits and narrower, have separate limits. Limits that
    follow from a rate of false alarms (worst element, averages) are in judge.noise_model. mean,
    moment, higher: how far a statistic of the output may move from the reference's (judge.drift),
    beyond the move of the inputs' statistics plus 4 u. lone: growth of the error of one element
    that holds most of its tensor's error, where no input has such an element. repeats: number of
    bit-equal calls of an operator from which on a further call that differs is held to `amplified`
    (judge.verdict). growth: error growth across a region from two dumps; sum: what a sum of
    products adds to its band, in units of the root of the number of terms; amplified: growth that
    deserves a remark. row: z of the scales of rows; row_16: such scales, in unit roundoffs, made by
    a 16-bit kernel that stores a number per row in 16 bits. effect, effect_16: relative size, and
    size in unit roundoffs of 16 bits, up to which an average is a bias between correct kernels.
    spread: error in units of the run-to-run spread of the reference (judge.spread). third: error in
    units of the reference's own error, both against a third run (judge.third); third_rise: how much
    larger that ratio is at a fault than at its inputs; yardstick: relative error of the reference
    from which on the third run computed something else and cannot serve as a measure. whole,
    whole_z: rho and z where many operators lie between the recorded tensors, in units of the
    rounding of each. otherwise: effect of rounding on the root's outputs where it was given other
    positions or masks, in unit roundoffs (at 16 bits 0.05, or ten). within_32, within_16: relative
    error that rounding may cause over any number of unrecorded operators, in unit roundoffs
    (judge.unseen); far_16, far, far_seen, far_equal: the relative error that rounding never
    causes: in bfloat16 and coarser, in finer dtypes that may hide bfloat16, in float32 where
    earlier tensors show that no bfloat16 is hidden, and where all earlier ones are bitwise equal.
    flip: gap between two logits that rounding can close, in standard deviations of a logit's own
    error (judge.logits). formula: difference of the
    programs of both runs in float64, in unit roundoffs of the target's output;
    formula_written_anew: its minimum where more than constants differ. stands_out: rho of a 16-bit
    result over that of its siblings, from which on they are evidence against it.
    beside_other_steps: error of one step over that of most other steps in a network of unknown
    depth, from which on rounding does not explain it. precision_rho: up to here a 16-bit result
    without structure is a low-precision intermediate, not a fault.
    """

    rho: float = 5.0
    rho_16: float = 2.0
    growth: float = 5.0
    sum: float = 0.1
    repeats: int = 1
    mean: float = 2.5
    moment: float = 2.5
    higher: float = 3.5
    lone: float = 10.0
    amplified: float = 2.0
    row: float = 2.3
    row_16: float = 1.2
    effect: float = 3e-6
    effect_16: float = 0.02
    spread: float = 2.0
    third: float = 3.0
    third_rise: float = 2.0
    yardstick: float = 0.5
    whole: float = 8.0
    whole_z: float = 24.0
    precision_rho: float = 8.0
    stands_out: float = 1.5
    beside_other_steps: float = 30.0
    certain: float = 4.0
    suspect: float = 0.7
    otherwise: float = 1000.0
    within_32: float = 100.0
    within_16: float = 6.0
    far_16: float = 0.2
    far: float = 0.05
    far_seen: float = 0.01
    far_equal: float = 1e-3
    flip: float = 6.0
    formula: float = 0.01
    formula_written_anew: float = 2.4e-7

    def within(self, unit_roundoff: float) -> float:
        """The relative error that rounding may cause over an unknown number of operators."""
        many = self.within_16 if is_half_roundoff(unit_roundoff) else self.within_32
        return many * unit_roundoff

    def root_output_room(self, unit_roundoff: float) -> float:
        """The relative error that rounding may cause in the output of a root."""
        return min(self.otherwise * unit_roundoff, max(10 * unit_roundoff, 0.05))

    def size(self, unit_roundoff: float) -> float:
        """The limit of rho for a target of this unit roundoff."""
        return self.rho_16 if is_half_roundoff(unit_roundoff) else self.rho


LIMITS = Limits()

# Which elements are not ordinary numbers?

MASK_FILL = 0.9
"""Share of a dtype's largest finite number from which on an element is a mask's fill value."""
DWARFS, DWARFED = 0.5, 0.1
"""Other fill values of masks (-10000): they have at least this share of the largest magnitude, and
all other elements at most this share of the fill value.
"""

# When are the statistics of two dumps evidence?

LONE_SHARE, LONE_COUNT = 0.5, 64
"""One element stands alone if it has this share of the squared error of a tensor with at least so
many elements.
"""
UNLIKE_INPUTS = 0.5
"""Relative error from which on inputs have so little in common that their outputs prove nothing."""
NORM_SUMMATION = 1e-5
"""Relative effect of the order of summation, in float32, on a norm over millions of elements."""
ENOUGH_IN_FLOAT32, ENOUGH_EQUAL = 2, 4
"""Number of float32 tensors that agree, from which on the network does not round to 16 bits
inside; and number that are equal to the bit, from which on both runs have the same kernels.
"""
BFLOAT16_AND_COARSER = 1e-3
"""The unit roundoffs of bfloat16 and of coarser dtypes are larger than this."""

# What is the least rounding error of an operator?

FLOOR_ROUNDING, FLOOR_SUM = 0.5, 0.3
"""In unit roundoffs of the result; and in unit roundoffs of the accumulating dtype times the root
of the number of terms.
"""
SUM_IN_ORDER = 2.0
"""Times as far as usual that one element may be when a kernel sums in order. Its rounding follows
how far its own partial sums wandered, so its tail falls off by e^-1.1 per deviation where others
fall off by e^-1.6; an activation in the same kernel takes away half of the squares.
"""

ROUNDS_BETWEEN = 0.5
"""Share of the error of a program that rounds at every step, from which on a target may round
there.
"""

# Do two programs compute the same function?

FORMULA_ROUNDING = 1e-12
"""Relative 2-norm up to which results of two programs in float64 differ by rounding only."""

# Does the error of a replay have a structure?

STRUCTURE_ELEMENTS, STRUCTURE_CHANGED, STRUCTURE_BINS = 256, 16, 24
"""Least number of elements, and of elements that differ, for a search for structure; number of
ranges of values.
"""

# Is the difference of two tensors one that rounding never causes?

PATTERN_ELEMENTS, PATTERN_ELEMENTS_ONE_NUMBER = 64, 16
"""Number of elements below which a pattern is chance, and below which one number explains all of
them by chance.
"""
PATTERN_REST = 0.35
"""Share of the error's 2-norm that may remain where a pattern explains nearly all of its
squares.
"""
PATTERN_STRAY = 0.1
"""Share of a factor or constant by which single elements may deviate from it."""
PATTERN_EFFECT = 0.02
"""A factor or constant larger than storing one scalar in 16 bits causes."""
PATTERN_VARIED = 0.05
"""Standard deviation over mean below which a tensor is nearly constant, so that a factor explains
all of it.
"""
PATTERN_SLICES, PATTERN_FAR_SLICES, PATTERN_FAR = 8, 0.25, 10
"""Least number of slices along an axis, the share of them that may be far off, and the multiple of
the limit that counts as far.
"""
PATTERN_CLOSER = 0.25
"""A slice belongs to another place if its distance to that place is at most this share of the
distance to its own.
"""

# Do two 16-bit tensors differ by one number?

COHERENT_EFFECT, COHERENT_ROW = 3 * 2.0**-8, 10 * 2.0**-8
"""Effect up to which scalars stored in bfloat16 explain a factor, or a constant in units of the
tensor's root mean square: of several rows alike, and of one row, whose gate is computed from it.
"""
COHERENT_REST = 0.35
"""Share of the error's 2-norm that may remain where further rounding is added."""
COHERENT_ELEMENTS, COHERENT_SLICES = 16, 4
"""Least number of distinct values that must agree, and of slices of which some may be changed."""

# Which form of an activation was computed?

FORM_LEAST, FORM_AGREES = 4, 0.9
"""Least number of elements at which two forms differ, and the share of them that must have the bits
of one form. By chance that happens once in millions; kernels round once more at a few elements.
"""
FORM_NEARER, FORM_CLOSE = 4.0, 4.0
"""Times nearer to its own form than to the other; float32 roundings by which it may be off."""

# Did a tie decide a choice among scores?

TIE_ROWS = 4
"""Number of rows in which a choice has the same ranks, from which on that is not chance."""
TIE_COMPETING = 4.0
"""Scores this many times as large as any chosen score compete with none: masks use -10000 and
more.
"""

# Do two models choose different tokens because of rounding?

ENOUGH_FOR_A_MEDIAN = 3
"""Least number of measurements for which a median is meaningful."""
LASTING_TOKENS, LASTING_FACTOR = 8, 3.0
"""That many tokens in a row whose median is that many times the earlier one are not chance; each
alone could be.
"""

# Is an integer a code of quantisation, and at a boundary between two codes?

CODE_LEVELS = 3
"""Least number of levels between the smallest and the largest code; masks have only 0 and 1."""
CODE_BOUNDARY, CODES_BY_CHANCE = 8, 3.0
"""Distance from a boundary, in roundings, within which codes may differ; number of codes at a
boundary that occur by chance in any tensor.
"""

# Is each quantised result the code nearest to the right number?

CODE_NEAREST = 0.52
"""Distance in steps at which a code still counts as the nearest to a number that a correct kernel
computed.
"""
CODE_NEXT = 1.02
"""The same for the neighbouring code, which kernels choose that compute scales with integers."""
CODES_NOT_NEAREST = 0.05
"""Share of codes that may not be the nearest; truncation instead of rounding makes half of them
so.
"""
BIAS_SCALE_TOLERANCE = 1e-4
"""Relative difference between a bias's scale and the product of the scales of input and weight: it
is rounded once or twice.
"""
CODES_BY_TABLES = 2.0
"""Steps by which kernels may be off that look up exponentials by code; ONNX Runtime's softmax on
codes is off by 1.4.
"""
FLOAT_KERNELS = 1e-5
"""Error of float32 kernels beside codes, as a share of the largest number."""
NOISE_OF_STEPS = 3.0
"""Allowed difference between a quantised layer and its float layer, in units of what re-rounding
its codes changes.
"""
NOISE_OF_STEPS_IN_A_CHANNEL = 10.0
"""The same for one channel, which may have few weights."""

# Does the target compute with activations of fewer bits?

CODES_EXPLAINED = 5.0
"""From this gain on the target has coarser codes: the remaining error is small beside theirs."""
CODES_MOSTLY = 1.4
"""From this gain on, coarser codes explain more than half of the squared error: over many products,
codes differ by their last bit.
"""
CODES_OUTLYING_ROW = 3.0
"""A row whose error is this many times the usual one is not explained by coarser codes."""

# Is a weight the reference's weight rounded to fewer bits, and by which rule?

WEIGHT_UNRELATED = 0.7
"""Relative 2-norm from which on codes are no rounding of the weight by any rule."""
WEIGHT_SCALE_TOLERANCE = 2e-3
"""A scale this close to the interval that the codes allow was rounded to another precision; it is
not wrong.
"""
WEIGHT_FREE_CODES = 0.01
"""Share of codes that are not the nearest, from which on the codes were optimised and are not
wrong.
"""
WEIGHT_RULE_AGREES = 0.98
"""Share of codes that a rule for the scale must reproduce to count as the rule that was used."""
WEIGHT_FEW_SCALES = 0.2
"""Share of scales that may be wrong while the others still show the rule."""
WEIGHT_GRID_VALUES = 16
"""Least number of values for a grid that is not an accident."""

# ---- random numbers

DRAWN_DEVIATIONS = 8.0
"""Standard deviations from which on a figure of random numbers is not chance: for a normal tail,
once in 10^15.
"""
DRAWN_EFFECT = 0.02
"""In units of the distribution's own standard deviation: 16-bit random numbers are rounded, and
millions of them show that.
"""
DRAWN_AGAIN_BITS = 100.0
"""Bits of coincidence from which on the same random numbers were drawn twice: with 10^12 pairs of
draws, chance alone reaches this once in 10^18 comparisons.
"""
