"""What pyproject.toml declares is used, and has a lower bound to test with."""

import ast
import fnmatch
import functools
import importlib.metadata
import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

import whence
from whence import extras

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOWER = runpy.run_path(str(ROOT / ".ci" / "lower_bounds.py"))
MODULES = {"PyYAML": "yaml", "markdown-it-py": "markdown_it", "pytest-xdist": "xdist"}
NOT_IMPORTED = {
    "accelerate": "transformers imports it when it shards a model",
    "pytest-xdist": "the command of the README runs pytest -n",
}


@functools.cache
def imported(folder):
    """Names of the packages that the files of a folder import."""
    names = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value.split(".")[0])  # pytest.importorskip("h5py")
    return names


def names(requirements):
    return set(LOWER["bounds"]({"dependencies": requirements, "optional-dependencies": EMPTY}))


EMPTY = {extra: [] for extra in LOWER["EXTRAS"]}


def test_dependencies_are_imported_by_the_package():
    declared = names(PROJECT["dependencies"])
    assert {n for n in declared if MODULES.get(n, n) not in imported("src")} == set()


def test_dependencies_of_tests_are_imported_by_tests():
    declared = names(PROJECT["optional-dependencies"]["test"]) - set(NOT_IMPORTED)
    used = imported("tests") | imported("src")
    assert {n for n in declared if MODULES.get(n, n) not in used} == set()


def test_what_errors_tell_pip_to_install_is_what_the_extras_ask_for():
    asked = PROJECT["optional-dependencies"]
    assert {name: [spelt] for name, spelt in extras._REQUIREMENTS.items()} == {
        "torch": asked["torch"],
        "paddle": asked["paddle"],
        "h5py": asked["h5"],
        "numcodecs": asked["pack"],
        "fsspec": asked["remote"],
        "pyarrow": asked["parquet"],
        "duckdb": [n for n in asked["query"] if n not in asked["parquet"]],
        "matplotlib": asked["plots"],
        "mcp": asked["mcp"],
        "ray": asked["ray"],
    }


def test_the_numpy_that_is_refused_is_the_one_that_pip_refuses():
    assert extras._NUMPY in PROJECT["dependencies"]


def test_the_python_that_is_refused_is_the_one_that_pip_refuses():
    assert PROJECT["requires-python"] == ">=3.11"
    assert "sys.version_info < (3, 11)" in (ROOT / "src/whence/__init__.py").read_text()


def test_nobody_is_told_to_install_whence_from_an_index():
    """No index has it, and another project might take the name there."""
    told = re.compile(r"""whence\[\w+\]|pip install (?:-U |--upgrade )*["']?whence\b(?!-)""")
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    offline = "pip install --no-index"
    assert [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if told.search(line) and offline not in line
    ] == []


@pytest.mark.parametrize(
    ("kept", "source"),
    [
        ({"url": "file:///a%20b/whence", "dir_info": {"editable": True}}, "'/a b/whence'"),
        (
            {"url": "https://host/whence.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            "git+https://host/whence.git",
        ),
        ({"url": "https://host/whence-1.whl", "archive_info": {}}, "https://host/whence-1.whl"),
        (None, "WHENCE, its checkout, Git URL or wheel"),
    ],
)
def test_another_python_is_told_to_install_whence_from_where_it_came(monkeypatch, kept, source):
    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return kept and json.dumps(kept)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert extras.whence_source() == source


def test_every_requirement_states_a_lower_bound():
    assert LOWER["bounds"](PROJECT)["numpy"] == "2.0"
    with pytest.raises(ValueError, match="states no lower bound"):
        LOWER["bounds"]({"dependencies": ["numpy"], "optional-dependencies": EMPTY})


def test_a_wheel_holds_every_file():
    """What is not a module of a package is listed in pyproject.toml, or a wheel goes without it."""
    package, tables = ROOT / "src" / "whence", tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = tables["tool"]["setuptools"]["package-data"]["whence"]
    others = [
        path.relative_to(package).as_posix()
        for path in sorted(package.rglob("*"))
        if path.is_file()
        and path.parent.name != "__pycache__"
        and not path.name.startswith("_compiled.")  # the extension that was built there
        and not (path.suffix == ".py" and (path.parent / "__init__.py").is_file())
    ]
    assert [name for name in others if not any(fnmatch.fnmatch(name, p) for p in listed)] == []
    assert "demo/runs.zip" in others


def test_the_conda_recipe_asks_for_what_the_package_asks_for():
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    spelt = {"python-xxhash": "xxhash", "pyyaml": "PyYAML"}
    asked = [line.split(" ") for line in recipe["requirements"]["run"]]
    python, *packages = [f"{spelt.get(name, name)}{bound}" for name, bound in asked]
    assert python == f"python{PROJECT['requires-python']}"
    assert sorted(packages) == sorted(PROJECT["dependencies"])
    assert recipe["package"]["version"] == whence.__version__


def test_every_file_of_a_release_names_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == whence.__version__


@pytest.mark.parametrize("name", ["tests", "wheels"])
def test_scripts_that_a_workflow_runs_are_there(name):
    path = ROOT / ".github" / "workflows" / f"{name}.yml"
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    lines = [word for step in steps for word in step.get("run", "").split()]
    assert [word for word in lines if word.startswith(".ci/") and not (ROOT / word).is_file()] == []
    assert all("run" in step or "uses" in step for step in steps)
