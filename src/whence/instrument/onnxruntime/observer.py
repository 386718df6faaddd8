"""Shows what a session computes inside: a second session runs the same optimised graph on the same
inputs, with inner values added to its outputs (`engines/effect.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whence.instrument.engines.effect import Effect, Effects, Results, Shown, Words
from whence.instrument.onnxruntime import native_sessions
from whence.instrument.onnxruntime.graph_plan import GraphPlan
from whence.instrument.onnxruntime.model_edits import added, output_name
from whence.instrument.onnxruntime.native_sessions import SavedGraph
from whence.instrument.onnxruntime.values import seen_values

_WORDS = Words(
    "the session alone", "the optimised graph as ONNX Runtime saves it computes something else"
)


class Observer:
    """Runs the graph of one session in a second session. values: to show, in graph order."""

    def __init__(
        self, python_session: Any, saved: SavedGraph, plan: GraphPlan, values: Sequence[str]
    ) -> None:
        # the program's own is not kept alive
        self._python_session, self._saved = weakref.ref(python_session), saved
        self._known = {value: count for value, count in plan.blocked.items() if count}
        hidden = {value for value, count in plan.blocked.items() if not count}
        self._effects = Effects([v for v in values if v not in hidden], self._make, _WORDS)
        self.hidden = hidden & set(values)

    @property
    def values(self) -> list[str]:
        """The names of the values that are shown."""
        return self._effects.values

    def results(
        self, feeds: Mapping[str, Any], names: Sequence[str], run_options: Any, results: Results
    ) -> tuple[Shown, Effect | None]:
        """(values by name, the observer effect if it is new) of one run.

        feeds: inputs as the program gave them. names: outputs that it asked for; results: what its
        session returned for them.
        """

        def run(native: Any, values: Sequence[str]) -> Shown:
            return self._run(native, feeds, [*names, *values], run_options)

        return self._effects.results(run, results)

    def measured(self) -> None:
        """Delete the saved graph, once the effect is measured and parameters are recorded.
        Idempotent.
        """
        self._saved.close()

    def close(self) -> None:
        """Let go of the session. Idempotent."""
        self._saved.close()
        self._effects.close()

    def _make(self, values: Sequence[str]) -> Any:
        path = self._saved.variant(added(values, self._known))
        return native_sessions.observing(self._python_session(), path)

    def _run(
        self, native: Any, feeds: Mapping[str, Any], names: Sequence[str], run_options: Any
    ) -> Shown:
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
    """Inputs as OrtValues, which hold every type of element; None where one is not a tensor of
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
