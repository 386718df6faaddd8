"""Lets the calls of steps pass that are not recorded, at next to no cost, and counts the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from whence.instrument import window_ends
from whence.instrument.call_frames import Args, CallFrames, Kwargs
from whence.instrument.guard import keep_ring
from whence.instrument.session import Session
from whence.instrument.step_choice.ending import BeforeTermination
from whence.instrument.step_choice.gate import StepGate
from whence.instrument.step_choice.ring import StepRing
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.modes import is_traced
from whence.instrument.torch.module_info import ModuleInfo
from whence.instrument.torch.module_registry import ModuleRegistry
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.listener import Training
from whence.instrument.torch.watched_values import WatchedValues

_tracing, _depth = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
_task = torch._C._current_graph_task_id


class GatedSteps:
    """The steps of a listener, of which some are recorded.

    A training step ends with the optimiser's step, one of inference with the outermost call;
    between two of them nothing is decided anew. meet: what is known of a module that is called for
    the first time.
    """

    def __init__(
        self,
        gate: StepGate,
        session: Session,
        frames: CallFrames,
        modules: ModuleRegistry,
        registry: TensorRegistry,
        meet: Callable[[Any, None], ModuleInfo | None],
        training: Training | None,
    ) -> None:
        self._gate, self._session, self._frames = gate, session, frames
        self._modules, self._registry, self._meet = modules, registry, meet
        self._training = training
        self._values = WatchedValues(gate.watcher, frames)
        self._termination = BeforeTermination(self._terminated)
        self._before: tuple[bool, bool] | None = None
        session.selector.leave_steps()
        session.steps_are_calls = False

    def install(self) -> None:
        """Begin to listen: to values and signals."""
        self._values.install()
        if self._gate.signal is not None and not self._gate.signal.install():
            text = "SIGUSR1 is not listened to: the program handles it, or it came from a thread"
            self._session.note("trigger", text, aloud=True)
        if self._session.options.ring is not None:
            self._termination.install()

    def remove(self) -> None:
        """Stop listening."""
        self._gate.close()
        self._values.remove()
        self._termination.remove()
        if self._gate.signal is not None:
            self._gate.signal.remove()

    # ---- outermost calls

    def observing(self, record: Callable[..., Any]) -> Callable[..., Any]:
        """What every call of a module goes through: to `record`, or past it."""
        frames, thread = self._frames, self._frames.thread

        def observe(previous: Callable[..., Any], module: Any, args: Args, kwargs: Kwargs) -> Any:
            if thread.busy:
                return previous(module, *args, **kwargs)
            if (
                thread.stack
                or _tracing() is not None
                or (_depth() and is_traced())
                or not frames.guarded(self._passes, module)
            ):
                return record(previous, module, args, kwargs)
            thread.busy = True
            try:
                return previous(module, *args, **kwargs)
            finally:
                thread.busy = False
                frames.guarded(self.ended)

        return observe

    def _passes(self, module: Any) -> bool:
        """Decide about an outermost call: does it pass unrecorded? It is counted then."""
        frames = self._frames
        if self._session.failed:
            frames.active = frames.asleep = False
            return False
        info = self._modules.get(module) or self._meet(module, None)
        if info is None:
            return False
        root = info.root
        self._before = None
        if _task() == -1:  # else a recomputation, which is recorded where its step is
            training = module.training and torch.is_grad_enabled()
            recorded = self._gate.takes(root.steps.get("" if training else info.scope, 0))
            if not training and self._is_training:
                self._before = frames.active, frames.asleep
            ring = self._ring
            if ring is not None and ring.through != recorded:
                self._registry.staging.drain()
                ring.through = recorded
            frames.active = recorded or (ring is not None and not self._gate.is_off)
            frames.asleep = not frames.active
        if frames.active:
            return False
        if self._training is not None:
            self._training.drop("a step that is not recorded begins")
        root.begin(ModuleFrame(module, info, -1, None))
        return True

    def ended(self) -> None:
        """An outermost call has returned, recorded or not."""
        if self._before is not None:
            self._frames.active, self._frames.asleep = self._before
            self._before = None
        if not self._is_training:
            self.step_ended()

    @property
    def _is_training(self) -> bool:
        """Is some root between its first forward pass of a step and the optimiser's step?"""
        return any(root.trained for root in self._modules.roots.values())

    # ---- steps

    @property
    def _ring(self) -> StepRing | None:
        if self._session.options.ring is None:
            return None
        sink = self._session.sink()
        assert isinstance(sink, StepRing)
        self._gate.ring = sink
        return sink

    def step_ended(self) -> None:
        """A step has ended."""
        self._values.step_ended()
        if self._ring is not None:
            self._registry.staging.drain()
        self._gate.step_ended()
        window_ends.step_ended(self._session, self._registry.staging.drain)

    def _terminated(self) -> None:
        with self._frames.lock:
            self._frames.active = self._frames.asleep = False
            self._registry.staging.drain()
            keep_ring(self._session, "SIGTERM came")
