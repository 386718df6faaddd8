"""Shows what a session computes inside: a second session runs the same optimised graph on the same
inputs, with inner values added to its outputs (`engines/effect.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whence.instrument.engines.effect import Observer, Shown, Words
from whence.instrument.onnxruntime import native_sessions
from whence.instrument.onnxruntime.graph_plan import GraphPlan
from whence.instrument.onnxruntime.model_edits import added, output_name
from whence.instrument.onnxruntime.native_sessions import SavedGraph
from whence.instrument.onnxruntime.values import seen_values
from whence.instrument.onnxruntime.watched import RunInProgress


class SessionObserver(Observer):
    """Runs the graph of one session in a second session. values: to show, in graph order."""

    WORDS = Words(
        "the session alone", "the optimised graph as ONNX Runtime saves it computes something else"
    )

    def __init__(
        self, python_session: Any, saved: SavedGraph, plan: GraphPlan, values: Sequence[str]
    ) -> None:
        # the program's own is not kept alive
        self._python_session, self._saved = weakref.ref(python_session), saved
        self._known = {value: count for value, count in plan.blocked.items() if count}
        hidden = {value for value, count in plan.blocked.items() if not count}
        super().__init__([v for v in values if v not in hidden])
        self.hidden = hidden & set(values)

    def make(self, values: Sequence[str]) -> Any:
        path = self._saved.variant(added(values, self._known))
        return native_sessions.observing(self._python_session(), path)

    def run(self, model: Any, step: RunInProgress, values: Sequence[str]) -> Shown:
        asked = list(dict.fromkeys([*step.names, *values]))
        outputs = [output_name(name, self._known) for name in asked]
        given = _native_feeds(step.feeds)
        if given is not None:
            shown = list(model.run_with_ort_values(given, outputs, step.run_options))
        else:
            shown = model.run(outputs, dict(step.feeds), step.run_options)
        return {
            name: list(seen_values(value, name)) for name, value in zip(asked, shown, strict=True)
        }

    def recorded(self) -> None:
        """Delete the saved graph: the effect is measured and parameters are recorded."""
        self._saved.close()

    def close(self) -> None:
        """Let go of the session. Idempotent."""
        self._saved.close()
        super().close()


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
