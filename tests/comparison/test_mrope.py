"""Rotary positions of several axes, as vision language models have them: batched, cached, with
pictures and without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import whence

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from generating import padded  # noqa: E402

PICTURE, NEW = 100, 3
GRIDS = ((4, 4), (4, 6), (2, 4))


def _model() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={
                "vocab_size": 128,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": rope,
                "bos_token_id": None,
                "eos_token_id": None,
                "initializer_range": 0.3,
            },
            vision_config={
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 32,
                "mlp_ratio": 1,
                "num_heads": 2,
                "patch_size": 4,
            },
            image_token_id=PICTURE,
            video_token_id=101,
            vision_start_token_id=102,
            vision_end_token_id=103,
        )
    ).eval()


def _prompts(pictures: bool) -> list[tuple[list[int], Any, tuple[int, int, int]]]:
    draw = np.random.default_rng(1)
    out = []
    for n, (high, wide) in enumerate(GRIDS):
        shown = [102, *[PICTURE] * (high * wide // 4), 103] if pictures else []
        ids = [*range(10 * n + 1, 10 * n + 5 + n), *shown, *range(60 + n, 66)]
        out.append(
            (
                ids,
                torch.from_numpy(draw.standard_normal((high * wide, 96)).astype(np.float32)),
                (1, high, wide),
            )
        )
    return out


@torch.no_grad()
def _asked(net: Any, prompts: Any, pictures: bool, **how: Any) -> list[list[int]]:
    ids, mask = padded([p[0] for p in prompts])
    given = {"input_ids": ids, "attention_mask": mask}
    if pictures:
        given |= {
            "pixel_values": torch.cat([p[1] for p in prompts]),
            "image_grid_thw": torch.tensor([p[2] for p in prompts]),
        }
        given["mm_token_type_ids"] = (ids == PICTURE).int()
    out = net.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **how)
    return [row[ids.shape[1] :].tolist() for row in out]


def _captured(
    path: Any, net: Any, prompts: Any, pictures: bool, level: dict[str, Any], **how: Any
) -> list[list[int]]:
    with whence.capture(net, path, **level):
        return [row for batch in prompts for row in _asked(net, batch, pictures, **how)]


@pytest.mark.parametrize(("pictures", "level"), [(False, {}), (True, {}), (True, {"logits": True})])
def test_batched_and_alone_and_without_a_cache(tmp_path, pictures, level):
    net, prompts = _model(), _prompts(pictures)
    alone = [[p] for p in prompts]
    tokens = _captured(tmp_path / "alone", net, alone, pictures, level)
    assert _captured(tmp_path / "again", net, alone, pictures, level, use_cache=False) == tokens
    assert _captured(tmp_path / "batch", net, [prompts], pictures, level) == tokens
    for name in ("alone", "again", "batch"):
        found = whence.compare(tmp_path / "alone", tmp_path / name)
        # Pictures of several prompts go through the tower as one, and its groups of patches have no
        # row of their own.
        expected = "undecided" if (name, pictures, level) == ("batch", True, {}) else "same"
        assert (found.status, found.findings) == (expected, ())
        assert (found.generation.compared, found.generation.of) == (NEW * 3, NEW * 3)
        assert {p.outcome for p in found.generation.prompts} == {"equal"}


def test_a_fault_is_named_across_batches(tmp_path):
    net, prompts = _model(), _prompts(False)
    _captured(tmp_path / "alone", net, [[p] for p in prompts], False, {})
    net.model.language_model.layers[0].mlp.register_forward_hook(
        lambda module, given, out: out * 1.02
    )
    _captured(tmp_path / "batch", net, [prompts], False, {})
    found = whence.compare(tmp_path / "alone", tmp_path / "batch")
    assert (found.status, found.findings[0].name) == (
        "different",
        "model.language_model.layers.0.mlp",
    )
