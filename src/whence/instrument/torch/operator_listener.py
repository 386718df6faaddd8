"""Modes around the operators of one call of a module, the calls of other modules left out."""

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
    """Listens to what runs inside its `with` block, the calls of other modules left out (`pause`
    before them, `resume` after).

    reason: why it no longer listens, "" while it does. autocast: dispatch keys of the devices that
    autocast is on for.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.over = False
        self.autocast: tuple[str, ...] = ()
        self._entered: list[Any] = []

    @abstractmethod
    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator at the dispatcher: runs it exactly once."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as it runs without a mode."""
        with restored(func, self.autocast):
            return func(*args, **kwargs)

    def function_mode(self) -> TorchFunctionMode | None:
        """A mode that listens at the torch-function level too, where one is wanted."""
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
        """Listen no more; the first reason counts."""
        self.reason = self.reason or reason
        self.over = True

    def abandon(self, reason: str = "calls other modules") -> None:
        """Stop listening: a child module turned out to be called, or the region is not wanted.
        Nothing is listened to from here on.

        The modes are taken off at once where they are on top, so that what runs next does not see
        them.
        """
        self.give_up(reason)
        self._take_off()

    @property
    def listening(self) -> bool:
        """Are modes of this listener around what runs now?"""
        return bool(self._entered)

    def pause(self) -> None:
        """Another module is called next: take the modes off."""
        self._take_off()
        if self._entered:
            self.give_up("calls a module inside a mode of its own")

    def resume(self) -> None:
        """Listen (again)."""
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
