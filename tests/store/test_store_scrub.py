from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path

import by_hand_store as hand
import msgspec
import pytest
from safetensors import safe_open

from whence import store
from whence.errors import ElementsMissing, StoreFailed, UsageError
from whence.records import Operation, Program, Ref


def written(path: Path) -> Path:
    """Four layers; layer 2's output equals layer 0's; a cache that grows in layer 3; a program
    constant in layer 1.
    """
    run = hand.new(path)
    cache = hand.bits("float32", (6,), 50)
    with store.Writer(run) as writer:
        for n in range(4):
            hand.add(writer, hand.bits("float32", (500,), 0 if n == 2 else n), "float32")
        grown = hand.add(writer, cache[:4], "float32")
        writer.record("float32", (6,), hand.raw(cache[4:]), b"", None, None, base=(grown, 0))
        hand.add(writer, hand.bits("float32", (5,), 60), "float32")
        for n in range(4):
            refs = [Ref("output.0", n)]
            if n == 3:
                refs += [Ref("input.cache", 4), Ref("mutated.0", 5)]
            writer.call(hand.call(n, *refs, scope=f"layers.{n}"))
        writer.call(msgspec.structs.replace(hand.call(4, scope="layers.1.act"), program="p"))
        writer.program(Program("p", (Operation("x", ({"const": 0},)),), (), (), (), (6,)))
    return run


def readable(run: Path) -> list[int]:
    opened = store.open_run(run)
    found = []
    for i in range(len(opened.records)):
        try:
            opened.array(i)
            found.append(i)
        except ElementsMissing as error:
            assert str(error) == "scrubbed"
    return found


def test_everything_goes_figures_stay(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    secret = hand.bits("float32", (500,), 1).tobytes()
    before = store.open_run(run)
    kept = [(r.hash, r.statistics, r.shape) for r in before.records], list(before.calls)
    done = store.scrub(run)
    assert done.records == 7
    assert done.nbytes > 6000
    assert readable(run) == []
    assert not any(secret in p.read_bytes() for p in run.rglob("*") if p.is_file())
    after = store.open_run(run)
    assert after.ended == ""
    assert ([(r.hash, r.statistics, r.shape) for r in after.records], list(after.calls)) == kept
    info = json.loads((run / "run.json").read_text())
    assert (info["command"], info["environment"], info["scrubbed"], info["seed"]) == (
        [],
        {},
        True,
        7,
    )
    assert store.scrub(run).records == 0


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["layers.1"], [0, 2, 3, 4, 5, 6]),
        (["layers.0"], [1, 3, 4, 5, 6]),  # record 2 is stored as the same bytes
        (["input.*"], [0, 1, 2, 3, 6]),  # record 5 continues record 4
        (["mutated.0"], [0, 1, 2, 3, 4, 6]),
        (["layers.3.mutated.*", "layers.1.act"], [0, 1, 2, 3, 4]),
        (["*"], []),
    ],
)
def test_by_name(tmp_path: Path, names: list[str], left: list[int]) -> None:
    run = written(tmp_path / "run")
    before = store.open_run(run)
    arrays = [before.array(i).copy() for i in range(7)]
    store.scrub(run, names)
    assert readable(run) == left
    after = store.open_run(run)
    assert after.ended == ""
    assert all(hand.same(after.array(i), arrays[i]) for i in left)
    for gone in set(range(5)) - set(left):
        assert not any(arrays[gone].tobytes() in p.read_bytes() for p in hand.shards(run))
    for shard in hand.shards(run):
        with safe_open(shard, "numpy") as official:
            assert list(official.keys())
    assert len(list(hand.only_process(run).iterdir())) == 4 + len(hand.shards(run))


def test_a_pattern_that_matches_nothing(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    with pytest.raises(UsageError, match="nothing was scrubbed"):
        store.scrub(run, ["layer.7"])
    assert len(readable(run)) == 7
    assert store.open_run(run).info.command


def test_an_interrupted_scrub_leaves_the_run_whole_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "run")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("whence.store.scrubbing"), "_replace_journal", crash)
        with pytest.raises(KeyboardInterrupt):
            store.scrub(run, ["layers.1"])
    assert len(readable(run)) == 7
    store.scrub(run, ["layers.1"])
    assert readable(run) == [0, 2, 3, 4, 5, 6]
    assert len(hand.shards(run)) == 1


@pytest.mark.parametrize("name", ["unlink", "replace"])
@pytest.mark.parametrize("moment", range(1, 4))
def test_a_scrub_that_fails_anywhere_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, moment: int
) -> None:
    run = written(tmp_path / "run")
    real, count = getattr(Path, name), 0

    def failing(self: Path, *args: object, **more: object) -> object:
        nonlocal count
        count += 1
        if count == moment:
            raise OSError(5, "Input/output error")
        return real(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, name, failing)
        with contextlib.suppress(StoreFailed):
            store.scrub(run, ["layers.1"])
    assert readable(run) in ([0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6])
    store.scrub(run, ["layers.1"])
    assert readable(run) == [0, 2, 3, 4, 5, 6]
    secret = hand.bits("float32", (500,), 1).tobytes()
    assert not any(secret in p.read_bytes() for p in run.rglob("*") if p.is_file())


def test_a_killed_run_is_recovered_first(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    folder = hand.only_process(run)
    (folder / "index.safetensors").unlink()
    (folder / "status.json").write_text('{"ended": "running", "error": ""}')
    process = json.loads((folder / "process.json").read_text())
    (folder / "process.json").write_text(json.dumps({**process, "pid_started": 1}))
    store.scrub(run)
    assert readable(run) == []
    assert "uncleanly" in store.open_run(run).ended


def test_an_index_of_another_journal_does_not_guide_a_scrub(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run, header_bytes=16 << 10) as writer:
        for n in range(6):
            hand.add(writer, hand.bits("float32", (16,), n), "float32")
            writer.call(hand.call(n, Ref("output.0", n), scope=f"layers.{n}"))
    journal = hand.only_process(run) / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    lines[4] = lines[4].replace(
        b'"dtype"', b'"dtypo"'
    )  # of the same length: the index still counts
    journal.write_bytes(b"\n".join(lines))
    store.scrub(run, force=True)
    opened = store.open_run(run)
    assert len(opened.records) == 2 and {r.why for r in opened.records} == {"scrubbed"}
