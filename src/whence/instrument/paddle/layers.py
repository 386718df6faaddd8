"""Listens to Paddle's layers in dynamic mode: every call of every `nn.Layer` below a root, with
parameters, inputs, outputs, mutations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from whence.instrument.call_frames import Args, CallFrames, Kwargs, count, root_or_name
from whence.instrument.paddle import settings as paddle_facts
from whence.instrument.paddle.ended_operators import NO_PROGRAM
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.layer_calls import LayerCalls
from whence.instrument.paddle.layer_tensors import LayerFrame, LayerRoot, LayerTensors
from whence.instrument.session import Session
from whence.instrument.wording import raised
from whence.records import Call
from whence.records.experts import note_of_experts
from whence.records.marks import Mark


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
        self.tensors = LayerTensors(session, changes)
        self._layers: dict[int, tuple[Callable[[], Any], str, LayerRoot]] = {}
        self._roots: list[LayerRoot] = []
        self._calls = LayerCalls(self.frames, self._observe)
        self._begun = False

    @property
    def active(self) -> bool:
        """Does it listen? Can be set: False to stop for a while."""
        return self.frames.active

    @active.setter
    def active(self, active: bool) -> None:
        self.frames.active = active

    # ---- installing

    def install(self) -> None:
        """Start listening."""
        self.session.load_kernels()
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

    def aside(self, *, aside: bool = True) -> AbstractContextManager[None]:
        """What this thread calls inside is not listened to; aside=False: it is again."""
        return self.frames.aside(aside=aside)

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
        """Scope and root of a layer that is called; None if it is not listened to."""
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
