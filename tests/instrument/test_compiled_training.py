"""Trainings of models that `torch.compile` made: steps, buffers, and gradients that are rounding."""

import pytest
import torch
from torch import nn

import whence

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def train(path, compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    called = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(1)
    with whence.capture(model, path):
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(4, 8, generator=draw)
                (nn.functional.mse_loss(called(x), torch.zeros(4, 2)) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return whence.open_run(path)


def test_what_torch_compile_makes_of_a_captured_model_is_the_model(tmp_path):
    run = train(tmp_path / "target", compiled=True)
    forward = [c for c in run.calls if c.phase == "forward" and not c.scope and not c.op]
    assert [(c.step, c.micro) for c in forward] == [(s, m) for s in range(3) for m in range(2)]
    first = {ref.slot: run.array(ref.record) for ref in forward[0].refs}
    before, after = (
        next(v for k, v in first.items() if k.startswith(kind) and k.endswith("running_mean"))
        for kind in ("param", "mutated")
    )
    assert not before.any()
    assert after.any()
    train(tmp_path / "reference", compiled=False)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    # The gradient of a bias before a batch norm is only rounding.
    assert not result.findings
