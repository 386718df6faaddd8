"""Puts the units (heads, experts, channels) of weights in another order for one run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from whence.workflows.probe.torch.outputs import same_bits
from whence.workflows.probe.torch.regions import Pair, Region, Shape, closest
from whence.workflows.probe.torch.subject import Subject

Order = Sequence[int]
"""An order of units: unit i receives the weights of unit order[i]."""


class Slot(NamedTuple):
    """Where units lie in a parameter or buffer: `axis` is viewed as [outer, units, inner].

    name: of the tensor in its model.
    """

    name: str
    axis: int = 0
    outer: int = 1
    inner: int = 1

    def indices(self, size: int, order: Order) -> torch.Tensor:
        """Indices along an axis of `size` elements that put the units in the given order."""
        out = torch.arange(size)
        stop = self.outer * len(order) * self.inner
        units = out[:stop].reshape(self.outer, len(order), self.inner)
        out[:stop] = units[:, list(order)].reshape(-1)
        return out


class Siblings(NamedTuple):
    """Parameters of like modules, one module a unit: names[i] belongs to unit i."""

    names: tuple[str, ...]


class Structure(NamedTuple):
    """Interchangeable units of one module.

    kind: what they are, in the plural. scope: the module. layouts: candidates for where the units
    lie, one of which is right. groups: units that may be exchanged only with each other; () for
    all.
    """

    kind: str
    scope: str
    op_type: str
    units: int
    layouts: tuple[tuple[Slot | Siblings, ...], ...]
    groups: tuple[tuple[int, ...], ...] = ()

    def laid_out(self, number: int) -> Structure:
        """The structure reduced to one of its layouts."""
        return self._replace(layouts=(self.layouts[number],))


def derangement(count: int) -> list[int]:
    """A fixed permutation that moves every unit and, for four or more units, is not a rotation.

    A rotation cannot reveal code in which each unit reads its neighbour.
    """
    if count < 4:
        return [1, 0, *range(2, count)]
    generator = torch.Generator().manual_seed(count)
    while True:
        order = torch.randperm(count, generator=generator)
        steps = (order - torch.arange(count)) % count
        if bool((steps != 0).all()) and len(steps.unique()) > 1:
            return [int(n) for n in order]


def whole_order(structure: Structure) -> list[int]:
    """A permutation of all units that keeps each unit in its group."""
    order = list(range(structure.units))
    for group in structure.groups or (tuple(order),):
        for place, source in enumerate(derangement(len(group)) if len(group) > 1 else [0]):
            order[group[place]] = group[source]
    return order


Exchange = tuple[Structure, Order]


@contextlib.contextmanager
def exchanged(subject: Subject, exchanges: Sequence[Exchange]) -> Iterator[None]:
    """Run with the units of the subject's model in another order.

    The model's own tensors are not written; copies replace them in the meantime.
    """
    tensors = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    before: dict[str, torch.Tensor] = {}
    try:
        for structure, order in exchanges:
            for slot in structure.layouts[0]:
                names = slot.names if isinstance(slot, Siblings) else (slot.name,)
                for name in names:
                    before.setdefault(name, tensors[name].data)
                _put(tensors, slot, order)
        yield
    finally:
        for name, content in before.items():
            tensors[name].data = content


def _put(tensors: dict[str, Any], slot: Slot | Siblings, order: Order) -> None:
    if isinstance(slot, Siblings):
        contents = [tensors[name].data for name in slot.names]
        for name, source in zip(slot.names, order):
            tensors[name].data = contents[source]
        return
    tensor = tensors[slot.name]
    content = tensor.data
    places = slot.indices(content.shape[slot.axis], order).to(content.device)
    tensor.data = content.index_select(slot.axis, places).contiguous()


class Exchanged(Region):
    """Compares tensors of two runs, of which the second may have its units in another order.

    Along each axis that may count units, the order with the best agreement is used.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._orders = {
            (tuple(order), slot.outer, slot.inner)
            for structure, order in exchanges
            for slot in structure.layouts[0]
            if isinstance(slot, Slot)
        } | {(tuple(order), 1, 1) for _, order in exchanges}

    def pair(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """Both tensors, the first rearranged to the order of the second."""
        if base.shape != variant.shape or base.dtype != variant.dtype:
            return None
        if same_bits(base, variant):
            return base, variant
        pairs = [(base, variant)]
        for axis, size in enumerate(base.shape):
            for order, outer, inner in self._orders:
                if outer * len(order) * inner <= size and not size % len(order):
                    slot = Slot("", axis, outer, size // len(order) // outer)
                    places = slot.indices(size, order).to(base.device)
                    pairs.append((base.index_select(axis, places), variant))
        return closest(pairs)
