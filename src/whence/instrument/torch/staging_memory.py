"""Host memory that one batch of tensors after the other fills, and the batch: what arrived in it,
described in one call.
"""

from __future__ import annotations

import array
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from whence.frameworks import host
from whence.instrument.torch import device_figures
from whence.instrument.torch.device_figures import DeviceReader, stream_of
from whence.records import Sketch, Statistics


class Arrival(msgspec.Struct, gc=False, eq=False):
    """The canonical bytes of a submitted tensor on the host: `nbytes` at `address`, which
    `copied` shares; None where a device read it, and its bytes are not here. They are there until
    `arrived` returns.

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

    @property
    def is_in_units(self) -> bool:
        """Lies at the address what a device made of units of its bytes?"""
        return self.copied is None and self.nbytes >= host.DIGEST_BYTES


class Chunk:
    """Host memory that one batch after the other fills, pinned where there is an accelerator."""

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(False):  # written in any mode later
            self._memory = torch.empty(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.accelerator.is_available()
            )
        self.nbytes, self.address = nbytes, self._memory.data_ptr()
        self._views: dict[Any, Any] = {}
        self._events: dict[Any, Any] = {}
        self._table: Any = None
        self._table_address = 0

    def copy(self, tensor: Any, offset: int, events: dict[Any, Any]) -> tuple[int, Any]:
        """Copy a tensor, detached and canonical, to `offset`: (address, the copy). events: gets
        what to wait for before it is read, one event for all that was copied on a stream.
        """
        dtype, device = tensor.dtype, tensor.device
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = _viewed(self._memory, dtype)
        copied = view.as_strided(tensor.shape, tensor.stride(), offset // dtype.itemsize)
        background = copies_in_the_background(device)
        copied.copy_(tensor, non_blocking=background)
        if background:
            self.mark(device, stream_of(device), events)
        return self.address + offset, copied

    def mark(self, device: Any, stream: Any, events: dict[Any, Any]) -> None:
        """Add the event behind what the current stream of a device was told so far."""
        key = device, stream
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = torch.Event(device, blocking=True)
        event.record()
        events[key] = event

    def write_rows(self, first: int, rows: list[int]) -> int:
        """Write numbers of the table behind `first` others: their address."""
        if self._table is None:
            with torch.inference_mode(False):
                table = torch.empty(
                    device_figures.TABLE_ROWS * len(device_figures.COLUMNS),
                    dtype=torch.int64,
                    device="cpu",
                    pin_memory=self._memory.is_pinned(),
                )
            self._table = memoryview(table.numpy()).cast("B").cast("q")
            self._table_address = table.data_ptr()
        self._table[first : first + len(rows)] = array.array("q", rows)
        return int(self._table_address + 8 * first)


class Batch:
    """What is handed over together: arrivals, and actions between them. sealed: nothing is added
    any more. described: set when digests and figures are taken, or `error` is.
    """

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.entries: list[Arrival | Callable[[], None]] = []
        self.events: dict[Any, Any] = {}
        self.nbytes = self.end = 0
        # Of the tables that a device reads: rows in all, numbers that are written, and those of
        # tensors that are yet to be read, with these tensors.
        self.rows = self.written = 0
        self.unread: dict[tuple[Any, Any], list[int]] = {}
        self.read_soon: list[Any] = []
        self.sealed = False
        self.described = threading.Event()
        self.error: Exception | None = None
        self._claim = threading.Lock()

    def has_room(self, nbytes: int, rows: int = 0) -> bool:
        """Does a tensor fit behind the others, and so many rows of a table?"""
        return self.rows + rows <= device_figures.TABLE_ROWS and (
            self.chunk is None or self.end + nbytes <= self.chunk.nbytes
        )

    def read(self, reader: DeviceReader) -> None:
        """Have the device read what it was to read."""
        unread, self.unread = self.unread, {}
        for (device, stream), rows in unread.items():
            if device_figures.is_current(device, stream):
                self._launch(reader, device, stream, rows)
            else:
                with device_figures.made_current(device, stream):
                    self._launch(reader, device, stream, rows)
        self.read_soon.clear()

    def _launch(self, reader: DeviceReader, device: Any, stream: Any, rows: list[int]) -> None:
        assert self.chunk is not None
        table = self.chunk.write_rows(self.written, rows)
        self.written += len(rows)
        reader.launch(device, stream, table, len(rows) // len(device_figures.COLUMNS))
        if copies_in_the_background(device):
            self.chunk.mark(device, stream, self.events)

    def is_claimed(self) -> bool:
        """Is another thread describing it? If not, the one that asks is from now on."""
        return not self._claim.acquire(blocking=False)

    def describe(self) -> None:
        """Wait for the copies and take digests and figures."""
        try:
            for event in self.events.values():
                event.synchronize()
            arrivals = [e for e in self.entries if type(e) is Arrival]
            for describe, in_units in ((host.describe_many, False), (host.join_units, True)):
                some = [e for e in arrivals if e.is_in_units is in_units]
                described = describe([(e.address, e.nbytes, e.dtype) for e in some])
                for arrival, (digest, figures) in zip(some, described):
                    arrival.digest, arrival.figures = digest, figures
        except Exception as error:  # noqa: BLE001 - raised again by the thread that hands over
            self.error = error
        self.described.set()


def _viewed(memory: Any, dtype: Any) -> Any:
    with torch.inference_mode(False):
        return memory.view(dtype)


def copies_in_the_background(device: Any) -> bool:
    """Is it the accelerator, which copies into pinned memory while the program goes on?"""
    if device not in _background:
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        _background[device] = accelerator is not None and accelerator.type == device.type
    return _background[device]


_background: dict[Any, bool] = {}
