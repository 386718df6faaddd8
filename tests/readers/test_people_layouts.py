"""Containers and names of dumps that people write: headers in front of bytes, files in base64,
tables in logs, calls of hooks, folders of classes, times behind names."""

from __future__ import annotations

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whence import readers
from whence.errors import UnreadableRun

RNG = np.random.default_rng(3)
ARRAY = RNG.normal(size=(2, 3, 5)).astype(np.float32)


def outputs(path: Path) -> dict[str, Any]:
    """Step and scope -> elements of the outputs, None for statistics."""
    run = readers.open_run(path)
    return {
        (call.step, call.scope): run.array(ref.record)
        for call in run.calls
        for ref in call.refs
        if call.scope and ref.slot.startswith("output")
    }


@pytest.mark.parametrize(
    "header",
    [
        b"layers.0.mlp float32 3 2 3 5\n",
        b"2 3 5\n",
        b"shape: 2x3x5, dtype: f32\n",
        struct.pack("<4I", 3, 2, 3, 5),
        struct.pack("<5i", 1, 3, 2, 3, 5),
        struct.pack("<6I", 0xFCCFE2E2, 3, 0, 2, 3, 5),
        struct.pack("<4Q", 3, 2, 3, 5),
    ],
    ids=["name", "extents", "words", "axes", "dtype", "mark", "long"],
)
def test_bytes_behind_a_header_have_its_shape(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "mlp_0.bin").write_bytes(header + ARRAY.tobytes())
    (tmp_path / "mlp_1.bin").write_bytes(header + (2 * ARRAY).tobytes())
    read = outputs(tmp_path)
    assert [np.array_equal(a, b) for a, b in zip(read.values(), (ARRAY, 2 * ARRAY), strict=True)]
    assert all(array.shape == (2, 3, 5) for array in read.values())


def test_bytes_that_a_header_does_not_count_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mlp_0.bin").write_bytes(struct.pack("<4I", 3, 2, 3, 5) + ARRAY.tobytes()[:-4])
    with pytest.raises(UnreadableRun):
        readers.open_run(tmp_path)


def saved(kind: str) -> str:
    buffer = io.BytesIO()
    if kind == "npy":
        np.save(buffer, ARRAY)
    else:
        torch.save(torch.from_numpy(ARRAY), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("kind", ["npy", "pt"])
def test_files_in_base64_are_the_tensors_of_their_lines(tmp_path: Path, kind: str) -> None:
    lines = [{"layer": f"mlp.{n}", f"{kind}_b64": saved(kind)} for n in range(2)]
    (tmp_path / "acts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = outputs(tmp_path / "acts.jsonl")
    assert [scope for _, scope in read] == ["mlp.0", "mlp.1"]
    assert all(np.array_equal(array, ARRAY) for array in read.values())


@pytest.mark.parametrize("bar", ["| ", "  "])
def test_tables_in_logs_state_statistics(tmp_path: Path, bar: str) -> None:
    rows = [("layer", "shape", "mean", "std", "absmax"), ("fc1", "(2, 8)", "0.1", "1.5", "3.25"),
            ("fc2", "(2, 4)", "-0.2", "0.5", "1.75")]  # fmt: skip
    table = "".join(bar + bar.join(f"{cell:<10}" for cell in row) + "\n" for row in rows)
    (tmp_path / "run.log").write_text(f"Using 1 device\n{table}took 3 s\n")
    run = readers.open_run(tmp_path / "run.log")
    figures = {c.scope: run.records[c.slots("output")[0].record].statistics
               for c in run.calls if c.scope}  # fmt: skip
    assert list(figures) == ["fc1", "fc2"]
    assert (figures["fc2"].mean, figures["fc2"].std, figures["fc2"].max) == (-0.2, 0.5, 1.75)
    assert figures["fc1"].count == 16


def test_values_that_hooks_are_called_with_are_inputs_and_outputs(tmp_path: Path) -> None:
    x = torch.from_numpy(ARRAY)
    held = {(step, name): ((x * step,), x + k) for step in range(2)
            for k, name in enumerate(("layers.0.fc", "layers.1.fc"))}  # fmt: skip
    torch.save(held, tmp_path / "trace.pt")
    run = readers.open_run(tmp_path / "trace.pt")
    calls = [(c.step, c.scope, [r.slot for r in c.refs]) for c in run.calls if c.scope]
    slots = ["input.0", "output.0"]
    names = ("layers.0.fc", "layers.1.fc")
    assert calls == [(step, name, slots) for step in range(2) for name in names]


def test_folders_of_classes_name_no_modules(tmp_path: Path) -> None:
    for kind, name in (
        ("Linear", "layers.0.fc"),
        ("Linear", "layers.1.fc"),
        ("GELU", "layers.0.act"),
    ):
        place = tmp_path / kind / name
        place.mkdir(parents=True)
        for step in range(2):
            np.save(place / f"out_{step:04d}.npy", ARRAY + step)
    names = {scope for _, scope in outputs(tmp_path)}
    assert names == {"layers.0.fc", "layers.1.fc", "layers.0.act"}


def test_times_behind_names_are_an_order(tmp_path: Path) -> None:
    moments = ("20250301-104503-999999", "20250301-104504-000001", "20250301-104504-000007")
    for name, moment in zip(("head", "act_b", "act_a"), moments, strict=True):
        np.save(tmp_path / f"{name}_{moment}.npy", ARRAY)
    assert [scope for _, scope in outputs(tmp_path)] == ["head", "act_b", "act_a"]
