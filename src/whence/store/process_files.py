"""The files that one process writes: its journal, and one shard after the other.

Order is everything: bytes of a tensor are handed to the kernel first, the journal line that speaks
of them afterwards. So a kill at any moment leaves a journal whose every line is true.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from whence import disk
from whence.disk import OwnFile, write_all
from whence.records import Call, Increment, Kept, Record
from whence.store.folder import JOURNAL, shard_name
from whence.store.journal import Line, encoded
from whence.store.shards import STAGING_BYTES, Bytes, Room, ShardWriter

FLUSH_S = 0.5
JOURNAL_BYTES = 256 << 10
LINE_BYTES = 4 << 10
"""For so many bytes a line that waits to be encoded there is room; longer ones do not wait."""
_MANY = 24  # references of a call, each 150 bytes at most with names of the usual length
TOGETHER = 64
"""So many lines are encoded at once. More of them alive would set off the garbage collector."""


class ProcessFiles:
    """Appends lines to the journal and tensors to the shards of a process folder. Not safe to use
    from several threads; every method may raise OSError.
    """

    def __init__(self, folder: Path, header_bytes: int, max_shard_bytes: int) -> None:
        self.folder = folder
        self._shard: ShardWriter | None = None
        self._shards = 0
        self._header_bytes = header_bytes
        self._max_shard_bytes = max_shard_bytes
        self._staging = bytearray(STAGING_BYTES)
        self._lines: list[Line | msgspec.Raw] = []  # not encoded yet
        self.lines = 0
        """Lines of the journal that are encoded."""
        self._hash = xxhash.xxh3_128()  # of the journal as far as it is written
        self._journal = bytearray()
        self._journal_end = 0
        self._journal_file = OwnFile(folder / JOURNAL)
        self._has_room = False
        self._journal_room = Room(self._journal_file)
        self._flushed_at = time.monotonic()

    @property
    def digest(self) -> str:
        """Hash of the journal as far as it is written."""
        return self._hash.hexdigest()

    @property
    def is_old(self) -> bool:
        """Whether lines wait since before the last look, half of FLUSH_S ago."""
        waiting = self._lines or self._journal
        return bool(waiting) and time.monotonic() - self._flushed_at > FLUSH_S / 2

    def append(self, line: Line | msgspec.Raw) -> None:
        """Add a line to the journal that nothing changes any more (`journal.settled`), and hand the
        lines to the kernel when they are many or old. There is room for it when this returns.
        """
        lines = self._lines
        lines.append(line)
        kind = line.__class__  # no call: this is done for every record and call of a program
        if kind is Record:
            long: object = line.columns  # type: ignore[union-attr]
        elif kind is Call:
            long = (
                line.notes or line.placements or line.aliases or line.refs[_MANY:]  # type: ignore[union-attr]
            )
        else:
            long = kind is msgspec.Raw and len(memoryview(line)) > LINE_BYTES  # type: ignore[arg-type]
        if long or len(lines) >= TOGETHER:
            self._encode()
            if len(self._journal) > JOURNAL_BYTES or time.monotonic() - self._flushed_at > FLUSH_S:
                self.flush()
            self._have_room()
        elif not self._has_room:
            self._have_room()

    def _have_room(self) -> None:
        """Have blocks for what waits, and for as many lines as are encoded together."""
        end = self._journal_end + len(self._journal) + (len(self._lines) + TOGETHER) * LINE_BYTES
        self._journal_room.have(end, JOURNAL_BYTES)
        self._has_room = True

    def _encode(self) -> None:
        text = encoded(self._lines)
        self.lines += len(self._lines)
        self._lines = []
        self._journal += text

    def put(self, data: Bytes) -> tuple[int, int]:
        """Append bytes to the current shard, or to a new one when it is full. Returns (shard,
        offset).
        """
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(
                f"data must be contiguous uint8, got {data.dtype} with strides {data.strides}"
            )
        nbytes = data.nbytes
        if data.ndim != 1:
            data = data.reshape(-1)
        shard = self._shard
        if (
            shard is None
            or shard.crowded
            or (shard.end > 0 and shard.end + nbytes > self._max_shard_bytes)
        ):
            shard = self._next_shard()
        try:
            return self._shards - 1, shard.put(data, nbytes)
        except OSError:
            # what the failed write took is given back, so that there is room for what waits
            with contextlib.suppress(OSError):
                shard.cut()
                self.flush()
            raise

    def name(
        self,
        record: int,
        dtype: str,
        shape: tuple[int, ...],
        elements: Kept | Increment,
        digest: bytes,
    ) -> None:
        """Name bytes that were `put` last in the header of their shard: the elements of a record
        of this digest.
        """
        assert self._shard is not None
        self._shard.name(
            record,
            dtype,
            shape,
            elements.offset,
            elements.nbytes,
            digest,
            increment=isinstance(elements, Increment),
        )

    def _next_shard(self) -> ShardWriter:
        if self._shard is not None:
            self.flush()
            self._shard.finish()
            self._shard = None
        self._shard = ShardWriter(
            self.folder / shard_name(self._shards), self._header_bytes, self._staging
        )
        self._shards += 1
        return self._shard

    def flush(self) -> None:
        """Hand everything added so far to the kernel."""
        if self._shard is not None:
            self._shard.flush()
        if self._lines:
            self._encode()
        if self._journal:
            write_all(self._journal_file, self._journal, self._journal_end)
            self._hash.update(self._journal)
            self._journal_end += len(self._journal)
            self._journal = bytearray()
        self._flushed_at = time.monotonic()

    def sync(self) -> None:
        """Wait until what was flushed is on the medium."""
        for file in (self._shard.file if self._shard is not None else None, self._journal_file):
            if file is not None:
                with file as fd:
                    disk.system.sync(fd)

    def finish(self) -> None:
        """Flush, and make the last shard a valid safetensors file."""
        self.flush()
        with self._journal_file as fd:
            disk.system.cut(fd, self._journal_end)
        if self._shard is not None:
            self._shard.finish()
            self._shard = None

    def give_up(self) -> None:
        """Hand over what still can be, after a call failed: there is room for all that was
        acknowledged.
        """
        with contextlib.suppress(OSError):
            self.flush()

    def close(self) -> None:
        """Close the files as they are, and drop what is pending. Idempotent."""
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None
        self._journal_file.close()
        self._staging, self._journal, self._lines = bytearray(), bytearray(), []
