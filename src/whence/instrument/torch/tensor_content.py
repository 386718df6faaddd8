"""The bytes of a recorded tensor: their address, their digest, and what is remembered to recognise
the tensor later without keeping its memory alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import xxhash

from whence.frameworks import host
from whence.frameworks import torch_arrays as tensors
from whence.frameworks.torch_arrays import TensorSnapshot
from whence.frameworks.torch_trees import ObjectSnapshot
from whence.instrument.session import Content, Form
from whence.records import Placement

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
hash_of = xxhash.xxh3_128_digest
_read = ctypes.string_at
expired = torch.UntypedStorage._expired
UNSETTLED = -1
"""Stands for the version of a tensor seen inside the operator that wrote it or made it as a view:
torch increases the version only after the operator.
"""
FULL_BYTES = 1 << 16
"""Memory up to this many bytes is hashed whole (about 5 us) when a tensor is seen again; of larger
memory a sample is compared.
"""

_PART = 64  # bytes at the start, in the middle and at the end that a sample consists of


class StorageRef(msgspec.Struct, gc=False, eq=False):
    """A weak reference to a storage: pins its address, frees its bytes."""

    cdata: int

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self.cdata)


def storage_ref(tensor: Any) -> StorageRef:
    """A weak reference to the storage of a tensor."""
    return StorageRef(tensor.untyped_storage()._weak_ref())


class SeenTensor(msgspec.Struct, gc=False, eq=False):
    """What is kept of a recorded tensor to recognise it later without keeping its memory alive.

    id: of the record; `Pending` until the bytes have arrived. replaced: another record was made of
    the same memory. version: None for an inference tensor, UNSETTLED until the next sight.
    has_elements: whether its elements were wanted. span: bytes of memory that its elements cover, 0
    when they are not checked in place. memory: a view of these bytes, None above `FULL_BYTES`; read
    only while a tensor lies there. probe: hash of `memory`, or a `sample` of larger memory.
    """

    id: Any
    digest: bytes
    version: int | None
    storage: StorageRef
    has_elements: bool
    probe: bytes = b""
    span: int = 0
    memory: memoryview | None = None
    replaced: bool = False

    def is_still(self, digest: bytes, version: int | None, keep: bool) -> bool:
        """Whether a tensor at the same address, with this digest and version, is the recorded one.
        keep: whether its elements are wanted.
        """
        return self.digest == digest and self.may_be(version, keep)

    def may_be(self, version: int | None, keep: bool) -> bool:
        """Whether a tensor of this version can be the recorded one, if its bytes are equal too."""
        if (keep and not self.has_elements) or expired(self.storage.cdata):
            return False
        if self.version == UNSETTLED:
            self.version = version
        return self.version == version


class Pending:
    """Placeholder for a record id, and for how the tensor was recognised, until its bytes
    arrive.
    """

    __slots__ = ("certain", "edge", "id")

    def __init__(self) -> None:
        self.id, self.edge, self.certain = -1, "", True


def sample(pointer: int, nbytes: int) -> bytes:
    """A few bytes of a parameter (start, middle, end), which any update of all its elements
    changes.
    """
    if nbytes <= 3 * _PART:
        return _read(pointer, nbytes)
    return (
        _read(pointer, _PART)
        + _read(pointer + nbytes // 2 - _PART // 2, _PART)
        + _read(pointer + nbytes - _PART, _PART)
    )


class Probe:
    """A sample of memory that can be checked for changes in place. It may be read only while a
    tensor lies there.
    """

    __slots__ = ("_digests", "_views")

    def __init__(self, pointer: int, nbytes: int) -> None:
        parts = [(pointer, nbytes)]
        if nbytes > 3 * _PART:
            middle, end = pointer + nbytes // 2 - _PART // 2, pointer + nbytes - _PART
            parts = [(pointer, _PART), (middle, _PART), (end, _PART)]
        self._views = [host.memory_at(*part) for part in parts]
        self._digests = [hash_of(view) for view in self._views]

    def is_unchanged(self) -> bool:
        """Whether the sampled bytes are unchanged."""
        for view, digest in zip(self._views, self._digests):  # noqa: SIM110 - `all` takes twice as long
            if hash_of(view) != digest:
                return False
        return True


class Sighter(Protocol):
    """The call in which a tensor is seen. keep: whether elements were wanted when the call began.
    placements: DTensor placements by slot, filled in as tensors are seen.
    """

    scope: str
    keep: bool
    op_type: str
    placements: dict[str, Placement]


class Sighting:
    """A `Sighter` that is nothing else."""

    __slots__ = ("keep", "op_type", "placements", "scope")

    def __init__(self, scope: str, op_type: str, keep: bool) -> None:
        self.scope, self.op_type, self.keep = scope, op_type, keep
        self.placements: dict[str, Placement] = {}


class PlainForm(msgspec.Struct, gc=False, eq=False):
    """What all plain tensors of one dtype and shape have in common. form: (dtype, shape, ()).
    whole: the form of a tensor that begins at the start of its storage.
    """

    form: tuple[str, tuple[int, ...], tuple[int, ...]]
    nbytes: int
    whole: Form


_MOST_FORMS = 1 << 14
_forms: dict[tuple[Any, Any], PlainForm | None] = {}


def plain_form(tensor: Any) -> PlainForm | None:
    """The form of a plain tensor, which is on the CPU, of no subclass, and holds its canonical
    bytes in memory. None for any other tensor.
    """
    kind = type(tensor)
    if (
        (kind is not _TENSOR and kind is not _PARAMETER)
        or not tensor.is_cpu
        or tensor.layout is not _STRIDED
        or _is_transformed(tensor)
        or tensor.is_nested
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        return None
    key = (tensor.dtype, tensor.shape)
    return _forms[key] if key in _forms else _new_form(tensor, key)


def _new_form(tensor: Any, key: tuple[Any, Any]) -> PlainForm | None:
    if len(_forms) >= _MOST_FORMS:
        _forms.clear()
    name = tensors.dtype_name(tensor)
    form = None
    if name and name[0] != "c" and tensor.nbytes:  # a complex one may be a conjugate
        shape = tuple(tensor.shape)
        form = PlainForm((name, shape, ()), tensor.nbytes, Form(name, shape))
    _forms[key] = form
    return form


class TensorContent(Content, gc=False, eq=False):
    """The bytes of a CPU tensor. owner: keeps a copy alive. span, probe, memory: as in
    `SeenTensor`.
    """

    span: int = 0
    probe: bytes = b""
    memory: memoryview | None = None
    owner: Any = None


def content_of(look: TensorSnapshot, *, probed: bool) -> TensorContent:
    """The bytes of a CPU tensor. probed: also take what is needed to recognise it in place
    later.
    """
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


def form_of(tensor: Any) -> Form:
    """The form of a tensor that cannot be read."""
    dtype = tensors.dtype_name(tensor) or str(tensor.dtype).removeprefix("torch.")
    shape = () if tensor.is_nested else tuple(tensor.shape)
    kind = type(tensor).__name__
    subclass = "" if kind in ("Tensor", "Parameter") else kind
    stride: tuple[int, ...] = ()
    offset = 0
    if tensor.layout is torch.strided and not tensor.is_nested:
        stride, offset = () if tensor.is_contiguous() else tensor.stride(), tensor.storage_offset()
    return Form(dtype, shape, stride, offset, str(tensor.device), subclass)


def increment(
    grows: tuple[ObjectSnapshot, str], tensor: Any, dtype: str, shape: tuple[int, ...]
) -> tuple[tuple[int, int] | None, Bytes | None]:
    """For a cache that grew along one axis: ((record of the old part, axis), bytes that were
    added). (None, None) unless the old part is unchanged bit by bit.
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


_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_STRIDED, _TENSOR, _PARAMETER = torch.strided, torch.Tensor, torch.nn.Parameter
