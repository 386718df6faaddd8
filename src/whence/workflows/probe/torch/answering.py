"""Combines the variants of one property: whether it holds, where not, and how large a violation
would have been seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.judging import WIDE_ROUNDING

_ORDER = (Held.VIOLATED, Held.OBSERVED, Held.ROUNDING, Held.EXACT, Held.UNKNOWN)


class Unanswered(Exception):
    """Why a property has no answer. held: ABSENT where it does not apply to this call."""

    def __init__(self, why: str, held: Held = Held.ABSENT) -> None:
        super().__init__(why)
        self.held = held


def answer(
    asked: Property,
    variants: Sequence[Variant],
    *,
    cause: str = "",
    notes: Sequence[str] = (),
    next_step: str = "",
) -> PropertyAnswer:
    """Combine variants into an answer. A variant that could not be run becomes a note and does not
    weaken the others.
    """
    ran = [v for v in variants if v.held != Held.UNKNOWN or v.differing]
    if not ran:
        why = variants[0].why if variants else "no variant could be made"
        return PropertyAnswer(asked, Held.UNKNOWN, tuple(variants), why=why, next=next_step)
    unclear = [v for v in ran if v.held == Held.UNKNOWN]
    held = next(h for h in _ORDER if any(v.held == h for v in ran))
    if unclear and held not in (Held.VIOLATED, Held.OBSERVED):
        held = Held.UNKNOWN
    left_out = [f"not tried: {v.name} ({v.why})" for v in variants if v not in ran]
    return PropertyAnswer(
        asked,
        held,
        tuple(variants),
        cause=cause if held in (Held.VIOLATED, Held.OBSERVED) else "",
        power=power(ran),
        why=unclear[0].why if held == Held.UNKNOWN else "",
        next=next_step if held == Held.UNKNOWN else "",
        notes=(*notes, *left_out),
    )


def observed(variant: Variant) -> Variant:
    """A difference in a property that need not hold."""
    return replace(variant, held=Held.OBSERVED) if variant.held == Held.VIOLATED else variant


def power(variants: Sequence[Variant]) -> str:
    """The size from which a violation would have been seen, in words."""
    exact = [v for v in variants if v.held == Held.EXACT]
    rounded = [v for v in variants if v.held == Held.ROUNDING]
    elements = sum(v.count for v in (*exact, *rounded))
    if not elements:
        return ""
    effects = [v.effect for v in variants if v.effect is not None]
    moved = f"; what may move moved by {max(effects):.2g} rms" if effects else ""
    if rounded:
        least = max(v.in_float64 or 0.0 for v in rounded)
        least = max(least, WIDE_ROUNDING)
        return f"{elements} elements: more than {least:.1g} rms would be seen, in float64{moved}"
    return f"{elements} elements: a change of 1 ulp in one of them would be seen{moved}"
