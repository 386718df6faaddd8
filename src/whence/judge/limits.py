"""The limits that verdicts are based on. Those of `Limits` were measured together
(docs/verdicts.md, "The limits and where they come from"); those below it are grouped by the
question they answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from whence.dtypes import is_half_roundoff

U32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class Limits:
    """What a difference may be before it is flagged; scores are statistics divided by these.

    rho: error of the target against a wide replay on its own inputs, in units of the replay's own
    rounding (2-norm): fp32 and wider, and 16 bits and narrower, have limits of their own. What
    follows from a rate of false alarms (the worst element, averages) is in judge.noise_model. mean,
    moment, higher: how far a statistic of the output may move from the reference's (judge.drift),
    over what the inputs' statistics moved plus 4 u. lone: growth of the error of one element that
    holds most of its tensor's error, where none of the inputs has such a one. repeats: calls of an
    operator with the same bits on both sides from which on another one is held to `amplified`
    (judge.verdict). growth: error growth across a region from two dumps; sum: what a sum of
    products adds to its band, in units of the root of their number; amplified: growth that is worth
    a remark. row: z of the scales that rows have; row_16: such scales, in unit roundoffs, that a
    16-bit kernel makes which keeps a number of each row in 16 bits. effect, effect_16: relative
    size, and size in unit roundoffs of 16 bits, up to which an average is the bias that kernels
    have against each other. spread: error in units of the run-to-run spread of the reference
    (judge.spread). third: error in units of the reference's own, both against a third run
    (judge.third); third_rise: how much larger that is than at the inputs where a fault is;
    yardstick: relative error of the reference from which on it is none: the third run then computed
    something else. whole, whole_z: rho and z where many operators lie between what is seen, in
    units of what rounding in each of them makes. otherwise: what rounding may make of the root's
    outputs where it was given other positions or masks, in unit roundoffs (at 16 bits 0.05, or
    ten). within_32, within_16: relative error that rounding may make over any number of operators
    that nobody sees, in unit roundoffs (judge.unseen); far_16, far, far_seen: the relative error
    that it never makes: in bfloat16 and coarser, in what is finer and may hide bfloat16, and in
    float32 where what came before shows that it does not. flip: gap between two logits that
    rounding still closes, in standard deviations of a logit's own error (judge.logits). formula:
    what the programs of both runs may differ by in float64, in unit roundoffs of the target's
    output; formula_written_anew: at least, where more than their constants differs. stands_out: rho
    of a 16-bit result over that of its siblings, from which on they speak against it.
    beside_other_steps: the error of one step over those of most others of a network of unknown
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
    flip: float = 6.0
    formula: float = 0.01
    formula_written_anew: float = 2.4e-7

    def within(self, unit_roundoff: float) -> float:
        """The relative error that rounding may make where nobody knows how many operators there
        are.
        """
        many = self.within_16 if is_half_roundoff(unit_roundoff) else self.within_32
        return many * unit_roundoff

    def root_output_room(self, unit_roundoff: float) -> float:
        """The relative error that rounding may make of what a root returns."""
        return min(self.otherwise * unit_roundoff, max(10 * unit_roundoff, 0.05))

    def size(self, unit_roundoff: float) -> float:
        """The limit of rho for a target of this unit roundoff."""
        return self.rho_16 if is_half_roundoff(unit_roundoff) else self.rho


LIMITS = Limits()

# What is not an ordinary number?

MASK_FILL = 0.9
"""Share of the largest finite number from which on an element is the filling of a mask."""
DWARFS, DWARFED = 0.5, 0.1
"""Masks of other size (-10000): they have this share of the largest magnitude, and all other
elements at most that share of theirs.
"""

# Are the figures of two dumps evidence?

LONE_SHARE, LONE_COUNT = 0.5, 64
"""One element stands alone with this share of the squared error, of a tensor of so many."""
UNLIKE_INPUTS = 0.5
"""Relative error from which on inputs have so little in common that their outputs prove nothing."""
NORM_SUMMATION = 1e-5
"""What orders of summation in float32 make of a norm over millions."""
ENOUGH_IN_FLOAT32 = 2
"""Tensors in float32 that agree, from which on a network does not round to 16 bits inside."""
BFLOAT16_AND_COARSER = 1e-3
"""Unit roundoffs of bfloat16 and of coarser dtypes lie above."""

# How much does an operator's own rounding make at least?

FLOOR_ROUNDING, FLOOR_SUM = 0.5, 0.3
"""Units of roundoff of the result, and units of the roundoff of sums times the root of their terms.
"""
SUM_IN_ORDER = 2.0
"""Times as far comes one element of a sum in order: what it rounds by follows how far its own
partial sums wandered, so that its tail falls off by e^-1.1 a deviation where others fall off by
e^-1.6; and an activation in the same kernel takes half of the squares away.
"""

ROUNDS_BETWEEN = 0.5
"""Share of the error that a program makes when it rounds at every step, from which on a target may
round there.
"""

# Do two programs compute one function?

FORMULA_ROUNDING = 1e-12
"""Relative 2-norm up to which the results of two programs in float64 differ by rounding."""

# Does the error of a replay have a structure?

STRUCTURE_ELEMENTS, STRUCTURE_CHANGED, STRUCTURE_BINS = 256, 16, 24
"""Elements, and elements that differ, below which no structure is looked for; ranges of values."""

# Is the difference of two tensors one that rounding makes in no network?

PATTERN_ELEMENTS, PATTERN_ELEMENTS_ONE_NUMBER = 64, 16
"""Elements below which patterns are chance, and below which one number explains all of them."""
PATTERN_REST = 0.35
"""Share of the error's 2-norm that is left where a pattern explains nearly all of its squares."""
PATTERN_STRAY = 0.1
"""Share of a factor or constant by which single elements may stray from it."""
PATTERN_EFFECT = 0.02
"""A factor or constant beyond what storing one scalar in 16 bits makes."""
PATTERN_VARIED = 0.05
"""Standard deviation over mean below which a tensor is nearly one number: all of it is a factor."""
PATTERN_SLICES, PATTERN_FAR_SLICES, PATTERN_FAR = 8, 0.25, 10
"""Slices along an axis, the share of them that may be far off, and times the limit that is far."""
PATTERN_CLOSER = 0.25
"""Share of a slice's distance to its own place that its distance to another place may have."""

# Do two tensors of 16 bits differ by one number?

COHERENT_EFFECT, COHERENT_ROW = 3 * 2.0**-8, 10 * 2.0**-8
"""Effects up to which scalars that were kept in bfloat16 explain a factor, or a constant in units
of the tensor: of several rows alike, and of one row, whose gate is computed from it."""
COHERENT_REST = 0.35
"""Share of the error's 2-norm that may be left where more rounding lies on top."""
COHERENT_ELEMENTS, COHERENT_SLICES = 16, 4
"""Different numbers that must agree, and slices of which some may be changed."""

# Which form of an activation was computed?

FORM_LEAST, FORM_AGREES = 4, 0.9
"""Elements at which two forms part, and the share of them that must have the bits of one: chance
has them everywhere else once in millions; kernels round once more here and there.
"""
FORM_NEARER, FORM_CLOSE = 4.0, 4.0
"""Times nearer to its own form than to the other; float32 roundings by which it may be off."""

# Did a tie decide a choice among scores?

TIE_ROWS = 4
"""Rows in which a choice has the same ranks, from which on that is not chance."""
TIE_COMPETING = 4.0
"""Scores so many times as large as any that is chosen compete with none: masks are -10000 and more.
"""

# Do two models choose another token because of rounding?

ENOUGH_FOR_A_MEDIAN = 3
"""Measurements from which on a median means something."""
LASTING_TOKENS, LASTING_FACTOR = 8, 3.0
"""So many tokens in a row whose median is that much above what was measured before are not chance;
each of them alone could be.
"""

# Is an integer a code of quantisation, and at a boundary between two?

CODE_LEVELS = 3
"""Levels between smallest and largest code; masks have 0 and 1."""
CODE_BOUNDARY, CODES_BY_CHANCE = 8, 3.0
"""Roundings around a boundary within which codes differ; codes at one in any tensor."""

# Is a result on a grid of codes the code of the right number?

CODE_NEAREST = 0.52
"""Steps by which the nearest code may lie off a number that a correct kernel computed."""
CODE_NEXT = 1.02
"""Steps of the code beside it, which kernels choose that scale sums by whole numbers."""
CODES_NOT_NEAREST = 0.05
"""Share of codes that may not be the nearest; numbers cut off instead of rounded leave half."""
BIAS_SCALE_TOLERANCE = 1e-4
"""Relative difference of a bias's scale from the product that it should be: it is rounded once or
twice."""
CODES_AT_TIES = 0.01
"""Share of codes that may be the next one where an explanation gives all others exactly."""
CODES_BY_TABLES = 2.0
"""Steps by which kernels may be off that look an exponential up by its code; ONNX Runtime's softmax
on codes is off by 1.4."""
FLOAT_KERNELS = 1e-5
"""Share of the largest number by which float32 kernels beside codes may be off."""
NOISE_OF_STEPS = 3.0
"""Times what rounding the codes of a layer anew changes, that it may differ from the float one."""
NOISE_OF_STEPS_IN_A_CHANNEL = 10.0
"""The same in one channel, which may have few weights."""

# Are activations of fewer bits what a target computes with?

CODES_EXPLAINED = 5.0
"""From this gain on, coarser codes are what the target has: what is left is small beside them."""
CODES_MOSTLY = 1.4
"""From this gain on, more than half of the squared error is theirs: along many products, codes part
at the last bit.
"""
CODES_OUTLYING_ROW = 3.0
"""Times the usual error is a row that coarser codes do not explain."""

# Is a weight a rounding of the reference's to fewer bits, and by which rule?

WEIGHT_UNRELATED = 0.7
"""Relative 2-norm from which on codes are no rounding of the weight, whatever chose them."""
WEIGHT_SCALE_TOLERANCE = 2e-3
"""A scale so close to what the codes allow is rounded to another precision, and not wrong."""
WEIGHT_FREE_CODES = 0.01
"""Share of codes that are not the nearest, from which on they were optimised and not mistaken."""
WEIGHT_RULE_AGREES = 0.98
"""Share of codes that a rule for the scale must reproduce to count as the one that was used."""
WEIGHT_FEW_SCALES = 0.2
"""Share of scales that may be wrong while the others still show the rule."""
WEIGHT_GRID_VALUES = 16
"""A grid read off fewer values could be an accident."""

# ---- random numbers

DRAWN_DEVIATIONS = 8.0
"""Standard deviations from which on a figure of random numbers is not chance: by a normal tail,
once in 10^15.
"""
DRAWN_EFFECT = 0.02
"""Of the distribution's own standard deviation: 16-bit numbers are rounded, and millions of them
show that.
"""
DRAWN_AGAIN_BITS = 100.0
"""Bits of chance from which on the same random numbers are not drawn twice: with 10^12 pairs of
draws, once in 10^18 comparisons.
"""
