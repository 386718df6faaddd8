from __future__ import annotations

import os
import struct
from pathlib import Path

import by_hand_store as hand
import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

from whence import store
from whence.errors import ElementsMissing
from whence.records import External
from whence.store.external import parse_gguf
from whence.store.shards import parse_header


def gguf(tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3) -> bytes:
    """A small GGUF file: name -> (type, shape slowest first, bytes)."""

    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s)) + s.encode()

    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 4)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("general.alignment") + struct.pack("<II", 4, 64)
    head += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    head += text("scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % 64)
        head += (
            text(name)
            + struct.pack("<I", len(shape))
            + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        )
        head += struct.pack("<IQ", kind, len(data))
        data += raw
    return head + bytes(-len(head) % 64) + data


def test_a_file_of_the_formats_own_library_is_read_whatever_it_says_of_the_model(
    tmp_path: Path,
) -> None:
    library = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = library.GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7)
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.25)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "words")
    for values in ([1, -2, 3], [0.5, 2.0], ["a", "bc", ""], [True, False]):
        writer.add_array(f"an.array.of.{type(values[0]).__name__}", values)
    arrays = {
        "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half": np.arange(5, dtype=np.float16),
        "codes": np.arange(-4, 4, dtype=np.int8),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    data = np.frombuffer(path.read_bytes(), np.uint8)
    found = {t.name: t for t in parse_gguf(data)}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = found[name]
        assert tensor.shape == array.shape
        assert data[tensor.offset : tensor.offset + tensor.nbytes].tobytes() == array.tobytes()


def find(
    array: np.ndarray, dtype: str, candidates: store.Candidates | list[Path]
) -> External | None:
    data = hand.raw(array)
    indexed = (
        candidates if isinstance(candidates, store.Candidates) else store.Candidates(candidates)
    )
    return indexed.find(xxhash.xxh3_128_digest(data.data), dtype, data.nbytes, data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(
        {"a": hand.bits("float32", (40, 5), 1), "b": hand.bits("float32", (40, 5), 2)},
        folder / "model.safetensors",
    )
    half = hand.bits("bfloat16", (8, 16), 3)
    (folder / "model.gguf").write_bytes(
        gguf({"q": (2, (32,), b"q" * 18), "h": (30, (8, 16), half.tobytes())})
    )
    (folder / "broken.safetensors").write_bytes(b"\xff" * 100)
    return folder


def test_parameters_are_referred_to_and_read_back(tmp_path: Path, checkpoint: Path) -> None:
    candidates = store.Candidates([checkpoint, tmp_path / "missing.safetensors"])
    assert len(candidates) == 3
    assert len(candidates.skipped) == 2
    run = hand.new(tmp_path / "run")
    wanted = [
        (hand.bits("float32", (40, 5), 2), "float32"),
        (hand.bits("bfloat16", (8, 16), 3), "bfloat16"),
    ]
    with store.Writer(run) as writer:
        for array, dtype in wanted:
            found = find(array, dtype, candidates)
            assert found is not None
            hand.add(writer, array, dtype, external=found)
            hand.add(writer, array, dtype)
        assert writer.nbytes == 0
    opened = store.open_run(run)
    for place, (array, _) in enumerate(wanted):
        assert hand.same(opened.array(2 * place), array)
        assert hand.same(opened.array(2 * place + 1), array)
        assert isinstance(opened.records[2 * place].elements, External)
        assert opened.raw(2 * place) is None


def test_an_increment_on_external_elements(tmp_path: Path, checkpoint: Path) -> None:
    run = hand.new(tmp_path / "run")
    whole = np.concatenate([hand.bits("float32", (40, 5), 2), hand.bits("float32", (1, 5), 7)])
    with store.Writer(run) as writer:
        base = hand.add(
            writer, whole[:40], "float32", external=find(whole[:40], "float32", [checkpoint])
        )
        writer.record("float32", (41, 5), hand.raw(whole[40:]), b"", None, None, base=(base, 0))
    assert hand.same(store.open_run(run).array(1), whole)


def test_only_equal_bytes_of_the_same_dtype_are_found(checkpoint: Path) -> None:
    assert find(hand.bits("float32", (40, 5), 9), "float32", [checkpoint]) is None
    assert find(hand.bits("float32", (40, 5), 1).view(np.int32), "int32", [checkpoint]) is None
    assert find(hand.bits("float32", (0,), 1), "float32", [checkpoint]) is None
    almost = hand.bits("float32", (40, 5), 1).copy()
    almost.view(np.uint8).reshape(-1)[200] ^= 1
    assert find(almost, "float32", [checkpoint]) is None


def test_a_file_that_changed_is_noticed(tmp_path: Path, checkpoint: Path) -> None:
    run = hand.new(tmp_path / "run")
    array = hand.bits("float32", (40, 5), 2)
    found = find(array, "float32", [checkpoint])
    assert found is not None
    with store.Writer(run) as writer:
        hand.add(writer, array, "float32", external=found)
    file = Path(found.file)
    good = file.read_bytes()
    bad = bytearray(good)
    bad[found.offset] ^= 1
    file.write_bytes(bytes(bad))
    with pytest.raises(ElementsMissing, match="changed since the capture"):
        store.open_run(run).array(0)
    file.write_bytes(good[: found.offset + 10])
    with pytest.raises(ElementsMissing, match="wanted bytes"):
        store.open_run(run).array(0)
    file.unlink()
    with pytest.raises(ElementsMissing, match="put the file back"):
        store.open_run(run).array(0)
    os.mkfifo(file)
    with pytest.raises(ElementsMissing, match="not a regular file"):
        store.open_run(run).array(0)


@pytest.mark.parametrize("parse", [parse_gguf, parse_header])
def test_hostile_headers_raise_value_error_only(checkpoint: Path, parse: object) -> None:
    name = "model.gguf" if parse is parse_gguf else "model.safetensors"
    good = (checkpoint / name).read_bytes()
    random = np.random.default_rng(1)
    for trial in range(3000):
        bad = bytearray(good)
        if trial % 4 == 0:
            del bad[int(random.integers(len(good))) :]
        for place in random.integers(0, min(len(bad), 400), 1 + trial % 4) if bad else ():
            bad[place] = int(random.choice([0, 1, 8, 9, 127, 255, int(random.integers(256))]))
        data = np.frombuffer(bytes(bad), np.uint8)
        try:
            tensors = parse(data)  # type: ignore[operator]
        except ValueError:
            continue
        assert all(0 <= t.offset <= t.offset + t.nbytes <= data.size for t in tensors)
