"""What a session computes inside: a second session runs the same optimised graph on the same
inputs, with values of the graph added to its outputs. Its own results are held against those of the
program's session, bit for bit: that is how far looking changed anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.instrument.onnxruntime import native_sessions
from whence.instrument.onnxruntime.graph_plan import GraphPlan
from whence.instrument.onnxruntime.model_edits import added, output_name
from whence.instrument.onnxruntime.native_sessions import SavedGraph
from whence.instrument.onnxruntime.values import Seen, seen_values
from whence.instrument.wording import counted

MOST_SESSIONS = 48
"""That are made to find which outputs may be added."""

Results = Mapping[str, Seen]


class Difference(NamedTuple):
    """How results differ. largest: of numbers, 0 where only NaNs or texts do."""

    elements: int
    largest: float

    def __str__(self) -> str:
        return f"{counted(self.elements, 'element')}, at most by {self.largest:.3g}"


class Effect(NamedTuple):
    """What adding outputs did. text: for a note of the run. unseen: values that are not shown."""

    text: str
    unseen: tuple[str, ...] = ()


class Observer:
    """Runs the graph of one session beside it. values: those to show, in the order of the graph."""

    def __init__(
        self, python_session: Any, saved: SavedGraph, plan: GraphPlan, values: Sequence[str]
    ) -> None:
        # the program's own is not kept alive
        self._python_session, self._saved = weakref.ref(python_session), saved
        self._known = {value: count for value, count in plan.blocked.items() if count}
        hidden = {value for value, count in plan.blocked.items() if not count}
        self.values = [value for value in values if value not in hidden]
        self.hidden = hidden & set(values)
        self._native: Any = None
        self._measured = False

    def results(
        self, feeds: Mapping[str, Any], names: Sequence[str], run_options: Any, results: Results
    ) -> tuple[dict[str, list[tuple[str, Seen]]], Effect | None]:
        """(values by name, what looking did where that is new) of one run.

        feeds: inputs as the program gave them. names: outputs that it asked for; results: what its
        session returned for them.
        """

        def run(native: Any, values: Sequence[str]) -> dict[str, list[tuple[str, Seen]]]:
            return self._run(native, feeds, [*names, *values], run_options)

        def difference(shown: dict[str, list[tuple[str, Seen]]]) -> Difference | None:
            return _difference(results, shown)

        if self._native is None:
            self._native = self._make(self.values)
        shown = run(self._native, self.values)
        change = difference(shown)
        if self._measured:
            if change is None:
                return shown, None
            return shown, Effect(f"the results of this step differ in {change}")
        self._measured = True
        if change is None:
            return shown, Effect("none: the results are bit-equal to those of the session alone")
        effect = self._narrow(run, difference, change)
        return run(self._native, self.values), effect

    def measured(self) -> None:
        """The effect is known and parameters are recorded: the saved graph is not needed any more.
        Idempotent.
        """
        self._saved.close()

    def close(self) -> None:
        """Let go of the session. Idempotent."""
        self._saved.close()
        self._native = None

    def _narrow(
        self,
        run: Callable[[Any, Sequence[str]], dict[str, list[tuple[str, Seen]]]],
        difference: Callable[[dict[str, list[tuple[str, Seen]]]], Difference | None],
        change: Difference,
    ) -> Effect:
        """Adding all outputs changes the results: add those that do not."""
        bare = self._make([])
        first = run(bare, [])
        if (own := difference(first)) is not None:
            again = _difference(
                {n: s for members in first.values() for n, s in members}, run(bare, [])
            )
            why = (
                "the graph computes something else each time"
                if again is not None
                else "the optimised graph as ONNX Runtime saves it computes something else"
            )
            return Effect(
                f"{why}, also without an added output: the results differ in {own}; what is shown "
                "inside is of that graph"
            )

        def is_neutral(values: Sequence[str]) -> bool:
            return difference(run(self._make(values), values)) is None

        shown = neutral_values(self.values, is_neutral)
        unseen = tuple(value for value in self.values if value not in set(shown))
        self.values, self._native = shown, self._make(shown)
        return Effect(
            f"adding all outputs changes the results in {change}; "
            f"{counted(len(shown), 'value')} can be shown without a change, "
            f"{counted(len(unseen), 'value')} not",
            unseen,
        )

    def _make(self, values: Sequence[str]) -> Any:
        path = self._saved.variant(added(values, self._known))
        return native_sessions.observing(self._python_session(), path)

    def _run(
        self, native: Any, feeds: Mapping[str, Any], names: Sequence[str], run_options: Any
    ) -> dict[str, list[tuple[str, Seen]]]:
        asked = list(dict.fromkeys(names))
        outputs = [output_name(name, self._known) for name in asked]
        given = _native_feeds(feeds)
        if given is not None:
            values = list(native.run_with_ort_values(given, outputs, run_options))
        else:
            values = native.run(outputs, dict(feeds), run_options)
        return {
            name: list(seen_values(value, name)) for name, value in zip(asked, values, strict=True)
        }


def _native_feeds(feeds: Mapping[str, Any]) -> dict[str, Any] | None:
    """Inputs as OrtValues, which hold every type of element; None where one is no tensor of
    numbers.
    """
    from onnxruntime.capi import _pybind_state

    out = {}
    device = None
    for name, value in feeds.items():
        native = getattr(value, "_ortvalue", value)
        if hasattr(native, "is_tensor_sequence") and hasattr(native, "data_ptr"):
            out[name] = native
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            import onnxruntime

            device = device or onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
            plain = np.ascontiguousarray(value)
            out[name] = _pybind_state.OrtValue.ortvalue_from_numpy(plain, device)
        else:
            return None
    return out


def neutral_values(
    values: Sequence[str], is_neutral: Callable[[Sequence[str]], bool], most: int = MOST_SESSIONS
) -> list[str]:
    """The values, of which all change the results, that together do not: halves are added to what
    is known to be neutral. most: how often is asked; what is undecided then is left out.
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


def _difference(results: Results, shown: Mapping[str, list[tuple[str, Seen]]]) -> Difference | None:
    """How what was shown differs from results, both by name; None where it does not."""
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
