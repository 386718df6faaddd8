"""One language model twice: as a library has it, and as a serving engine runs it.

The engine: one axis for the tokens of all requests, chunks of prompts between single tokens, keys
and values in slots of a pool; q, k and v in one weight, gate and up in another; hidden and residual
apart, added in place by the next norm; the scores of the last tokens in a call of their own behind
the model; weights packed away.
"""

from __future__ import annotations

import torch
from torch import nn

DIM, HEADS, WIDE, WORDS, LAYERS, SLOTS = 48, 4, 80, 64, 3, 64


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: (..., tokens, heads, channels); cos, sin: (..., tokens, channels / 2)."""
    a, b = x.chunk(2, -1)
    c, s = cos[..., None, :], sin[..., None, :]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(DIM))
        self.eps = 1e-6

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


# ---- as a library has it


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "frequencies",
            1e4 ** (-torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS)),
            persistent=False,
        )

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].float() * self.frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(DIM, DIM, bias=False) for _ in range(4)
        )

    def forward(
        self, hidden_states: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        b, t, _ = hidden_states.shape
        q, k, v = (
            p(hidden_states).view(b, t, HEADS, -1) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, *tables), _rotated(k, *tables)
        mixed = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(b, t, DIM))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(DIM, WIDE, bias=False),
            nn.Linear(DIM, WIDE, bias=False),
        )
        self.down_proj, self.act_fn = nn.Linear(WIDE, DIM, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp = (
            Norm(),
            Attention(),
            Norm(),
            Mlp(),
        )

    def forward(
        self, hidden_states: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), tables)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.rotary_emb = Norm(), Rotary()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        tables = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, tables)
        return self.norm(x)


class Library(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.lm_head = Inner(), nn.Linear(DIM, WORDS, bias=False)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"logits": self.lm_head(self.model(input_ids, position_ids))}


# ---- as an engine runs it


class AddedNorm(Norm):
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self.scaled(x)
        residual.add_(x)
        x.copy_(self.scaled(residual))
        return x, residual


class Packed(nn.Module):
    """A linear layer whose weight is laid out for a kernel and left empty."""

    def __init__(self, *weights: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        kept = torch.cat([w.detach() for w in weights]).T.contiguous()
        self._kernel = lambda x: x @ kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x)


class Pool(nn.Module):
    """Attention over keys and values in slots; requests: (slots of all its tokens so far, tokens it
    has now).
    """

    requests: list[tuple[list[int], int]]

    def __init__(self) -> None:
        super().__init__()
        self._pool = [torch.zeros(SLOTS, HEADS, DIM // HEADS) for _ in range(2)]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(len(q), HEADS, -1) for x in (q, k, v))
        out, start = torch.empty_like(q), 0
        for slots, now in self.requests:
            here = slice(start, start + now)
            for pool, new in zip(self._pool, (k, v)):
                pool[slots[-now:]] = new[here]
            keys, values = (pool[slots] for pool in self._pool)
            scores = q[here].transpose(0, 1) @ keys.permute(1, 2, 0) / q.shape[-1] ** 0.5
            seen = torch.ones(now, len(slots)).tril(len(slots) - now).bool()
            out[here] = (
                scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values.transpose(0, 1)
            ).transpose(0, 1)
            start += now
        return out.reshape(len(q), DIM)


class EngineRotary(nn.Module):
    def __init__(self, base: float = 1e4) -> None:
        super().__init__()
        angles = torch.arange(SLOTS)[:, None].float() * base ** (
            -torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS)
        )
        self.register_buffer(
            "cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1), persistent=False
        )

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self.cos_sin_cache[positions].chunk(2, -1)
        q, k = (_rotated(x.view(len(x), HEADS, -1), *tables).reshape(len(x), DIM) for x in (q, k))
        return q, k


class EngineAttention(nn.Module):
    def __init__(self, old: Attention, rotary: EngineRotary) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = (
            Packed(old.q_proj.weight, old.k_proj.weight, old.v_proj.weight),
            Packed(old.o_proj.weight),
        )
        self.rotary_emb, self.attn = rotary, Pool()

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states).split(DIM, -1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))


class Multiplied(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class EngineMlp(nn.Module):
    def __init__(self, old: Mlp) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (
            Packed(old.gate_proj.weight, old.up_proj.weight),
            Packed(old.down_proj.weight),
        )
        self.act_fn = Multiplied()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class EngineBlock(nn.Module):
    def __init__(self, old: Block, rotary: EngineRotary) -> None:
        super().__init__()
        self.self_attn, self.mlp = EngineAttention(old.self_attn, rotary), EngineMlp(old.mlp)
        self.input_layernorm, self.post_attention_layernorm = (
            _norm(old.input_layernorm),
            _norm(old.post_attention_layernorm),
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


def _norm(old: Norm) -> AddedNorm:
    new = AddedNorm()
    new.load_state_dict(old.state_dict())
    return new


class EngineInner(nn.Module):
    def __init__(self, old: Inner) -> None:
        super().__init__()
        rotary = EngineRotary()  # one for all layers
        self.embed_tokens, self.norm = old.embed_tokens, _norm(old.norm)
        self.layers = nn.ModuleList(EngineBlock(layer, rotary) for layer in old.layers)


class Scores(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = [weight.detach()]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self._weight[0].T


class Engine(nn.Module):
    """`model` is not called itself: an engine that compiles takes its place."""

    def __init__(self, old: Library) -> None:
        super().__init__()
        self.model, self.logits_processor = EngineInner(old.model), Scores(old.lm_head.weight)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, residual = self.model.embed_tokens(input_ids), None
        for layer in self.model.layers:
            x, residual = layer(positions, x, residual)
        return self.model.norm(x, residual)[0]


PROMPTS = ([5, 9, 11, 3, 7, 21, 2, 14, 50], [8, 2, 40], [33, 12, 6, 17, 9])
NEXT = ([1, 2, 3], [4, 5, 6], [7, 8, 9])


def ask(model: Library) -> None:
    """Every sequence by itself, at once."""
    for prompt, new in zip(PROMPTS, NEXT):
        ids = torch.tensor([prompt + new])
        model(ids, torch.arange(ids.shape[1])[None])


def serve(model: Engine, *, chunk: int = 6, warm_up: bool = False) -> None:
    """All sequences together, prompts in chunks; the third comes one step later. warm_up: with a
    batch of dummies first.
    """
    pools = [layer.self_attn.attn for layer in model.model.layers]
    where = {0: [], 1: [], 2: []}
    free = iter(range(SLOTS))

    def step(requests: list[tuple[int, list[int]]]) -> None:
        """requests: (number, its tokens of this step)."""
        starts = {r: len(where[r]) for r, _ in requests}
        for r, tokens in requests:
            where[r] += [next(free) for _ in tokens]
        for pool in pools:
            pool.requests = [(list(where[r]), len(tokens)) for r, tokens in requests]
        hidden = model(
            torch.tensor([t for _, tokens in requests for t in tokens]),
            torch.tensor([starts[r] + i for r, tokens in requests for i in range(len(tokens))]),
        )
        last = torch.tensor([len(tokens) for _, tokens in requests]).cumsum(0) - 1
        model.logits_processor(hidden[last])

    if warm_up:
        where[-1] = []
        step([(-1, [0] * 4)])
    todo = {r: [*prompt, *new] for r, (prompt, new) in enumerate(zip(PROMPTS, NEXT))}
    done = dict.fromkeys(todo, 0)
    running = [0, 1]
    while todo:
        requests = []
        for r in [r for r in running if r in todo]:
            left = len(PROMPTS[r]) - done[r]
            tokens = todo[r][done[r] : done[r] + (min(left, chunk) if left > 0 else 1)]
            requests.append((r, tokens))
            done[r] += len(tokens)
        step(requests)
        running = [0, 1, 2]
        todo = {r: tokens for r, tokens in todo.items() if done[r] < len(tokens)}
