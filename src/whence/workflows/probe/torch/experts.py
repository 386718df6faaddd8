"""Finds experts: modules, or slices of weights, of which a router has a row for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from whence.workflows.probe.torch.exchange import Siblings, Slot, Structure
from whence.workflows.probe.torch.leaf_calls import LeafCalls

EXPERTS = "experts"
_ROUTERS = ("gate", "router", "classifier", "wg")
_GROUPED = ("n_group", "num_expert_group", "n_groups")


def experts(model: Any, calls: LeafCalls) -> Iterator[Structure | str]:
    """Experts of each block that runs, with the rows of their router, or why they are left out."""
    for scope, block in model.named_modules():
        name = next((n for n, _ in block.named_children() if _is_experts(n)), None)
        if name is None or scope not in calls.order:
            continue
        inside = dict(block.named_children())[name]
        prefix = f"{scope}." if scope else ""
        count = _rows_of_router(block, name)
        if count < 2:
            continue
        if grouped := _groups(model, block):
            yield f"{scope}: its experts are chosen by {grouped} groups"
            continue
        slots = _of_experts(inside, f"{prefix}{name}", count)
        router = _of_router(block, prefix, name, count)
        if isinstance(router, str):
            yield f"{scope}: {router}"
        elif slots:
            kind = type(block).__name__
            yield Structure(EXPERTS, scope, kind, count, ((*slots, *router),))


def _is_experts(name: str) -> bool:
    return "expert" in name and "shared" not in name


def _rows_of_router(block: Any, experts_name: str) -> int:
    for name, tensor in block.named_parameters():
        owner = name.rpartition(".")[0]
        if name.partition(".")[0] == experts_name or tensor.ndim != 2:
            continue
        if any(word in owner.split(".") or word == owner for word in _ROUTERS) or any(
            word in name for word in ("gate.", "router")
        ):
            return int(tensor.shape[0])
    return 0


def _groups(model: Any, block: Any) -> int:
    owners = [*block.modules(), getattr(model, "config", None)]
    counts = [getattr(owner, name, None) for owner in owners for name in _GROUPED]
    return max((c for c in counts if isinstance(c, int) and c > 1), default=0)


def _of_experts(inside: Any, prefix: str, count: int) -> tuple[Slot | Siblings, ...]:
    if isinstance(inside, (nn.ModuleList, nn.ModuleDict)):
        names = [name for name, _ in inside.named_children()]
        own = [dict(child.named_parameters()) for child in inside.children()]
        shapes = [{n: t.shape for n, t in tensors.items()} for tensors in own]
        if len(own) != count or any(s != shapes[0] for s in shapes):
            return ()
        return tuple(Siblings(tuple(f"{prefix}.{n}.{leaf}" for n in names)) for leaf in own[0])
    tensors = dict(inside.named_parameters())
    if not tensors or any(t.shape[0] % count for t in tensors.values()):
        return ()
    return tuple(Slot(f"{prefix}.{n}", 0, 1, t.shape[0] // count) for n, t in tensors.items())


def _of_router(block: Any, prefix: str, experts_name: str, count: int) -> tuple[Slot, ...] | str:
    """Slots of what else has an element for each expert; or the name of what may have."""
    slots = []
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        if name.partition(".")[0] == experts_name or not tensor.ndim:
            continue
        if not tensor.is_floating_point():
            return f"{name} {list(tensor.shape)} may hold numbers of experts"
        if tensor.shape[0] == count and tensor.ndim == 2 and len(tensor.unique(dim=0)) < count:
            return f"rows of {name} are equal: of experts with equal scores one is chosen by number"
        if tensor.shape[0] == count:
            slots.append(Slot(prefix + name))
        elif tensor.shape[-1] == count:
            return f"{name} {list(tensor.shape)} may differ from expert to expert"
    return tuple(slots)
