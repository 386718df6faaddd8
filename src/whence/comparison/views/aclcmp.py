"""`ait debug compare aclcmp`, the forerunner of msit."""

from __future__ import annotations

from whence.comparison.views import msit
from whence.comparison.views.formulas import EPS64, Figures, cosine, narrow
from whence.dtypes import Array

MOVES_AGAINST_THEMSELVES = True
decide = msit.decide


def figures(reference: Array, target: Array) -> tuple[Figures, str]:
    """`ait debug compare aclcmp`: as msit, but the cosine of one zero vector is the text NaN, with
    the machine epsilon of float64.
    """
    numbers, why = msit.figures(reference, target)
    if why:
        return numbers, why
    return {
        **numbers,
        "cosine_similarity": cosine(narrow(reference), narrow(target), EPS64, 10, lone="NaN"),
    }, ""
