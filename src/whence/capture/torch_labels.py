"""Labels of torch tensors: read unseen by modes and compilers, and without breaking what is compiled."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from whence.arrays import torch as adapter
from whence.capture.torch_modes import Quiet, is_traced
from whence.errors import UsageError

_DYNAMO = "torch._dynamo.config"


def read(value: Any) -> tuple[Any, tuple[int, ...], str, str] | None:
    """(host array, stride where not contiguous, device, class) of a tensor; None for what is none. Raises UsageError with the reason."""
    if isinstance(value, torch.fx.Proxy):
        raise UsageError("the program is traced here, not run: there are no elements")
    if not isinstance(value, torch.Tensor):
        return None
    if is_traced():
        raise UsageError("the program is traced here, not run: the tensor has no elements")
    device = str(value.device)
    if value.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UsageError("a CUDA graph is being recorded: reading the tensor would break it")
    with _Unrecorded(), Quiet():
        parts = adapter.plain(value)
        if parts is None or len(parts) != 1:
            raise UsageError(f"a {type(value).__name__} ({value.layout}, on {device}) has no elements to read here")
        tensor = parts[0][1]
        if not adapter.dtype_name(tensor):
            raise UsageError(f"elements of {tensor.dtype} are not known to whence")
        stride = () if tensor.is_contiguous() else tuple(tensor.stride())
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        return adapter.to_host(tensor), stride, device, "" if plain else type(value).__name__


class _Unrecorded:
    """torch.jit.trace records nothing of what is done inside."""

    def __enter__(self) -> None:
        self._state = torch._C._get_tracing_state()
        if self._state is not None:
            torch._C._set_tracing_state(None)

    def __exit__(self, *exc: Any) -> None:
        if self._state is not None:
            torch._C._set_tracing_state(self._state)


def let_through(functions: Sequence[Callable[..., None]]) -> None:
    """Have Dynamo leave calls of these functions for the end of its graph: no break, also with fullgraph=True.

    Dynamo is not imported for it: its settings are changed when the program imports it.
    """
    settings: Any = sys.modules.get(_DYNAMO)
    if settings is None:
        sys.meta_path.insert(0, _Watcher(functions))
    elif hasattr(settings, "reorderable_logging_functions"):
        settings.reorderable_logging_functions.update(functions)


class _Watcher(importlib.abc.MetaPathFinder):
    """Waits for Dynamo's settings to be imported; finds nothing itself, and goes when they were."""

    def __init__(self, functions: Sequence[Callable[..., None]]) -> None:
        self.functions = functions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the settings, loaded and then changed; None for all else."""
        if fullname != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                let_through(self.functions)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
