"""Ports of models of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from _ports.pair import (
    Pair,
    Port,
    Ported,
    filled,
    forward,
    linear,
    normal,
    own,
    parameter,
    parameters,
    stacked,
    whole,
)

WORDS, WIDTH, HEADS, SIZE, LAYERS = 60, 32, 4, 8, 3


def angles(length: int, size: int, base: float) -> Tensor:
    """(length, size / 2)"""
    rates = base ** (-torch.arange(0, size, 2).float() / size)
    return torch.outer(torch.arange(length).float(), rates)


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Rotated half against half: (..., tokens, size) by (tokens, size / 2)."""
    (a, b), cos, sin = x.chunk(2, -1), table.cos().to(x.dtype), table.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def by_heads(x: Tensor, size: int = SIZE) -> Tensor:
    """(batch, tokens, heads * size) as (batch, heads, tokens, size)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The way back."""
    return x.transpose(1, 2).flatten(2)


def decoder(kind: str, **own_settings: Any) -> nn.Module:
    """A small language model of transformers."""
    settings = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "use_cache": False,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{kind}Config")(**settings | own_settings)
    config._experts_implementation = "eager"  # the other needs float32
    kind_of = getattr(transformers, f"{kind}ForCausalLM")
    return filled(kind_of._from_config(config, attn_implementation="eager"))


# T5


class T5Port(Ported):
    """One function for three kinds of attention, over tables of biases that are made once."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(fault)
        config = model.config
        self.buckets, self.far = (
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
        )
        self.shared, self.lm = own(model.shared), own(model.lm_head)
        self.bias = parameters(
            [
                s.block[0].layer[0].SelfAttention.relative_attention_bias.weight
                for s in (model.encoder, model.decoder)
            ]
        )
        self.kinds: list[str] = []
        self.ln, self.q, self.kv, self.o = (nn.ModuleList() for _ in range(4))
        self.gains = nn.ParameterList()
        for stack, sides in ((model.encoder, "ef"), (model.decoder, "dcf")):
            for block in stack.block:
                for kind, layer in zip(sides, block.layer, strict=True):
                    self.kinds.append(kind)
                    self.gains.append(parameter(layer.layer_norm.weight))
                    if kind == "f":
                        dense = layer.DenseReluDense
                        self.q.append(stacked(dense.wi_0, dense.wi_1))
                        self.kv.append(nn.Identity())
                        self.o.append(own(dense.wo))
                    else:
                        a = layer.EncDecAttention if kind == "c" else layer.SelfAttention
                        self.q.append(own(a.q))
                        self.kv.append(stacked(a.k, a.v))
                        self.o.append(own(a.o))
            self.gains.append(parameter(stack.final_layer_norm.weight))
            self.kinds.append("end")
            for parts in (self.q, self.kv, self.o):
                parts.append(nn.Identity())

    def places(self, length: int, number: int) -> Tensor:
        """What the scores of one stack get: (heads, length, length)."""
        apart = torch.arange(length)[None] - torch.arange(length)[:, None]
        both = number == 0 or self.fault == "both_ways"
        count = self.buckets // 2 if both else self.buckets
        start = (apart > 0).long() * count if both else 0
        apart = apart.abs() if both else (-apart).clamp(min=0)
        exact = count // 2
        far = torch.log(apart.clamp(min=1).float() / exact) / math.log(self.far / exact)
        far = (exact + (far * (count - exact)).long()).clamp(max=count - 1)
        index = start + torch.where(apart < exact, apart, far)
        return self.bias[number][index].permute(2, 0, 1)

    def run(
        self, x: Tensor, layers: range, memory: Tensor | None, mask: Tensor, number: int
    ) -> Tensor:
        """One stack."""
        places = self.places(x.shape[1], number)
        if number:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            places = places.masked_fill(later, -1e4)
        else:
            places = places + mask
        seen = 0
        for i in layers:
            kind, seen = self.kinds[i], seen + (self.kinds[i] in "ed")
            is_faulty = seen == 2
            h = F.rms_norm(
                x,
                (WIDTH,),
                self.gains[i],
                1e-1 if is_faulty and kind == "c" and self.fault == "eps" else 1e-6,
            )
            if kind == "end":
                return h
            if kind == "f":
                g, u = self.q[i](h).chunk(2, -1)
                g, u = (u, g) if is_faulty and number and self.fault == "gate" else (g, u)
                x = x + self.o[i](F.gelu(g, approximate="tanh") * u)
                continue
            k, v = map(by_heads, self.kv[i](memory if kind == "c" else h).chunk(2, -1))
            q = by_heads(self.q[i](h))
            q = q * SIZE**-0.5 if is_faulty and kind == "c" and self.fault == "scale" else q
            if kind == "c":
                added = torch.zeros_like(mask) if is_faulty and self.fault == "padding" else mask
            else:
                added = (
                    torch.zeros_like(places)
                    if is_faulty and number and self.fault == "unbiased"
                    else places
                )
            x = x + self.o[i](joined((q @ k.mT + added).softmax(-1) @ v))
        return x

    def forward(self, ids: Tensor, mask: Tensor, written: Tensor) -> Tensor:
        """Scores of the next token."""
        read = self.kinds.index("end") + 1
        hidden = (1 - mask)[:, None, None].to(self.lm.weight.dtype) * -1e4
        memory = self.run(self.shared(ids), range(read), None, hidden, 0)
        y = self.run(self.shared(written), range(read, len(self.kinds)), memory, hidden, 1)
        return self.lm(y)


def t5_forward(model: nn.Module, inputs: tuple[Tensor, ...], fault: str) -> Sequence[Tensor]:
    """Scores of the next token."""
    if isinstance(model, Ported):
        return (model(*inputs),)
    ids, mask, written = inputs
    return (
        model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=written, use_cache=False
        ).logits,
    )


def t5(fault: str) -> Pair:
    """An encoder and a decoder with relative places."""
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=SIZE,
        d_ff=48,
        num_layers=2,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
    )
    model = filled(
        transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    )
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    inputs = whole(2, 9, below=WORDS), mask, whole(2, 7, below=WORDS, seed=2)
    return Pair(model, T5Port(model, fault), inputs, t5_forward)


# Gemma


class GemmaPort(Ported):
    """One more than each gain is what is kept, products fused, softcaps in a function."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(fault)
        self.config, base = model.config, model.model
        self.emb, self.out = own(base.embed_tokens), own(model.lm_head)
        table = nn.Embedding(WORDS, WIDTH)
        table.weight = parameter(base.embed_tokens.weight)
        self.emb = table
        names = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        self.gains = parameters([getattr(b, n).weight + 1 for b in base.layers for n in names])
        self.last = parameter(base.norm.weight + 1)
        attentions = [b.self_attn for b in base.layers]
        self.qkv = nn.ModuleList(stacked(a.q_proj, a.k_proj, a.v_proj) for a in attentions)
        self.wo = nn.ModuleList(own(a.o_proj) for a in attentions)
        self.gu = nn.ModuleList(stacked(b.mlp.gate_proj, b.mlp.up_proj) for b in base.layers)
        self.dn = nn.ModuleList(own(b.mlp.down_proj) for b in base.layers)

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """In float32 at least."""
        wide = x.float() if x.dtype == torch.bfloat16 else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * gain).to(x.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        length, cap = ids.shape[1], self.config.attn_logit_softcapping
        x = self.emb(ids)
        x = x if self.fault == "unscaled" else x * torch.tensor(WIDTH**0.5, dtype=x.dtype)
        table = angles(length, SIZE, self.config.rope_parameters["rope_theta"])
        apart = torch.arange(length)[:, None] - torch.arange(length)
        for i in range(LAYERS):
            gains = [
                self.gains[4 * i + j] - (1 if self.has("plus_one", i) and j == 2 else 0)
                for j in range(4)
            ]
            q, k, v = self.qkv[i](self.norm(x, gains[0])).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
            q, k, v = (by_heads(t) for t in (q, k, v))
            q, k = turned(q, table), turned(k, table)
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            scalar = SIZE if self.has("scalar", i) else self.config.query_pre_attn_scalar
            scores = q @ k.mT / math.sqrt(scalar)
            scores = scores if self.has("softcap", i) else torch.tanh(scores / cap) * cap
            is_near = self.config.layer_types[i] == "sliding_attention"
            reach = 4 + (1 if self.fault == "window" and i == 2 else 0)
            hidden = (apart < 0) | (apart >= reach) if is_near else apart < 0
            y = joined(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)
            y = self.wo[i](y)
            x = self.norm(x + y, gains[1]) if self.has("behind", i) else x + self.norm(y, gains[1])
            g, u = self.gu[i](self.norm(x, gains[2])).chunk(2, -1)
            g = F.gelu(g, approximate="none" if self.has("erf", i) else "tanh")
            x = x + self.norm(self.dn[i](g * u), gains[3])
        scores = self.out(self.norm(x, self.last))
        cap = self.config.final_logit_softcapping
        return scores if self.fault == "final_cap" else cap * torch.tanh(scores / cap)


def gemma(fault: str) -> Pair:
    """Softcaps, scaled embeddings, windows, and gains that one is added to."""
    model = decoder(
        "Gemma2",
        head_dim=SIZE,
        query_pre_attn_scalar=16,
        sliding_window=4,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    )
    return Pair(model, GemmaPort(model, fault), (whole(2, 9, below=WORDS),), forward)


# Llama, Qwen


class LlamaPort(Ported):
    """Products fused, rotation in the complex plane, norms of torch."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(fault)
        base = model.model
        self.base = model.config.rope_parameters["rope_theta"]
        self.eps = model.config.rms_norm_eps
        self.tok, self.out, self.last = (
            own(base.embed_tokens),
            own(model.lm_head),
            parameter(base.norm.weight),
        )
        attentions = [b.self_attn for b in base.layers]
        self.wqkv = nn.ModuleList(stacked(a.q_proj, a.k_proj, a.v_proj) for a in attentions)
        self.wo = nn.ModuleList(
            linear(a.o_proj.weight.T if self.has("weight", i) else a.o_proj.weight)
            for i, a in enumerate(attentions)
        )
        self.w13 = nn.ModuleList(stacked(b.mlp.gate_proj, b.mlp.up_proj) for b in base.layers)
        self.w2 = nn.ModuleList(own(b.mlp.down_proj) for b in base.layers)
        self.norm_a = parameters([b.input_layernorm.weight for b in base.layers])
        self.norm_b = parameters([b.post_attention_layernorm.weight for b in base.layers])
        is_normed = hasattr(attentions[0], "q_norm")
        self.norm_q = parameters([a.q_norm.weight for a in attentions] if is_normed else [])
        self.norm_k = parameters([a.k_norm.weight for a in attentions] if is_normed else [])

    def turned(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads, size), rotated."""
        base = 50.0 * self.base if self.fault == "theta" else self.base
        table = angles(x.shape[1], SIZE, base)[None, :, None]
        wide = x.float() if x.dtype == torch.bfloat16 else x
        y = torch.complex(*wide.chunk(2, -1)) * torch.polar(torch.ones_like(table), table)
        return torch.cat([y.real, y.imag], -1).to(x.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.tok(ids)
        for i in range(LAYERS):
            h = F.rms_norm(x, (WIDTH,), self.norm_a[i], 1e-1 if self.has("eps", i) else self.eps)
            q, k, v = self.wqkv[i](h).unflatten(-1, (-1, SIZE)).split([HEADS, 2, 2], -2)
            if self.norm_q:
                q = (
                    q
                    if self.has("query_norm", i)
                    else F.rms_norm(q, (SIZE,), self.norm_q[i], self.eps)
                )
                k = F.rms_norm(k, (SIZE,), self.norm_k[i], self.eps)
            q, k = self.turned(q), k if self.has("unturned", i) else self.turned(k)
            if self.has("groups", i):
                k, v = k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)
            else:
                k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            scale = SIZE**-0.5 * (1.02 if self.has("scale", i) else 1)
            causal = not self.has("causal", i)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
            y = y[:, [1, 0, 2, 3]] if self.has("heads", i) else y
            x = x + self.wo[i](joined(y))
            h = F.rms_norm(x, (WIDTH,), self.norm_b[i], self.eps)
            g, u = self.w13[i](h).chunk(2, -1)
            m = (
                F.gelu(g) * u
                if self.has("gelu", i)
                else F.silu(u) * g
                if self.has("gate", i)
                else F.silu(g) * u
            )
            m = self.w2[i](m) * (1.003 if self.has("factor", i) else 1)
            x = (h if self.has("residual", i) else x) + m
        return self.out(F.rms_norm(x, (WIDTH,), self.last, self.eps))


def llama(fault: str) -> Pair:
    """Grouped heads."""
    model = decoder("Llama")
    return Pair(model, LlamaPort(model, fault), (whole(2, 9, below=WORDS),), forward)


def qwen(fault: str) -> Pair:
    """Queries and keys behind norms."""
    model = decoder("Qwen3", head_dim=SIZE)
    return Pair(model, LlamaPort(model, fault), (whole(2, 9, below=WORDS),), forward)


# Mixtral


class MixtralPort(Ported):
    """One token after another through its experts."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(fault)
        base = model.model
        self.base, self.eps = model.config.rope_parameters["rope_theta"], model.config.rms_norm_eps
        self.emb, self.head, self.last = (
            own(base.embed_tokens),
            own(model.lm_head),
            parameter(base.norm.weight),
        )
        attentions = [b.self_attn for b in base.layers]
        self.q, self.k, self.v, self.o = (
            nn.ModuleList(own(getattr(a, f"{n}_proj")) for a in attentions) for n in "qkvo"
        )
        self.n1 = parameters([b.input_layernorm.weight for b in base.layers])
        self.n2 = parameters([b.post_attention_layernorm.weight for b in base.layers])
        self.router = nn.ModuleList(linear(b.mlp.gate.weight) for b in base.layers)
        self.experts = nn.ModuleList()
        for i, block in enumerate(base.layers):
            order = [1, 0, 2, 3] if self.has("experts", i) else range(4)
            for j in order:
                gate, up = block.mlp.experts.gate_up_proj[j].chunk(2)
                down = block.mlp.experts.down_proj[j]
                self.experts.append(nn.ModuleList(linear(w) for w in (gate, up, down)))

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.emb(ids)
        table = angles(ids.shape[1], SIZE, self.base)
        for i in range(len(self.o)):
            h = F.rms_norm(x, (WIDTH,), self.n1[i], self.eps)
            q, k, v = (by_heads(p[i](h)) for p in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(
                turned(q, table), turned(k, table), v, is_causal=True
            )
            x = x + self.o[i](joined(y))
            h = F.rms_norm(x, (WIDTH,), self.n2[i], self.eps).flatten(0, 1)
            scores = self.router[i](h)
            scores = scores.float() if scores.dtype == torch.bfloat16 else scores
            weights, chosen = scores.softmax(-1).topk(1 if self.has("top1", i) else 2, -1)
            weights = (
                weights if self.has("unscaled", i) else weights / weights.sum(-1, keepdim=True)
            )
            weights = weights.flip(-1) if self.has("swapped", i) else weights
            rows = []
            for t in range(len(h)):
                made = torch.zeros_like(h[t])
                for weight, number in zip(weights[t], chosen[t].tolist(), strict=True):
                    gate, up, down = self.experts[4 * i + number]
                    made = made + weight.to(h.dtype) * down(F.silu(gate(h[t])) * up(h[t]))
                rows.append(made)
            x = x + torch.stack(rows).view_as(x)
        return self.head(F.rms_norm(x, (WIDTH,), self.last, self.eps))


def mixtral(fault: str) -> Pair:
    """A mixture of experts."""
    model = decoder(
        "Mixtral",
        num_hidden_layers=2,
        num_key_value_heads=HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return Pair(model, MixtralPort(model, fault), (whole(2, 6, below=WORDS),), forward)


# GPT


class GptPort(Ported):
    """Products that know their weights the other way round, and three of them for one."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(fault)
        base = model.transformer
        self.wte, self.wpe, self.lnf = own(base.wte), own(base.wpe), own(base.ln_f)
        parts = [(b.attn.c_attn.weight.T.chunk(3), b.attn.c_attn.bias.chunk(3)) for b in base.h]
        self.q, self.k, self.v = (
            nn.ModuleList(linear(w[j], b[j]) for w, b in parts) for j in range(3)
        )
        self.proj = nn.ModuleList(
            linear(c.weight if self.has("turned", i) else c.weight.T, c.bias)
            for i, c in enumerate(b.attn.c_proj for b in base.h)
        )
        self.up = nn.ModuleList(linear(b.mlp.c_fc.weight.T, b.mlp.c_fc.bias) for b in base.h)
        self.down = nn.ModuleList(linear(b.mlp.c_proj.weight.T, b.mlp.c_proj.bias) for b in base.h)
        self.ln1, self.ln2 = (
            nn.ModuleList(own(getattr(b, n)) for b in base.h) for n in ("ln_1", "ln_2")
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        batch, length = ids.shape
        x = self.wte(ids) + self.wpe.weight[:length]
        for i in range(LAYERS):
            h = self.ln1[i](x)
            q, k, v = (
                p(h).view(batch, length, SIZE, HEADS).transpose(2, 3)
                if self.has("heads", i)
                else p(h).view(batch, length, HEADS, SIZE)
                for p in (self.q[i], self.k[i], self.v[i])
            )
            a = torch.einsum("blhd,bmhd->bhlm", q, k) / (
                SIZE if self.has("scale", i) else math.sqrt(SIZE)
            )
            start = 2 if self.has("mask", i) else 1
            a = a + torch.full((length, length), -math.inf, dtype=a.dtype).triu(start)
            a = a.softmax(2 if self.has("axis", i) else 3)
            a = a.nan_to_num() if self.has("axis", i) else a
            x = x + self.proj[i](torch.einsum("bhlm,bmhd->blhd", a, v).flatten(2))
            h = self.up[i](self.ln2[i](x))
            x = x + self.down[i](F.gelu(h, approximate="none" if self.has("erf", i) else "tanh"))
        x = x if self.fault == "last" else self.lnf(x)
        return x @ self.wte.weight.T


def gpt(fault: str) -> Pair:
    """GPT-2."""
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=16,
        use_cache=False,
    )
    model = filled(transformers.GPT2LMHeadModel(config))
    return Pair(model, GptPort(model, fault), (whole(2, 9, below=WORDS),), forward)


# NeoX


class NeoxPort(Ported):
    """Both halves of a layer from one stream, three products for one that mixes heads."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(fault)
        base, config = model.gpt_neox, model.config
        self.base, share = (
            config.rope_parameters[n] for n in ("rope_theta", "partial_rotary_factor")
        )
        self.turns = int(SIZE * share)
        self.table, self.scores = (
            own(base.embed_in),
            own(model.embed_out if hasattr(model, "embed_out") else model.lm_head),
        )
        self.end = own(base.final_layer_norm)
        self.na = nn.ModuleList(own(b.input_layernorm) for b in base.layers)
        self.nb = nn.ModuleList(own(b.post_attention_layernorm) for b in base.layers)
        mixed = [b.attention.query_key_value for b in base.layers]
        weights = [m.weight.unflatten(0, (HEADS, 3, SIZE)) for m in mixed]
        biases = [m.bias.unflatten(0, (HEADS, 3, SIZE)) for m in mixed]
        self.q, self.k, self.v = (
            nn.ModuleList(
                linear(w[:, j].flatten(0, 1), b[:, j].flatten())
                for w, b in zip(weights, biases, strict=True)
            )
            for j in range(3)
        )
        self.o = nn.ModuleList(own(b.attention.dense) for b in base.layers)
        self.up = nn.ModuleList(own(b.mlp.dense_h_to_4h) for b in base.layers)
        self.down = nn.ModuleList(own(b.mlp.dense_4h_to_h) for b in base.layers)

    def turned(self, x: Tensor, i: int) -> Tensor:
        """A part of the channels, rotated."""
        count = SIZE if self.has("all_channels", i) else self.turns
        table = angles(x.shape[-2], count, self.base)
        return torch.cat([turned(x[..., :count], table), x[..., count:]], -1)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.table(ids)
        for i in range(LAYERS):
            h = self.na[i](x)
            q, k, v = (by_heads(p[i](h)) for p in (self.q, self.k, self.v))
            w = self.turned(q, i) @ self.turned(k, i).mT / math.sqrt(SIZE)
            w = w + torch.full(w.shape[-2:], -1e9, dtype=w.dtype).triu(1)
            y = self.o[i](joined(w.softmax(-1) @ v))
            if self.has("serial", i):
                x = x + y
                x = x + self.down[i](F.gelu(self.up[i](self.nb[i](x))))
            else:
                norm = self.na[i] if self.has("norm", i) else self.nb[i]
                x = x + y + self.down[i](F.gelu(self.up[i](norm(x))))
        return self.scores(self.end(x))


def neox(fault: str) -> Pair:
    """Parallel halves, and a rotation of a part of the channels."""
    config = transformers.GPTNeoXConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        use_cache=False,
    )
    model = filled(
        transformers.GPTNeoXForCausalLM._from_config(config, attn_implementation="eager")
    )
    return Pair(model, NeoxPort(model, fault), (whole(2, 9, below=WORDS),), forward)


# BERT


class BertPort(Ported):
    """torch's own encoder."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(fault)
        e = model.embeddings
        self.word, self.place, self.kind = (
            own(e.word_embeddings),
            own(e.position_embeddings),
            own(e.token_type_embeddings),
        )
        self.ln, self.pool = own(e.LayerNorm), own(model.pooler.dense)
        self.layers = nn.ModuleList()
        for i, block in enumerate(model.encoder.layer):
            part, out = block.attention.self, block.attention.output
            order = [part.query, part.key, part.value]
            order = [order[1], order[0], order[2]] if self.has("swapped", i) else order
            fused = stacked(*order)
            layer = nn.TransformerEncoderLayer(
                WIDTH,
                HEADS,
                64,
                0.0,
                self.act if i == 1 else F.gelu,
                1e-12,
                batch_first=True,
                norm_first=self.has("order", i),
            )
            layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias = fused.weight, fused.bias
            layer.self_attn.out_proj.load_state_dict(out.dense.state_dict())
            layer.norm1, layer.norm2 = own(out.LayerNorm), own(block.output.LayerNorm)
            layer.linear1, layer.linear2 = own(block.intermediate.dense), own(block.output.dense)
            if self.has("bias", i):
                nn.init.zeros_(layer.linear1.bias)
            self.layers.append(layer.eval())

    def act(self, x: Tensor) -> Tensor:
        """The activation of the layer that may have a fault."""
        return F.gelu(x, approximate="tanh" if self.fault == "tanh" else "none")

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the pooled first of them."""
        at = torch.arange(ids.shape[1]) + (1 if self.fault == "places" else 0)
        x = self.ln(self.word(ids) + self.place(at) + self.kind(torch.zeros_like(ids)))
        for i, layer in enumerate(self.layers):
            x = layer(x, src_key_padding_mask=None if self.has("padding", i) else mask == 0)
        return x, torch.tanh(self.pool(x[:, 0]))


def bert_forward(model: nn.Module, inputs: tuple[Tensor, ...], fault: str) -> Sequence[Tensor]:
    """Hidden states, and the pooled first of them."""
    if isinstance(model, Ported):
        return model(*inputs)
    return tuple(model(inputs[0], attention_mask=inputs[1]).values())


def bert(fault: str) -> Pair:
    """An encoder with padding."""
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=16,
    )
    model = filled(transformers.BertModel(config))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return Pair(model, BertPort(model, fault), (whole(2, 9, below=WORDS), mask), bert_forward)


# ViT


class VitPort(Ported):
    """Patches by a product, three products in one."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(fault)
        numbers = model.state_dict()

        def of(end: str) -> Tensor:
            return next(v for k, v in numbers.items() if k.endswith(end))

        def product(i: int, *ends: str) -> nn.Linear:
            found = [
                k[: -len(".weight")]
                for e in ends
                for k in numbers
                if f".{i}." in k and k.endswith(f"{e}.weight")
            ]
            return linear(numbers[f"{found[0]}.weight"], numbers[f"{found[0]}.bias"])

        self.patch = linear(of("projection.weight").flatten(1), of("projection.bias"))
        self.cls, self.at = parameter(of("cls_token")), parameter(of("position_embeddings"))
        self.qkv, self.o, self.f1, self.f2 = (nn.ModuleList() for _ in range(4))
        for i in range(2):
            parts = (
                product(i, a, b)
                for a, b in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
            )
            self.qkv.append(stacked(*parts))
            self.o.append(product(i, "attention.output.dense", "o_proj"))
            self.f1.append(product(i, "intermediate.dense", "fc1"))
            self.f2.append(product(i, f".{i}.output.dense", "fc2"))
        self.na, self.nb = (
            nn.ModuleList(own(m) for n, m in model.named_modules() if n.endswith(end))
            for end in ("layernorm_before", "layernorm_after")
        )
        self.nf = own(model.layernorm)

    def forward(self, image: Tensor) -> Tensor:
        """Hidden states."""
        u = F.unfold(image, 8, stride=8).transpose(1, 2)
        if self.fault == "patch":
            u = u.unflatten(-1, (3, 8, 8)).transpose(-1, -2).flatten(2)
        if self.fault == "columns":
            u = u.unflatten(1, (3, 3)).transpose(1, 2).flatten(1, 2)
        cls, x = self.cls.expand(len(u), -1, -1), self.patch(u)
        x = torch.cat([x, cls] if self.fault == "class_last" else [cls, x], 1) + self.at
        for i in range(2):
            q, k, v = (
                self.qkv[i](self.na[i](x)).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
            )
            x = x + self.o[i](joined(F.scaled_dot_product_attention(q, k, v)))
            h = self.f1[i](self.nb[i](x))
            x = x + self.f2[i](h * torch.sigmoid(1.702 * h) if self.has("quick", i) else F.gelu(h))
        return self.nf(x)


def vit_forward(model: nn.Module, inputs: tuple[Tensor, ...], fault: str) -> Sequence[Tensor]:
    """Hidden states."""
    out = model(*inputs)
    return (out if isinstance(out, Tensor) else out.last_hidden_state,)


def vit(fault: str) -> Pair:
    """Patches of images."""
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        image_size=24,
        patch_size=8,
    )
    model = filled(transformers.ViTModel(config, add_pooling_layer=False))
    return Pair(model, VitPort(model, fault), (normal(2, 3, 24, 24),), vit_forward)


_IN_CROSS = "decoder.block.1.layer.1.EncDecAttention"
_LAYER = "model.layers.1"
_ATTENTION = f"{_LAYER}.self_attn"
_MLP = f"{_LAYER}.mlp {_LAYER}.mlp.act_fn"
_GPT = "transformer.h.1"
_FIRST = "decoder.block.0.layer.0.SelfAttention"
_DENSE = "decoder.block.1.layer.2.DenseReluDense"
_SELF, _WIDE = "encoder.layer.1.attention.self", "encoder.layer.1.intermediate"
_PATCHES = "embeddings embeddings.patch_embeddings embeddings.patch_embeddings.projection"
PORTS = (
    Port(
        "t5",
        t5,
        {
            "both_ways": f"{_FIRST} {_FIRST}.relative_attention_bias",
            "eps": "decoder.block.1.layer.1.layer_norm",
            "scale": _IN_CROSS,
            "padding": _IN_CROSS,
            "unbiased": "decoder.block.1.layer.0.SelfAttention",
            "gate": f"{_DENSE} {_DENSE}.act",
        },
    ),
    Port(
        "gemma",
        gemma,
        {
            "unscaled": "model.embed_tokens",
            "plus_one": f"{_LAYER}.pre_feedforward_layernorm",
            "scalar": _ATTENTION,
            "softcap": _ATTENTION,
            "window": "model.layers.2.self_attn",
            "behind": f"{_LAYER}.post_attention_layernorm {_LAYER}",
            "erf": _MLP,
            "final_cap": ".",
        },
    ),
    Port(
        "llama",
        llama,
        {
            "theta": "model.rotary_emb model.layers.0.self_attn",
            "eps": f"{_LAYER}.input_layernorm",
            "unturned": _ATTENTION,
            "groups": _ATTENTION,
            "causal": _ATTENTION,
            "scale": _ATTENTION,
            "gelu": _MLP,
            "gate": _MLP,
            "residual": _LAYER,
            "weight": f"{_ATTENTION}.o_proj",
        },
    ),
    Port(
        "qwen",
        qwen,
        {"query_norm": f"{_ATTENTION}.q_norm", "heads": _ATTENTION, "factor": f"{_LAYER} {_MLP}"},
    ),
    Port(
        "mixtral",
        mixtral,
        {
            "top1": f"{_LAYER}.mlp {_LAYER}.mlp.gate",
            "unscaled": f"{_LAYER}.mlp {_LAYER}.mlp.gate",
            "swapped": f"{_LAYER}.mlp {_LAYER}.mlp.gate",
            "experts": f"{_LAYER}.mlp {_LAYER}.mlp.experts",
        },
    ),
    Port(
        "gpt",
        gpt,
        {
            "heads": f"{_GPT}.attn",
            "scale": f"{_GPT}.attn",
            "mask": f"{_GPT}.attn",
            "axis": f"{_GPT}.attn",
            "erf": f"{_GPT}.mlp.act {_GPT}.mlp",
            "last": "transformer.ln_f",
            "turned": f"{_GPT}.attn.c_proj",
        },
    ),
    Port(
        "neox",
        neox,
        {
            "all_channels": "gpt_neox.layers.1.attention",
            "serial": "gpt_neox.layers.1 gpt_neox.layers.1.post_attention_layernorm",
            "norm": "gpt_neox.layers.1.post_attention_layernorm",
        },
    ),
    Port(
        "bert",
        bert,
        {
            "tanh": f"{_WIDE} {_WIDE}.intermediate_act_fn",
            "order": "encoder.layer.1 encoder.layer.1.attention.output",
            "places": "embeddings",
            "padding": "encoder.layer.1.attention.self",
            "swapped": f"{_SELF} {_SELF}.query {_SELF}.key",
            "bias": "encoder.layer.1.intermediate.dense",
        },
    ),
    Port(
        "vit",
        vit,
        {
            "patch": _PATCHES,
            "columns": _PATCHES,
            "class_last": "embeddings",
            "quick": "layers.1.mlp layers.1.mlp.activation_fn",
        },
    ),
)
