"""The six stories of `examples/`: each ends well only if its answer names what was planted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
STORIES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
# Whole processes that import torch several times; what they type has tests in the default run.
pytestmark = [pytest.mark.torch, pytest.mark.slow]
pytest.importorskip("torch")
NEEDS = {"serving": "transformers"}


@pytest.mark.parametrize("name", STORIES)
def test_a_story_ends_with_what_was_planted(name, tmp_path):
    pytest.importorskip(NEEDS.get(name, "torch"))
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.startswith("$ ")


def test_the_page_lists_every_story():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in STORIES if f"`{name}.py`" not in page] == []
    assert len(STORIES) == 6
