"""A comparison gives the same files, byte for byte, whatever engine measures, and a worker that ends
takes nothing with it.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from differing_runs import files

import whence
from inside import whence as run_whence
from whence import engines, extras, store
from whence.comparison.options import CompareOptions
from whence.comparison.tasks import measuring
from whence.engines import Task, processes, task
from whence.errors import UsageError
from whence.records import Call, Ref, RunInfo
from whence.records.missing import Lack
from whence.workflows import latest


def compared(runs, out, **how):
    whence.compare(runs / "a", runs / "b", output=out, replay=False, **how)
    return files(out)


def test_processes_and_local_write_the_same_files(runs, tmp_path, many_tasks, monkeypatch):
    handed_out = []
    original = processes.Processes._hand_out
    monkeypatch.setattr(
        processes.Processes,
        "_hand_out",
        lambda self, work, *rest: (handed_out.append(work.number), original(self, work, *rest)),
    )
    local = compared(runs, tmp_path / "local")
    assert compared(runs, tmp_path / "out", engine="processes", workers=2) == local
    assert len(handed_out) > 4
    assert "not wanted" in local[0]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "report.csv",
        "report.json",
        "summary.json",
    ]


def test_workers_read_dumps_of_other_tools(runs, tmp_path, many_tasks, monkeypatch):
    for name in ("a", "b"):
        whence.convert(runs / name, tmp_path / name, to="npy")
    handed_out = []
    original = processes.Processes._hand_out
    monkeypatch.setattr(
        processes.Processes,
        "_hand_out",
        lambda self, work, *rest: (handed_out.append(work.number), original(self, work, *rest)),
    )
    local = compared(tmp_path, tmp_path / "local")
    assert compared(tmp_path, tmp_path / "out", engine="processes", workers=1) == local
    assert len(handed_out) > 4


def test_little_data_starts_no_worker(runs, tmp_path, monkeypatch):
    def start(self):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(processes._Worker, "__init__", start)
    local = compared(runs, tmp_path / "local")
    assert compared(runs, tmp_path / "out", engine="processes", workers=2) == local


def test_arrays_in_memory_are_measured_here(tmp_path, many_tasks):
    random = np.random.default_rng(0)
    one = {f"t{n}": random.standard_normal((40, 40), np.float32) for n in range(4)}
    other = {name: array * np.float32(1.5) for name, array in one.items()}
    local = whence.compare(one, other)
    assert whence.compare(one, other, engine="processes", workers=1).rows == local.rows


def test_a_killed_worker_loses_nothing(runs, tmp_path, many_tasks, monkeypatch):
    local = compared(runs, tmp_path / "local")
    starts = []
    original = processes._Worker.start

    def start(self, work, attempt):
        starts.append(work.number)
        if work.number in (1, 3) and attempt < task.ATTEMPTS:
            os.kill(self._process.pid, signal.SIGKILL)  # first: it would be done before the signal
        original(self, work, attempt)

    monkeypatch.setattr(processes._Worker, "start", start)
    assert compared(runs, tmp_path / "out", engine="processes", workers=2) == local
    assert starts.count(1) == starts.count(3) == task.ATTEMPTS


def test_a_task_that_ends_every_worker_is_an_error_of_that_task(
    runs, tmp_path, many_tasks, monkeypatch
):
    original = processes._Worker.start

    def start(self, work, attempt):
        if work.number == 0:
            os.kill(self._process.pid, signal.SIGKILL)
        original(self, work, attempt)

    monkeypatch.setattr(processes._Worker, "start", start)
    result = whence.compare(runs / "a", runs / "b", replay=False, engine="processes", workers=1)
    lost = [row for row in result.rows if "could not be measured" in row.measured.why]
    assert 0 < len(lost) < len(result.rows)
    assert "its worker ended 3 times, the last time by SIGKILL" in lost[0].measured.why
    assert result.incomparable >= len(lost)


def test_what_could_not_be_measured_is_no_pass(tmp_path, many_tasks, monkeypatch):
    """All other tensors are equal, so this one decides."""
    for name in ("a", "b"):
        with store.Writer(store.create(tmp_path / name, RunInfo())) as writer:
            for number in range(3):
                values = np.linspace(0, 1, 9000, dtype=np.float32) + (number == 1) * len(name)
                if number == 1 and name == "b":
                    values = values * np.float32(1.0000001)
                data = values.view(np.uint8)
                record = writer.record(
                    "float32", (9000,), data, xxhash.xxh3_128_digest(data), None, None
                )
                refs = (Ref("output.0", record),)
                writer.call(Call(number, f"l{number}", "N", 0, number, leaf=True, refs=refs))
    how = {"replay": False, "engine": "processes", "workers": 1}
    assert whence.compare(tmp_path / "a", tmp_path / "b", **how).status == "same"
    original = processes._Worker.start

    def start(self, work, attempt):
        os.kill(self._process.pid, signal.SIGKILL)
        original(self, work, attempt)

    monkeypatch.setattr(processes._Worker, "start", start)
    assert whence.compare(tmp_path / "a", tmp_path / "b", **how).status == "undecided"


class Here:
    """An engine whose worker is this process, with runs of its own."""

    def run(self, tasks):
        for given in tasks:
            result = measuring.perform(given.payload)
            yield engines.Outcome(given.number, result)


def test_what_a_worker_cannot_read_is_what_the_run_lacks(tmp_path, many_tasks):
    for name in ("a", "b"):
        with store.Writer(store.create(tmp_path / name, RunInfo())) as writer:
            for number in range(2):
                data = np.linspace(number, ord(name), 9000, dtype=np.float32).view(np.uint8)
                digest = xxhash.xxh3_128_digest(data)
                record = writer.record("float32", (9000,), data, digest, None, None)
                refs = (Ref("output.0", record),)
                writer.call(Call(number, f"l{number}", "N", 0, number, leaf=True, refs=refs))
    shard, offset, _ = store.open_run(tmp_path / "b").location(0)
    with Path(shard).open("r+b") as file:
        file.seek(offset)
        file.write(b"exchanged")
    both = store.open_run(tmp_path / "a"), store.open_run(tmp_path / "b")
    measured = measuring.measure(
        both, [(0, 0), (1, 1)], CompareOptions(engine=Here()), lambda *_: None
    )
    assert [m.tier for m in measured.values()] == ["none", "full"]
    assert [missing.kind for missing in both[1].missing] == [Lack.FOREIGN]


def test_what_a_task_raises_comes_back_in_words():
    engine = engines.create("processes", workers=1)
    try:
        (outcome,) = engine.run([Task(4, "whence.comparison.tasks.measuring", b"no task")])
        (other,) = engine.run([Task(5, "os", b"")])
    finally:
        engine.close()
    assert outcome.number == 4
    assert "DecodeError" in outcome.error or "ValidationError" in outcome.error
    assert "'os' is not a module of whence" in other.error


def test_a_worker_of_another_whence_refuses():
    with pytest.raises(
        ValueError, match=r"the worker has whence .* and the comparison whence 9\.9"
    ):
        task.perform(task.Request("whence.comparison.tasks.measuring", b"", "9.9"))


def test_stopping_early_ends_the_workers(runs, many_tasks):
    engine = processes.Processes(2)
    payload = b"not looked at"
    outcomes = engine.run([Task(n, "whence.comparison.tasks.measuring", payload) for n in range(8)])
    next(outcomes)
    busy = [worker._process for worker in engine._busy.values()]
    outcomes.close()
    idle = [worker._process for worker in engine._idle]
    engine.close()
    assert busy
    assert all(process.poll() is not None for process in (*busy, *idle))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"engine": "dask"}, "engine 'dask'"),
        ({"engine": "processes", "workers": 0}, "workers 0"),
        ({"engine": "processes", "address": "auto"}, "names a Ray cluster"),
        ({"workers": 2}, "local uses threads"),
    ],
)
def test_options_that_cannot_be(runs, how, words):
    with pytest.raises(UsageError, match=words):
        whence.compare(runs / "a", runs / "b", **how)


def test_the_command_line_watches_in_its_own_process(runs, tmp_path):
    words = ("--watch", "--engine", "processes")
    done = run_whence(tmp_path, "compare", runs / "a", runs / "b", *words)
    assert done.returncode == 3
    assert "--watch compares in this process" in done.stderr


def test_ray_says_how_to_get_it(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(whence.errors.MissingDependency, match="pip install 'ray>="):
        whence.compare(runs / "a", runs / "b", engine="ray")


def test_a_huge_comparison_is_kept_only_where_it_is_asked_for(runs, tmp_path, monkeypatch):
    """Of a million rows the report takes 300 MB; the cache folder of the user is not for that."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(latest, "_MOST_ROWS", 10)
    done = run_whence(tmp_path, "compare", runs / "a", runs / "b", "--no-replay")
    assert "it has 40 rows, too many to keep unasked" in done.stderr
    (kept_file,) = (tmp_path / "cache" / "whence" / "comparisons").iterdir()
    assert kept_file.stat().st_size < 1000
    report = run_whence(tmp_path, "report", "-o", "page.html")
    assert report.returncode == 3
    assert "was not kept: it has 40 rows" in report.stderr
    run_whence(tmp_path, "compare", runs / "a", runs / "b", "--no-replay", "-o", "cmp")
    assert run_whence(tmp_path, "report", "-o", "page.html").returncode == 0


needs_ray = pytest.mark.skipif(not extras.is_here("ray"), reason="ray is not installed")


@needs_ray
@pytest.mark.slow
def test_ray_and_local_write_the_same_files(runs, tmp_path, many_tasks):
    local = compared(runs, tmp_path / "local")
    assert compared(runs, tmp_path / "out", engine="ray", workers=2) == local


@needs_ray
@pytest.mark.slow
def test_ray_tries_a_task_again_whose_worker_was_killed(runs, tmp_path, many_tasks, monkeypatch):
    from whence.engines import ray_cluster

    local = compared(runs, tmp_path / "local")
    marker = tmp_path / "was-killed"
    original = ray_cluster._answer

    def once(module, payload, version):
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(module, payload, version)

    monkeypatch.setattr(ray_cluster, "_answer", once)
    assert compared(runs, tmp_path / "out", engine="ray", workers=2) == local
    assert marker.exists()


@needs_ray
@pytest.mark.slow
def test_a_task_that_ends_every_worker_of_ray_is_an_error(runs, many_tasks, monkeypatch):
    from whence.comparison.tasks import measuring
    from whence.engines import ray_cluster

    monkeypatch.setattr(measuring, "TASK_BYTES", 80 << 10)  # each takes seconds to be given up

    monkeypatch.setattr(ray_cluster, "_answer", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    result = whence.compare(runs / "a", runs / "b", replay=False, engine="ray", workers=1)
    assert any("its worker ended 3 times" in row.measured.why for row in result.rows)
    assert result.status != "same"
