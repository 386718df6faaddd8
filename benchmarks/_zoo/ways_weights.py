"""The same function with other weights: factors, rotations and orders moved between layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.editing import (
    become,
    chosen,
    edit,
    gemma_like,
    is_norm,
    linears,
    named,
    pick,
    readers,
    scale_columns,
    scale_rows,
)
from _zoo.sides import NotHere, Side, normal, replace
from _zoo.ways import PRODUCTS, way


def _fed(side: Side) -> dict[str, list[str]]:
    """Norms with weights -> the linear layers that read them, where nothing else does, and whose
    weights no table of embeddings shares.
    """
    model, out = side.model, {}
    for name, others in readers(side).items():
        if is_norm(model.get_submodule(name)) and not gemma_like(model.get_submodule(name)):
            kinds = [type(model.get_submodule(o)) for o in others]
            if (
                kinds
                and all(k is nn.Linear for k in kinds)
                and all(_untied(side, o) for o in others)
            ):
                out[name] = others
    return out


def _pairs(side: Side, between: tuple[type[nn.Module], ...]) -> list[tuple[str, str, str]]:
    """Linear, a module of these classes behind it, and the linear behind that."""
    links, model = readers(side), side.model
    out = []
    for name, others in links.items():
        if type(model.get_submodule(name)) is nn.Linear and len(others) == 1:
            middle = others[0]
            if isinstance(model.get_submodule(middle), between) and len(links.get(middle, ())) == 1:
                last = links[middle][0]
                if type(model.get_submodule(last)) is nn.Linear:
                    out.append((name, middle, last))
    return out


def factor(name: str, n: int) -> Tensor:
    """Factors between 0.4 and 2.5."""
    out = torch.exp(0.6 * normal(name, n).clamp(-1.5, 1.5))
    return out.to(torch.get_default_dtype())


def rotation(numbers: Tensor) -> Tensor:
    """An orthogonal matrix made of numbers, in the default dtype."""
    return torch.linalg.qr(numbers.double())[0].to(torch.get_default_dtype())


@way("norm-scale-folded", PRODUCTS)
def _norm_folded(side: Side, seed: int) -> Side:
    name, others = chosen(_fed(side), seed)
    norm = side.only(name)
    for other in others:
        scale_columns(side.only(other), norm.weight.data)
    bias = getattr(norm, "bias", None)
    with torch.no_grad():
        if bias is not None:
            bias.div_(norm.weight)
        norm.weight.fill_(1)
    side.touched |= {name, *others}
    return side


@way("norm-scales-all-folded", PRODUCTS)
def _all_folded(side: Side, seed: int) -> Side:
    fed = _fed(side)
    if len(fed) < 2:
        raise NotHere("fewer than two norms")
    for i in range(len(fed)):
        side = _norm_folded(side, i)  # type: ignore[assignment]
    return side


@way("norm-bias-folded", PRODUCTS)
def _bias_folded(side: Side, seed: int) -> Side:
    fed = {
        n: o
        for n, o in _fed(side).items()
        if getattr(side.only(n), "bias", None) is not None
        and all(side.only(x).bias is not None for x in o)
    }
    name, others = chosen(fed, seed)
    norm = side.only(name)
    with torch.no_grad():
        for other in others:
            layer = side.only(other)
            layer.bias.add_(layer.weight @ norm.bias)
        norm.bias.zero_()
    side.touched |= {name, *others}
    return side


@way("smoothing-behind-norm", PRODUCTS)
def _smoothed(side: Side, seed: int) -> Side:
    name, others = chosen(_fed(side), seed)
    norm, s = side.only(name), factor("smooth", side.only(name).weight.numel())
    with torch.no_grad():
        norm.weight.div_(s)
        if getattr(norm, "bias", None) is not None:
            norm.bias.div_(s)
    for other in others:
        scale_columns(side.only(other), s)
    side.touched |= {name, *others}
    return side


def _gated(side: Side) -> list[tuple[nn.Module, str]]:
    """Gated networks with three linear layers: the module and its name."""
    return [
        (m, n)
        for n, m in side.model.named_modules()
        if all(
            type(getattr(m, k, None)) is nn.Linear for k in ("gate_proj", "up_proj", "down_proj")
        )
    ]


def _attentions(side: Side) -> list[tuple[Any, str]]:
    """Attention modules with q_proj, k_proj, v_proj and an output layer."""
    return [
        (m, n)
        for n, m in side.model.named_modules()
        if all(type(getattr(m, k, None)) is nn.Linear for k in ("q_proj", "k_proj", "v_proj"))
        and type(output_of(m)) is nn.Linear
    ]


def output_of(attention: Any) -> Any:
    """The layer behind the heads, by its usual names."""
    names = ("o_proj", "out_proj", "dense", "c_proj")
    return next((getattr(attention, n) for n in names if hasattr(attention, n)), None)


def one(items: list[tuple[Any, str]], seed: int) -> tuple[Any, str]:
    """One of the places; NotHere where there is none."""
    if not items:
        raise NotHere("no such module")
    return items[seed % len(items)]


@way("smoothing-up-to-down", PRODUCTS)
def _smoothed_gate(side: Side, seed: int) -> Side:
    mlp, name = one(_gated(side), seed)
    s = factor("up", mlp.up_proj.weight.shape[0])
    scale_rows(mlp.up_proj, 1 / s)
    scale_columns(mlp.down_proj, s)
    side.touched |= {f"{name}.up_proj", f"{name}.down_proj", name}
    return side


@way("smoothing-value-to-output", PRODUCTS)
def _smoothed_value(side: Side, seed: int) -> Side:
    attention, name = one(_attentions(side), seed)
    v, o = attention.v_proj, output_of(attention)
    size = heads_of(side, attention)
    groups = o.weight.shape[1] // v.weight.shape[0]
    s = factor("value", v.weight.shape[0])
    scale_rows(v, 1 / s)
    scale_columns(o, s.view(-1, size).repeat_interleave(groups, 0).flatten())
    side.touched |= {name, f"{name}.v_proj", name_of(side, o)}
    return side


def heads_of(side: Side, attention: Any) -> int:
    """Width of one head."""
    size = getattr(attention, "head_dim", getattr(attention, "size", 0))
    if not size:
        raise NotHere("no width of heads")
    return int(size)


def name_of(side: Side, module: nn.Module) -> str:
    """The module's name."""
    return next(n for n, m in side.model.named_modules() if m is module)


@way("rotated-values", PRODUCTS)
def _rotated_value(side: Side, seed: int) -> Side:
    """An orthogonal matrix for the values of each head, and its transpose before the output."""
    attention, name = one(_attentions(side), seed)
    v, o, size = attention.v_proj, output_of(attention), heads_of(side, attention)
    r = rotation(normal("rotation", size, size))
    with torch.no_grad():
        v.weight.copy_((r @ v.weight.view(-1, size, v.in_features)).reshape(v.weight.shape))
        if v.bias is not None:
            v.bias.copy_((v.bias.view(-1, size) @ r.T).flatten())
        o.weight.copy_((o.weight.view(o.out_features, -1, size) @ r.T).reshape(o.weight.shape))
    side.touched |= {name, f"{name}.v_proj", name_of(side, o)}
    return side


@way("scale-between-query-and-key", PRODUCTS)
def _query_to_key(side: Side, seed: int) -> Side:
    attention, name = one(_attentions(side), seed)
    scale_rows(attention.q_proj, torch.full((attention.q_proj.out_features,), 1.7))
    scale_rows(attention.k_proj, torch.full((attention.k_proj.out_features,), 1 / 1.7))
    side.touched |= {name, f"{name}.q_proj", f"{name}.k_proj"}
    return side


@way("power-of-two-between-query-and-key")
def _query_to_key_two(side: Side, seed: int) -> Side:
    attention, name = one(_attentions(side), seed)
    scale_rows(attention.q_proj, torch.full((attention.q_proj.out_features,), 4.0))
    scale_rows(attention.k_proj, torch.full((attention.k_proj.out_features,), 0.25))
    side.touched |= {name, f"{name}.q_proj", f"{name}.k_proj"}
    return side


@way("scale-folded-into-query", PRODUCTS)
def _folded_scale(side: Side, seed: int) -> Side:
    """The factor of the scores goes into the weights of the query."""
    attention, name = one(_attentions(side), seed)
    if not isinstance(getattr(attention, "scaling", None), float):
        raise NotHere("no factor of its own")
    scale_rows(attention.q_proj, torch.full((attention.q_proj.out_features,), attention.scaling))
    attention.scaling = 1.0
    side.touched |= {name, f"{name}.q_proj"}
    return side


@way("neurons-in-another-order")
def _neurons(side: Side, seed: int) -> Side:
    acts = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU)
    gated = _gated(side)
    if gated:
        mlp, name = one(gated, seed)
        order = torch.randperm(mlp.up_proj.out_features, generator=torch.Generator().manual_seed(1))
        rows, last = (mlp.gate_proj, mlp.up_proj), mlp.down_proj
        side.touched |= {name, *(f"{name}.{k}_proj" for k in ("gate", "up", "down"))}
    else:
        places = _pairs(side, acts)
        places += [(a, "", b) for a, b in _functional(side)]
        if not places:
            raise NotHere("no network of two layers")
        first, _, second = places[seed % len(places)]
        rows, last = (side.only(first),), side.only(second)  # type: ignore[assignment]
        order = torch.randperm(rows[0].out_features, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
        side.touched |= {first, second}
    with torch.no_grad():
        for layer in rows:
            layer.weight.copy_(layer.weight[order])
            if layer.bias is not None:
                layer.bias.copy_(layer.bias[order])
        last.weight.copy_(last.weight[:, order])
    return side


def _functional(side: Side) -> list[tuple[str, str]]:
    """Layers fc1 and fc2 with an activation between."""
    out = []
    for name, module in side.model.named_modules():
        for a, b in (("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"), ("linear1", "linear2")):
            if all(type(getattr(module, k, None)) is nn.Linear for k in (a, b)):
                out.append((f"{name}.{a}".strip("."), f"{name}.{b}".strip(".")))
    return out


@way("heads-in-another-order")
def _heads(side: Side, seed: int) -> Side:
    attention, name = one(_attentions(side), seed)
    size, o = heads_of(side, attention), output_of(attention)
    groups = attention.k_proj.out_features // size
    order = torch.arange(groups).roll(1)
    if groups < 2:
        raise NotHere("one head")
    with torch.no_grad():
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            layer.weight.copy_(
                layer.weight.view(groups, -1, layer.in_features)[order].reshape(layer.weight.shape)
            )
            if layer.bias is not None:
                layer.bias.copy_(layer.bias.view(groups, -1)[order].flatten())
        o.weight.copy_(o.weight.view(o.out_features, groups, -1)[:, order].reshape(o.weight.shape))
    side.touched |= {name, name_of(side, o), *(f"{name}.{k}_proj" for k in "qkv")}
    return side


@way("relu-scaled", PRODUCTS)
def _relu(side: Side, seed: int) -> Side:
    """A positive factor per channel passes a ReLU."""
    places = _pairs(side, (nn.ReLU, nn.LeakyReLU))
    if not places:
        raise NotHere("no ReLU between linear layers")
    a, _, b = places[seed % len(places)]
    s = factor("relu", side.only(a).out_features)  # type: ignore[arg-type]
    scale_rows(side.only(a), s)
    scale_columns(side.only(b), 1 / s)
    side.touched |= {a, b}
    return side


@way("experts-in-another-order")
def _expert_order(side: Side, seed: int) -> Side:
    places = []
    for name, module in side.model.named_modules():
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        parent = side.model.get_submodule(name.rpartition(".")[0]) if name else None
        router = getattr(parent, "gate", getattr(parent, "router", None))
        if stacked and name.endswith("experts") and router is not None:
            places.append((module, router, name))
    if not places:
        raise NotHere("no stacked experts")
    experts, router, name = places[seed % len(places)]
    weight = next(p for p in router.parameters() if p.dim() == 2)
    order = torch.arange(weight.shape[0]).roll(2)
    with torch.no_grad():
        for parameter in [*experts.parameters(recurse=False), *router.parameters()]:
            if parameter.shape[0] != len(order):
                raise NotHere("other parameters of the router")
            parameter.copy_(parameter[order])
    for buffer in router.buffers():
        if buffer.shape and buffer.shape[0] == len(order):
            buffer.copy_(buffer[order])
    parent_name = name.rpartition(".")[0]
    side.touched |= {name, parent_name, name_of(side, router)}
    return side


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, as peft builds it."""

    def __init__(self, base: nn.Linear, name: str, rank: int = 4, dora: bool = False) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.dora = base, 0.5, dora
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            self.lora_A.weight.copy_(
                normal(f"{name} A", *self.lora_A.weight.shape) / base.in_features**0.5
            )
            self.lora_B.weight.copy_(normal(f"{name} B", *self.lora_B.weight.shape))
        if dora:
            size = base.weight.detach().norm(dim=1) * (
                1 + 0.1 * normal(f"{name} m", base.out_features)
            )
            self.magnitude = nn.Parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        if not self.dora:
            return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling
        change = self.lora_B.weight @ self.lora_A.weight * self.scaling
        size = self.magnitude / (self.base_layer.weight + change).norm(dim=1)
        base = F.linear(x, self.base_layer.weight)
        out = (base + self.lora_B(self.lora_A(x)) * self.scaling) * size
        return out if self.base_layer.bias is None else out + self.base_layer.bias

    def merged(self) -> nn.Linear:
        """One layer that computes the same."""
        base = self.base_layer
        out = nn.Linear(base.in_features, base.out_features, base.bias is not None)
        with torch.no_grad():
            weight = base.weight + self.lora_B.weight @ self.lora_A.weight * self.scaling
            if self.dora:
                weight = weight * (self.magnitude / weight.norm(dim=1))[:, None]
            out.weight.copy_(weight)
            if base.bias is not None:
                out.bias.copy_(base.bias)
        return out


def _adapters(side: Side, seed: int, dora: bool) -> tuple[Side, Side]:
    names = linears(side)
    if not names:
        raise NotHere("no linear layer")
    merged = side.copied()
    for name in [n for i, n in enumerate(names) if i % 3 == seed % 3] or names[:1]:
        adapted = Adapted(side.only(name), name, dora=dora)  # type: ignore[arg-type]
        replace(side.model, name, adapted)
        replace(merged.model, name, adapted.merged())
        merged.touched.add(name)
    return side, merged


@way("adapter-merged", PRODUCTS)
def _lora(side: Side, seed: int) -> tuple[Side, Side]:
    return _adapters(side, seed, dora=False)


@way("dora-merged", PRODUCTS)
def _dora(side: Side, seed: int) -> tuple[Side, Side]:
    return _adapters(side, seed, dora=True)


@way("weight-norm-removed", PRODUCTS)
def _weight_norm(side: Side, seed: int) -> tuple[Side, Side]:
    name = pick(named(side, nn.Linear, nn.Conv1d, nn.Conv2d), seed)
    other = side.copied()
    for own in (side, other):  # a copy would share its class, which the removal changes
        torch.nn.utils.parametrizations.weight_norm(own.only(name))
    torch.nn.utils.parametrize.remove_parametrizations(other.only(name), "weight")
    other.touched.add(name)
    return side, other


@way("batch-norm-folded", PRODUCTS)
def _batch_norm(side: Side, seed: int) -> Side:
    links = {
        n: o
        for n, o in readers(side).items()
        if type(side.only(n)) in (nn.Conv1d, nn.Conv2d)
        and len(o) == 1
        and isinstance(side.only(o[0]), (nn.BatchNorm1d, nn.BatchNorm2d))
    }
    if not links:
        raise NotHere("no batch norm behind a convolution")
    for name, (norm,) in links.items():
        if type(side.only(name)).__name__ not in ("Conv1d", "Conv2d"):
            continue
        fused = nn.utils.fusion.fuse_conv_bn_eval(side.only(name), side.only(norm))
        replace(side.model, name, fused)
        replace(side.model, norm, nn.Identity())
        side.touched |= {name, norm}
    return side


@way("batch-norm-folded-in-place", PRODUCTS)
def _batch_norm_kept(side: Side, seed: int) -> Side:
    """The norm stays and does nothing: mean 0, variance 1, weight 1, bias 0."""
    names = named(side, nn.BatchNorm2d)
    links = {
        n: o[0]
        for n, o in readers(side).items()
        if type(side.only(n)) is nn.Conv2d and len(o) == 1 and o[0] in names
    }
    name = pick(list(links), seed)
    norm: Any = side.only(links[name])
    replace(side.model, name, nn.utils.fusion.fuse_conv_bn_eval(side.only(name), norm))
    with torch.no_grad():
        norm.running_mean.zero_()
        norm.running_var.fill_(1 - norm.eps)
        norm.weight.fill_(1)
        norm.bias.zero_()
    side.touched |= {name, links[name]}
    return side


@way("embedding-scale-folded")
def _embedding(side: Side, seed: int) -> Side:
    """A factor that the model's code applies to embeddings goes into the table (a power of two)."""
    name = pick([n for n in named(side, nn.Embedding) if _untied(side, n)], seed)
    layer = side.only(name)
    with torch.no_grad():
        layer.weight.mul_(4)
    become(layer, lambda self, *a, **k: type(self).__bases__[0].forward(self, *a, **k) / 4)
    side.touched.add(name)
    return side


def _untied(side: Side, name: str) -> bool:
    weight = side.only(name).weight
    return sum(p is weight for m in side.model.modules() for p in m.parameters(recurse=False)) == 1


@way("head-untied")
def _untie(side: Side, seed: int) -> Side:
    """The output layer gets a copy of the table of embeddings."""
    for name in named(side, nn.Embedding):
        if not _untied(side, name):
            for module in side.model.modules():
                if isinstance(module, nn.Linear) and module.weight is side.only(name).weight:
                    module.weight = nn.Parameter(module.weight.detach().clone())
                    side.touched.add(name_of(side, module))
                    return side
    raise NotHere("nothing is tied")


class Quantised(nn.Module):
    """A linear layer whose weights are codes with a step per output, or per group of inputs."""

    def __init__(self, layer: nn.Linear, after: bool, group: int = 0) -> None:
        super().__init__()
        w = layer.weight.detach()
        self.after, self.group = after, group
        grouped = w.view(w.shape[0], -1, group or w.shape[1])
        step = (grouped.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-8)
        self.register_buffer("codes", (grouped / step).round().to(torch.int8))
        self.register_buffer("step", step)
        self.bias = layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        codes: Any = self.codes
        step: Any = self.step
        if self.after and not self.group:
            out = F.linear(x, codes[:, 0].to(x.dtype)) * step[:, 0, 0].to(x.dtype)
        elif self.after:
            parts = x.unflatten(-1, (-1, self.group))
            sums = torch.einsum("...gi,ogi->...og", parts, codes.to(x.dtype))
            out = (sums * step[..., 0].to(x.dtype)).sum(-1)
        else:
            out = F.linear(x, (codes.to(x.dtype) * step.to(x.dtype)).flatten(1))
        return out if self.bias is None else out + self.bias


def _quantised(side: Side, seed: int, group: int) -> tuple[Side, Side]:
    names = [n for n in linears(side) if not group or side.only(n).in_features % group == 0]  # type: ignore[operator]
    names = [n for i, n in enumerate(names) if i % 2 == seed % 2]
    if not names:
        raise NotHere("no linear layer")
    other = side.copied()
    for name in names:
        layer: Any = side.only(name)
        replace(side.model, name, Quantised(layer, False, group))
        replace(other.model, name, Quantised(other.only(name), True, group))  # type: ignore[arg-type]
        other.touched.add(name)
    return side, other


@way("codes-scaled-behind")
def _codes(side: Side, seed: int) -> tuple[Side, Side]:
    return _quantised(side, seed, 0)


@way("codes-of-groups-scaled-behind")
def _codes_of_groups(side: Side, seed: int) -> tuple[Side, Side]:
    return _quantised(side, seed, 8)


@way("codes-stored-as-floats", ("float32",))
def _stored(side: Side, seed: int) -> tuple[Side, Side]:
    """Codes against a plain layer with the dequantised weights."""
    names = [n for i, n in enumerate(linears(side)) if i % 2 == seed % 2]
    if not names:
        raise NotHere("no linear layer")
    other = side.copied()
    for name in names:
        layer: Any = side.only(name)
        quantised = Quantised(layer, False)
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        with torch.no_grad():
            plain.weight.copy_((quantised.codes * quantised.step).flatten(1))
            if layer.bias is not None:
                plain.bias.copy_(layer.bias)
        replace(side.model, name, quantised)
        replace(other.model, name, plain)
        other.touched.add(name)
    return side, other


@way("residual-stream-rotated", PRODUCTS)
def _rotated_stream(side: Side, seed: int) -> Side:
    """All that is added to the stream is rotated, and what reads it turns back (QuaRot)."""
    names = dict(side.model.named_modules())
    if getattr(getattr(side.model, "config", None), "model_type", "") not in (
        "llama",
        "mistral",
        "qwen2",
        "arcee",
        "seed_oss",
        "helium",
        "smollm3",
    ):
        raise NotHere("not a stream of plain sums")
    if getattr(side.model.config, "tie_word_embeddings", False):
        raise NotHere("tied")
    for i in range(len(_fed(side))):
        side = _norm_folded(side, i)  # type: ignore[assignment]
    width = side.model.config.hidden_size
    r = rotation(normal("stream", width, width))
    with torch.no_grad():
        for name, module in names.items():
            last = name.rpartition(".")[2]
            if last == "embed_tokens":
                module.weight.copy_(module.weight @ r)
            elif last in ("o_proj", "down_proj"):
                module.weight.copy_(r.T @ module.weight)
                if module.bias is not None:
                    module.bias.copy_(module.bias @ r)
            elif isinstance(module, nn.Linear):
                module.weight.copy_(module.weight @ r)
    side.touched |= set(names)
    return side


def interleaved_rotation(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Rotary positions of neighbouring channels."""
    half = cos.shape[-1] // 2
    c, s = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)

    return rotated(q), rotated(k)


@way("rotary-interleaved")
def _interleaved(side: Side, seed: int) -> Side:
    """Rotary positions of neighbours, with the channels of queries and keys in that order."""
    places = [(m, n) for m, n in _attentions(side) if "transformers" in side.traits]
    attention, name = one(places, seed)
    size = heads_of(side, attention)
    order = torch.stack([torch.arange(size // 2), torch.arange(size // 2, size)], 1).flatten()
    with torch.no_grad():
        for layer in (attention.q_proj, attention.k_proj):
            rows = layer.weight.view(-1, size, layer.in_features)[:, order]
            layer.weight.copy_(rows.reshape(layer.weight.shape))
            if layer.bias is not None:
                layer.bias.copy_(layer.bias.view(-1, size)[:, order].flatten())
    edit(attention, (r"apply_rotary_pos_emb\(", "rotated("), rotated=interleaved_rotation)
    side.touched |= {name, f"{name}.q_proj", f"{name}.k_proj"}
    return side


class DynamicCodes(nn.Module):
    """A linear layer of int8 codes whose inputs are made codes row by row."""

    def __init__(self, layer: nn.Linear, integer: bool) -> None:
        super().__init__()
        self.integer, self.bias = integer, layer.bias
        w = layer.weight.detach()
        step = (w.abs().amax(-1) / 127).clamp(min=1e-8)
        self.register_buffer("codes", (w / step[:, None]).round().to(torch.int8))
        self.register_buffer("step", step)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        codes: Any = self.codes
        step = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-8)
        rows = (x / step).round()
        if self.integer:
            out = (rows.to(torch.int32) @ codes.to(torch.int32).T).to(x.dtype) * step * self.step
        else:
            out = F.linear(rows * step, codes.to(x.dtype) * self.step[:, None])  # type: ignore[index]
        return out if self.bias is None else out + self.bias


@way("codes-multiplied-as-integers", ("float32",))
def _integers(side: Side, seed: int) -> tuple[Side, Side]:
    names = [n for i, n in enumerate(linears(side)) if i % 2 == seed % 2]
    if not names:
        raise NotHere("no linear layer")
    other = side.copied()
    for name in names:
        replace(side.model, name, DynamicCodes(side.only(name), False))  # type: ignore[arg-type]
        replace(other.model, name, DynamicCodes(other.only(name), True))  # type: ignore[arg-type]
        other.touched.add(name)
    return side, other
