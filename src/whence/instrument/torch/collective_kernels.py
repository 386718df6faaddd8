"""What torch sends to other processes, with somebody looking on.

Every way to a process group (functions of `torch.distributed`, functional collectives, DTensors,
FSDP, the reducer of DDP, pipelines) goes through operators of one library of the dispatcher. They
get a kernel under a key that comes right before those of devices and that these operators leave
free: it tells the watchers of the arguments and hands them on to the kernel of the device. Nothing
is sent, copied or waited for, nothing is kept, and the interpreter's lock is free while the
device's kernel runs: a worker thread of a group may need it to go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Watcher = Callable[[str, dict[str, Any]], None]
"""(name of the operator, its arguments by name). Called before the operator runs."""

_LIBRARY = "c10d"
_KEY = "BackendSelect"
_UNWATCHED = ("check_for_nan",)
_lock = threading.Lock()
_watchers: tuple[Watcher, ...] = ()
_installed: Any = None


def can_watch() -> bool:
    """Can this torch join processes?"""
    return bool(torch.distributed.is_available())


def watch(watcher: Watcher) -> None:
    """Tell a watcher of everything that is sent from now on, by any thread."""
    global _watchers, _installed
    with _lock:
        if _installed is None:
            _installed = _with_kernels()
        _watchers = (*_watchers, watcher)


def leave(watcher: Watcher) -> None:
    """Tell it no more. With the last one the kernels go."""
    global _watchers, _installed
    with _lock:
        _watchers = tuple(one for one in _watchers if one != watcher)
        if not _watchers and _installed is not None:
            library, _installed = _installed, None
            library._destroy()


def _with_kernels() -> Any:
    library = torch.library.Library(_LIBRARY, "IMPL")
    for whole in torch._C._dispatch_get_all_op_names():
        space, _, name = whole.partition("::")
        taken = torch._C._dispatch_has_kernel_for_dispatch_key(whole, _KEY)
        if space == _LIBRARY and name not in _UNWATCHED and not taken:
            library.impl(name, _telling(name), _KEY, with_keyset=True)
    return library


def _telling(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    names = tuple(argument.name for argument in operator._schema.arguments)
    below = torch._C._dispatch_keyset_full_after(torch._C._parse_dispatch_key(_KEY))

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _watchers:
            watcher(name, dict(zip(names, args)) | kwargs)
        return operator.redispatch(keys & below, *args, **kwargs)

    return call
