"""Hears of the ends of all steps, also of those that a loss scaler leaves out because a gradient is
not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from whence.instrument.torch.before_steps import is_inside_step

_STEPS = "_maybe_opt_step"


def call_after_steps(ended: Callable[[Any, bool], None]) -> Any:
    """Call `ended` with every optimiser that has stepped, and whether a `GradScaler` left the step
    out. Returns a handle whose `remove` ends this.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after(optimizer: Any, *_: Any) -> None:
        if not is_inside_step(optimizer):
            ended(optimizer, False)

    return _Handles(
        register_optimizer_step_post_hook(after),
        _SkippedSteps(lambda optimizer: ended(optimizer, True)),
    )


class _Handles:
    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Stop hearing."""
        for handle in self._handles:
            handle.remove()


class _SkippedSteps:
    """The method of `GradScaler` that steps or does not, wrapped."""

    def __init__(self, skipped: Callable[[Any], None]) -> None:
        self._previous = previous = getattr(torch.amp.GradScaler, _STEPS, None)
        if previous is None:  # of another release of torch
            return

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

        self._wrapper = wrapper
        setattr(torch.amp.GradScaler, _STEPS, wrapper)

    def remove(self) -> None:
        """Put the method back, unless somebody wrapped it in turn."""
        if self._previous is not None and getattr(torch.amp.GradScaler, _STEPS) is self._wrapper:
            setattr(torch.amp.GradScaler, _STEPS, self._previous)
