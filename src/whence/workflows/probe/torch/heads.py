"""Finds the heads of attention (queries, keys, values and the output projection) by names and
sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from whence.workflows.probe.torch.exchange import Slot, Structure
from whence.workflows.probe.torch.leaf_calls import LeafCalls
from whence.workflows.probe.torch.weight_axes import Layer, layer_of

HEADS = "attention heads"
GROUPS = "groups of attention heads"
_QUERY = ("q_proj", "query", "q", "q_lin", "wq", "to_q", "query_proj", "q_b_proj", "linear_q", "Wq")
_KEY = ("k_proj", "key", "k", "k_lin", "wk", "to_k", "key_proj", "linear_k", "Wk")
_VALUE = ("v_proj", "value", "v", "v_lin", "wv", "to_v", "value_proj", "linear_v", "Wv")
_KEYS_AND_VALUES = ("kv_b_proj",)
_FUSED = ("qkv", "c_attn", "query_key_value", "qkv_proj", "Wqkv", "att_proj", "qkv_lin")
_OUT = ("o_proj", "out_proj", "dense", "o", "out_lin", "wo", "to_out", "c_proj", "proj", "Wo",
        "linear_out", "output.dense", "attn_out", "projection")  # fmt: skip
_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "num_attn_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")


class _Parts(NamedTuple):
    """Layers of an attention: either `fused` or the other three.

    value: None for a layer that gives keys and values.
    """

    query: Layer | None
    key: Layer | None
    value: Layer | None
    fused: Layer | None
    out: Layer


def attention_heads(model: Any, calls: LeafCalls) -> Iterator[Structure | str]:
    """Heads of each attention that runs, or the reason why they are left out."""
    modules = dict(model.named_modules())
    for scope, module in modules.items():
        if scope not in calls.order:
            continue
        if isinstance(module, nn.MultiheadAttention):
            yield from _of_torch(scope, module)
            continue
        parts = _parts(modules, scope)
        if parts is None:
            continue
        heads = _count(model, module, _COUNTS)
        groups = _groups(parts, heads) or _count(model, module, _KEY_COUNTS) or heads
        yield from _structures(module, scope, parts, heads, groups, calls)


def attention_scopes(model: Any) -> set[str]:
    """Modules that contain projections to queries, keys and values."""
    modules = dict(model.named_modules())
    return {scope for scope in modules if _parts(modules, scope)}


def _of_torch(scope: str, module: Any) -> Iterator[Structure | str]:
    if module.in_proj_weight is None or module.bias_k is not None:
        yield f"{scope}: keys of another size, or with a bias of their own"
        return
    inner = module.head_dim
    prefix = f"{scope}." if scope else ""
    slots = [Slot(f"{prefix}in_proj_weight", 0, 3, inner)]
    if module.in_proj_bias is not None:
        slots.append(Slot(f"{prefix}in_proj_bias", 0, 3, inner))
    slots.append(Slot(f"{prefix}out_proj.weight", 1, 1, inner))
    kind = type(module).__name__
    yield Structure(HEADS, scope, kind, module.num_heads, (tuple(slots),))


def _parts(modules: dict[str, Any], scope: str) -> _Parts | None:
    def child(names: tuple[str, ...], inside: str = scope) -> Layer | None:
        for name in names:
            full = f"{inside}.{name}" if inside else name
            if full in modules and (layer := layer_of(full, modules[full])) is not None:
                return layer
        return None

    fused, query = child(_FUSED), child(_QUERY)
    both = child(_KEYS_AND_VALUES)
    key, value = both or child(_KEY), None if both else child(_VALUE)
    out = child(_OUT) or child(("output.dense", "out_proj"), scope.rpartition(".")[0])
    if out is None or (fused is None and (query is None or key is None)):
        return None
    if fused is None and both is None and value is None:
        return None
    return _Parts(query, key, value, fused, out)


def _count(model: Any, module: Any, names: tuple[str, ...]) -> int:
    for owner in (module, getattr(module, "config", None), getattr(model, "config", None)):
        for name in names:
            count = getattr(owner, name, None)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return 0


def _groups(parts: _Parts, heads: int) -> int:
    """Number of heads of keys and values, from the sizes of the projections; 0 when unknown."""
    if parts.value is None:
        return heads if parts.key else 0
    inner = parts.out.inputs // heads if heads else 0
    groups = parts.value.outputs // inner if inner else 0
    return groups if groups and groups * inner == parts.value.outputs and not heads % groups else 0


def _structures(
    module: Any, scope: str, parts: _Parts, heads: int, groups: int, calls: LeafCalls
) -> Iterator[Structure | str]:
    if heads < 2 or parts.out.inputs % heads or heads % groups:
        return
    if parts.fused and parts.fused.outputs == parts.out.inputs // heads * (heads + 2):
        groups = 1
    layouts = _fused(parts, heads, groups) if parts.fused else _separate(parts, heads, groups)
    if not layouts:
        yield f"{scope}: sizes of its projections are not those of {heads} heads"
        return
    if why := _per_head_argument(calls.shapes[scope, 0], heads):
        yield f"{scope}: {why}"
        return
    others = _others(module, scope, parts, heads, groups)
    if isinstance(others, str):
        yield f"{scope}: {others}"
        return
    kind, size = type(module).__name__, heads // groups
    within = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))
    choices = _choices(others, parts)
    every = tuple(
        (*layout, *_slots(choice, heads, with_keys=size == 1))
        for choice in choices
        for layout in layouts
    )
    yield Structure(HEADS, scope, kind, heads, every, within if size > 1 else ())
    if 1 < groups < heads and parts.fused is None:
        whole = _of_groups(parts, heads, groups)
        every = tuple((*whole, *_slots(c, groups, with_keys=True)) for c in choices)
        yield Structure(GROUPS, scope, kind, groups, every)


def _choices(others: list[_Other], parts: _Parts) -> list[list[_Other]]:
    """Alternatives for the tensors that are permuted with the heads.

    A vector with one element for each channel of all heads may belong to the output channels when
    these are equally many; then both alternatives are layouts.
    """
    width = parts.out.outputs
    bare = [other for other in others if not (other.is_vector and other.size == width)]
    return [others] if len(bare) == len(others) else [others, bare]


def _separate(parts: _Parts, heads: int, groups: int) -> list[tuple[Slot, ...]]:
    """Query heads whose keys are shared: they may be exchanged within their group."""
    assert parts.query is not None
    if parts.query.outputs % heads or any(k.outputs % groups for k in _keys(parts)):
        return []
    slots = parts.query.out_slots(inner=parts.query.outputs // heads)
    slots += parts.out.in_slots(inner=parts.out.inputs // heads)
    if groups == heads:
        for layer in _keys(parts):
            slots += layer.out_slots(inner=layer.outputs // heads)
    return [slots]


def _of_groups(parts: _Parts, heads: int, groups: int) -> tuple[Slot, ...]:
    """Key and value heads together with the query heads that share them."""
    assert parts.query is not None
    slots = parts.query.out_slots(inner=parts.query.outputs // groups)
    for layer in _keys(parts):
        slots += layer.out_slots(inner=layer.outputs // groups)
    return slots + parts.out.in_slots(inner=parts.out.inputs // groups)


def _keys(parts: _Parts) -> list[Layer]:
    return [layer for layer in (parts.key, parts.value) if layer is not None]


def _fused(parts: _Parts, heads: int, groups: int) -> list[tuple[Slot, ...]]:
    """Queries, keys and values of one layer, laid out one after the other, or together for each
    head or for each group.
    """
    fused = parts.fused
    assert fused is not None
    inner = parts.out.inputs // heads
    out = parts.out.in_slots(inner=inner)
    if groups == heads:
        if fused.outputs != 3 * heads * inner:
            return []
        return [
            (*fused.out_slots(outer=3, inner=inner), *out),
            (*fused.out_slots(inner=3 * inner), *out),
        ]
    if fused.outputs != (heads + 2 * groups) * inner:
        return []
    return [(*fused.out_slots(inner=inner), *out)]


def _per_head_argument(shapes: list[tuple[int, ...]], heads: int) -> str:
    """Describe an argument that differs from head to head, such as a positional bias; ""
    for none.
    """
    batch = shapes[0][0] if shapes and shapes[0] else 1
    for shape in shapes[1:]:
        is_heads = (len(shape) == 4 and heads in shape[1:2]) or shape == (heads,)
        if is_heads or (len(shape) == 3 and shape[0] == batch * heads and shape[0] > batch):
            return f"an argument {list(shape)} differs from head to head"
    return ""


class _Other(NamedTuple):
    """A tensor with `size` elements for all heads together. is_of_keys: for the heads of keys."""

    name: str
    size: int
    is_of_keys: bool
    is_vector: bool = True


def _slots(others: list[_Other], count: int, *, with_keys: bool) -> tuple[Slot, ...]:
    return tuple(
        Slot(other.name, 0, 1, other.size // count)
        for other in others
        if with_keys or not other.is_of_keys
    )


def _others(module: Any, scope: str, parts: _Parts, heads: int, groups: int) -> list[_Other] | str:
    """Other tensors with an element for each head; or the name of one that may have one."""
    own = {layer.name for layer in parts if layer is not None}
    rows = parts.query.outputs if parts.query else parts.out.inputs
    keys = parts.key.outputs if parts.key else rows
    others: list[_Other] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        full = f"{scope}.{name}" if scope else name
        if full.rpartition(".")[0] in own or not tensor.ndim:
            continue
        size, is_vector = tensor.shape[0], tensor.ndim == 1
        owner = full.rpartition(".")[0]
        is_gate = layer_of(owner, module.get_submodule(name.rpartition(".")[0])) is not None
        if size == rows and (is_vector or (is_gate and tensor.ndim == 2)):
            others.append(_Other(full, size, is_of_keys=False, is_vector=is_vector))
        elif size == keys and is_vector:
            others.append(_Other(full, size, is_of_keys=True))
        elif size in (heads, groups) and is_vector:
            others.append(_Other(full, size, is_of_keys=size != heads))
        elif not is_vector and (heads in tensor.shape or size in (rows, keys)):
            return f"{name} {list(tensor.shape)} may differ from head to head"
    return others
