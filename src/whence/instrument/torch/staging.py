"""Brings device tensors to the host without stopping the program: pinned memory that is used again
and again, and threads that describe what has arrived.

A tensor is copied into a chunk of pinned memory, behind the work that its stream has queued and
before what the program queues next; its thread goes on, and nothing is allocated on the device.
What lies in one chunk is one batch: one event, one call without the GIL for the digests and figures
of all of it, then everything is handed over on one thread, in the order of submission. A thread
that woke up for every tensor would take the GIL from the program thousands of times in a forward.
The ring is bounded in bytes: `submit` waits when it is full.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from whence.frameworks import host
from whence.records import Sketch, Statistics

RING_BYTES = 512 << 20
"""Of pinned memory at most; it is taken when it is needed."""
CHUNK_BYTES = 32 << 20
"""Pinned at once (16 ms); a tensor larger than that gets a chunk of its own."""
BATCH_ENTRIES = 512
"""Small tensors that are handed over together: their threads wake up as often less."""
SHARED_BYTES = 1 << 20
"""A batch from here on is described by a thread beside the one that hands over."""
HELPERS = 8
AGE_S = 0.25
"""A batch that nothing ends, in a program that hangs, is handed over after so long."""
_ALIGNED = 64


class Arrival(msgspec.Struct, gc=False, eq=False):
    """The canonical bytes of a submitted tensor on the host: `nbytes` at `address`, which
    `copied` shares. They are there until `arrived` returns.

    dtype: of the figures that were asked for, "" for none. figures: None where they were not taken
    on the way.
    """

    address: int
    nbytes: int
    dtype: str
    copied: Any
    arrived: Callable[[Arrival], None]
    digest: bytes = b""
    figures: tuple[Statistics, Sketch] | None = None


class _Chunk:
    """Host memory that one batch after the other fills, pinned where there is an accelerator."""

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(False):  # written in any mode later
            self._memory = torch.empty(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.accelerator.is_available()
            )
        self.nbytes, self._address = nbytes, self._memory.data_ptr()
        self._views: dict[Any, Any] = {}
        self._events: dict[Any, Any] = {}

    def copy(self, tensor: Any, offset: int, events: dict[Any, Any]) -> tuple[int, Any]:
        """Copy a tensor, detached and canonical, to `offset`: (address, the copy). events: gets
        what to wait for before it is read, one event for all that was copied on a stream.
        """
        dtype, device = tensor.dtype, tensor.device
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = _viewed(self._memory, dtype)
        copied = view.as_strided(tensor.shape, tensor.stride(), offset // dtype.itemsize)
        background = _copies_in_the_background(device)
        copied.copy_(tensor, non_blocking=background)
        if background:
            key = device, _stream(device)
            event = self._events.get(key)
            if event is None:
                event = self._events[key] = torch.Event(device, blocking=True)
            event.record()
            events[key] = event
        return self._address + offset, copied


class _Batch:
    """What is handed over together: arrivals, and actions between them. sealed: nothing is added
    any more. described: set when digests and figures are taken, or `error` is.
    """

    def __init__(self) -> None:
        self.chunk: _Chunk | None = None
        self.entries: list[Arrival | Callable[[], None]] = []
        self.events: dict[Any, Any] = {}
        self.nbytes = self.end = 0
        self.sealed = False
        self.described = threading.Event()
        self.error: Exception | None = None
        self._claim = threading.Lock()

    def has_room(self, nbytes: int) -> bool:
        """Does a tensor fit behind the others?"""
        return self.chunk is None or self.end + nbytes <= self.chunk.nbytes

    def is_claimed(self) -> bool:
        """Is another thread describing it? If not, the one that asks is from now on."""
        return not self._claim.acquire(blocking=False)

    def describe(self) -> None:
        """Wait for the copies and take digests and figures."""
        try:
            for event in self.events.values():
                event.synchronize()
            arrivals = [e for e in self.entries if type(e) is Arrival]
            described = host.describe_many([(e.address, e.nbytes, e.dtype) for e in arrivals])
            for arrival, (digest, figures) in zip(arrivals, described):
                arrival.digest, arrival.figures = digest, figures
        except Exception as error:  # noqa: BLE001 - raised again by the thread that hands over
            self.error = error
        self.described.set()


class StagingRing:
    """Submit device tensors and things to do after them; both happen in order, on one thread.

    limit_bytes: how much may wait (one tensor larger than that waits alone). on_error: called once,
    from the thread, with the first exception; nothing runs after it. Safe to use from several
    threads, not from the ring's own.
    """

    def __init__(
        self, on_error: Callable[[Exception], None], limit_bytes: int = RING_BYTES
    ) -> None:
        # All that is not handed over yet, in order; only the last one may be open. A Ctrl-C can
        # come between any two steps of `submit`: there is no count beside this that could be off.
        self._batches: deque[_Batch] = deque()
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._limit = limit_bytes
        self._chunk_bytes = min(CHUNK_BYTES, -(-limit_bytes // _ALIGNED) * _ALIGNED)
        self._free: list[_Chunk] = []
        self._on_error = on_error
        self._dead = self._closed = False
        self._tasks: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._work, name="whence-staging", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Is anything not yet handed over?"""
        return any(batch.entries or batch.sealed for batch in tuple(self._batches))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tensors not yet handed over."""
        return sum([batch.nbytes for batch in tuple(self._batches)])

    def submit(
        self,
        tensor: Any,
        arrived: Callable[[Arrival], None],
        dtype: str = "",
        *,
        canonical: bool = False,
    ) -> None:
        """Copy `tensor` to the host; `arrived` gets it later, on the ring's thread. Returns before
        that.

        tensor: strided, readable, on any device. dtype: whence's name of its own, where figures are
        wanted. canonical: its memory is known to be its canonical bytes. Raises what torch raises
        when there is no memory for the copy.
        """
        nbytes = tensor.nbytes
        with self._lock:
            batch = self._with_room(nbytes)
            if batch is None:
                return
            address, copied = 0, None
            if batch.chunk is not None and nbytes:
                offset = batch.end
                # Its own before it is filled, whatever comes between: a Ctrl-C.
                batch.end += (nbytes + _ALIGNED - 1) & -_ALIGNED
                address, copied = batch.chunk.copy(
                    tensor.detach() if canonical else _canonical(tensor), offset, batch.events
                )
            else:
                copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            batch.entries.append(Arrival(address, nbytes, dtype, copied, arrived))
            batch.nbytes += nbytes
            if len(batch.entries) >= BATCH_ENTRIES:
                self._seal()

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` after everything submitted so far has arrived."""
        with self._lock:
            if not (self._dead or self._closed):
                batch = self._open() or self._new_batch()
                batch.entries.append(action)
                if len(batch.entries) >= BATCH_ENTRIES:
                    self._seal()

    def flush(self) -> None:
        """Begin to hand over everything submitted so far."""
        with self._lock:
            self._seal()

    def drain(self) -> None:
        """Wait until everything submitted so far has been handed over, or the ring died."""
        with self._lock:
            self._seal()
            sealed = [batch for batch in self._batches if batch.sealed]
            while sealed and sealed[-1] in self._batches and not self._dead:
                self._room.wait()

    def close(self) -> None:
        """Wait until everything has been handed over, then end the threads. Idempotent; what is
        submitted later is dropped.
        """
        with self._lock:
            self._closed = True
            self._seal()
            self._room.notify_all()
        self._thread.join()
        for _ in self._helpers:
            self._tasks.put(None)
        for helper in self._helpers:
            helper.join()
        self._helpers.clear()
        self._free.clear()

    # ---- everything below until `_work` runs under the lock

    def _open(self) -> _Batch | None:
        last = self._batches[-1] if self._batches else None
        return None if last is None or last.sealed else last

    def _new_batch(self) -> _Batch:
        batch = _Batch()
        self._batches.append(batch)
        return batch

    def _with_room(self, nbytes: int) -> _Batch | None:
        """The open batch, with room for so many bytes; None when nothing is taken any more."""
        while not (self._dead or self._closed):
            batch = self._open()
            if batch is not None and not batch.has_room(nbytes):
                self._seal()
                batch = None
            if batch is None:
                batch = self._new_batch()
            if batch.chunk is None and nbytes:
                batch.chunk = self._chunk(nbytes)
            if batch.chunk is not None or not nbytes:
                return batch
            self._seal()
            self._room.wait()
        return None

    def _chunk(self, nbytes: int) -> _Chunk | None:
        """Memory for so many bytes, None while all of it is in use."""
        large = nbytes > self._chunk_bytes
        size = 1 << (nbytes - 1).bit_length() if large else self._chunk_bytes
        for chunk in self._free:
            if chunk.nbytes == size:
                self._free.remove(chunk)
                return chunk
        in_use = sum([b.chunk.nbytes for b in self._batches if b.chunk is not None])
        if in_use and in_use + size > self._limit:
            return None
        while self._free and in_use + size + sum([c.nbytes for c in self._free]) > self._limit:
            self._free.pop(0)
        return _Chunk(size)

    def _seal(self) -> None:
        """End the open batch: it is handed over from now on."""
        batch = self._open()
        if batch is None or not batch.entries:
            return
        batch.sealed = True
        if batch.nbytes >= SHARED_BYTES and len(self._batches) > 1:
            self._tasks.put(batch)
            if len(self._helpers) < min(HELPERS, len(self._batches) - 1, _processors() - 1):
                helper = threading.Thread(target=self._help, name="whence-figures", daemon=True)
                self._helpers.append(helper)
                helper.start()
        self._room.notify_all()

    # ---- the threads

    def _help(self) -> None:
        """Describe batches, in any order."""
        while (batch := self._tasks.get()) is not None:
            if not batch.is_claimed():
                batch.describe()

    def _next(self) -> _Batch | None:
        """The batch that is handed over next, None at the end."""
        with self._room:
            while True:
                first = self._batches[0] if self._batches else None
                if first is not None and first.sealed:
                    return first
                if self._closed:  # all that had entries was sealed before
                    return None
                seen = len(first.entries) if first is not None else 0
                if not self._room.wait(AGE_S) and seen and first is self._open():
                    self._seal()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if not self._dead:
                try:
                    self._hand_over(batch)
                except Exception as error:  # noqa: BLE001 - anything here ends the capture, never the program
                    with self._room:
                        self._dead = True
                        # who waits for room must not wait for what will never be taken
                        self._room.notify_all()
                    self._on_error(error)
            batch.entries.clear()
            with self._room:
                self._batches.popleft()
                if batch.chunk is not None and not self._closed:
                    self._free.append(batch.chunk)
                del batch
                self._room.notify_all()

    def _hand_over(self, batch: _Batch) -> None:
        if batch.is_claimed():
            batch.described.wait()
        else:
            batch.describe()
        if batch.error is not None:
            raise batch.error
        for entry in batch.entries:
            if type(entry) is Arrival:
                entry.arrived(entry)
            else:
                entry()  # type: ignore[operator]


def _canonical(tensor: Any) -> Any:
    """The tensor, or a copy where it is, whose memory is the canonical bytes."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _viewed(memory: Any, dtype: Any) -> Any:
    with torch.inference_mode(False):
        return memory.view(dtype)


def _copies_in_the_background(device: Any) -> bool:
    """Is it the accelerator, which copies into pinned memory while the program goes on?"""
    if device not in _background:
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        _background[device] = accelerator is not None and accelerator.type == device.type
    return _background[device]


_background: dict[Any, bool] = {}


def _stream(device: Any) -> Any:
    """What tells the current stream of a device from its others."""
    if device.type == "cuda":
        return torch._C._cuda_getCurrentRawStream(device.index)
    try:
        return torch.accelerator.current_stream(device).stream_id
    except (RuntimeError, NotImplementedError):
        return None  # an accelerator of one stream


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
