"""Numbers -> verdicts, with the noise budget that was applied."""

from whence.judge.codes import are_codes, at_boundaries, beyond_boundaries, error_of_codes
from whence.judge.concentrated import concentrated
from whence.judge.drift import drift, parted
from whence.judge.forms import forms_of, told_apart
from whence.judge.growth import Error, Growth, below_masks, between, error_of, grow, lone_element, may_be_masked
from whence.judge.limits import LIMITS, Limits, coarser, unit_roundoff
from whence.judge.local import Local
from whence.judge.local import measure as local
from whence.judge.parameters import ParameterDifference, rounded
from whence.judge.parameters import compare as parameters
from whence.judge.patterns import Sight, sight
from whence.judge.pool import Pooled, pool
from whence.judge.printed import partly, roundoff
from whence.judge.spread import elementwise, explain, flips, repeated
from whence.judge.stated import judge_stated
from whence.judge.third import ThreeWay, judge_third, three_way, with_third
from whence.judge.ties import Choice
from whence.judge.unseen import judge_unseen
from whence.judge.verdict import LeafEvidence, judge_leaf, judge_region
from whence.judge.views import results as view_results
from whence.judge.whole import measure as whole
from whence.judge.whole import steadier

__all__ = [
    "LIMITS", "Choice", "Error", "Growth", "LeafEvidence", "Limits", "Local", "ParameterDifference", "Pooled", "Sight", "ThreeWay",
    "are_codes", "at_boundaries", "below_masks", "between", "beyond_boundaries", "coarser", "concentrated", "drift",
    "elementwise", "error_of", "error_of_codes", "explain", "flips", "forms_of", "grow", "judge_leaf", "judge_region",
    "judge_stated", "judge_third", "judge_unseen", "local", "lone_element", "may_be_masked", "parameters", "parted", "partly",
    "pool", "repeated", "rounded", "roundoff", "sight", "steadier", "three_way", "told_apart", "unit_roundoff", "view_results",
    "whole", "with_third",
]  # fmt: skip
