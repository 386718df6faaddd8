"""Several ranks that capture in code into one path make one run."""

import json
import os
import socket
import subprocess
import sys

import pytest

from whence import store
from whence.errors import OutputExists
from whence.records import RunInfo


def test_ranks_of_one_launch_join_and_nobody_else_does(tmp_path):
    run = store.create(tmp_path / "new" / "run", RunInfo(user="first"), together=True)
    assert store.create(run, RunInfo(user="second"), together=True, force=True) == run
    assert json.loads((run / "run.json").read_text())["user"] == "first"
    with pytest.raises(OutputExists, match="already holds a run"):
        store.create(run, RunInfo())


@pytest.mark.parametrize("how", ["another parent", "before this process", "again"])
def test_a_run_that_is_not_of_this_launch_is_never_joined(tmp_path, how):
    run = store.create(tmp_path / "run", RunInfo(), together=True)
    info = json.loads((run / "run.json").read_text())
    launched = info["settings"]["launched"]
    if how == "again":
        (run / f"rank00000-host-{os.getpid()}").mkdir()
    changed = {"another parent": {"parent": [1, 1]}, "before this process": {"at": -1.0}}.get(
        how, {}
    )
    (run / "run.json").write_text(
        json.dumps({**info, "settings": {"launched": {**launched, **changed}}})
    )
    with pytest.raises(OutputExists, match="already holds a run"):
        store.create(run, RunInfo(), together=True)


def test_a_rank_that_starts_late_joins_the_ranks_that_still_write(tmp_path):
    """A rank of the same parent, such as a shell that starts one after the other."""
    run = store.create(tmp_path / "run", RunInfo(user="first"), together=True)
    file = run / "run.json"
    info = json.loads(file.read_text())
    info["settings"]["launched"]["at"] = -1.0
    file.write_text(json.dumps(info))
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        folder = run / f"rank00000-{socket.gethostname()}-{rank.pid}"
        folder.mkdir()
        fields = {"format": 1, "rank": 0, "host": socket.gethostname(), "pid": rank.pid}
        (folder / "process.json").write_text(json.dumps({**fields, "started": ""}))
        assert store.create(run, RunInfo(user="second"), together=True, force=True) == run
        assert json.loads(file.read_text())["user"] == "first"
    finally:
        rank.communicate(b"\n")
    store.create(run, RunInfo(user="second"), together=True, force=True)
    assert json.loads(file.read_text())["user"] == "second"


@pytest.mark.parametrize(
    ("size", "several"), [("2", True), ("1", False), ("", False), ("many", False)]
)
def test_what_a_launcher_says(monkeypatch, size, several):
    from whence.workflows.capture import setup

    monkeypatch.setenv("WORLD_SIZE", size)
    assert setup.is_one_of_several() is several
