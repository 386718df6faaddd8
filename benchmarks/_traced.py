"""Which test executes which line: coverage.py, told whose turn it is.

What a fixture of wider scope executes counts for every test that asks for it, and what a process
that a test started executes counts for that test.
"""

from __future__ import annotations

import atexit
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

SOURCES, OUT = "WHENCE_TRACED_SOURCES", "WHENCE_TRACED_OUT"
"""Variables of a traced process: patterns of the files to trace, and where children write."""
SITE = """import os
if {sources!r} in os.environ:
    import sys
    sys.path.append({folder!r})
    import _traced
    sys.path.remove({folder!r})
    _traced.follow()
"""
"""What every Python that a test starts runs first, as sitecustomize."""
Lines = dict[str, int]
"""File below the traced tree -> the lines executed, bit n for line n."""


def prepare(place: Path) -> None:
    """Write the sitecustomize that traces the processes which a test starts."""
    place.mkdir(parents=True, exist_ok=True)
    folder = str(Path(__file__).resolve().parent)
    (place / "sitecustomize.py").write_text(SITE.format(sources=SOURCES, folder=folder))


def follow() -> None:
    """Trace this process, which a test started, and the processes that it forks."""
    tracing = _begin()
    saved = []

    def save() -> None:
        if saved:
            return
        saved.append(True)
        tracing.stop()
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        lines = _lines(tracing, None)
        if test and lines:
            text = json.dumps({"test": test, "lines": _packed(lines)})
            (Path(os.environ[OUT]) / f"{uuid.uuid4().hex}.json").write_text(text)

    def forked() -> None:
        saved.append(True)
        tracing.stop()
        follow()

    leave = os._exit

    def last(code: int) -> Any:
        save()
        leave(code)

    os._exit = last
    atexit.register(save)
    os.register_at_fork(after_in_child=forked)


def _begin() -> coverage.Coverage:
    tracing = coverage.Coverage(
        data_file=None,
        config_file=False,
        include=os.environ[SOURCES].split(os.pathsep),
        messages=False,
    )
    tracing.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    tracing.start()
    return tracing


def _lines(tracing: coverage.Coverage, context: str | None) -> Lines:
    data = tracing.get_data()
    data.set_query_context(context) if context is not None else data.set_query_contexts(None)
    return {
        file: sum(1 << line for line in lines)
        for file in data.measured_files()
        if (lines := data.lines(file))
    }


def _packed(lines: Lines) -> dict[str, str]:
    return {file: f"{bits:x}" for file, bits in lines.items()}


class Tracer:
    """A pytest plugin: traces one run of tests and keeps lines, seconds and outcome of each."""

    def __init__(self) -> None:
        self.tracing = _begin()
        self.seconds: dict[str, float] = defaultdict(float)
        self.outcome: dict[str, str] = {}
        self.shared: dict[str, list[str]] = {}  # test -> the wider fixtures that it asks for
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.tracing.stop()
        follow()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        definitions = getattr(item, "_fixtureinfo", None)
        self.shared[item.nodeid] = [
            self._named(one)
            for several in (definitions.name2fixturedefs if definitions else {}).values()
            for one in several
            if one.scope != "function"
        ]
        self.tracing.switch_context(item.nodeid)
        yield
        self.tracing.switch_context("")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            yield
            return
        # A fixture is set up while a test, or another fixture, is: its turn comes again after.
        before = getattr(self, "turn", None) or request.node.nodeid
        self.turn = self._named(fixturedef)
        self.tracing.switch_context(self.turn)
        yield
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        self.turn = before if before.startswith("fixture ") else None
        self.tracing.switch_context(self.turn or test)

    @staticmethod
    def _named(definition: Any) -> str:
        return f"fixture {definition.baseid}::{definition.argname}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed" or report.nodeid not in self.outcome:
            self.outcome[report.nodeid] = report.outcome

    def result(self) -> dict[str, Any]:
        """{"imported": lines, "contexts": {test or fixture: lines}, "tests": {...}}."""
        self.tracing.stop()
        data = self.tracing.get_data()
        contexts: dict[str, dict[str, int]] = defaultdict(dict)
        for file in data.measured_files():
            for line, names in data.contexts_by_lineno(file).items():
                for name in names:
                    contexts[name][file] = contexts[name].get(file, 0) | 1 << line
        return {
            "contexts": {name: _packed(lines) for name, lines in contexts.items()},
            "tests": {
                name: {
                    "seconds": round(self.seconds[name], 3),
                    "outcome": outcome,
                    "shared": self.shared.get(name, []),
                }
                for name, outcome in self.outcome.items()
            },
        }
