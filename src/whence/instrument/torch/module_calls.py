"""The one function through which every module is called, as a listener wraps it.

Not hooks: a wrapper sees what entered before any hook and what left after all of them, needs no
change to the module, and keeps torch's fast path without hooks.
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
    """Calls of modules, handed to `observe(previous, module, args, kwargs)` while `frames` are
    active.
    """

    def __init__(self, frames: Switch, observe: Callable[..., Any]) -> None:
        self._frames, self._observe = frames, observe
        self._previous: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None

    def wrap(self) -> None:
        """Put the wrapper on."""
        previous = torch.nn.Module.__call__
        is_compiling = torch.compiler.is_compiling
        # as `compiled_boundary.inside` asks; a frame of ours would go to dynamo
        callback, off = get_eval_frame_callback, (None, False)
        frames, observe = self._frames, self._observe

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling() or not (frames.active or frames.asleep) or callback() not in off:
                return previous(module, *args, **kwargs)
            return observe(previous, module, args, kwargs)

        taken_for_torchs(__call__)
        # dynamo takes what is called so for the frame to compile, and wraps others in one of its
        # own, whose guards would end up in a package of compiled code
        __call__.__name__ = torch.nn.Module._wrapped_call_impl.__name__
        self._previous, self._wrapper = previous, __call__
        __call__.whence = self  # type: ignore[attr-defined]
        _set_call(__call__)

    def unwrap(self) -> None:
        """Take off every wrapper of ours that lies on top and no longer listens. One that somebody
        wrapped in turn stays and does nothing until they let go; dynamo lets go of it now.
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
    """Make `new` the way every module is called.

    Dynamo compiles modules on a short path while `__call__` is the one it knows; it must know this
    one, or it would compile the program in another way (and, imported meanwhile, keep ours for
    ever).
    """
    old = torch.nn.Module.__call__
    torch.nn.Module.__call__ = new
    _dynamo_knows(old, new)


def _dynamo_knows(old: Any, new: Any) -> None:
    """Where dynamo holds `old` for the way every module is called, it is `new` from now on."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "unpatched_nn_module_call", None) is old:
            module.unpatched_nn_module_call = new  # type: ignore[attr-defined]
