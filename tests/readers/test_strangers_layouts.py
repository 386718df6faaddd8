"""Layouts that set nothing, as strangers make them: from the dumps of two runs to the tensor with
the fault, and nothing of two runs that differ by rounding.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import whence
from whence.readers import open_run

Array = npt.NDArray[np.float32]
WIDTH, LAYERS, STEPS = 16, 11, 2
FAULT = 2  # the layer whose projection is wrong


class Tap(NamedTuple):
    """What a hook sees. layer: -1 around the layers; part: of a layer, "" for all of it."""

    layer: int
    part: str
    step: int
    tensor: Array

    @property
    def name(self) -> str:
        return ".".join(filter(None, ("blocks", str(self.layer), self.part))) if (
            self.layer >= 0
        ) else self.part  # fmt: skip


def taps(change: str) -> list[Tap]:
    """A stack of attention-like and gated layers, in the order in which its parts return."""
    chance = np.random.default_rng(0)
    weights = chance.standard_normal((LAYERS, 3, WIDTH, WIDTH)).astype(np.float32) / 4
    order = slice(None, None, -1) if change == "rounding" else slice(None)
    seen: list[Tap] = []

    def product(x: Array, weight: Array) -> Array:
        return sum(x[:, k : k + 1] * weight[k] for k in range(WIDTH)[order])  # type: ignore[return-value]

    for step in range(STEPS):
        x = np.random.default_rng(step + 1).standard_normal((6, WIDTH)).astype(np.float32)
        seen.append(Tap(-1, "patch_embed", step, x))
        for layer in range(LAYERS):
            qkv = product(x, weights[layer, 0])
            mixed = product(np.tanh(qkv), weights[layer, 1])
            mixed = -mixed if change == "fault" and layer == FAULT else mixed
            fc1 = product(x + mixed, weights[layer, 2])
            x = x + mixed + np.tanh(fc1)
            parts = {"attn.qkv": qkv, "attn.proj": mixed, "mlp.fc1": fc1, "": x}
            seen += [Tap(layer, part, step, tensor) for part, tensor in parts.items()]
        seen += [Tap(-1, "norm", step, x / np.abs(x).max()), Tap(-1, "head", step, x[:, :8])]
    return seen


# ---- the layouts


def groups_of_h5(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """Every part of a name a group, and a group for each step."""
    with h5py.File(folder / "acts.h5", "w") as file:
        for tap in seen:
            file[f"step_{tap.step}/{tap.name.replace('.', '/')}/out"] = tap.tensor


def lines_of_json(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """The name is called layer, and the shape stands beside flat numbers."""
    lines = [
        {
            "layer": t.name,
            "step": t.step,
            "shape": t.tensor.shape,
            "data": t.tensor.ravel().tolist(),
        }
        for t in seen
    ]
    (folder / "acts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def tuples(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """(step, name, array), a pickle a rank."""
    rows = [(tap.step, tap.name, tap.tensor) for tap in seen]
    (folder / "rank0.pkl").write_bytes(pickle.dumps(rows))


def two_lists(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """Names in one list, tensors in another."""
    first = [tap for tap in seen if tap.step == 0]
    held = {"layer_names": [t.name for t in first], "outputs": [t.tensor for t in first]}
    (folder / "trace.pkl").write_bytes(pickle.dumps(held))


def short_words(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    for tap in seen:
        np.save(folder / f"{tap.name.replace('.', '-')}_it{tap.step}_r0.npy", tap.tensor)


_CHINESE = {
    "patch_embed": "图像嵌入", "norm": "归一化", "head": "分类头", "attn.qkv": "注意力_查询键值",
    "attn.proj": "注意力_投影", "mlp.fc1": "前馈_线性1",
}  # fmt: skip


def chinese(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    for tap in seen:
        layer = f"第{tap.layer}层" if tap.layer >= 0 else ""
        name = "_".join(filter(None, (layer, _CHINESE.get(tap.part, ""))))
        place = folder / f"第{tap.step}步"
        place.mkdir(exist_ok=True)
        np.save(place / f"{name}.npy", tap.tensor)


def moments(folder: Path, seen: Sequence[Tap], side: str) -> None:
    """When it was made, in front of each name: another time in each run."""
    hour = 10 + len(side)
    for number, tap in enumerate(tap for tap in seen if tap.step == 0):
        np.save(
            folder / f"20260102_{hour}{number:04d}_{number * 777:06d}_{tap.name}.npy", tap.tensor
        )


def names_of_tensorflow(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    for tap in (tap for tap in seen if tap.step == 0):
        inner = tap.part.replace(".", "_")
        name = "/".join(filter(None, (f"encoder_block_{tap.layer}", inner)))
        path = folder / f"{name if tap.layer >= 0 else inner}:0.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, tap.tensor)


def a_dictionary_a_call(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """Files are counted, what they are of stands in them."""
    for number, tap in enumerate(seen):
        call = {"module": tap.name, "kwargs": {}, "output": tap.tensor, "step": tap.step}
        (folder / f"{number}.pkl").write_bytes(pickle.dumps(call))


def whole_blocks_beside_parts(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    for tap in (tap for tap in seen if tap.step == 0):
        place = folder / f"block{tap.layer}" if tap.layer >= 0 else folder
        place.mkdir(exist_ok=True)
        np.save(place / f"{tap.part.replace('.', '_') or 'block_out'}.npy", tap.tensor)


def files_of_a_tool_without_its_index(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """Class, direction and number of the call behind the name of the module."""
    for tap in seen:
        kind = "Linear" if tap.part else "Block"
        name = f"Module.{tap.name}.{kind}.forward.{tap.step}.output.0"
        np.save(folder / f"{name}.npy", tap.tensor)


def sides_above_modules(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """Groups of HDF5: the side, then the module, the same word for each dataset; a file a step."""
    given: dict[int, Array] = {}
    for tap in filter(lambda tap: tap.part, seen):
        with h5py.File(folder / f"batch{tap.step}.h5", "a") as file:
            name = tap.name.replace(".", "/")
            file[f"inputs/{name}/__value__"] = given.get(tap.step, tap.tensor)
            file[f"outputs/{name}/__value__"] = given[tap.step] = tap.tensor


def the_moment_of_the_run(folder: Path, seen: Sequence[Tap], side: str) -> None:
    """A folder called by when the run began, frames and shards below; forms behind the names."""
    for tap in seen:
        shape = "_".join(map(str, tap.tensor.shape))
        place = folder / f"run-2026-01-0{1 + len(side) % 9}_10-11-12/frame_{tap.step}/shard_0"
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{tap.name}-{shape}-{tap.tensor.dtype}.npy", tap.tensor)


def places_and_a_list_of_names(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """np.savez(file, *arrays, names=names)."""
    first = [tap for tap in seen if tap.step == 0]
    names = np.array([tap.name for tap in first])
    np.savez(folder / "layers.npz", *(tap.tensor for tap in first), names=names)


def printed_by_a_logger(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    with np.printoptions(threshold=10**9, precision=8):
        lines = [
            f"2026-01-02 10:11:12,345 INFO hooks.py:17] {tap.name}: {tap.tensor!r}\n"
            for tap in seen
            if tap.step == 0
        ]
    (folder / "debug.log").write_text("".join(lines))


def hashes_and_an_index(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """Files called by hashes; a text says what each holds."""
    index = {}
    for tap in (tap for tap in seen if tap.step == 0):
        key = hashlib.md5(tap.name.encode()).hexdigest()[:10]
        index[key] = tap.name
        np.save(folder / f"{key}.npy", tap.tensor)
    (folder / "index.json").write_text(json.dumps(index))


def bindings(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """Raw bytes by number, what they are in one list beside them."""
    listed = []
    for n, tap in enumerate(tap for tap in seen if tap.step == 0):
        tap.tensor.tofile(folder / f"binding_{n}.raw")
        listed.append({"file": f"binding_{n}.raw", "name": tap.name, "dims": tap.tensor.shape})
    (folder / "bindings.json").write_text(json.dumps({"bindings": listed}))


def shapes_in_lines(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    for tap in (tap for tap in seen if tap.step == 0):
        tap.tensor.tofile(folder / f"{tap.name}.f32")
    lines = [f"{t.name}.f32 {'x'.join(map(str, t.tensor.shape))}\n" for t in seen if t.step == 0]
    (folder / "shapes.txt").write_text("".join(lines))


def what_stands_around_first(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """{"around": {...}, "layers": [{...}]}: the first container is closed last."""
    tree: dict[str, Any] = {"around": {}, "layers": [{} for _ in range(LAYERS)]}
    for tap in (tap for tap in seen if tap.step == 0):
        held = tree["around"] if tap.layer < 0 else tree["layers"][tap.layer]
        held[tap.part or "out"] = tap.tensor
    (folder / "acts.pkl").write_bytes(pickle.dumps(tree))


def rows_of_objects(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """np.save of an array of (name, array)."""
    first = [tap for tap in seen if tap.step == 0]
    rows = np.empty((len(first), 2), dtype=object)
    for n, tap in enumerate(first):
        rows[n, 0], rows[n, 1] = tap.name, tap.tensor
    np.save(folder / "acts.npy", rows, allow_pickle=True)


def dots_against_bars(folder: Path, seen: Sequence[Tap], side: str) -> None:
    """Names with dots in one run, with bars in the other."""
    for tap in (tap for tap in seen if tap.step == 0):
        name = tap.name if side == "reference" else tap.name.replace(".", "_")
        np.save(folder / f"{name}.npy", tap.tensor)


def tags(folder: Path, seen: Sequence[Tap], _side: str) -> None:
    """A line a call: its only text is the name, and `call` its step."""
    lines = [{"tag": t.name, "call": t.step, "out": t.tensor.tolist()} for t in seen]
    (folder / "acts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


Write = Callable[[Path, Sequence[Tap], str], None]
NAMED: dict[Write, tuple[str, int]] = {
    groups_of_h5: (f"blocks.{FAULT}.attn.proj", STEPS),
    lines_of_json: (f"blocks.{FAULT}.attn.proj", STEPS),
    tuples: (f"blocks.{FAULT}.attn.proj", STEPS),
    two_lists: (f"blocks.{FAULT}.attn.proj", 1),
    short_words: (f"blocks-{FAULT}-attn-proj", STEPS),
    chinese: (f"第{FAULT}层_注意力_投影", STEPS),
    moments: (f"blocks.{FAULT}.attn.proj", 1),
    names_of_tensorflow: (f"encoder_block_{FAULT}.attn_proj:0", 1),
    a_dictionary_a_call: (f"blocks.{FAULT}.attn.proj", STEPS),
    files_of_a_tool_without_its_index: (f"blocks.{FAULT}.attn.proj", STEPS),
    sides_above_modules: (f"blocks.{FAULT}.attn.proj", STEPS),
    the_moment_of_the_run: (f"blocks.{FAULT}.attn.proj", STEPS),
    places_and_a_list_of_names: (f"blocks.{FAULT}.attn.proj", 1),
    printed_by_a_logger: (f"blocks.{FAULT}.attn.proj", 1),
    whole_blocks_beside_parts: (f"block{FAULT}.attn_proj", 1),
    hashes_and_an_index: (f"blocks.{FAULT}.attn.proj", 1),
    bindings: (f"blocks.{FAULT}.attn.proj", 1),
    shapes_in_lines: (f"blocks.{FAULT}.attn.proj", 1),
    what_stands_around_first: (f"layers.{FAULT}.attn.proj", 1),
    rows_of_objects: (f"blocks.{FAULT}.attn.proj", 1),
    dots_against_bars: (f"blocks.{FAULT}.attn.proj", 1),
    tags: (f"blocks.{FAULT}.attn.proj", STEPS),
}


@pytest.mark.parametrize("write", NAMED, ids=lambda write: write.__name__)
def test_a_layout_leads_to_the_fault_and_is_silent_otherwise(write: Write, tmp_path: Path) -> None:
    for side in ("reference", "fault", "rounding"):
        (tmp_path / side).mkdir()
        write(tmp_path / side, taps(side), side)
        for path in filter(Path.is_file, (tmp_path / side).rglob("*")):
            os.utime(path, (1_700_000_000, 1_700_000_000))
    name, steps = NAMED[write]
    run = open_run(tmp_path / "reference")
    assert len({call.step for call in run.calls}) == steps
    faulty = whence.compare(tmp_path / "reference", tmp_path / "fault")
    assert (faulty.status, faulty.findings[0].name) == ("different", name)
    assert whence.compare(tmp_path / "reference", tmp_path / "rounding").status == "same"


def test_names_of_places_that_are_damaged_leave_the_places(tmp_path: Path) -> None:
    path = tmp_path / "layers.npz"
    np.savez(path, np.ones(9), np.zeros(9), names=np.array(["first", "second"]))
    scopes = [call.scope for call in open_run(path).calls if call.refs and call.scope]
    assert {"first", "second"} <= set(scopes)
    np.savez(path, np.ones(9), np.zeros(9), names=np.array(["first"]))
    scopes = [call.scope for call in open_run(path).calls if call.refs and call.scope]
    assert {"arr_0", "arr_1"} <= set(scopes)


def test_a_dict_of_settings_beside_tensors_names_nothing(tmp_path: Path) -> None:
    held: dict[str, Any] = {"tags": ["a", "b"], "acts": {"fc1": np.ones(9), "fc2": np.zeros(9)}}
    (tmp_path / "acts.pkl").write_bytes(pickle.dumps(held))
    scopes = [call.scope for call in open_run(tmp_path / "acts.pkl").calls if call.scope]
    assert scopes == ["acts.fc1", "acts.fc2"]


def test_a_file_of_numpy_is_opened_once_for_what_it_says(tmp_path: Path, monkeypatch: Any) -> None:
    from whence.readers.encodings import archive

    for number in range(5):
        np.save(tmp_path / f"{number}_x.npy", np.arange(12.0, dtype=np.float32))
    opened: list[Path] = []
    bytes_of = archive.bytes_of
    monkeypatch.setattr(
        archive, "bytes_of", lambda path, *part: opened.append(path) or bytes_of(path, *part)
    )
    open_run(tmp_path)
    counts = Counter(path.name for path in opened)
    assert [counts[f"{n}_x.npy"] for n in range(5)] == [2, 1, 1, 1, 1]  # one tensor is tried


def test_steps_with_the_same_names_are_looked_at_once() -> None:
    from whence.records import known_order
    from whence.records.known_order import Trace, known

    names = [f"layers.{k}.{part}" for k, part in itertools.product(range(20), ("attn", "mlp"))]
    known([Trace(name, time=7) for name in names])
    before = known_order._of_names.cache_info().misses
    order = known([Trace(name, time=9 + n) for n, name in enumerate(names)])
    assert order.is_total
    assert known_order._of_names.cache_info().misses == before
