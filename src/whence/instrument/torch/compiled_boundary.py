"""Signals just before compiled code runs, so that no mode of whence is active around it, and tells
whether the current code runs inside compiled code.

A dispatch mode around compiled code silently makes it eager, so a recording must end before. Every
call of something that `torch.compile` made first sets dynamo's frame evaluation callback; the
function that sets it is wrapped while a capture listens. While the callback is set, dynamo compiles
every Python frame that starts, including those of whence: where compiled code breaks off and calls
a module, no code of whence may run.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback as _borrowed_callback
from torch._C._dynamo.eval_frame import set_eval_frame as _set_callback
from torch.fx import graph as _graph
from torch.fx.graph_module import GraphModule

from whence.instrument.guard import Replacements
from whence.instrument.torch.modes import taken_for_torchs

_BOXED: Any = getattr(_graph, "_BoxedCodeGen", ())  # not in every torch
_MODULE = "torch._dynamo.eval_frame"
_NAME = "set_eval_frame"
# Newer torch calls this name around the compiled code itself. It is often the same function under
# another name; torch 2.6 calls only this one.
_AGAIN = "_maybe_set_eval_frame"


def _is_borrowed() -> bool:
    """Whether torch returns the callback without a reference of its own (torch 2.6, 2.7). Each call
    would then lose one reference, and the process crashes when none is left.
    """

    def callback() -> None: ...

    prior = _set_callback(callback)
    before = sys.getrefcount(callback)
    held = [_borrowed_callback(), _borrowed_callback()]
    after = sys.getrefcount(callback)
    _set_callback(prior)
    borrowed = after < before + len(held)
    for item in held if borrowed else ():
        _keep(_held(item))
    return borrowed


_keep, _held = ctypes.pythonapi.Py_IncRef, ctypes.py_object


def _counted_callback() -> Any:
    callback = _borrowed_callback()
    _keep(_held(callback))
    return callback


taken_for_torchs(_counted_callback)  # it also runs where dynamo takes every frame
get_eval_frame_callback: Callable[[], Any] = (
    _counted_callback if _is_borrowed() else _borrowed_callback
)
"""Returns what dynamo does with every frame that starts on this thread: a function, None or
False.
"""


def inside() -> bool:
    """Whether the current code runs inside compiled code, where dynamo takes every frame that
    starts. The callback is None where dynamo is off.
    """
    return get_eval_frame_callback() not in (None, False)


def is_compilers(module: Any) -> bool:
    """Whether the module is a graph that AOTAutograd made and runs unchanged (`aot_eager`):
    compiled code, not a module of the program.
    """
    return isinstance(module, GraphModule) and isinstance(module.graph._codegen, _BOXED)


class _Open(threading.local):
    """Per thread: the frame of torch that runs compiled code, and how often it has switched
    dynamo.
    """

    def __init__(self) -> None:
        self.frame: Any = None
        self.switched = self.switched_by_helper = 0


def _nothing(*_: Any) -> None:
    pass


class CompiledCodeGuard:
    """Calls `met` with dynamo's callback on the thread that is about to run compiled code, and
    `on_left` after that code.

    Does nothing where dynamo is not loaded or lacks the wrapped function. `on_left` may never be
    called: code that switches dynamo with its own context manager has no frame whose end could be
    seen (see `running`).
    """

    def __init__(self, met: Callable[[Any], None]) -> None:
        self._met, self._on_left = met, _nothing
        self._open = _Open()
        self._module: Any = None
        self._replaced = Replacements()

    def on_left(self, action: Callable[[], None]) -> None:
        """Set the function to call after compiled code."""
        self._on_left = action

    def set(self) -> None:
        """Put the wrapper in place if dynamo is there by now. Cheap to call again."""
        if self._module is not None:
            return
        module = sys.modules.get(_MODULE)
        original, helper = (getattr(module, name, None) for name in (_NAME, _AGAIN))
        if original is not None:
            self._module = module
            self._put(_NAME, original)
            if helper is original:
                self._put(_AGAIN, original)
        elif helper is not None:
            self._module = module
            self._put(_AGAIN, helper)

    def _put(self, name: str, original: Any) -> None:
        def set_eval_frame(*args: Any, **kwargs: Any) -> Any:
            # Switching dynamo off for a while (`DisableContext`) does not run compiled code; every
            # Python dispatch mode does that around each operator. Modes must be removed at the
            # first other switch: when dynamo is switched on, torch has already saved the modes.
            caller = sys._getframe(1)
            if caller.f_code.co_qualname.startswith("DisableContext"):
                return original(*args, **kwargs)
            prior = _set_callback(None)  # else dynamo compiles what follows here
            self._met(args[0] if args else None)
            is_last = self._switched(caller, name == _AGAIN)
            original(*args, **kwargs)
            if is_last:
                self._on_left()
            return prior

        self._replaced.put(self._module, name, set_eval_frame)

    def _switched(self, caller: Any, by_helper: bool) -> bool:
        """Whether this is the last switch of dynamo by the outermost frame with compiled code.

        That frame sets its own callback, then restores the earlier one. Both go through
        `_maybe_set_eval_frame`, or, in torch 2.4, neither does.
        """
        state, helped = self._open, caller.f_code.co_name == _AGAIN
        frame = caller.f_back if helped else caller
        if state.frame is None or not self.running():
            state.frame, state.switched, state.switched_by_helper = frame, 0, 0
        if frame is not state.frame:
            return False
        by_helper = by_helper or helped
        state.switched, state.switched_by_helper = (
            state.switched + (not by_helper),
            state.switched_by_helper + by_helper,
        )
        is_last = state.switched_by_helper == 2 or (
            state.switched == 2 and not hasattr(self._module, _AGAIN)
        )
        if is_last:
            state.frame = None
        return bool(is_last)

    def running(self) -> bool:
        """Whether the frame that last ran compiled code on this thread is still on the stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._open.frame:
            frame = frame.f_back
        return frame is not None

    def clear(self) -> None:
        """Remove the wrapper. If another tool has wrapped it, it stays in place and does nothing
        any more.
        """
        self._replaced.remove()
        self._module = None
        self._met = self._on_left = _nothing
