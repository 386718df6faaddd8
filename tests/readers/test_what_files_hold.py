"""Tensors in bytes, in base64, in rows of names and numbers, and names that lie beside."""

import base64
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import whence
from handmade import net
from whence import api
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers import open_run

Array = np.ndarray[Any, Any]
VALUES = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


def held(path: Path) -> dict[str, Array]:
    """The tensors of a dump by scope; of a repeated one, the last."""
    run = open_run(path)
    return {
        call.scope: run.array(ref.record)
        for call in run.calls
        if call.scope
        for ref in call.slots("output")
    }


def scopes(path: Path) -> list[tuple[str, int, int]]:
    return [(c.scope, c.step, c.rank) for c in open_run(path).calls if c.scope]


def saved(save: Callable[[Any, Any], None], value: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, value)
    return buffer.getvalue()


def test_bytes_in_a_pickle_are_what_they_hold(tmp_path: Path) -> None:
    held_bytes = {
        "of_torch": saved(lambda file, x: torch.save(x, file), torch.from_numpy(VALUES)),
        "of_numpy": saved(np.save, VALUES),
        "elements": {"data": VALUES.tobytes(), "shape": (3, 5), "dtype": "float32"},
        "others": bytes(range(256)),
        "text": b"a prompt that was kept beside the tensors, and is longer than a date would be",
    }
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(held_bytes))
    read = held(tmp_path / "x.pkl")
    assert sorted(read) == ["elements", "of_numpy", "of_torch", "others"]
    for name in ("of_torch", "of_numpy", "elements"):
        np.testing.assert_array_equal(read[name], VALUES, strict=True)
    np.testing.assert_array_equal(read["others"], np.arange(256, dtype=np.uint8), strict=True)


def test_bytes_that_are_cut_off_are_no_tensor(tmp_path: Path) -> None:
    cut = saved(lambda file, x: torch.save(x, file), torch.from_numpy(VALUES))[:-40]
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": cut, "b": VALUES}))
    with pytest.raises(UnreadableRun):
        open_run(tmp_path / "x.pkl")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_base64_in_lines_of_json(tmp_path: Path, dtype: str) -> None:
    values = (10 * VALUES).astype(dtype)
    lines = [
        {"name": name, "shape": [3, 5], "dtype": dtype,
         "data": base64.b64encode((values + n).tobytes()).decode()}
        for n, name in enumerate(("fc1", "fc2"))
    ]  # fmt: skip
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = held(tmp_path / "x.jsonl")
    assert [scope for scope, *_ in scopes(tmp_path / "x.jsonl")] == ["fc1", "fc2"]
    np.testing.assert_array_equal(read["fc2"], values + 1, strict=True)


@pytest.mark.parametrize(("suffix", "mark"), [("tsv", "\t"), ("csv", ",")])
def test_rows_of_a_name_and_numbers(tmp_path: Path, suffix: str, mark: str) -> None:
    rows = {"embed": VALUES[0], "head": np.concatenate([VALUES[1], VALUES[2]])}
    lines = [mark.join([name, *(f"{x:.9g}" for x in row)]) for name, row in rows.items()]
    (tmp_path / f"x.{suffix}").write_text("\n".join(lines) + "\n")
    read = held(tmp_path / f"x.{suffix}")
    assert list(read) == list(rows)
    for name, row in rows.items():
        np.testing.assert_array_equal(read[name], row, strict=True)


@pytest.mark.parametrize("text", [
    "layer,flops,bytes,share,depth\nconv1,1.5,2.5,0.1,3\nfc,2.5,1.5,0.2,4\n",  # named quantities
    "conv1,1.5,2.5\nfc,2.5,1.5\n",  # two figures about each
])  # fmt: skip
def test_a_table_of_quantities_is_no_tensor(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UnreadableRun, match="no reader"):
        open_run(tmp_path / "x.csv")


@pytest.mark.parametrize("text", [
    json.dumps(["embed", "layers.0.fc", "head"]), "embed\nlayers.0.fc\nhead\n",
    json.dumps({"0": "embed", "1": "layers.0.fc", "2": "head"}),
    json.dumps([{"name": "embed"}, {"name": "layers.0.fc"}, {"name": "head"}]),
])  # fmt: skip
def test_names_beside_a_file_of_positions(tmp_path: Path, text: str) -> None:
    with (tmp_path / "acts.npy").open("wb") as file:
        for row in VALUES:
            np.save(file, row)
    (tmp_path / ("names.txt" if text.startswith("embed") else "names.json")).write_text(text)
    for path in (tmp_path, tmp_path / "acts.npy"):
        assert [scope for scope, *_ in scopes(path)] == ["embed", "layers.0.fc", "head"]


def test_as_many_lines_of_words_are_no_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "acts.npz", *VALUES)
    (tmp_path / "prompts.txt").write_text("the first one\nthe second one\nthe third one\n")
    assert [scope for scope, *_ in scopes(tmp_path)] == ["arr_0", "arr_1", "arr_2"]


def test_numbers_beside_names_are_layers_or_calls(tmp_path: Path) -> None:
    layers = [(n, f"experts.{k}.w1", VALUES + n) for n in range(3) for k in range(2)]
    (tmp_path / "layers.pkl").write_bytes(pickle.dumps([(-1, "embed", VALUES), *layers]))
    assert [s for s, *_ in scopes(tmp_path / "layers.pkl")][:3] == [
        "embed", "0.experts.0.w1", "0.experts.1.w1",
    ]  # fmt: skip
    calls = [(n, f"layers.{k}.fc", VALUES + n) for n in range(3) for k in range(2)]
    (tmp_path / "calls.pkl").write_bytes(pickle.dumps(calls))
    assert {(s, step) for s, step, _ in scopes(tmp_path / "calls.pkl")} == {
        (f"layers.{k}.fc", n) for n in range(3) for k in range(2)
    }


def test_a_log_of_ranks_and_classes(tmp_path: Path) -> None:
    lines = [
        f"2025-03-01 10:00:0{n} - hooks - DEBUG - [rank1] {name} (Linear) | (2, 3) | "
        f"sum={n + 1.5:.6f} | abs_max=2.500000"
        for n, name in enumerate(("model.fc1", "model.fc2"))
    ]
    (tmp_path / "x.log").write_text("\n".join(lines) + "\n")
    run = open_run(tmp_path / "x.log")
    assert [(c.scope, c.rank) for c in run.calls if c.scope] == [("model.fc1", 1), ("model.fc2", 1)]
    (first, _) = run.records
    assert first.shape == (2, 3)
    assert first.statistics is not None
    assert first.statistics.mean == pytest.approx(0.25)
    assert first.statistics.max == 2.5


def test_first_values_behind_figures_are_a_part(tmp_path: Path) -> None:
    for side in ("ref", "same"):
        (tmp_path / f"{side}.log").write_text(
            "".join(
                f"{name} | (4, 8) | sum=3.250000 | abs_max=1.500000 | first3=[0.100000, 0.2, 0.3]\n"
                for name in ("fc1", "fc2")
            )
        )
    assert [s for s, *_ in scopes(tmp_path / "ref.log")] == ["fc1", "fc2"]
    answer = whence.compare(tmp_path / "ref.log", tmp_path / "same.log")
    assert answer.status == "undecided"


def test_columns_of_both_sides(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(
        "module,output_shape,input_mean,input_std,output_mean,output_std\n"
        'fc1,"(2, 3)",0.5,1.0,0.25,2.0\nfc2,"(2, 3)",0.25,2.0,0.125,3.0\n'
    )
    calls = [call for call in open_run(tmp_path / "x.csv").calls if call.scope]
    assert [call.scope for call in calls] == ["fc1", "fc2"]
    assert all(call.slots("input") and call.slots("output") for call in calls)


def twice(path: Path, data: bytes, behind: bytes) -> Path:
    path.write_bytes(data + behind)
    return path


@pytest.mark.parametrize(("name", "data"), [
    ("x.pt", saved(lambda file, x: torch.save(x, file), torch.ones(9))),
    ("x.npz", saved(lambda file, x: np.savez(file, a=x), VALUES)),
])  # fmt: skip
def test_archives_behind_each_other_are_not_read_in_part(
    tmp_path: Path, name: str, data: bytes
) -> None:
    open_run(twice(tmp_path / name, data, b""))
    with pytest.raises(UnreadableRun, match=r"bytes in front of what is read"):
        open_run(twice(tmp_path / name, data, data))


@pytest.mark.parametrize(("name", "data"), [
    ("x.npy", saved(np.save, VALUES)),
    ("x.pth", saved(
        lambda file, x: torch.save(x, file, _use_new_zipfile_serialization=False), torch.ones(9)
    )),
])  # fmt: skip
def test_what_stands_behind_is_told(tmp_path: Path, name: str, data: bytes) -> None:
    open_run(twice(tmp_path / name, data, b"\n"))
    with pytest.raises(UnreadableRun, match=r"bytes behind what is read"):
        open_run(twice(tmp_path / name, data, b"and a note"))
    other = saved(np.save, 2 * VALUES)
    np.save(tmp_path / "other.npy", VALUES)
    (tmp_path / name).write_bytes(data + other[:40])  # in a folder it counts as missing
    assert whence.compare(tmp_path, tmp_path).status != "same"


def test_rows_of_other_lengths_are_not_left_out(tmp_path: Path) -> None:
    header, rows = "name,mean,std\n", "fc1,0.5,1.0\nfc2,0.25,2.0\n"
    (tmp_path / "x.csv").write_text(header + rows + header + rows)
    assert len([c for c in open_run(tmp_path / "x.csv").calls if c.scope]) == 4
    (tmp_path / "x.csv").write_text(header + rows + "fc3,0.5\n")
    with pytest.raises(UnreadableRun, match="a row 2"):
        open_run(tmp_path / "x.csv")


def _with_more(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"what somebody appended")


@pytest.mark.parametrize("name", sorted(api.formats()))
def test_no_reader_leaves_bytes_behind_a_container(tmp_path: Path, name: str) -> None:
    place = tmp_path / (f"{name}.json" if name == "polygraphy" else name)
    whence.convert(net(), place, to=name)
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    kinds = (".npy", ".npz", ".pt", ".pth", ".safetensors")
    held_in = [path for path in files if path.suffix in kinds]
    for path in held_in[:1]:
        _with_more(path)
        try:
            run = open_run(place)
        except UnreadableRun:
            continue
        unread = [n for n in range(len(run.records)) if not _is_read(run, n)]
        assert unread or run.lacks, path.name


def _is_read(run: Any, record: int) -> bool:
    try:
        run.array(record)
    except (UnreadableRun, ElementsMissing):
        return False
    return True


@pytest.mark.parametrize("suffix", ["npy", "npz", "pt", "old.pt", "safetensors"])
def test_containers_with_something_behind_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    tensors = {"a": torch.from_numpy(VALUES)}
    if suffix == "npy":
        np.save(path, VALUES)
    elif suffix == "npz":
        np.savez(path, a=VALUES)
    elif suffix == "safetensors":
        save_file(tensors, str(path))
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=suffix == "pt")
    assert open_run(path).records
    _with_more(path)
    with pytest.raises(UnreadableRun):
        open_run(path)
