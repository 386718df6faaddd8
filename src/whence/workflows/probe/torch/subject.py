"""A model that is run repeatedly, each time from the same state.

Index tensors are checked for bounds before a kernel reads them. On the CPU an index out of bounds
raises IndexError, and the variant is reported as one that the model does not run. On a GPU it would
end every kernel of the process, including those of the probed program.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.outputs import Outputs, flattened, same_bits
from whence.workflows.probe.torch.surroundings import Surroundings
from whence.workflows.probe.torch.wide import Wide
from whence.workflows.rounding.torch_modes import doubled
from whence.workflows.rounding.ways import Generators

_SIMPLE = (bool, int, float, str, type(None))


class Subject:
    """A model of this process.

    Every run begins with the buffers, plain attributes and random numbers of the first one, and
    leaves the model unchanged.
    """

    def __init__(self, model: Any, surroundings: Surroundings | None = None) -> None:
        self.model = model
        self.surroundings = surroundings or Surroundings.now()
        self._buffers = [(b, b._version, b.detach().clone()) for b in _buffers(model)]
        self._attributes = [(m, _plain(m)) for m in model.modules()]
        self._is_wide = False
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._on_device = any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)
        self.notes: list[str] = []

    def wide(self) -> Subject:
        """A copy of the model in float64. Raises what copying raises."""
        twin = copy.deepcopy(self.model).double()
        subject = Subject(twin, dataclasses.replace(self.surroundings, autocast=()))
        subject._is_wide = True
        return subject

    def run(
        self, inputs: CallInputs, *modes: Any, seed: int | None = None, copied: bool = True
    ) -> Outputs:
        """Run the model and return its tensors by path.

        modes: context managers around the call. seed: start of the random numbers. copied=False:
        the arguments keep their memory layout. Raises whatever the model raises.
        """
        try:
            return self.run_on(inputs, *modes, seed=seed, copied=copied)
        finally:
            self.restore()

    def run_on(
        self, inputs: CallInputs, *modes: Any, seed: int | None = None, copied: bool = True
    ) -> Outputs:
        """Run the model as `run` does, without restoring its state before or after."""
        return flattened(self.raw(inputs, *modes, seed=seed, copied=copied))

    def raw(
        self, inputs: CallInputs, *modes: Any, seed: int | None = None, copied: bool = True
    ) -> Any:
        """Run the model and return its result unchanged."""
        args, kwargs = inputs.call(copied)
        if self._is_wide:
            args, kwargs = tree_map(doubled, args), tree_map(doubled, kwargs)
        return self.within(lambda model: model(*args, **kwargs), *modes, seed=seed)

    def within(self, action: Callable[[Any], Any], *modes: Any, seed: int | None = None) -> Any:
        """Apply an action to the model in the same contexts as a call, and return its result."""
        with self._scope(seed), contextlib.ExitStack() as stack:
            if self._on_device:
                stack.enter_context(CheckedIndices())
            for mode in modes:
                stack.enter_context(mode)
            return action(self.model)

    @contextlib.contextmanager
    def _scope(self, seed: int | None) -> Iterator[None]:
        before = Generators.now()
        default = torch.get_default_dtype()
        try:
            self.surroundings.generators.restore()
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                for kind, dtype in self.surroundings.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                if self._is_wide:
                    torch.set_default_dtype(torch.float64)
                    stack.enter_context(Wide(self.notes))
                yield
        finally:
            torch.set_default_dtype(default)
            before.restore()

    def restore(self) -> None:
        """Restore the original buffers and plain attributes."""
        with torch.no_grad():
            for buffer, _, content in self.changed_buffers():
                buffer.copy_(content)
        for module, attributes in self._attributes:
            for name in [n for n in _plain(module) if n not in attributes]:
                delattr(module, name)
            for name, (value, content) in attributes.items():
                if module.__dict__.get(name) is not value:
                    setattr(module, name, value)
                if content is not None and not same_bits(value, content):
                    value.copy_(content)

    def changed_buffers(self) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
        """(buffer, original version, original content) of buffers that were written since."""
        return [(b, v, c) for b, v, c in self._buffers if b.is_inference() or not same_bits(b, c)]

    def changed_state(self) -> list[str]:
        """Names of buffers and attributes that differ from their original content."""
        ids = {id(b) for b, _, c in self.changed_buffers() if not same_bits(b, c)}
        names = [n for n, b in self.model.named_buffers() if id(b) in ids]
        scopes = {id(m): n for n, m in self.model.named_modules()}
        for module, attributes in self._attributes:
            for name, (value, content) in _plain(module).items():
                old = attributes.get(name)
                is_same = old is not None and (
                    old[0] is value
                    if content is None
                    else old[1] is not None and same_bits(value, old[1])
                )
                if not is_same and not (content is None and old and old[0] == value):
                    names.append(".".join(filter(None, (scopes[id(module)], name))))
        return names


def _buffers(model: Any) -> list[torch.Tensor]:
    return [b for b in model.buffers() if b.device.type != "meta"]


def _plain(module: Any) -> dict[str, tuple[Any, Any]]:
    """Plain attributes of a module: name -> (value, a copy of it where it is a tensor)."""
    out: dict[str, tuple[Any, Any]] = {}
    for name, value in module.__dict__.items():
        if name.startswith("_") and not isinstance(value, (torch.Tensor, *_SIMPLE)):
            continue
        if isinstance(value, torch.Tensor):
            out[name] = value, value.detach().clone()
        elif isinstance(value, _SIMPLE):
            out[name] = value, None
    return out


class _Index(NamedTuple):
    """An index tensor and the size of what it indexes.

    may_be_negative: negative indices count from the end.
    """

    tensor: Any
    places: int
    may_be_negative: bool = False


class CheckedIndices(TorchDispatchMode):  # type: ignore[misc]
    """Raises IndexError for an index out of bounds, before the operator runs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Check the indices, and run the operator."""
        indices = _INDICES.get(func._schema.name)
        for index in indices(args) if indices is not None else ():
            _check_bounds(func._schema.name, index)
        return func(*args, **(kwargs or {}))


def _check_bounds(operator: str, index: _Index) -> None:
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
    """Index tensors in x[indices]; torch itself checks masks, which cover as many axes as they
    have.
    """
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
