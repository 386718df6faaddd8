"""The golden answers: every case says what it said, on any processor; how answers are compared and
masked, and that a step that is taken out is seen.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
BENCHMARKS, HELD = ROOT / "benchmarks", ROOT / "tests" / "data" / "answers"
QUICK = ("dumps", "declared")
"""Kinds that are asked in the default run; .ci/run asks all."""
NEEDS = {"paddle": "paddle", "engines": "onnxruntime", "tools": "h5py", "compiled": "torch"}


def held():
    for path in sorted(HELD.rglob("*.txt")):
        kind, name = path.parent.name, path.stem
        marks = [] if kind in QUICK else [pytest.mark.slow]
        if kind == "paddle":
            marks.append(pytest.mark.paddle)
        yield pytest.param(f"{kind}/{name}", marks=marks)


@pytest.fixture(scope="module")
def golden():
    before = sys.path[:]
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("golden")
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    golden.share_builders()
    return tmp_path_factory.mktemp("golden")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(held()))
def test_what_is_said_is_what_was_said(golden, folder, name):
    kind = name.partition("/")[0]
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        pytest.skip(f"{NEEDS[kind]} is not installed")
    parts = golden.answers(name, golden.cases(f"^{name}$")[name], folder)
    assert "failed.txt" not in parts, parts["failed.txt"]
    assert golden.words(parts) == (HELD / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_is_held_has_a_case(golden, folder):
    names = {f"{path.parent.name}/{path.stem}" for path in HELD.rglob("*.txt")}
    assert names <= set(golden.cases())
    assert len(names) >= 150


def test_what_depends_on_the_machine_is_masked(golden):
    masks = importlib.import_module("_golden.masks")
    plain = masks.plain(
        "/tmp/x/a/b/c/ref at /src/a.py took 1.25 s", Path("/tmp/x/a/b/c"), Path("/src")
    )
    assert plain == "./ref at <whence>/a.py took <time>"
    assert (
        masks.held("rel_l2 1.5e-07,  12 times, 3 of 7 rows") == "rel_l2 #,  # times, 3 of 7 rows\n"
    )


def test_a_difference_is_shown_by_case(golden, tmp_path):
    for side, text in (("golden", "one\ntwo\n"), ("now", "one\nthree\n")):
        place = tmp_path / side / "modules" / "same"
        place.mkdir(parents=True)
        (place / "cmp.txt").write_text(text)
        (place / "equal.txt").write_text("equal\n")
    found = golden.differences(tmp_path / "golden", tmp_path / "now")
    assert list(found) == ["modules/same"]
    (text,) = found["modules/same"]
    assert "cmp.txt" in text
    assert "-two" in text and "+three" in text


def test_a_stage_that_is_taken_out_changes_an_answer(golden, folder):
    stages = importlib.import_module("_stages")
    name = "modules/noise_width"
    case = golden.cases(f"^{name}$")[name]
    before = golden.answers(name, case, folder)
    with stages.watched() as changing:
        assert golden.answers(name, case, folder) == before
    assert "random draws" in changing
    with stages.without("random draws"):
        assert golden.answers(name, case, folder) != before
