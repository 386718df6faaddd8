"""Reads loss and gradient norm of every step, whether it is recorded or not: the tensor that
`backward()` is called on, and the norm that the program takes to clip by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from whence.instrument.call_frames import CallFrames
from whence.instrument.guard import put_back
from whence.instrument.step_choice.conditions import Quantity, Watcher
from whence.instrument.torch.before_steps import call_before_steps
from whence.instrument.torch.compiled_boundary import inside

_NORMS = ("_get_total_norm", "get_total_norm")


class WatchedValues:
    """Hands loss and gradient norm to a watcher.

    A value on an accelerator is copied without waiting for it, and handed on when it has arrived: a
    step later, mostly. Where the program takes no norm and a condition names it, it is taken here
    before the optimiser's step.
    """

    def __init__(self, watcher: Watcher, frames: CallFrames) -> None:
        self._watcher, self._frames = watcher, frames
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._hooks: list[Any] = []
        self._arriving: deque[tuple[Quantity, Any, Any]] = deque()
        self._has_norm = False

    def install(self) -> None:
        """Begin to read what a condition is about."""
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
        """Stop reading. A wrapper that somebody wrapped in turn stays, and does nothing."""
        put_back(self._undo)
        while self._hooks:
            self._hooks.pop().remove()
        self._arriving.clear()

    def step_ended(self) -> None:
        """Hand on what has arrived."""
        self._has_norm = False
        while self._arriving and self._arriving[0][2].query():
            quantity, value, _ = self._arriving.popleft()
            self._watcher.saw(quantity, float(value))

    def _wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        previous = getattr(owner, name)
        wrapper = around(previous)
        wrapper.__name__ = wrapper.__qualname__ = name
        setattr(owner, name, wrapper)
        self._undo.append((owner, name, wrapper, previous))

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
