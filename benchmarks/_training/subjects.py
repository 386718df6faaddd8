"""Small models of four kinds with fixed weights, and what they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn

from _training import fresh_models

STEPS, MICRO_BATCHES = 2, 2
"""Steps of the optimiser, and backward passes of each."""
_VOCABULARY, _CLASSES, _LENGTH, _ROWS = 96, 10, 12, 2
IGNORED = -100
"""The label of what counts for nothing."""

_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}

Batch = dict[str, torch.Tensor]


def _llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**_TEXT, **options)
    return transformers.LlamaForCausalLM(config)


def _mixtral(**options: Any) -> nn.Module:
    config = transformers.MixtralConfig(
        **_TEXT,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        **options,
    )
    return transformers.MixtralForCausalLM(config)


def _vit(**options: Any) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=_CLASSES,
        **options,
    )
    return transformers.ViTForImageClassification(config)


def _resnet(**options: Any) -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
        num_labels=_CLASSES,
        **options,
    )
    return transformers.ResNetForImageClassification(config)


_SEEN: dict[str, Callable[..., nn.Module]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "vit": _vit,
    "resnet": _resnet,
}
SUBJECTS = tuple(_SEEN)
"""The models that the rules were set with."""
_MAKERS: dict[str, Callable[..., nn.Module]] = {
    **_SEEN,
    "gpt2": fresh_models.gpt2,
    "t5": fresh_models.t5,
    "convnext": fresh_models.convnext,
    "lstm": fresh_models.Recurrent,
    "unet": fresh_models.UNet,
}
_TEXTS = ("llama", "mixtral", "gpt2", "lstm", "t5")


def made(name: str, **options: Any) -> nn.Module:
    """The model of this name, in training mode, with the weights that it always has."""
    torch.manual_seed(0)
    return _MAKERS[name](**options).train()


def is_text(name: str) -> bool:
    """Does the model read tokens? Else images."""
    return name in _TEXTS


def batches(name: str) -> Iterator[Batch]:
    """What the model is given, micro-batch by micro-batch: inputs and labels."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS * MICRO_BATCHES):
        if is_text(name):
            shape = (_ROWS, _LENGTH)
            words = _VOCABULARY if name in SUBJECTS else fresh_models.VOCABULARY
            tokens = torch.randint(3, words, shape, generator=draw)
            tokens[:, -2:] = 0
            labels = tokens.clone()
            labels[:, :3] = IGNORED
            before = {"decoder_input_ids": tokens.roll(1, 1)} if name == "t5" else {}
            yield {"input_ids": tokens, **before, "labels": labels}
        else:
            pixels = torch.randn(2 * _ROWS, 3, 16, 16, generator=draw)
            extents = (2 * _ROWS, 16, 16) if name == "unet" else (2 * _ROWS,)
            classes = _CLASSES if name in SUBJECTS else fresh_models.CLASSES
            labels = torch.randint(0, classes, extents, generator=draw)
            yield {"pixel_values": pixels, "labels": labels}
