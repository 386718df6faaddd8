"""Two programs of Paddle that write one function in two ways: in runs, logs and programs alone."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

import warm
import whence

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddlepaddle is not installed", allow_module_level=True)
pytestmark = pytest.mark.paddle
MADE_BY = Path(__file__).with_name("paddle_forms.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("forms")
    subprocess.run([warm.PADDLE, MADE_BY, place], check=True, capture_output=True)
    for name in ("before", "behind", "wrong"):
        line = ["-m", "whence", "run", "-o", place / f"{name}-run", "--"]
        line += [warm.PADDLE, MADE_BY, "run", place / name]
        subprocess.run([warm.PADDLE, *line], check=True, capture_output=True)
    return place


def test_runs_of_two_forms_are_the_same(folder):
    result = whence.compare(folder / "before-run", folder / "behind-run")
    assert result.status == "same"
    assert result.unmatched == result.incomparable == 0


def test_a_fault_between_two_forms_is_the_only_finding(folder):
    result = whence.compare(folder / "before-run", folder / "wrong-run")
    (finding,) = result.findings
    assert (finding.op_type, finding.cause) == ("leaky_relu", "semantic")
    assert "0.1" in finding.sentence and "0.3" in finding.sentence


def test_logs_of_two_forms_beside_their_programs_hold_no_fault(folder):
    def compared(name):
        programs = [folder / "before.json", folder / f"{name}.json"]
        return whence.compare(folder / "before.log", folder / f"{name}.log", program=programs)

    assert not compared("behind").findings
    types = [finding.op_type for finding in compared("wrong").findings]
    assert types[0] == "leaky_relu" and "matmul" not in types


def test_programs_alone_say_what_is_written_otherwise(folder):
    words = "the scale is applied behind the product in the target: same function (4 times)"
    same = whence.compare(folder / "before.json", folder / "behind.json")
    assert same.status == "undecided" and words in same.headline
    wrong = whence.compare(folder / "before.json", folder / "wrong.json")
    assert [(f.op_type, f.cause) for f in wrong.findings] == [("leaky_relu", "semantic")]
    assert any(words in line for line in wrong.programs)


def test_another_product_is_no_other_form(folder):
    text = (folder / "behind.json").read_text()
    assert text.count('"1.matmul"') == 4
    (folder / "transposed.json").write_text(text.replace('"1.multiply"', '"1.add"', 1))
    (folder / "transposed.pdiparams").write_bytes((folder / "behind.pdiparams").read_bytes())
    result = whence.compare(folder / "before.json", folder / "transposed.json")
    assert result.findings[0].name.endswith("multiply_0")
