"""Brings device tensors to the host without stopping the program: a bounded ring and one thread.

A tensor is cloned on its own stream (later writes by the program cannot reach the clone), copied
into a pinned host buffer without blocking, and an event is recorded behind the copy. The thread
waits for that event before it touches the bytes, then hands them over in the order of submission.
The ring is bounded in bytes: `submit` waits when it is full.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from whence.frameworks import torch_arrays as tensors

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Arrived = Callable[[Bytes, Any], None]


class StagingRing:
    """Submit device tensors and things to do after them; both happen in order, on one thread.

    limit_bytes: how much may wait (one tensor larger than that waits alone). on_error: called once,
    from the thread, with the first exception; nothing runs after it. Safe to use from several
    threads, not from the ring's own.
    """

    def __init__(self, on_error: Callable[[Exception], None], limit_bytes: int = 1 << 30) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._limit = limit_bytes
        self._on_error = on_error
        self._waiting = self._submitted = self._handed_over = 0
        self._dead = self._closed = False
        self._thread = threading.Thread(target=self._work, name="whence-staging", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Is anything not yet handed over?"""
        return self._handed_over != self._submitted

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tensors not yet handed over."""
        return self._waiting

    def submit(self, tensor: Any, arrived: Arrived) -> None:
        """Copy `tensor` to the host; `arrived` gets its canonical bytes and the copy later, on the
        ring's thread. Returns before that.

        tensor: strided, readable, on any device. Raises what torch raises when there is no memory
        for the copy.
        """
        nbytes = tensor.nbytes
        with self._room:
            while self._waiting and self._waiting + nbytes > self._limit and not self._dead:
                self._room.wait()
            if self._dead or self._closed:
                return
            self._waiting += nbytes
        try:
            copied, event, clone = _to_host(tensor)
        except BaseException:  # Ctrl-C too: the room is given back
            with self._room:
                self._waiting -= nbytes
                self._room.notify_all()
            raise

        def take(_keep: Any = clone) -> None:  # the clone lives until its copy is done
            if event is not None:
                event.synchronize()
            arrived(tensors.canonical(copied), copied)

        self._enqueue(take, nbytes)

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` after everything submitted so far has arrived."""
        self._enqueue(action, 0)

    def drain(self) -> None:
        """Wait until everything submitted so far has been handed over, or the ring died."""
        with self._room:
            submitted = self._submitted
            while self._handed_over < submitted and not self._dead:
                self._room.wait()

    def close(self) -> None:
        """Wait until everything has been handed over, then end the thread. Idempotent; what is
        submitted later is dropped.
        """
        with self._room:
            first, self._closed = not self._closed, True
            if first:
                self._queue.put(None)
        self._thread.join()

    def _enqueue(self, action: Callable[[], None], nbytes: int) -> None:
        with self._room:
            if self._closed:
                self._waiting -= nbytes
                return
            self._submitted += 1
            self._queue.put((action, nbytes))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            action, nbytes = item
            if not self._dead:
                try:
                    action()
                except Exception as error:  # noqa: BLE001 - anything here ends the capture, never the program
                    with self._room:
                        self._dead = True
                        # who waits for room must not wait for what will never be taken
                        self._room.notify_all()
                    self._on_error(error)
            # The tensors of an entry go before its room is given to others.
            del item, action
            with self._room:
                self._waiting -= nbytes
                self._handed_over += 1
                self._room.notify_all()


def _to_host(tensor: Any) -> tuple[Any, Any, Any]:
    """(host tensor, event to wait for before reading it or None, what must stay alive until
    then).
    """
    with torch.no_grad():
        clone = tensor.detach().clone(memory_format=torch.contiguous_format)
        if clone.is_cpu:
            return clone, None, None
        pinned = (
            torch.accelerator.is_available()
            and clone.device.type == torch.accelerator.current_accelerator().type
        )
        copied = torch.empty(clone.shape, dtype=clone.dtype, pin_memory=pinned)
        copied.copy_(clone, non_blocking=pinned)
        event = None
        if pinned:
            event = torch.Event(device=clone.device)
            event.record()
        return copied, event, clone
