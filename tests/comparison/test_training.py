"""Training runs: faults in the optimiser are named there; where it is not captured, it is neither
blamed nor passed over.
"""

import pytest
import torch
from torch import nn

import whence

pytestmark = pytest.mark.torch


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.LayerNorm(32),
        nn.Linear(32, 4),
    )


def train(net, path, rate=1e-2, **options):
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(net.train().parameters(), lr=rate)
    draw = torch.Generator().manual_seed(3)
    with whence.capture(net, path, force=True, **options):
        for _ in range(3):
            for _ in range(2):
                x, y = torch.randn(8, 16, generator=draw), torch.randint(0, 4, (8,), generator=draw)
                nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "ref"
    train(model(), path)
    return path


def test_the_same_training_is_the_same(reference, tmp_path):
    train(model(), tmp_path / "tgt")
    assert whence.compare(reference, tmp_path / "tgt").status == "same"


def test_a_fault_in_the_forward_is_named_once_and_its_consequences_are_not(reference, tmp_path):
    broken = model()
    broken[4].eps = 1e-2
    train(broken, tmp_path / "tgt")
    result = whence.compare(reference, tmp_path / "tgt")
    assert [(f.name, f.step, f.cause) for f in result.findings] == [("4", 0, "semantic")]


def test_another_learning_rate_is_one_finding_with_both_values(reference, tmp_path):
    train(model(), tmp_path / "tgt", rate=2e-2)
    result = whence.compare(reference, tmp_path / "tgt")
    (finding,) = result.findings
    assert (finding.op_type, finding.phase, finding.step) == ("AdamW", "optimizer", 0)
    assert "lr is 0.01 in the reference, 0.02 in the target" in finding.sentence
    assert len(finding.also) == 4  # the other modules with parameters


def test_what_an_optimiser_parted_unseen_is_undecided_with_the_reason(tmp_path):
    train(model(), tmp_path / "ref", gradients=False)
    train(model(), tmp_path / "tgt", rate=2e-2, gradients=False)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == "undecided"
    assert result.findings == ()
    assert "diverged between steps" in result.headline
    assert "optimiser" in result.headline
