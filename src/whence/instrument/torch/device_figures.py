"""Digests and figures of device tensors whose elements nobody wants: a kernel reads them where they
lie, and leaves a fifteenth of their bytes in pinned memory.

Where the kernel cannot run, tensors are copied to the host and described there (`staging`).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from whence import dtypes
from whence.frameworks import host

PIECE = 64
"""Units of a content that one row of a table means: 512 KB."""
TABLE_ROWS = 1 << 12
"""Of one batch."""
_FLOAT64 = dtypes.DTYPES["float64"].code
"""Its squares may leave the range of float64, and are then taken anew, from the elements."""
_ALIGNED = 8
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


class Layout(NamedTuple):
    """What reading one tensor leaves. nbytes: of the results. pieces: rows of the table."""

    nbytes: int
    pieces: int


def layout(tensor: Any, dtype: str) -> Layout | None:
    """How a contiguous tensor is read; None where its bytes are needed for its digest or figures.

    dtype: of the figures that are wanted, "" for none.
    """
    nbytes = tensor.nbytes
    if not nbytes or (dtype and dtypes.DTYPES[dtype].code in (-1, _FLOAT64)):
        return None
    if nbytes < host.DIGEST_BYTES:
        return Layout(nbytes, 1)
    units = -(-nbytes // host.UNIT_BYTES)
    pieces = -(-units // PIECE)
    if tensor.data_ptr() % _ALIGNED or pieces > TABLE_ROWS:
        return None
    return Layout(host.units_bytes(nbytes, dtype), pieces)


def rows(tensor: Any, dtype: str, out: int) -> list[tuple[int, ...]]:
    """The rows of the table that mean a tensor, as `device_kernel.COLUMNS`. out: address of its
    results.
    """
    nbytes, address = tensor.nbytes, tensor.data_ptr()
    code = dtypes.DTYPES[dtype].code if dtype else -1
    content = (address, nbytes, code, tensor.element_size(), out)
    units = -(-nbytes // host.UNIT_BYTES)
    return [(*content, first, min(first + PIECE, units)) for first in range(0, units, PIECE)]


class DeviceReader:
    """Launches the kernel on devices that can run it."""

    def __init__(self) -> None:
        self._kernel: Any = None
        self._secrets: dict[Any, Any] = {}
        self.problem = ""

    def reads(self, device: Any) -> bool:
        """Can tensors of this device be read where they lie? If not, and they might have been,
        `problem` says why.
        """
        if device not in self._secrets:
            self._secrets[device] = self._prepared(device) if _may_read(device) else None
        return self._secrets[device] is not None

    @contextlib.contextmanager
    def launched(self, device: Any, stream: Any, table: int, count: int) -> Iterator[None]:
        """Read what `count` rows of int64 at an address mean, behind the work of a stream. In the
        block, that stream is the current one.
        """
        secret, programs = self._secrets[device], self._kernel.PROGRAMS
        with _current(device, stream):
            self._kernel.read_units[count, programs](table, secret, programs=programs, **_OPTIONS)
            yield

    def _prepared(self, device: Any) -> Any:
        """The words that the kernel needs on a device, after it ran there once."""
        try:
            host.load_units()
            from whence.instrument.torch import device_kernel

            self._kernel = device_kernel
            with torch.inference_mode(False):
                words = torch.from_numpy(host.SECRET_WORDS.view("int64").copy()).to(device)
                pinned = device.type != "cpu"
                table = torch.zeros((1, len(device_kernel.COLUMNS)), dtype=torch.int64)
                table = table.pin_memory() if pinned else table
            self._secrets[device] = words.view(torch.uint64)
            with self.launched(device, stream_of(device), table.data_ptr(), 1):
                if pinned:
                    torch.accelerator.synchronize(device)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises where it cannot compile
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        return self._secrets[device]


def stream_of(device: Any) -> Any:
    """What tells the current stream of a device from its others."""
    if device.type == "cuda":
        return torch._C._cuda_getCurrentRawStream(device.index)
    try:
        return torch.accelerator.current_stream(device).stream_id
    except (RuntimeError, NotImplementedError):
        return None  # an accelerator of one stream


def _may_read(device: Any) -> bool:
    """Is there a Triton for this device? Its interpreter is one for the CPU."""
    if not importlib.util.find_spec("triton"):
        return False
    import triton

    if triton.knobs.runtime.interpret:
        return bool(device.type == "cpu")
    return bool(device.type == "cuda" and torch.version.hip is None)


def _current(device: Any, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes a stream the current one, if it is not."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    if torch.cuda.current_device() == device.index and stream_of(device) == stream:
        return contextlib.nullcontext()
    on_stream: contextlib.AbstractContextManager[Any] = torch.cuda.stream(
        torch.cuda.ExternalStream(stream, device)
    )
    return on_stream
