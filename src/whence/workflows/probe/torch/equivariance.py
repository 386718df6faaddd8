"""Checks whether heads, experts and channels are interchangeable: permuting them together with
their weights must not change the outputs.

The module finds heads, experts and hidden channels of a model: units that differ only in their
weights. A hidden channel is produced by one layer and read by another, with the same operations for
all channels between. Experts are modules, or slices of weights, for each of which a router has a
row.

Names and sizes only suggest a structure; `equivariance` confirms it by the model's answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import Unanswered, answer
from whence.workflows.probe.torch.exchange import (
    Exchange,
    Exchanged,
    Siblings,
    Slot,
    Structure,
    exchanged,
    whole_order,
)
from whence.workflows.probe.torch.heads import attention_heads, attention_scopes
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import WIDE_ROUNDING, Judge, Trial, said
from whence.workflows.probe.torch.leaf_calls import LeafCalls, leaf_calls
from whence.workflows.probe.torch.regions import Turned
from whence.workflows.probe.torch.subject import Subject
from whence.workflows.probe.torch.weight_axes import Layer, layer_of, layers_of

DECLARED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "flip": ("the image flipped left to right, as declared", lambda x: x.flip(-1)),
    "shift": ("the image shifted by one column, as declared", lambda x: x.roll(1, -1)),
}
_TWO = "of two, nothing tells whether one is special or both are meant to differ"
_MOST_RUNS = 48
_COPIES = 4.0
"""Largest factor by which a difference may grow in float64, unless the float64 copy shares weights
with its model: shared weights are not permuted in the copy.
"""
_MANY = 8
_MOST_BROKEN = 2
_ALL_DIFFER = "no two of them may be exchanged: each has code of its own, as a bias by head is"


def equivariance(judge: Judge, inputs: CallInputs, declared: Collection[str]) -> PropertyAnswer:
    """Permute units together with their weights: no output may change.

    declared: names of `DECLARED`, changes of the image under which the answer should stay, or turn
    with the image.
    """
    try:
        units = _find_units(judge.subject.model, leaf_calls(judge.subject, inputs))
    except Exception as error:  # whatever the user's model raises
        raise Unanswered(
            f"its modules cannot be listened to: {said(error)}", Held.UNKNOWN
        ) from error
    variants = [_turned(judge, inputs, name) for name in DECLARED if name in declared]
    cause = f"it moves with {variants[0].name}" if variants else ""
    finder = _Finder(judge, inputs)
    for kind in dict.fromkeys(structure.kind for structure in units.structures):
        found, why = finder.kind(kind, [s for s in units.structures if s.kind == kind])
        variants += found
        cause = why or cause
        if any(v.held == Held.VIOLATED for v in found):
            break
    notes = [f"not permuted: {words}" for words in units.left_out[:3]]
    if len(units.left_out) > len(notes):
        notes.append(f"and {len(units.left_out) - len(notes)} more")
    if not variants:
        raise Unanswered("; ".join(notes) or "no heads, experts or hidden channels are found in it")
    return answer(Property.EQUIVARIANCE, variants, cause=cause, notes=notes)


def _turned(judge: Judge, inputs: CallInputs, name: str) -> Variant:
    words, turn = DECLARED[name]
    if inputs.tensor.ndim != 4 or not inputs.tensor.is_floating_point():
        return Variant(
            words, Held.UNKNOWN, why=f"{inputs.main} is not an image [rows, channels, y, x]"
        )
    changed = inputs.changed(**{inputs.main: turn(inputs.tensor).contiguous()})
    return judge.variant(words, inputs, changed, Turned(turn))


class _Finder:
    """Permutes units of one kind and finds those that differ from the others."""

    def __init__(self, judge: Judge, inputs: CallInputs) -> None:
        self._judge, self._inputs = judge, inputs
        self._layouts: dict[tuple[str, str, int], int] = {}

    def kind(self, kind: str, structures: Sequence[Structure]) -> tuple[list[Variant], str]:
        """Try all structures of one kind: (variants, cause of a violation)."""
        chosen = [self._laid_out(s) for s in structures]
        whole = self._variant(f"{kind} of {_modules(len(chosen))} permuted", chosen)
        if whole.held != Held.VIOLATED:
            return [self._with_effect(whole, chosen)], ""
        if whole.in_float64 is None or whole.in_float64 > _COPIES * whole.moved:
            why = "nothing runs it in float64, which tells a special unit from a wrong guess"
            return [replace(whole, held=Held.UNKNOWN, why=why)], ""
        broken = self._broken(chosen, structures)
        rest = [s for n, s in enumerate(chosen) if n not in broken]
        variants = []
        if rest:
            variants = [self._variant(f"{kind} of {_modules(len(rest))} permuted", rest)]
        if not broken:
            return [self._with_effect(variants[0], rest)], ""
        allowed: list[Variant] = []
        for number in broken[:_MOST_BROKEN]:
            structure = structures[number]
            special = self._special(structure)
            one = self._variant(
                f"{kind} of {structure.scope or 'the model itself'} permuted", [chosen[number]]
            )
            if special:
                return [one, *variants], f"{special} in {structure.scope or 'the model itself'}"
            allowed.append(replace(one, held=Held.OBSERVED))
        why = _TWO if all(structures[n].units == 2 for n in broken) else _ALL_DIFFER
        return [*allowed, *variants], f"{kind}: {why}"

    def _broken(self, chosen: list[Structure], structures: Sequence[Structure]) -> list[int]:
        """Indices of the structures that hold in no layout.

        Modules of one class may differ in their tensors: when another layout holds, it replaces the
        one in `chosen`.
        """
        broken = []
        for number, structure in enumerate(structures):
            if self._in_order(chosen[number]):
                continue
            fitting = self._fitting(structure) if len(structure.layouts) > 1 else None
            if fitting is None:
                broken.append(number)
            else:
                chosen[number] = fitting
        return broken

    def _laid_out(self, structure: Structure) -> Structure:
        """The structure with the layout that holds for the first of its class; the first layout
        when none does.
        """
        key = structure.kind, structure.op_type, len(structure.layouts)
        if len(structure.layouts) > 1 and key not in self._layouts:
            fitting = self._fitting(structure)
            self._layouts[key] = structure.layouts.index(fitting.layouts[0]) if fitting else 0
        return structure.laid_out(self._layouts.get(key, 0))

    def _fitting(self, structure: Structure) -> Structure | None:
        """The structure with a layout that holds; None when none does."""
        tried = (structure.laid_out(n) for n in range(len(structure.layouts)))
        return next((s for s in tried if self._in_order(s)), None)

    def _in_order(self, structure: Structure) -> bool:
        return self._holds([(structure, whole_order(structure))])

    def _variant(self, name: str, structures: Sequence[Structure]) -> Variant:
        exchanges = [(structure, whole_order(structure)) for structure in structures]
        return self._judge.variant(name, *self._trial(exchanges))

    def _trial(self, exchanges: Sequence[Exchange]) -> Trial:
        modes = [lambda subject: exchanged(subject, exchanges)]
        return Trial(self._inputs, self._inputs, Exchanged(exchanges), modes=modes)

    def _with_effect(self, variant: Variant, structures: Sequence[Structure]) -> Variant:
        """Add the effect of permuting a single weight alone.

        When this changes no output either, the permutation tested nothing and the variant is
        unknown.
        """
        if variant.held == Held.UNKNOWN:
            return variant
        for number in range(max(len(s.layouts[0]) for s in structures)):
            halves = [s._replace(layouts=(s.layouts[0][number : number + 1],)) for s in structures]
            exchanges = [(s, whole_order(s)) for s in halves]
            if effect := self._moved(exchanges, self._judge.subject):
                return replace(variant, effect=effect)
        why = "permuting a weight alone changes no output either: nothing was tried"
        return replace(variant, held=Held.UNKNOWN, why=why, effect=0.0)

    def _moved(self, exchanges: Sequence[Exchange], subject: Subject | None = None) -> float:
        return self._judge.moved(self._trial(exchanges), subject)

    def _holds(self, exchanges: Sequence[Exchange]) -> bool:
        return self._moved(exchanges) <= WIDE_ROUNDING

    # ---- units that differ from the others

    def _special(self, structure: Structure) -> str:
        """Describe the units that differ from the others; "" when nothing confirms that the
        structure is one.
        """
        for number in range(len(structure.layouts)):
            words = _Exchanges(self._holds, structure.laid_out(number)).special()
            if words:
                return words
        return ""


class _TooMany(Exception):
    """More runs would be needed than the limit allows."""


class _Exchanges:
    """Finds which units of a structure are interchangeable by exchanging them."""

    def __init__(self, holds: Callable[[Sequence[Exchange]], bool], structure: Structure) -> None:
        self._holds, self._structure, self._runs = holds, structure, 0

    def special(self) -> str:
        """Describe the units that differ from the others; "" when no class of like units stands
        out.

        Only when most units are alike is a different one a fault and not the model's design.
        """
        structure = self._structure
        everything = tuple(range(structure.units))
        try:
            if structure.groups:
                return self._special_of_groups()
            if structure.units > 3 and self._rotates(everything):  # another order does not hold
                return f"{structure.kind} read their neighbours"
            if structure.units >= _MANY and not any(map(self._rotates, _spread(structure.units))):
                return ""
            classes = self.classes(everything)
        except _TooMany:
            return ""
        return self._named(_odd(classes, structure.units) if len(classes) > 1 else [])

    def _special_of_groups(self) -> str:
        """The same as `special`, for units that may be exchanged only within their groups."""
        by_group = [self.classes(group) for group in self._structure.groups]
        alike = sum(len(classes) == 1 for classes in by_group)
        if 2 * alike < len(by_group) or alike == len(by_group):
            return ""
        odd: list[int] = []
        than = "the others"
        for group, classes in zip(self._structure.groups, by_group):
            if len(classes) > 1:
                special = _odd(classes, len(group))
                than = "the others" if special else "each other"
                odd += special or group
        return self._named(odd, than)

    def _named(self, odd: Sequence[int], than: str = "the others") -> str:
        if not odd:
            return ""
        shown = ", ".join(map(str, sorted(odd)[:6])) + ", ..." * (len(odd) > 6)
        count = self._structure.units
        return f"{self._structure.kind} {shown} of {count} (from 0) are not like {than}"

    def classes(self, units: Sequence[int]) -> list[list[int]]:
        """Units grouped into classes whose members may be exchanged for each other."""
        if len(units) == 1 or self._rotates(units):
            return [list(units)]
        if len(units) == 2:
            return [[unit] for unit in units]
        middle = len(units) // 2
        classes = self.classes(units[:middle])
        for later in self.classes(units[middle:]):
            for known in sorted(classes, key=len, reverse=True)[:2]:
                if self._rotates((known[0], later[0])):
                    known += later
                    break
            else:
                classes.append(later)
        return classes

    def _rotates(self, units: Sequence[int]) -> bool:
        self._runs += 1
        if self._runs > _MOST_RUNS:
            raise _TooMany
        order = list(range(self._structure.units))
        for place, unit in enumerate(units):
            order[unit] = units[(place + 1) % len(units)]
        return self._holds([(self._structure, order)])


def _spread(count: int) -> list[tuple[int, int]]:
    """Four pairs of neighbouring units, spread over all units."""
    return [(n * count // 4, n * count // 4 + 1) for n in range(4)]


def _odd(classes: Sequence[list[int]], count: int) -> list[int]:
    """Units outside the largest class.

    () unless that class contains at least half of the units and is larger than every other class.
    """
    first, second = sorted(classes, key=len, reverse=True)[:2]
    if len(first) < 2 or 2 * len(first) < count or len(first) == len(second):
        return []
    return [unit for units in classes if units is not first for unit in units]


def _modules(count: int) -> str:
    return "1 module" if count == 1 else f"{count} modules"


class Found(NamedTuple):
    """Structures that were found, and the reasons why others are left out."""

    structures: list[Structure]
    left_out: list[str]


def _find_units(model: Any, calls: LeafCalls) -> Found:
    """All structures of interchangeable units in a model. calls: of its modules in one run."""
    own = set(_of_one_name(model))
    structures: list[Structure] = []
    left_out: list[str] = []
    taken: set[Slot] = set()
    for find in (attention_heads, _experts, _hidden_channels, _between_layers):
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
    """Names of tensors that have only one name (untied ones)."""
    names: dict[int, list[str]] = {}
    for find in (model.named_parameters, model.named_buffers):
        for name, tensor in find(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    yield from (own[0] for own in names.values() if len(own) == 1)


_CHANNELS = "hidden channels"
_BETWEEN = "channels between layers"
_SPATIAL = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ALIKE = ("activation", "relu", "gelu", "silu", "tanh", "sigmoid", "dropout", "identity", "swish",
          "mish", "elu")  # fmt: skip


def _hidden_channels(model: Any, calls: LeafCalls) -> Iterator[Structure | str]:
    """Hidden channels of modules with two layers, or with three of which two form a gate."""
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
        yield Structure(_CHANNELS, scope, kind, width, whole)


def _others(module: Any, prefix: str, layers: list[Layer], width: int) -> tuple[Slot, ...] | str:
    """Slots of the other vectors with an element for each channel; or a text about a tensor that
    may differ by channel in another way.
    """
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
    """Whether two layers read the same tensor."""
    first, second = (next((c.given for c in calls.calls if c.scope == n), ()) for n in (one, other))
    return bool(set(first) & set(second))


class _Chain(NamedTuple):
    """A layer, the modules behind it that treat all channels alike, and the layer that reads the
    result.

    is_whole: each module passes its result to the next, which alone reads it.
    """

    first: Layer
    last: Layer
    slots: tuple[Slot, ...]
    is_whole: bool


def _between_layers(model: Any, calls: LeafCalls) -> Iterator[Structure]:
    """Channels that go from one layer through norms and activations (all of them modules) to the
    next.

    When other code lies between, as in a faulty module, the chain counts only if like modules
    elsewhere form a whole chain.
    """
    modules, layers = dict(model.named_modules()), layers_of(model)
    follow = _Follow(calls, modules, layers)
    chains = [chain for number in range(len(calls.calls)) if (chain := follow.chain(number))]
    known = {_relative(chain, modules) for chain in chains if chain.is_whole}
    for chain in chains:
        if chain.is_whole or _relative(chain, modules) in known:
            first = chain.first
            kind = type(modules[first.name]).__name__
            yield Structure(_BETWEEN, first.name, kind, first.outputs, (chain.slots,))


def _relative(chain: _Chain, modules: dict[str, Any]) -> tuple[str, str, str]:
    """The class of the module that contains both layers, and the layers' names in it."""
    first, last = chain.first.name.split("."), chain.last.name.split(".")
    count = next((n for n, (a, b) in enumerate(zip(first, last)) if a != b), 0)
    kind = type(modules[".".join(first[:count])]).__name__
    return kind, ".".join(first[count:]), ".".join(last[count:])


class _Follow:
    """Follows the output of a layer to the layer that reads it."""

    def __init__(self, calls: LeafCalls, modules: dict[str, Any], layers: dict[str, Layer]) -> None:
        self._calls, self._modules, self._layers = calls, modules, layers
        self._readers: dict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(calls.calls):
            for tensor in set(call.given):
                self._readers[tensor].append(number)

    def chain(self, number: int) -> _Chain | None:
        """The chain that begins with a call of a module; None when there is none."""
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
        """The call that alone reads the output of a call; None when other code reads it too."""
        tensor = self._calls.calls[number].gives
        later = [n for n in self._readers[tensor] if n > number]
        if tensor in self._calls.read_outside or not later:
            return None
        is_in_place = self._calls.calls[later[0]].gives == tensor
        return later[0] if is_in_place or len(later) == 1 else None


def _alike(scope: str, module: Any, width: int) -> list[Slot] | None:
    """Slots of the tensors of a module that treats all channels alike; None for any other
    module.
    """
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


_EXPERTS = "experts"
_ROUTERS = ("gate", "router", "classifier", "wg")
_GROUPED = ("n_group", "num_expert_group", "n_groups")


def _experts(model: Any, calls: LeafCalls) -> Iterator[Structure | str]:
    """Experts of each block that runs, with the rows of their router; or why they are left out."""
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
            yield Structure(_EXPERTS, scope, kind, count, ((*slots, *router),))


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
    """Slots of other tensors with an element for each expert; or the name of a tensor that may have
    one.
    """
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
