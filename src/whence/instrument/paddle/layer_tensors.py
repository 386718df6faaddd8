"""Tensors of one layer call: what it is given, holds, changes and returns, as records and refs of
its frame.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from whence.frameworks import paddle_arrays as tensors
from whence.instrument.call_frames import Frame, Root
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.tensor_identity import Tensors
from whence.instrument.session import Origin, Session
from whence.records import Ref
from whence.records.slots import is_param

TRACED = "traced by to_static: inside not seen"
_NESTING = 8
_SIMPLE = (bool, int, float, str)


class LayerFrame(Frame):
    """One call of a layer. inputs: (slot, tensor, its version, record)."""

    __slots__ = ("arguments", "inputs", "layer", "notes", "op_type", "training")
    root: LayerRoot

    def __init__(self, layer: Any, scope: str, order: int, parent: LayerFrame | None) -> None:
        super().__init__(scope, order, parent)
        self.layer, self.op_type, self.training = layer, type(layer).__name__, bool(layer.training)
        self.notes: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.inputs: list[tuple[str, Any, int, int]] = []


class LayerRoot(Root):
    """A root that is a layer: its steps, and the tensors that were seen in the step in progress."""

    def __init__(self, name: str, layer: Any, session: Session) -> None:
        super().__init__(name, weakref.ref(layer))
        self.steps = 0
        self.tensors = Tensors(session)


class LayerTensors:
    """Records the tensors of layer calls. changes: what is replaced on purpose."""

    def __init__(self, session: Session, changes: Interventions | None) -> None:
        self._session, self._changes = session, changes
        # else only what the outermost layer is given and returns
        self._holds = session.options.level != "logits"

    def take_inputs(
        self, frame: LayerFrame, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record what a call is given, and what its layer holds."""
        traced = is_traced(frame.layer)
        if traced:
            frame.notes.append(TRACED)
        if self._holds:
            self._take_parameters(frame, deep=traced)
        collected: list[tuple[str, Any]] = []
        for i, value in enumerate(inputs):
            _collect(value, f"input.{i}", collected, frame.arguments)
        for name, value in kwargs.items():
            _collect(value, f"input.{name}", collected, frame.arguments)
        if self._session.selector.slots("input"):
            for slot, tensor in collected:
                record, edge = self._sight(tensor, slot, frame)
                frame.refs.append(Ref(slot, record, edge))
                frame.inputs.append((slot, tensor, int(tensor.inplace_version), record))

    def take_results(self, frame: LayerFrame, out: Any) -> None:
        """Record what a call changed and returned."""
        if (
            self._holds
            and frame.children == 0
            and TRACED not in frame.notes
            and any(True for _ in frame.layer.children())
        ):
            # None of its children was called, so their parameters are its own.
            frame.refs = [r for r in frame.refs if not is_param(r.slot)]
            self._take_parameters(frame, deep=True)
        self._take_mutated(frame)
        self._take_outputs(frame, out)

    def _sight(self, tensor: Any, slot: str, frame: LayerFrame, since: int = -1) -> tuple[int, str]:
        origin = Origin(frame.scope, slot, frame.op_type, frame.keep)
        return frame.root.tensors.sight(tensor, frame.order, origin, since)

    @staticmethod
    def _parameter(
        tensor: Any, name: str, slot: str, frame: LayerFrame, sure: bool
    ) -> tuple[int, str]:
        full = f"{frame.scope}.{name}" if frame.scope else name
        origin = Origin(frame.scope, slot, frame.op_type)
        return frame.root.tensors.parameter(tensor, full, origin, sure=sure)

    def _take_parameters(self, frame: LayerFrame, *, deep: bool) -> None:
        """Parameters and buffers of the layer; of those below it too when they are not called."""
        for name, tensor in _held(frame.layer, deep):
            slot = f"param.{name}"
            # A training step changes all elements; elsewhere a sample shows it.
            sight = self._parameter(tensor, name, slot, frame, frame.training)
            frame.refs.append(Ref(slot, *sight))

    def _take_mutated(self, frame: LayerFrame) -> None:
        for slot, tensor, version, record in frame.inputs:
            if int(tensor.inplace_version) != version:
                number, edge = self._sight(tensor, f"mutated{slot[5:]}", frame)
                if number != record:
                    frame.refs.append(Ref(f"mutated{slot[5:]}", number, edge))
        if not frame.training or frame.children:
            return
        records = {ref.slot: ref.record for ref in frame.refs}
        for name, tensor in _held(frame.layer, False):
            # batch norm writes its running statistics, which are parameters without a gradient
            if tensor.stop_gradient:
                slot = f"mutated.{name}"
                number, edge = self._parameter(tensor, name, slot, frame, True)
                if number != records.get(f"param.{name}"):
                    frame.refs.append(Ref(slot, number, edge))

    def _take_outputs(self, frame: LayerFrame, out: Any) -> None:
        outputs: list[tuple[str, Any]] = []
        _collect(
            out,
            "output"
            if isinstance(out, (list, tuple, dict)) or dataclasses.is_dataclass(out)
            else "output.0",
            outputs,
            {},
        )
        for slot, tensor in outputs:
            if self._changes is not None:
                note = self._changes.wrote(
                    frame.root.name,
                    frame.step,
                    frame.scope or frame.root.name,
                    frame.occurrence,
                    tensor,
                    slot,
                )
                if note and note not in frame.notes:
                    frame.notes.append(note)
            if self._session.selector.slots("output"):
                frame.refs.append(Ref(slot, *self._sight(tensor, slot, frame, since=frame.order)))


def is_traced(layer: Any) -> bool:
    """Does calling this layer run a program that was traced: by to_static, or loaded by
    jit.load?
    """
    forward = layer.__dict__.get("forward", getattr(type(layer), "forward", None))
    return any("StaticFunction" in kind.__name__ for kind in type(forward).__mro__) or any(
        kind.__name__ == "TranslatedLayer" for kind in type(layer).__mro__
    )


def _held(layer: Any, deep: bool) -> list[tuple[str, Any]]:
    attributes = [
        *layer.named_parameters(include_sublayers=deep),
        *layer.named_buffers(include_sublayers=deep),
    ]
    return [(name, tensor) for name, tensor in attributes if tensors.is_tensor(tensor)]


def _collect(
    value: Any, slot: str, collected: list[tuple[str, Any]], arguments: dict[str, Any]
) -> None:
    """Tensors (in any nesting) go to `collected`, simple values to `arguments`."""
    if tensors.is_tensor(value):
        collected.append((slot, value))
    elif value is None or slot.count(".") > _NESTING:
        return
    elif isinstance(value, _SIMPLE):
        if not isinstance(value, str) or len(value) <= 200:
            arguments[slot] = value
    elif isinstance(value, dict):
        for k, v in value.items():
            _collect(
                v,
                f"{slot}.{k if isinstance(k, _SIMPLE) else type(k).__name__}",
                collected,
                arguments,
            )
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            _collect(v, f"{slot}.{i}", collected, arguments)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), f"{slot}.{field.name}", collected, arguments)
