"""Finds that two programs compute different functions: how much their results differ, and the
effect on a verdict.

In float64 two ways to write one formula agree to about 1e-15. A larger difference there is not
rounding, however small it is beside the rounding of the target's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whence.judge.limits import FORMULA_ROUNDING, LIMITS
from whence.results import CauseKind, Confidence, Evidence, Verdict, VerdictKind


@dataclass(frozen=True, slots=True)
class FormulaDifference:
    """A difference between the functions of two programs. error: relative 2-norm of the difference
    between their results in float64, on the target's inputs. limit: what a correct target may
    differ by. unit_roundoff: of the target's output.
    """

    slot: str
    error: float
    limit: float
    unit_roundoff: float

    @property
    def is_fault(self) -> bool:
        """Whether the difference is larger than a correct target may have."""
        return self.error > self.limit

    @property
    def score(self) -> float:
        """The error over its limit."""
        return self.error / self.limit


def formula_difference(
    slot: str,
    error: float,
    unit_roundoff: float,
    own_rounding: Callable[[], float],
    *,
    only_constants: bool,
) -> FormulaDifference | None:
    """The difference, if it comes from the formulas and not from float64; else None.

    error: as in `FormulaDifference`. own_rounding: the difference between the target's program and
    its own result in float64. only_constants: the programs are alike except for numbers in them,
    which are exact. Programs written differently may hold the same number to seven digits (log2 e,
    the root of 2/pi), so their limit is higher: `limits.effect`, or `limits.certain` times the
    program's own rounding.
    """
    limit = LIMITS.formula * unit_roundoff
    if error > limit and not only_constants:
        limit = max(limit, LIMITS.formula_written_anew)
        if limit < error < LIMITS.effect:
            limit = max(limit, min(LIMITS.effect, LIMITS.certain * own_rounding()))
    least = FORMULA_ROUNDING if only_constants else limit
    return FormulaDifference(slot, error, limit, unit_roundoff) if error > least else None


def of_formula(verdict: Verdict, difference: FormulaDifference, words: str) -> Verdict:
    """The verdict of a call whose error could be rounding but whose program computes another
    function: a fault, or a remark where only constants differ and the effect is small. words: how
    its code differs.
    """
    if not difference.is_fault:
        return verdict.replace(
            confidence=Confidence.SUSPECT,
            cause=CauseKind.SEMANTIC,
            numbers={**verdict.numbers, "formula": difference.error},
            sentence=f"{words}, which changes the result by {difference.error:.2g}; "
            f"{verdict.sentence}",
        )
    is_certain = difference.score >= LIMITS.certain
    return verdict.replace(
        verdict=VerdictKind.INTRODUCED,
        evidence=Evidence.REPLAY,
        confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
        score=difference.score,
        cause=CauseKind.SEMANTIC,
        slot=difference.slot,
        numbers={**verdict.numbers, "formula": difference.error},
        sentence=f"{words}; introduced here, below its rounding: in float64 both programs give "
        f"results {difference.error:.2g} apart on the same inputs (one rounding of the target's "
        f"dtype: {difference.unit_roundoff:.2g})",
    )
