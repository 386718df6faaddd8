from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import by_hand_store as hand
import pytest
from safetensors import safe_open

from whence import store
from whence.errors import StoreFailed, UnreadableRun
from whence.records import Increment, Kept, Operation, Program, Ref

CHILD = """
import sys
sys.path.insert(0, {here!r})
import by_hand_store as hand
from whence import store
from whence.records import Ref, Step
random_size = lambda n: (n * 7919) % 9000 + (200_000 if n % 97 == 0 else 0)
writer = store.Writer({run!r}, max_shard_bytes=1 << 20, header_bytes=16 << 10)
print("ready", flush=True)
for n in range(1_000_000):
    hand.add(writer, hand.bits("float32", (random_size(n),), n), "float32", digest=n % 3 > 0)
    writer.call(hand.call(n, Ref("output.0", n), scope=f"layers.{{n}}", step=n // 50))
    if n % 50 == 49:
        writer.step(Step("Net", n // 50, 0, kept=True))
        print(n + 1, flush=True)
"""


def size(n: int) -> int:
    return (n * 7919) % 9000 + (200_000 if n % 97 == 0 else 0)


def killed(tmp_path: Path, after_s: float) -> tuple[Path, int]:
    """A run whose writer was killed with SIGKILL, and how many records it had acknowledged by
    then.
    """
    run = hand.new(tmp_path / "run")
    code = CHILD.format(here=str(Path(__file__).parent), run=str(run))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert child.stdout.readline() == "50\n"
        try:
            child.wait(after_s)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        acknowledged = 50
        for line in child.stdout:
            acknowledged = int(line)
        assert child.wait() == -signal.SIGKILL
    return run, acknowledged


def check_killed(tmp_path: Path, after_s: float) -> None:
    run, acknowledged = killed(tmp_path, after_s)
    opened = store.open_run(run)
    assert "uncleanly" in opened.ended
    assert len(opened.records) >= acknowledged
    assert f"{len(opened.records)} records" in opened.ended
    assert f"layers.{len(opened.calls) - 1}" in opened.ended
    for n in range(len(opened.records)):
        assert hand.same(opened.array(n), hand.bits("float32", (size(n),), n))
    first = store.recover(run)
    assert all(r.lost == 0 for r in first)
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    again = store.recover(run)
    assert all(not r.finished and not r.cut_bytes for r in again)
    assert files == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    recovered = store.open_run(run)
    assert "uncleanly" in recovered.ended
    assert len(recovered.records) == len(opened.records)
    seen = set()
    for shard in hand.shards(run):
        with safe_open(shard, "numpy") as official:
            for name in official.keys():  # noqa: SIM118
                if name.startswith("record."):
                    n = int(name.split(".")[1])
                    seen.add(n)
                    assert hand.same(official.get_tensor(name), hand.bits("float32", (size(n),), n))
    owners = {r.id for r in recovered.records if size(r.id) or r.id in seen}
    assert owners == seen


@pytest.mark.parametrize("trial", range(3))
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, trial: int) -> None:
    check_killed(tmp_path, random.Random(trial).random() * 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_kill_9_at_twenty_moments(tmp_path: Path, trial: int) -> None:
    check_killed(tmp_path, random.Random(100 + trial).random() * 1.5)


def test_recover_refuses_while_the_process_lives(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        hand.add(writer, hand.bits("float32", (3,)), "float32")
        writer.flush()
        with pytest.raises(StoreFailed, match="still writes"):
            store.recover(run)
    assert store.recover(run)[0].finished == ()


def test_a_writer_on_another_host_is_asked_by_its_last_word(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        hand.add(writer, hand.bits("float32", (3,)), "float32")
    folder = hand.only_process(run)
    process = json.loads((folder / "process.json").read_text())
    (folder / "process.json").write_text(json.dumps({**process, "host": "far.away"}))
    (folder / "status.json").write_text('{"ended": "running", "error": ""}')
    assert "still being written" in store.open_run(run).ended
    with pytest.raises(StoreFailed, match="still writes"):
        store.recover(run)
    os.utime(folder / "journal.jsonl", (0, 0))
    assert "uncleanly" in store.open_run(run).ended
    store.recover(run)


def test_recover_cuts_a_torn_journal_and_keeps_a_damaged_part_aside(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        for n in range(5):
            hand.add(writer, hand.bits("float32", (3,), n), "float32")
    folder = hand.only_process(run)
    journal = folder / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"t":"rec')
    (done,) = store.recover(run)
    assert (done.records, done.cut_bytes) == (5, 9)
    assert journal.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], b"garbage\n", *lines[3:]]))
    (done,) = store.recover(run)
    assert done.records == 3
    assert (folder / "journal.damaged").read_bytes().startswith(b"garbage\n")
    opened = store.open_run(run)
    assert hand.same(opened.array(2), hand.bits("float32", (3,), 2))


def test_recover_finishes_a_truncated_shard(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run, header_bytes=16 << 10) as writer:
        for n in range(5):
            hand.add(writer, hand.bits("float32", (16,), n), "float32")
    (shard,) = hand.shards(run)
    os.truncate(shard, (16 << 10) + 3 * 64 + 10)
    (done,) = store.recover(run)
    assert done.lost == 2
    with safe_open(shard, "numpy") as official:
        assert sorted(official.keys()) == ["record.0", "record.1", "record.2"]


def test_recover_does_not_follow_links(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        hand.add(writer, hand.bits("float32", (16,)), "float32")
    (shard,) = hand.shards(run)
    mine = tmp_path / "mine"
    mine.write_bytes(b"x" * 1000)
    shard.unlink()
    shard.symlink_to(mine)
    with pytest.raises((StoreFailed, UnreadableRun)):
        store.recover(run)
    assert mine.read_bytes() == b"x" * 1000


def test_several_processes_are_joined(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    program = Program("p", (Operation("aten.add.Tensor", ({"const": 0},)),), (), (), (), (0,))
    writers = [store.Writer(run, rank=rank) for rank in (1, 0, 0)]
    for number, writer in enumerate(writers):
        for n in range(4):
            hand.add(
                writer, hand.bits("float32", (n + 2,), 10 * number + n), "float32", digest=False
            )
        whole = hand.bits("float32", (3,), number)
        base = hand.add(writer, whole[:2], "float32", digest=False)
        writer.record("float32", (3,), hand.raw(whole[2:]), b"", None, None, base=(base, 0))
        writer.program(program)
        for n in range(4):
            writer.call(
                hand.call(
                    n, Ref("output.0", n), scope=f"w{number}.{n}", parent=n + 1 if n < 3 else -1
                ),
            )
    for writer in writers:
        writer.close()
    opened = store.open_run(run)
    assert opened.ended == ""
    assert [p.rank for p in opened.processes] == [0, 0, 1]
    order = [int(c.scope[1]) for c in opened.calls]
    assert order == [1] * 4 + [2] * 4 + [0] * 4
    assert len(opened.records) == 18
    for place, number in enumerate((1, 2, 0)):
        for n in range(4):
            call = opened.calls[4 * place + n]
            assert call.id == 4 * place + n
            assert call.parent == (call.id + 1 if n < 3 else -1)
            assert call.refs == (Ref("output.0", 6 * place + n),)
            assert hand.same(
                opened.array(call.refs[0].record), hand.bits("float32", (n + 2,), 10 * number + n)
            )
        last = opened.records[6 * place + 5]
        assert isinstance(last.elements, Increment)
        assert last.elements.base == 6 * place + 4
        assert hand.same(opened.array(last.id), hand.bits("float32", (3,), number))
        place_of = opened.records[6 * place].elements
        assert isinstance(place_of, Kept)
        assert place_of.shard == place
    assert opened.column("ref_record").tolist() == [r.record for c in opened.calls for r in c.refs]
    assert opened.column("ref_call").tolist() == [c.id for c in opened.calls for _ in c.refs]
    assert opened.column("parent").tolist() == [c.parent for c in opened.calls]
    assert sorted(p.constants[0] for p in opened.programs.values()) == [0, 6, 12]
    assert len(opened.programs) == 3
    only = store.open_run(run, ranks={1})
    assert [c.scope for c in only.calls] == [f"w0.{n}" for n in range(4)]
    assert only.programs == {"p": program}
    with pytest.raises(UnreadableRun, match=r"rank \[5\]; it has ranks \[0, 1\]"):
        store.open_run(run, ranks={5})


def test_a_process_that_died_as_it_started_is_told(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        hand.add(writer, hand.bits("float32", (3,)), "float32")
    (run / "rank00001-host-77").mkdir()
    opened = store.open_run(run)
    assert "rank00001-host-77" in opened.ended
    assert len(opened.records) == 1
