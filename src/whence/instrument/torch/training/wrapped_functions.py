"""Functions of torch that do something to gradients, wrapped while a capture listens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from whence.instrument.call_frames import CallFrames


class WrappedFunctions:
    """Functions around which something is called. begins, ends: called around those of which that
    tells all that they do, so that nobody else needs to look at their operators.
    """

    def __init__(
        self, frames: CallFrames, begins: Callable[[], None], ends: Callable[[], None]
    ) -> None:
        self._frames, self._begins, self._ends = frames, begins, ends
        self._undo: list[Callable[[], None]] = []

    def wrap(
        self, module: Any, name: str, around: Callable[..., Any], *, is_whole: bool = True
    ) -> None:
        """Call `around` with the tensors of a function before it runs, and what that returns with
        the result. is_whole: does that tell all that the function does?
        """
        previous = getattr(module, name, None)
        if previous is None:  # of another release of torch
            return
        frames = self._frames

        first = _first_parameter(previous)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if first in kwargs:
                args = (kwargs.pop(first), *args)
            if not frames.active or frames.thread.busy or not args:
                return previous(*args, **kwargs)
            tensors, more = args[0], args[1:]
            # May be an iterator, which can be read once.
            handed_on = tensors if isinstance(tensors, torch.Tensor) else list(tensors)
            listed = [tensors] if isinstance(tensors, torch.Tensor) else handed_on
            if is_whole:
                self._begins()
            ended = frames.guarded(functools.partial(around, listed, *more, **kwargs))
            out = previous(handed_on, *more, **kwargs)
            if ended is not None:
                frames.guarded(ended, out)
            if is_whole:
                self._ends()
            return out

        wrapper.__name__ = wrapper.__qualname__ = name
        setattr(module, name, wrapper)

        def undo() -> None:
            if getattr(module, name) is wrapper:
                setattr(module, name, previous)

        self._undo.append(undo)

    def remove(self) -> None:
        """Put the functions back that nobody wrapped in turn."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def _first_parameter(function: Any) -> str:
    """The name by which a caller may give the first argument, "" where none is known."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # a builtin
        return ""
