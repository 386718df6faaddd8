"""A fused step may take the betas of its optimiser as float32, as CUDA's does; that is rounding."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import whence
from whence.comparison.options import CompareOptions
from whence.comparison.pipeline import compare_runs
from whence.records import Over
from whence.report import answer

pytestmark = pytest.mark.torch
F32 = np.float32


def as_cuda(off=0.0):
    """AdamW's fused kernel with betas and powers of them in float32. off: what it gets wrong."""

    def kernel(params, grads, m, v, _, steps, *, lr, beta1, beta2, weight_decay, eps, **rest):
        del rest
        first, second = F32(beta1), F32(beta2)
        for p, g, a, b, step in zip(params, grads, m, v, steps, strict=True):
            a.mul_(float(first)).add_(g, alpha=float(F32(1) - first))
            b.mul_(float(second)).addcmul_(g, g, value=float(F32(1) - second))
            size = lr / float(F32(1) - first ** F32(step.item()))
            root = float(F32(1) - second ** F32(step.item())) ** 0.5
            p.mul_(1 - lr * weight_decay)
            p.addcdiv_(a, (b.sqrt() / root).add_(eps), value=-size * (1 + off))

    return kernel


class OnGPU(Over):
    """A run whose tensors lie on a GPU."""

    def __init__(self, base):
        records = [msgspec.structs.replace(r, device="cuda:0") for r in base.records]
        super().__init__(base, records=records)


def trained(path, *, fused, steps=5, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused, **options)
    with whence.capture(model, path):
        for _ in range(steps):
            model(torch.randn(8, 16)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.9999)])
def test_betas_in_float32_are_rounding(tmp_path, monkeypatch, betas):
    reference = trained(tmp_path / "reference", fused=False, betas=betas)
    monkeypatch.setattr(torch, "_fused_adamw_", as_cuda())
    target = trained(tmp_path / "target", fused=True, betas=betas)
    runs = [whence.open_run(path) for path in (reference, target)]
    # What a GPU recorded need not be reproduced bit for bit on the processor.
    for pair in ((runs[0], runs[1]), (OnGPU(runs[1]), runs[0])):
        result = compare_runs(*pair, CompareOptions())
        assert result.status == "same", answer.answer(result)


def test_an_update_that_is_off_is_no_rounding(tmp_path, monkeypatch):
    """By 1e-4: a tenth of what 1 - 0.9999 in float32 would excuse in the second moment."""
    reference = trained(tmp_path / "reference", fused=False)
    monkeypatch.setattr(torch, "_fused_adamw_", as_cuda(1e-4))
    result = whence.compare(reference, trained(tmp_path / "target", fused=True))
    assert result.status == "different"
    assert result.findings[0].phase == "optimizer", answer.answer(result)


def test_other_betas_are_named(tmp_path):
    reference = trained(tmp_path / "reference", fused=False)
    result = whence.compare(
        reference, trained(tmp_path / "target", fused=True, betas=(0.9, 0.9989))
    )
    assert result.findings[0].phase == "optimizer" and "betas" in result.findings[0].sentence


@pytest.mark.parametrize("seed", [0, 1])
def test_a_step_that_was_fused_on_both_sides_is_replayed(tmp_path, seed):
    """Elements near zero are some ulps off the step that is not fused, by which it is replayed."""

    def run(name, weight_decay):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
        nn.init.normal_(model[0].weight, std=0.001)
        optimizer = torch.optim.AdamW(
            model.parameters(), 5e-5, fused=True, weight_decay=weight_decay
        )
        with whence.capture(model, tmp_path / name):
            for _ in range(2):
                model(torch.arange(64)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return tmp_path / name

    result = whence.compare(run("reference", 0.01), run("target", 0.3))
    first = result.findings[0]
    assert first.phase == "optimizer" and first.confidence == "certain", answer.answer(result)
    assert "weight_decay is 0.01 in the reference, 0.3" in first.sentence
    assert not [v for v in result.verdicts if "reproduce" in v.sentence]
