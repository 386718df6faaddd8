"""A comparison that was stopped goes on where it was, and only as the same comparison."""

import pytest
from differing_runs import files

from inside import whence as run_whence
from whence.engines import Journal, Outcome, Task, kept, processes
from whence.errors import UsageError
from whence.workflows import latest

HOW = ("--no-replay", "--engine", "processes", "--workers", 1)


@pytest.fixture
def handed_out(monkeypatch):
    """How many tasks workers got."""
    tasks = []
    original = processes.Processes._hand_out
    monkeypatch.setattr(
        processes.Processes,
        "_hand_out",
        lambda self, *work: (tasks.append(work[0].number), original(self, *work)),
    )
    return tasks


def stopped(monkeypatch, folder, out, *, after):
    """A comparison that Ctrl-C stops once a number of tasks is kept."""
    original, number = kept.Journal.add, 0

    def add(self, *result):
        nonlocal number
        original(self, *result)
        number += 1
        if number == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kept.Journal, "add", add)
        return run_whence(folder, "compare", "a", "b", *HOW, "-o", out)


def test_finished_tasks_are_not_done_again(
    runs,
    tmp_path,
    many_tasks,
    monkeypatch,
    handed_out,
):
    local = tmp_path / "local"
    assert run_whence(runs, "compare", "a", "b", "--no-replay", "-o", local).returncode < 3
    out = tmp_path / "out"
    assert stopped(monkeypatch, runs, out, after=3).returncode == 130
    journal = out / "unfinished.journal"
    whole = journal.read_bytes()
    assert whole.count(b"\n") == 4

    again = run_whence(runs, "compare", "a", "b", *HOW, "-o", out)
    assert again.returncode == 3
    assert "--resume goes on with it" in again.stderr

    # The last line was cut off as the driver was killed: its task is done again, two are not.
    journal.write_bytes(whole[:-20])
    first = len(handed_out)
    handed_out.clear()
    resumed = run_whence(runs, "compare", "a", "b", *HOW, "-o", out, "--resume")
    assert resumed.returncode < 3, resumed.stderr
    assert files(out) == files(local)
    assert not journal.exists()
    assert len(handed_out) > first - 3
    assert min(handed_out) == 2


def test_another_comparison_is_not_resumed(
    runs,
    tmp_path,
    many_tasks,
    monkeypatch,
):
    out = tmp_path / "out"
    stopped(monkeypatch, runs, out, after=2)
    resume = (*HOW, "-o", out, "--resume")
    other = run_whence(runs, "compare", "a", "c", *resume)
    assert other.returncode == 3
    assert "target: " in other.stderr
    assert "reference: " not in other.stderr
    tier = run_whence(runs, "compare", "a", "b", *resume, "--tier", "core")
    assert "tier: full then, core now" in tier.stderr
    monkeypatch.setattr("whence.workflows.compare.__version__", "9.9")
    assert "whence: " in run_whence(runs, "compare", "a", "b", *resume).stderr
    assert (out / "unfinished.journal").exists()


def test_force_starts_anew(runs, tmp_path, many_tasks, monkeypatch, handed_out):
    out = tmp_path / "out"
    stopped(monkeypatch, runs, out, after=2)
    handed_out.clear()
    assert run_whence(runs, "compare", "a", "c", *HOW, "-o", out, "--force").returncode < 3
    assert min(handed_out) == 0
    assert not (out / "unfinished.journal").exists()


def test_a_damaged_line_ends_what_is_taken_up(tmp_path):
    about = {"reference": "a"}
    path = tmp_path / "kept"
    journal = Journal(path, about, resume=False)
    for key in ("x", "y", "z"):
        journal.add(key, key.encode() * 50)
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + lines[2].replace(b"e", b"f", 3) + lines[3])
    again = Journal(path, about, resume=True)
    assert "x" in again
    assert "z" not in again
    again.add("z", b"new")
    again.close()
    third = Journal(path, about, resume=True)
    assert len(third) == 2
    assert third.result("z") == b"new"
    assert third.result("x") == b"x" * 50
    with pytest.raises(UsageError, match="reference: a then, b now"):
        Journal(path, {"reference": "b"}, resume=True)


def test_errors_are_tried_again(tmp_path):
    class Failing:
        def run(self, tasks):
            return (Outcome(task.number, error="no luck") for task in tasks)

        def close(self):
            pass

    path = tmp_path / "kept"
    engine = kept.Kept(Failing(), Journal(path, {}, resume=False))
    assert [o.error for o in engine.run([Task(0, "whence.x", b"")])] == ["no luck"]
    engine.close()
    assert not path.exists()


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
