"""The zoo: every way and fault builds, the draw stays, and a few pairs go all the way."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def zoo() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("_zoo.pairs")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def draw(zoo: Any) -> Any:
    return importlib.import_module("_zoo.draw")


def _names(zoo: Any) -> dict[str, list[str]]:
    return {"architecture": list(zoo.ARCHITECTURES), "way": list(zoo.load())}


class TestTheDraw:
    def test_it_is_written_down_and_does_not_move(self, zoo: Any, draw: Any) -> None:
        assert draw.written() == draw.drawn(_names(zoo))

    def test_it_is_about_half(self, zoo: Any, draw: Any) -> None:
        for names in draw.written().values():
            share = len(names["held"]) / (len(names["held"]) + len(names["setting"]))
            assert 0.35 < share < 0.65

    def test_the_setting_half_has_nothing_of_the_other(self, zoo: Any, draw: Any) -> None:
        for (_, offered), _ in zip(zoo.names("setting", "beside", 0), range(5), strict=False):
            for name, _ in zip(offered, range(20), strict=False):
                assert not draw.is_held("architecture", name.architecture)
                assert not draw.is_held("way", name.way)

    def test_a_pair_of_the_held_half_has_something_held(self, zoo: Any, draw: Any) -> None:
        for (_, offered), _ in zip(zoo.names("held", "clean", 0), range(5), strict=False):
            for name, _ in zip(offered, range(20), strict=False):
                assert draw.is_held("architecture", name.architecture) or draw.is_held(
                    "way", name.way
                )

    def test_the_order_is_the_same_again(self, zoo: Any) -> None:
        once, again = (
            [
                next(n)
                for (_, n), _ in zip(zoo.names("setting", "clean", 3), range(20), strict=False)
            ]
            for _ in range(2)
        )
        assert once == again


@pytest.mark.parametrize(
    ("name", "grade"),
    [
        ("llama/rms-norm-by-one-operator/bfloat16", "silent"),
        ("mlp-gelu/layer-norm-by-moments/float32", "silent"),
        ("mlp-gelu/output-scaled/float32", "named"),
        ("llama/norm-epsilon/float32", "named"),
    ],
)
def test_a_pair_goes_all_the_way(zoo: Any, name: str, grade: str) -> None:
    assert not zoo.is_held(zoo.named(name))
    pair = zoo.build(zoo.named(name))
    answer = zoo.measure(pair, "modules")
    assert zoo.graded(pair, answer) == grade
    json.dumps(answer)


def test_a_way_that_computes_something_else_is_refused(
    zoo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = importlib.import_module("_zoo.ways")
    sides = importlib.import_module("_zoo.sides")

    def wrong(side: Any, seed: int) -> Any:
        side.model.head.bias = None
        return side

    monkeypatch.setitem(ways.WAYS, "wrong", ways.Way("wrong", wrong, ("float32",)))
    with pytest.raises(zoo.Refused):
        zoo.build(zoo.Name("mlp-gelu", "wrong", "float32"))
    assert sides.apart([], []) == float("inf")


def test_what_is_no_copy_of_the_reference_has_a_fault_with_an_effect(zoo: Any) -> None:
    pair = zoo.build(zoo.named("mlp-gelu/bias-missing/float32"))
    assert pair.planted.name and pair.effect > 1e-3


def test_a_pair_that_torch_cannot_run_is_told_from_a_crash(zoo: Any) -> None:
    pair = zoo.build(zoo.named("mlp-gelu/layer-norm-by-moments/float32"))
    assert zoo.runs(pair)
    pair.target.drive = lambda model, inputs: model()
    assert not zoo.runs(pair)


HOSTS = ("hand-moe", "llama", "convnet", "mixtral", "bart", "gpt2", "vit", "bert", "mamba")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ways", "faults"])
def test_every_one_builds_on_an_architecture(zoo: Any, kind: str) -> None:
    every = zoo.load() if kind == "ways" else zoo.FAULTS
    hosts = [*HOSTS, *(a for a in zoo.ARCHITECTURES if a not in HOSTS)]
    quick = [name for name, one in every.items() if not getattr(one, "slow", False)]
    assert not [name for name in quick if not _builds(zoo, name, kind, hosts)]


def _builds(zoo: Any, name: str, kind: str, hosts: list[str]) -> bool:
    for host in hosts:
        way, fault = (name, "") if kind == "ways" else ("", name)
        try:
            zoo.build(zoo.Name(host, way, "float32", fault))
        except Exception:
            continue
        return True
    return False
