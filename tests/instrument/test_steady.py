"""The steady state of a capture: what a call costs when everything about it was seen before, and
what is still noticed then.
"""

import gc
import weakref

import pytest
import torch
from live_torch import call, captured, ref
from torch import nn

import counting
import whence
from whence.instrument.torch import program_cache, tensor_content
from whence.store import open_run

pytestmark = pytest.mark.torch

LAYERS = 6


def _net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))).eval()


@pytest.mark.parametrize(("keep", "most"), [("stats", 145), ("full", 178)])
def test_a_call_that_was_seen_before_takes_few_steps(tmp_path, keep, most):
    model = _net()
    given = [torch.randn(2, 8) for _ in range(4)]
    with torch.inference_mode():
        with counting.counted() as bare:
            model(given[0])
        with whence.capture(model, tmp_path / "run", keep=keep, programs=False):
            for x in given[1:3]:
                model(x)
            with counting.counted() as seen:
                model(given[3])
    assert (seen.calls - bare.calls) / (LAYERS + 1) <= most


KEPT = []


class Touches(nn.Module):
    """Changes what it is given in a way that no version counts, or hands it on as it is."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "bytes":
            x.numpy()[-1, -1] = 7.0
        elif self.how == "shape":
            x.unsqueeze_(0)
        elif self.how == "place":
            KEPT.append(x.view(3, 3))  # where it lay, everything is as it was
            x.set_(torch.ones(3, 3))
        return x


@pytest.mark.parametrize("how", ["bytes", "shape", "place"])
def test_the_same_object_is_no_proof_of_the_same_tensor(tmp_path, how):
    model = nn.Sequential(nn.Identity(), Touches(how), nn.Identity())
    with torch.inference_mode():
        run = captured(model, tmp_path / "run", lambda used: used(torch.zeros(3, 3)))
    given, left = (ref(call(run, "1"), slot).record for slot in ("input.0", "output.0"))
    assert given != left
    assert ref(call(run, "2"), "input.0").record == left
    shape = {"bytes": (3, 3), "shape": (1, 3, 3), "place": (3, 3)}[how]
    assert run.records[left].shape == shape
    assert run.array(left).sum() == {"bytes": 7, "shape": 0, "place": 9}[how]


def test_what_is_known_keeps_no_tensor_alive(tmp_path):
    model, gone = _net(), []
    with torch.no_grad(), whence.capture(model, tmp_path / "run"):
        for _ in range(3):
            out = model(torch.randn(2, 8))
            gone.append(weakref.ref(out))
            del out
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3


class Cache:
    def __init__(self):
        self.keys = {}


class Writes(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place, self.inner = place, nn.Linear(8, 8)

    def forward(self, x, cache):
        cache.keys[self.place] = self.inner(x) + 1
        return cache.keys[self.place] * 2


class Layer(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.writes = Writes(place)

    def forward(self, x, cache):
        return x + self.writes(x, cache)


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer(n) for n in range(layers))

    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return {"x": x, "cache": cache}


class Held:
    """A weak reference to a storage, counted while it is held."""

    count = most = 0

    def __init__(self, cdata):
        self.cdata = cdata
        Held.count += 1
        Held.most = max(Held.most, Held.count)

    def __del__(self):
        Held.count -= 1
        torch.UntypedStorage._free_weak_ref(self.cdata)


class Longer(nn.Module):
    """Adds a row, so that no tensor has the shape of another."""

    def forward(self, x):
        return torch.cat([x, x[:1]])


@pytest.mark.parametrize("level", ["modules", "op"])
def test_storages_that_are_gone_are_let_go_of_within_a_call(tmp_path, monkeypatch, level):
    monkeypatch.setattr(tensor_content, "StorageRef", Held)
    monkeypatch.setattr(Held, "most", 0)
    chain = nn.Sequential(*(Longer() for _ in range(400)))
    with torch.no_grad(), whence.capture(chain, tmp_path / "run", level=level, programs=False):
        chain(torch.randn(2, 8))
    assert Held.most < 200
    assert Held.count == 0


def test_recording_programs_looks_through_a_model_once_a_call(tmp_path, monkeypatch):
    real, looks = program_cache.tensors_of, []
    monkeypatch.setattr(
        program_cache, "tensors_of", lambda module: looks.append(module) or real(module)
    )
    model = Stack(12).eval()
    with torch.no_grad(), whence.capture(model, tmp_path / "run"):
        model(torch.randn(2, 8))
    assert len(open_run(tmp_path / "run").programs) > 0
    assert [id(module) for module in looks] == [id(model)]
