"""Calls of modules that train nothing: torch asks a stage of a pipeline what it makes of a batch
before the first step, with the program's own module and autograd on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from whence.instrument.call_frames import CallFrames

PIPELINING = "torch.distributed.pipelining.stage"
_FUNCTIONS = {"_forward_metadata_inference", "_shape_inference"}
_FRAMES = 16
"""So many frames lie between such a function and the module's call at most."""


def unless_dry_run(observe: Callable[..., Any], frames: CallFrames) -> Callable[..., Any]:
    """`observe`, which is given a function, a module and its arguments, without such calls."""

    def observed(previous: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        if not frames.thread.stack and is_dry_run():
            with frames.aside():
                return previous(module, *args, **kwargs)
        return observe(previous, module, args, kwargs)

    return observed


def is_dry_run() -> bool:
    """Is the call that begins now one of these?"""
    if PIPELINING not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name in _FUNCTIONS and frame.f_globals.get("__name__") == PIPELINING:
            return True
        frame = frame.f_back
    return False
