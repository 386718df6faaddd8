"""The ports: every clean one computes what its reference computes, and every fault changes that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "state space",
    "latent attention",
    "translator",
    "experts",
    "graph attention",
    "plain, training",
    "diffusion",
    "convnext",
    "convnext, training",
    "swin",
    "two towers",
    "residual net",
    "tagger",
)
OF_TRANSFORMERS = ("t5", "gemma", "llama", "qwen", "mixtral", "gpt", "neox", "bert", "vit")
EXACT = 1e-6  # weights are folded in float32


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("ports")
    finally:
        sys.path.remove(str(BENCHMARKS))


def _port(bench: Any, name: str) -> Any:
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    return next(port for port in bench.ports() if port.name == name)


@pytest.mark.parametrize("name", (*NAMES, *OF_TRANSFORMERS))
def test_a_clean_port_computes_what_its_reference_computes(bench: Any, name: str) -> None:
    port = _port(bench, name)
    assert bench.apart(port, "") < EXACT
    pair = port.build("")
    modules = {"", *(scope for scope, _ in pair.reference.named_modules())}
    own_places = {"*", ".", "loss", "gradients"}
    named = {place for places in port.faults.values() for place in places.split()}
    assert named <= modules | own_places


@pytest.mark.parametrize("name", (*NAMES, *OF_TRANSFORMERS))
def test_every_fault_changes_what_it_computes(bench: Any, name: str) -> None:
    port = _port(bench, name)
    same = [fault for fault in port.faults if bench.apart(port, fault) < EXACT]
    assert not same


class TestTheGrades:
    def test_a_clean_pair_is_silent_or_a_false_alarm(self, bench: Any) -> None:
        assert bench.graded("", "same", ".", 0.0, 0.0) == "silent"
        assert bench.graded("", "different", ".", 0.0, 0.0) == "FALSE ALARM"
        assert bench.graded("", "undecided", ".", 0.0, 0.0) == "undecided"

    def test_a_fault_is_named_by_its_module_or_a_container_of_it(self, bench: Any) -> None:
        def grade(place: str) -> Any:
            return bench.graded("layers.1.mlp.act", "different", place, 1.0, 1e-3)

        assert grade("layers.1.mlp.act") == "named"
        assert grade("layers.1") == grade(".") == "around"
        assert grade("layers.10") == grade("layers.1.mlp.down") == "elsewhere"

    def test_a_fault_below_the_noise_is_faint_and_any_other_missed(self, bench: Any) -> None:
        assert bench.graded("act", "same", ".", 2e-3, 1e-3) == "faint"
        assert bench.graded("act", "same", ".", 4e-3, 1e-3) == "MISSED"


def test_a_pair_is_captured_compared_and_graded(bench: Any) -> None:
    port = _port(bench, "two towers")
    rows = [bench.row_of(port, fault, "float32", 1e-6) for fault in ("", "gelu")]
    assert [row["grade"] for row in rows] == ["silent", "named"]
    assert "activation_fn" in bench.told(rows[1])


@pytest.mark.parametrize(
    ("name", "fault", "grade"),
    [
        ("convnext, training", "", "undecided"),  # no gradient is paired by its place alone
        ("convnext", "eps", "named"),  # a product is paired with a convolution of one place
        ("latent attention", "scale", "named"),  # not the first norm of the segment
    ],
)
def test_what_a_port_is_answered(bench: Any, name: str, fault: str, grade: str) -> None:
    assert bench.row_of(_port(bench, name), fault, "float32", 1e-6)["grade"] == grade
