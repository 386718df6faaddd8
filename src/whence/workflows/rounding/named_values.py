"""The values that a program returns, as arrays by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from whence.dtypes import Array


def named_arrays(value: Any) -> dict[str, Array]:
    """Every number and tensor in a value, named by its place in it ("losses", "logits.0"); "" names
    the value itself.

    A list of numbers, and lists of a regular shape of them, are one array. Texts and None are left
    out.
    """
    return dict(_named(value, ""))


def named_texts(value: Any, name: str = "") -> Iterator[tuple[str, Array]]:
    """Every text in a value, named as by `named_arrays`, as an array without an axis."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (str, np.ndarray)):
        array = np.asarray(value)
        yield from [(name, array)] if array.dtype.kind == "U" else []
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        yield from named_texts(item, below(name, str(key)))


def _named(value: Any, name: str) -> Iterator[tuple[str, Array]]:
    if is_curve(value):
        yield name, np.asarray(list(value.values()))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, below(name, str(key)))
    elif (array := _numbers(value)) is not None:
        yield name, array
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from _named(item, below(name, str(key)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from _named(getattr(value, entry.name), below(name, entry.name))
    elif (array := as_array(value)) is not None:
        yield name, array


def _numbers(value: Any) -> Array | None:
    """Numbers in lists of a regular shape as one array; None for any other value."""
    if not isinstance(value, (list, tuple)):
        array = as_array(value)
        return array if array is not None and not array.ndim else None
    rows = [_numbers(item) for item in value]
    regular = [row for row in rows if row is not None and row.shape == getattr(rows[0], "shape", 0)]
    return np.stack(regular) if rows and len(regular) == len(rows) else None


def is_curve(value: Any) -> bool:
    """Whether a value is a mapping from step numbers to numbers."""
    return (
        isinstance(value, Mapping)
        and len(value) > 1
        and all(str(key).isdigit() for key in value)
        and all(isinstance(item, (int, float)) for item in value.values())
    )


def below(name: str, key: str) -> str:
    """The name of a value below a key."""
    return f"{name}.{key}" if name else key


def as_array(value: Any) -> Array | None:
    """A number, array or torch tensor as an array; None for any other value."""
    if hasattr(value, "detach") and hasattr(value, "dtype"):
        from whence.frameworks.torch_arrays import to_host

        return to_host(value.detach())
    if isinstance(value, (bool, int, float, complex, np.generic, np.ndarray)):
        array = np.asarray(value)
        return array if array.dtype.kind not in "OUSM" else None
    return None
