"""A dump under another tool's name holds a run of whence and the tool's own files. Files that were
changed afterwards are what is compared: the run says nothing about them.
"""

import os
import shutil

import pytest

pytest.importorskip("torch")

import torch

import whence
from whence.records.views import ForeignRun
from whence.workflows.capture.dump import Dump

pytestmark = pytest.mark.torch


def dumped(folder, layout):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    dump = Dump(folder, model.eval(), layout=layout)
    with torch.no_grad():
        model(torch.linspace(-1, 1, 16).reshape(2, 8))
    dump.close()
    return folder


def later(path, seconds=10):
    """As if it had been written so much later."""
    stamp = path.stat().st_mtime + seconds
    os.utime(path, (stamp, stamp))


@pytest.fixture
def dumps(tmp_path):
    return [dumped(tmp_path / name, "msit_torch") for name in "ab"]


def changed(folder):
    for name in ("root.2", "root"):
        path = folder / "0" / name / "output.pth"
        torch.save(torch.load(path) * 1.05, path)
        later(path)


def test_a_changed_file_is_no_longer_what_the_run_holds(dumps):
    assert whence.compare(*dumps).status == "same"
    changed(dumps[1])
    result = whence.compare(*dumps)
    assert (result.status, result.findings[0].op_type) == ("different", "Linear")
    assert any("output.pth" in note and "changed after" in note for note in result.notes)


def test_untouched_files_leave_the_run_with_its_programs(dumps):
    run = whence.open_run(dumps[0])
    assert not isinstance(run, ForeignRun) and run.programs


def test_a_copy_is_no_change(dumps, tmp_path):
    """Files are copied one after the other: some are later than the run."""
    copy = tmp_path / "copy"
    shutil.copytree(dumps[0], copy)
    for number, file in enumerate(sorted(f for f in copy.rglob("*") if f.is_file())):
        later(file, number)
    assert not isinstance(whence.open_run(copy), ForeignRun)


def test_what_no_tool_wrote_is_no_dump(dumps, tmp_path):
    run = tmp_path / "run"
    model = torch.nn.Linear(4, 4)
    with whence.capture(model, run), torch.no_grad():
        model(torch.ones(1, 4))
    torch.save(torch.ones(3), run / "results.pt")
    later(run / "results.pt")
    assert not isinstance(whence.open_run(run), ForeignRun)
