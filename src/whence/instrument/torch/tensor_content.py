"""Bytes of a tensor that is recorded: where they lie, their digest, and what is remembered of them
to know the tensor again without keeping its memory alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from whence.frameworks import host
from whence.frameworks import torch_arrays as tensors
from whence.frameworks.torch_arrays import TensorSnapshot
from whence.frameworks.torch_trees import ObjectSnapshot
from whence.instrument.session import Content

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
hash_of = xxhash.xxh3_128_digest
_read = ctypes.string_at
expired = torch.UntypedStorage._expired
UNSETTLED = -1
"""The version of what an operator wrote or made a view of, seen inside the operator: torch counts
it up behind it.
"""
FULL_BYTES = 1 << 16
"""Memory up to here is looked at whole when a tensor is seen again, of more a sample; hashing this
takes about 5 us.
"""


class StorageRef(msgspec.Struct, gc=False, eq=False):
    """A weak reference to a storage: pins its address, frees its bytes."""

    cdata: int

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self.cdata)


def storage_ref(tensor: Any) -> StorageRef:
    """A weak reference to the storage of a tensor."""
    return StorageRef(tensor.untyped_storage()._weak_ref())


class SeenTensor(msgspec.Struct, gc=False, eq=False):
    """A tensor that was recorded: enough to know it again without keeping its memory alive.

    id: of the record; `Pending` while it is on its way. version: None of an inference tensor;
    UNSETTLED until the next look. has_elements: whether its elements were wanted. span: bytes of
    memory that its elements lie in, 0 when they are not looked at there. memory: those, None of
    more than `FULL_BYTES`; read only while a tensor lies there. probe: their hash, or a `sample` of
    more.
    """

    id: Any
    digest: bytes
    version: int | None
    storage: StorageRef
    has_elements: bool
    probe: bytes = b""
    span: int = 0
    memory: memoryview | None = None

    def agrees(self, version: int | None, keep: bool) -> bool:
        """Is a tensor of this version, of which elements are wanted or not, this one as far as its
        bytes are equal too?
        """
        if (keep and not self.has_elements) or expired(self.storage.cdata):
            return False
        if self.version == UNSETTLED:
            self.version = version
        return self.version == version


class Pending:
    """Stands for a record id, and how it was known again, until its bytes have arrived."""

    __slots__ = ("certain", "edge", "id")

    def __init__(self) -> None:
        self.id, self.edge, self.certain = -1, "", True


def sample(pointer: int, nbytes: int) -> bytes:
    """A few of the bytes of a parameter: what an update of all its elements cannot miss."""
    if nbytes <= 192:
        return _read(pointer, nbytes)
    return (
        _read(pointer, 64)
        + _read(pointer + nbytes // 2 - 32, 64)
        + _read(pointer + nbytes - 64, 64)
    )


class TensorContent(Content, gc=False, eq=False):
    """The bytes of a CPU tensor. owner: keeps a copy alive. span, probe, memory: as of a
    `SeenTensor`.
    """

    span: int = 0
    probe: bytes = b""
    memory: memoryview | None = None
    owner: Any = None


def content_of(look: TensorSnapshot, *, probed: bool) -> TensorContent:
    """The bytes of a CPU tensor. probed: it is to be known again where it lies."""
    tensor, address = look.plain, look.address
    dtype, _, stride = look.form
    resolved = dtype[0] == "c" or tensor.is_neg()
    if not stride and not resolved:
        nbytes = tensor.nbytes
        memory = host.memory_at(address, nbytes) if nbytes else None
        digest = hash_of(memory or b"")
        if not probed or not nbytes:
            return TensorContent(digest, address, nbytes)
        if nbytes > FULL_BYTES:
            probe = sample(address, nbytes)
            return TensorContent(digest, address, nbytes, span=nbytes, probe=probe)
        return TensorContent(digest, address, nbytes, span=nbytes, probe=digest, memory=memory)
    span, probe = 0, b""
    whole: memoryview | None = None
    if probed and address and not (tensor.is_neg() or tensor.is_conj()):
        span = span_of(tensor)
        whole = host.memory_at(address, span) if 0 < span <= FULL_BYTES else None
        probe = sample(address, span) if whole is None else hash_of(whole)
    if resolved:
        data = tensors.canonical(tensor)
        address, nbytes = data.__array_interface__["data"][0], data.size
        digest = host.digest_at(address, nbytes)
        return TensorContent(digest, address, nbytes, data, span=span, probe=probe, memory=whole)
    copy = tensor.detach().contiguous()
    address, nbytes = copy.data_ptr(), copy.nbytes
    digest = host.digest_at(address, nbytes)
    return TensorContent(digest, address, nbytes, span=span, probe=probe, memory=whole, owner=copy)


def increment(
    grows: tuple[ObjectSnapshot, str], tensor: Any, dtype: str, shape: tuple[int, ...]
) -> tuple[tuple[int, int] | None, Bytes | None]:
    """A cache that grew along one axis: (record, axis) and the bytes of what was added, if the old
    part is unchanged bit by bit.
    """
    old = grows[0].grown.get(grows[1])
    if old is None or old[3] != dtype or len(old[2]) != len(shape):
        return None, None
    axes = [i for i, (a, b) in enumerate(zip(old[2], shape)) if a != b]
    if len(axes) != 1 or old[2][axes[0]] >= shape[axes[0]] or old[2][axes[0]] == 0:
        return None, None
    axis, tensor = axes[0], tensor.detach()
    old_part = tensors.canonical(tensor.narrow(axis, 0, old[2][axis]))
    if host.digest(old_part) != old[1]:
        return None, None
    return (old[0], axis), tensors.canonical(
        tensor.narrow(axis, old[2][axis], shape[axis] - old[2][axis])
    )


def span_of(tensor: Any) -> int:
    """Bytes from the first element of a strided tensor to the end of its last."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return int((last + 1) * tensor.element_size()) if tensor.numel() else 0
