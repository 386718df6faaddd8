"""Settings of architectures whose configuration as it is gives no model that runs, or none with the
part that the type is named after. They are laid over what the rules of `tiny_configs` choose.
"""

from __future__ import annotations

from typing import Any

_RESNET = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage2", "stage3", "stage4"],
    },
}
"""A backbone of transformers' own in place of one that needs the package timm."""

_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
_ROTATIONS = {"full_attention": _ROTATION, "sliding_attention": _ROTATION}

_SWIN = {"backbone_config": {"embed_dim": 48}}
"""Three heads in the first stage, which the width has to be a multiple of."""
_FOUR_LAYERS = {
    "backbone_config": {
        "num_hidden_layers": 4,
        "out_indices": [1, 2, 3, 4],
        "reshape_hidden_states": False,
    }
}
_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16}
_PARTS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_CODES = {"upsample_groups": 64}

BY_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], **_HEADS},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass": {"text_config": {"rope_parameters": _ROTATIONS}},
    "cohere_compass_text": {"rope_parameters": _ROTATIONS},
    "conditional_detr": _RESNET,
    "csm": {"codec_config": _CODES},
    "dab-detr": _RESNET,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "deformable_detr": _RESNET,
    "depth_anything": _FOUR_LAYERS,
    "detr": _RESNET,
    "diffusion_gemma": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    },
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "falcon_h1": {"mamba_d_ssm": 128, **_HEADS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **_HEADS},
    "grounding-dino": _SWIN,
    "hunyuan_vl": {"text_config": {"rope_parameters": _PARTS}},
    "hunyuan_vl_text": {"rope_parameters": _PARTS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kyutai_speech_to_text": {"codec_config": _CODES},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mask2former": _SWIN,
    "maskformer": _SWIN,
    "mimi_decoder": _CODES,
    "mm-grounding-dino": _SWIN,
    "nemotron": {"num_key_value_heads": 4},
    "oneformer": _SWIN,
    "pocket_tts_audio_tokenizer_decoder": _CODES,
    "prompt_depth_anything": _FOUR_LAYERS,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "table-transformer": _RESNET,
    "tipsv2_dpt": _FOUR_LAYERS,
    "vitmatte": {"fusion_hidden_sizes": [32, 16, 8, 4], "convstream_hidden_sizes": [8, 16, 32]},
    "xmod": {"default_language": "en_XX"},
    "zoedepth": _FOUR_LAYERS,
}
