"""Turns numbers into verdicts, with the noise budget that was applied."""

from whence.dtypes import coarser, unit_roundoff
from whence.judge.activation_forms import forms_of, told_apart
from whence.judge.composite_error import is_one_element, steadier
from whence.judge.composite_error import measure as whole
from whence.judge.error_growth import (
    ErrorGrowth,
    PairError,
    below_masks,
    between,
    error_of,
    grow,
    is_filled,
    lone_element,
    may_be_masked,
)
from whence.judge.error_patterns import Sight, sight
from whence.judge.formula import FormulaDifference, formula_difference, of_formula
from whence.judge.integer_codes import (
    are_codes,
    at_boundaries,
    beyond_boundaries,
    error_of_codes,
    may_be_codes,
)
from whence.judge.limits import LIMITS, Limits
from whence.judge.nondeterminism import elementwise, explain, flips, repeated
from whence.judge.parameters import ParameterDifference, is_held_in, not_converted, rounded
from whence.judge.parameters import compare as parameters
from whence.judge.power import without_visible
from whence.judge.precision import filled_otherwise, partly, roundoff
from whence.judge.random_numbers import chance_bits, misdrawn
from whence.judge.replay_error import ReplayError, highest, less_suspect
from whence.judge.replay_error import measure as local
from whence.judge.scaled_codes import error_of_scaled
from whence.judge.statistics_drift import drift, parted
from whence.judge.three_way import ThreeWay, judge_third, three_way, with_third
from whence.judge.ties import Choice
from whence.judge.unknown_depth import (
    NOWHERE,
    Elsewhere,
    OtherSteps,
    judge_stated,
    judge_unseen,
    unless_coherent,
)
from whence.judge.verdict import LeafEvidence, judge_leaf, judge_region

__all__ = [
    "LIMITS",
    "NOWHERE",
    "Choice",
    "Elsewhere",
    "ErrorGrowth",
    "FormulaDifference",
    "LeafEvidence",
    "Limits",
    "OtherSteps",
    "PairError",
    "ParameterDifference",
    "ReplayError",
    "Sight",
    "ThreeWay",
    "are_codes",
    "at_boundaries",
    "below_masks",
    "between",
    "beyond_boundaries",
    "chance_bits",
    "coarser",
    "drift",
    "elementwise",
    "error_of",
    "error_of_codes",
    "error_of_scaled",
    "explain",
    "filled_otherwise",
    "flips",
    "forms_of",
    "formula_difference",
    "grow",
    "highest",
    "is_filled",
    "is_held_in",
    "is_one_element",
    "judge_leaf",
    "judge_region",
    "judge_stated",
    "judge_third",
    "judge_unseen",
    "less_suspect",
    "local",
    "lone_element",
    "may_be_codes",
    "may_be_masked",
    "misdrawn",
    "not_converted",
    "of_formula",
    "parameters",
    "parted",
    "partly",
    "repeated",
    "rounded",
    "roundoff",
    "sight",
    "steadier",
    "three_way",
    "told_apart",
    "unit_roundoff",
    "unless_coherent",
    "whole",
    "with_third",
    "without_visible",
]
