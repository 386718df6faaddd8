"""Wraps the one function through which every module is called.

A wrapper is used instead of hooks: it sees the arguments before any hook and the results after all
of them, changes no module, and keeps torch's fast path without hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from whence.instrument.call_frames import Switch
from whence.instrument.torch.compiled_boundary import get_eval_frame_callback
from whence.instrument.torch.modes import taken_for_torchs


class ModuleCalls:
    """Passes calls of modules to `observe(previous, module, args, kwargs)` while `frames` are
    active.
    """

    def __init__(self, frames: Switch, observe: Callable[..., Any]) -> None:
        self._frames, self._observe = frames, observe
        self._previous: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None

    def wrap(self) -> None:
        """Install the wrapper."""
        previous = torch.nn.Module.__call__
        is_compiling = torch.compiler.is_compiling
        # the same test as `compiled_boundary.inside`, inlined: dynamo would compile a further frame
        callback, off = get_eval_frame_callback, (None, False)
        frames, observe = self._frames, self._observe

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling() or not (frames.active or frames.asleep) or callback() not in off:
                return previous(module, *args, **kwargs)
            return observe(previous, module, args, kwargs)

        taken_for_torchs(__call__)
        # dynamo compiles the frame of a function with this name directly; any other it wraps in one
        # of its own, whose guards would end up in a package of compiled code
        __call__.__name__ = torch.nn.Module._wrapped_call_impl.__name__
        self._previous, self._wrapper = previous, __call__
        __call__.whence = self  # type: ignore[attr-defined]
        _set_call(__call__)

    def unwrap(self) -> None:
        """Remove every wrapper of whence that is on top and no longer listens. One that another
        tool has wrapped stays and does nothing until that tool is removed; dynamo is told at once.
        """
        while (calls := getattr(torch.nn.Module.__call__, "whence", None)) is not None and not (
            calls._frames.active or calls._frames.asleep
        ):
            _set_call(calls._previous)
        below: Any = self if self._wrapper is not None else None
        while below is not None and not (below._frames.active or below._frames.asleep):
            _dynamo_knows(below._wrapper, below._previous)
            below = getattr(below._previous, "whence", None)


def _set_call(new: Any) -> None:
    """Make `new` the `__call__` of every module.

    Dynamo compiles modules on a short path while `__call__` is the one it knows. It must be told of
    the new one: otherwise it would compile the program in another way, and, if imported meanwhile,
    keep the wrapper forever.
    """
    old = torch.nn.Module.__call__
    torch.nn.Module.__call__ = new
    _dynamo_knows(old, new)


def _dynamo_knows(old: Any, new: Any) -> None:
    """Replace `old` by `new` where dynamo keeps it as the `__call__` of modules."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "unpatched_nn_module_call", None) is old:
            module.unpatched_nn_module_call = new  # type: ignore[attr-defined]
