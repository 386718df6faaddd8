"""Digests and figures of device tensors whose elements nobody wants: a kernel reads them on the
device and writes a sixteenth of their bytes to pinned memory.

Where the kernel cannot run, tensors are copied to the host and described there (`StagingRing`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any, NamedTuple

import torch

from whence import dtypes
from whence.frameworks import host

COLUMNS = ("address", "nbytes", "code", "size", "out", "first", "end")
"""Columns of the table that the kernel reads: address of a content, its bytes, kernel code of its
dtype (-1: no figures), bytes of an element, address for the results (as `join_units` reads them),
first unit and end unit. A content of fewer than DIGEST_BYTES is copied to `out` unchanged.
"""
PIECE = 16
"""Units of a content per row of the table: 512 KB."""
TABLE_ROWS = 1 << 12
"""Most rows in the table of one batch."""
_FLOAT64 = dtypes.DTYPES["float64"].code
"""Not read by the kernel: squares may exceed the range of float64, and are then computed again from
the elements.
"""
_ALIGNED = 8
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class Layout(NamedTuple):
    """How the kernel reads contents of one size and dtype. nbytes: of the results; code: of the
    dtype, -1 where no figures are wanted; units: of the content; pieces: rows of the table.
    """

    nbytes: int
    code: int
    units: int
    pieces: int


def layout(tensor: Any, dtype: str) -> Layout | None:
    """How the kernel reads a contiguous tensor; None where its bytes must be copied for digest or
    figures.

    dtype: of the figures that are wanted, "" for none.
    """
    nbytes = tensor.nbytes
    # A device cannot read a 64-bit word at an unaligned address.
    if nbytes >= host.DIGEST_BYTES and tensor.data_ptr() % _ALIGNED:
        return None
    return _layout(nbytes, dtype)


@functools.lru_cache(maxsize=1 << 12)
def _layout(nbytes: int, dtype: str) -> Layout | None:
    code = dtypes.DTYPES[dtype].code if dtype else -1
    units = -(-nbytes // host.UNIT_BYTES)
    pieces = -(-units // PIECE)
    if not nbytes or pieces > TABLE_ROWS or (dtype and code in (-1, _FLOAT64)):
        return None
    if nbytes < host.DIGEST_BYTES:
        return Layout(nbytes, code, 1, 1)
    return Layout(host.units_bytes(nbytes, dtype), code, units, pieces)


def add_rows(rows: list[int], tensor: Any, how: Layout, out: int) -> None:
    """Append the rows that describe a tensor to the table, flat in the order of `COLUMNS`. out:
    address of its results.
    """
    content = tensor.data_ptr(), tensor.nbytes, how.code, tensor.element_size(), out
    if how.pieces == 1:
        rows.extend((*content, 0, how.units))
        return
    for first in range(0, how.units, PIECE):
        rows.extend((*content, first, min(first + PIECE, how.units)))


class DeviceReader:
    """Launches the kernel on devices that can run it."""

    def __init__(self) -> None:
        # By device: (compiled kernel, its constants on that device), None where it cannot run.
        self._ready: dict[Any, tuple[Any, Any] | None] = {}
        self._programs = 0
        self.problem = ""

    def reads(self, device: Any) -> bool:
        """Whether the kernel can read tensors of this device. `problem` says why it failed where it
        was tried.
        """
        if device not in self._ready:
            self._ready[device] = self._prepared(device) if _may_read(device) else None
        return self._ready[device] is not None

    def launch(self, device: Any, stream: Any, table: int, count: int) -> None:
        """Launch the kernel for `count` rows of int64 at the address `table`, after the work queued
        on a stream of the current device.
        """
        kernel, secret = self._ready[device]  # type: ignore[misc]
        if stream is None:  # of the interpreter
            kernel[count, self._programs](table, secret, len(COLUMNS), self._programs)
        else:
            arguments = table, secret, len(COLUMNS), self._programs
            kernel[count, self._programs, 1](*arguments, stream=stream)

    def _prepared(self, device: Any) -> tuple[Any, Any] | None:
        """The kernel and the constants it needs on a device, after a first run there; None if that
        run fails.
        """
        try:
            host.check_units()
            from whence.instrument.torch import device_kernel

            self._programs = programs = device_kernel.PROGRAMS
            on_host = device.type == "cpu"
            with torch.inference_mode(False):
                words = torch.from_numpy(host.SECRET_WORDS.view("int64").copy()).to(device)
                table = torch.zeros(len(COLUMNS), dtype=torch.int64)
            secret = words.view(torch.uint64)
            if on_host:
                return device_kernel.read_units, secret
            table = table.pin_memory()
            with torch.cuda.device(device):
                kernel = device_kernel.read_units[1, programs](
                    table.data_ptr(), secret, len(COLUMNS), programs, **_OPTIONS
                )
                # Launch like `launch`, which skips the argument checks that Triton does per call.
                arguments = table.data_ptr(), secret, len(COLUMNS), programs
                kernel[1, programs, 1](*arguments, stream=stream_of(device))
                torch.cuda.current_stream(device).synchronize()
        except Exception as error:  # noqa: BLE001 - whatever Triton raises where it cannot compile
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        return kernel, secret


def is_current(device: Any, stream: Any) -> bool:
    """Whether this is the current stream of the current device."""
    if device.type != "cuda":
        return True
    return bool(torch.cuda.current_device() == device.index) and bool(stream_of(device) == stream)


def made_current(device: Any, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which a stream and its device are the current ones."""
    on_stream: contextlib.AbstractContextManager[Any] = torch.cuda.stream(
        torch.cuda.ExternalStream(stream, device)
    )
    return on_stream


def stream_of(device: Any) -> Any:
    """Identifier of the current stream of a device, None for a device with one stream."""
    if device.type == "cuda":
        return torch._C._cuda_getCurrentRawStream(device.index)
    try:
        return torch.accelerator.current_stream(device).stream_id
    except (RuntimeError, NotImplementedError):
        return None  # an accelerator of one stream


def _may_read(device: Any) -> bool:
    """Whether Triton is installed for this device. Its interpreter serves the CPU only."""
    if not importlib.util.find_spec("triton"):
        return False
    import triton

    if triton.knobs.runtime.interpret:
        return bool(device.type == "cpu")
    return bool(device.type == "cuda" and torch.version.hip is None)
