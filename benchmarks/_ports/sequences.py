"""Ports of models that read sequences: a state space, latent attention, a recurrent translator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
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
    parameters,
    stacked,
    whole,
)

WIDTH, WORDS, LAYERS, EPS = 32, 60, 3, 1e-5


class Norm(nn.Module):
    """Divided by the root mean square."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Of the last axis."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


# A state space model

INNER, STATE, RANK, KERNEL = 48, 6, 4, 4


class Mixer(nn.Module):
    """A selective scan, as mamba's authors divide it."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv1d = nn.Conv1d(INNER, INNER, KERNEL, groups=INNER, padding=KERNEL - 1)
        self.act = nn.SiLU()
        self.x_proj = nn.Linear(INNER, RANK + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(RANK, INNER)
        self.A_log = nn.Parameter(torch.zeros(INNER, STATE))
        self.D = nn.Parameter(torch.ones(INNER))
        self.out_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width)."""
        length = x.shape[1]
        hidden, gate = self.in_proj(x).transpose(1, 2).chunk(2, 1)
        hidden = self.act(self.conv1d(hidden)[..., :length])
        step, into, out_of = self.x_proj(hidden.transpose(1, 2)).split([RANK, STATE, STATE], -1)
        step = F.softplus(self.dt_proj(step)).transpose(1, 2)
        decay = torch.exp(-torch.exp(self.A_log)[None, :, None] * step[..., None])
        driven = step[..., None] * into[:, None] * hidden[..., None]
        state, outputs = torch.zeros_like(decay[:, :, 0]), []
        for i in range(length):
            state = decay[:, :, i] * state + driven[:, :, i]
            outputs.append((state @ out_of[:, i, :, None])[..., 0])
        y = torch.stack(outputs, -1) + hidden * self.D[None, :, None]
        return self.out_proj((y * self.act(gate)).transpose(1, 2))


class MixerBlock(nn.Module):
    """A norm and a mixer beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = Norm(), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width)."""
        return x + self.mixer(self.norm(x))


class StateSpace(nn.Module):
    """A language model of mixers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(MixerBlock() for _ in range(LAYERS))
        self.norm_f, self.lm_head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))


class StateSpacePort(Ported):
    """Tokens before channels throughout, the convolution as a sum of shifts, the scan by einsum."""

    def __init__(self, model: StateSpace, fault: str) -> None:
        super().__init__(fault)
        self.tok, self.out = own(model.embeddings), own(model.lm_head)
        mixers = [layer.mixer for layer in model.layers]
        self.hid = nn.ModuleList(linear(m.in_proj.weight[:INNER]) for m in mixers)
        self.gat = nn.ModuleList(linear(m.in_proj.weight[INNER:]) for m in mixers)
        self.sel = nn.ModuleList(own(m.x_proj) for m in mixers)
        self.dlt = nn.ModuleList(own(m.dt_proj) for m in mixers)
        self.res = nn.ModuleList(own(m.out_proj) for m in mixers)
        self.taps = parameters([m.conv1d.weight[:, 0] for m in mixers])
        self.tap_bias = parameters([m.conv1d.bias for m in mixers])
        self.log_rate = parameters([m.A_log for m in mixers])
        self.through = parameters([m.D for m in mixers])
        self.gain = parameters(
            [*(layer.norm.weight for layer in model.layers), model.norm_f.weight]
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.tok(ids)
        for i in range(LAYERS):
            h = F.rms_norm(x, (WIDTH,), self.gain[i], 1e-1 if self.has("eps", i) else EPS)
            x = x + self.mixed(h, i)
        return self.out(F.rms_norm(x, (WIDTH,), self.gain[-1], EPS))

    def mixed(self, h: Tensor, i: int) -> Tensor:
        """One mixer."""
        u, z = self.hid[i](h), self.gat[i](h)
        length, late = u.shape[1], 1 if self.has("ahead", i) else 0
        padded = F.pad(u, (0, 0, KERNEL - 1 - late, late))
        taps = self.taps[i].flip(1) if self.has("flipped", i) else self.taps[i]
        u = sum(padded[:, k : k + length] * taps[:, k] for k in range(KERNEL)) + self.tap_bias[i]
        u = u * torch.sigmoid(u)
        r, b, c = self.sel[i](u).split([RANK, STATE, STATE], -1)
        if self.has("order", i):
            b, c = c, b
        d = self.dlt[i](r)
        d = d.relu() if self.has("softplus", i) else torch.log1p(torch.exp(d))
        rate = -torch.exp(self.log_rate[i])
        s, ys = u.new_zeros(u.shape[0], INNER, STATE), []
        for t in range(length):
            s = s * torch.exp(d[:, t, :, None] * rate) + torch.einsum(
                "bi,bs,bi->bis", d[:, t], b[:, t], u[:, t]
            )
            ys.append(torch.einsum("bis,bs->bi", s, c[:, t]))
        y = torch.stack(ys, 1)
        y = y if self.has("through", i) else y + self.through[i] * u
        return self.res[i](y * (torch.sigmoid(z) if self.has("gate", i) else F.silu(z)))


def state_space(fault: str) -> Pair:
    """A selective scan."""
    model = filled(StateSpace())
    return Pair(model, StateSpacePort(model, fault), (whole(2, 9, below=WORDS),), forward)


# Latent attention

HEADS, NOPE, ROPE, VALUE, LATENT, BASE = 4, 8, 4, 8, 12, 100.0


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours rotated by pairs, and laid out half against half."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Rotary(nn.Module):
    """Cosines and sines of the positions."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For (batch, tokens, width): two of (tokens, half of the rotary channels)."""
        rates = BASE ** (-torch.arange(0, ROPE, 2, device=x.device).double() / ROPE)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class LatentAttention(nn.Module):
    """Keys and values through a latent vector, with a rotary part that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_norm = nn.Linear(WIDTH, 16, bias=False), Norm(16)
        self.q_b_proj = nn.Linear(16, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_a_norm = Norm(LATENT)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Of (batch, tokens, width)."""
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q_pass, q_turn = q.split([NOPE, ROPE], -1)
        latent, k_turn = self.kv_a_proj(x).split([LATENT, ROPE], -1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k_pass, v = kv.split([NOPE, VALUE], -1)
        k_turn = rotated(k_turn[:, None], *tables).expand(-1, HEADS, -1, -1)
        q = torch.cat([q_pass, rotated(q_turn, *tables)], -1)
        k = torch.cat([k_pass, k_turn], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated feed-forward."""

    def __init__(self, inner: int = 48) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, inner, bias=False)
        self.up_proj = nn.Linear(WIDTH, inner, bias=False)
        self.down_proj, self.act_fn = nn.Linear(inner, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape that ends with the width."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LatentBlock(nn.Module):
    """Attention and a feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(), LatentAttention()
        self.post_attention_layernorm, self.mlp = Norm(), Gated()

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Of (batch, tokens, width)."""
        x = x + self.self_attn(self.input_layernorm(x), tables)
        return x + self.mlp(self.post_attention_layernorm(x))


class Latent(nn.Module):
    """A language model with latent attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = nn.Embedding(WORDS, WIDTH), Rotary()
        self.layers = nn.ModuleList(LatentBlock() for _ in range(LAYERS))
        self.norm, self.lm_head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.embed_tokens(ids)
        tables = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, tables)
        return self.lm_head(self.norm(x))


class LatentPort(Ported):
    """The weights of keys and values are drawn into queries and results; rotation is complex."""

    def __init__(self, model: Latent, fault: str) -> None:
        super().__init__(fault)
        self.wte, self.head = own(model.embed_tokens), own(model.lm_head)
        attentions = [layer.self_attn for layer in model.layers]
        self.query_down = nn.ModuleList(own(a.q_a_proj) for a in attentions)
        self.query_up = nn.ModuleList(own(a.q_b_proj) for a in attentions)
        self.squeeze = nn.ModuleList(own(a.kv_a_proj) for a in attentions)
        self.out = nn.ModuleList(own(a.o_proj) for a in attentions)
        parts = [a.kv_b_proj.weight.unflatten(0, (HEADS, -1)) for a in attentions]
        self.to_keys = parameters([p[:, :NOPE] for p in parts])
        self.to_values = parameters([p[:, NOPE:] for p in parts])
        self.w13 = nn.ModuleList(
            stacked(layer.mlp.gate_proj, layer.mlp.up_proj) for layer in model.layers
        )
        self.w2 = nn.ModuleList(own(layer.mlp.down_proj) for layer in model.layers)
        self.query_gain = parameters([a.q_a_norm.weight for a in attentions])
        self.latent_gain = parameters([a.kv_a_norm.weight for a in attentions])
        self.before = parameters([layer.input_layernorm.weight for layer in model.layers])
        self.behind = parameters([layer.post_attention_layernorm.weight for layer in model.layers])
        self.final = parameters([model.norm.weight])

    def turned(self, x: Tensor, i: int) -> Tensor:
        """Rotated by the positions, which are the second axis but one."""
        wide = x.double()
        pairs = (
            torch.complex(*wide.chunk(2, -1))
            if self.has("halves", i)
            else torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
        )
        rates = BASE ** (-torch.arange(0, ROPE, 2).double() / ROPE)
        angles = torch.outer(torch.arange(x.shape[-2]).double(), rates)
        return (
            torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
            .flatten(-2)
            .to(x.dtype)
        )

    def attended(self, h: Tensor, i: int) -> Tensor:
        """One attention."""
        length, size = h.shape[1], NOPE if self.has("scale", i) else NOPE + ROPE
        q = self.query_up[i](F.rms_norm(self.query_down[i](h), (16,), self.query_gain[i], EPS))
        q = q.view(*h.shape[:2], HEADS, NOPE + ROPE).transpose(1, 2)
        if self.has("split", i):
            q = torch.cat([q[..., ROPE:], q[..., :ROPE]], -1)
        c, shared = self.squeeze[i](h).split([LATENT, ROPE], -1)
        c = c if self.has("latent_norm", i) else F.rms_norm(c, (LATENT,), self.latent_gain[i], EPS)
        far = torch.einsum("bhtn,hnc->bhtc", q[..., :NOPE], self.to_keys[i])
        scores = torch.einsum("bhtc,bsc->bhts", far, c)
        near = shared if self.has("unturned", i) else self.turned(shared, i)
        scores = scores + torch.einsum("bhtr,bsr->bhts", self.turned(q[..., NOPE:], i), near)
        later = torch.ones(length, length, dtype=torch.bool).triu(2 if self.has("mask", i) else 1)
        weights = (scores / math.sqrt(size)).masked_fill(later, -math.inf).softmax(-1)
        y = torch.einsum("bhts,bsc,hvc->bthv", weights, c, self.to_values[i])
        return self.out[i](y.flatten(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.wte(ids)
        for i in range(LAYERS):
            x = x + self.attended(F.rms_norm(x, (WIDTH,), self.before[i], EPS), i)
            h = F.rms_norm(x, (WIDTH,), self.behind[i], 1e-1 if self.has("eps", i) else EPS)
            g, u = self.w13[i](h).chunk(2, -1)
            x = x + self.w2[i](F.silu(g) * u)
        return self.head(F.rms_norm(x, (WIDTH,), self.final[0], EPS))


def latent(fault: str) -> Pair:
    """Latent attention with its weights absorbed."""
    model = filled(Latent())
    return Pair(model, LatentPort(model, fault), (whole(2, 9, below=WORDS),), forward)


def language_step(model: nn.Module, inputs: tuple[Tensor, ...], fault: str) -> Sequence[Tensor]:
    """Two steps of training towards the next token."""
    (ids,) = inputs
    decay = 0.0 if fault == "decay" else 0.1
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay, foreach=False)
    losses = []
    for step in range(2):
        batch = ids.roll(step, 1)
        scores = model(batch)
        ahead = 0 if fault == "shift" else 1
        scores, labels = scores[:, : scores.shape[1] - ahead], batch[:, ahead:]
        reduction = "sum" if fault == "sum" else "mean"
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction=reduction)
        loss.backward()
        if fault != "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    return losses


class PlainPort(Ported):
    """A small transformer for training: fused products, a mask of zeros and infinities."""

    def __init__(self, model: Plain, fault: str) -> None:
        super().__init__(fault)
        self.table, self.places = own(model.embed), own(model.place)
        self.three = nn.ModuleList(stacked(b.q, b.k, b.v) for b in model.blocks)
        self.join = nn.ModuleList(own(b.o) for b in model.blocks)
        self.wide = nn.ModuleList(own(b.up) for b in model.blocks)
        self.slim = nn.ModuleList(own(b.down) for b in model.blocks)
        self.first = nn.ModuleList(own(b.before) for b in model.blocks)
        self.second = nn.ModuleList(own(b.behind) for b in model.blocks)
        self.last, self.scores = own(model.last), own(model.head)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        length = ids.shape[1]
        x = self.table(ids) + self.places.weight[:length]
        for i in range(LAYERS):
            q, k, v = (
                t.view(*ids.shape, HEADS, -1).transpose(1, 2)
                for t in self.three[i](self.first[i](x)).chunk(3, -1)
            )
            if self.has("detach", i):
                k = k.detach()
            scores = q @ k.mT * q.shape[-1] ** -0.5
            scores = scores + torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
            y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
            x = x + self.join[i](y)
            h = self.wide[i](self.second[i](x))
            h = F.gelu(h, approximate="tanh") if self.has("tanh", i) else F.gelu(h)
            x = x + self.slim[i](h)
        return self.scores(self.last(x))


class PlainBlock(nn.Module):
    """Attention and a feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width)."""
        h = self.before(x)
        q, k, v = (
            p(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.behind(x))))


class Plain(nn.Module):
    """A language model to train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def plain_training(fault: str) -> Pair:
    """Training steps of a small transformer."""
    model = filled(Plain())
    pair = Pair(model, PlainPort(model, fault), (whole(2, 9, below=WORDS),), language_step)
    pair.reference.train()
    pair.port.train()
    return pair


# A recurrent translator


class Encoder(nn.Module):
    """Reads the source."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What each token leaves, and the state after the last one of each row."""
        outputs, _ = self.rnn(self.embedding(ids))
        return outputs, outputs[torch.arange(len(ids)), lengths - 1]


class Attend(nn.Module):
    """Luong's attention with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.match = nn.Linear(WIDTH, WIDTH, bias=False)
        self.merge = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: Tensor, memory: Tensor, is_padding: Tensor) -> Tensor:
        """Of one step."""
        scores = (memory @ self.match(state)[..., None])[..., 0]
        weights = scores.masked_fill(is_padding, -math.inf).softmax(-1)
        context = (weights[:, None] @ memory)[:, 0]
        return torch.tanh(self.merge(torch.cat([context, state], -1)))


class Decoder(nn.Module):
    """Writes the translation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(WORDS, WIDTH), nn.GRUCell(2 * WIDTH, WIDTH)
        self.attention, self.out = Attend(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, memory: Tensor, state: Tensor, is_padding: Tensor) -> Tensor:
        """Scores of every next token."""
        fed, scores = torch.zeros_like(state), []
        for i in range(ids.shape[1]):
            state = self.cell(torch.cat([self.embedding(ids[:, i]), fed], -1), state)
            fed = self.attention(state, memory, is_padding)
            scores.append(self.out(fed))
        return torch.stack(scores, 1)


class Translator(nn.Module):
    """Both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Scores of every next token."""
        memory, state = self.encoder(source, lengths)
        is_padding = torch.arange(source.shape[1])[None] >= lengths[:, None]
        return self.decoder(target, memory, state, is_padding)


class TranslatorPort(Ported):
    """Gates by hand, keys made once before the loop, scores once behind it."""

    def __init__(self, model: Translator, fault: str) -> None:
        super().__init__(fault)
        rnn, cell = model.encoder.rnn, model.decoder.cell
        self.source, self.target = own(model.encoder.embedding), own(model.decoder.embedding)
        self.enc_x = linear(rnn.weight_ih_l0, rnn.bias_ih_l0)
        self.enc_h = linear(rnn.weight_hh_l0, rnn.bias_hh_l0)
        self.dec_x = linear(cell.weight_ih, cell.bias_ih)
        self.dec_h = linear(cell.weight_hh, cell.bias_hh)
        self.bilinear = parameters([model.decoder.attention.match.weight])
        self.mix, self.score = own(model.decoder.attention.merge), own(model.decoder.out)

    def stepped(self, x: Tensor, h: Tensor, products: tuple[nn.Linear, nn.Linear]) -> Tensor:
        """One step of a gated unit."""
        a, b = products[0](x).chunk(3, -1), products[1](h).chunk(3, -1)
        reset, update = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
        is_decoder = products[0] is self.dec_x
        if is_decoder and self.fault == "gates":
            reset, update = update, reset
        new = torch.tanh(
            a[2] + b[2] if is_decoder and self.fault == "reset" else a[2] + reset * b[2]
        )
        if is_decoder and self.fault == "update":
            update = 1 - update
        return new + update * (h - new)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Scores of every next token."""
        words = self.source(source)
        h = words.new_zeros(len(source), WIDTH)
        states = []
        for t in range(source.shape[1]):
            h = self.stepped(words[:, t], h, (self.enc_x, self.enc_h))
            states.append(h)
        memory = torch.stack(states, 1)
        if self.fault != "last":
            h = torch.stack([memory[i, n - 1] for i, n in enumerate(lengths.tolist())])
        keys = memory @ self.bilinear[0]
        hidden = torch.arange(source.shape[1]) >= lengths[:, None]
        fed, made = torch.zeros_like(h), []
        for t in range(target.shape[1]):
            x = torch.cat([self.target(target[:, t]), fed], 1)
            h = self.stepped(x, h, (self.dec_x, self.dec_h))
            scores = torch.einsum("bsd,bd->bs", keys, h)
            if self.fault != "padding":
                scores = scores + torch.zeros_like(scores).masked_fill(hidden, -1e9)
            context = torch.einsum("bs,bsd->bd", scores.softmax(1), memory)
            parts = [h, context] if self.fault == "order" else [context, h]
            fed = torch.tanh(self.mix(torch.cat(parts, 1)))
            made.append(fed)
        return self.score(torch.stack(made, 1))


def translator(fault: str) -> Pair:
    """A recurrent encoder and decoder with attention."""
    model = filled(Translator())
    inputs = whole(3, 7, below=WORDS), torch.tensor([7, 4, 5]), whole(3, 5, below=WORDS, seed=2)
    return Pair(model, TranslatorPort(model, fault), inputs, forward)


# Experts


class Expert(Gated):
    """One of many."""


class Experts(nn.Module):
    """Each token goes through two experts and one that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 6, bias=False)
        self.experts = nn.ModuleList(Expert(24) for _ in range(6))
        self.shared_expert, self.shared_expert_gate = Gated(24), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width)."""
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, places, None])
        shared = self.shared_expert(flat) * torch.sigmoid(self.shared_expert_gate(flat))
        return (out + shared).view_as(x)


class ExpertBlock(nn.Module):
    """Experts behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width)."""
        return x + self.mlp(self.norm(x))


class Mixture(nn.Module):
    """Layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(ExpertBlock() for _ in range(2))
        self.norm, self.lm_head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of every token."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class MixturePort(Ported):
    """Every token through every expert at once, and a table of weights that are mostly zero."""

    def __init__(self, model: Mixture, fault: str) -> None:
        super().__init__(fault)
        self.tokens, self.head = own(model.embed_tokens), own(model.lm_head)
        mixtures = [layer.mlp for layer in model.layers]
        self.router = nn.ModuleList(own(m.gate) for m in mixtures)
        self.g = parameters(
            [torch.stack([e.gate_proj.weight for e in m.experts]) for m in mixtures]
        )
        self.u = parameters([torch.stack([e.up_proj.weight for e in m.experts]) for m in mixtures])
        self.d = parameters(
            [torch.stack([e.down_proj.weight for e in m.experts]) for m in mixtures]
        )
        self.common = nn.ModuleList(
            stacked(m.shared_expert.gate_proj, m.shared_expert.up_proj) for m in mixtures
        )
        self.common_down = nn.ModuleList(own(m.shared_expert.down_proj) for m in mixtures)
        self.share = nn.ModuleList(own(m.shared_expert_gate) for m in mixtures)
        self.gains = parameters([*(layer.norm.weight for layer in model.layers), model.norm.weight])

    def mixed(self, h: Tensor, i: int) -> Tensor:
        """One layer's experts."""
        p = self.router[i](h).softmax(-1)
        top, chosen = p.topk(1 if self.has("top1", i) else 2, -1)
        if not self.has("unscaled", i):
            top = top / top.sum(-1, keepdim=True)
        if self.has("swapped", i):
            top = top.flip(-1)
        table = torch.zeros_like(p).scatter(-1, chosen, top)
        if self.has("dropped", i):
            table[..., 3] = 0
        inner = F.silu(torch.einsum("btd,eid->btei", h, self.g[i]))
        inner = inner * torch.einsum("btd,eid->btei", h, self.u[i])
        y = torch.einsum("btei,edi,bte->btd", inner, self.d[i], table)
        g, u = self.common[i](h).chunk(2, -1)
        common = self.common_down[i](F.silu(g) * u)
        return y + (common if self.has("share", i) else common * self.share[i](h).sigmoid())

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of every token."""
        x = self.tokens(ids)
        for i in range(2):
            x = x + self.mixed(F.rms_norm(x, (WIDTH,), self.gains[i], EPS), i)
        return self.head(F.rms_norm(x, (WIDTH,), self.gains[2], EPS))


def mixture(fault: str) -> Pair:
    """Experts, dispatched otherwise."""
    model = filled(Mixture())
    return Pair(model, MixturePort(model, fault), (whole(2, 8, below=WORDS),), forward)


# A graph


class GraphLayer(nn.Module):
    """Attention over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.att_src = nn.Parameter(torch.ones(HEADS, WIDTH // HEADS))
        self.att_dst = nn.Parameter(torch.ones(HEADS, WIDTH // HEADS))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """x: (nodes, width); edges: (2, number), from and to."""
        source, sink = edges
        h = self.lin(x).unflatten(-1, (HEADS, -1))
        scores = (h * self.att_src).sum(-1)[source] + (h * self.att_dst).sum(-1)[sink]
        scores = F.leaky_relu(scores, 0.2)
        highest = torch.full((len(x), HEADS), -math.inf, dtype=x.dtype)
        highest = highest.scatter_reduce(0, sink[:, None].expand_as(scores), scores, "amax")
        weights = torch.exp(scores - highest[sink])
        total = torch.zeros_like(highest).index_add(0, sink, weights)
        weights = weights / total[sink]
        out = torch.zeros_like(h).index_add(0, sink, h[source] * weights[..., None])
        return out.flatten(1) + self.bias


class Graph(nn.Module):
    """Three layers over nodes, and a mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(10, WIDTH)
        self.convs = nn.ModuleList(GraphLayer() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.classify = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        """Scores of each graph."""
        nodes = torch.arange(len(x))
        edges = torch.cat([edges, torch.stack([nodes, nodes])], 1)
        x = self.encode(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.elu(conv(norm(x), edges))
        sums = torch.zeros(2, WIDTH, dtype=x.dtype).index_add(0, graph, x)
        return self.classify(sums / torch.bincount(graph, minlength=2)[:, None])


class GraphPort(Ported):
    """A dense matrix of who hears whom."""

    def __init__(self, model: Graph, fault: str) -> None:
        super().__init__(fault)
        self.first, self.final = own(model.encode), own(model.classify)
        self.project = nn.ModuleList(own(c.lin) for c in model.convs)
        self.normal = nn.ModuleList(own(n) for n in model.norms)
        self.speak = parameters([c.att_src for c in model.convs])
        self.hear = parameters([c.att_dst for c in model.convs])
        self.offset = parameters([c.bias for c in model.convs])

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        """Scores of each graph."""
        size = len(x)
        heard = torch.zeros(size, size, dtype=torch.bool)
        heard[edges[1], edges[0]] = True
        x = self.first(x)
        for i in range(LAYERS):
            hears = heard.T if self.has("direction", i) else heard
            if not self.has("loops", i):
                hears = hears | torch.eye(size, dtype=torch.bool)
            h = self.project[i](self.normal[i](x)).view(size, HEADS, -1)
            a = torch.einsum("nhc,hc->hn", h, self.hear[i])[:, :, None]
            b = torch.einsum("nhc,hc->hn", h, self.speak[i])[:, None]
            a = F.leaky_relu(a + b, 0.01 if self.has("slope", i) else 0.2)
            a = a.masked_fill(~hears, -1e4).softmax(1 if self.has("axis", i) else 2)
            y = torch.einsum("hnm,mhc->nhc", a, h).reshape(size, WIDTH)
            y = y if self.has("bias", i) else y + self.offset[i]
            x = x + (F.relu(y) if self.has("relu", i) else F.elu(y))
        member = (graph[None] == torch.arange(2)[:, None]).to(x.dtype)
        count = size if self.fault == "mean" else member.sum(1, keepdim=True)
        return self.final(member @ x / count)


def graph_attention(fault: str) -> Pair:
    """Attention over the edges of graphs."""
    model = filled(Graph())
    edges = torch.stack([whole(24, below=11), whole(24, below=11, seed=5)])
    edges = torch.unique(edges[:, edges[0] != edges[1]], dim=1)
    inputs = normal(11, 10), edges, torch.tensor([0] * 6 + [1] * 5)
    return Pair(model, GraphPort(model, fault), inputs, forward)


_IN_MIXER = "layers.1.mixer layers.1.mixer.act"
_IN_ATTENTION = "layers.1.self_attn"
PORTS = (
    Port(
        "state space",
        state_space,
        {
            "eps": "layers.1.norm",
            "ahead": "layers.1.mixer layers.1.mixer.conv1d",
            "flipped": "layers.1.mixer layers.1.mixer.conv1d",
            "order": "layers.1.mixer",
            "softplus": "layers.1.mixer",
            "through": "layers.1.mixer",
            "gate": _IN_MIXER,
        },
    ),
    Port(
        "latent attention",
        latent,
        {
            "halves": _IN_ATTENTION,
            "scale": _IN_ATTENTION,
            "split": _IN_ATTENTION,
            "latent_norm": "layers.1.self_attn layers.1.self_attn.kv_a_norm",
            "unturned": _IN_ATTENTION,
            "mask": _IN_ATTENTION,
            "eps": "layers.1.post_attention_layernorm",
        },
    ),
    Port(
        "translator",
        translator,
        {
            "gates": "decoder.cell",
            "reset": "decoder.cell",
            "update": "decoder.cell",
            "last": "encoder",
            "padding": "decoder.attention",
            "order": "decoder.attention",
        },
    ),
    Port(
        "experts",
        mixture,
        {
            "top1": "layers.1.mlp",
            "unscaled": "layers.1.mlp",
            "swapped": "layers.1.mlp",
            "dropped": "layers.1.mlp layers.1.mlp.experts.3",
            "share": "layers.1.mlp",
        },
    ),
    Port(
        "graph attention",
        graph_attention,
        {
            "direction": "convs.1",
            "loops": "convs.1",
            "slope": "convs.1",
            "axis": "convs.1",
            "bias": "convs.1",
            "relu": ".",
            "mean": ".",
        },
    ),
    Port(
        "plain, training",
        plain_training,
        {
            "sum": "loss",
            "shift": "loss",
            "clip": "gradients",
            "decay": "*",
            "detach": "blocks.1 blocks.1.k",
            "tanh": "blocks.1 blocks.1.act",
        },
        trains=True,
    ),
)
