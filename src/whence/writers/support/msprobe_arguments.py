"""What dump.json says of the arguments of a call: trees of lists and dicts with tensors and scalars
as leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.records import Record, Statistics

_REFUSED = re.compile(r"^[+\-=%@]|;[+\-=%@]")  # in texts, by msprobe itself
_HOLES = 64


def tensor(record: Record, figures: Statistics | None, array: Array | None) -> dict[str, Any]:
    """A tensor without its file. The four figures as msprobe takes them: no mean and norm of
    integers, of bool any and all.
    """
    leaf: dict[str, Any] = {
        "type": "torch.Tensor",
        "dtype": f"torch.{record.dtype}",
        "shape": [*record.shape],
    }
    high = low = mean = norm = None
    if figures is not None and figures.nan:
        high = low = mean = norm = float("nan")
    elif figures is not None and figures.inf:
        high, low = _extremes(array)
        mean, norm = (
            (high + low, float("inf")) if high is not None and low is not None else (None, None)
        )
    elif figures is not None:
        high, low, mean, norm = figures.max, figures.min, figures.mean, figures.norm
    if record.dtype == "bool":
        high, low = (None if v is None else bool(v) for v in (high, low))
    elif not dtypes.is_floating(record.dtype):
        high, low = (None if v is None else int(v) for v in (high, low))
    if not dtypes.is_floating(record.dtype):
        mean = norm = None
    return leaf | {"Max": high, "Min": low, "Mean": mean, "Norm": norm, "requires_grad": False}


def _extremes(array: Array | None) -> tuple[float | None, float | None]:
    """Largest and smallest of elements of which some are infinite and none is NaN; complex numbers
    have none.
    """
    if array is None or array.dtype.kind == "c":
        return None, None
    return float(np.max(array)), float(np.min(array))


def scalar(value: Any) -> Any:
    """An argument that is not a tensor."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [scalar(item) for item in value]
    if isinstance(value, bool | int | float):
        return {"type": type(value).__name__, "value": value}
    return {"type": "str", "value": _REFUSED.sub("_", str(value))}


def put(tree: dict[str, Any], path: list[str], leaf: Any) -> None:
    """Put a leaf into nested dicts; where a leaf stands in the way, under what is left of the
    path.
    """
    for i, part in enumerate(path[:-1]):
        below = tree.setdefault(part, {})
        if not isinstance(below, dict) or _is_leaf(below):
            tree[".".join(path[i:])] = leaf
            return
        tree = below
    tree[path[-1] if path[-1] not in tree else f"{path[-1]}_"] = leaf


def listed(tree: Any, *, is_list: bool = False) -> Any:
    """Dicts whose keys are places become lists, null where nothing stands. is_list: this one must,
    with the other keys as a dict behind.
    """
    if not isinstance(tree, dict) or _is_leaf(tree):
        return tree
    places = {
        int(key): value
        for key, value in tree.items()
        if key.isdecimal() and key.isascii() and len(key) < 6
    }
    items = {
        key: listed(value)
        for key, value in tree.items()
        if not (key.isdecimal() and key.isascii() and len(key) < 6)
    }
    if (items and not is_list) or max(places, default=0) > 2 * len(places) + _HOLES:
        whole = {key: listed(value) for key, value in tree.items()}
        return [whole] if is_list else whole
    if not places and not is_list:
        return items
    return [listed(places.get(i)) for i in range(max(places, default=-1) + 1)] + (
        [items] if items else []
    )


def leaves(tree: Any) -> Iterator[int]:
    """The identities (`id`) of all leaves of a tree, in its order."""
    if isinstance(tree, dict) and not _is_leaf(tree):
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from leaves(item)
    else:
        yield id(tree)


def _is_leaf(node: dict[str, Any]) -> bool:
    return isinstance(node.get("type"), str)
