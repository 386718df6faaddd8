"""Tiny models of the families that transformers knows, with random weights, and inputs for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

MOST_PARAMETERS = 12_000_000
ROWS, LENGTH, IMAGE = 2, 12, 32

SMALL = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "d_embed",
         "word_embed_proj_dim", "attention_hidden_size", "projection_dim", "emb_dim", "width"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
         "decoder_layers", "num_encoder_layers", "num_decoder_layers", "depth",
         "decoder_num_hidden_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_encoder_attention_heads",
         "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_kv_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner",
         "n_inner", "ffn_hidden_size", "hidden_dim", "moe_intermediate_size", "ff_dim",
         "shared_expert_intermediate_size", "shared_intermediate_size",
         "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "d_head", "qk_nope_head_dim",
                     "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "time_step_rank"), 16),
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "n_vocab"), 99),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length",
                     "max_source_positions", "max_target_positions", "seq_length"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("image_size", "input_size"), IMAGE),
    "patch_size": 8, "state_size": 8, "sliding_window": 6, "rotary_dim": 4, "num_labels": 3,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "type_vocab_size": 2, "conv_kernel": 4,
}  # fmt: skip
"""Small values for the names that configurations use."""

OF_FAMILY: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "bloom": {"hidden_size": 32}, "falcon": {"new_decoder_architecture": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "convbert": {"head_ratio": 2}, "mobilebert": {"intra_bottleneck_size": 32},
    "xlnet": {"d_head": 8}, "deberta": {"pos_att_type": ["p2c", "c2p"]},
    "resnet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8},
    "regnet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "groups_width": 8},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
             "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
               "patch_size": 4},
    "segformer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4,
                  "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16},
    "levit": {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1] * 3,
              "key_dim": [8] * 3, "image_size": 64},
    "mobilenet_v1": {"depth_multiplier": 0.25}, "mobilenet_v2": {"depth_multiplier": 0.25},
    "poolformer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "patch_size": 7},
    "pvt": {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4,
            "num_attention_heads": [1, 2, 2, 2]},
    "cvt": {"embed_dim": [16, 16, 16], "depth": [1, 1, 1], "num_heads": [1, 2, 2]},
    "focalnet": {"embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32],
                 "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 64},
    "jamba": {"mamba_dt_rank": 4}, "dinov2": {"hidden_size": 32},
    "switch_transformers": {"expert_capacity": 64}, "reformer": {"hidden_size": 32},
}  # fmt: skip


class Family(NamedTuple):
    """A model of a family, in evaluation mode, and the keyword arguments of one call."""

    name: str
    model: Any
    inputs: dict[str, Any]


MAPPINGS = {
    "decoder": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
LEFT_OUT = {
    "perceiver", "tapas", "layoutlmv2", "udop", "speech_to_text", "speecht5", "musicgen",
}  # fmt: skip
"""Families whose inputs are not those of their kind."""


def names(kind: str) -> list[str]:
    """The families of a kind."""
    return [n for n in getattr(auto, MAPPINGS[kind]) if n not in LEFT_OUT]


def config_of(name: str) -> Any:
    """The family's configuration, small. Raises what its class raises."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    known = kind().to_dict()
    values = {k: v for k, v in SMALL.items() if isinstance(known.get(k), (int, type(None)))
              and k in known and not isinstance(known.get(k), bool)}  # fmt: skip
    return kind(**{**values, **OF_FAMILY.get(name, {})})


def family(kind: str, name: str, seed: int = 0) -> Family:
    """A model with random weights, and inputs. Raises where it cannot be built so small."""
    class_name = getattr(auto, MAPPINGS[kind])[name]
    made = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    config = config_of(name)
    if kind == "decoder" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    with torch.device("meta"):
        count = sum(p.numel() for p in made(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(seed)
    model = made(config).eval()
    return Family(f"{kind} {name}", model, inputs_of(kind, config))


def inputs_of(kind: str, config: Any) -> dict[str, Any]:
    """One call: ids with a mask, or pixels."""
    generator = torch.Generator().manual_seed(7)
    if kind == "image":
        size = getattr(config, "image_size", IMAGE)
        size = size if isinstance(size, int) else IMAGE
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.randn(ROWS, channels, size, size, generator=generator)}
    ids = torch.randint(3, 90, (ROWS, LENGTH), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "encoder-decoder":
        inputs["decoder_input_ids"] = torch.randint(3, 90, (ROWS, 7), generator=generator)
    return inputs


class _Recurrent(torch.nn.Module):
    """Ids through a recurrent layer to logits."""

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(99, 16)
        self.layer = layer
        self.head = torch.nn.Linear(width, 99)

    def forward(self, input_ids: Any) -> Any:
        return self.head(self.layer(self.embedding(input_ids))[0])


def own() -> Iterator[Family]:
    """Models of torch alone."""
    nn = torch.nn
    ids = torch.randint(3, 90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))
    for name, layer, width in (
        ("lstm", nn.LSTM(16, 24, 2, batch_first=True), 24),
        ("gru", nn.GRU(16, 24, batch_first=True), 24),
        ("rnn", nn.RNN(16, 24, batch_first=True), 24),
        ("lstm both ways", nn.LSTM(16, 24, batch_first=True, bidirectional=True), 48),
    ):
        yield Family(f"torch {name}", _Recurrent(layer, width).eval(), {"input_ids": ids})
    x = torch.randn(ROWS, LENGTH, 16, generator=torch.Generator().manual_seed(3))
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    yield Family("torch TransformerEncoder", encoder.eval(), {"src": x})
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    yield Family("torch TransformerEncoder, causal", encoder, {"src": x, "mask": mask})
    image = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    norms = {"batch": nn.BatchNorm2d(8), "group": nn.GroupNorm(2, 8), "instance":
             nn.InstanceNorm2d(8)}  # fmt: skip
    for name, norm in norms.items():
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 5),
        )  # fmt: skip
        yield Family(f"torch convnet, {name} norm", net.eval(), {"input": image})
    mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    yield Family("torch mlp", mlp.eval(), {"input": x[:, 0]})
    causal = nn.Sequential(nn.ConstantPad1d((3, 0), 0.0), nn.Conv1d(16, 16, 4), nn.ReLU())
    yield Family("torch causal convolution", causal.eval(), {"input": x.transpose(1, 2)})
