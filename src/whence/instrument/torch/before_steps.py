"""Signals the steps of all optimisers, at the moment when their gradients are complete."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def call_before_steps(ready: Callable[[Any], None]) -> Any:
    """Call `ready` with every optimiser that is about to change parameters. Returns a handle whose
    `remove` ends this.

    A step with a closure, as in Lightning's loops, computes its gradients inside: `ready` is then
    called after the closure's first return. A step nested in a step of the same optimiser counts as
    part of it.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if is_inside_step(optimizer):
            return None
        tell = functools.partial(ready, optimizer)
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": _followed_by(closure, tell)}
        if len(args) > 1 and callable(args[1]):  # args[0] is the optimiser
            return (args[0], _followed_by(args[1], tell), *args[2:]), kwargs
        tell()
        return None

    return register_optimizer_step_pre_hook(before)


def _followed_by(closure: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    """The closure, with `tell` called after its first call."""
    is_told = False

    @functools.wraps(closure)
    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_told
        result = closure(*args, **kwargs)
        if not is_told:
            is_told = True
            tell()
        return result

    return with_gradients


def is_inside_step(optimizer: Any) -> bool:
    """Whether the step from whose hook this is called is nested in another step of the same
    optimiser.

    This happens where a class calls `step` of its base class and the program also has an optimiser
    of that base class: torch then hooks both.
    """
    code = _code_of_steps()
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and steps < 2:
        steps += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


@functools.cache
def _code_of_steps() -> Any:
    """The code object of the wrapper that torch puts around every optimiser's `step` to call
    hooks.
    """
    from torch.optim import Optimizer

    return Optimizer.profile_hook_step(lambda: None).__code__
