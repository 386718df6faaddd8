"""Listens to Paddle's layers in dynamic mode: every call of every `nn.Layer` below a root, with
parameters, inputs, outputs, mutations.

Tensors of one layer call: what it is given, holds, changes and returns, as records and refs of
its frame.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from whence.frameworks import paddle_arrays as tensors
from whence.instrument.call_frames import (
    Args,
    CallFrames,
    Frame,
    Kwargs,
    Root,
    Switch,
    count,
    root_or_name,
)
from whence.instrument.guard import Replacements
from whence.instrument.paddle import settings as paddle_facts
from whence.instrument.paddle.ended_operators import NO_PROGRAM
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.tensor_identity import Tensors
from whence.instrument.session import Origin, Session
from whence.instrument.wording import raised
from whence.records import Call, Ref
from whence.records.experts import note_of_experts
from whence.records.marks import Mark
from whence.records.slots import is_param


class Listener:
    """Records layer calls into a session while installed.

    layer: only calls of this one and below it; None: every layer that is called (each outermost one
    is a root).
    """

    def __init__(
        self, session: Session, layer: Any = None, *, changes: Interventions | None = None
    ) -> None:
        self.session, self.changes = session, changes
        self._layer = layer
        # else only what the outermost layer is given and returns
        self._modules = session.options.level != "logits"
        self.frames = CallFrames(session)
        self.tensors = _LayerTensors(session, changes)
        self._layers: dict[int, tuple[Callable[[], Any], str, LayerRoot]] = {}
        self._roots: list[LayerRoot] = []
        self._calls = LayerCalls(self.frames, self._observe)
        self._begun = False

    @property
    def active(self) -> bool:
        """Whether the listener records. Set it to False to stop for a while."""
        return self.frames.active

    @active.setter
    def active(self, active: bool) -> None:
        self.frames.active = active

    # ---- installing

    def install(self) -> None:
        """Start listening."""
        self._calls.wrap()
        self.active = True
        if self._layer is not None:
            self.frames.guarded(self._new_root, self._layer)

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        self.active = False
        self._calls.unwrap()
        self._layers.clear()
        self._roots.clear()
        if self.changes is not None and not self.session.failed:
            self.changes.finish()

    def abandon(self) -> None:
        """Stop without writing anything more: in a forked child, whose files belong to the
        parent.
        """
        self.frames.forked()
        self.remove()

    # ---- one call

    def _observe(
        self, previous: Callable[..., Any], layer: Any, inputs: Args, kwargs: Kwargs
    ) -> Any:
        thread, guarded = self.frames.thread, self.frames.guarded
        if thread.busy or (thread.stack and not self._modules):
            return previous(layer, *inputs, **kwargs)
        frame = guarded(self._enter, layer, inputs, kwargs)
        if frame is None:
            return previous(layer, *inputs, **kwargs)
        try:
            out = previous(layer, *inputs, **kwargs)
        except BaseException as error:  # of the program: recorded, and raised again
            guarded(self._leave, frame, None, raised(error))
            raise
        guarded(self._leave, frame, out, "")
        return out

    def _enter(self, layer: Any, inputs: Args, kwargs: Kwargs) -> LayerFrame | None:
        session = self.session
        if session.failed:
            self.active = False
            return None
        stack = self.frames.thread.stack
        parent = stack[-1] if stack else None
        scope_and_root = self._scope_of(layer, parent)
        if scope_and_root is None:
            return None
        scope, root = scope_and_root
        frame = LayerFrame(layer, scope, session.next_order(), parent)
        if parent is None:
            frame.root, frame.step, frame.counts = root, root.steps, {}
            root.tensors.begin()
            session.begin_step(root.name)
        frame.occurrence = count(frame.counts, scope)
        frame.selected = session.takes_all or session.selector.wants(
            scope, frame.op_type, frame.depth, frame.number, frame.step
        )
        stack.append(frame)
        if not frame.selected:
            frame.notes.append(Mark.NOT_SELECTED.value)
            return frame
        session.over_budget(scope, frame.step)
        frame.keep = session.elements_on
        self.tensors.take_inputs(frame, inputs, kwargs)
        return frame

    def _leave(self, frame: LayerFrame, out: Any, error: str) -> None:
        self.frames.leave(frame)
        session, root = self.session, frame.root
        if session.failed:
            self.active = False
            return
        if frame.selected and not error:
            self.tensors.take_results(frame, out)
        session.call(
            Call(
                frame.order,
                frame.scope,
                root.name,
                frame.step,
                frame.order,
                rank=session.rank,
                occurrence=frame.occurrence,
                op_type=frame.op_type,
                source=f"{type(frame.layer).__module__}.{type(frame.layer).__qualname__}",
                parent=frame.parent.order if frame.parent is not None else -1,
                number=frame.number,
                leaf=frame.children == 0,
                training=frame.training,
                refs=tuple(frame.refs),
                arguments=frame.arguments,
                no_program=NO_PROGRAM,
                notes=tuple(frame.notes),
                error=error,
            )
        )
        if frame.parent is None:
            session.end_step(root.name, frame.step)
            root.steps += 1

    # ---- names

    def _scope_of(self, layer: Any, parent: LayerFrame | None) -> tuple[str, LayerRoot] | None:
        """(scope, root) of a layer that is called; None if it is not observed."""
        entry = self._layers.get(id(layer))
        if entry is None or entry[0]() is not layer:
            if parent is not None:
                inside = f"<{type(layer).__name__}>"
                scope = f"{parent.scope}.{inside}" if parent.scope else inside
                self._learn(layer, parent.root, scope)
            elif self._layer is not None:
                return None
            else:
                self._new_root(layer)
            if not self.active:
                return None
            entry = self._layers[id(layer)]
        return entry[1:]

    def _new_root(self, layer: Any) -> None:
        if not self._begun:
            self._begun = True
            if not self.session.begin():
                self.active = False
                return
        root, name = root_or_name(self._roots, type(layer).__name__)
        if root is not None:
            root.ref = weakref.ref(layer)
        else:
            root = LayerRoot(name, layer, self.session)
            self._roots.append(root)
            settings = paddle_facts.versions() | paddle_facts.of_layer(layer)
            self.session.note("settings", msgspec.json.encode(settings).decode(), root.name)
            inside = () if self._modules else layer.named_sublayers(include_self=True)
            if (note := note_of_experts(inside, root.name)) is not None:
                self.session.note(note.kind, note.text, note.scope)
        self._learn(layer, root, "")

    def _learn(self, layer: Any, root: LayerRoot, scope: str) -> None:
        for name, child in layer.named_sublayers(prefix=scope, include_self=True):
            entry = self._layers.get(id(child))
            if entry is None or entry[0]() is not child or child is layer:
                self._layers[id(child)] = (weakref.ref(child), name, root)


_TRACED = "traced by to_static: inside not seen"
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


class _LayerTensors:
    """Records the tensors of layer calls. changes: deliberate replacements of tensors."""

    def __init__(self, session: Session, changes: Interventions | None) -> None:
        self._session, self._changes = session, changes
        # else only what the outermost layer is given and returns
        self._holds = session.options.level != "logits"

    def take_inputs(
        self, frame: LayerFrame, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the inputs of a call and the parameters of its layer."""
        traced = _is_traced(frame.layer)
        if traced:
            frame.notes.append(_TRACED)
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
            and _TRACED not in frame.notes
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
        """Record parameters and buffers of the layer, and those of layers below it that are not
        called.
        """
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


def _is_traced(layer: Any) -> bool:
    """Whether calling this layer runs a traced program: made by to_static, or loaded by
    jit.load.
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


# The one function through which every layer is called, as a listener wraps it.
#
# `nn.Layer.__call__` is wrapped while somebody listens, as of torch modules: that sees what
# entered before any hook and what left after all of them, keyword arguments too. Code that
# `to_static` traced is entered through its layer's call, so its boundary is recorded; inside,
# Paddle gets its own `__call__` back, so that what it traces is the program and not this wrapper.


class LayerCalls:
    """Passes calls of layers to `observe(previous, layer, inputs, kwargs)` while `switch` is
    active.
    """

    def __init__(self, switch: Switch, observe: Callable[..., Any]) -> None:
        self._switch, self._observe = switch, observe
        self._lock = threading.RLock()
        self._replaced = Replacements()
        self._call: tuple[Any, Any, Any] | None = None
        self._inside = 0

    def wrap(self) -> None:
        """Put the wrapper on."""
        import paddle
        from paddle.jit.dy2static import program_translator

        kind, switch, observe = paddle.nn.Layer, self._switch, self._observe
        previous, in_dynamic_mode = kind.__call__, paddle.in_dynamic_mode

        def __call__(layer: Any, *inputs: Any, **kwargs: Any) -> Any:  # noqa: N807
            if not switch.active or not in_dynamic_mode():
                return previous(layer, *inputs, **kwargs)
            return observe(previous, layer, inputs, kwargs)

        self._replaced.put(kind, "__call__", __call__)
        self._call = kind, __call__, previous
        for name in ("SymbolicStaticFunction", "ASTStaticFunction"):
            traced = getattr(program_translator, name, None)
            if traced is not None and "_perform_call" in vars(traced):
                self._around(traced)

    def unwrap(self) -> None:
        """Remove the wrapper. Idempotent."""
        self._replaced.remove()
        self._call = None

    def _around(self, traced: Any) -> None:
        """While code runs that to_static traced, `__call__` is Paddle's own: it may be traced
        now.
        """
        perform = traced._perform_call

        def _perform_call(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._step_aside()
            try:
                return perform(function, *args, **kwargs)
            finally:
                self._step_back()

        self._replaced.put(traced, "_perform_call", _perform_call)

    def _step_aside(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1 and self._call is not None:
                kind, wrapper, previous = self._call
                if kind.__call__ is wrapper:
                    kind.__call__ = previous

    def _step_back(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._call is not None and self._switch.active:
                kind, wrapper, previous = self._call
                if kind.__call__ is previous:
                    kind.__call__ = wrapper
