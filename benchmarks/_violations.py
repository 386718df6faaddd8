"""Violations planted in models of real families: what a port, a kernel or an engine gets wrong.

Each is a function that changes a model in place, or hands out a context around its runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Planted(NamedTuple):
    """A violation. family: (kind, name) of `_families`. plant(model): puts it in. property:
    violated. scope: part of the name of the module that must be named, "" for any. inputs: how
    those of the family are changed. causal: declared.
    """

    name: str
    family: tuple[str, str]
    plant: Callable[[Any], Any]
    property: str
    scope: str
    inputs: Callable[[dict[str, Any]], dict[str, Any]] = lambda inputs: inputs
    causal: bool | None = None


# ---- masks


def masks(change: Callable[[Any], Any], only: str = "") -> Callable[[Any], Any]:
    """Every attention (or those whose name contains `only`) gets another mask."""

    def plant(model: Any) -> None:
        model.set_attn_implementation("eager")
        for name, module in model.named_modules():
            if name.endswith(("self_attn", "attn", "self", "SelfAttention")) and only in name:
                module.register_forward_pre_hook(_masked(change), with_kwargs=True)

    return plant


def _masked(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        name = next((n for n in ("attention_mask", "mask") if n in kwargs), "")
        mask = kwargs.get(name)
        if mask is not None and mask.ndim == 4:
            kwargs = {**kwargs, name: change(mask.clone())}
        else:
            args = tuple(
                change(a.clone())
                if isinstance(a, torch.Tensor) and a.ndim == 4 and a.shape[1] == 1
                else a
                for a in args
            )
        return args, kwargs

    return hook


def bidirectional(mask: Any) -> Any:
    return torch.zeros_like(mask)


def ahead(count: int) -> Callable[[Any], Any]:
    def change(mask: Any) -> Any:
        q, k = mask.shape[-2:]
        row, column = torch.arange(q)[:, None] + k - q, torch.arange(k)
        mask[..., (column > row) & (column <= row + count)] = 0
        return mask

    return change


def at_boundary(mask: Any) -> Any:
    q, k = mask.shape[-2:]
    for row in range(3, min(q, k - 1), 4):
        mask[..., row, row + 1] = 0
    return mask


def soft(mask: Any) -> Any:
    """Masked by a small number in the place of minus infinity."""
    return mask.clamp(min=-8.0)


def pads_seen(mask: Any) -> Any:
    q, k = mask.shape[-2:]
    causal = torch.ones(q, k, dtype=torch.bool).tril(k - q)
    mask[..., causal] = 0
    return mask


def pads_seen_both_ways(mask: Any) -> Any:
    return torch.zeros_like(mask)


def documents_joined(mask: Any) -> Any:
    return pads_seen(mask)


def document_sees_one_back(mask: Any) -> Any:
    """The first token of a document sees the last of the one before."""
    q, k = mask.shape[-2:]
    rows = torch.arange(1, min(q, k))
    mask[..., rows, rows - 1] = 0
    return mask


def first_token_seen(mask: Any) -> Any:
    """The first token of the row is a sink that every document sees."""
    mask[..., 0] = 0
    return mask


def documents_one_late(mask: Any) -> Any:
    """A document's mask begins one token after it."""
    least = mask.min()
    q, k = mask.shape[-2:]
    moved = mask.roll(1, -2)
    moved[..., 0, :] = mask[..., 0, :]
    moved[..., torch.arange(k)[None] > torch.arange(q)[:, None]] = least
    diagonal = torch.arange(min(q, k))
    moved[..., diagonal, diagonal] = 0
    return moved


# ---- code in a module


def after(scope: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What the module `scope` returns is changed, in its own code."""

    def plant(model: Any) -> None:
        module = model.get_submodule(scope)
        original = type(module).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(self, *args, **kwargs)
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})

    return plant


def before(scope: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What the module `scope` is given is changed, in its own code."""

    def plant(model: Any) -> None:
        module = model.get_submodule(scope)
        original = type(module).forward

        def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, change(x), *args, **kwargs)

        module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})

    return plant


def over_time(x: Any) -> Any:
    return x - 0.1 * x.mean(1, keepdim=True)


def gated_by_maximum(x: Any) -> Any:
    return x * torch.sigmoid(x.amax(1, keepdim=True))


def per_tensor_codes(x: Any) -> Any:
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def next_row(x: Any) -> Any:
    return x + 1e-3 * x.roll(1, 0)


def minus_batch_mean(x: Any) -> Any:
    return x - x.mean(0, keepdim=True) * (x.shape[0] > 1)


def by_place(x: Any) -> Any:
    return x * (1 + 1e-3 * torch.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1)))


def only_of_many(x: Any) -> Any:
    return x if x.shape[0] < 8 else x * 1.001


def not_written(x: Any) -> Any:
    out = torch.empty_like(x)
    out[:, :-1] = x[:, :-1]
    return x + 0.01 * out


def one_back(x: Any) -> Any:
    return x + 0.1 * x.roll(1, 1)


def mean_so_far(x: Any) -> Any:
    count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    return x - 0.1 * x.cumsum(1) / count


def last_head(x: Any) -> Any:
    """Of four heads."""
    return torch.cat([x[..., : -x.shape[-1] // 4], x[..., -x.shape[-1] // 4 :] * 1.01], -1)


def second_head_late(x: Any) -> Any:
    """The second of four heads reads the position before."""
    size = x.shape[-1] // 4
    out = x.clone()
    out[:, 1:, size : 2 * size] = x[:, :-1, size : 2 * size]
    return out


def tail_of_channels(x: Any) -> Any:
    """What a kernel's last tile leaves out."""
    out = x.clone()
    out[..., -3:] = 0
    return out


def tail_of_activation(x: Any) -> Any:
    """The last tile takes a nearby activation."""
    out = x.clone()
    out[..., -5:] = x[..., -5:] * (1 + 1e-4 * x[..., -5:].tanh())
    return out


def first_channel_of_images(x: Any) -> Any:
    out = x.clone()
    out[:, 0] *= 1.01
    return out


def channel_beside(x: Any) -> Any:
    """Each channel reads the next one too."""
    return x + 0.01 * x.roll(1, -1)


def experts_chosen(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """change: of (weights, numbers of experts) of the first router."""

    def plant(model: Any) -> None:
        gate = model.get_submodule("model.layers.0.mlp.gate")
        original = type(gate).forward

        def forward(self: Any, *args: Any) -> Any:
            scores, weights, experts = original(self, *args)
            return scores, *change(weights, experts)

        gate.__class__ = type(type(gate).__name__, (type(gate),), {"forward": forward})

    return plant


def last_expert_never(weights: Any, experts: Any) -> Any:
    return weights, experts.clamp(max=2)


def first_expert_full(weights: Any, experts: Any) -> Any:
    taken = (experts == 0).long().cumsum(0) <= 4
    return weights * (taken | (experts != 0)), experts


def positions_by_index(scope: str) -> Callable[[Any], Any]:
    """A table of positions is read by the place in the row."""

    def plant(model: Any) -> None:
        table = model.get_submodule(scope)
        original = type(table).forward

        def forward(self: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
            rows = torch.arange(positions.shape[-1]).expand_as(positions)
            return original(self, rows, *args, **kwargs)

        table.__class__ = type(type(table).__name__, (type(table),), {"forward": forward})

    return plant


def dropped(x: Any) -> Any:
    return torch.nn.functional.dropout(x, 0.1, training=True)


def shared_buffer(model: Any) -> None:
    room = torch.zeros(4096, 64)

    def leak(x: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        room[:1, : x.shape[-1]] = flat[-1:]  # the last row of the batch is what is left there
        return x + 0.01 * room[:1, : x.shape[-1]]

    after("model.layers.0.mlp", leak)(model)


def left_from_before(model: Any) -> None:
    mlp = model.get_submodule("model.layers.0.mlp")
    mlp.register_buffer("left", torch.zeros(64), persistent=False)

    def leak(x: Any) -> Any:
        out = x + 0.01 * mlp.left[: x.shape[-1]]
        mlp.left[: x.shape[-1]] = x[0, 0]
        return out

    after("model.layers.0.mlp", leak)(model)


def running_scale(model: Any) -> None:
    norm = model.get_submodule("model.norm")
    norm.seen = 0

    def scaled(x: Any) -> Any:
        norm.seen += 1
        return x * (1 + 1e-3 / norm.seen)

    after("model.norm", scaled)(model)


def capacity(model: Any) -> None:
    """A router that takes only so many tokens of the whole batch for an expert."""

    gate = model.get_submodule("model.layers.0.mlp.gate")
    original = gate.forward

    def forward(*args: Any) -> Any:
        scores, weights, experts = original(*args)
        best = experts[:, 0]
        place = torch.stack([(best == e).long().cumsum(0) for e in range(scores.shape[-1])], -1)
        taken = place.gather(-1, best[:, None]) <= 8
        return scores, weights * taken, experts

    gate.forward = forward


def training_norms(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.train()


def one_dropout_on(model: Any) -> None:
    found = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    found[2].p = 0.1
    found[2].train()


def all_training(model: Any) -> None:
    model.train()


def counted_over_padding(model: Any) -> None:
    """Positions of OPT counted from the first column."""
    embed = model.get_submodule("model.decoder.embed_positions")
    original = embed.forward

    def forward(attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        positions = torch.ones_like(attention_mask).cumsum(1) - 1
        past = args[0] if args else kwargs.get("past_key_values_length", 0)
        return original(attention_mask, past, position_ids=positions[:, past:])

    embed.forward = forward


def nothing(model: Any) -> None:
    """The program itself does it."""


# ---- caches


@contextlib.contextmanager
def _cache_update(change: Callable[..., Any]) -> Iterator[None]:
    from transformers.cache_utils import DynamicLayer

    original = DynamicLayer.update

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        old = 0 if self.keys is None or self.keys.ndim < 4 else self.keys.shape[-2]
        all_keys, all_values = original(self, keys, values, *args, **kwargs)
        return change(all_keys, all_values, old)

    DynamicLayer.update = update
    try:
        yield
    finally:
        DynamicLayer.update = original


def one_late(model: Any) -> Any:
    def change(keys: Any, values: Any, old: int) -> Any:
        if old:
            keys, values = keys.clone(), values.clone()
            keys[..., old, :], values[..., old, :] = keys[..., old - 1, :], values[..., old - 1, :]
        return keys, values

    return _cache_update(change)


def values_of_first(model: Any) -> Any:
    def change(keys: Any, values: Any, old: int) -> Any:
        if old:
            values = values.clone()
            values[..., 0, :] = values[..., 1, :]
        return keys, values

    return _cache_update(change)


def rotated_one_off(model: Any) -> None:
    """Positions after the first piece are one too small."""
    rotary = model.get_submodule("model.rotary_emb")
    original = rotary.forward

    def forward(x: Any, position_ids: Any) -> Any:
        return original(x, position_ids - (position_ids[:, :1] > 0).long())

    rotary.forward = forward


def one_ahead(x: Any) -> Any:
    return x + 0.1 * x.roll(-1, 1)


def left_padded(inputs: dict[str, Any]) -> dict[str, Any]:
    mask = inputs["attention_mask"].clone()
    mask[:, :4] = 0
    ids = inputs["input_ids"].clone()
    ids[:, :4] = 0
    return {**inputs, "input_ids": ids, "attention_mask": mask}


def packed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Two documents in each row, told by their positions."""
    ids = inputs["input_ids"]
    positions = torch.cat([torch.arange(5), torch.arange(ids.shape[1] - 5)])
    return {"input_ids": ids, "position_ids": positions.expand_as(ids), "use_cache": False}


def packed_with_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**packed(inputs), "attention_mask": inputs["attention_mask"]}


def packed_with_cache(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**packed(inputs), "use_cache": True}


LLAMA, GPT2, OPT = ("decoder", "llama"), ("decoder", "gpt2"), ("decoder", "opt")
QWEN, MIXTRAL, MAMBA = ("decoder", "qwen2"), ("decoder", "mixtral"), ("decoder", "mamba")
BERT, T5, RESNET = ("encoder", "bert"), ("encoder-decoder", "t5"), ("image", "resnet")
VIT, BART, MISTRAL = ("image", "vit"), ("encoder-decoder", "bart"), ("decoder", "mistral")
MLP, ATTENTION = "model.layers.1.mlp", "self_attn"

PLANTED = [
    Planted("mask of both ways", LLAMA, masks(bidirectional), "causality", ATTENTION),
    Planted("mask of both ways in one layer", QWEN, masks(bidirectional, "layers.1"), "causality",
            "layers.1.self_attn"),
    Planted("mask off by one", GPT2, masks(ahead(1)), "causality", "attn"),
    Planted("window that looks three ahead", MISTRAL, masks(ahead(3)), "causality", ATTENTION),
    Planted("mask off by one at borders of blocks", LLAMA, masks(at_boundary), "causality",
            ATTENTION),
    Planted("mask of -8 in the place of -inf", QWEN, masks(soft), "causality", ATTENTION),
    Planted("decoder's mask of both ways", BART, masks(bidirectional, "decoder"), "causality",
            "decoder"),
    Planted("mean over time taken off", LLAMA, after(MLP, over_time), "causality", MLP),
    Planted("gate by the maximum over time", GPT2, after("transformer.h.0.mlp", gated_by_maximum),
            "causality", "h.0.mlp"),
    Planted("mixer that sees one ahead", MAMBA, after("backbone.layers.0.mixer", one_ahead),
            "causality", "layers.0"),
    Planted("pads seen", BERT, masks(pads_seen_both_ways), "padding", "self"),
    Planted("pads seen in one layer", BERT, masks(pads_seen_both_ways, "layer.1"), "padding",
            "layer.1"),
    Planted("pads on the left seen", LLAMA, masks(pads_seen), "padding", ATTENTION),
    Planted("pads masked by -8", BERT, masks(soft), "padding", "self"),
    Planted("encoder's pads seen", T5, masks(pads_seen_both_ways, "encoder"), "padding", "encoder"),
    Planted("mean over padding too", BERT, after("bert.encoder.layer.0.output", over_time),
            "padding", "layer.0.output"),
    Planted("positions counted over padding, by the program", GPT2, nothing, "padding", "wpe",
            left_padded),
    Planted("positions counted over padding, by the model", OPT, counted_over_padding, "padding",
            "embed_positions", left_padded),
    Planted("statistics of the batch in evaluation", RESNET, training_norms, "batch",
            "normalization"),
    Planted("codes of 8 bits with one scale a tensor", LLAMA,
            before("model.layers.0.mlp.down_proj", per_tensor_codes), "batch", "mlp"),
    Planted("a thousandth of the row above", VIT, after("vit.layers.0", next_row), "batch",
            "layers.0"),
    Planted("mean of the batch taken off", T5, after("encoder.block.0.layer.1", minus_batch_mean),
            "batch", "encoder.block.0"),
    Planted("what a shared buffer holds of another row", LLAMA, shared_buffer, "batch",
            "layers.0.mlp"),
    Planted("a router with room for eight tokens of a batch", MIXTRAL, capacity, "batch",
            "layers.0"),
    Planted("a scale by the place in the batch", BERT, after("bert.encoder.layer.0", by_place),
            "batch", "layer.0"),
    Planted("another scale from eight rows on", GPT2, after("transformer.h.1", only_of_many),
            "batch", "h.1"),
    Planted("cache written one late", LLAMA, one_late, "chunking", ATTENTION),
    Planted("first value of the cache overwritten", QWEN, values_of_first, "chunking", ATTENTION),
    Planted("rotation one off after the first piece", LLAMA, rotated_one_off, "chunking", ""),
    Planted("memory that nothing wrote", LLAMA, after(MLP, not_written), "repeat", MLP),
    Planted("memory that nothing wrote, in images", VIT, after("vit.layers.0", not_written),
            "repeat", "layers.0"),
    Planted("one dropout on", BERT, one_dropout_on, "repeat", ""),
    Planted("dropout called with training=True", GPT2, after("transformer.h.1.mlp", dropped),
            "repeat", "h.1.mlp"),
    Planted("model in training mode", BERT, all_training, "repeat", ""),
    Planted("what the call before left in a buffer", LLAMA, left_from_before, "repeat",
            "layers.0.mlp"),
    Planted("a scale that moves from call to call", QWEN, running_scale, "repeat", "norm"),
    Planted("documents joined in one layer", LLAMA, masks(documents_joined, "layers.1"), "packing",
            "layers.1.self_attn"),
    Planted("a document sees one token of the one before", QWEN, masks(document_sees_one_back),
            "packing", ATTENTION),
    Planted("the row's first token is seen by all documents", MISTRAL, masks(first_token_seen),
            "packing", ATTENTION),
    Planted("mask of documents one late", GPT2, masks(documents_one_late), "packing", "attn"),
    Planted("documents masked by -8", LLAMA, masks(soft), "packing", ATTENTION),
    Planted("positions by the place in the row", GPT2, positions_by_index("transformer.wpe"),
            "packing", "wpe"),
    Planted("a token shift over the border, in a packed call", LLAMA, after(MLP, one_back),
            "packing", MLP, packed),
    Planted("mean so far over documents, in a packed call", QWEN, after(MLP, mean_so_far),
            "packing", MLP, packed),
    Planted("a packed call with a mask of ones", LLAMA, nothing, "packing", ATTENTION,
            packed_with_mask),
    Planted("a packed call that keeps a cache", QWEN, nothing, "packing", ATTENTION,
            packed_with_cache),
    Planted("last head scaled", LLAMA, before("model.layers.1.self_attn.o_proj", last_head),
            "equivariance", "layers.1.self_attn"),
    Planted("second head one position late", GPT2, before("transformer.h.0.attn.c_proj",
            second_head_late), "equivariance", "h.0.attn"),
    Planted("last head's values scaled", BERT,
            after("bert.encoder.layer.0.attention.self.value", last_head), "equivariance",
            "layer.0.attention.self"),
    Planted("tail of hidden channels left out", QWEN, before(f"{MLP}.down_proj", tail_of_channels),
            "equivariance", MLP),
    Planted("tail of an activation computed otherwise", BERT,
            after("bert.encoder.layer.1.intermediate.intermediate_act_fn", tail_of_activation),
            "equivariance", "layer.1.intermediate"),
    Planted("each channel reads the next", LLAMA, before(f"{MLP}.down_proj", channel_beside),
            "equivariance", MLP),
    Planted("the last expert is never chosen", MIXTRAL, experts_chosen(last_expert_never),
            "equivariance", "layers.0.mlp"),
    Planted("the first expert has room for four tokens", MIXTRAL, experts_chosen(first_expert_full),
            "equivariance", "layers.0.mlp"),
    Planted("first channel behind a norm scaled, in images", RESNET,
            after("resnet.encoder.stages.1.layers.0.layer.0", first_channel_of_images),
            "equivariance", "stages.1.layers.0.layer.0"),
    Planted("last head of an image's encoder scaled", VIT,
            before("vit.layers.0.attention.o_proj", last_head), "equivariance", "layers.0"),
]  # fmt: skip

HELD_OUT = [
    Planted("mask off by one in one layer", ("decoder", "gemma2"), masks(ahead(1), "layers.1"),
            "causality", "layers.1.self_attn"),
    Planted("mask of both ways in the first layer", ("decoder", "phi"),
            masks(bidirectional, "layers.0"), "causality", "layers.0.self_attn"),
    Planted("mean over time in a mixer", MAMBA, after("backbone.layers.1.mixer", over_time),
            "causality", "layers.1.mixer"),
    Planted("pads seen in the first layer", ("encoder", "electra"),
            masks(pads_seen_both_ways, "layer.0"), "padding", "layer.0"),
    Planted("gate by the maximum over padding", ("encoder", "distilbert"),
            after("distilbert.transformer.layer.0.ffn", gated_by_maximum), "padding", "layer.0"),
    Planted("a thousandth of the row above, in images", ("image", "convnext"),
            after("convnext.encoder.stages.0", next_row), "batch", "stages.0"),
    Planted("codes with one scale a tensor", ("decoder", "olmo2"),
            before("model.layers.1.mlp.up_proj", per_tensor_codes), "batch", "layers.1.mlp"),
    Planted("mean of the batch taken off an encoder", BART,
            after("model.encoder.layers.0", minus_batch_mean), "batch", "encoder.layers.0"),
    Planted("cache written one late, of another family", ("decoder", "phi"), one_late,
            "chunking", ATTENTION),
    Planted("rotation one off, of another family", ("decoder", "stablelm"), rotated_one_off,
            "chunking", ""),
    Planted("memory that nothing wrote, of another family", OPT,
            after("model.decoder.layers.0", not_written), "repeat", "layers.0"),
    Planted("dropout called with training=True, in images", RESNET,
            after("resnet.encoder.stages.0", dropped), "repeat", "stages.0"),
    Planted("documents joined in a layer with a window", ("decoder", "gemma2"),
            masks(documents_joined, "layers.0"), "packing", "layers.0.self_attn"),
    Planted("a document sees one token of the one before, in one layer", ("decoder", "phi3"),
            masks(document_sees_one_back, "layers.1"), "packing", "layers.1.self_attn"),
    Planted("a block mask that one layer of an encoder does not read", ("encoder", "roberta"),
            masks(pads_seen_both_ways, "layer.0"), "packing", "layer.0"),
    Planted("mask of documents one late, of another family", ("decoder", "qwen3"),
            masks(documents_one_late), "packing", ATTENTION),
    Planted("gate by the maximum over the row, in a packed call", ("decoder", "olmo2"),
            after("model.layers.0.mlp", gated_by_maximum), "packing", "layers.0.mlp", packed),
    Planted("tail of hidden channels left out, of another family", OPT,
            before("model.decoder.layers.0.fc2", tail_of_channels), "equivariance", "layers.0"),
    Planted("last head scaled, of an encoder and decoder", BART,
            before("model.decoder.layers.1.self_attn.out_proj", last_head), "equivariance",
            "decoder.layers.1.self_attn"),
    Planted("second head one position late, of another family", ("encoder", "electra"),
            after("electra.encoder.layer.0.attention.self", second_head_late), "equivariance",
            "layer.0.attention"),
    Planted("the last expert is never chosen, of another family", ("decoder", "olmoe"),
            experts_chosen(last_expert_never), "equivariance", "layers.0.mlp"),
    Planted("tail of hidden channels left out, in images", ("image", "convnext"),
            before("convnext.encoder.stages.1.layers.0.pwconv2", tail_of_channels), "equivariance",
            "stages.1.layers.0"),
    Planted("queries of the last head scaled, of the first layer", ("decoder", "gpt_neox"),
            before("gpt_neox.layers.0.attention.dense", last_head), "equivariance",
            "layers.0.attention"),
]  # fmt: skip
"""Planted once all rules were set; nothing was changed for them."""


def found(planted: Planted, result: Any) -> tuple[bool, bool]:
    """(is the property violated, is the module named)."""
    answer = result[planted.property]
    named = [v.first.scope for v in answer.variants if v.held == "violated" and v.first]
    return answer.held == "violated", bool(named) and planted.scope in named[0]
