"""Are heads, experts and channels alike: permuted together with their weights, do they give the
same?
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from msgspec.structs import replace

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import answer
from whence.workflows.probe.torch.exchange import (
    Exchange,
    Exchanged,
    Structure,
    exchanged,
    whole_order,
)
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import WIDE_ROUNDING, Judge, Trial
from whence.workflows.probe.torch.leaf_calls import leaf_calls
from whence.workflows.probe.torch.regions import Turned
from whence.workflows.probe.torch.subject import Subject
from whence.workflows.probe.torch.units import find_units

DECLARED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "flip": ("the image flipped left to right, as declared", lambda x: x.flip(-1)),
    "shift": ("the image shifted by one column, as declared", lambda x: x.roll(1, -1)),
}
_TWO = "of two, nothing tells whether one is special or both are meant to differ"
_MOST_RUNS = 48
_COPIES = 4.0
"""Times that a difference is larger in float64 at most, unless the copy in float64 shares weights
with its model, which are then not permuted in it.
"""
_MANY = 8
_MOST_BROKEN = 2
_ALL_DIFFER = "no two of them may be exchanged: each has code of its own, as a bias by head is"


def equivariance(judge: Judge, inputs: CallInputs, declared: Collection[str]) -> PropertyAnswer:
    """Permute units together with their weights: nothing may move. declared: names of `DECLARED`
    under which the model's answer should stay, or turn with the image.
    """
    try:
        units = find_units(judge.subject.model, leaf_calls(judge.subject, inputs))
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        why = f"its modules cannot be listened to: {type(error).__name__}: {error}"[:160]
        return PropertyAnswer(Property.EQUIVARIANCE, Held.UNKNOWN, why=why)
    variants = [_turned(judge, inputs, name) for name in DECLARED if name in declared]
    cause = f"it moves with {variants[0].name}" if variants else ""
    finder = _Finder(judge, inputs)
    for kind in dict.fromkeys(structure.kind for structure in units.structures):
        found, why = finder.kind(kind, [s for s in units.structures if s.kind == kind])
        variants += found
        cause = why or cause
        if any(v.held == Held.VIOLATED for v in found):
            break
    notes = [f"not permuted: {words}" for words in units.left_out[:3]]
    if len(units.left_out) > len(notes):
        notes.append(f"and {len(units.left_out) - len(notes)} more")
    if not variants:
        why = "; ".join(notes) or "no heads, experts or hidden channels are found in it"
        return PropertyAnswer(Property.EQUIVARIANCE, Held.ABSENT, why=why)
    return answer(Property.EQUIVARIANCE, variants, cause=cause, notes=notes)


def _turned(judge: Judge, inputs: CallInputs, name: str) -> Variant:
    words, turn = DECLARED[name]
    if inputs.tensor.ndim != 4 or not inputs.tensor.is_floating_point():
        return Variant(words, Held.UNKNOWN, why=f"{inputs.main} is no image [rows, channels, y, x]")
    changed = inputs.changed(**{inputs.main: turn(inputs.tensor).contiguous()})
    return judge.variant(words, inputs, changed, Turned(turn))


class _Finder:
    """Permutes units of one kind, and finds which of them are not like the others."""

    def __init__(self, judge: Judge, inputs: CallInputs) -> None:
        self._judge, self._inputs = judge, inputs
        self._layouts: dict[tuple[str, str, int], int] = {}

    def kind(self, kind: str, structures: Sequence[Structure]) -> tuple[list[Variant], str]:
        """(variants, cause of a violation)."""
        chosen = [self._laid_out(s) for s in structures]
        whole = self._variant(f"{kind} of {_modules(len(chosen))} permuted", chosen)
        if whole.held != Held.VIOLATED:
            return [self._with_effect(whole, chosen)], ""
        if whole.in_float64 is None or whole.in_float64 > _COPIES * whole.moved:
            why = "nothing runs it in float64, which tells a special unit from a wrong guess"
            return [replace(whole, held=Held.UNKNOWN, why=why)], ""
        broken = self._broken(chosen, structures)
        rest = [s for n, s in enumerate(chosen) if n not in broken]
        variants = []
        if rest:
            variants = [self._variant(f"{kind} of {_modules(len(rest))} permuted", rest)]
        if not broken:
            return [self._with_effect(variants[0], rest)], ""
        allowed: list[Variant] = []
        for number in broken[:_MOST_BROKEN]:
            structure = structures[number]
            special = self._special(structure)
            one = self._variant(
                f"{kind} of {structure.scope or 'the model itself'} permuted", [chosen[number]]
            )
            if special:
                return [one, *variants], f"{special} in {structure.scope or 'the model itself'}"
            allowed.append(replace(one, held=Held.OBSERVED))
        why = _TWO if all(structures[n].units == 2 for n in broken) else _ALL_DIFFER
        return [*allowed, *variants], f"{kind}: {why}"

    def _broken(self, chosen: list[Structure], structures: Sequence[Structure]) -> list[int]:
        """Numbers of those that hold in no layout; of another one that holds, `chosen` gets it:
        modules of one class may differ in what they hold.
        """
        broken = []
        for number, structure in enumerate(structures):
            if self._in_order(chosen[number]):
                continue
            fitting = self._fitting(structure) if len(structure.layouts) > 1 else None
            if fitting is None:
                broken.append(number)
            else:
                chosen[number] = fitting
        return broken

    def _laid_out(self, structure: Structure) -> Structure:
        """With the layout that holds for the first of its class; the first one where none does."""
        key = structure.kind, structure.op_type, len(structure.layouts)
        if len(structure.layouts) > 1 and key not in self._layouts:
            fitting = self._fitting(structure)
            self._layouts[key] = structure.layouts.index(fitting.layouts[0]) if fitting else 0
        return structure.laid_out(self._layouts.get(key, 0))

    def _fitting(self, structure: Structure) -> Structure | None:
        """With a layout that holds; None where none does."""
        tried = (structure.laid_out(n) for n in range(len(structure.layouts)))
        return next((s for s in tried if self._in_order(s)), None)

    def _in_order(self, structure: Structure) -> bool:
        return self._holds([(structure, whole_order(structure))])

    def _variant(self, name: str, structures: Sequence[Structure]) -> Variant:
        exchanges = [(structure, whole_order(structure)) for structure in structures]
        return self._judge.variant(
            name,
            self._inputs,
            self._inputs,
            Exchanged(exchanges),
            modes=[lambda subject: exchanged(subject, exchanges)],
        )

    def _with_effect(self, variant: Variant, structures: Sequence[Structure]) -> Variant:
        """How far it moves when one weight of each is permuted alone: where that is nothing,
        nothing was tried.
        """
        if variant.held == Held.UNKNOWN:
            return variant
        for number in range(max(len(s.layouts[0]) for s in structures)):
            halves = [s._replace(layouts=(s.layouts[0][number : number + 1],)) for s in structures]
            exchanges = [(s, whole_order(s)) for s in halves]
            if effect := self._moved(exchanges, self._judge.subject):
                return replace(variant, effect=effect)
        why = "permuting a weight alone changes no output either: nothing was tried"
        return replace(variant, held=Held.UNKNOWN, why=why, effect=0.0)

    def _moved(self, exchanges: Sequence[Exchange], subject: Subject | None = None) -> float:
        trial = Trial(
            self._inputs,
            self._inputs,
            Exchanged(exchanges),
            modes=[lambda subject: exchanged(subject, exchanges)],
        )
        return self._judge.moved(trial, subject)

    def _holds(self, exchanges: Sequence[Exchange]) -> bool:
        return self._moved(exchanges) <= WIDE_ROUNDING

    # ---- which are special

    def _special(self, structure: Structure) -> str:
        """Which units are not like the others, in words; "" where nothing shows that the structure
        is what it was taken for.
        """
        for number in range(len(structure.layouts)):
            words = _Exchanges(self._holds, structure.laid_out(number)).special()
            if words:
                return words
        return ""


class _TooMany(Exception):
    """More runs are needed than are worth it."""


class _Exchanges:
    """Which units of a structure may be exchanged for each other, found by exchanging them."""

    def __init__(self, holds: Callable[[Sequence[Exchange]], bool], structure: Structure) -> None:
        self._holds, self._structure, self._runs = holds, structure, 0

    def special(self) -> str:
        """Units that are not like the others, in words; "" where no class of like units stands
        out: only where most are alike is one that is not a fault, and not the model's design.
        """
        structure = self._structure
        everything = tuple(range(structure.units))
        try:
            if structure.groups:
                return self._special_of_groups()
            if structure.units > 3 and self._rotates(everything):  # another order does not hold
                return f"{structure.kind} read their neighbours"
            if structure.units >= _MANY and not any(map(self._rotates, _spread(structure.units))):
                return ""
            classes = self.classes(everything)
        except _TooMany:
            return ""
        return self._named(_odd(classes, structure.units) if len(classes) > 1 else [])

    def _special_of_groups(self) -> str:
        """As `special`, where units may be exchanged within their groups alone."""
        by_group = [self.classes(group) for group in self._structure.groups]
        alike = sum(len(classes) == 1 for classes in by_group)
        if 2 * alike < len(by_group) or alike == len(by_group):
            return ""
        odd: list[int] = []
        than = "the others"
        for group, classes in zip(self._structure.groups, by_group):
            if len(classes) > 1:
                special = _odd(classes, len(group))
                than = "the others" if special else "each other"
                odd += special or group
        return self._named(odd, than)

    def _named(self, odd: Sequence[int], than: str = "the others") -> str:
        if not odd:
            return ""
        shown = ", ".join(map(str, sorted(odd)[:6])) + ", ..." * (len(odd) > 6)
        count = self._structure.units
        return f"{self._structure.kind} {shown} of {count} (from 0) are not like {than}"

    def classes(self, units: Sequence[int]) -> list[list[int]]:
        """Units that may be exchanged for each other, together."""
        if len(units) == 1 or self._rotates(units):
            return [list(units)]
        if len(units) == 2:
            return [[unit] for unit in units]
        middle = len(units) // 2
        classes = self.classes(units[:middle])
        for later in self.classes(units[middle:]):
            for known in sorted(classes, key=len, reverse=True)[:2]:
                if self._rotates((known[0], later[0])):
                    known += later
                    break
            else:
                classes.append(later)
        return classes

    def _rotates(self, units: Sequence[int]) -> bool:
        self._runs += 1
        if self._runs > _MOST_RUNS:
            raise _TooMany
        order = list(range(self._structure.units))
        for place, unit in enumerate(units):
            order[unit] = units[(place + 1) % len(units)]
        return self._holds([(self._structure, order)])


def _spread(count: int) -> list[tuple[int, int]]:
    """Four pairs of neighbours, far from each other."""
    return [(n * count // 4, n * count // 4 + 1) for n in range(4)]


def _odd(classes: Sequence[list[int]], count: int) -> list[int]:
    """Units outside the class of at least half of them that is larger than any other."""
    first, second = sorted(classes, key=len, reverse=True)[:2]
    if len(first) < 2 or 2 * len(first) < count or len(first) == len(second):
        return []
    return [unit for units in classes if units is not first for unit in units]


def _modules(count: int) -> str:
    return "1 module" if count == 1 else f"{count} modules"
