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
    assert compared("wrong").findings[0].op_type == "leaky_relu"
