"""Detects that one run recorded logits before, the other after, a scale or cap.

Cohere and Granite multiply what their head returns by a number, Gemma 2 caps it with a tanh. Where
such a relation lies between the two sides it is found, one side is brought to the other by it, and
what is left over is compared; whether the relation itself is right is not known then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from whence.comparison.answer.paired_prompts import PairedPrompts
from whence.dtypes import Array
from whence.records import Over, Run
from whence.records.logits import maker_of
from whence.results import Comparison, Status

Floats = npt.NDArray[np.float64]

# of the logits' own norm: what is left over at most tokens, once both are the same tensor
_ALIKE = 0.05
_LEAST_GAIN = 4.0  # times less is left over with a relation than without
_HALVINGS = 60


class Relation(NamedTuple):
    """How what a model returned follows from what its module `maker` returned: `factor` times it,
    or `cap` * tanh(it / cap), where cap is not 0. left_over: at most tokens, relative to the norm.
    """

    maker: str
    inside: str  # side that holds what the module returned
    tokens: int
    left_over: float
    factor: float = 1.0
    cap: float = 0.0

    def brought(self, run: Run) -> Run:
        """A run of what the module returned as one of what the model returned; another as it is."""
        return _Related(run, self) if maker_of(run) else run

    def applied(self, array: Floats) -> Floats:
        """What the model makes of what its module returned."""
        return self.cap * np.tanh(array / self.cap) if self.cap else self.factor * array

    def told(self, result: Comparison) -> Comparison:
        """A comparison of what was brought together, with what lies between: no `same` then."""
        outside = "target" if self.inside == "reference" else "reference"
        sides = (
            f"the {self.inside}'s logits are what {self.maker} returned, the {outside}'s what the "
            "model returned"
        )
        if self.is_identity:
            text = f"{sides}; no factor and no cap lies between"
            notes = (text,) if result.status != Status.SAME else ()
            return msgspec.structs.replace(result, notes=(*result.notes, *notes))
        between = (
            f"{self.cap:.4g} * tanh(logits / {self.cap:.4g})"
            if self.cap
            else f"a factor of {self.factor:.6g}"
        )
        text = f"not the same tensor: {sides}; {between} lies between, at {self.tokens} tokens"
        if result.status == Status.DIFFERENT:
            return msgspec.structs.replace(result, notes=(*result.notes, text))
        advice = (
            "alike but for that, and whether it is right is not known: capture the same tensor on "
            "both sides (--logits-module on both, or on neither)"
        )
        return msgspec.structs.replace(
            result, status=Status.UNDECIDED, headline=f"{text}; {advice}"
        )

    @property
    def is_identity(self) -> bool:
        """Does the model return what its module did, as far as it is known?"""
        return self.factor == 1.0 and not self.cap


class _Related(Over):
    """A run whose logits are what the model made of them."""

    def __init__(self, base: Run, relation: Relation) -> None:
        super().__init__(base)
        self._relation = relation
        self._logits = {
            ref.record for call in base.calls for ref in call.refs if ref.slot == "output.logits"
        }

    def array(self, record: int) -> Array:
        array = self.base.array(record)
        if record not in self._logits:
            return array
        return self._relation.applied(array.astype(np.float64)).astype(array.dtype)


def between(reference: Run, target: Run) -> Relation | None:
    """The relation between what one side's module returned and what the other side's model did, the
    identity where none is found; None where both hold the same tensor.
    """
    makers = maker_of(reference), maker_of(target)
    if bool(makers[0]) == bool(makers[1]):
        return None
    inside = 0 if makers[0] else 1
    rows = [
        (pair[inside], pair[1 - inside]) for pair in PairedPrompts(reference, target).logit_rows()
    ]
    identity = Relation(makers[inside], ("reference", "target")[inside], len(rows), 0.0)
    if not rows:
        return identity
    related = [
        relation._replace(left_over=_left_over(rows, relation.applied))
        for relation in (
            identity._replace(factor=_factor(rows)),
            identity._replace(cap=_cap(rows)),
        )
    ]
    best = min(related, key=lambda relation: relation.left_over)
    least = _left_over(rows, identity.applied) / _LEAST_GAIN
    return best if best.left_over < min(_ALIKE, least) else identity


def _left_over(rows: Sequence[tuple[Floats, Floats]], applied: Callable[[Floats], Floats]) -> float:
    """What a relation leaves over at most tokens, relative to the norm."""
    return median(
        float(np.linalg.norm(returned - applied(made)) / (np.linalg.norm(returned) or 1.0))
        for made, returned in rows
    )


def _factor(rows: Sequence[tuple[Floats, Floats]]) -> float:
    """By least squares, of the token in the middle; 0.0 where there is none."""
    return median(float(made @ returned / ((made @ made) or np.inf)) for made, returned in rows)


def _cap(rows: Sequence[tuple[Floats, Floats]]) -> float:
    """The cap with which the norm of a token becomes that of the other side, of the token in the
    middle; 0.0 where the other side is not smaller.
    """
    return median(_cap_of(made, returned) for made, returned in rows)


def _cap_of(made: Floats, returned: Floats) -> float:
    norm, largest = float(np.linalg.norm(returned)), float(np.abs(made).max(initial=0.0))
    if not largest or not 0.0 < norm < float(np.linalg.norm(made)):
        return 0.0
    low, high = float(np.abs(returned).max()) / 2, largest * 1e4
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if np.linalg.norm(middle * np.tanh(made / middle)) < norm:
            low = middle
        else:
            high = middle
    return high
