"""Lines of the journal are encoded together, the index is made in parts, large payloads lie on
pages.
"""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import by_hand_store as hand
import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from whence import disk, store
from whence.records import Ref
from whence.store import index_builder, journal, shards
from whence.store import writer as writer_module


def _closing(run: Path, records: int) -> int:
    """Peak memory of Python while a writer of so many records closes."""
    writer = store.Writer(run)
    for n in range(records):
        writer.record(
            "float32", (n % 5, 3), None, n.to_bytes(16, "big"), hand.STATISTICS, None, why="x"
        )
        if n % 2:
            writer.call(hand.call(n // 2, Ref("input.0", n - 1), Ref("output.0", n)))
    tracemalloc.start()
    try:
        writer.close()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_index_is_made_in_memory_that_does_not_grow_with_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_CHUNK", 1 << 16)
    monkeypatch.setattr(index_builder, "_BATCH", 128)
    few, many = (
        _closing(hand.new(tmp_path / str(n)), n) - 40 * n for n in (2_000, 16_000)
    )  # 40 bytes of a call: its id and its parent
    assert many < 1.5 * few


def test_a_text_that_is_no_unicode_is_written_with_escapes(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        for n, scope in enumerate(("a", "b\udcff", "c")):
            hand.add(writer, hand.bits("float32", (4,), n), "float32")
            writer.call(hand.call(n, Ref("output.0", n), scope=scope))
    opened = store.open_run(run)
    assert [call.scope for call in opened.calls] == ["a", "b\\udcff", "c"]
    assert opened.ended == ""


def test_what_an_argument_is_later_does_not_show(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    given = [1, 2]
    with store.Writer(run) as writer:
        writer.call(msgspec.structs.replace(hand.call(0), arguments={"sizes": given}))
        given.append(3)
    assert store.open_run(run).calls[0].arguments == {"sizes": [1, 2]}


def test_large_payloads_cost_one_write_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hand.new(tmp_path / "run")
    arrays = [hand.bits("float32", (40_000 + n,), n) for n in range(20)]
    writes = []
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, offset: writes.append(offset) or real(fd, data, offset)
    )
    with store.Writer(run) as writer:
        hand.add(writer, arrays[0], "float32")
        before = len(writes)
        for array in arrays[1:]:
            hand.add(writer, array, "float32")
        assert len(writes) - before == len(arrays) - 1
    assert all(offset % shards.PAGE == 0 for offset in writes[before : before + len(arrays) - 1])
    opened = store.open_run(run)
    with safe_open(hand.shards(run)[0], "numpy") as official:
        for n, array in enumerate(arrays):
            assert hand.same(opened.array(n), array)
            assert hand.same(official.get_tensor(f"record.{n}"), array)


def test_room_that_is_not_given_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(disk.System, "reserve", lambda *place: asked.append(place))
    run = hand.new(tmp_path / "run")
    array = np.arange(100_000, dtype=np.float32)
    with store.Writer(run) as writer:
        hand.add(writer, array, "float32")
    assert len(asked) == 2  # of the journal and the shard
    assert hand.same(store.open_run(run).array(0), array)


def test_a_finished_shard_keeps_no_room(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        hand.add(writer, hand.bits("float32", (100_000,)), "float32")
    status = hand.shards(run)[0].stat()
    assert status.st_blocks * 512 < status.st_size + shards.ROOM_BYTES // 2


def test_lines_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, batches = hand.new(tmp_path / "run"), []
    real = writer_module.encoded
    monkeypatch.setattr(
        writer_module, "encoded", lambda lines: batches.append(len(lines)) or real(lines)
    )
    with store.Writer(run) as writer:
        for _ in range(1000):
            writer.record("float32", (3,), None, b"", None, None, why="x")
    assert sum(batches) == 1000
    assert len(batches) <= 1000 // writer_module.TOGETHER + 8
