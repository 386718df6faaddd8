"""Seeding faults: which changes a file offers, how they are named, drawn and applied, and that a
fault which the tests catch is told from one that they do not.
"""

import ast
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def mutants():
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("mutants")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("a < b", {("boundary", "(a <= b)"), ("comparison", "(a >= b)")}),
        ("a == b", {("comparison", "(a != b)")}),
        ("a is not b", {("comparison", "(a is b)")}),
        ("a < b in c", {("boundary", "(a <= b in c)"), ("comparison", "(a >= b in c)")}
            | {("comparison", "(a < b not in c)")}),
        ("a and b or c", {("boolean", "((a and b) and c)"), ("boolean", "(a or b)")}),
        ("not a", {("boolean", "(a)")}),
        ("a + b", {("arithmetic", "(a - b)")}),
        ("a // -b", {("arithmetic", "(a * -b)"), ("arithmetic", "(b)")}),
        ("f(a, b, c)", {("swapped arguments", "(f(b, a, c))")}),
        ("f(a, a)", set()),
        ("x[0], True, 0.5, None", {("constant", "(1)"), ("constant", "(False)")}
            | {("constant", "(1.0)")}),
        ("a if b else c", {("boolean", "(not b)")}),
        ("[a for a in b if a.c]", set()),
        ("'text' + a + f'{a < b}'", set()),
    ],
)  # fmt: skip
def test_what_an_expression_offers(mutants, text, offered):
    expected = {(kind, ast.unparse(ast.parse(after))) for kind, after in offered}
    found = {(m.kind, ast.unparse(ast.parse(m.after))) for m in mutants.mutations(f"x = {text}\n")}
    assert found == expected


SOURCE = '''"""About 1 < 2."""
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    A = 1 < 2

LIMIT: Literal[3] = 4


class Thing(list[1]):
    """More than 1."""

    def __repr__(self):
        return str(1 + 1)

    @decorated(5)
    def judge(self, error: Literal[6], limit=7) -> Literal[8]:
        """Is 1 + 1 = 2?"""
        note = error.é; log.warning(f"{error < 9}", 10)
        if error > limit:
            raise ValueError("too large", 11)
        error.clear()
        return error < limit
'''


def test_only_what_computes_is_changed_and_the_rest_of_the_file_stays(mutants):
    found = mutants.mutations(SOURCE)
    assert [(m.function, m.kind, m.number, m.before) for m in found] == [
        ("<module>", "constant", 1, "4"),
        ("Thing.judge", "constant", 1, "7"),
        ("Thing.judge", "boundary", 1, "error > limit"),
        ("Thing.judge", "comparison", 1, "error > limit"),
        ("Thing.judge", "dropped call", 1, "error.clear()"),
        ("Thing.judge", "return", 1, "return error < limit"),
        ("Thing.judge", "boundary", 2, "error < limit"),
        ("Thing.judge", "comparison", 2, "error < limit"),
    ]
    for mutation in found:
        changed = mutation.applied(SOURCE)
        head, _, tail = changed.partition(mutation.after)
        ast.parse(changed)
        assert SOURCE.startswith(head) and SOURCE.endswith(tail)
        assert head + mutation.before + tail == SOURCE


def test_a_fault_keeps_its_name_when_a_local_is_renamed(mutants):
    names = [
        [(m.function, m.kind, m.number) for m in mutants.mutations(text)]
        for text in (SOURCE, SOURCE.replace("error", "distance").replace("note", "remark"))
    ]
    assert names[0] == names[1]


EVERY_KIND = """
def judge(error, limit, told):
    told.append(error)
    if error > limit and not told:
        return 3 * limit
    return among(error, limit)
"""


@pytest.fixture
def checkout(mutants, tmp_path):
    """A folder with a package for each of whence's, of files that offer faults of every kind."""
    for package in mutants.PACKAGES:
        folder = tmp_path / "src" / "whence" / package
        folder.mkdir(parents=True)
        for name in ("one", "two", "three"):
            (folder / f"{name}.py").write_text(SOURCE + EVERY_KIND)
    return tmp_path


def test_a_seed_draws_the_same_faults_of_every_package_and_kind(mutants, checkout):
    faults = mutants.drawn(checkout, 50, 3)
    assert [f.name for f in faults] == [f.name for f in mutants.drawn(checkout, 50, 3)]
    assert len({f.name for f in faults}) == 50
    assert Counter(f.package for f in faults) == Counter(
        {name: 9 if number < 2 else 8 for number, name in enumerate(mutants.PACKAGES)}
    )
    assert {f.name for f in faults} != {f.name for f in mutants.drawn(checkout, 50, 4)}
    judge = Counter(f.mutation.kind for f in faults if f.package == "judge")
    assert set(judge.values()) == {1}  # eight of eight kinds


def test_the_tests_of_a_package_run_first_then_cheap_files(mutants):
    seconds = {"tests/a/b.py::x": 1.0, "tests/a/c.py::x": 0.5, "tests/judge/d.py::x": 9.0}
    seconds |= {"tests/judge/d.py::y": 2.0, "tests/a/c.py::y": 0.1}
    files = mutants.ordered(seconds, seconds, "judge")
    assert files == [
        ["tests/judge/d.py::y", "tests/judge/d.py::x"],
        ["tests/a/c.py::y", "tests/a/c.py::x"],
        ["tests/a/b.py::x"],
    ]
    batch, expected = mutants._batch(files, seconds, 10.0)
    assert (batch, expected) == (["tests/judge/d.py::y", "tests/judge/d.py::x"], 11.0)
    assert mutants._batch(files, seconds, 0.0) == ([], 0.0)


PROJECT = {
    "src/whence/__init__.py": "",
    "src/whence/judge/__init__.py": "",
    "src/whence/testing/__init__.py": "",
    "src/whence/testing/plugin.py": "",
    "src/whence/judge/limits.py": """LIMIT = 8


def above(error):
    return error > LIMIT


def double(error):
    return error + error


def unused(error):
    return error - 1


def forever(n):
    while n > 0:
        n = n - 2
    return n
""",
    "tests/test_fails.py": """from whence.judge import limits


def test_nothing():
    assert limits.double(3) == 6
    assert limits.LIMIT == 9
""",
    "tests/test_limits.py": """import subprocess
import sys

import pytest
from whence.judge import limits


@pytest.fixture(scope="module")
def doubled():
    return limits.double(3)


def test_above():
    assert limits.above(10) and not limits.above(3)


def test_first(doubled):
    assert doubled


def test_second(doubled):
    assert doubled == 6


def test_elsewhere():
    program = "from whence.judge import limits; print(limits.forever(4))"
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, capture_output=True, text=True, timeout=20).stdout == "0\\n"
""",
    "pyproject.toml": "[tool.pytest.ini_options]\ntestpaths = ['tests']\n",
}


@pytest.mark.slow
def test_faults_that_tests_catch_are_told_from_those_that_they_do_not(tmp_path):
    pytest.importorskip("coverage")
    place = tmp_path / "project"
    for name, text in PROJECT.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "benchmarks").mkdir()
    for name in ("mutants.py", "_mutations.py", "_traced.py"):
        (place / "benchmarks" / name).write_bytes((FOLDER / name).read_bytes())
    subprocess.run(["git", "init", "-q"], cwd=place, check=True)

    def run(*words):
        line = [sys.executable, "benchmarks/mutants.py", *words]
        done = subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("trace")
    told = run("run", "--count", "200", "--packages", "judge")
    status = {
        line.split()[-1].partition("limits.py::")[2]: line[:12].strip()
        for line in told.splitlines()
    }
    assert status["above::boundary::1"] == "survived"
    assert status["above::comparison::1"] == "killed"
    # The test that uses the fixture second is the one that looks at its value.
    assert status["double::arithmetic::1"] == "killed"
    # A process that a test starts, which ends no more.
    assert status["forever::arithmetic::1"] == "killed"
    assert status["unused::arithmetic::1"] == "not executed"
    assert status["<module>::constant::1"] == "survived"
    shown = run("show")
    assert "+ (error >= LIMIT)" in shown and "not executed: src/whence/judge/limits.py" in shown
    assert (place / "src/whence/judge/limits.py").read_text() == PROJECT[
        "src/whence/judge/limits.py"
    ]
    text = (tmp_path / "mutants" / "copy" / "src/whence/judge/limits.py").read_text()
    assert text == PROJECT["src/whence/judge/limits.py"]
