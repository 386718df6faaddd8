"""A fused optimizer writes parameters without a new version, also of a model in evaluation mode."""

import pytest

import whence
from whence import store

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("is_training", [True, False])
def test_parameters_are_read_again_after_a_fused_step(tmp_path, is_training):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(4096, 8), torch.nn.Linear(8, 4))
    model.train(is_training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    held = []
    with whence.capture(model, tmp_path / "run"):
        for step in range(2):
            held.append(model[0].weight.detach().clone().numpy())
            model(torch.tensor([2000 + step])).sum().backward()
            optimizer.step()
    run = store.open_run(tmp_path / "run")
    calls = [c for c in run.calls if c.scope == "0" and c.phase == "forward"]
    for call, weight in zip(calls, held, strict=True):
        (ref,) = call.slots("param")
        assert (run.array(ref.record) == weight).all()
