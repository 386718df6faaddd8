"""Runs that released versions wrote: this whence opens them, and says the same of them."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from whence import store
from whence._version import __version__

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
sys.path.insert(0, str(GOLDEN))
expected = pytest.importorskip("expected")

VERSIONS = sorted(p.name for p in GOLDEN.iterdir() if (p / "expected.json").exists())
SAID = {v: json.loads((GOLDEN / v / "expected.json").read_text()) for v in VERSIONS}
RUNS = [(v, name) for v in VERSIONS for name in SAID[v] if name != "comparisons"]


def test_this_version_has_golden_runs():
    assert __version__ in VERSIONS


@pytest.mark.parametrize(("version", "name"), RUNS)
def test_a_run_of_a_released_version_reads_as_it_did(version, name):
    said = SAID[version][name]
    assert json.loads(json.dumps(expected.described(GOLDEN / version / name))) == said
    assert said["records"] and said["calls"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_runs_have_what_the_format_knows(version):
    said = SAID[version]
    assert said["modules"]["read"] == said["modules"]["records"] > 0
    assert said["statistics"]["read"] == said["topology"]["read"] == 0
    assert said["killed"]["ended"] and not said["modules"]["ended"]
    assert said["ranks"]["calls"] == 2 * said["modules"]["calls"]
    places = {
        type(record.elements).__name__
        for name in ("modules", "increments", "external")
        for record in store.open_run(GOLDEN / version / name).records
    }
    assert places == {"Kept", "Increment", "External"}
    phases = {call.phase for call in store.open_run(GOLDEN / version / "training").calls}
    assert {"forward", "backward", "optimizer"} <= phases
    assert any((GOLDEN / version / "modules").glob("rank*/index.safetensors"))
    assert said["modules"]["programs"] and said["op"]["calls"] > said["modules"]["calls"]


@pytest.mark.torch
@pytest.mark.parametrize("version", VERSIONS)
def test_comparisons_of_them_answer_as_they_did(version):
    place = GOLDEN / version
    for reference, target, status, findings in SAID[version]["comparisons"]:
        said = expected.answer(place / reference, place / target)
        assert (status, findings) == (said[0], said[1]), (reference, target)


@pytest.mark.parametrize("version", VERSIONS)
def test_recovering_them_changes_nothing_that_is_read(version, tmp_path):
    for name in ("modules", "killed", "increments"):
        shutil.copytree(GOLDEN / version / name, tmp_path / name)
        store.recover(tmp_path / name, force=True)
        read = json.loads(json.dumps(expected.described(tmp_path / name)))
        assert read == SAID[version][name]


def test_they_are_small():
    files = [p for p in GOLDEN.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 2 << 20
