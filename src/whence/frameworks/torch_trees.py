"""Plain objects that hold tensors, as key/value caches do: where their tensors hang, and which of
them changed.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

SIMPLE = (bool, int, float, str)
_CONTAINER_DEPTH = 3
# Bounds on what is walked in arguments: containers may hold themselves, and objects whole data
# sets.
CLOSED = "a class of tensors that raises when it is asked for its form"
NESTING = 16
BOXES = 10_000
_LEAVES = (*SIMPLE, type)
POOL_BYTES = 1 << 20
"""Memory from here on may be a pool, from which caches are cut."""
_LARGE_POOL_BYTES = 64 << 20
"""Memory from here on is one whatever hangs over it."""


class ObjectSnapshot:
    """A plain object that holds tensors (a KV cache): where its tensors hang, and which they were
    at the last look.

    It holds the object's dicts and lists, so whoever keeps it lets go of it when the object dies
    (`on_death`). pools: storages that tensors of the object are cut from; such tensors are not
    among what it holds.
    """

    def __init__(self, value: Any, on_death: Callable[[Any], None]) -> None:
        self.ref = weakref.ref(value, on_death)
        self.grown: dict[str, tuple[Any, bytes, tuple[int, ...], str]] = {}

        self.holder = -1  # the last call it was handed to
        self.pools: set[int] = set()
        self.walk(value)

    def walk(self, value: Any) -> None:
        self.places: list[tuple[Any, Any, str]] = []
        self.sizes: list[tuple[Any, int]] = []
        self._descend(value, "", 0)
        self._leave_out_pools()
        self.last: list[tuple[Any, int]] = [self._look(box, key) for box, key, _ in self.places]
        self._form: int | None = None
        self._by_path: dict[str, tuple[Any, Any]] | None = None

    def _descend(self, value: Any, path: str, depth: int) -> None:
        if depth > NESTING or len(self.sizes) > BOXES:
            return
        box: Any
        items: list[tuple[Any, Any]]
        if isinstance(value, dict):
            box, items = value, list(value.items())
        elif isinstance(value, (list, tuple)):
            box, items = value, list(enumerate(value))
        elif depth <= _CONTAINER_DEPTH and is_plain_object(value):
            box, items = vars(value), list(vars(value).items())
        else:
            return
        self.sizes.append((box, len(box)))
        if len(items) > BOXES:
            return
        for key, item in items:
            where = f"{path}.{key}"
            if isinstance(item, torch.Tensor) or (item is None and isinstance(box, dict)):
                self.places.append((box, key, where))
            elif not isinstance(item, _LEAVES):
                self._descend(item, where, depth + 1)

    def _leave_out_pools(self) -> None:
        """Take what lies in pools out of `places`. Memory is one when the object keeps it as a
        whole beside pieces of it, or when it is large.
        """
        whole: dict[int, bool] = {}
        forms: dict[int, set[Any]] = {}
        inside: dict[int, int] = {}
        for i, (box, key, _) in enumerate(self.places):
            item = box[key]
            if item is None or not has_memory(item):
                continue
            storage = item.untyped_storage()
            if storage.nbytes() < POOL_BYTES:
                continue
            place = inside[i] = storage._cdata
            forms.setdefault(place, set()).add((item.storage_offset(), item.shape, item.dtype))
            is_whole = item.nbytes == storage.nbytes()
            whole[place] = whole.get(place, False) or is_whole
            if storage.nbytes() >= _LARGE_POOL_BYTES:
                self.pools.add(place)
        carved = {place for place, are in forms.items() if whole[place] and len(are) > 1}
        self.pools = (self.pools & forms.keys()) | carved
        self.places = [p for i, p in enumerate(self.places) if inside.get(i) not in self.pools]

    def learn_pool(self, storage: int) -> bool:
        """This storage is a pool, if a tensor of the object lies in it; whether one does."""
        kept = [
            (place, last)
            for place, last in zip(self.places, self.last)
            if (tensor := self._tensor_at(place)) is None
            or not has_memory(tensor)
            or tensor.untyped_storage()._cdata != storage
        ]
        if len(kept) < len(self.places):
            self.pools.add(storage)
            self.places, self.last = [p for p, _ in kept], [last for _, last in kept]
            self._form, self._by_path = None, None
        return storage in self.pools

    @staticmethod
    def _tensor_at(place: tuple[Any, Any, str]) -> Any:
        """The tensor that hangs there, None where none does."""
        box, key, _ = place
        item = box.get(key) if isinstance(box, dict) else box[key] if key < len(box) else None
        return item if isinstance(item, torch.Tensor) else None

    @staticmethod
    def _look(box: Any, key: Any) -> tuple[Any, int]:
        item = box.get(key) if isinstance(box, dict) else box[key] if key < len(box) else None
        if not isinstance(item, torch.Tensor):
            return None, -1
        return weakref.ref(item), (-1 if item.is_inference() else item._version)

    @property
    def form(self) -> int:
        """A number that is another one whenever a tensor of it has another shape than before, as of
        the last look.
        """
        if self._form is None:
            self._form = hash(tuple((path, tuple(tensor.shape)) for path, tensor in self.items()))
        return self._form

    def get(self, path: str) -> Any:
        """The tensor at this path, None when there is none."""
        if self._by_path is None:
            self._by_path = {where: (box, key) for box, key, where in self.places}
        box, key = self._by_path.get(path, ((), 0))
        item = box.get(key) if isinstance(box, dict) else box[key] if key < len(box) else None
        return item if isinstance(item, torch.Tensor) else None

    def items(self) -> Iterator[tuple[str, Any]]:
        """(path, tensor) of everything it holds now."""
        for place in self.places:
            if (item := self._tensor_at(place)) is not None:
                yield place[2], item

    def changed(self, *, unversioned: bool = False) -> list[tuple[str, Any, bool]]:
        """(path, tensor, True) of what was replaced or written since the last look.

        unversioned: every inference tensor too, with False: it carries no version that would tell.
        """
        value = self.ref()
        if value is None:
            return []
        last: dict[str, tuple[Any, int]] | None = None
        if any(len(box) != size for box, size in self.sizes):
            last = {path: entry for (_, _, path), entry in zip(self.places, self.last)}
            self.walk(value)
        out: list[tuple[str, Any, bool]] = []
        for i, ((box, key, path), (ref, version)) in enumerate(zip(self.places, self.last)):
            item = box.get(key) if isinstance(box, dict) else box[key] if key < len(box) else None
            if last is None and item is not None and ref is not None and ref() is item:
                if version == (now := -1 if item.is_inference() else item._version):
                    if unversioned and now == -1:
                        out.append((path, item, False))
                    continue
            elif not isinstance(item, torch.Tensor):
                self.last[i] = (None, -1)
                continue
            if last is not None:
                ref, version = last.get(path, (None, -1))
            now = -1 if item.is_inference() else item._version
            if ref is None or ref() is not item or version != now:
                out.append((path, item, True))
                self.last[i] = (weakref.ref(item), now)
            elif unversioned and now == -1:
                out.append((path, item, False))
        if out:
            self._form = None
        return out


def has_memory(tensor: Any) -> bool:
    """Has a tensor a storage of its own, which can be looked at?"""
    return tensor.layout is torch.strided and type(tensor) is torch.Tensor and not tensor.is_nested


def is_plain_object(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.nn.Module, type, torch.dtype, torch.device))
        and not callable(value)
        and type(value).__module__ != "builtins"
        and hasattr(type(value), "__weakref__")
    )


def rebuilt(out: Any, replace: Callable[[str, Any], Any]) -> Any:
    """What a call returned with `replace(slot, tensor)` in place of each tensor; slots are named
    as the capture names them.

    Containers are new ones of the same class, nothing that was returned is written. Caches and
    other plain objects stay.
    """
    if isinstance(out, (list, tuple, dict)) or (
        dataclasses.is_dataclass(out) and not isinstance(out, type)
    ):
        return rebuilt_from(out, "output", replace)
    return rebuilt_from(out, "output.0", replace)


def rebuilt_from(value: Any, slot: str, replace: Callable[[str, Any], Any]) -> Any:
    """`rebuilt` of a value whose slot is `slot`."""
    if isinstance(value, torch.Tensor):
        return replace(slot, value)
    if value is None or isinstance(value, SIMPLE) or slot.count(".") > NESTING:
        return value
    if isinstance(value, dict):
        items = {
            k: rebuilt_from(
                v, f"{slot}.{k if isinstance(k, SIMPLE) else type(k).__name__}", replace
            )
            for k, v in value.items()
        }
        if all(items[k] is value[k] for k in items):
            return value
        copied = copy.copy(value)
        for k, v in items.items():
            copied[k] = v
        return copied
    if isinstance(value, (list, tuple)):
        parts = [rebuilt_from(v, f"{slot}.{i}", replace) for i, v in enumerate(value)]
        if all(new is old for new, old in zip(parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        whole: Any = value
        copied = copy.copy(whole)
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            object.__setattr__(
                copied, field.name, rebuilt_from(old, f"{slot}.{field.name}", replace)
            )
        return copied
    return value
