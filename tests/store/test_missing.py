"""A run on disk says whether it is whole: its journals, its shards, its processes."""

import errno
import json
import shutil
from unittest import mock

import by_hand_store as hand
import msgspec
import pytest

import whence
from whence import disk, store
from whence.errors import ElementsMissing
from whence.records import Lack, Note, Ref, RunInfo, missing_of
from whence.records.marks import STOPPED
from whence.records.places import WRITTEN
from whence.results import Status
from whence.store.folder import PROCESS, update_info


def written(path, seed=0, count=6, close=True):
    run = hand.new(path)
    writer = store.Writer(run)
    for n in range(count):
        hand.add(writer, hand.bits("float32", (8,), seed + n), "float32")
        writer.call(hand.call(n, Ref("output.0", n), scope=f"layers.{n}"))
    if close:
        writer.close()
    else:
        writer.flush()
    return run


def kinds(run):
    return {missing.kind for missing in missing_of(store.open_run(run))}


def test_a_run_that_ended_is_whole(tmp_path):
    assert kinds(written(tmp_path / "run")) == set()


@pytest.mark.parametrize("with_index", [True, False])
def test_every_line_of_a_journal_is_needed(tmp_path, with_index):
    run = written(tmp_path / "run")
    folder = hand.only_process(run)
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    if not with_index:
        (folder / "index.safetensors").unlink()
    for place in range(len(lines)):
        journal.write_bytes(b"".join(lines[:place] + lines[place + 1 :]))
        if place:
            assert kinds(run), place
        journal.write_bytes(b"".join(lines[:place]) + lines[place].replace(b'"', b"'", 1))
        if place:
            assert kinds(run), place
        changed = lines[place].replace(b'"order":', b'"order": ').replace(b'"min":-', b'"min":')
        if changed != lines[place]:
            journal.write_bytes(b"".join([*lines[:place], changed, *lines[place + 1 :]]))
            assert kinds(run), place
    journal.write_bytes(b"".join(lines))
    assert kinds(run) == set()


@pytest.mark.parametrize("name", ["status.json", "shard-00000.safetensors", "journal.jsonl"])
@pytest.mark.parametrize("how", ["empty", "cut", "remove"])
def test_every_file_is_needed(tmp_path, name, how):
    run = written(tmp_path / "run")
    shutil.copytree(hand.only_process(written(tmp_path / "two")), run / "rank00001-other-1")
    file = next(run.glob(f"rank00000*/{name}"))
    data = file.read_bytes()
    if how == "remove":
        file.unlink()
    else:
        file.write_bytes(b"" if how == "empty" else data[: len(data) * 3 // 4])
    if (name, how) != ("status.json", "cut"):  # padding alone
        assert kinds(run)


@pytest.mark.parametrize("names", [("shard-*",), ("journal*", "index*"), ("journal*",)])
def test_files_of_another_run_are_known(tmp_path, names):
    """As many lines, as many bytes, other numbers."""
    run, other = written(tmp_path / "run"), written(tmp_path / "other", seed=100)
    for pattern in names:
        for file in hand.only_process(other).glob(pattern):
            shutil.copy(file, hand.only_process(run) / file.name)
    assert Lack.FOREIGN in kinds(run)


def test_elements_are_compared_with_their_hash_as_they_are_read(tmp_path):
    run = written(tmp_path / "run")
    (shard,) = hand.shards(run)
    opened = store.open_run(run)
    _, start, _ = opened.location(3)
    data = bytearray(shard.read_bytes())
    data[start] ^= 1
    shard.write_bytes(data)
    opened = store.open_run(run)
    assert not opened.missing
    for read in (opened.array, opened.raw):
        with pytest.raises(ElementsMissing, match="hash differs"):
            read(3)
    opened.array(2)
    (missing,) = opened.missing
    assert (missing.kind, missing.where.endswith(shard.name)) == (Lack.FOREIGN, True)


def test_a_killed_and_a_running_process_are_told_apart(tmp_path):
    run = written(tmp_path / "run", close=False)
    assert kinds(run) == {Lack.RUNNING}
    process = hand.only_process(run) / PROCESS
    about = json.loads(process.read_bytes()) | {"pid_started": 1}
    process.write_text(json.dumps(about))
    assert kinds(run) == {Lack.CUT}
    store.recover(run)
    assert kinds(run) == {Lack.CUT}


def test_ranks_and_processes_that_are_gone_are_missing(tmp_path):
    run = written(tmp_path / "run")
    update_info(run, settings={WRITTEN: 2})
    assert kinds(run) == {Lack.RANK}
    update_info(run, settings={})
    process = hand.only_process(run) / PROCESS
    process.write_text(json.dumps(json.loads(process.read_bytes()) | {"world_size": 2}))
    assert kinds(run) == {Lack.RANK}
    assert not missing_of(store.open_run(run, ranks=[0]))
    update_info(run, options=msgspec.to_builtins(RunInfo(options={"ranks": [0]}))["options"])
    assert kinds(run) == set()


def test_a_run_without_counts_is_whole_as_it_was(tmp_path):
    run = written(tmp_path / "run")
    status = hand.only_process(run) / "status.json"
    status.write_text('{"ended":"clean","error":""}')
    assert kinds(run) == set()


def test_what_is_taken_out_on_purpose_is_not_missing(tmp_path):
    run = written(tmp_path / "run")
    store.scrub(run, ["layers.1*"], info=False)
    assert kinds(run) == set()
    store.scrub(run, ["layers.2*"])
    assert kinds(run) == set()


def no_disk(writer):
    with mock.patch.object(disk.system, "write", side_effect=OSError(errno.EIO, "gone")):
        writer.close()


def test_a_capture_that_stopped_on_a_good_disk_is_not_whole(tmp_path):
    """For a reason of the program's: what was written ended cleanly."""
    runs = [hand.new(tmp_path / name) for name in "ab"]
    for run in runs:
        with store.Writer(run) as writer:
            hand.add(writer, hand.bits("float32", (8,)), "float32")
            writer.call(hand.call(0, Ref("output.0", 0)))
            writer.note(Note(STOPPED, "out of memory"))
    assert kinds(runs[0]) == {Lack.CUT}
    answer = whence.compare(*runs)
    assert answer.status == Status.UNDECIDED
    assert "out of memory" in answer.headline
