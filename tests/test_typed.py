"""What a type checker sees of the public functions: options by name, and runs by the names of their
calls.
"""

import subprocess
import sys
import typing
from pathlib import Path

import pytest

from whence.instrument.arguments import CaptureArguments
from whence.instrument.options import CaptureOptions

pytest.importorskip("mypy", reason="needs a type checker: pip install -e '.[dev]'")
ROOT = Path(__file__).parents[1]
PROGRAM = """
import numpy as np
import whence

class Model: ...

with whence.capture(Model(), "run", keep="stats", include="layers.*", max_bytes="2GB"):
    pass
run = whence.open_run("run")
print(run["layers.0"], run.calls[0].scope)
result = whence.compare({"x": np.ones(3)}, run)
print(result["x"], result.status, result.next[0].command, result.effect)
"""
REFUSED = """
with whence.capture(Model(), "run", inclde=["layers.*"]):
    pass
with whence.capture(Model(), "run", keep="everything"):
    pass
"""


def checked(program, folder):
    """What mypy --strict says of a program."""
    file = folder / "program.py"
    file.write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_every_option_of_a_capture_is_an_argument():
    assert set(typing.get_type_hints(CaptureArguments)) == {
        *CaptureOptions.__struct_fields__,
        "logits",
    } - {"on_record"}, "on_record is an argument of its own"


def test_a_misspelt_option_is_refused_before_the_program_runs(tmp_path):
    assert checked(PROGRAM, tmp_path).startswith("Success")
    errors = checked(PROGRAM + REFUSED, tmp_path)
    assert 'Unexpected keyword argument "inclde" for "capture"; did you mean "include"?' in errors
    assert "incompatible type \"Literal['everything']\"" in errors
