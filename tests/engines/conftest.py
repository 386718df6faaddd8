"""Runs that differ, and tasks of little data."""

import pytest
from differing_runs import write

from whence.comparison.tasks import measuring


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        write(folder / name, seed)
    return folder


@pytest.fixture
def many_tasks(monkeypatch):
    """What is little data otherwise is several tasks."""
    monkeypatch.setattr(measuring, "TASK_BYTES", 8 << 10)
