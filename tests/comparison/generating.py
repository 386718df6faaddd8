"""A small language model and three ways to generate with it, for tests of what is compared token by
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PROMPTS = (
    (5, 9, 2),
    (7, 1, 30, 12, 4),
    (11, 3),
    (40, 41, 42, 43),
    (8, 8, 8),
    (60, 2),
    (33, 21, 9, 9, 1, 2),
    (17, 50),
)
NEW = 12


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def padded(prompts: Sequence[Sequence[int]], left: bool = True) -> tuple[Any, Any]:
    """(token ids, attention mask) of prompts in one batch."""
    width = max(map(len, prompts))
    fill = [[0] * (width - len(p)) for p in prompts]
    ids = [f + list(p) if left else list(p) + f for f, p in zip(fill, prompts)]
    mask = [
        [0] * len(f) + [1] * len(p) if left else [1] * len(p) + [0] * len(f)
        for f, p in zip(fill, prompts)
    ]
    return torch.tensor(ids), torch.tensor(mask)


@torch.no_grad()
def generate(
    net: Any, prompts: Sequence[Sequence[int]] = PROMPTS, new: int = NEW, **how: Any
) -> list[list[int]]:
    """transformers' own `generate`, the prompts in one batch, padded on the left; the new tokens of
    each.
    """
    ids, mask = padded(prompts)
    out = net.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new,
        pad_token_id=0,
        **({"do_sample": False} | how),
    )
    return [row.tolist() for row in out[:, ids.shape[1] :]]


@torch.no_grad()
def loop(net: Any, prompt: Sequence[int], new: int = NEW, cached: bool = True) -> list[int]:
    """A plain decoding loop on one prompt: with a cache, or the whole text again at every step."""
    tokens, cache = list(prompt), None
    fed = torch.tensor([tokens])
    for _ in range(new):
        out = net(fed, past_key_values=cache, use_cache=True) if cached else net(fed)
        tokens.append(int(out.logits[0, -1].argmax()))
        cache = out.past_key_values if cached else None
        fed = torch.tensor([tokens[-1:] if cached else tokens])
    return tokens[len(prompt) :]


def from_step(net: Any, name: str, step: int, by: float = 1.5) -> None:
    """A fault that acts from a step on: what a module returns is multiplied."""
    calls = [0]
    net.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    net.get_submodule(name).register_forward_hook(
        lambda module, given, out: out * by if calls[0] > step else None
    )
