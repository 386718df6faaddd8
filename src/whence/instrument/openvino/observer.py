"""What a compiled model computes inside: the source is compiled a second time, for the same device
with the same properties, with values added to its outputs (`engines/effect.py`).

Added are values that the device holds in memory anyhow, so that what it fuses stays fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from whence.instrument.engines.effect import Effect, Effects, Results, Shown, Words
from whence.instrument.openvino.graph_plan import GraphPlan
from whence.instrument.openvino.settings import Compiled
from whence.instrument.openvino.values import of_tensor, port_name

_WORDS = Words("the model alone", "the model compiled again computes something else")


class Given(NamedTuple):
    """What a step was given. inputs: tensors by place. states: tensors by name of the variable;
    None where the variables were as a new request has them.
    """

    inputs: Mapping[int, Any]
    states: Mapping[str, Any] | None


class Observer:
    """Runs one model beside the program's own. source: the model, uncompiled, a copy that nobody
    changes. values: those to show, in the order of the graph.
    """

    def __init__(self, how: Compiled, source: Any, plan: GraphPlan, values: Sequence[str]) -> None:
        self._how, self._source, self._plan = how, source, plan
        self._effects = Effects(values, self._make, _WORDS)
        self._names = [port_name(p, k) for k, p in enumerate(source.outputs)]

    @property
    def values(self) -> list[str]:
        """Those that are shown."""
        return self._effects.values

    def results(self, given: Given, results: Results) -> tuple[Shown, Effect | None]:
        """(values by name, what looking did where that is new) of one step. results: what the
        program's own model returned.
        """

        def run(request: Any, values: Sequence[str]) -> Shown:
            return self._run(request, given, values)

        return self._effects.results(run, results)

    def close(self) -> None:
        """Let go of the model. Idempotent."""
        self._effects.close()

    def _make(self, values: Sequence[str]) -> Any:
        """A request of the model that shows these values."""
        variant = self._source.clone()
        operators = list(variant.get_ordered_ops())
        places = [self._plan.places[value] for value in values]
        if places:
            variant.add_outputs([operators[place].output(port) for place, port in places])
        config = dict(self._how.config or {})
        if self._how.core.get_property("CACHE_DIR") or config.get("CACHE_DIR"):
            config["CACHE_DIR"] = ""  # the program's cache is its own
        names = [self._how.device] if self._how.device else []
        return self._how.core.compile_model(variant, *names, config).create_infer_request()

    def _run(self, request: Any, given: Given, values: Sequence[str]) -> Shown:
        states = request.query_state()
        if states and given.states is None:
            request.reset_state()
        for state in states:
            if given.states is not None and state.name in given.states:
                state.state = given.states[state.name]
        request.infer(dict(given.inputs))
        tensors = list(request.output_tensors)
        # a later run of this request writes over its results
        shown = {
            name: [(name, of_tensor(tensor).kept())] for name, tensor in zip(self._names, tensors)
        }
        for value, tensor in zip(values, tensors[len(self._names) :], strict=True):
            shown[value] = [(value, of_tensor(tensor))]
        return shown
