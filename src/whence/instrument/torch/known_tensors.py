"""Tensors that a program hands on as the very objects that were recorded, known again by looking at
the object: in a steady program that is nearly every input.
"""

from __future__ import annotations

import weakref
from typing import Any

import msgspec

from whence.instrument.torch.tensor_content import SeenTensor, hash_of


class _Known(msgspec.Struct, gc=False, eq=False):
    """A tensor object as it was when it was recorded. memory: its bytes, to be read while it lies
    there.
    """

    ref: Any
    seen: SeenTensor
    address: int
    memory: memoryview
    form: tuple[str, tuple[int, ...], tuple[int, ...]]


class KnownTensors:
    """Plain tensors that were recorded, by identity. Keeps none of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(
        self,
        tensor: Any,
        seen: SeenTensor,
        address: int,
        memory: memoryview,
        form: tuple[str, tuple[int, ...], tuple[int, ...]],
    ) -> None:
        """Remember a plain tensor that was recorded."""
        self._known[id(tensor)] = _Known(weakref.ref(tensor), seen, address, memory, form)

    def again(self, tensor: Any, keep: bool) -> tuple[Any, str, Any] | None:
        """The sight of a tensor that is the object that was recorded, at the same place, of the
        same version and with the same bytes; None where one look does not tell.
        """
        known = self._known.get(id(tensor))
        if (
            known is None
            or known.ref() is not tensor
            or tensor.data_ptr() != known.address
            or tensor.shape != known.form[1]
            or not tensor.is_contiguous()
        ):
            return None
        seen = known.seen
        version = seen.version
        if (
            seen.replaced
            or (keep and not seen.has_elements)
            or (version is not None and tensor._version != version)
            or hash_of(known.memory) != seen.digest
        ):
            return None
        return seen.id, "content" if version is None else "identity", known.form

    def prune(self) -> None:
        """Forget tensors that are gone."""
        self._known = {k: v for k, v in self._known.items() if v.ref() is not None}

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
