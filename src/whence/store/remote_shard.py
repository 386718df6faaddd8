"""A shard in an object store: read by ranges, in blocks that are cached. Announced blocks are
fetched in advance; without announcements, a shard that is read sequentially has its next blocks
fetched.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from whence.errors import ElementsMissing
from whence.store.remote import Failed, Place
from whence.store.shards import MAX_HEADER_BYTES, Bytes, ReadShard

BLOCK_BYTES = 1 << 20
KEPT_BYTES = 128 << 20
MOST_AHEAD = 16  # blocks that are asked for ahead at once
THREADS = 4
MOST_OF_A_REQUEST = MOST_AHEAD // THREADS
_FEW = 4  # tensors of a shard; who reads more of them, reads on
Block = tuple[str, int]  # of a file, by its number


class FileRange(NamedTuple):
    """Bytes [start, stop) of a file of `size` bytes."""

    name: str
    size: int
    start: int
    stop: int


class _Part(NamedTuple):
    """A block within the bytes of a request, with its offset there."""

    brought: Bytes
    begin: int

    def block(self) -> Bytes:
        return self.brought[self.begin : self.begin + BLOCK_BYTES]


class Blocks:
    """Cache of the blocks of one run's files, least recently used first out, and the threads that
    fetch them.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._known: OrderedDict[Block, Future[_Part]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="whence-remote")
        self.requested: list[tuple[str, int, int]] = []
        # Blocks asked for ahead that nobody has used yet. What is guessed is paid with blocks that
        # were used: of what is never looked at, half is fetched at most, and MOST_AHEAD.
        self._unused: set[Block] = set()
        self._credit = MOST_AHEAD
        self._announced: deque[Block] = deque()

    def announce(self, ranges: Iterable[FileRange]) -> None:
        """Announces what is read next, in this order. At most twice MOST_AHEAD of these blocks are
        held before they are used.
        """
        with self._lock:
            self._unused.clear()
            blocks: dict[Block, None] = {}
            for name, size, start, stop in ranges:
                self._sizes[name] = size
                first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
                blocks.update(dict.fromkeys((name, block) for block in range(first, last)))
            self._announced = deque(blocks)
            self._fetch_announced()

    def read(self, name: str, size: int, start: int, stop: int, *, ahead: int) -> Bytes:
        """Bytes [start, stop) of a file of `size` bytes. Where nothing was announced, so many
        blocks behind it are asked for and not waited for. Raises Failed.
        """
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        with self._lock:
            self._sizes[name] = size
            # kept here while they are used, however many there are
            wanted = self._ask(name, first, last)
            for block in range(first, last):
                if (name, block) in self._unused:
                    self._unused.discard((name, block))
                    self._credit += 2
            if self._announced:
                self._fetch_announced()
            elif ahead and (name, last) not in self._known and self._credit > 0:
                self._guess(name, last, min(ahead, self._credit))
            self._forget(len(wanted) + len(self._unused))
        parts = [future.result() for future in wanted]
        brought, begin = parts[0]
        if any(part.brought is not brought for part in parts):
            brought, begin = np.concatenate([part.block() for part in parts]), 0
            self._keep_together(name, first, brought)
        begin -= first * BLOCK_BYTES
        return brought[begin + start : begin + stop]

    def _keep_together(self, name: str, first: int, joined: Bytes) -> None:
        """Caches blocks in joined form, so that the next reader need not join them."""
        with self._lock:
            for number in range(-(-joined.size // BLOCK_BYTES)):
                if (name, first + number) in self._known:
                    future: Future[_Part] = Future()
                    future.set_result(_Part(joined, number * BLOCK_BYTES))
                    self._known[name, first + number] = future

    def _guess(self, name: str, first: int, number: int) -> None:
        stop = min(-(-self._sizes[name] // BLOCK_BYTES), first + number)
        fresh = {(name, block) for block in range(first, stop)} - self._known.keys()
        self._ask(name, first, stop)
        self._unused |= fresh
        self._credit -= len(fresh)

    def _fetch_announced(self) -> None:
        """Requests the next announced blocks, adjacent ones together."""
        while self._announced and len(self._unused) < MOST_AHEAD:
            fresh: list[Block] = []
            while self._announced and len(fresh) < MOST_AHEAD:
                block = self._announced.popleft()
                if not self._is_known(*block):
                    fresh.append(block)
            self._unused.update(fresh)
            for name, first, stop in _rows(sorted(fresh)):
                self._ask(name, first, stop)

    def _ask(self, name: str, first: int, last: int) -> list[Future[_Part]]:
        """Returns the blocks, requested where they are not known, adjacent ones together."""
        missing: list[int] = []
        for block in [*range(first, last), -1]:
            if missing and (block != missing[-1] + 1 or (name, block) in self._known):
                self._request(name, missing)
                missing = []
            if block >= 0 and not self._is_known(name, block):
                missing.append(block)
        out = []
        for block in range(first, last):
            self._known.move_to_end((name, block))
            out.append(self._known[name, block])
        return out

    def _is_known(self, name: str, block: int) -> bool:
        """Whether a block is cached or being fetched. A failed one is requested again."""
        future = self._known.get((name, block))
        if future is not None and future.done() and future.exception() is not None:
            del self._known[name, block]
            return False
        return future is not None

    def _request(self, name: str, blocks: list[int]) -> None:
        # As many requests at once as there are threads: one stream rarely fills a line.
        share = max(MOST_OF_A_REQUEST, -(-len(blocks) // THREADS))
        for at in range(0, len(blocks), share):
            part = blocks[at : at + share]
            start = part[0] * BLOCK_BYTES
            stop = min(self._sizes[name], (part[-1] + 1) * BLOCK_BYTES)
            self.requested.append((name, start, stop))
            futures: list[Future[_Part]] = [Future() for _ in part]
            for block, future in zip(part, futures, strict=True):
                self._known[name, block] = future
            self._threads.submit(self._fetch, name, start, stop, futures)

    def _fetch(self, name: str, start: int, stop: int, futures: list[Future[_Part]]) -> None:
        try:
            data = np.frombuffer(self._place.read(name, start, stop), np.uint8)
            if data.size != stop - start:
                raise Failed(
                    f"cannot read {self._place.url}/{name}: wanted bytes {start} to {stop}, got "
                    f"{data.size}; it was changed while it was read"
                )
        except BaseException as error:  # noqa: BLE001 - raised where the block is waited for
            for future in futures:
                future.set_exception(error)
            return
        for number, future in enumerate(futures):
            future.set_result(_Part(data, number * BLOCK_BYTES))

    def _forget(self, used: int) -> None:
        while len(self._known) > max(KEPT_BYTES // BLOCK_BYTES, used):
            self._known.popitem(last=False)


def _rows(blocks: list[Block]) -> list[tuple[str, int, int]]:
    """(file, first block, behind the last) of blocks in rising order that lie beside each other."""
    rows: list[tuple[str, int, int]] = []
    for name, block in blocks:
        if rows and rows[-1][0] == name and rows[-1][2] == block:
            rows[-1] = name, rows[-1][1], block + 1
        else:
            rows.append((name, block, block + 1))
    return rows


class RemoteShard(ReadShard):
    """A shard in an object store that is read as if it were mapped."""

    def __init__(self, blocks: Blocks, url: str, name: str, size: int | None) -> None:
        self.path = PurePosixPath(f"{url}/{name}")
        self._url, self._name, self._blocks = url, name, blocks
        self._size = size
        self._data_at = -1
        self._next, self._ahead, self._reads = 0, 0, 0
        self._lock = threading.Lock()

    def data(self, offset: int, nbytes: int) -> Bytes:
        _, _, start, stop = self.range(offset, nbytes)
        if not nbytes:
            return np.empty(0, np.uint8)
        found = self._read(start, stop)
        if found.__array_interface__["data"][0] % 16:
            found = found.copy()  # as elements are in memory
        found.flags.writeable = False
        return found

    def range(self, offset: int, nbytes: int) -> FileRange:
        """Where bytes of the data area lie in the file. Raises ElementsMissing with what was
        wanted.
        """
        size, data_at = self._opened()
        start, stop = data_at + offset, data_at + offset + nbytes
        if offset < 0 or nbytes < 0 or stop > size:
            raise ElementsMissing(
                f"{self._url}/{self._name}: wanted bytes {start} to {stop}, the file has {size}; "
                "it was cut off: upload the run again"
            )
        return FileRange(self._name, size, start, stop)

    def require(self, stop: int) -> None:
        self.range(0, stop)

    def available(self) -> int:
        try:
            size, data_at = self._opened()
        except ElementsMissing:
            return 0
        return size - data_at

    def _opened(self) -> tuple[int, int]:
        """Bytes of the file, and where its data area starts."""
        if self._size is None:
            raise ElementsMissing(f"{self._url}/{self._name}: it is not there")
        if self._data_at < 0:
            length = (
                int.from_bytes(self._read(0, 8).tobytes(), "little")
                if self._size >= 8
                else self._size
            )
            if length > min(self._size - 8, MAX_HEADER_BYTES):
                raise ElementsMissing(
                    f"{self._url}/{self._name}: wanted a header of {length} bytes, the file has "
                    f"{self._size}; it was cut off"
                )
            self._data_at = 8 + length
        return self._size, self._data_at

    def _read(self, start: int, stop: int) -> Bytes:
        assert self._size is not None
        with self._lock:
            if start >= self._data_at > 0:
                self._reads += 1
            goes_on = self._next - BLOCK_BYTES <= start <= self._next + BLOCK_BYTES
            if goes_on and self._reads:
                self._ahead = min(MOST_AHEAD, max(1, 2 * self._ahead))
            elif self._reads > _FEW:  # all over the place, and most of it before long
                self._ahead = MOST_AHEAD
            else:
                self._ahead = 0
            self._next = stop
        try:
            return self._blocks.read(self._name, self._size, start, stop, ahead=self._ahead)
        except Failed as error:
            raise ElementsMissing(str(error)) from error
