"""Finds hidden channels: what one layer makes and another reads, alike for all channels between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from whence.workflows.probe.torch.exchange import Slot, Structure
from whence.workflows.probe.torch.heads import attention_scopes
from whence.workflows.probe.torch.leaf_calls import LeafCalls
from whence.workflows.probe.torch.weight_axes import Layer, layer_of, layers_of

CHANNELS = "hidden channels"
BETWEEN = "channels between layers"
_SPATIAL = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ALIKE = ("activation", "relu", "gelu", "silu", "tanh", "sigmoid", "dropout", "identity", "swish",
          "mish", "elu")  # fmt: skip


def hidden_channels(model: Any, calls: LeafCalls) -> Iterator[Structure | str]:
    """Hidden channels of modules that hold two layers, or three of which two gate."""
    attentions = attention_scopes(model)
    for scope, module in model.named_modules():
        if scope in attentions:
            continue
        prefix = f"{scope}." if scope else ""
        layers = [
            layer
            for name, child in module.named_children()
            if (layer := layer_of(prefix + name, child)) is not None
            and calls.counts.get(prefix + name)
        ]
        if len(layers) not in (2, 3):
            continue
        *ups, down = sorted(layers, key=lambda layer: calls.order[layer.name])
        width = down.inputs
        if any(up.inputs != down.outputs for up in ups) or width < 2:
            continue
        if any(_read_alike(calls, up.name, down.name) for up in ups):
            continue  # they stand beside each other, as those of queries, keys and values do
        if all(up.outputs == width for up in ups):
            layouts = [tuple(slot for up in ups for slot in up.out_slots())]
        elif len(ups) == 1 and ups[0].outputs == 2 * width:
            layouts = [ups[0].out_slots(outer=2), ups[0].out_slots(inner=2)]
        else:
            continue
        others = _others(module, prefix, layers, width)
        if isinstance(others, str):
            yield f"{scope}: {others}"
            continue
        kind = type(module).__name__
        whole = tuple((*layout, *down.in_slots(), *others) for layout in layouts)
        yield Structure(CHANNELS, scope, kind, width, whole)


def _others(module: Any, prefix: str, layers: list[Layer], width: int) -> tuple[Slot, ...] | str:
    """Slots of what else has an element for each channel; or the name of what may have."""
    own = {layer.name for layer in layers}
    slots = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        full = prefix + name
        if full.rpartition(".")[0] in own or width not in tensor.shape:
            continue
        if tensor.ndim != 1:
            return f"{name} {list(tensor.shape)} may differ from channel to channel"
        slots.append(Slot(full))
    return tuple(slots)


def _read_alike(calls: LeafCalls, one: str, other: str) -> bool:
    """Do two layers read the same tensor?"""
    first, second = (next((c.given for c in calls.calls if c.scope == n), ()) for n in (one, other))
    return bool(set(first) & set(second))


class _Chain(NamedTuple):
    """A layer, what is alike for all channels behind it, and the layer that reads them. is_whole:
    each hands its result to the next, which alone reads it.
    """

    first: Layer
    last: Layer
    slots: tuple[Slot, ...]
    is_whole: bool


def between_layers(model: Any, calls: LeafCalls) -> Iterator[Structure]:
    """Channels that go from a layer through norms and activations, all modules, to the next. Where
    other code comes between, as in a faulty module, only if like modules elsewhere have it so.
    """
    modules, layers = dict(model.named_modules()), layers_of(model)
    follow = _Follow(calls, modules, layers)
    chains = [chain for number in range(len(calls.calls)) if (chain := follow.chain(number))]
    known = {_relative(chain, modules) for chain in chains if chain.is_whole}
    for chain in chains:
        if chain.is_whole or _relative(chain, modules) in known:
            first = chain.first
            kind = type(modules[first.name]).__name__
            yield Structure(BETWEEN, first.name, kind, first.outputs, (chain.slots,))


def _relative(chain: _Chain, modules: dict[str, Any]) -> tuple[str, str, str]:
    """Class of the module that holds both layers, and their names in it."""
    first, last = chain.first.name.split("."), chain.last.name.split(".")
    count = next((n for n, (a, b) in enumerate(zip(first, last)) if a != b), 0)
    kind = type(modules[".".join(first[:count])]).__name__
    return kind, ".".join(first[count:]), ".".join(last[count:])


class _Follow:
    """Follows what a layer gives to the layer that reads it."""

    def __init__(self, calls: LeafCalls, modules: dict[str, Any], layers: dict[str, Layer]) -> None:
        self._calls, self._modules, self._layers = calls, modules, layers
        self._readers: dict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(calls.calls):
            for tensor in set(call.given):
                self._readers[tensor].append(number)

    def chain(self, number: int) -> _Chain | None:
        """The chain that begins with a call of a module; None for none."""
        first = self._layers.get(self._calls.calls[number].scope)
        if first is None or self._calls.counts[first.name] != 1:
            return None
        slots, is_whole = list(first.out_slots()), True
        while True:
            after = self._after(number)
            is_whole = is_whole and after is not None
            number = after if after is not None else number + 1
            if number >= len(self._calls.calls):
                return None
            scope = self._calls.calls[number].scope
            if scope in self._layers:
                break
            own = _alike(scope, self._modules[scope], first.outputs)
            if own is None or (own and self._calls.counts[scope] != 1):
                return None
            slots += own
        last = self._layers[scope]
        if self._calls.counts[scope] != 1 or last.inputs != first.outputs:
            return None
        if isinstance(self._modules[first.name], _SPATIAL) != isinstance(
            self._modules[scope], _SPATIAL
        ):
            return None
        return _Chain(first, last, (*slots, *last.in_slots()), is_whole)

    def _after(self, number: int) -> int | None:
        """The call that alone reads what a call gives; None where other code does too."""
        tensor = self._calls.calls[number].gives
        later = [n for n in self._readers[tensor] if n > number]
        if tensor in self._calls.read_outside or not later:
            return None
        is_in_place = self._calls.calls[later[0]].gives == tensor
        return later[0] if is_in_place or len(later) == 1 else None


def _alike(scope: str, module: Any, width: int) -> list[Slot] | None:
    """What a module that treats all channels alike holds of each; None for any other module."""
    kind = type(module).__name__.lower()
    tensors = {**module._parameters, **module._buffers}
    held = {name: t for name, t in tensors.items() if t is not None and t.ndim}
    if isinstance(module, _SPATIAL) and module.groups == width == module.out_channels:
        return [Slot(f"{scope}.{name}") for name in held]
    if "norm" in kind:
        if isinstance(module, nn.GroupNorm) and module.num_groups != 1:
            return None
        if any(t.ndim != 1 or len(t) != width for t in held.values()):
            return None
        return [Slot(f"{scope}.{name}") for name in held]
    if not held and (any(word in kind for word in _ALIKE)):
        return []
    return None
