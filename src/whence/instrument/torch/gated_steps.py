"""Skips the calls of steps that are not recorded, and counts steps.

Reads loss and gradient norm of every step, recorded or not: the loss is the tensor that
`backward()` is called on, the norm is the one that the program computes for clipping.

Signals the end of every step, including those that a loss scaler skips because a gradient is not
finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from whence.instrument.call_frames import Args, CallFrames, Kwargs
from whence.instrument.guard import Replacements, keep_ring
from whence.instrument.session import Session
from whence.instrument.step_choice.conditions import Quantity, Watcher
from whence.instrument.step_choice.ending import BeforeTermination
from whence.instrument.step_choice.gate import StepGate
from whence.instrument.step_choice.ring import StepRing
from whence.instrument.torch.before_steps import call_before_steps, is_inside_step
from whence.instrument.torch.compiled_boundary import inside
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.modes import is_traced
from whence.instrument.torch.module_info import ModuleInfo
from whence.instrument.torch.module_registry import ModuleRegistry
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.listener import Training

_tracing, _depth = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
_task = torch._C._current_graph_task_id


class GatedSteps:
    """Decides which steps of a listener are recorded.

    A training step ends with the optimiser's step, an inference step with the outermost call; in
    between the decision stays the same. meet: returns the `ModuleInfo` of a module that is called
    for the first time.
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
        self._values = _WatchedValues(gate.watcher, frames)
        self._termination = BeforeTermination(self._terminated)
        self._before: tuple[bool, bool] | None = None
        session.selector.leave_steps()

    def install(self) -> None:
        """Start observing loss, norm and signals."""
        self._values.install()
        if self._session.options.ring is not None:
            self._termination.install()

    def remove(self) -> None:
        """Stop listening."""
        self._gate.close()
        self._values.remove()
        self._termination.remove()

    # ---- outermost calls

    def observing(self, record: Callable[..., Any]) -> Callable[..., Any]:
        """The function through which every module call goes: it passes the call to `record`, or
        runs it unrecorded.
        """
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
        """Decide about an outermost call: returns whether it runs unrecorded. Such a call is
        counted here.
        """
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
        """Note that an outermost call has returned, recorded or not."""
        if self._before is not None:
            self._frames.active, self._frames.asleep = self._before
            self._before = None
        if not self._is_training:
            self.step_ended()

    @property
    def _is_training(self) -> bool:
        """Whether some root is between its first forward pass of a step and the optimiser's
        step.
        """
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
        """Note the end of a step."""
        self._values.step_ended()
        if self._ring is not None:
            self._registry.staging.drain()
        self._gate.step_ended()

    def _terminated(self) -> None:
        with self._frames.lock:
            self._frames.active = self._frames.asleep = False
            self._registry.staging.drain()
            keep_ring(self._session, "SIGTERM came")


_NORMS = ("_get_total_norm", "get_total_norm")


class _WatchedValues:
    """Passes loss and gradient norm to a watcher.

    A value on an accelerator is copied asynchronously and passed on when it has arrived, usually
    one step later. If a condition needs the norm and the program computes none, it is computed here
    before the optimiser's step.
    """

    def __init__(self, watcher: Watcher, frames: CallFrames) -> None:
        self._watcher, self._frames = watcher, frames
        self._replaced = Replacements()
        self._hooks: list[Any] = []
        self._arriving: deque[tuple[Quantity, Any, Any]] = deque()
        self._has_norm = False

    def install(self) -> None:
        """Start reading the values that conditions use."""
        if self._watcher.may_use(Quantity.LOSS):
            self._wrap(torch.autograd, "backward", self._around_backward)
        if self._watcher.may_use(Quantity.NORM):
            for module in (torch.nn.utils.clip_grad, torch.nn.utils):
                for name in _NORMS:
                    if hasattr(module, name):
                        self._wrap(module, name, self._around_norm)
        if self._watcher.needs(Quantity.NORM):
            self._hooks.append(call_before_steps(self._before_step))

    def remove(self) -> None:
        """Stop reading. If another tool has wrapped a wrapper, it stays in place and does
        nothing.
        """
        self._replaced.remove()
        while self._hooks:
            self._hooks.pop().remove()
        self._arriving.clear()

    def step_ended(self) -> None:
        """Pass on the values that have arrived."""
        self._has_norm = False
        while self._arriving and self._arriving[0][2].query():
            quantity, value, _ = self._arriving.popleft()
            self._watcher.saw(quantity, float(value))

    def _wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        previous = getattr(owner, name)
        wrapper = around(previous)
        wrapper.__name__ = wrapper.__qualname__ = name
        self._replaced.put(owner, name, wrapper)

    def _is_on(self) -> bool:
        frames = self._frames
        return (frames.active or frames.asleep) and not frames.thread.busy

    def _around_backward(self, previous: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_on() and not inside():
                self._frames.guarded(self._read, Quantity.LOSS, tensors)
            return previous(tensors, *args, **kwargs)

        return backward

    def _around_norm(self, previous: Any) -> Any:
        def total_norm(*args: Any, **kwargs: Any) -> Any:
            norm = previous(*args, **kwargs)
            if self._is_on() and not self._has_norm and not inside():
                self._has_norm = True
                self._frames.guarded(self._read, Quantity.NORM, norm)
            return norm

        return total_norm

    def _before_step(self, optimizer: Any) -> None:
        if self._is_on() and not self._has_norm:
            self._frames.guarded(self._take_norm, optimizer)

    def _take_norm(self, optimizer: Any) -> None:
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.grad.layout is torch.strided
        ]
        if gradients:
            with torch.no_grad():
                norms = torch._foreach_norm(gradients)
                device = norms[0].device
                total = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]))
            self._read(Quantity.NORM, total)

    def _read(self, quantity: Quantity, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for each in value:
                self._read(quantity, each)
            return
        if type(value) is not torch.Tensor or value.numel() != 1 or not value.is_floating_point():
            return
        value = value.detach()
        if value.is_cpu:
            self._watcher.saw(quantity, value.item())
            return
        arrived = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        arrived.copy_(value, non_blocking=True)
        event = torch.Event(value.device)
        event.record()
        self._arriving.append((quantity, arrived, event))


_STEPS = "_maybe_opt_step"


def call_after_steps(ended: Callable[[Any, bool], None]) -> Any:
    """Call `ended(optimizer, is_skipped)` after every optimiser step; is_skipped: a `GradScaler`
    skipped it. Returns a handle whose `remove` ends this.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after(optimizer: Any, *_: Any) -> None:
        if not is_inside_step(optimizer):
            ended(optimizer, False)

    return _Handles(
        register_optimizer_step_post_hook(after),
        _follow_skipped(lambda optimizer: ended(optimizer, True)),
    )


class _Handles:
    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove all handles."""
        for handle in self._handles:
            handle.remove()


def _follow_skipped(skipped: Callable[[Any], None]) -> Replacements:
    """Wrap the method of `GradScaler` that decides whether to step."""
    replaced = Replacements()
    previous = getattr(torch.amp.GradScaler, _STEPS, None)
    if previous is None:  # of another release of torch
        return replaced

    def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        has_stepped = False

        def steps(*_: Any) -> None:
            nonlocal has_stepped
            has_stepped = True

        handle = optimizer.register_step_pre_hook(steps)
        try:
            out = previous(scaler, optimizer, *args, **kwargs)
        finally:
            handle.remove()
        if not has_stepped:
            skipped(optimizer)
        return out

    replaced.put(torch.amp.GradScaler, _STEPS, wrapper)
    return replaced
