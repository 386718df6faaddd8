"""Replays that workers make are those that the comparison makes by itself: the files agree byte for
byte, for targets that round otherwise and for faults.
"""

import pytest
import torch
from differing_runs import files
from torch import nn

import whence
from whence.comparison.replays import replayer


class Block(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=epsilon)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self, epsilon=1e-5):
        super().__init__()
        self.embedding = nn.Embedding(17, 24)
        self.blocks = nn.ModuleList([Block(24, epsilon) for _ in range(3)])
        self.head = nn.Linear(24, 17)

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def captured(path, epsilon=1e-5, dtype=torch.float32, change=lambda model: None):
    torch.manual_seed(3)
    model = Model(epsilon).eval()
    change(model)
    model = model.to(dtype)
    with torch.no_grad(), whence.capture(model, path):
        for step in range(3):
            model(torch.arange(12).reshape(2, 6) + step)


def one_weight(model):
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] += 0.25


def another_gelu(model):
    original = torch.nn.functional.gelu
    model.blocks[2].forward = lambda hidden, block=model.blocks[2]: (
        hidden + block.down(original(block.up(block.norm(hidden)), approximate="tanh"))
    )


TARGETS = {
    "another precision": {"dtype": torch.bfloat16},
    "another epsilon": {"epsilon": 1e-2},
    "one weight": {"change": one_weight},
    "another formula": {"change": another_gelu},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("replays") / "reference"
    captured(path)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "another precision",
        "one weight",
        pytest.param("another epsilon", marks=pytest.mark.slow),
        pytest.param("another formula", marks=pytest.mark.slow),
    ],
)
def test_replays_by_workers_give_the_same_files(name, reference, tmp_path, many_tasks, monkeypatch):
    captured(tmp_path / "target", **TARGETS[name])
    runs = reference, tmp_path / "target"
    whence.compare(*runs, output=tmp_path / "local")
    taken, used = [], []
    take, figures = replayer.Replayer.take, replayer.Replayer.figures
    monkeypatch.setattr(
        replayer.Replayer,
        "take",
        lambda self, results, trust: (taken.extend(results), take(self, results, trust)),
    )
    monkeypatch.setattr(
        replayer.Replayer,
        "figures",
        lambda self, request: (
            used.append(request.call.id in self._ahead),
            figures(self, request),
        )[1],
    )
    result = whence.compare(*runs, output=tmp_path / "out", engine="processes", workers=1)
    assert files(tmp_path / "out") == files(tmp_path / "local")
    assert taken
    assert sum(used) == len(taken)
    assert result.coverage.replayed
