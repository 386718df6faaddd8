"""The line of a notebook: after a second, in one display, gone at the end; nothing anywhere else."""

import sys
import types

import pytest

from handmade import net
from whence import api
from whence.workflows import notebook_progress


class Handle:
    def __init__(self, drawn):
        self.drawn = drawn

    def update(self, data, raw):
        assert raw
        self.drawn.append(data)


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook was made to show, beside a clock that stands still unless it is moved."""
    drawn, now = [], [100.0]

    def display(data, raw, display_id):
        assert raw and display_id
        drawn.append(("new", data))
        return Handle(drawn)

    shell = types.SimpleNamespace(kernel=object())
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    monkeypatch.setattr(notebook_progress.time, "monotonic", lambda: now[0])
    return types.SimpleNamespace(drawn=drawn, now=now, shell=shell)


def test_a_line_comes_after_a_second_and_goes_with_the_work(notebook):
    with notebook_progress.counting(None) as count:
        count(1, 4, "replaying <b>")
        assert notebook.drawn == []
        notebook.now[0] += 1.1
        count(2, 4, "replaying <b>")
        count(3, 4, "too soon after the last")
        notebook.now[0] += 1
        with notebook_progress.telling(None) as tell:
            tell("inside of another")
    (new, first), second, last = notebook.drawn
    assert new == "new"
    assert first["text/plain"] == f"replaying <b>  [{'#' * 16}{'-' * 16}]  2/4"
    assert "replaying &lt;b&gt;" in first["text/html"]
    assert second["text/plain"] == "inside of another"
    assert last == {"text/plain": "", "text/html": ""}


def test_what_takes_no_second_shows_nothing_and_a_callers_own_is_called(notebook):
    assert api.compare(net(), net()).status == "same"
    seen = []
    api.compare(net(), net(), progress=lambda *how: seen.append(how))
    assert seen and notebook.drawn == []
    notebook.now[0] = 0.0

    def ticking():
        notebook.now[0] += 1
        return notebook.now[0]

    notebook_progress.time.monotonic = ticking
    api.compare(net(), net())
    assert notebook.drawn and notebook.drawn[-1]["text/plain"] == ""


def test_a_terminal_and_a_script_have_none(notebook, monkeypatch):
    del notebook.shell.kernel
    assert not notebook_progress.in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    with notebook_progress.counting(None) as count, notebook_progress.telling(None) as tell:
        assert count is None
        tell("nothing happens")
    assert notebook.drawn == []
