"""Reads and writes of pool rows. A pool is the memory that a program's caches are cut from; each
call touches only a part of it.

A paged cache is as large as the free memory, while a call reads and writes a few rows of it. What
an operator reads of it is an input of the call, what it writes is a result; the memory as a whole
is neither. A view of a pool does not count yet: what counts is the operator that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from whence.frameworks.operator_names import words
from whence.frameworks.torch_arrays import tensors_in
from whence.frameworks.torch_schema import OperatorSchema, schema_of, written
from whence.frameworks.torch_trees import POOL_BYTES, ObjectSnapshot, has_memory
from whence.records.slots import SlotKind

_READS_ROWS = words("index_select index gather take take_along_dim embedding _unsafe_index")
_WRITES_ROWS = words("""
    copy_ index_copy_ index_put_ _index_put_impl_ _unsafe_index_put scatter_ masked_scatter_
""")
_FEW = 4
"""An operator that reads at most one in this many bytes of a memory shows that it is a pool."""
_MOST_BYTES = 64 << 20
"""Bytes of a pool from which on an operator must not read it as a whole, without choosing rows."""


class PoolAccess(NamedTuple):
    """How an operator uses pools.

    takes_rows: its result is rows of a pool. given: tensors in pools that it reads directly.
    written: tensors that it copies into a pool. reason: why it cannot be followed, "" where it can.
    """

    takes_rows: bool = False
    given: tuple[Any, ...] = ()
    written: tuple[Any, ...] = ()
    reason: str = ""


class Pools:
    """The pools in objects among a call's arguments.

    objects: (slot, object). take: called with a slot prefix ("input.cache.rows.") and a tensor;
    records the tensor and returns its slot.
    """

    def __init__(
        self, objects: Iterable[tuple[str, ObjectSnapshot]], take: Callable[[str, Any], str]
    ) -> None:
        self._objects = tuple(objects)
        self._take = take

    def holds(self, values: Iterable[Any]) -> bool:
        """Whether a tensor in a pool is among these arguments."""
        return bool(self._objects) and any(self._slot_of(t) for t in tensors_in(list(values)))

    def access(self, schema: OperatorSchema, named: Mapping[str, Any]) -> PoolAccess:
        """How an operator with these arguments uses pools. named: its arguments by schema name."""
        changed = [t for name in written(schema, named) for t in tensors_in(named.get(name))]
        if schema.view:
            return PoolAccess()
        if any(self._slot_of(tensor) for tensor in changed):
            values = [named[n] for n in ("source", "src", "values", "value") if n in named]
            if schema.base not in _WRITES_ROWS or len(values) != 1:
                return PoolAccess(reason=f"computes in a pool in place ({schema.name})")
            return PoolAccess(written=tuple(tensors_in(values)))
        if schema.base in _READS_ROWS:
            return PoolAccess(takes_rows=True)
        lying = tuple(t for t in tensors_in(list(named.values())) if self._slot_of(t))
        if sum(tensor.nbytes for tensor in lying) >= _MOST_BYTES:
            return PoolAccess(reason=f"reads a pool as a whole ({schema.name})")
        return PoolAccess(given=lying)

    def record(self, schema: OperatorSchema, named: Mapping[str, Any], out: Any) -> None:
        """Record what an operator, after it ran, read from pools and wrote to them."""
        access = self.access(schema, named)
        for tensor in (*access.given, *((out,) if access.takes_rows else ())):
            self.read(named, tensor)
        for tensor in access.written:
            self.wrote(named, tensor)

    def read(self, named: Mapping[str, Any], tensor: Any) -> str:
        """Record a tensor that an operator with these arguments read from a pool. Returns its
        slot.
        """
        return self._take(f"{SlotKind.INPUT}.{self._owner(named)}.rows.", tensor)

    def wrote(self, named: Mapping[str, Any], tensor: Any) -> str:
        """Record a tensor that an operator with these arguments wrote into a pool. Returns its
        slot.
        """
        return self._take(f"{SlotKind.MUTATED}.{self._owner(named)}.rows.", tensor)

    def learn(self, schema: OperatorSchema, named: Mapping[str, Any], out: Any) -> bool:
        """Whether an operator that reads few rows of an object's memory shows that this memory is a
        pool. The object then remembers it.
        """
        source = named.get("self", named.get("weight"))
        if schema.base not in _READS_ROWS or not isinstance(source, torch.Tensor):
            return False
        storage = source.untyped_storage()
        if storage.nbytes() < POOL_BYTES or out.nbytes * _FEW > storage.nbytes():
            return False
        keepers = [holder for _, holder in self._objects if holder.learn_pool(storage._cdata)]
        return bool(keepers)

    def _owner(self, named: Mapping[str, Any]) -> str:
        """The name of the object whose pool is among an operator's arguments ("cache")."""
        slots = map(self._slot_of, tensors_in(list(named.values())))
        return next((slot.partition(".")[2] for slot in slots if slot), "")

    def _slot_of(self, tensor: Any) -> str:
        """The slot of the object whose pool contains this tensor ("input.cache"), "" for any other
        tensor.
        """
        if not has_memory(tensor) or tensor.untyped_storage().nbytes() < POOL_BYTES:
            return ""
        place = tensor.untyped_storage()._cdata
        return next((slot for slot, holder in self._objects if place in holder.pools), "")


def named_arguments(func: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by the names of its schema."""
    return dict(zip(schema_of(func).positional, args)) | dict(kwargs)
