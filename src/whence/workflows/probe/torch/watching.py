"""Keeps the inputs of outermost module calls while a program runs.

The program's results are unaffected: arguments are copied before a call, and results after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from whence.instrument.torch.module_calls import ModuleCalls
from whence.workflows.probe.torch.inputs import kept
from whence.workflows.probe.torch.outputs import Outputs, flattened
from whence.workflows.probe.torch.surroundings import Surroundings

_MOST_MODELS = 8


class KeptCall(NamedTuple):
    """A call of an outermost module: copies of its arguments and of what it returned."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    surroundings: Surroundings
    returned: Outputs


class _Depth(threading.local):
    inside = False


class Watching:
    """Listens to calls of modules.

    number: which outermost call to keep, counted from 1; None keeps the first one of each model.
    done: called with a call right after it, None for never.
    """

    def __init__(
        self, number: int | None = None, done: Callable[[KeptCall], None] | None = None
    ) -> None:
        self.active, self.asleep = True, False
        self.calls: list[KeptCall] = []
        self.seen = 0
        self._number, self._done, self._depth = number, done, _Depth()
        self._module_calls = ModuleCalls(self, self._observe)
        self._module_calls.wrap()

    def remove(self) -> None:
        """Stop listening."""
        self.active = False
        self._module_calls.unwrap()

    @property
    def largest(self) -> KeptCall | None:
        """The kept call of the model with the most parameters."""
        return max(self.calls, key=lambda call: _size(call.model), default=None)

    def _observe(
        self, previous: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self._depth.inside or torch._C._get_tracing_state() is not None:
            return previous(module, *args, **kwargs)
        self._depth.inside = True
        try:
            self.seen += 1
            if not self._wants(module, args, kwargs):
                return previous(module, *args, **kwargs)
            with torch.no_grad():
                copies = kept(args), {name: kept(value) for name, value in kwargs.items()}
            surroundings = Surroundings.now()
            out = previous(module, *args, **kwargs)
            call = KeptCall(module, *copies, surroundings, flattened(out))
            self.calls.append(call)
        finally:
            self._depth.inside = False
        if self._done is not None:
            self.active = False
            self._done(call)
        return out

    def _wants(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not any(isinstance(v, torch.Tensor) for v in (*args, *kwargs.values())):
            return False
        if self._number is not None:
            return self.seen == self._number
        known = any(call.model is module for call in self.calls)
        return not known and len(self.calls) < _MOST_MODELS and _size(module) > 0


def _size(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())
