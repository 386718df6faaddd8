"""What a comparison of many steps works out, it works out once and does not keep for ever."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch

import whence
from whence import judge
from whence.comparison.replays import program_run
from whence.comparison.replays.program_run import ParameterCache


def test_errors_and_their_growth_are_worked_out_once(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        runs.append(tmp_path / str(dtype))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad(), whence.capture(model.to(dtype), runs[-1]):
            for _ in range(20):
                model(torch.randn(4, 8, generator=generator).to(dtype))
    seen: Counter[tuple[int, int]] = Counter()
    error_of = judge.error_of

    def counted(measured, reference, target, u):
        seen[reference.id, target.id] += 1
        return error_of(measured, reference, target, u)

    monkeypatch.setattr(judge, "error_of", counted)
    grown = 0
    grow = judge.verdict.grow

    def counted_growth(*errors):
        nonlocal grown
        grown += 1
        return grow(*errors)

    monkeypatch.setattr(judge.verdict, "grow", counted_growth)
    result = whence.compare(*runs)
    assert len(seen) > 60
    assert max(seen.values()) == 1
    assert 60 <= grown <= len(result.verdicts)


def test_parameters_of_one_module_stay_and_those_of_others_make_room(monkeypatch):
    monkeypatch.setattr(program_run, "_HELD_BYTES", 1000)
    run = SimpleNamespace(records=[])
    cache = ParameterCache(run, run)
    converted: Counter[tuple[str, str]] = Counter()

    def hold(module, dtype, nbytes):
        def convert():
            converted[module, dtype] += 1
            # Room is made first: the old module is gone before the new one is converted.
            assert sum(size for key, (_, size) in cache._cache.items() if key[0] != module) <= 1000
            return SimpleNamespace(tensors={"w": np.zeros(nbytes, np.uint8)})

        return cache.hold((module, dtype), convert)

    for _ in range(3):
        hold("large", "float64", 4000)
        hold("large", "float32", 2000)
    assert converted == {("large", "float64"): 1, ("large", "float32"): 1}
    for _ in range(2):
        for module in "ab":
            hold(module, "float32", 400)
    assert converted["a", "float32"] == converted["b", "float32"] == 1
    hold("large", "float64", 4000)
    assert converted["large", "float64"] == 2
