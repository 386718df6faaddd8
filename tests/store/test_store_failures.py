from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import by_hand_store as hand
import numpy as np
import pytest
from safetensors import safe_open

from whence import disk, store
from whence.errors import ElementsMissing, OutputExists, StoreFailed, UnknownVersion, UnreadableRun
from whence.records import Note, Ref, RunInfo
from whence.store import folder
from whence.store.index import KEPT
from whence.store.reader import notes_of
from whence.store.shards import Shard


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    yield from hand.mounted(tmp_path, "size=2m")


def written(path: Path, count: int = 20) -> Path:
    """A closed run of `count` small tensors, with a call each."""
    run = hand.new(path)
    with store.Writer(run, header_bytes=16 << 10) as writer:
        for n in range(count):
            hand.add(writer, hand.bits("float32", (16,), n), "float32")
            writer.call(hand.call(n, Ref("output.0", n), scope=f"layers.{n}", step=n // 10))
    return run


# -- create


def test_a_run_folder_is_private_and_says_what_it_is(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "deep" / "run")
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    fields = json.loads((run / "run.json").read_text())
    assert fields["kind"] == "whence"
    assert fields["format"] == 1
    assert store.is_run(run)
    assert not store.is_run(tmp_path)
    assert not store.is_run(tmp_path / "nothing")


def test_existing_output_stays(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    with pytest.raises(OutputExists, match="--force"):
        hand.new(run)
    assert len(store.open_run(run).records) == 20


def test_force_replaces_a_run_and_nothing_else(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / "mine.py").write_text("keep me")
    (run / "rank00000-looks-like-ours").write_text("but is a file")
    store.create(run, RunInfo(), force=True)
    assert sorted(p.name for p in run.iterdir()) == [
        "mine.py",
        "rank00000-looks-like-ours",
        "run.json",
    ]
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.json").write_text('{"kind": "something else"}')
    with pytest.raises(OutputExists, match="not a whence run"):
        store.create(other, RunInfo(), force=True)
    assert (other / "run.json").exists()
    link = tmp_path / "link"
    link.symlink_to(run)
    with pytest.raises(OutputExists, match="symbolic link"):
        store.create(link, RunInfo(), force=True)
    with pytest.raises(OutputExists, match="not a folder"):
        store.create(run / "mine.py", RunInfo(), force=True)


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert store.is_run(store.create(tmp_path / "run", RunInfo()))


def test_a_file_as_parent_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="writable folder"):
        hand.new(tmp_path / "file" / "run")


def test_run_json_is_updated_atomically_and_keeps_unknown_fields(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    store.update_info(run, exit_code=3, finished="2026-01-01T00:00:00+00:00", invented_later=[1])
    store.update_info(run, git="abc")
    info = store.open_run(run).info
    assert (info.exit_code, info.git, info.seed) == (3, "abc", 7)
    assert json.loads((run / "run.json").read_text())["invented_later"] == [1]
    assert not list(run.glob("*.tmp"))
    with pytest.raises(UnreadableRun):
        store.update_info(tmp_path / "nowhere", exit_code=0)


# -- writing


def test_nothing_written_makes_no_folder(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    store.Writer(run).close()
    assert [p.name for p in run.iterdir()] == ["run.json"]


def test_a_full_disk_stops_the_writer_and_keeps_what_was_journalled(small: Path) -> None:
    run = hand.new(small / "run")
    writer = store.Writer(run, header_bytes=16 << 10)
    arrays = []
    with pytest.raises(StoreFailed, match="No space left") as first:
        for seed in range(10_000):
            arrays.append(hand.bits("float32", (1000,), seed))
            hand.add(writer, arrays[-1], "float32")
            writer.flush()
    for again in (
        lambda: writer.call(hand.call(0)),
        lambda: hand.add(writer, arrays[0], "float32"),
        writer.flush,
        lambda: writer.note(Note("error", "x")),
    ):
        with pytest.raises(StoreFailed) as later:
            again()
        assert str(later.value) == str(first.value)
    writer.close()
    writer.close()
    opened = store.open_run(run)
    assert "No space left" in opened.ended
    assert len(arrays) - 3 <= len(opened.records) < len(arrays)
    assert all(hand.same(opened.array(i), arrays[i]) for i in range(len(opened.records)))


def test_a_full_disk_under_a_large_tensor_keeps_all_before_it(small: Path) -> None:
    run = hand.new(small / "run")
    writer = store.Writer(run, header_bytes=16 << 10)
    arrays = [hand.bits("float32", (100,), seed) for seed in range(50)]
    for array in arrays:
        hand.add(writer, array, "float32")
    with pytest.raises(StoreFailed):
        hand.add(writer, hand.bits("float32", (1 << 20,)), "float32")
    writer.close()
    opened = store.open_run(run)
    assert len(opened.records) == 50
    assert all(hand.same(opened.array(i), array) for i, array in enumerate(arrays))
    store.recover(run)
    with safe_open(hand.shards(run)[0], "numpy") as official:
        assert hand.same(official.get_tensor("record.49"), arrays[49])


@pytest.mark.parametrize("moment", range(1, 25))
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_any_write_may_fail_halfway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, error: int
) -> None:
    run = hand.new(tmp_path / "run")
    real, count = os.pwrite, 0

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        done = real(
            fd,
            memoryview(data)[: (len(data) + 1) // 2] if count % 3 == 0 or count >= moment else data,
            offset,
        )
        if count >= moment:
            raise OSError(error, os.strerror(error))
        return done

    arrays = [hand.bits("float32", (size,), size) for size in (10, 50_000, 3, 300, 60_000, 7)]
    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = store.Writer(run, header_bytes=16 << 10, max_shard_bytes=100_000)
    added = 0
    with pytest.raises(StoreFailed, match=os.strerror(error)):
        for array in arrays * 5:
            hand.add(writer, array, "float32", digest=False)
            writer.flush()
            added += 1
    writer.close()
    monkeypatch.undo()
    if added:
        opened = store.open_run(run)
        assert (
            os.strerror(error) in opened.ended
            or "uncleanly" in opened.ended
            or "still being written" in opened.ended
        )
        assert len(opened.records) >= added
        assert all(hand.same(opened.array(i), arrays[i % 6]) for i in range(len(opened.records)))


def test_a_read_only_medium(tmp_path: Path, small: Path) -> None:
    run = hand.new(small / "run")
    assert os.system(f"mount -o remount,ro {small}") == 0  # noqa: S605 - a path of our own
    with pytest.raises(StoreFailed, match="Read-only"):
        hand.new(small / "other")
    writer = store.Writer(run)
    for _ in range(2):
        with pytest.raises(StoreFailed, match="Read-only"):
            writer.note(Note("error", "x"))
    with pytest.raises(StoreFailed):
        store.update_info(run, exit_code=0)


def test_a_folder_that_vanishes_is_noticed(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    writer = store.Writer(run)
    hand.add(writer, hand.bits("float32", (9,)), "float32")
    writer.flush()
    shutil.rmtree(run)
    hand.add(writer, hand.bits("float32", (9,), 1), "float32")
    with pytest.raises(StoreFailed, match="deleted"):
        writer.flush()
    writer.close()


def test_a_failure_nobody_was_told_of_is_told_at_close(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    writer = store.Writer(run)
    hand.add(writer, hand.bits("float32", (9,)), "float32")
    shutil.rmtree(run)
    writer._flushed_at = 0.0
    writer._flush_if_old()  # what the flushing thread does
    with pytest.raises(StoreFailed, match="deleted"):
        writer.close()
    writer.close()


def test_adding_after_close(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    writer = store.Writer(run)
    writer.note(Note("x", "y"))
    writer.close()
    with pytest.raises(StoreFailed, match="closed"):
        writer.note(Note("x", "y"))


def test_a_silent_program_is_flushed_by_the_clock(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    writer = store.Writer(run)
    hand.add(writer, hand.bits("float32", (9,)), "float32")
    for _ in range(200):
        if (hand.only_process(run) / "journal.jsonl").stat().st_size:
            break
        threading.Event().wait(0.05)
    assert len(store.open_run(run).records) == 1
    writer.close()


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.mkdir()
    (path / "kept").write_text("old")
    with pytest.raises(OSError):
        disk.write_file(path, b"new")
    assert [*tmp_path.iterdir()] == [path] and (path / "kept").read_text() == "old"


def test_a_linked_folder_of_a_run_is_unlinked_and_what_it_points_to_stays(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    place = hand.only_process(run).rename(elsewhere)
    link = run / f"rank00000-{place.name}"
    link.symlink_to(elsewhere)
    kept = sorted(p.name for p in elsewhere.iterdir())
    store.create(run, RunInfo(), force=True)
    assert not link.is_symlink()
    assert sorted(p.name for p in elsewhere.iterdir()) == kept


def test_a_process_of_another_host_writes_if_it_wrote_within_a_minute(tmp_path: Path) -> None:
    there = folder.ProcessInfo(1, 0, "another host", 1)
    journal = tmp_path / folder.JOURNAL
    assert not folder.is_writing(tmp_path, there)
    journal.write_bytes(b"")
    assert folder.is_writing(tmp_path, there)
    os.utime(journal, (time.time() - 120,) * 2)
    assert not folder.is_writing(tmp_path, there)


def test_a_process_whose_start_was_not_kept_writes_if_it_is_there(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    for pid, writes in ((os.getpid(), True), (child, False), (0, False)):
        info = folder.ProcessInfo(1, 0, socket.gethostname(), pid)
        assert folder.is_writing(tmp_path, info) is writes


def test_no_thread_outlives_the_writer(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    writer = store.Writer(hand.new(tmp_path / "run"))
    hand.add(writer, hand.bits("float32", (9,)), "float32")
    (flushing,) = set(threading.enumerate()) - before
    writer.close()
    flushing.join(10.0)
    assert not flushing.is_alive()


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_a_shard_that_was_cut_off_in_its_header_is_told(tmp_path: Path, size: int) -> None:
    path = tmp_path / "0.safetensors"
    path.write_bytes(((200).to_bytes(8, "little") + b"{" * 200)[:size])
    says = "wanted a header, the file has" if size < 8 else "wanted a header of 200 bytes"
    with pytest.raises(ElementsMissing, match=says):
        Shard(path).data(0, 0)


def test_many_threads(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:

        def work(first: int) -> None:
            for n in range(200):
                hand.add(writer, np.full(50, first + n, np.int32), "int32")

        threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    opened = store.open_run(run)
    values = {int(opened.array(i)[0]) for i in range(800)}
    assert values == {1000 * k + n for k in range(4) for n in range(200)}
    assert all((opened.array(i) == opened.array(i)[0]).all() for i in range(800))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_disturb_its_parent(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    writer = store.Writer(run)
    hand.add(writer, hand.bits("float32", (9,)), "float32")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            writer.note(Note("child", "x"))
        except StoreFailed as error:
            code = 0 if "forked" in str(error) else 2
        writer.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    hand.add(writer, hand.bits("float32", (9,), 1), "float32")
    writer.close()
    opened = store.open_run(run)
    assert opened.ended == ""
    assert hand.same(opened.array(1), hand.bits("float32", (9,), 1))
    assert opened.notes == ()


# -- reading


@pytest.mark.parametrize("torn", range(1, 60, 7))
def test_a_torn_journal_is_read_up_to_its_last_whole_line(tmp_path: Path, torn: int) -> None:
    run = written(tmp_path / "run")
    journal = hand.only_process(run) / "journal.jsonl"
    os.truncate(journal, journal.stat().st_size - torn)
    opened = store.open_run(run)
    assert len(opened.records) == 20
    assert len(opened.calls) == 19
    assert "line 40" in opened.ended
    assert hand.same(opened.array(19), hand.bits("float32", (16,), 19))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 50,
        b"\xff\xfe garbage",
        b'{"t":"record","id":3}',
        b'{"t":"record"',
        b"[]",
        b"",
        b'{"t":5}',
        b"[" * 99999,
    ],
)
def test_garbage_in_the_middle_stops_there_and_says_so(tmp_path: Path, garbage: bytes) -> None:
    run = written(tmp_path / "run")
    journal = hand.only_process(run) / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([*lines[:10], garbage, *lines[11:]]))
    opened = store.open_run(run)
    assert len(opened.records) == len(opened.calls) == 5
    assert "line 11" in opened.ended
    assert "not read" in opened.ended
    assert hand.same(opened.array(4), hand.bits("float32", (16,), 4))


@pytest.mark.parametrize(
    "change",
    [
        (b'"id":7', b'"id":8'),
        (b'"shape":[16]', b'"shape":[-16]'),
        (b'"offset":', b'"offset":-'),
        (b'"nbytes":64', b'"nbytes":9223372036854775807'),
        (b'"shard":0', b'"shard":99999999999'),
    ],
)
def test_lines_that_cannot_be_true_are_damage(tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    run = written(tmp_path / "run")
    journal = hand.only_process(run) / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    assert change[0] in lines[14]
    lines[14] = lines[14].replace(*change)
    journal.write_bytes(b"\n".join(lines))
    (hand.only_process(run) / "index.safetensors").unlink()
    opened = store.open_run(run)
    assert len(opened.records) == 7
    assert "line 15" in opened.ended


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            '"dtype":"float32","shape":[4,3],"elements":{"in":"increment","base":0,"axis":0,"shard":0,"offset":0,"nbytes":16}',
            "not one",
        ),
        (
            '"dtype":"float32","shape":[2],"elements":{"in":"increment","base":0,"axis":0,"shard":0,"offset":0,"nbytes":8}',
            "do not make",
        ),
        (
            '"dtype":"int8","shape":[32],"elements":{"in":"increment","base":0,"axis":0,"shard":0,"offset":0,"nbytes":0}',
            "do not make",
        ),
        (
            '"dtype":"float32","shape":[1000000000000],"elements":{"in":"kept","shard":0,"offset":0,"nbytes":4000000000000}',
            "wanted bytes",
        ),
        (
            '"dtype":"float32","shape":[7],"elements":{"in":"kept","shard":0,"offset":0,"nbytes":16}',
            "28 bytes, 16 are stored",
        ),
        (
            '"dtype":"float32","shape":[4],"elements":{"in":"kept","shard":5,"offset":0,"nbytes":16}',
            "cannot read",
        ),
        (
            '"dtype":"float3","shape":[4],"elements":{"in":"kept","shard":0,"offset":0,"nbytes":16}',
            "dtype 'float3'",
        ),
        (
            '"dtype":"int8","shape":[4],"elements":{"in":"external","file":"/dev/zero","offset":0,"nbytes":4}',
            "not a regular file",
        ),
        (
            '"dtype":"int8","shape":[4],"elements":{"in":"external","file":"/etc/passwd","offset":0,"nbytes":4}',
            "no hash",
        ),
    ],
)
def test_a_hostile_record_is_only_missing(tmp_path: Path, record: str, text: str) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        hand.add(writer, hand.bits("float32", (2, 4)), "float32")
    with (hand.only_process(run) / "journal.jsonl").open("a") as journal:
        journal.write(f'{{"t":"record","id":1,{record}}}\n')
    opened = store.open_run(run)
    assert len(opened.records) == 2
    with pytest.raises(ElementsMissing, match=text):
        opened.array(1)
    assert hand.same(opened.array(0), hand.bits("float32", (2, 4)))
    store.recover(run)
    with safe_open(hand.shards(run)[0], "numpy") as official:
        assert hand.same(official.get_tensor("record.0"), hand.bits("float32", (2, 4)))
    store.scrub(run, info=False, names=None)


def test_unknown_fields_and_kinds_of_lines_are_ignored(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    journal = hand.only_process(run) / "journal.jsonl"
    text = journal.read_bytes().replace(b'"dtype"', b'"invented":{"a":[1]},"dtype"')
    journal.write_bytes(b'{"t":"begin","id":1}\n' + text)
    process = hand.only_process(run) / "process.json"
    process.write_text(process.read_text().replace('"rank"', '"invented": 1, "rank"'))
    opened = store.open_run(run)
    assert opened.ended == ""
    assert len(opened.records) == len(opened.calls) == 20


def test_a_truncated_shard_loses_only_what_lay_behind(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (shard,) = hand.shards(run)
    os.truncate(shard, (16 << 10) + 640)
    opened = store.open_run(run)
    assert all(hand.same(opened.array(i), hand.bits("float32", (16,), i)) for i in range(10))
    with pytest.raises(
        ElementsMissing, match=r"shard-00000.*wanted bytes 17024 to 17088, the file has 17024"
    ):
        opened.array(10)
    with pytest.raises(ElementsMissing):
        opened.raw(10)
    os.truncate(shard, 5)
    with pytest.raises(ElementsMissing, match="5 bytes"):
        store.open_run(run).array(0)
    shard.unlink()
    with pytest.raises(ElementsMissing, match="cannot read"):
        store.open_run(run).array(0)


def test_a_damaged_shard_is_a_note_that_counts_what_is_lost(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (shard,) = hand.shards(run)
    assert store.open_run(run).notes == ()
    os.truncate(shard, (16 << 10) + 640)
    (note,) = store.open_run(run).notes
    assert note.kind == "error"
    assert note.text.startswith("elements of 10 of 20 tensors cannot be read: ")
    assert "the file has 17024; it was cut off" in note.text
    os.truncate(shard, 5)
    (note,) = store.open_run(run).notes
    assert note.text.startswith("elements of 20 of 20 tensors cannot be read: ")
    shard.unlink()
    (note,) = store.open_run(run).notes
    assert note.text.endswith("shard-00000.safetensors: No such file or directory")


@pytest.mark.parametrize("file", ["run.json", "process.json"])
def test_an_unknown_version_names_both_and_what_to_do(tmp_path: Path, file: str) -> None:
    run = written(tmp_path / "run")
    (path,) = [*run.glob(file), *run.glob(f"rank*/{file}")]
    path.write_text(path.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(UnknownVersion, match=r"format 7.*format 1.*a newer whence"):
        store.open_run(run)


def test_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRun, match="does not exist"):
        store.open_run(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UnreadableRun, match="it is a file"):
        store.open_run(tmp_path / "file")
    with pytest.raises(UnreadableRun, match=r"no run.json \(found: file\)"):
        store.open_run(tmp_path)
    for text in (
        "",
        "[]",
        "{",
        '{"kind": "whence"}',
        '{"kind": "x", "format": 1}',
        '{"kind": "whence", "format": 1, "seed": "x"}',
    ):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UnreadableRun):
            store.open_run(tmp_path)


def test_an_empty_run_says_what_was_found(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with pytest.raises(UnreadableRun, match="0 process folder"):
        store.open_run(run)
    with store.Writer(run) as writer:
        writer.note(Note("error", "no module was called"))
    with pytest.raises(UnreadableRun, match="no module was called"):
        store.open_run(run)


def test_opening_never_writes(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (hand.only_process(run) / "index.safetensors").unlink()
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.rglob("*") if p.is_file()}
    opened = store.open_run(run)
    opened.array(3)
    list(opened.calls)
    assert before == {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.rglob("*") if p.is_file()
    }


def test_a_broken_index_is_not_used(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    index = hand.only_process(run) / "index.safetensors"
    good = index.read_bytes()
    random = np.random.default_rng(0)
    for trial in range(300):
        broken = bytearray(good)
        if trial % 3 == 0:
            del broken[int(random.integers(len(good))) :]
        else:
            for place in random.integers(0, len(good), 1 + trial % 5):
                broken[place] = int(random.integers(256))
        index.write_bytes(bytes(broken))
        opened = store.open_run(run)
        for i in range(len(opened.records)):  # whatever it says: no crash, and only our errors
            with contextlib.suppress(ElementsMissing, UnreadableRun):
                opened.array(i)
                opened.records[i]
        for i in range(len(opened.calls)):
            with contextlib.suppress(UnreadableRun):
                opened.calls[i]
    index.write_bytes(b"")
    assert len(store.open_run(run).records) == 20


def test_a_wrong_shard_number_in_an_index_costs_a_note(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (process,) = store.open_run(run).readers
    columns = process.index.columns
    shards = columns["shard"].copy()
    shards[np.flatnonzero(columns["elements"] == KEPT)[0]] = 2**31 - 2
    columns["shard"] = shards
    process.shard_count = int(shards.max()) + 1  # a number for each would take 16 GiB
    other, note = notes_of(process)
    assert note.text.startswith("elements of 1 of ")
    assert "another journal" in other.text


def test_a_hundred_thousand_records_open_without_making_them(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    count = 100_000
    with store.Writer(run) as writer:
        for n in range(count):
            writer.record(
                "float32",
                (n % 5, 3),
                None,
                n.to_bytes(16, "big"),
                hand.STATISTICS,
                None,
                why="statistics only",
            )
            if n % 2:
                writer.call(
                    hand.call(
                        n // 2, Ref("input.0", n - 1), Ref("output.0", n), scope=f"layers.{n % 100}"
                    )
                )
    opened = store.open_run(run)
    assert (len(opened.records), len(opened.calls)) == (count, count // 2)
    assert opened.records[77_777].hash == (77_777).to_bytes(16, "big").hex()
    assert opened.calls[12_345].refs[1].record == 24_691
    assert opened.column("count").sum() == 3 * sum(n % 5 for n in range(count))
    (hand.only_process(run) / "index.safetensors").unlink()
    again = store.open_run(run)
    for name in ("hash", "scope", "ref_record", "statistics", "parent"):
        assert np.array_equal(
            again.column(name), opened.column(name), equal_nan=name == "statistics"
        )


def test_open_while_writing(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        opened = None
        for n in range(30):
            hand.add(writer, hand.bits("float32", (40,), n), "float32")
            writer.call(hand.call(n, Ref("output.0", n), scope=f"layers.{n}"))
            writer.flush()
            opened = store.open_run(run)
            assert len(opened.records) == n + 1
            assert "still being written" in opened.ended
            assert f"layers.{n}" in opened.ended
            assert hand.same(opened.array(n), hand.bits("float32", (40,), n))
    assert opened is not None
    assert hand.same(opened.array(3), hand.bits("float32", (40,), 3))
    assert store.open_run(run).ended == ""


def test_what_a_process_left_that_was_killed_as_it_began_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json.123-4.tmp").write_text("{")
    assert store.is_run(store.create(tmp_path / "run", RunInfo()))
