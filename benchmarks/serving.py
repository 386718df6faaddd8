"""Faults planted into engines, and engines that are right: what `whence.serve_check` says of each.

    python benchmarks/serving.py            # those that the limits were set by
    python benchmarks/serving.py --held     # those that set nothing
    python benchmarks/serving.py --only stale_block
    python benchmarks/serving.py --batch    # operators that depend on neighbours in a batch

Engines are transformers' continuous batching and `generate` with several caches, on toys of three
layers. A fault counts as right where the stage, the phase, the layer, and heads or positions where
it has them, are the planted ones. A case is held by its name, drawn before any was run.
"""

import argparse
import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
import xxhash
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
)
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

import whence

TOKENS = 12
PROMPTS = [
    [5, 7, 9, 11, 13],
    list(range(20, 29)),
    [40, 41, 42],
    list(range(60, 91)),
]
SHARED = [[*range(100, 140), *tail] for tail in ([1, 2, 3], [4, 5], [6], [7, 8, 9, 10])]
WIDTHS = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
COMMON = {
    **WIDTHS,
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def model(kind="Llama", dtype=torch.float32, **settings):
    """A toy of a family of models, always with the same weights."""
    torch.manual_seed(0)
    if kind == "Mixtral":
        settings = {"num_local_experts": 4, "num_experts_per_tok": 2, **settings}
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **settings})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(dtype)


def tied_experts(dtype=torch.float32):
    """A Mixtral three of whose four experts have almost the same score for any token."""
    net = model("Mixtral")
    with torch.no_grad():
        for layer in net.model.layers:
            weight = layer.mlp.gate.weight
            weight[1], weight[3] = weight[0] * 1.0001, weight[0] * 0.9999
            weight[2] *= 3
    return net.to(dtype)


class Batching:
    """transformers' continuous batching."""

    def __init__(self, net, plant=contextlib.nullcontext, processors=None, **settings):
        self.model, self.plant = net, plant
        self.settings = {"num_blocks": 256, "max_batch_tokens": 32, "page_size": 16, **settings}

    def generate(self, prompts, count):
        config = transformers.GenerationConfig(
            max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        with self.plant():
            answers = self.model.generate_batch(
                prompts,
                generation_config=config,
                progress_bar=False,
                continuous_batching_config=ContinuousBatchingConfig(**self.settings),
            )
        by_prompt = {tuple(a.prompt_ids): a for a in answers.values()}
        return [by_prompt[tuple(p)].generated_tokens for p in prompts]


class Plain:
    """`generate`, padded on the left to one batch, or each prompt alone."""

    def __init__(self, net, plant=contextlib.nullcontext, padded=False, **settings):
        self.model, self.plant, self.padded, self.settings = net, plant, padded, settings

    def generate(self, prompts, count):
        batches = [prompts] if self.padded else [[prompt] for prompt in prompts]
        return [answer for batch in batches for answer in self._batch(batch, count)]

    def _batch(self, batch, count):
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        with self.plant():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                **self.settings,
            )
        return out[:, longest:].tolist()


class Reporting(Batching):
    """An engine that reports log-probabilities, made of its logits by `rule`."""

    def __init__(self, net, rule):
        super().__init__(net)
        self.rule = rule

    def generate(self, prompts, count):
        answers = super().generate(prompts, count)
        reported = []
        for prompt, tokens in zip(prompts, answers, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0]
            rows = logits[len(prompt) - 1 : -1]
            logprobs = self.rule(rows)[range(len(tokens)), tokens]
            reported.append((tokens, logprobs.tolist()))
        return reported


# ---- faults


def paged(change: Callable[..., Any]):
    """A plant in the paged cache: change(update, keys, values, layer, read, write)."""
    update = FullAttentionCacheAllocator.update

    def changed(self, keys, values, layer, read, write):
        return change(lambda *a: update(self, *a), keys, values, layer, read, write)

    return lambda: mock.patch.object(FullAttentionCacheAllocator, "update", changed)


def cached(change: Callable[..., Any]):
    """A plant in what a cache of `generate` hands out: change(keys, values, layer)."""
    update = transformers.Cache.update

    def changed(self, keys, values, layer_idx, *args, **kwargs):
        return change(*update(self, keys, values, layer_idx, *args, **kwargs), layer_idx)

    return lambda: mock.patch.object(transformers.Cache, "update", changed)


def on_call(which, change):
    """A plant in the calls of one module: change(output) gives what it returns."""

    def planted(net):
        net.get_submodule(which).register_forward_hook(lambda module, args, out: change(out))
        return net

    return planted


def stale_block(update, keys, values, layer, read, write):
    if layer != 1 or len(write) < 20:
        return update(keys, values, layer, read, write)
    kept = keys.clone()
    kept[-16:] = 0
    out = update(kept, values, layer, read, write)
    return (keys, out[1]) if out[0] is kept else out


def wrong_block(update, keys, values, layer, read, write):
    if layer == 2 and len(read) > 16 and len(write) <= 4:
        read = read.clone()
        read[-17:-1] = read[:16].clone()
    return update(keys, values, layer, read, write)


def read_off_by_one(update, keys, values, layer, read, write):
    if layer == 1 and len(read) and len(write) <= 4:
        read = read.clone()
        read[1:3] = read[0:2].clone()
    return update(keys, values, layer, read, write)


def write_off_by_one(update, keys, values, layer, read, write):
    if layer == 0 and len(write) <= 4:
        write = write - 1
    return update(keys, values, layer, read, write)


def scaled(layer_at, factor, which):
    def change(update, keys, values, layer, read, write):
        out = list(update(keys, values, layer, read, write))
        if layer == layer_at and len(write) <= 4 and len(read):
            out[which] = out[which] * factor
        return tuple(out)

    return change


def head_order(update, keys, values, layer, read, write):
    out = update(keys, values, layer, read, write)
    return (out[0].flip(1), out[1]) if layer == 1 and len(read) and len(write) <= 4 else out


def eviction(update, keys, values, layer, read, write):
    out = update(keys, values, layer, read, write)
    if layer == 2 and len(read) > 70:
        values_out = out[1].clone()
        values_out[:4] = 0
        return out[0], values_out
    return out


def value_for_key(update, keys, values, layer, read, write):
    out = update(keys, values, layer, read, write)
    return (out[1], out[1]) if layer == 0 and len(read) and len(write) <= 4 else out


def narrow_key(update, keys, values, layer, read, write):
    out = update(keys, values, layer, read, write)
    if layer == 1 and len(read) and len(write) <= 4:
        return out[0].to(torch.float8_e4m3fn).to(out[0].dtype), out[1]
    return out


def masked(change):
    """A plant in the mask of the model: change(mask) of (1, 1, tokens, positions)."""
    forward = modeling_llama.LlamaAttention.forward

    def changed(self, *args, **kwargs):
        mask = kwargs.get("attention_mask")
        if mask is not None and self.layer_idx == 1:
            kwargs["attention_mask"] = change(mask.clone())
        return forward(self, *args, **kwargs)

    return lambda: mock.patch.object(modeling_llama.LlamaAttention, "forward", changed)


def short_window(mask):
    """Each token sees the last six positions before it."""
    for row in mask[0, 0]:
        seen = (row if row.dtype == torch.bool else row == 0).nonzero().flatten()
        row[seen[:-6]] = False if row.dtype == torch.bool else torch.finfo(row.dtype).min
    return mask


def neighbours(mask):
    """Each token sees one position of another request."""
    for row in mask[0, 0]:
        seen = (row if row.dtype == torch.bool else row == 0).nonzero().flatten()
        if len(seen) and seen[0] > 0:
            row[seen[0] - 1] = True if row.dtype == torch.bool else 0.0
    return mask


def rotated(layer_at, offset):
    """Keys of one layer are rotated by more positions."""
    rotate = modeling_llama.apply_rotary_pos_emb
    state = {"layer": 0}

    def changed(query, key, cos, sin, *args, **kwargs):
        layer, state["layer"] = state["layer"], (state["layer"] + 1) % 3
        query, key = rotate(query, key, cos, sin, *args, **kwargs)
        if layer == layer_at:
            half = key.shape[-1] // 2
            angles = offset * 10000.0 ** (-torch.arange(half) / half)
            angles = torch.cat([angles, angles]).to(key.dtype)[None, None]
            key = rotate(key, key, angles.cos(), angles.sin())[0]
        return query, key

    return lambda: mock.patch.object(modeling_llama, "apply_rotary_pos_emb", changed)


def late_positions(net):
    """The model gets positions one too many in decoding."""

    def before(module, args, kwargs):
        positions = kwargs["position_ids"]
        kwargs["position_ids"] = torch.where(positions > 10, positions + 1, positions)
        return args, kwargs

    net.model.rotary_emb.register_forward_pre_hook(before, with_kwargs=True)
    return net


def loud_weights(net):
    """The weights of the second choice of the router are the first's."""
    forward = modeling_mixtral.MixtralTopKRouter.forward

    def changed(self, hidden):
        out = list(forward(self, hidden))
        out[1] = out[1] * 1.5
        return tuple(out)

    net.model.layers[1].mlp.gate.forward = changed.__get__(net.model.layers[1].mlp.gate)
    return net


def other_expert(net):
    """One layer sends its second choice to the next expert."""
    forward = modeling_mixtral.MixtralTopKRouter.forward

    def changed(self, hidden):
        out = list(forward(self, hidden))
        out[2] = torch.stack([out[2][:, 0], (out[2][:, 1] + 1) % 4], 1)
        return tuple(out)

    net.model.layers[2].mlp.gate.forward = changed.__get__(net.model.layers[2].mlp.gate)
    return net


def changed_weight(name, factor):
    def planted(net):
        with torch.no_grad():
            net.get_parameter(name).mul_(factor)
        return net

    return planted


def second_best(net):
    """The sampler takes the second best now and then; the logits are what they are."""
    engine = Batching(net)
    generate = engine.generate

    def changed(prompts, count):
        answers = generate(prompts, count)
        return [[(t + 1) % 200 if n == count - 1 else t for n, t in enumerate(a)] for a in answers]

    engine.generate = changed
    return engine


class Case(NamedTuple):
    """engine: makes what is checked. stage: "" of an engine that is right. layer: -1 for none.
    heads, positions: None where the fault has none. phase: "" where it has none.
    """

    engine: Callable[[], Any]
    stage: str = ""
    phase: str = ""
    layer: int = -1
    heads: tuple[int, ...] | None = None
    words: str = ""
    kind: str = "Llama"
    prompts: Any = PROMPTS
    settings: Any = ()


def cache_fault(change, layer, phase="decode", words=""):
    planted = paged(change)
    return Case(lambda: Batching(model(), planted), "cache", phase, layer, words=words)


def turned_head(keys, values, layer):
    return (torch.cat([keys[:, :1], -keys[:, 1:]], 1) if layer == 1 else keys), values


def louder_norm(net, factor=1.01):
    return on_call("model.layers.2.input_layernorm", lambda out: out * factor)(net)


def of_twenty(rows):
    lowest = rows.topk(20).values[:, -1:]
    return rows.masked_fill(rows < lowest, -1e9).log_softmax(-1)


HALF = torch.bfloat16
FAULTS = {
    "stale_block": cache_fault(stale_block, 1, "prefill", "zeros"),
    "wrong_block": cache_fault(wrong_block, 2, words="hold"),
    "read_off_by_one": cache_fault(read_off_by_one, 1, words="one position"),
    "write_off_by_one": cache_fault(write_off_by_one, 0, words="hold"),
    "scale_missing": cache_fault(scaled(1, 0.125, 1), 1, words="0.125 times"),
    "scale_twice": cache_fault(scaled(2, 4.0, 0), 2, words="4 times"),
    "head_order": cache_fault(head_order, 1, words="other heads"),
    "eviction": cache_fault(eviction, 2, words="zeros"),
    "value_for_key": cache_fault(value_for_key, 0),
    "fp8_without_saying": cache_fault(narrow_key, 1),
    "static_cache_scale": Case(
        lambda: Plain(
            model(),
            cached(lambda k, v, layer: (k, v * (2.0 if layer == 1 else 1.0))),
            cache_implementation="static",
        ),
        "cache", "prefill", 1, words="2 times",
    ),
    "static_cache_shift": Case(
        lambda: Plain(
            model(),
            cached(lambda k, v, layer: (k.roll(1, 2) if layer == 2 else k, v)),
            cache_implementation="static",
        ),
        "cache", "prefill", 2, words="one position",
    ),
    "one_head_of_k": Case(
        lambda: Plain(
            model(),
            cached(turned_head),
        ),
        "cache", "prefill", 1, heads=(1,), words="-1 times",
    ),
    "window": Case(lambda: Batching(model(), masked(short_window)), "layer", "prefill", 1),
    "neighbours": Case(lambda: Batching(model(), masked(neighbours)), "layer", "prefill", 1),
    "rope_offset": Case(
        lambda: Plain(model(), rotated(2, 1)),
        "layer", "prefill", 2, words="rotated by one position",
    ),
    "rope_positions": Case(lambda: Batching(late_positions(model())), "layer", "", -1),
    "router_weights": Case(
        lambda: Plain(loud_weights(model("Mixtral"))), "layer", "prefill", 1, kind="Mixtral"
    ),
    "router_ids": Case(
        lambda: Plain(other_expert(model("Mixtral"))), "layer", "prefill", 2, kind="Mixtral"
    ),
    "beside_ties": Case(
        lambda: Batching(louder_norm(tied_experts())), "layer", "prefill", 2, kind="tied",
    ),
    "beside_ties_bfloat16": Case(
        lambda: Plain(louder_norm(tied_experts(HALF), 1.1)), "layer", "prefill", 2, kind="tied",
    ),
    "weight_sync": Case(
        lambda: Batching(changed_weight("model.layers.1.mlp.up_proj.weight", 1.001)(model())),
        "weights", "", 1,
    ),
    "weight_sync_head": Case(
        lambda: Plain(changed_weight("model.norm.weight", 1.01)(model())), "weights", "", -1
    ),
    "norm_scale": Case(
        lambda: Batching(louder_norm(model())),
        "layer", "prefill", 2,
    ),
    "temperature": Case(
        lambda: Reporting(model(), lambda rows: (rows / 0.7).log_softmax(-1)),
        "sampler", "", -1, words="temperature 0.7",
    ),
    "top_k": Case(
        lambda: Reporting(model(), of_twenty),
        "sampler", "", -1, words="top-k 20",
    ),
    "sampler": Case(lambda: second_best(model()), "sampler", "", -1),
}  # fmt: skip
CLEAN = {
    "batching": Case(lambda: Batching(model())),
    "batching_eager": Case(lambda: Batching(model(attn_implementation="eager"))),
    "small_chunks": Case(lambda: Batching(model(), max_batch_tokens=8)),
    "large_batches": Case(lambda: Batching(model(), max_batch_tokens=128)),
    "page_8": Case(lambda: Batching(model(), page_size=8)),
    "page_64": Case(lambda: Batching(model(), page_size=64)),
    "prefix_cached": Case(lambda: Batching(model()), prompts=SHARED),
    "prefix_not_cached": Case(lambda: Batching(model(), allow_block_sharing=False), prompts=SHARED),
    "bfloat16": Case(lambda: Batching(model(dtype=HALF)), settings={"dtype": HALF}),
    "bfloat16_of_float32": Case(lambda: Batching(model(dtype=HALF))),
    "bfloat16_plain": Case(lambda: Plain(model(dtype=HALF))),
    "float64": Case(lambda: Plain(model(dtype=torch.float64))),
    "padded": Case(lambda: Plain(model(), padded=True)),
    "eager_padded": Case(lambda: Plain(model(attn_implementation="eager"), padded=True)),
    "static_cache": Case(lambda: Plain(model(), cache_implementation="static")),
    "no_cache": Case(lambda: Plain(model(), use_cache=False)),
    "window_plain": Case(lambda: Plain(model("Mistral", sliding_window=8)), kind="Mistral",
                         settings={"sliding_window": 8}),
    "window_batching": Case(lambda: Batching(model("Mistral", sliding_window=16)), kind="Mistral",
                            settings={"sliding_window": 16}),
    "experts": Case(lambda: Batching(model("Mixtral")), kind="Mixtral"),
    "experts_in_ties": Case(lambda: Plain(tied_experts()), kind="tied"),
    "experts_in_ties_batching": Case(lambda: Batching(tied_experts()), kind="tied"),
    "experts_in_ties_bfloat16": Case(lambda: Plain(tied_experts(HALF)), kind="tied"),
    "experts_in_ties_both": Case(
        lambda: Batching(tied_experts(HALF)), kind="tied", settings={"dtype": HALF}
    ),
    "biases": Case(lambda: Batching(model("Qwen2")), kind="Qwen2"),
    "logprobs": Case(lambda: Reporting(model(), lambda rows: rows.log_softmax(-1))),
}  # fmt: skip


# ---- batches: what depends on the neighbours of a prompt


def batch_norm(out):
    if out.shape[:2].numel() == 1:
        return out
    return torch.nn.functional.batch_norm(out.flatten(0, 1), None, None, training=True).view_as(out)


def coded(out):
    """Eight-bit codes with one scale for the whole tensor."""
    scale = out.abs().amax() / 127
    return (out / scale).round() * scale


def row_above(out):
    return out + 0.01 * out.roll(1, 0)


def by_place(out):
    return out * (1 + 0.01 * torch.arange(len(out)).flip(0)[:, None, None])


def in_parts(out):
    """A sum that is taken in two parts where there are several rows."""
    if len(out) == 1:
        return out
    return (out.double() * (1 + 1e-7)).to(out.dtype)


def with_room(out):
    """Only the eight largest tokens of the whole batch are computed."""
    sizes = out.norm(dim=-1, keepdim=True)
    return out * (sizes >= sizes.flatten().topk(min(8, sizes.numel())).values[-1])


def hooked(name, change):
    def make():
        net = model()
        net.get_submodule(name).register_forward_hook(lambda module, args, out: change(out))
        return Plain(net, padded=True)

    return make


FIRST, MLP, NORM = "model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.input_layernorm"
SDPA = "_scaled_dot_product_flash_attention_for_cpu"
DEPENDENT = {
    "statistics of the batch": (hooked(MLP, batch_norm), f"batch_norm in {MLP}"),
    "mean of the batch": (hooked(MLP, lambda out: out - 0.1 * out.mean(0)), f"in {MLP}"),
    "codes by tensor": (hooked(f"{FIRST}.down_proj", coded), f"in {FIRST}.down_proj"),
    "the row above": (hooked(NORM, row_above), f"in {NORM}"),
    "place in the batch": (hooked(f"{FIRST}.act_fn", by_place), f"in {FIRST}.act_fn"),
    "largest of the batch": (
        hooked("model.norm", lambda out: out / out.abs().amax()), "in model.norm"
    ),
    "room for eight tokens": (hooked(f"{MLP}.up_proj", with_room), f"in {MLP}.up_proj"),
    "other mask": (
        lambda: Batching(model(), masked(neighbours)),
        f"{SDPA} in model.layers.1.self_attn",
    ),
    "norm over the batch": (
        hooked("model.layers.1.post_attention_layernorm", lambda out: out / out.std((0, 1))),
        "in model.layers.1.post_attention_layernorm",
    ),
    "number of rows": (
        hooked("model.embed_tokens", lambda out: out * (1 + 0.001 * (len(out) > 1))),
        "in model.embed_tokens",
    ),
    "another order of a sum": (hooked("model.embed_tokens", in_parts), "model.embed_tokens"),
    "real: float32, continuous batching": (
        lambda: Batching(model()), f"{SDPA} in model.layers.0",
    ),
    "real: float32, a padded batch": (
        lambda: Plain(model(), padded=True), "aten.mm in model.layers.0"
    ),
    "real: bfloat16, a padded batch": (
        lambda: Plain(model(dtype=HALF), padded=True), SDPA
    ),
}  # fmt: skip


def dependent(only):
    """Ask prompts of engines alone and in a batch; (right, all)."""
    right = []
    for name, (engine, words) in DEPENDENT.items():
        if only and name not in only:
            continue
        result = whence.serve_check(model(), engine(), PROMPTS, max_new_tokens=4, alone=True)
        named = [found.operator for found in result.batch]
        right.append(bool(named) and all(words in operator for operator in named))
        mark = "right" if right[-1] else "WRONG"
        print(f"batch {name:35} {mark} {'; '.join(named)}", flush=True)
    print(f"batch: {sum(right)} of {len(right)} right")
    return all(right)


def is_held(name):
    """Is a case one that sets nothing?"""
    return xxhash.xxh3_64_intdigest(name.encode()) % 2 == 1


def judged(case):
    """(is the answer right, what it is)."""
    make = tied_experts if case.kind == "tied" else lambda **settings: model(case.kind, **settings)
    result = whence.serve_check(
        make(**dict(case.settings)), case.engine(), case.prompts, max_new_tokens=TOKENS
    )
    fault = result.fault
    if not case.stage or fault is None:
        return result.status == ("different" if case.stage else "same"), [result.status]
    phase = "prefill" if fault.step == 0 else "decode"
    wrong = [
        word
        for word, is_right in {
            f"stage {fault.stage}": fault.stage == case.stage,
            f"phase {phase}": not case.phase or phase == case.phase,
            f"layer {fault.layer}": fault.layer == case.layer,
            f"heads {fault.heads}": case.heads is None or fault.heads == case.heads,
            "words": case.words in fault.sentence,
        }.items()
        if not is_right
    ]
    return not wrong, [*wrong, fault.sentence]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--batch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.batch:
        return int(not dependent(options.only))
    counts = {}
    for title, cases in (("fault", FAULTS), ("clean", CLEAN)):
        for name, case in cases.items():
            if name in options.only or (not options.only and is_held(name) == options.held):
                start = time.perf_counter()
                is_right, words = judged(case)
                counts.setdefault(title, []).append(is_right)
                mark = "right" if is_right else "WRONG"
                seconds = time.perf_counter() - start
                print(f"{title} {name:20} {mark} {seconds:5.1f} s  {'; '.join(words)}", flush=True)
    for title, answers in counts.items():
        print(f"{title}: {sum(answers)} of {len(answers)} right")
    return 0 if all(all(answers) for answers in counts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
