"""Hears of the steps of all optimisers, at the moment when their gradients are there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def call_before_steps(ready: Callable[[Any], None]) -> Any:
    """Call `ready` with every optimiser that is about to change parameters. Returns a handle whose
    `remove` ends this.

    A step with a closure, as loops of Lightning write it, computes its gradients inside: then
    `ready` is called when the closure returns for the first time.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        tell = functools.partial(ready, optimizer)
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": _followed_by(closure, tell)}
        if len(args) > 1 and callable(args[1]):  # args[0] is the optimiser
            return (args[0], _followed_by(args[1], tell), *args[2:]), kwargs
        tell()
        return None

    return register_optimizer_step_pre_hook(before)


def _followed_by(closure: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    """The closure, with `tell` called behind its first call."""
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
