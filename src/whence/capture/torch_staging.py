"""Brings device tensors to the host without stopping the program: a bounded ring and one thread.

A tensor is cloned on its own stream (later writes by the program cannot reach the clone), copied into a pinned host buffer
without blocking, and an event is recorded behind the copy. The thread waits for that event before it touches the bytes, then
hands them over in the order of submission. The ring is bounded in bytes: `submit` waits when it is full.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from whence.arrays import torch as tensors

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Ring:
    """Submit device tensors and things to do after them; both happen in order, on one thread.

    limit_bytes: how much may wait. on_error: called once, from the thread, with the first exception; nothing runs after it.
    """

    def __init__(self, on_error: Callable[[Exception], None], limit_bytes: int = 1 << 30) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting = 0
        self._limit = limit_bytes
        self._on_error = on_error
        self._dead = False
        self._done = 0
        self._put = 0
        self._thread = threading.Thread(target=self._work, name="whence-staging", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Is anything not yet handed over?"""
        return self._done != self._put

    def submit(self, tensor: Any, arrived: Callable[[Bytes], None]) -> None:
        """Copy `tensor` to the host; `arrived` gets its canonical bytes later, on the ring's thread. Returns before that."""
        nbytes = tensor.nbytes
        with self._room:
            while self._waiting and self._waiting + nbytes > self._limit and not self._dead:
                self._room.wait(1.0)
            if self._dead:
                return
            self._waiting += nbytes
        with torch.no_grad():
            clone = tensor.detach().clone(memory_format=torch.contiguous_format)
            event = None
            if clone.is_cpu:
                host = clone
            else:
                pinned = torch.accelerator.is_available() and clone.device.type == torch.accelerator.current_accelerator().type
                host = torch.empty(clone.shape, dtype=clone.dtype, pin_memory=pinned)
                host.copy_(clone, non_blocking=pinned)
                if pinned:
                    event = torch.Event(device=clone.device)
                    event.record()

        def take() -> None:
            if event is not None:
                event.synchronize()
            arrived(tensors.canonical(host))

        # `clone` lives in the closure of the queue entry until its copy is done.
        self._enqueue(take, nbytes, clone)

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` after everything submitted so far has arrived."""
        self._enqueue(action, 0, None)

    def _enqueue(self, action: Callable[[], None], nbytes: int, keep: Any) -> None:
        def run(_keep: Any = keep) -> None:
            action()

        self._put += 1
        self._queue.put((run, nbytes))

    def close(self) -> None:
        """Wait until everything has been handed over, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            action, nbytes = item
            if not self._dead:
                try:
                    action()
                except Exception as error:  # noqa: BLE001 - anything here ends the capture, never the program
                    self._dead = True
                    self._on_error(error)
            with self._room:
                self._waiting -= nbytes
                self._done += 1
                self._room.notify_all()
