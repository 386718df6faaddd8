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


class ObjectSnapshot:
    """A plain object that holds tensors (a KV cache): where its tensors hang, and which they were
    at the last look.

    It holds the object's dicts and lists, so whoever keeps it lets go of it when the object dies
    (`gone`).
    """

    def __init__(self, value: Any, gone: Callable[[Any], None]) -> None:
        self.ref = weakref.ref(value, gone)
        self.grown: dict[str, tuple[Any, bytes, tuple[int, ...], str]] = {}

        self.holder = -1  # the last call it was handed to
        self.walk(value)

    def walk(self, value: Any) -> None:
        self.places: list[tuple[Any, Any, str]] = []
        self.sizes: list[tuple[Any, int]] = []
        self._descend(value, "", 0)
        self.last: list[tuple[Any, int]] = [self._look(box, key) for box, key, _ in self.places]
        self._form: int | None = None
        self._at: dict[str, tuple[Any, Any]] | None = None

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
            elif not isinstance(item, (*SIMPLE, type)):
                self._descend(item, where, depth + 1)

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
        if self._at is None:
            self._at = {where: (box, key) for box, key, where in self.places}
        box, key = self._at.get(path, ((), 0))
        item = box.get(key) if isinstance(box, dict) else box[key] if key < len(box) else None
        return item if isinstance(item, torch.Tensor) else None

    def items(self) -> Iterator[tuple[str, Any]]:
        """(path, tensor) of everything it holds now."""
        for box, key, path in self.places:
            item = box.get(key) if isinstance(box, dict) else box[key] if key < len(box) else None
            if isinstance(item, torch.Tensor):
                yield path, item

    def changed(self, *, unversioned: bool = False) -> list[tuple[str, Any, bool]]:
        """(path, tensor, True) of what was replaced or written since the last look.

        unversioned: every inference tensor too, with False: it carries no version that would tell.
        """
        value = self.ref()
        if value is None:
            return []
        before: dict[str, tuple[Any, int]] | None = None
        if any(len(box) != size for box, size in self.sizes):
            before = {path: seen for (_, _, path), seen in zip(self.places, self.last)}
            self.walk(value)
        out: list[tuple[str, Any, bool]] = []
        for i, (box, key, path) in enumerate(self.places):
            item = box.get(key) if isinstance(box, dict) else box[key] if key < len(box) else None
            if not isinstance(item, torch.Tensor):
                self.last[i] = (None, -1)
                continue
            ref, version = self.last[i] if before is None else before.get(path, (None, -1))
            now = -1 if item.is_inference() else item._version
            if ref is None or ref() is not item or version != now:
                out.append((path, item, True))
                self.last[i] = (weakref.ref(item), now)
            elif unversioned and now == -1:
                out.append((path, item, False))
        if out:
            self._form = None
        return out


def is_plain_object(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.nn.Module, type, torch.dtype, torch.device))
        and not callable(value)
        and type(value).__module__ != "builtins"
        and hasattr(type(value), "__weakref__")
    )


def rebuilt(out: Any, put: Callable[[str, Any], Any]) -> Any:
    """What a call returned with `put(slot, tensor)` in the place of each tensor; slots are named as
    the capture names them.

    Containers are new ones of the same class, nothing that was returned is written. Caches and
    other plain objects stay.
    """
    if isinstance(out, (list, tuple, dict)) or (
        dataclasses.is_dataclass(out) and not isinstance(out, type)
    ):
        return _rebuilt(out, "output", put)
    return _rebuilt(out, "output.0", put)


def _rebuilt(value: Any, slot: str, put: Callable[[str, Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return put(slot, value)
    if value is None or isinstance(value, SIMPLE) or slot.count(".") > NESTING:
        return value
    if isinstance(value, dict):
        items = {
            k: _rebuilt(v, f"{slot}.{k if isinstance(k, SIMPLE) else type(k).__name__}", put)
            for k, v in value.items()
        }
        if all(items[k] is value[k] for k in items):
            return value
        made = copy.copy(value)
        for k, v in items.items():
            made[k] = v
        return made
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(v, f"{slot}.{i}", put) for i, v in enumerate(value)]
        if all(new is old for new, old in zip(parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        whole: Any = value
        made = copy.copy(whole)
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            object.__setattr__(made, field.name, _rebuilt(old, f"{slot}.{field.name}", put))
        return made
    return value
