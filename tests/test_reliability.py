"""Captures on a disk that fails at its n-th write, open, rename ...: a sample of what
`benchmarks/reliability.py` goes over in full.
"""

import contextlib
import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import whence
from whence import api, disk
from whence.cli import _files
from whence.errors import StoreFailed, UnreadableRun
from whence.store import shards, writer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
reliability = pytest.importorskip("reliability")
faulty = pytest.importorskip("_faulty_disk")
programs = pytest.importorskip("_captured_programs")

pytestmark = pytest.mark.filterwarnings("ignore")  # of forks in a process with threads


@pytest.fixture(scope="module", autouse=True)
def warmed():
    """What every program loads is loaded before it is forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "TORCH", {"torch modules": programs.TORCH["torch modules"]})
        programs.warm("torch")


def wrong(cases):
    return [(case.program, case.fault, case.wrong) for case in cases if case.wrong]


def sampled(name, every):
    cases = [*reliability.cases(name, every)]
    assert sum(case.happened for case in cases) > 5
    assert sum(case.acknowledged for case in cases) > 20
    return cases


def test_a_recording_loses_nothing_acknowledged_at_any_fault():
    assert wrong(sampled("whence.record", 9)) == []


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "every"),
    [("torch modules", 17), ("torch modules, large tensors", 40), ("one of two ranks", 23)],
)
def test_a_capture_loses_nothing_acknowledged_and_the_program_goes_on(name, every):
    assert wrong(sampled(name, every)) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", programs.GROUPS)
def test_every_level_of_a_capture(group):
    """In a process of its own: engines whose threads another test has started here do not survive
    a fork.
    """
    if not programs.is_here(group):
        pytest.skip("not installed")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "reliability.py", "--group", group, "--every", "31"],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in programs.GROUPS[group]:
        assert f"\n{name}: " in f"\n{done.stdout}"


class Once:
    """A disk on which the n-th call of a kind fails, in this process."""

    def __init__(self, monkeypatch, kind, moment, what):
        self.disk = faulty.FaultyDisk(faulty.Fault(kind, moment, what))
        monkeypatch.setattr(disk, "system", self.disk)


def all_files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["write", "open", "rename", "make_folder"])
@pytest.mark.parametrize("what", ["ENOSPC for good", "EIO for good"])
def test_a_comparison_that_cannot_be_written_is_no_comparison(tmp_path, monkeypatch, kind, what):
    runs = [tmp_path / "a", tmp_path / "b"]
    for number, run in enumerate(runs):
        whence.record(run, {"h": np.arange(8, dtype="f4"), "y": np.arange(9.0) * (1 + number)})
    result = whence.compare(*runs)
    failed = 0
    for moment in range(1, 12):
        old, new = tmp_path / f"old{moment}", tmp_path / f"new{moment}"
        api.write(result, old)
        before = all_files(old)
        for folder in (old, new):
            with monkeypatch.context() as patch:
                broken = Once(patch, kind, moment, what).disk
                try:
                    api.write(result, folder)
                except StoreFailed as error:
                    failed += 1
                    assert str(folder) in str(error)
            if not broken.happened:
                continue
            assert not [*folder.rglob("*.tmp")]
            if (folder / "report.json").exists():
                whence.load_comparison(folder)  # all of it
                if folder == old:
                    assert all_files(old) == before
            else:
                with pytest.raises(UnreadableRun):
                    whence.load_comparison(folder)
    assert failed or (kind, what) == ("rename", "ENOSPC for good")


@pytest.mark.parametrize("command", ["report", "compare --json", "compare --junit"])
def test_a_page_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path, monkeypatch, command):
    for name in "ab":
        whence.record(tmp_path / name, {"h": np.arange(8, dtype="f4")})
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "out" / "file"
    for moment in (1, 2):
        with monkeypatch.context() as patch:
            broken = Once(patch, "write", moment, "ENOSPC for good").disk
            if command == "report":
                call = functools.partial(whence.report_html, result, file, force=True)
            else:
                call = functools.partial(_files.write, file, ["x" * 10, "y" * (1 << 21)], True)
            if moment == 2 and command == "report":
                call()  # one write
                assert not broken.happened
                break
            with pytest.raises(StoreFailed, match="No space left"):
                call()
        assert not [*file.parent.iterdir()]


def lossy_write(file, data, offset):
    """Writes on, whatever the system said."""
    with contextlib.suppress(OSError), file as fd:
        disk.system.write(fd, memoryview(data), offset)


def test_the_harness_notices_a_writer_that_ignores_what_the_system_says(monkeypatch):
    monkeypatch.setattr(shards, "write_all", lossy_write)
    monkeypatch.setattr(writer, "write_all", lossy_write)
    said = {text for _, _, texts in wrong(reliability.cases("whence.record", 11)) for text in texts}
    assert any("lost" in text for text in said)


def test_the_harness_notices_a_writer_that_keeps_no_room_for_what_waits(monkeypatch):
    monkeypatch.setattr(shards.Room, "have", lambda *_: None)

    def full(counts, every):
        return [faulty.Fault("write", n, "ENOSPC for good") for n in range(1, counts["write"] + 1)]

    monkeypatch.setattr(reliability, "faults", full)
    said = {text for _, _, texts in wrong(reliability.cases("whence.record", 1)) for text in texts}
    assert any("acknowledged lost" in text for text in said)
