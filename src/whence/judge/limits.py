"""The limits verdicts rest on, and where they were measured (docs/verdicts.md). Everything else in
`judge` is free of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

U32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class Limits:
    """What a difference may be before it is flagged; scores are statistics divided by these.

    rho, z: error of the target against a wide replay on its own inputs, in units of the replay's
    own rounding: whole tensor (2-norm) and worst element. fp32 and wider, and 16 bits and narrower,
    have limits of their own. extreme, mean, moment, higher: how far a statistic of the output may
    move from the reference's (judge.drift), over what the inputs' statistics moved plus 4 u. lone:
    growth of the error of one element that holds most of its tensor's error, where none of the
    inputs has such a one. repeats: calls of an operator with the same bits on both sides from which
    on another one is held to `amplified` (judge.verdict). growth: error growth across a region from
    two dumps; amplified: growth that is worth a remark. slope, row, channel, shift, value:
    structure of the error (judge.structure): z of one scale on everything, of a scale per row and
    per channel, of the most shifted channel, of the most shifted range of values; effect: relative
    size below which any of them is the bias transcendental kernels have against each other. pooled:
    z of the scale over all siblings together. spread: error in units of the run-to-run spread of
    the reference (judge.spread). third: error in units of the reference's own, both against a third
    run (judge.third); yardstick: relative error of the reference from which on it is none: the
    third run then computed something else. whole, whole_z: rho and z where many operators lie
    between what is seen, in units of what rounding in each of them makes. otherwise: what rounding
    may make of the root's outputs where it was given other positions or masks, in unit roundoffs
    (at 16 bits 0.05, or ten). within_32, within_16: relative error that rounding may make over any
    number of operators that nobody sees, in unit roundoffs (judge.unseen); far_16, far, far_seen:
    the relative error that it never makes: in bfloat16 and coarser, in what is finer and may hide
    bfloat16, and in float32 where what came before shows that it does not. flip: gap between two
    logits that rounding still closes, in standard deviations of a logit's own error (judge.logits).
    precision_rho: up to here a 16-bit result without structure is a low-precision intermediate, not
    a fault.
    """

    rho: float = 5.0
    z: float = 14.0
    rho_16: float = 2.0
    z_16: float = 8.0
    growth: float = 5.0
    repeats: int = 1
    extreme: float = 12.0
    mean: float = 2.5
    moment: float = 2.5
    higher: float = 3.5
    lone: float = 10.0
    amplified: float = 2.0
    slope: float = 4.5
    row: float = 2.3
    channel: float = 3.0
    shift: float = 5.0
    value: float = 6.0
    effect: float = 3e-6
    pooled: float = 4.5
    spread: float = 2.0
    third: float = 3.0
    yardstick: float = 0.5
    whole: float = 8.0
    whole_z: float = 24.0
    precision_rho: float = 8.0
    certain: float = 4.0
    suspect: float = 0.7
    otherwise: float = 1000.0
    within_32: float = 100.0
    within_16: float = 6.0
    far_16: float = 0.2
    far: float = 0.05
    far_seen: float = 0.01
    flip: float = 6.0

    def of_drift(self, kind: str) -> float:
        """The limit of a kind of statistic, a field of `judge.drift.Drift`."""
        return {
            "extreme": self.extreme,
            "mean": self.mean,
            "moment": self.moment,
            "higher": self.higher,
        }[kind]

    def within(self, unit_roundoff: float) -> float:
        """The relative error that rounding may make where nobody knows how many operators there
        are.
        """
        return (self.within_16 if unit_roundoff > 1e-5 else self.within_32) * unit_roundoff

    def for_dtype(self, unit_roundoff: float) -> tuple[float, float]:
        """(rho limit, z limit) for a target of this unit roundoff."""
        return (self.rho_16, self.z_16) if unit_roundoff > 1e-5 else (self.rho, self.z)


LIMITS = Limits()
