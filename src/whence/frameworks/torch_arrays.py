"""torch tensors <-> host arrays, dtype kept.

A view wherever the memory allows (CPU, contiguous), a copy elsewhere; the user's tensor is never
written. Subclasses must be unwrapped first (`plain`). Works for any device type: a device tensor is
copied to the host by torch, which orders the copy after the work queued on the current stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from whence import dtypes
from whence.dtypes import Array

NAMES: dict[Any, str] = {
    getattr(torch, name): name for name in dtypes.DTYPES if hasattr(torch, name)
}
TORCH: dict[str, Any] = {name: dtype for dtype, name in NAMES.items()}
_NESTED = 8  # subclasses inside each other
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(tensor: Any) -> str:
    """whence's name of the tensor's dtype, or "" when there is none (quantised, bits, packed 4-bit
    types).
    """
    return NAMES.get(tensor.dtype, "")


def plain(value: Any) -> list[tuple[str, Any]] | None:
    """The plain tensors a tensor holds: itself, or for a wrapper subclass its inner tensors by
    attribute name.

    What a subclass lists beside tensors (the mesh of a DTensor) is passed over. Returns None when
    the tensor has no elements to read (meta, fake, sparse, nested), or its class does not say which
    tensors it holds, so the caller records why.
    """
    return _plain(value, 0)


def _plain(value: Any, depth: int) -> list[tuple[str, Any]] | None:
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter or kind is torch.nn.Buffer:
        return [("", value)] if readable(value) else None
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        return [("", value)] if readable(value) else None
    if depth > _NESTED:
        return None
    try:
        # What a collective is still writing has elements once it is waited for; waiting twice is
        # waiting once.
        parts = (
            {"elem": value.trigger_wait()}
            if _is_awaited(kind)
            else {name: getattr(value, name) for name in flatten()[0]}
        )
    except Exception:  # noqa: BLE001 - a class of the user's may fail in any way; only its own tensors are lost
        return None
    out: list[tuple[str, Any]] = []
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor):
            continue
        inner = _plain(part, depth + 1)
        if inner is None:
            return None
        out += [(f"{name}.{path}" if path else name, tensor) for path, tensor in inner]
    return out or None


def parts_of(tensor: Any) -> list[tuple[str, Any]] | None:
    """The tensors that a nested tensor, or one of a wrapper subclass, consists of by name; None
    where they are not known or only one.
    """
    if tensor.is_nested and tensor.layout is torch.strided:
        return [("values", tensor.values()), ("sizes", tensor._nested_tensor_size())]
    parts = plain(tensor) if hasattr(type(tensor), "__tensor_flatten__") else None
    return None if parts is None or len(parts) == 1 else parts


def _is_awaited(kind: type) -> bool:
    return kind.__name__ == "AsyncCollectiveTensor" and kind.__module__.startswith(
        "torch.distributed."
    )


def answers(tensor: Any) -> bool:
    """Can a tensor be asked what it is? A class of the user's may put properties of its own in the
    place of torch's, and they may raise.
    """
    try:
        # A nested tensor has no shape of its own: it is looked at by its values and sizes.
        _ = tensor.layout, tensor.device, tensor.dtype, tensor.is_nested or tuple(tensor.shape)
        _ = None if tensor.is_inference() else tensor._version
    except Exception:  # noqa: BLE001 - whatever it raises: nothing is known of it
        return False
    return True


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors of a value that is one, or lists and tuples of them, in order; anything else
    holds none.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def encoded_setting(value: Any, *, names_device: bool = False) -> Any:
    """A number or setting that an operator takes in the encoding of `records.Operation`; None for
    what has none there. names_device: keep the name of a device.
    """
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, (int, torch.SymInt)):
        return int(value)
    if isinstance(value, complex):
        return {"complex": [encoded_setting(value.real), encoded_setting(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": str(value) if names_device else ""}
    text = str(value).removeprefix("torch.")
    if isinstance(value, torch.dtype):
        return {"dtype": NAMES.get(value, text)}
    if isinstance(value, (torch.layout, torch.memory_format)):
        return {type(value).__name__: text}
    return None


def readable(tensor: Any) -> bool:
    """Do elements exist in memory? Not for meta, fake, functional and traced tensors, nor
    non-strided layouts.
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    return not torch._is_functional_tensor(tensor) and not _is_transformed(tensor)


def canonical(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes in C order, little endian, 1-D uint8: a view of its memory when it is a
    contiguous CPU tensor.

    tensor: strided, readable, of a dtype with a name. Complex conjugate and negative views are
    resolved.
    """
    t = tensor.detach()
    if t.is_complex() and t.is_conj():
        t = t.resolve_conj()
    if t.is_neg():
        t = t.resolve_neg()
    if t.device.type != "cpu":
        t = t.to("cpu")
    if not t.is_contiguous():
        t = t.contiguous()
    size = t.element_size()
    if t.is_complex():
        t, size = torch.view_as_real(t), size // 2
    if t.dim() == 0:
        t = t.reshape(1)
    host: Any = t.view(-1).view(_BITS[size]).numpy()
    return host.view(np.uint8)  # type: ignore[no-any-return]


def to_host(tensor: Any) -> Array:
    """Host array of the same shape and dtype; shares memory where possible. Raises KeyError for a
    dtype without a name.
    """
    dtype = dtypes.named(NAMES[tensor.dtype])
    return canonical(tensor).view(dtype.numpy).reshape(tuple(tensor.shape))


def from_host(array: Array) -> Any:
    """A new torch tensor with the array's values, shape and dtype; never shares memory with the
    array.
    """
    dtype = dtypes.of(array)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
    if raw.size == 0:
        return torch.empty(array.shape, dtype=TORCH[dtype.name])
    return torch.from_numpy(raw).view(TORCH[dtype.name]).reshape(array.shape)


class TensorSnapshot(msgspec.Struct, gc=False, eq=False):
    """What is known of a tensor after one look, whatever its class.

    plain: the tensor that has the elements: itself, or the one inside a wrapper subclass. form:
    (dtype, shape, stride), stride () where it is contiguous. address: of the first element, 0
    without elements. version: None of an inference tensor. unreadable: why its elements cannot be
    read; form, address and version are not set then.
    """

    plain: Any
    form: tuple[str, tuple[int, ...], tuple[int, ...]] = ("", (), ())
    address: int = 0
    version: int | None = None
    subclass: str = ""
    device: str = "cpu"
    unreadable: str = ""


def snapshot(tensor: Any) -> TensorSnapshot:
    """Look at a tensor of any class."""
    kind, subclass = type(tensor), ""
    if kind is not _TENSOR and kind is not _PARAMETER:
        parts = plain(tensor)
        subclass = "" if kind is torch.nn.Buffer else kind.__name__
        if parts is None or len(parts) != 1:
            contents = "no readable elements" if parts is None else f"{len(parts)} tensors"
            why = f"tensor of class {kind.__name__} holds {contents}"
            return TensorSnapshot(tensor, subclass=subclass, unreadable=why)
        tensor = parts[0][1]
    elif (
        not tensor.is_cpu or tensor.layout is not torch.strided or _is_transformed(tensor)
    ) and not readable(tensor):
        why = f"no elements to read ({tensor.device.type}, {tensor.layout})"
        return TensorSnapshot(tensor, unreadable=why)
    dtype, why = NAMES.get(tensor.dtype), ""
    if tensor.is_nested:
        why = "several tensors of different lengths"
    elif dtype is None:
        why = f"dtype {tensor.dtype} has no host form"
    else:
        try:
            address = tensor.data_ptr()
        except (RuntimeError, ValueError, NotImplementedError):  # as `address_of`, without a call
            address = 0
        if not address and tensor.numel():
            why = f"no memory of its own to read ({kind.__name__})"
    if why or dtype is None:
        return TensorSnapshot(tensor, subclass=subclass, unreadable=why)
    return TensorSnapshot(
        tensor,
        (dtype, tuple(tensor.shape), () if tensor.is_contiguous() else tensor.stride()),
        address,
        None if tensor.is_inference() else tensor._version,
        subclass,
        "cpu" if tensor.is_cpu else str(tensor.device),
    )


def address_of(tensor: Any) -> int:
    """Where the elements lie; 0 when there is no memory (lazy, fake and wrapper tensors say so in
    their own ways).
    """
    try:
        return tensor.data_ptr()  # type: ignore[no-any-return]
    except (RuntimeError, ValueError, NotImplementedError):
        return 0


_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
