"""Modes and tracing of the program around a call, and contexts that hide the listener from them."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from whence.instrument.call_frames import Hiding

_dispatch_mode, _Keys = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
NoFunctions = torch._C.DisableTorchFunction
_depth, _pop, _push = (
    torch._C._len_torch_dispatch_stack,
    torch._C._pop_torch_dispatch_stack,
    torch._C._push_on_torch_dispatch_stack,
)


class ModesOff:
    """Context in which dispatch modes, function modes and tensor subclasses of the program see
    nothing.
    """

    __slots__ = ("_all", "_function", "_modes")

    def __enter__(self) -> None:
        self._function = NoFunctions()
        self._function.__enter__()
        self._modes: list[Any] = []
        self._all: Any = None
        if _len_torch_dispatch_stack_pre_dispatch():
            self._all = _disable_current_modes()
            self._all.__enter__()
        else:
            self._modes += [_pop(None) for _ in range(_depth())]

    def __exit__(self, *exc: Any) -> None:
        for mode in reversed(self._modes):
            _push(mode)
        if self._all is not None:
            self._all.__exit__(*exc)
        self._function.__exit__(*exc)


HIDING: Hiding = (NoFunctions, ModesOff, _depth)
"""Contexts in which the program's modes and subclasses see nothing of what a listener does."""


def is_traced() -> bool:
    """Whether the program is being traced (fake tensors, make_fx, functionalisation) instead of
    run.
    """
    mode, keys = _dispatch_mode, _Keys
    return not (mode(keys.FAKE) is mode(keys.PROXY) is mode(keys.FUNCTIONAL) is None)


def taken_for_torchs(wrapper: Any) -> None:
    """Make dynamo treat a function around module calls as torch's own: not compiled itself where a
    module runs eagerly, traced through where one is compiled. Dynamo decides by the file of the
    code; where compiled code breaks off inside a module, a frame of another file would start graphs
    that the program does not have.
    """
    code = torch.nn.Module._wrapped_call_impl.__code__
    wrapper.__code__ = wrapper.__code__.replace(
        co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
    )
