"""One compiled model of the program: what it is given and returns, and the values of its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from whence.instrument.engines.effect import Effect, Shown
from whence.instrument.engines.roots import ModelRoot
from whence.instrument.engines.tensors import Tensors
from whence.instrument.engines.values import Seen
from whence.instrument.engines.watched import NodeForm, StepInProgress, Watched
from whence.instrument.openvino.graph_plan import GraphPlan
from whence.instrument.openvino.observer import Given, Observer
from whence.instrument.openvino.source_graph import SourceGraph
from whence.instrument.openvino.values import dtype_of, of_bytes, of_tensor, port_name
from whence.instrument.session import Session
from whence.records.marks import EngineModel

STATE = "state."
"""Before the name of a variable, in slots."""


class Inside(NamedTuple):
    """What is known of the graph that a model was compiled from. model: it, uncompiled."""

    source: SourceGraph
    model: Any
    plan: GraphPlan
    observer: Observer


class InferInProgress(StepInProgress):
    """One inference. states: tensors of the variables before it, None where they are as a new
    request has them.
    """

    def __init__(self, order: int, step: int) -> None:
        super().__init__(order, step)
        self.states: dict[str, Any] | None = None
        self.inputs: dict[int, Any] = {}


class WatchedModel(Watched):
    """Records the inferences of one compiled model. inside: None where only inputs and outputs are
    taken.
    """

    KIND = EngineModel.OPENVINO.value
    NO_PROGRAM = "nodes of OpenVINO are not recorded as programs"

    def __init__(
        self, session: Session, tensors: Tensors, root: ModelRoot, compiled_model: Any
    ) -> None:
        super().__init__(session, tensors, root)
        self.inside: Inside | None = None
        self._inputs = [port_name(p, k) for k, p in enumerate(compiled_model.inputs)]
        self._outputs = [port_name(p, k) for k, p in enumerate(compiled_model.outputs)]

    # ---- a step

    def begin(self, request: Any, *, is_new: bool) -> InferInProgress:
        """A request is about to infer. is_new: its variables are as a new request has them."""
        session = self.session
        step = InferInProgress(session.next_order(), self.root.steps)
        self.started(step)
        states = {str(state.name): _copied(state.state) for state in request.query_state()}
        step.states = None if is_new and not any(map(_is_set, states.values())) else states
        if step.selected and session.selector.slots("input"):
            for name, tensor in states.items():
                self.take(step, STATE + name, f"input.{STATE}{name}", of_tensor(tensor))
        return step

    def end(self, step: InferInProgress, request: Any, error: str) -> None:
        """It has inferred, or raised."""
        session = self.session
        step.inputs = dict(enumerate(request.input_tensors))
        if step.selected and session.selector.slots("input"):
            for place, tensor in step.inputs.items():
                name = self._inputs[place]
                self.take(step, name, f"input.{name}", of_tensor(tensor))
        results: dict[str, Seen] = {}
        if not error:
            tensors = request.output_tensors
            results = {n: of_tensor(t) for n, t in zip(self._outputs, tensors, strict=True)}
            for state in request.query_state():
                results[f"{STATE}{state.name}"] = of_tensor(_copied(state.state))
        self.ended(step, results, error)

    # ---- nodes

    @property
    def nodes(self) -> Sequence[NodeForm] | None:
        """What the device executes."""
        return None if self.inside is None else self.inside.plan.nodes

    def show(
        self, step: StepInProgress, results: Mapping[str, Seen]
    ) -> tuple[Shown, Effect | None]:
        """Run the model beside."""
        assert self.inside is not None
        infer = cast(InferInProgress, step)
        return self.inside.observer.results(Given(infer.inputs, infer.states), results)

    def recorded(self) -> None:
        """Nothing is kept for a first step alone."""

    def close_inside(self) -> None:
        """Let go of the model beside. Idempotent."""
        inside, self.inside = self.inside, None
        if inside is not None:
            inside.observer.close()

    def constant(self, form: NodeForm, name: str, shown: Shown) -> tuple[Seen, None]:
        """A constant of the source."""
        assert self.inside is not None
        return _constant(self.inside, name), None


def _constant(inside: Inside, name: str) -> Seen:
    operator = inside.model.get_ordered_ops()[inside.plan.constants[name]]
    kind, shape = dtype_of(operator.get_output_element_type(0)), tuple(operator.get_output_shape(0))
    return of_bytes(kind, tuple(int(n) for n in shape), operator.data)


def _copied(tensor: Any) -> Any:
    """A tensor of OpenVINO with memory of its own."""
    copy = type(tensor)(tensor.element_type, tensor.shape)
    tensor.copy_to(copy)
    return copy


def _is_set(tensor: Any) -> bool:
    """Does a state hold anything but zeros?"""
    seen = of_tensor(tensor)
    return not seen.why and bool(np.any(seen.array().reshape(-1).view(np.uint8)))
