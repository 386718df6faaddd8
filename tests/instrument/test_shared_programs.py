"""Modules of one code share the programs of their calls, and modules of another never do."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402
from whence.instrument.torch import program_cache  # noqa: E402

pytestmark = pytest.mark.torch


class Scaled(nn.Module):
    """A leaf whose code depends on a number."""

    def __init__(self, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.eps = eps

    def forward(self, x):
        return (x + self.eps) * self.weight if self.eps else x * self.weight


class Block(nn.Module):
    """A container with an object of its program."""

    def __init__(self, settings, eps=0.5):
        super().__init__()
        self.norm, self.linear, self.settings = Scaled(eps), nn.Linear(4, 4), settings

    def forward(self, x):
        return self.linear(self.norm(x)) + self.settings["shift"]


def model():
    torch.manual_seed(0)
    settings = type("Settings", (dict,), {})(shift=1.0)
    other = type(settings)(shift=2.0)
    blocks = [Block(settings) for _ in range(6)]
    blocks += [Block(other), Block(settings, eps=0.0), Block(settings, eps=-0.0)]
    blocks[2].linear.register_forward_hook(lambda module, args, out: out * 2)
    blocks[3].norm.weight = nn.Parameter(torch.rand(4, dtype=torch.float32)[None])
    blocks[4].linear.bias = nn.Parameter(torch.rand(4), requires_grad=False)
    blocks[5].linear.forward = lambda x: x @ blocks[5].linear.weight
    return nn.Sequential(*blocks)


def captured(path):
    """(the program of each call by its place, recorded calls)."""
    recorded = []
    begin = program_cache.ProgramCache._record

    def record(cache, frame, *how):
        recorded.append(frame.scope)
        begin(cache, frame, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_cache.ProgramCache, "_record", record)
        net = model()
        with whence.capture(net, path):
            for rows in (3, 5):
                net(torch.rand(rows, 4))
    run = whence.open_run(str(path))
    return {(c.scope, c.step): (c.program, c.no_program) for c in run.calls}, recorded


def test_each_call_has_the_program_that_it_would_have_alone(tmp_path, monkeypatch):
    shared, recorded = captured(tmp_path / "shared")
    monkeypatch.setattr(program_cache, "code_of", lambda module: None)
    alone, recorded_alone = captured(tmp_path / "alone")
    assert shared == alone
    assert len(recorded_alone) == 2 * 28
    # Of blocks 0 and 1 all is one code; what was changed of another is its own.
    assert {"0", "0.norm", "0.linear"} <= set(recorded)
    assert not {"1", "1.norm", "1.linear", "2.norm", "6.norm", "6.linear"} & set(recorded)
    assert {"2", "2.linear", "3.norm", "4.linear", "5.linear", "6", "7.norm", "8.norm"} <= set(
        recorded
    )


class Switched(nn.Module):
    """A leaf that asks a number in its buffer which way to go."""

    def __init__(self, is_on):
        super().__init__()
        self.register_buffer("is_on", torch.tensor(is_on))

    def forward(self, x):
        return x.sin() if self.is_on else x.cos()


def test_a_number_in_a_tensor_is_asked_of_each_module(tmp_path):
    net = nn.Sequential(Switched(True), Switched(False), Switched(True))
    with whence.capture(net, tmp_path / "run"):
        net(torch.rand(3, 4))
    programs = {c.scope: c.program for c in whence.open_run(tmp_path / "run").calls}
    assert programs["0"] == programs["2"] != programs["1"]


def test_a_module_that_holds_one_tensor_twice_shares_nothing():
    from whence.instrument.torch.program_cache import code_of

    first, second = Scaled(0.5), Scaled(0.5)
    assert code_of(first) == code_of(second) is not None
    second.again = second.weight
    assert code_of(second) is None


def test_objects_are_alike_only_while_they_are_the_very_same():
    from whence.instrument.torch.program_cache import code_of

    class Settings:
        pass

    first, second = Scaled(0.5), Scaled(0.5)
    first.settings = second.settings = Settings()
    code = code_of(first)
    assert code == code_of(second)
    first.settings = second.settings = None
    second.settings = Settings()
    assert code != code_of(second)
