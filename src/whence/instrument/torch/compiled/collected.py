"""What is learned of a graph while inductor compiles it, and the registry of objects that take the
tensors its code shows.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, NamedTuple

from whence.instrument.torch.compiled.fx_nodes import Named


class Site(NamedTuple):
    """Describes a tensor that the code shows. buffer: inductor's name, "" for a node. kernel: that
    made it. origins: nodes that this kernel computes. reads: names of the buffers or nodes and of
    the graph inputs that it reads. shape: of the node, possibly with symbols; None if unknown.
    """

    node: Named
    buffer: str
    kernel: str
    origins: tuple[str, ...]
    reads: tuple[str, ...]
    shape: Any


class Collected:
    """What is learned while one graph is compiled. graph: the one that inductor lowers; dropped:
    number of buffers that are not shown, by reason.
    """

    def __init__(self, key: str, mode: str, every: bool) -> None:
        self.key, self.mode, self.every = key, mode, every
        self.graph: Any = None
        self.sites: dict[str, Site] = {}
        self.dropped: dict[str, int] = {}
        self.kernel = ""
        self.stock = False
        self.nodes: dict[str, int] = {}
        self.parts: set[str] = set()
        self.mapping: dict[str, Any] = {}

    def drop(self, why: str) -> None:
        """Count a buffer that is not shown."""
        self.dropped[why] = self.dropped.get(why, 0) + 1


class Got(BaseException):
    """Raised when the graph is known and no code for it is wanted. A BaseException, because the
    compiler would wrap an Exception.
    """


class _Compiling(threading.local):
    """The graph being compiled on this thread."""

    def __init__(self) -> None:
        self.collected: Collected | None = None


compiling = _Compiling()
_takers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_serial = itertools.count()


def new_key(taker: Any) -> str:
    """A key for one compiled graph, unique in this process; its code calls `taker.seen(name,
    tensor)`.
    """
    key = f"g{next(_serial)}"
    _takers[key] = taker
    return key


def seen(key: str, name: str, value: Any) -> None:
    """Called by compiled code when a tensor is computed. Does nothing if its taker is gone."""
    taker = _takers.get(key)
    if taker is not None:
        taker.seen(name, value)


def find(module: str, name: str = "") -> Any:
    import importlib

    try:
        holder: Any = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(holder, name, None) if name else holder
