"""Records the tensors of models: one record per content for states passed from step to step, and
one per parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whence.instrument.engines.values import Seen
from whence.instrument.session import Content, Form, Origin, Session
from whence.records import External

FindExternal = Callable[[bytes, str, Seen], External | None]
"""(digest, dtype, value) of an initialiser -> where its bytes lie in the user's file, None if
nowhere.
"""

_LEAST = 1 << 10  # bytes of a parameter that is worth looking for in a file
_TELLING = 64  # bytes that two tensors do not share by chance
_Content = tuple[bytes, str, tuple[int, ...]]
Taken = dict[_Content, tuple[int, int]]
"""Content of the inputs and results of a step -> (record, address)."""


class Records:
    """Makes records of values. Not thread-safe: the caller holds a lock."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def unreadable(self, seen: Seen) -> int:
        """A record of a value that has no elements to read."""
        return self._session.unreadable(Form(seen.dtype, seen.shape, device=seen.device), seen.why)

    def record(
        self,
        value: Any,
        seen: Seen,
        digest: bytes,
        origin: Origin,
        external: External | None = None,
    ) -> int:
        """A new record of a readable value. value: for the user's on_record."""
        content = Content(digest, seen.address, seen.nbytes, seen.data, external=external)
        form = Form(seen.dtype, seen.shape, device=seen.device)
        return self._session.record(form, content, origin, value)


class Tensors(Records):
    """Records the tensors of one capture."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        # by root: what the last step of it was given and returned
        self._last: dict[str, Taken] = {}

    def take(self, seen: Seen, origin: Origin) -> tuple[int, bytes]:
        """Record a new value. Returns (record, digest)."""
        if seen.why:
            return self.unreadable(seen), b""
        digest = seen.digest()
        return self._record(seen, digest, origin), digest

    def given(self, taken: Taken, seen: Seen, origin: Origin) -> tuple[int, str, bytes]:
        """(record, edge, digest) of an input. A state that the model's last step returned or was
        given is recognised by its bytes. taken: the tensors of this step.
        """
        if seen.why:
            return self.unreadable(seen), "", b""
        digest = seen.digest()
        key = digest, seen.dtype, seen.shape
        for table in (taken, *self._last.values()):
            record, address = table.get(key, (-1, 0))
            same_place = address == seen.address
            # two inputs of a step may be different tensors with equal bytes (zeros)
            if record >= 0 and (same_place or (table is not taken and seen.nbytes >= _TELLING)):
                taken[key] = record, seen.address
                return record, "content", digest
        return self._new(taken, key, seen, origin)

    def returned(self, taken: Taken, seen: Seen, origin: Origin) -> tuple[int, str, bytes]:
        """(record, edge, digest) of a result, which always gets a record of its own."""
        if seen.why:
            return self.unreadable(seen), "", b""
        return self._new(taken, (seen.digest(), seen.dtype, seen.shape), seen, origin)

    def _new(
        self, taken: Taken, key: _Content, seen: Seen, origin: Origin
    ) -> tuple[int, str, bytes]:
        record = self._record(seen, key[0], origin)
        taken[key] = record, seen.address
        return record, "", key[0]

    def ended(self, root: str, taken: Taken) -> None:
        """Remember the tensors of a step that has ended."""
        self._last[root] = taken

    def parameter(self, seen: Seen, origin: Origin, find: FindExternal | None) -> int:
        """Record an initialiser, as a reference to the user's file if its bytes are found there."""
        if seen.why:
            return self.unreadable(seen)
        digest, external = seen.digest(), None
        if find is not None and self._session.elements_on and seen.nbytes >= _LEAST:
            external = find(digest, seen.dtype, seen)
        return self._record(seen, digest, origin, external)

    def _record(
        self, seen: Seen, digest: bytes, origin: Origin, external: External | None = None
    ) -> int:
        value = seen.array() if self._session.options.on_record else None
        return self.record(value, seen, digest, origin, external)
