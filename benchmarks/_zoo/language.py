"""Models of transformers, from tiny configurations."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from _zoo.sides import ids, normal

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "d_model": 32, "n_embd": 32, "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "n_positions": 128, "max_seq_len": 128, "n_ctx": 128,
    "embedding_size": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_kv": 8, "d_ff": 64, "moe_intermediate_size": 32, "num_experts": 6, "num_local_experts": 6,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32, "state_size": 8, "time_step_rank": 4,
    "word_embed_proj_dim": 32, "dim": 32, "hidden_dim": 64, "sliding_window": 6, "image_size": 16, "patch_size": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "type_vocab_size": 2, "decoder_start_token_id": 2, "word_embedding_size": 32, "rotary_dim": 4, "max_source_positions": 40, "max_target_positions": 64,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 12,
}  # fmt: skip


def tiny(model_type: str, **own: Any) -> Any:
    """The configuration of a type, made small wherever it has the usual names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    names = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    given = {k: v for k, v in COMMON.items() if k in names}
    for name in [k for k in own if own[k] is None]:
        given.pop(name, None)
        own.pop(name)
    if "layer_types" in names and "layer_types" not in own and default.layer_types:
        kinds = list(dict.fromkeys(default.layer_types))
        mapped = getattr(default, "attribute_map", {}).get("layer_types", "layer_types")
        if not isinstance(getattr(kind, mapped, None), property):
            given["layer_types"] = (kinds * 2)[: own.get("num_hidden_layers", 2)]
    return kind(**{**given, **own})


def build(model_type: str, auto: str, own: dict[str, Any]) -> nn.Module:
    """The model, with attention written out."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = tiny(model_type, **own)
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        kind = getattr(transformers, auto)
        try:
            make = kind.from_config if "Auto" in auto else kind._from_config
            model = make(config, attn_implementation="eager", experts_implementation="eager")
        except (TypeError, ValueError):
            model = make(config)
    made: nn.Module = model
    return made


LM, BASE = "AutoModelForCausalLM", "AutoModel"


def text(rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Prompts without padding."""
    return {"input_ids": ids("tokens", rows, length, 97)}


def both() -> dict[str, Tensor]:
    """A text for the encoder and one for the decoder."""
    return {**text(), "decoder_input_ids": ids("decoder", 2, 7, 97)}


def image() -> dict[str, Tensor]:
    """Two images."""
    return {"pixel_values": normal("pixels", 2, 3, 16, 16)}


DECODER, ENCODER, SEQ, VISION = "rows text causal decoder", "rows text encoder", "rows text", "rows"
_FULL = {"sliding_window": None}
_MOE = {"decoder_sparse_step": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}  # fmt: skip


def _c(name: str, auto: str = LM, inputs: Callable[[], dict[str, Tensor]] = text, traits: str = DECODER, kind: str = "", **own: Any) -> tuple[str, tuple[Any, ...]]:  # fmt: skip
    return name, (kind or name, auto, inputs, traits, own)


TYPES: dict[str, tuple[Any, ...]] = dict(
    [
        _c("llama"), _c("llama-bias", kind="llama", attention_bias=True, mlp_bias=True), _c("llama-tied", kind="llama", tie_word_embeddings=True),
        _c("mistral"), _c("mistral-full", kind="mistral", **_FULL), _c("ministral"), _c("qwen2"), _c("qwen3"), _c("gemma"), _c("gemma2"), _c("gemma3_text"),
        _c("gpt2"), _c("gpt_neo", attention_types=[[["global", "local"], 1]]), _c("gpt_neox"), _c("gptj"), _c("gpt_bigcode"), _c("opt"), _c("bloom"), _c("falcon"),
        _c("mpt"), _c("phi"), _c("phi3"), _c("stablelm"), _c("starcoder2"), _c("olmo"), _c("olmo2"), _c("olmo3"), _c("cohere"), _c("cohere2"), _c("granite"), _c("persimmon"),
        _c("codegen"), _c("biogpt"), _c("xglm", attention_heads=4), _c("nemotron"), _c("glm"), _c("glm4"), _c("helium"), _c("exaone4"), _c("smollm3"), _c("arcee"), _c("apertus"),
        _c("seed_oss"), _c("ernie4_5"), _c("hunyuan_v1_dense"), _c("diffllama"), _c("minicpm3", head_dim=None, num_key_value_heads=4), _c("bitnet"), _c("nanochat"), _c("modernbert-decoder"), _c("ctrl", dff=64),
        _c("mixtral"), _c("qwen2_moe", **_MOE), _c("qwen3_moe", **_MOE), _c("olmoe"), _c("phimoe"), _c("granitemoe"), _c("deepseek_v2", head_dim=None, num_key_value_heads=4, **_MOE), _c("deepseek_v3", head_dim=None, num_key_value_heads=4, **_MOE),
        _c("gpt_oss"), _c("jetmoe"), _c("ernie4_5_moe", moe_num_experts=6, moe_k=2, moe_layer_start_index=0), _c("glm4_moe", **_MOE), _c("flex_olmo"), _c("minimax"), _c("hunyuan_v1_moe"),
        _c("mamba"), _c("mamba2", num_heads=8, head_dim=8, n_groups=1), _c("falcon_mamba"), _c("jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False),
        _c("bamba", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1), _c("zamba2", layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"], num_hidden_layers=4, num_mem_blocks=1, mamba_ngroups=1, n_mamba_heads=8, mamba_headdim=8, mamba_d_state=8, attention_head_dim=16), _c("falcon_h1", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1),
        _c("recurrent_gemma", lru_width=32, attention_window_size=8, block_types=("recurrent", "attention")), _c("rwkv"), _c("lfm2"), _c("nemotron_h", layer_types=["linear_attention", "full_attention", "mlp"], num_hidden_layers=3, mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1), _c("granitemoehybrid", layer_types=["linear_attention", "full_attention"], mamba_n_groups=1, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8),
        _c("qwen3_next", linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8), _c("olmo_hybrid"),
        _c("bert", BASE, traits=ENCODER), _c("roberta", BASE, traits=ENCODER), _c("distilbert", BASE, traits=ENCODER), _c("albert", BASE, traits=ENCODER), _c("electra", BASE, traits=ENCODER), _c("deberta-v2", BASE, traits=ENCODER),
        _c("mpnet", BASE, traits=ENCODER), _c("modernbert", "AutoModelForMaskedLM", traits=ENCODER, local_attention=6), _c("xlnet", BASE, traits=SEQ), _c("fnet", BASE, traits=SEQ, tpu_short_seq_length=12, use_tpu_fourier_optimizations=False), _c("convbert", BASE, traits=ENCODER),
        _c("camembert", BASE, traits=ENCODER), _c("xlm", BASE, traits=ENCODER, emb_dim=32), _c("squeezebert", BASE, traits=ENCODER, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1, intermediate_groups=1, output_groups=1), _c("nomic_bert", BASE, traits=ENCODER), _c("eurobert", BASE, traits=ENCODER), _c("rembert", BASE, traits=ENCODER, input_embedding_size=32, output_embedding_size=32),
        _c("t5", "AutoModelForSeq2SeqLM", both, SEQ), _c("umt5", "AutoModelForSeq2SeqLM", both, SEQ), _c("bart", "AutoModelForSeq2SeqLM", both, SEQ), _c("marian", "AutoModelForSeq2SeqLM", both, SEQ), _c("pegasus", "AutoModelForSeq2SeqLM", both, SEQ), _c("m2m_100", "AutoModelForSeq2SeqLM", both, SEQ), _c("mbart", "AutoModelForSeq2SeqLM", both, SEQ), _c("blenderbot", "AutoModelForSeq2SeqLM", both, SEQ),
        _c("switch_transformers", "AutoModelForSeq2SeqLM", both, SEQ), _c("prophetnet", "AutoModelForSeq2SeqLM", both, SEQ, num_encoder_attention_heads=4, num_decoder_attention_heads=4, num_encoder_layers=2, num_decoder_layers=2), _c("led", "AutoModelForSeq2SeqLM", lambda: {**text(), "decoder_input_ids": ids("decoder", 2, 7, 97)}, SEQ, attention_window=4),
        _c("vit", BASE, image, VISION), _c("deit", BASE, image, VISION), _c("beit", BASE, image, VISION), _c("dinov2", BASE, image, VISION), _c("swin", BASE, image, VISION, embed_dim=16, num_attention_heads=None, num_hidden_layers=None, num_layers=None, hidden_size=None, depths=[1, 1], num_heads=[2, 4], window_size=2, image_size=16, patch_size=2),
        _c("convnext", BASE, image, VISION, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, image_size=16, patch_size=2), _c("resnet", BASE, image, VISION, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]), _c("mobilenet_v2", BASE, lambda: {"pixel_values": normal("pixels", 2, 3, 32, 32)}, VISION, image_size=32, depth_multiplier=0.35),
        _c("segformer", BASE, lambda: {"pixel_values": normal("pixels", 2, 3, 32, 32)}, VISION, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16, patch_size=None, num_hidden_layers=None), _c("poolformer", BASE, lambda: {"pixel_values": normal("pixels", 2, 3, 32, 32)}, VISION, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], patch_size=None),
        _c("regnet", BASE, image, VISION, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8), _c("mobilevit", BASE, lambda: {"pixel_values": normal("pixels", 1, 3, 32, 32)}, VISION, image_size=32, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48], patch_size=2),
        _c("vit_mae-encoder", kind="ijepa", auto=BASE, inputs=image, traits=VISION), _c("yolos", BASE, image, VISION, image_size=[16, 16], num_detection_tokens=4), _c("videomae", BASE, lambda: {"pixel_values": normal("pixels", 1, 4, 3, 16, 16)}, VISION, num_frames=4), _c("dinov3_vit", BASE, image, VISION),
        _c("clip", BASE, lambda: {**text(), **image()}, "", text_config={k: COMMON[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")}, vision_config={k: COMMON[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")}, projection_dim=16),
        _c("siglip", BASE, lambda: {**text(), **image()}, "", text_config={k: COMMON[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")}, vision_config={k: COMMON[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")}),
        _c("llava", "LlavaForConditionalGeneration", lambda: {"input_ids": torch.cat([torch.full((2, 16), 90), ids("tokens", 2, 8, 90)], 1), **image()}, "", image_token_index=90, image_token_id=90, text_config={"model_type": "llama", **{k: COMMON[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}}, vision_config={"model_type": "clip_vision_model", **{k: COMMON[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")}}, vision_feature_layer=-1),
        _c("git", LM, lambda: {**text(), **image()}, "", vision_config={k: COMMON[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")}),
        _c("wav2vec2", BASE, lambda: {"input_values": normal("sound", 1, 400)}, VISION, conv_dim=(16, 16), conv_kernel=(8, 4), conv_stride=(4, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2), _c("hubert", BASE, lambda: {"input_values": normal("sound", 1, 400)}, VISION, conv_dim=(16, 16), conv_kernel=(8, 4), conv_stride=(4, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2),
        _c("whisper", BASE, lambda: {"input_features": normal("mels", 2, 16, 80), "decoder_input_ids": ids("decoder", 2, 7, 97)}, SEQ, num_mel_bins=16), _c("audio-spectrogram-transformer", BASE, lambda: {"input_values": normal("mels", 2, 24, 16)}, VISION, num_mel_bins=16, max_length=24, frequency_stride=4, time_stride=4), _c("speech_to_text", BASE, lambda: {"input_features": normal("mels", 2, 40, 16), "decoder_input_ids": ids("decoder", 2, 7, 97)}, SEQ, input_feat_per_channel=16, conv_channels=16, max_source_positions=64),
        _c("encodec", BASE, lambda: {"input_values": normal("sound", 1, 1, 640)}, VISION, num_filters=4, hidden_size=16, upsampling_ratios=[4, 2], codebook_size=16, num_residual_layers=1),
        _c("patchtst", BASE, lambda: {"past_values": normal("series", 2, 32, 3)}, VISION, context_length=32, patch_length=8, patch_stride=8, num_input_channels=3), _c("decision_transformer", BASE, lambda: {"states": normal("states", 2, 5, 6), "actions": normal("actions", 2, 5, 3), "rewards": normal("rewards", 2, 5, 1), "returns_to_go": normal("returns", 2, 5, 1), "timesteps": torch.arange(5).expand(2, 5)}, "", state_dim=6, act_dim=3, hidden_size=32),
    ]
)  # fmt: skip
