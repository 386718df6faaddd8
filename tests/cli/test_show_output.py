"""`whence show -o FILE --force` replaces what it wrote, and nothing else."""

import numpy as np
import pytest

from whence.cli import execute


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    for name in "ab":
        np.save(tmp_path / "run" / f"{name}.npy", np.ones(3))
    return str(tmp_path / "run")


@pytest.mark.parametrize(
    "words", [[], ["--tree"], ["a"], ["a", "--format", "json"], *(["--format", f] for f in ("csv", "json", "table"))]
)  # fmt: skip
def test_what_it_wrote_is_replaced(words, run, tmp_path):
    file = tmp_path / "shown"
    assert execute(["show", run, *words, "-o", str(file)]) == 0
    before = file.read_bytes()
    assert execute(["show", run, *words, "-o", str(file)]) == 3
    assert execute(["show", run, *words, "-o", str(file), "--force"]) == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"a thesis\n", b"{\n", b"x,y\n1,2\n", b"\x89PNG"])
def test_files_of_others_are_not_replaced(content, run, tmp_path, capsys):
    file = tmp_path / "mine"
    file.write_bytes(content)
    assert execute(["show", run, "-o", str(file), "--force"]) == 3
    assert file.read_bytes() == content
    assert "was not written by whence, and" in capsys.readouterr().err
