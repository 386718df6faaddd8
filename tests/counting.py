"""How much work something is, counted: calls of functions and bytes unpacked. Seconds say as much
of the machine as of the code.
"""

import contextlib
import dataclasses
import sys
import zlib
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Work:
    """calls: of Python and C functions in this thread. unpacked: bytes that zlib made."""

    calls: int = 0
    unpacked: int = 0


class _Unpacking:
    """What zlib.decompressobj returns, with the bytes that come out of it counted."""

    def __init__(self, inner: Any, work: Work) -> None:
        self._inner, self._work = inner, work

    def decompress(self, *given: Any, **more: Any) -> bytes:
        out: bytes = self._inner.decompress(*given, **more)
        self._work.unpacked += len(out)
        return out

    def flush(self, *given: Any) -> bytes:
        out: bytes = self._inner.flush(*given)
        self._work.unpacked += len(out)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    """Count the work of the block; the same block counts the same on every processor."""
    work, decompressobj, before = Work(), zlib.decompressobj, sys.getprofile()

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            work.calls += 1

    zlib.decompressobj = lambda *given, **more: _Unpacking(decompressobj(*given, **more), work)
    sys.setprofile(seen)
    try:
        yield work
    finally:
        sys.setprofile(before)
        zlib.decompressobj = decompressobj
