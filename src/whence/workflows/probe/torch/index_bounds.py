"""Indices outside of what they point into, found before a kernel reads them.

On the processor such an index raises IndexError, and the variant is told as one that the model does
not run. On a GPU it ends every kernel of the process, those of the program that is asked too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Index(NamedTuple):
    """An index tensor, and how many places it may point to; may_be_negative: counted from the end
    then.
    """

    tensor: Any
    places: int
    may_be_negative: bool = False


class CheckedIndices(TorchDispatchMode):  # type: ignore[misc]
    """Raises IndexError for an index out of bounds, before the operator runs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Check, and run the operator."""
        indices = _INDICES.get(func._schema.name)
        for index in indices(args) if indices is not None else ():
            _check(func._schema.name, index)
        return func(*args, **(kwargs or {}))


def _check(operator: str, index: _Index) -> None:
    tensor = index.tensor
    if not tensor.numel():
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(tensor))
    if lowest < (-index.places if index.may_be_negative else 0) or highest >= index.places:
        outside = highest if highest >= index.places else lowest
        raise IndexError(
            f"{operator}: index {outside} is out of bounds, with {index.places} places"
        )


def _of_embedding(args: tuple[Any, ...]) -> Iterator[_Index]:
    weight, indices = args[:2]
    yield _Index(indices, weight.shape[0])


def _of_indexing(args: tuple[Any, ...]) -> Iterator[_Index]:
    """x[indices]: a mask takes as many axes as it has, and is checked by torch itself."""
    x, indices = args[:2]
    axis = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            yield _Index(index, x.shape[axis], may_be_negative=True)
        axis += index.dim() if is_mask else 1


def _along_axis(args: tuple[Any, ...]) -> Iterator[_Index]:
    x, axis, index = args[:3]
    yield _Index(index, x.shape[axis] if x.dim() else 1)


_INDICES: dict[str, Callable[[tuple[Any, ...]], Iterator[_Index]]] = {
    "aten::embedding": _of_embedding,
    **dict.fromkeys(
        ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
        _of_indexing,
    ),
    **dict.fromkeys(
        (
            "aten::index_select",
            "aten::gather",
            "aten::scatter",
            "aten::scatter_",
            "aten::scatter_add",
            "aten::scatter_add_",
            "aten::index_add",
            "aten::index_add_",
            "aten::index_copy",
            "aten::index_copy_",
        ),
        _along_axis,
    ),
}
