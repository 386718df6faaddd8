"""Tells just before compiled code runs, so that nothing of ours is around it then, and whether we are inside it.

A dispatch mode around compiled code silently makes it eager, so a recording must be over before. Every call of something that
`torch.compile` made sets dynamo's frame evaluation first: that function is wrapped while a capture listens.
While it is set, dynamo compiles every Python frame that starts, ours too: where compiled code breaks off and calls a module, nothing
of ours may run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import GraphModule

_MODULE = "torch._dynamo.eval_frame"
_NAME = "set_eval_frame"


def inside() -> bool:
    """Does this run as a part of something compiled, so that dynamo takes every frame that starts? Its callback is None where it is off."""
    return get_eval_frame_callback() not in (None, False)


def is_compilers(module: Any) -> bool:
    """Is this a graph that AOTAutograd made and runs as it is (`aot_eager`)? It is compiled code, no module of the program."""
    return isinstance(module, GraphModule) and isinstance(module.graph._codegen, _BoxedCodeGen)


class Trap:
    """Calls `met` on the thread that is about to run compiled code. Does nothing where dynamo is not loaded or knows no such function."""

    def __init__(self, met: Callable[[], None]) -> None:
        self._met = met
        self._module: Any = None
        self._wrapper: Any = None
        self._original: Any = None

    def set(self) -> None:
        """Put the wrapper in place if dynamo is there by now. Cheap to call again."""
        if self._module is not None:
            return
        module = sys.modules.get(_MODULE)
        original = getattr(module, _NAME, None)
        if original is None:
            return

        def set_eval_frame(*args: Any, **kwargs: Any) -> Any:
            # What only switches dynamo off for a while is no compiled code; every Python dispatch mode does that around each operator.
            # It cannot wait for the callback that switches it on: by then the modes around the call were written down to be restored.
            if not sys._getframe(1).f_code.co_qualname.startswith("DisableContext"):
                self._met()
            return original(*args, **kwargs)

        self._module, self._original, self._wrapper = module, original, set_eval_frame
        setattr(module, _NAME, set_eval_frame)

    def clear(self) -> None:
        """Take the wrapper away. One that somebody wrapped in turn stays, and does nothing any more."""
        if self._module is not None and getattr(self._module, _NAME, None) is self._wrapper:
            setattr(self._module, _NAME, self._original)
        self._module = None
        self._met = lambda: None
