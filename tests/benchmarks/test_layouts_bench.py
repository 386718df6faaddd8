"""The bench of hand-made dumps: what it plants is named, what is no fault is silent, and how answers
are graded."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("h5py")

pytestmark = pytest.mark.torch
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    before = sys.path[:]
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("layouts")
    finally:
        sys.path[:] = before


@pytest.mark.parametrize(
    ("name", "subject", "change", "grade"),
    [
        ("pt keys of step and name", "ssm", "step size", "named"),
        ("jsonl base64 of npy files", "ssm", "embedding", "named"),
        ("bin behind a line of text", "dit", "attention", "named"),
        ("npz a rank and layer, products divided", "dit", "kernel", "silent"),
        ("npy folders of classes and modules", "dit", "shuffled", "silent"),
        ("npy axes of two frameworks", "ssm", "shuffled", "silent"),
        ("log of a ruled table", "dit", "head", "named"),
    ],
)
def test_a_pair_of_the_last_set(bench, tmp_path, name, subject, change, grade):
    layouts = {layout.name: layout for layout in bench.TABLE["people, further"]}
    item = bench.row(layouts[name], subject, change, tmp_path, None)
    assert item["grade"] == grade, item["said"]


def test_another_module_is_an_innocent(bench):
    layout = next(iter(bench.TABLE["people, further"]))
    result = type("Result", (), {"status": "different", "headline": ""})()
    result.findings = [type("Finding", (), {"name": "backbone.layers.4.norm"})()]
    assert bench.graded(layout, "ssm", "gate", result)[0] == "innocent"
    result.findings[0].name = "backbone.layers.3.mixer"
    assert bench.graded(layout, "ssm", "gate", result)[0] == "named"
