"""SmolLM2-135M with its own weights: 5 prompts, 16 tokens each, float32 against bfloat16, and a
fault that acts from step 3 on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import whence

pytestmark = [pytest.mark.torch, pytest.mark.real_weights, pytest.mark.slow]
torch = pytest.importorskip("torch")

from generating import from_step  # noqa: E402

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def add(a, b):\n    ",
    "Water boils at",
    "The best way to learn",
]


@pytest.fixture(scope="module")
def load() -> Any:
    from whence.demo import torch_smollm2
    from whence.errors import MissingDependency

    try:
        torch_smollm2.folder()
    except MissingDependency as error:
        pytest.skip(str(error))
    return torch_smollm2.load


def _captured(
    path: Path, loaded: Any, new: int = 16, prompts: list[str] = PROMPTS, **options: Any
) -> list[list[int]]:
    net, tokenizer = loaded
    tokenizer.padding_side = "left"
    given = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad(), whence.capture(net, path, **options):
        out = net.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return [row[given.input_ids.shape[1] :].tolist() for row in out]


@pytest.fixture(scope="module")
def reference(load: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path = tmp_path_factory.mktemp("smollm2") / "ref"
    return path, _captured(path, load(), logits=True)


def test_bf16_parts_only_where_rounding_explains_it(reference, load, tmp_path):
    path, tokens = reference
    _captured(tmp_path / "own", load(torch.bfloat16), logits=True)
    found = whence.compare(path, tmp_path / "own", min_coverage=0.0)
    assert (found.status, found.findings) == ("same", ())
    # Whether any text parts depends on the processor's kernels.
    assert {p.outcome for p in found.generation.prompts} <= {"equal", "explained"}
    assert (
        _captured(tmp_path / "forced", load(torch.bfloat16), logits=True, force_tokens=path)
        == tokens
    )
    found = whence.compare(path, tmp_path / "forced")
    assert (found.status, found.coverage.share) == ("same", 1.0)
    assert 0.005 < found.generation.noise < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_from_step_3_on_is_told_at_step_3(reference, load, tmp_path, dtype):
    net, tokenizer = load(dtype)
    from_step(net, "model.layers.20.mlp", 3)
    _captured(tmp_path / "tgt", (net, tokenizer), logits=True, force_tokens=reference[0])
    found = whence.compare(reference[0], tmp_path / "tgt")
    assert (found.status, found.findings[0].step) == ("different", 3)
    assert {t.verdict for t in found.generation.tokens if t.step < 3} <= {
        "identical",
        "noise",
        "explained",
    }


def test_full_captures_lead_to_its_module(load, tmp_path):
    _captured(tmp_path / "ref", load(), 6, PROMPTS[:3])
    net, tokenizer = load(torch.bfloat16)
    from_step(net, "model.layers.20.mlp", 3)
    _captured(tmp_path / "tgt", (net, tokenizer), 6, PROMPTS[:3])
    found = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert (found.status, found.findings[0].name, found.findings[0].step) == (
        "different",
        "model.layers.20.mlp",
        3,
    )
    assert found.generation.led_to == "model.layers.20.mlp"
