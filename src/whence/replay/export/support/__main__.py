"""Runs the tests beside this package where pytest is not installed: `python -m operator_support`,
with the options of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn


class _Skipped(Exception):
    pass


class _Options(argparse.ArgumentParser):
    """The parser of options as pytest calls it."""

    def getgroup(self, _: str) -> _Options:
        return self

    def addoption(self, *names: str, **how: Any) -> None:
        self.add_argument(*names, **how)


def _pytest() -> ModuleType:
    """A module that stands for pytest, as far as the tests use it."""

    def parametrize(_: str, values: Sequence[Any]) -> Callable[[Any], Any]:
        def with_values(function: Any) -> Any:
            function.samples = values
            return function

        return with_values

    def skip(reason: str) -> NoReturn:
        raise _Skipped(reason)

    module = ModuleType("pytest")
    module.__dict__.update(
        fixture=lambda function: function,
        mark=SimpleNamespace(parametrize=parametrize),
        skip=skip,
        UsageError=SystemExit,
    )
    return module


def _imported(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _tests(folder: Path) -> Iterator[tuple[str, Path, Callable[..., None], tuple[Any, ...]]]:
    """(name, file, function, arguments behind `check`) of every test."""
    for path in sorted(folder.glob("test_*.py")):
        for name, function in vars(_imported(path)).items():
            if name.startswith("test_") and inspect.isfunction(function):
                for sample in getattr(function, "samples", [None]):
                    given = () if sample is None else (sample,)
                    yield name + (f"[{sample}]" if given else ""), path, function, given


def main(folder: Path, words: Sequence[str]) -> int:
    """Run every test of a folder; the exit code is 1 where one fails."""
    sys.modules["pytest"] = _pytest()
    conftest = _imported(folder / "conftest.py")
    parser = _Options(prog="python -m operator_support", description=__doc__)
    conftest.pytest_addoption(parser)
    config = SimpleNamespace(
        option=parser.parse_args(words), invocation_params=SimpleNamespace(dir=Path.cwd())
    )
    conftest.pytest_configure(config)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for name, path, function, given in _tests(folder):
        request = SimpleNamespace(config=config, path=path, node=SimpleNamespace(name=name))
        outcome = "passed"
        try:
            function(conftest.check(request), *given)
        except _Skipped:
            outcome = "skipped"
        except Exception as error:  # noqa: BLE001 - whatever a test raises makes it fail
            outcome = "failed"
            print(f"FAILED {path.name}::{name} - {error}")
        counts[outcome] += 1
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
    return int(bool(counts["failed"]) or not any(counts.values()))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1], sys.argv[1:]))
