from __future__ import annotations

import itertools
import pickle
import struct
from pathlib import Path
from typing import Any

import by_hand_store as hand
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from whence import store
from whence.dtypes import DTYPES
from whence.errors import ElementsMissing
from whence.records import External, Increment, Kept, Note, Operation, Program, Ref, Step
from whence.store import process_reader
from whence.store.process_reader import ProcessReader

DRAWN = st.tuples(
    st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=4), st.integers(0, 99)
)
SHAPES = [(), (0,), (7,), (3, 5), (2, 0, 3), (1, 1, 1, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bitwise(tmp_path: Path, dtype: str) -> None:
    run = hand.new(tmp_path / "run")
    arrays = [hand.bits(dtype, shape, seed) for seed, shape in enumerate(SHAPES)]
    with store.Writer(run) as writer:
        ids = [hand.add(writer, array, dtype) for array in arrays]
        writer.flush()
        opened = store.open_run(run)
        assert all(hand.same(opened.array(i), array) for i, array in zip(ids, arrays, strict=True))
    opened = store.open_run(run)
    assert opened.ended == ""
    for i, array in zip(ids, arrays, strict=True):
        found = opened.array(i)
        assert hand.same(found, array)
        assert not found.flags.writeable
        assert opened.records[i].shape == array.shape
        assert opened.records[i].dtype == dtype


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    payloads = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x7F800000, 0xFF800000, 0x00000001]
    array = np.frombuffer(struct.pack("<7I", *payloads), np.float32)
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        hand.add(writer, array, "float32")
    assert store.open_run(run).array(0).view(np.uint32).tolist() == payloads


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(DTYPES)),
            st.lists(st.integers(0, 9), max_size=4),
            st.integers(0, 99),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_law_the_store_returns_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, list[int], int]]
) -> None:
    run = hand.new(tmp_path_factory.mktemp("law") / "run")
    arrays = [hand.bits(dtype, tuple(shape), seed) for dtype, shape, seed in drawn]
    with store.Writer(run, max_shard_bytes=2048) as writer:
        for (dtype, _, _), array in zip(drawn, arrays, strict=True):
            hand.add(writer, array, dtype)
    opened = store.open_run(run)
    assert len(opened.records) == len(arrays)
    assert all(hand.same(opened.array(i), array) for i, array in enumerate(arrays))
    for shard in hand.shards(run):
        with safe_open(shard, "numpy") as official:
            assert list(official.keys())


def test_shards_rotate_by_size_and_a_large_tensor_gets_its_own(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    arrays = [hand.bits("float32", (n,), n) for n in (200, 200, 100_000, 10, 300_000, 5)]
    with store.Writer(run, max_shard_bytes=100_000, header_bytes=16 << 10) as writer:
        for array in arrays:
            hand.add(writer, array, "float32")
    opened = store.open_run(run)
    assert all(hand.same(opened.array(i), array) for i, array in enumerate(arrays))
    assert [r.elements.shard for r in opened.records if isinstance(r.elements, Kept)] == [
        0,
        0,
        1,
        2,
        3,
        4,
    ]
    for record, array in enumerate(arrays):
        file, offset, nbytes = opened.location(record) or ("", 0, 0)
        assert Path(file).read_bytes()[offset : offset + nbytes] == array.tobytes()
        assert offset % 64 == 0


def test_shards_rotate_when_the_header_is_nearly_full(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    arrays = [hand.bits("int16", (1, 1, 1, 3), seed) for seed in range(500)]
    with store.Writer(run, header_bytes=16 << 10) as writer:
        for array in arrays:
            hand.add(writer, array, "int16", digest=False)
    assert len(hand.shards(run)) > 1
    named = 0
    for shard in hand.shards(run):
        with safe_open(shard, "numpy") as official:
            names = [n for n in official.keys() if n.startswith("record.")]  # noqa: SIM118
            named += len(names)
            assert all(
                hand.same(official.get_tensor(n), arrays[int(n.split(".")[1])]) for n in names
            )
    assert named == 500


def test_official_reader_on_closed_shards(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    arrays = {
        d: hand.bits(d, (3, 2), 1)
        for d in ("float32", "float16", "int64", "uint8", "bool", "complex128")
    }
    with store.Writer(run) as writer:
        for dtype, array in arrays.items():
            hand.add(writer, array, dtype)
        writer.flush()
        with pytest.raises(SafetensorError):
            safe_open(hand.shards(run)[0], "numpy")
    with safe_open(hand.shards(run)[0], "numpy") as official:
        for number, (dtype, array) in enumerate(arrays.items()):
            found = official.get_tensor(f"record.{number}")
            assert found.tobytes() == array.tobytes()
            assert found.shape == ((3, 2, 2) if dtype == "complex128" else (3, 2))


def test_equal_elements_are_stored_once(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    array = hand.bits("float32", (4, 6))
    with store.Writer(run) as writer:
        for same in (array, array, array.reshape(24)):
            hand.add(writer, same, "float32")
        hand.add(writer, array, "float32", digest=False)
        assert writer.nbytes == 2 * array.nbytes
    opened = store.open_run(run)
    places = [r.elements for r in opened.records]
    assert places[0] == places[1] == places[2] != places[3]
    assert all(hand.same(opened.array(i), array) for i in (0, 1, 3))
    assert opened.array(2).shape == (24,)


def test_the_table_of_digests_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.store.writer.REMEMBERED", 8)
    run = hand.new(tmp_path / "run")
    arrays = [hand.bits("float32", (3,), seed) for seed in range(40)]
    with store.Writer(run) as writer:
        for array in arrays:
            hand.add(writer, array, "float32")
            assert len(writer._stored._recent) + len(writer._stored._older) <= 8
        hand.add(writer, arrays[-1], "float32")
        assert writer.nbytes == 40 * 12
    opened = store.open_run(run)
    assert all(hand.same(opened.array(i), array) for i, array in enumerate([*arrays, arrays[-1]]))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_increments_are_put_together(tmp_path: Path, axis: int) -> None:
    run = hand.new(tmp_path / "run")
    whole = hand.bits("bfloat16", (9, 9, 9))
    with store.Writer(run) as writer:
        grown = [whole[tuple(slice(n if a == axis else 9) for a in range(3))] for n in range(4, 10)]
        last = hand.add(writer, grown[0], "bfloat16")
        for before, now in itertools.pairwise(grown):
            added = now[
                tuple(slice(before.shape[axis] if a == axis else 0, None) for a in range(3))
            ]
            last = writer.record(
                "bfloat16", now.shape, hand.raw(added), b"", None, None, base=(last, axis)
            )
        assert writer.nbytes == whole.nbytes
    opened = store.open_run(run)
    assert all(hand.same(opened.array(i), array) for i, array in enumerate(grown))
    assert isinstance(opened.records[3].elements, Increment)
    assert opened.raw(0) is not None
    assert opened.raw(3) is None
    with safe_open(hand.shards(run)[0], "numpy") as official:
        assert "record.3.increment" in official.keys()  # noqa: SIM118


def test_ten_thousand_increments_need_no_recursion(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        last = writer.record(
            "int32", (1, 2), hand.raw(np.array([[0, 0]], np.int32)), b"", None, None
        )
        for n in range(1, 10_000):
            last = writer.record(
                "int32",
                (n + 1, 2),
                hand.raw(np.array([[n, -n]], np.int32)),
                b"",
                None,
                None,
                base=(last, 0),
            )
    found = store.open_run(run).array(last)
    assert found.shape == (10_000, 2)
    assert np.array_equal(found[:, 0], np.arange(10_000))


def test_each_state_of_a_cache_reads_what_it_grew_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 200
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        last = hand.add(writer, np.zeros((1, 4), np.float32), "float32")
        for n in range(1, steps):
            added = hand.raw(np.full((1, 4), n, np.float32))
            last = writer.record("float32", (n + 1, 4), added, b"", None, None, base=(last, 0))
    opened = store.open_run(run)
    reads = 0
    read_bytes = ProcessReader.bytes

    def counted(self: ProcessReader, record: int) -> Any:
        nonlocal reads
        reads += 1
        return read_bytes(self, record)

    monkeypatch.setattr(ProcessReader, "bytes", counted)
    whole = np.repeat(np.arange(steps, dtype=np.float32)[:, None], 4, axis=1)
    for n in range(steps):
        for _ in range(2):
            assert np.array_equal(opened.array(n), whole[: n + 1])
    assert reads <= 3 * steps
    # Too much of it is not kept, and read again.
    monkeypatch.setattr(process_reader, "_GROWN_BYTES", 64)
    opened = store.open_run(run)
    assert all(np.array_equal(opened.array(n), whole[: n + 1]) for n in (199, 3, 100, 199, 0))


def test_reading_a_large_run_keeps_its_bits_when_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hand.new(tmp_path / "run")
    arrays = [hand.bits("float32", (40, 100), seed) for seed in range(8)]
    with store.Writer(run) as writer:
        for array in arrays:
            hand.add(writer, array, "float32")
    forgotten = []
    forget = process_reader.Shard.forget
    monkeypatch.setattr(process_reader, "_MAPPED_BYTES", 3 * arrays[0].nbytes)
    monkeypatch.setattr(
        process_reader.Shard, "forget", lambda shard: (forgotten.append(shard), forget(shard))
    )
    opened = store.open_run(run)
    read = [opened.array(n) for n in range(8)]
    assert len(forgotten) == 2
    assert all(hand.same(a, b) for a, b in zip(read, arrays, strict=True))


def test_an_increment_on_a_record_without_elements_says_so(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        first = writer.record("int32", (1, 2), None, b"", None, None, why="over budget")
        writer.record(
            "int32", (2, 2), hand.raw(np.zeros((1, 2), np.int32)), b"", None, None, base=(first, 0)
        )
    opened = store.open_run(run)
    with pytest.raises(ElementsMissing, match="over budget"):
        opened.array(0)
    with pytest.raises(ElementsMissing, match="record 0"):
        opened.array(1)


def test_contradictions_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        with pytest.raises(ValueError, match="24 bytes, got 20"):
            writer.record("float32", (2, 3), np.zeros(20, np.uint8), b"", None, None)
        with pytest.raises(ValueError, match="contiguous uint8"):
            writer.record("int8", (3,), np.zeros(3, np.int8), b"", None, None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="contiguous uint8"):
            writer.record("int8", (3,), np.zeros(6, np.uint8)[::2], b"", None, None)
        with pytest.raises(ValueError, match="need a digest"):
            writer.record("int8", (3,), None, b"", None, None, external=External("x", 0, 3))
        with pytest.raises(ValueError, match="base record 5"):
            writer.record("int8", (3,), np.zeros(1, np.uint8), b"", None, None, base=(5, 0))
        assert hand.add(writer, hand.bits("int8", (3,)), "int8") == 0
    assert hand.same(store.open_run(run).array(0), hand.bits("int8", (3,)))


def test_calls_programs_notes_and_steps(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    program = Program(
        "p",
        (Operation("aten.add.Tensor", ({"in": 0}, {"const": 0})),),
        ("input.0",),
        (("output.0", {"op": [0, 0]}),),
        (),
        (0,),
    )
    with store.Writer(run) as writer:
        hand.add(writer, hand.bits("float32", (2,)), "float32")
        child = hand.call(
            5, Ref("input.0", 0), Ref("output.0", 0, "identity"), scope="a.b", parent=6
        )
        writer.call(child)
        writer.call(hand.call(6, scope="", step=3))
        writer.program(program)
        writer.note(Note("budget", "too much", "a.b", 3))
        writer.step(Step("Net", 3, 8, kept=True))
    for opened in (store.open_run(run), _without_index(run)):
        assert [c.id for c in opened.calls] == [0, 1]
        assert opened.calls[0].parent == 1
        assert opened.calls[1].parent == -1
        assert opened.calls[0].refs == child.refs
        assert opened.calls[0].slots("output") == (Ref("output.0", 0, "identity"),)
        assert opened.programs == {"p": program}
        assert opened.notes == (Note("budget", "too much", "a.b", 3),)
        assert opened.steps == (Step("Net", 3, 8, kept=True),)
        assert opened.records[-1].statistics == hand.STATISTICS
        assert opened.records[-1].sketch == hand.SKETCH
        assert [r.id for r in opened.records[0:1]] == [0]
        assert opened.column("scope").tolist() == ["a.b", ""]
        assert opened.column("ref_slot").tolist() == ["input.0", "output.0"]
        assert opened.column("ref_call").tolist() == [0, 0]
        with pytest.raises(IndexError):
            opened.records[1]
        with pytest.raises(KeyError, match="no column"):
            opened.column("nonsense")


class Mute:
    def __repr__(self) -> str:
        raise ZeroDivisionError


def test_odd_arguments_are_told_in_words(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    deep: list[object] = []
    for _ in range(3000):
        deep = [deep]
    odd = [
        {"a": object, "b": 2**70, "c": "\ud800", "d": (1, [2.5, None])},
        {"a": slice(1, 2), "b": [1.5, {"c": float("-inf")}]},
        {"a": Mute(), "b": 1},
        {"a": deep, "b": 1, "c": Mute()},
    ]
    with store.Writer(run) as writer:
        for n, arguments in enumerate(odd):
            writer.call(msgspec.structs.replace(hand.call(n), arguments=arguments))
    calls = store.open_run(run).calls
    assert calls[0].arguments["a"] == "<class 'object'>"
    assert calls[1].arguments == {"a": "slice(1, 2, None)", "b": [1.5, {"c": "-inf"}]}
    assert calls[2].arguments == {"a": "<Mute>", "b": 1}
    assert set(calls[3].arguments) == {"a", "b", "c"}


def test_a_run_travels_to_another_process_as_its_path(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run, rank=2) as writer:
        hand.add(writer, hand.bits("float32", (1000,)), "float32")
    sent = pickle.dumps(store.open_run(run, ranks=[2]))
    assert len(sent) < 1000
    arrived = pickle.loads(sent)  # noqa: S301 - our own bytes
    assert hand.same(arrived.array(0), hand.bits("float32", (1000,)))


def test_columns_agree_with_structs(tmp_path: Path) -> None:
    run = hand.new(tmp_path / "run")
    with store.Writer(run) as writer:
        for seed, shape in enumerate(SHAPES):
            hand.add(writer, hand.bits("float32", shape, seed), "float32")
        writer.record("int8", (4,), None, b"", None, None, why="not asked for")
    opened = store.open_run(run)
    assert opened.column("count").tolist() == [r.count for r in opened.records]
    assert opened.column("dtype").tolist() == [r.dtype for r in opened.records]
    hashes = [row.tobytes().hex() for row in opened.column("hash")]
    assert hashes == [r.hash or "0" * 32 for r in opened.records]
    assert opened.column("elements").tolist() == [1] * len(SHAPES) + [0]
    statistics = opened.column("statistics")
    assert statistics[0].tolist()[:5] == [6, -1.5, 2.0, 0.25, 1.0]
    assert np.isnan(statistics[0, 5])
    assert np.isnan(statistics[-1]).all()


def _without_index(run: Path) -> store.StoredRun:
    (hand.only_process(run) / "index.safetensors").unlink()
    return store.open_run(run)
