"""Finds the heads, experts and channels of a model: units that are alike but for their weights.

What is found is taken for a structure by its names and sizes; `equivariance` tells by how it
answers whether it is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from whence.workflows.probe.torch.channels import between_layers, hidden_channels
from whence.workflows.probe.torch.exchange import Siblings, Slot, Structure
from whence.workflows.probe.torch.experts import experts
from whence.workflows.probe.torch.heads import attention_heads
from whence.workflows.probe.torch.leaf_calls import LeafCalls


class Found(NamedTuple):
    """structures, and of others why they are left out."""

    structures: list[Structure]
    left_out: list[str]


def find_units(model: Any, calls: LeafCalls) -> Found:
    """All units of a model. calls: of its modules in one run."""
    own = set(_of_one_name(model))
    structures: list[Structure] = []
    left_out: list[str] = []
    taken: set[Slot] = set()
    for find in (attention_heads, experts, hidden_channels, between_layers):
        for item in find(model, calls):
            if isinstance(item, str):
                left_out.append(item)
                continue
            slots = {slot for layout in item.layouts for slot in layout}
            names = {n for s in slots for n in (s.names if isinstance(s, Siblings) else (s.name,))}
            places = {slot for slot in slots if isinstance(slot, Slot)}
            if item.units < 2 or places & taken:
                continue  # the same channels, found in another way
            if shared := sorted(names - own):
                left_out.append(f"{item.scope}: {shared[0]} is a weight of another module too")
                continue
            taken |= places
            structures.append(item)
    return Found(structures, left_out)


def _of_one_name(model: Any) -> Iterator[str]:
    """Names of tensors that have one name only."""
    names: dict[int, list[str]] = {}
    for find in (model.named_parameters, model.named_buffers):
        for name, tensor in find(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    yield from (own[0] for own in names.values() if len(own) == 1)
