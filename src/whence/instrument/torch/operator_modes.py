"""The dispatch mode through which operators are listened to: kept on top of those of the program,
and off while compiled code runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_schema import AUTOCAST_KEYS
from whence.instrument.call_frames import CallFrames, ThreadCalls
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.regions import Region

_depth = torch._C._len_torch_dispatch_stack
_Handler = Callable[[Any, Any, Any, Any], Any]


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    # Without this a higher-order operator under the mode raises into the user's program.
    supports_higher_order_operators = True

    def __init__(self, modes: OperatorModes, handler: _Handler) -> None:
        super().__init__()
        self.modes, self._handler = modes, handler

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the handler in torch._dynamo.disable, which imports dynamo (seconds) at
        # the first operator.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else a compiled function that is called while the mode is somewhere below another one is
        # silently eager.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handler(func, types, args, kwargs or {})


class OperatorThread(ThreadCalls):
    """What a thread has of its own where operators are listened to.

    running: an operator that is recorded runs now. optimizing: inside a step of an optimizer.
    region, root: the open region, and the root that was called last. autocast: dispatch keys that
    autocast has on. suspended: the mode that was taken off before compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = self.optimizing = False
        self.region: Region | None = None
        self.root: ModuleRoot | None = None
        self.autocast: tuple[str, ...] = ()
        self.suspended: _Mode | None = None

    def forgets(self, mode: _Mode) -> bool:
        """Was this mode taken off before compiled code? Then it does not come back."""
        if self.suspended is not mode:
            return False
        self.suspended = None
        return True


class OperatorModes:
    """Modes of one listener on the threads of the program. handler: called with (operator, types,
    args, kwargs) in place of each operator.
    """

    def __init__(self, frames: CallFrames, handler: _Handler) -> None:
        self._frames, self._thread, self._handler = frames, frames.thread, handler
        self._engine: tuple[Any, Any] | None = None
        self._autocast_methods: tuple[Any, Any] | None = None

    @property
    def active(self) -> bool:
        """Does the listener of these modes listen?"""
        return self._frames.active

    def install(self) -> None:
        """Follow autocast and backward passes."""
        self._follow_autocast()
        self._follow_backward()

    def remove(self) -> None:
        """Follow them no longer."""
        self._leave_autocast()
        if self._engine is not None and torch.autograd._engine_run_backward is self._engine[1]:
            torch.autograd._engine_run_backward = self._engine[0]

    # ---- the stack of modes

    def enter(self) -> _Mode:
        """Put a mode on this thread."""
        mode = _Mode(self, self._handler)
        mode.__enter__()
        return mode

    @staticmethod
    def take_off(mode: Any) -> None:
        """Take the mode away where it is on top."""
        if _top() is not mode:
            return
        while True:
            mode.__exit__(None, None, None)
            mode = _top()
            # of a capture that ended before the one above it
            if not isinstance(mode, _Mode) or mode.modes.active:
                return

    @contextlib.contextmanager
    def above(self) -> Iterator[None]:
        """A mode on top of those of the program, as long as this lasts."""
        thread, top = self._thread, _top()
        if (
            not self.active
            or thread.busy
            or thread.running
            or thread.suspended is not None
            or (isinstance(top, _Mode) and top.modes is self)
        ):
            yield
            return
        mode = self.enter()
        try:
            yield
        finally:
            if not thread.forgets(mode):
                self.take_off(mode)

    def suspend(self) -> bool:
        """Take our mode off before compiled code; False if it is not on top."""
        mode = _top()
        if not isinstance(mode, _Mode) or mode.modes is not self:
            return False
        mode.__exit__(None, None, None)
        self._thread.suspended = mode
        return True

    def resume(self) -> None:
        """Put the mode back that was taken off before compiled code."""
        thread = self._thread
        if thread.suspended is not None:
            mode, thread.suspended = thread.suspended, None
            mode.__enter__()

    def _follow_backward(self) -> None:
        run = torch.autograd._engine_run_backward

        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if not _depth():  # a thread that is not listened to
                return run(*args, **kwargs)
            with self.above():
                return run(*args, **kwargs)

        self._engine = run, _engine_run_backward
        torch.autograd._engine_run_backward = _engine_run_backward

    # ---- autocast: inside a mode's handler it is switched off, so it is followed from outside

    def note_autocast(self) -> None:
        """Remember what autocast is on for on this thread."""
        self._thread.autocast = tuple(
            key for device, key in AUTOCAST_KEYS.items() if torch.is_autocast_enabled(device)
        )

    def _follow_autocast(self) -> None:
        kind: Any = torch.amp.autocast_mode.autocast
        enter, leave, note = kind.__enter__, kind.__exit__, self.note_autocast

        def __enter__(self: Any) -> Any:  # noqa: N807
            out = enter(self)
            note()
            return out

        def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807
            out = leave(self, *error)
            note()
            return out

        self._autocast_methods = ((enter, leave), (__enter__, __exit__))
        kind.__enter__, kind.__exit__ = __enter__, __exit__
        note()

    def _leave_autocast(self) -> None:
        kind: Any = torch.amp.autocast_mode.autocast
        if (
            self._autocast_methods is not None
            and (kind.__enter__, kind.__exit__) == self._autocast_methods[1]
        ):
            kind.__enter__, kind.__exit__ = self._autocast_methods[0]
        self._autocast_methods = None


def _top() -> Any:
    depth = _depth()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None
