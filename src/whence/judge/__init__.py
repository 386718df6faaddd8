"""Numbers -> verdicts, with the noise budget that was applied."""

from whence.judge.growth import Error, Growth, error_of, grow
from whence.judge.limits import LIMITS, Limits, unit_roundoff
from whence.judge.local import Local
from whence.judge.local import measure as local
from whence.judge.parameters import ParameterDifference, rounded
from whence.judge.parameters import compare as parameters
from whence.judge.pool import Pooled, pool
from whence.judge.verdict import LeafEvidence, judge_leaf, judge_region
from whence.judge.whole import measure as whole

__all__ = [
    "LIMITS", "Error", "Growth", "LeafEvidence", "Limits", "Local", "ParameterDifference", "Pooled",
    "error_of", "grow", "judge_leaf", "judge_region", "local", "parameters", "pool", "rounded", "unit_roundoff", "whole",
]  # fmt: skip
