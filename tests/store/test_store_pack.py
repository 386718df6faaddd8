"""A packed run is the run: every file, bit by bit; and damage of it is told, never read."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from by_hand_store import add, bits, call, new, same
from safetensors.numpy import load_file

import whence
from inside import whence as run_whence
from whence import api, store
from whence.dtypes import DTYPES
from whence.errors import ElementsMissing, OutputExists, UnreadableRun, UsageError
from whence.records import Note, Ref
from whence.store import delta
from whence.store.columns import save, whole_column
from whence.store.packed_shard import PackedShard, _load

pytest.importorskip("numcodecs")


def noisy(array, seed):
    """The same floats, a few units in the last place away, a third of them equal."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-2, 3, array.shape) * (rng.random(array.shape) > 1 / 3)
    whole = array.view(f"i{array.dtype.itemsize}")
    return (whole + steps.astype(whole.dtype)).view(array.dtype)


def written(path, *, seed=None, steps=4, shard_bytes=1 << 20):
    """A run with a weight, a tensor of noise in each step, a cache that grows, and odd types."""
    rng = np.random.default_rng(0)
    with store.Writer(new(path), max_shard_bytes=shard_bytes) as writer:
        weight = add(writer, rng.standard_normal((64, 64)).astype(np.float32), "float32")
        cache, whole = None, np.empty((0, 8), np.float32)
        for step in range(steps):
            x = rng.standard_normal((300, 200)).astype(np.float32)
            grown = rng.standard_normal((2, 8)).astype(np.float32)
            y = noisy(x, seed + step) if seed is not None else x
            new_rows = noisy(grown, seed + step) if seed is not None else grown
            record = add(writer, y, "float32")
            whole = np.concatenate([whole, new_rows])
            base = None if cache is None else (cache, 0)
            data = whole if cache is None else new_rows
            raw = np.frombuffer(data.tobytes(), np.uint8)
            cache = writer.record("float32", whole.shape, raw, b"", None, None, base=base)
            refs = (Ref("param.weight", weight), Ref("output.0", record), Ref("output.1", cache))
            writer.call(call(step, *refs, scope="layers.0", step=step))
        for number, name in enumerate(DTYPES):
            record = add(writer, bits(name, (37, 3), number), name)
            empty = add(writer, bits(name, (0, 3)), name)
            refs = (Ref("output.0", record), Ref("output.1", empty))
            writer.call(call(steps + number, *refs, scope=name))
        writer.note(Note("error", "something"))
    return path


@pytest.fixture
def pair(tmp_path):
    return written(tmp_path / "ref"), written(tmp_path / "tgt", seed=10)


def files(run):
    """Every file below a folder, by name."""
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.is_file()
    }


def equal_runs(one, other):
    """Everything that a reader hands out."""
    one, other = store.open_run(one), store.open_run(other)
    assert list(one.records) == list(other.records)
    assert list(one.calls) == list(other.calls)
    assert one.programs == other.programs
    assert list(one.notes) == list(other.notes)
    assert len(one.records) > 20
    for record in one.records:
        assert same(one.array(record.id), other.array(record.id)), record


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 100, 300_000])
def test_steps_come_back_for_every_bit_pattern(width, count):
    rng = np.random.default_rng(count)
    ends = np.array([0, 255], np.uint8)
    data, base = (
        np.concatenate([np.repeat(ends, width), rng.integers(0, 256, count * width, np.uint8)])
        for _ in range(2)
    )
    steps = delta._steps(data.view(f"u{width}"), base.view(f"u{width}"))
    assert delta.add_steps(steps.view(np.uint8), base, width).tobytes() == data.tobytes()


def test_a_step_is_a_unit_in_the_last_place():
    values = np.array([1.0, -1.0, -0.0, 3e-45], np.float32)
    after = np.nextafter(values, np.float32(np.inf))
    steps = delta._steps(after.view(np.uint32), values.view(np.uint32))
    # -0.0 and 0.0 are two numbers here
    assert steps.tolist() == [2, 2, 4, 2]


def test_a_packed_run_is_small_and_comes_back_byte_by_byte(pair, tmp_path):
    reference, target = pair
    result = api.pack(target, tmp_path / "small", against=reference)
    assert result.nbytes > 4 * result.packed_nbytes
    equal_runs(target, tmp_path / "small")
    api.unpack(tmp_path / "small", tmp_path / "again")
    assert files(tmp_path / "again") == files(target)
    equal_runs(target, tmp_path / "again")


def test_a_run_is_packed_without_a_reference(pair, tmp_path):
    _, target = pair
    api.pack(target, tmp_path / "small")
    equal_runs(target, tmp_path / "small")
    api.unpack(tmp_path / "small", tmp_path / "again")
    assert files(tmp_path / "again") == files(target)


def test_a_killed_run_is_packed_as_it_is(pair, tmp_path):
    reference, target = pair
    (folder,) = target.glob("rank*")
    (folder / "index.safetensors").unlink()
    last = max(folder.glob("shard-*"))
    with last.open("ab") as file:
        file.write(bytes(range(256)) * 40)  # of a record that was interrupted
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"t":"rec')
    api.pack(target, tmp_path / "small", against=reference)
    equal_runs(target, tmp_path / "small")
    api.unpack(tmp_path / "small", tmp_path / "again")
    assert files(tmp_path / "again") == files(target)


def test_what_does_not_pay_is_kept_as_it_is(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    other = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8)
    assert delta.encode(noise, 1, other)[0] is delta.Codec.RAW
    assert delta.encode(np.zeros(100_000, np.uint8), 1, other)[0] is delta.Codec.COMPRESSED
    assert delta.encode(noise, 1, noise.copy()) == (delta.Codec.SAME, [])
    near = np.bitwise_xor(noise, 1)
    assert delta.encode(near, 1, noise)[0] is delta.Codec.DELTA


def test_a_packed_run_answers_as_the_run_does(pair, tmp_path):
    reference, target = pair
    api.pack(target, tmp_path / "small", against=reference)
    answers = [whence.compare(str(reference), str(run)) for run in (target, tmp_path / "small")]
    assert answers[0].counts == answers[1].counts
    rows = [[(r.name, r.reference_slot, r.measured) for r in answer.rows] for answer in answers]
    assert rows[0] == rows[1]
    assert any(not row.measured.identical for row in answers[0].rows)


def test_both_runs_can_be_moved_together(pair, tmp_path):
    reference, target = pair
    api.pack(target, tmp_path / "small", against=reference)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("ref", "small"):
        (tmp_path / name).rename(elsewhere / name)
    equal_runs(target, elsewhere / "small")


def test_a_reference_that_is_gone_is_named_and_can_be_found_again(pair, tmp_path):
    reference, target = pair
    small = tmp_path / "small"
    api.pack(target, small, against=reference)
    reference.rename(tmp_path / "hidden")
    run = store.open_run(small)
    with pytest.raises(ElementsMissing, match=f"whence pack {small} --against REF") as caught:
        run.array(1)
    assert str(reference) in str(caught.value)
    (note,) = [note for note in run.notes if "cannot be read" in note.text]
    assert "packed against run" in note.text
    with pytest.raises(UnreadableRun, match="packed against"):
        api.unpack(small, tmp_path / "again")
    api.unpack(small, tmp_path / "again", against=tmp_path / "hidden")
    assert files(tmp_path / "again") == files(target)
    with pytest.raises(UsageError, match="packed"):
        api.pack(small, against=tmp_path / "hidden")
    assert (
        "its reference lies at hidden"
        in run_whence(tmp_path, "pack", small, "--against", "hidden").stdout
    )
    equal_runs(target, small)


def test_another_run_is_no_reference(pair, tmp_path):
    reference, target = pair
    small = tmp_path / "small"
    api.pack(target, small, against=reference)
    other = written(tmp_path / "other", seed=99)
    with pytest.raises(UnreadableRun, match="is not run"):
        api.relocate(small, other)
    with pytest.raises(UnreadableRun, match="is not run"):
        api.unpack(small, tmp_path / "again", against=other)
    shutil.rmtree(reference)
    other.rename(reference)
    with pytest.raises(ElementsMissing, match=r"another one, or was changed|No such file"):
        store.open_run(small).array(1)


def test_a_changed_tensor_of_the_reference_is_noticed(pair, tmp_path):
    reference, target = pair
    small = tmp_path / "small"
    api.pack(target, small, against=reference)
    for shard in reference.glob("rank*/shard-*"):
        data = bytearray(shard.read_bytes())
        for at in range(len(data) // 2, len(data), 1000):
            data[at] ^= 1
        shard.write_bytes(data)
    run = store.open_run(small)
    wrong = 0
    for record in run.records:
        try:
            found = run.array(record.id)
        except ElementsMissing as error:
            assert "the reference was changed" in str(error)
            wrong += 1
        else:
            assert same(found, store.open_run(target).array(record.id))
    assert wrong
    with pytest.raises(UnreadableRun, match="the reference was changed"):
        api.unpack(small, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_refusals(pair, tmp_path):
    reference, target = pair
    small = tmp_path / "small"
    api.pack(target, small, against=reference)
    with pytest.raises(OutputExists):
        api.pack(target, small, against=reference)
    with pytest.raises(UsageError, match="packed"):
        api.pack(small, tmp_path / "smaller")
    with pytest.raises(UsageError, match="packed"):
        api.pack(target, tmp_path / "smaller", against=small)
    with pytest.raises(UsageError, match="itself"):
        api.pack(target, tmp_path / "smaller", against=target)
    with pytest.raises(UsageError, match="packed"):
        api.scrub(str(small))
    with pytest.raises(UsageError, match="whence pack"):
        api.unpack(target, tmp_path / "again")
    assert not list(tmp_path.glob(".*"))


def damaged(small, change):
    """The first packed shard of a run with something of it changed; its columns."""
    (file, *_) = sorted(small.glob("rank*/shard-*.packed"))
    columns = {name: np.array(column) for name, column in _load(file).items()}
    change(columns)
    save(file, {n: whole_column(c) for n, c in columns.items()}, {"format": "1"})
    return file


def _set(name, place, value):
    def change(columns):
        columns[name][place] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("nbytes", 0, 1 << 40),
        _set("offset", 0, 1 << 40),
        _set("offset", 0, -8),
        _set("offset", 1, -(1 << 63)),
        _set("sizes", 0, 1 << 50),
        _set("sizes", 1, 1 << 50),
        _set("codec", 0, 77),
        _set("width", 0, 3),
        _set("width", 0, 0),
        _set("base", slice(None), 1 << 40),
        _set("base", slice(None), -7),
        _set("chunk_at", -1, 1 << 40),
        _set("chunk_at", 1, -5),
        _set("chunks_at", -1, 1 << 40),
        _set("hash", slice(None), 0),
        _set("data", slice(None), 0),
        _set("data", slice(None), 255),
        lambda columns: columns.update(data=columns["data"][:-10]),
        lambda columns: columns.update(chunk_at=np.empty(0, np.int64)),
        lambda columns: columns.update(sizes=columns["sizes"][:1]),
    ],
)
def test_a_hostile_packed_shard_is_only_missing(pair, tmp_path, change, monkeypatch):
    """Nothing of the size that it states is allocated before it is checked."""
    reference, target = pair
    small = tmp_path / "small"
    api.pack(target, small, against=reference)
    damaged(small, change)
    made, empty = [], np.empty

    def counted(shape, *rest, **more):
        made.append(int(np.prod(shape)))
        return empty(shape, *rest, **more)

    run, whole = store.open_run(small), store.open_run(target)
    monkeypatch.setattr(delta.np, "empty", counted)
    missing = 0
    for record in whole.records:
        try:
            found = run.array(record.id)
        except ElementsMissing:
            missing += 1
        else:
            assert same(found, whole.array(record.id))
    monkeypatch.undo()
    assert missing
    assert max(made, default=0) <= 1 << 20
    with pytest.raises((UnreadableRun, ElementsMissing)):
        api.unpack(small, tmp_path / "again")


def test_damaged_bytes_of_chunks_are_told(pair, tmp_path):
    """Any byte of what is compressed."""
    reference, target = pair
    small = tmp_path / "small"
    api.pack(target, small, against=reference)
    (file, *_) = sorted(small.glob("rank*/shard-*.packed"))
    columns = {name: np.array(column) for name, column in _load(file).items()}
    whole = store.open_run(target)
    rng = np.random.default_rng(0)
    for _ in range(60):
        data = columns["data"].copy()
        data[rng.integers(0, min(data.size, 4096), 3)] ^= rng.integers(1, 256, 3).astype(np.uint8)
        save(file, {n: whole_column(c) for n, c in {**columns, "data": data}.items()}, {})
        run = store.open_run(small)
        for record in list(run.records)[:3]:
            try:
                found = run.array(record.id)
            except ElementsMissing:
                continue
            assert same(found, whole.array(record.id))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {
            "reference": {
                "path": "/x",
                "relative": "x",
                "processes": [{"folder": "../../x", "journal_bytes": 1, "journal": ""}],
            }
        },
        {"reference": 3},
        {"reference": None},
    ],
)
def test_a_hostile_packed_json_is_only_missing(pair, tmp_path, change):
    reference, target = pair
    small = tmp_path / "small"
    api.pack(target, small, against=reference)
    fields = msgspec.json.decode((small / "packed.json").read_bytes())
    (small / "packed.json").write_bytes(msgspec.json.encode({**fields, **change}))
    run = store.open_run(small)
    with pytest.raises(ElementsMissing):
        run.array(1)


def test_zeros_do_not_become_a_bomb():
    codec, frames = delta.encode(np.zeros(10 << 20, np.uint8), 4, None)
    assert codec is delta.Codec.COMPRESSED
    assert sum(f.size for f in frames) * delta.MOST_RATIO >= 10 << 20
    frame = frames[0].copy()
    frame[12:16] = [100, 0, 0, 0]
    with pytest.raises(ValueError, match="claim"):
        delta.decode_frame(frame[:200], 1 << 20)
    with pytest.raises(ValueError, match="expected"):
        delta.decode_frame(frames[0], 1 << 21)


def test_a_packed_shard_is_a_safetensors_file(pair, tmp_path):
    reference, target = pair
    api.pack(target, tmp_path / "small", against=reference)
    for file in (tmp_path / "small").glob("rank*/shard-*.packed"):
        assert load_file(file)["offset"].dtype == np.int64
        assert isinstance(PackedShard(file, lambda *_: np.empty(0, np.uint8)).whole_nbytes(), int)


def test_the_folder_is_used_again_by_force(pair, tmp_path):
    reference, target = pair
    small = tmp_path / "small"
    api.pack(target, small, against=reference)
    store.create(small, store.open_run(target).info, force=True)
    assert not Path(small / "packed.json").exists()
