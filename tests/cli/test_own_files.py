"""`--force` replaces what whence wrote, and nothing else, whatever the command."""

import numpy as np
import pytest

from whence.cli import execute


@pytest.fixture
def sides(tmp_path):
    """Two dumps, and a folder for files."""
    for side in ("ref", "tgt"):
        (tmp_path / side).mkdir()
        for name in "ab":
            np.save(tmp_path / side / f"{name}.npy", np.arange(8.0, dtype=np.float32))
    return tmp_path


COMMANDS = {
    "page": "report {cmp} -o {file}",
    "page of a comparison": "compare {ref} {tgt} --html {file}",
    "JUnit": "compare {ref} {tgt} --junit {file}",
    "map": "align {ref} {tgt} -o {file}",
    "table": "report {cmp} --parquet {file}",
    "table of xray": "xray summary {ref} {file}.csv",
    "table of xray as text": "xray summary {ref} {file}",
    "view": "xray compare {ref} {tgt} {file}",
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_its_own_is_replaced_and_that_of_another_is_not(kind, sides, capsys):
    if kind == "table":
        pytest.importorskip("pyarrow")
    places = {name: sides / name for name in ("ref", "tgt", "cmp", "file")}
    assert (
        execute(["compare", str(sides / "ref"), str(sides / "tgt"), "-o", str(sides / "cmp")]) == 0
    )
    words = COMMANDS[kind].format(**places).split()
    file = sides / ("file.csv" if kind == "table of xray" else "file")
    assert execute(words) == 0
    before = file.read_bytes()
    assert execute(words) == 3
    assert "--force replaces it" in capsys.readouterr().err
    assert execute([*words, "--force"]) == 0
    assert "exists" not in capsys.readouterr().err
    assert len(file.read_bytes()) > len(before) // 2
    for content in (
        b"a thesis, written by whence\n",
        b"{}\n",
        b"# written by whence\nimport os\n",
        b"x,y\n1,2\n",
        b"\x89PNG",
    ):
        file.write_bytes(content)
        assert execute([*words, "--force"]) == 3
        assert file.read_bytes() == content
        assert "was not written by whence" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["report.csv", "report.json", "aclcmp.csv"])
def test_a_comparison_goes_beside_the_files_of_another(name, sides, capsys):
    folder = sides / "cmp"
    folder.mkdir()
    words = ["compare", str(sides / "ref"), str(sides / "tgt"), "-o", str(folder), "--force"]
    (folder / "notes.txt").write_text("mine")
    assert execute(words) == 0
    assert execute(words) == 0
    for file in folder.iterdir():
        file.unlink()
    (folder / name).write_text("{}")
    assert execute(words) == 3
    assert (folder / name).read_text() == "{}"
    assert "not of a comparison that whence wrote" in capsys.readouterr().err
