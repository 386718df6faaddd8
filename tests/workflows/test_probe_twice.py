"""The same call in two processes."""

import json

import pytest
import torch
from torch import nn

import inside
import warm
from whence.results import Held
from whence.workflows.probe.torch.probing import Recorded, leave, probed

pytestmark = pytest.mark.torch

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, change=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.change = nn.Linear(8, 8), nn.Linear(8, 4), change

    def forward(self, x):
        return self.last(self.change(self.first(x)))


def both(path, one, other, x=X, seed=0):
    """`one` stands for the model of the first process, `other` for that of the second."""
    torch.manual_seed(0)
    leave(path, one.eval(), ((X,), {}), Recorded(returned=one(X).detach()))
    torch.manual_seed(seed)
    recorded = Recorded(returned=other(x).detach(), other=path)
    result = probed(other.eval(), ((x,), {}), properties=["repeat"], recorded=recorded)
    answer = result["repeat"]
    return answer, next(v for v in answer.variants if v.name == "in another process")


def test_two_processes_that_agree(tmp_path):
    answer, variant = both(tmp_path / "call.pt", Net(), Net())
    assert variant.held == Held.EXACT
    assert answer.held in (Held.EXACT, Held.ROUNDING)


def test_what_differs_between_processes_is_named(tmp_path):
    answer, variant = both(tmp_path / "call.pt", Net(lambda x: x * 1.0), Net(lambda x: x * 1.001))
    assert answer.held == Held.VIOLATED
    assert "another process" in answer.cause
    assert variant.first.operator == "aten.mul.Tensor"
    assert variant.first.line.startswith(__file__)
    # What 1024 takes of a number that is no multiple of its unit is lost in one of the two orders.
    order = Net(lambda x: x + (1024.0 - 1024.0)), Net(lambda x: (x + 1024.0) - 1024.0)
    answer, variant = both(tmp_path / "call.pt", *order)
    assert variant.held == Held.ROUNDING


@pytest.mark.parametrize("what", ["input", "weights"])
def test_processes_that_are_given_something_else_cannot_be_compared(tmp_path, what):
    other = Net()
    if what == "weights":
        with torch.no_grad():
            other.last.bias += 1
    answer, variant = both(tmp_path / "call.pt", Net(), other, X + (what == "input"))
    assert variant.held == answer.held == Held.UNKNOWN
    assert "in each process" in answer.why


PROGRAM = """
import os, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x) + os.getpid() * 1e-3
print(tuple(Net(8, 4)(torch.ones(1, 8)).shape))
"""


def test_a_command_is_run_twice(tmp_path):
    inside.program(tmp_path, PROGRAM)
    words = ["probe", "--only", "repeat", "--twice", "--format", "json", "--"]
    asked = inside.or_outside(tmp_path, *words, warm.TORCH, "script.py")
    first, second, answer = asked.stdout.split("\n", 2)
    assert first == second == "(1, 4)"
    assert asked.returncode == 1
    assert "in another process" in json.loads(answer)["answers"][0]["cause"]
