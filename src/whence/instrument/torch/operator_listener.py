"""Modes that listen to the operators of one module call, without those of other modules that it
calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_schema import AUTOCAST_KEYS, restored


class _Dispatch(TorchDispatchMode):  # type: ignore[misc]
    # Without this a higher-order operator under the mode raises into the user's program.
    supports_higher_order_operators = True

    def __init__(self, listener: OperatorListener) -> None:
        super().__init__()
        self._listener = listener

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the handler in torch._dynamo.disable, which imports dynamo (seconds) at
        # the first operator.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._listener.operator(func, args, kwargs or {})


class OperatorListener(ABC):
    """Listens to the operators inside its `with` block. Call `pause` before another module is
    called and `resume` after it, to leave its operators out.

    reason: why it has stopped listening, "" while it listens. autocast: dispatch keys of the
    devices with autocast on.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.over = False
        self.autocast: tuple[str, ...] = ()
        self._entered: list[Any] = []

    @abstractmethod
    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle one operator at the dispatcher, and run it exactly once."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as it would run without a mode."""
        with restored(func, self.autocast):
            return func(*args, **kwargs)

    def function_mode(self) -> TorchFunctionMode | None:
        """A further mode that listens at the torch-function level, None where none is wanted."""
        return None

    def __enter__(self) -> Self:
        self.autocast = tuple(
            key for device, key in AUTOCAST_KEYS.items() if torch.is_autocast_enabled(device)
        )
        self.resume()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.give_up(f"{type(error).__name__} left the call")
        while self._entered:
            self._entered.pop().__exit__(kind, error, trace)

    def give_up(self, reason: str) -> None:
        """Stop listening for good. The first reason given is kept."""
        self.reason = self.reason or reason
        self.over = True

    def abandon(self, reason: str = "calls other modules") -> None:
        """Stop listening for good, because a child module is called or the region is not wanted.

        Modes on top of the stack are removed at once, so that code that runs next does not see
        them.
        """
        self.give_up(reason)
        self._take_off()

    @property
    def listening(self) -> bool:
        """Whether modes of this listener are active on the current thread."""
        return bool(self._entered)

    def pause(self) -> None:
        """Remove the modes before another module is called."""
        self._take_off()
        if self._entered:
            self.give_up("calls a module inside a mode of its own")

    def resume(self) -> None:
        """Start or resume listening."""
        if self.over or self._entered:
            return
        for mode in (_Dispatch(self), self.function_mode()):
            if mode is not None:
                mode.__enter__()
                self._entered.append(mode)

    def _take_off(self) -> None:
        while self._entered and _on_top(self._entered[-1]):
            self._entered.pop().__exit__(None, None, None)


def _on_top(mode: Any) -> bool:
    if isinstance(mode, TorchFunctionMode):
        depth = torch._C._len_torch_function_stack()
        return depth > 0 and torch._C._get_function_stack_at(depth - 1) is mode
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is mode
