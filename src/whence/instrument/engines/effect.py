"""Measures the observer effect in an engine: the results of a model with added outputs are compared
bit for bit with those of the model alone. If they differ, finds the values that can be shown
without a change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.instrument.engines.values import Seen
from whence.instrument.wording import counted, raised

MOST_MODELS = 48
"""Most models that are made to find outputs that can be added."""

Results = Mapping[str, Seen]
Shown = dict[str, list[tuple[str, Seen]]]
"""Name of a value of the graph -> (slot, value) of each of its tensors."""


class Difference(NamedTuple):
    """How results differ. elements: number of elements that differ; largest: the largest absolute
    difference, 0 where only NaNs or texts differ.
    """

    elements: int
    largest: float

    def __str__(self) -> str:
        return f"{counted(self.elements, 'element')}, at most by {self.largest:.3g}"


class Effect(NamedTuple):
    """The effect of adding outputs. text: for a note of the run. unseen: values that are not
    shown.
    """

    text: str
    unseen: tuple[str, ...] = ()


class Words(NamedTuple):
    """Wording for an engine's models. alone: names the program's own model. again: says what the
    second model computes if it differs even without added outputs.
    """

    alone: str
    again: str


class Observer(ABC):
    """Shows values of one model through a second model with added outputs, and measures the effect.

    WORDS: for an engine's models. values: to show, in graph order; reduced once values that change
    the results are known.
    """

    WORDS: Words

    def __init__(self, values: Sequence[str]) -> None:
        self.values = list(values)
        self._model: Any = None
        self._measured = False

    @abstractmethod
    def make(self, values: Sequence[str]) -> Any:
        """A model that shows these values."""

    @abstractmethod
    def run(self, model: Any, step: Any, values: Sequence[str]) -> Shown:
        """The values that a model of `make` shows in a step, and its results. Calling it again
        gives the same.
        """

    def results(self, step: Any, results: Results) -> tuple[Shown, Effect | None]:
        """(values by name, the effect if it is new) of one step. results: of the program's own
        model.
        """
        try:
            if self._model is None:
                self._model = self.make(self.values)
            shown = self.run(self._model, step, self.values)
        except Exception as error:  # what an engine raises has many types
            if self._measured:
                raise
            self._measured = True
            effect = self._narrow(step, results, f"adding all outputs fails ({raised(error)})")
            return self.run(self._model, step, self.values), effect
        change = difference(results, shown)
        if self._measured:
            if change is None:
                return shown, None
            return shown, Effect(f"the results of this step differ in {change}")
        self._measured = True
        if change is None:
            return shown, Effect(f"none: the results are bit-equal to those of {self.WORDS.alone}")
        effect = self._narrow(step, results, f"adding all outputs changes the results in {change}")
        return self.run(self._model, step, self.values), effect

    @abstractmethod
    def recorded(self) -> None:
        """Called after all nodes of a step are recorded."""

    def close(self) -> None:
        """Release the model. Idempotent."""
        self._model = None

    def _narrow(self, step: Any, results: Results, happens: str) -> Effect:
        """Reduce the values to those that can be shown without a change, because showing all
        changes the results or fails. happens: which of the two, in words.
        """
        bare = self.make([])
        first = self.run(bare, step, [])
        if (own := difference(results, first)) is not None:
            again = difference(
                {n: s for members in first.values() for n, s in members}, self.run(bare, step, [])
            )
            why = "the graph computes something else each time" if again else self.WORDS.again
            return Effect(
                f"{why}, also without an added output: the results differ in {own}; what is shown "
                "inside is of that graph"
            )

        def is_neutral(values: Sequence[str]) -> bool:
            try:
                return difference(results, self.run(self.make(values), step, values)) is None
            except Exception:  # noqa: BLE001 - what an engine raises has many types
                return False

        shown = neutral_values(self.values, is_neutral)
        unseen = tuple(value for value in self.values if value not in set(shown))
        self.values, self._model = shown, self.make(shown)
        return Effect(
            f"{happens}; "
            f"{counted(len(shown), 'value')} can be shown without a change, "
            f"{counted(len(unseen), 'value')} not",
            unseen,
        )


def neutral_values(
    values: Sequence[str], is_neutral: Callable[[Sequence[str]], bool], most: int = MOST_MODELS
) -> list[str]:
    """A subset of the values that can be shown together without changing the results, found by
    adding halves to the values known to be neutral. most: limit on calls of `is_neutral`; undecided
    values are left out.
    """
    asked = 0

    def widened(neutral: list[str], candidates: Sequence[str]) -> list[str]:
        nonlocal asked
        if not candidates or asked >= most:
            return neutral
        asked += 1
        if is_neutral([*neutral, *candidates]):
            return [*neutral, *candidates]
        if len(candidates) == 1:
            return neutral
        middle = len(candidates) // 2
        return widened(widened(neutral, candidates[:middle]), candidates[middle:])

    middle = len(values) // 2
    shown = set(widened(widened([], values[:middle]), values[middle:]))
    return [value for value in values if value in shown]


def difference(results: Results, shown: Mapping[str, list[tuple[str, Seen]]]) -> Difference | None:
    """How the shown results differ from the program's, matched by name; None where they are
    equal.
    """
    other = {slot: seen for members in shown.values() for slot, seen in members}
    elements, largest = 0, 0.0
    for name, seen in results.items():
        across = other.get(name)
        if across is None or seen.why or across.why:
            continue  # texts and the like: nothing is claimed of them
        if (seen.dtype, seen.shape) != (across.dtype, across.shape):
            elements += max(seen.array().size, across.array().size)
            continue
        if seen.digest() == across.digest():
            continue
        a, b = seen.array().reshape(-1), across.array().reshape(-1)
        differs = a.view(np.uint8).reshape(a.size, -1) != b.view(np.uint8).reshape(a.size, -1)
        elements += int(differs.any(axis=1).sum())
        if dtypes.named(seen.dtype).kind != "complex":
            gaps = np.abs(a.astype(np.float64) - b.astype(np.float64))
            largest = max(largest, float(np.nanmax(gaps, initial=0.0)))
    return Difference(elements, largest) if elements else None
