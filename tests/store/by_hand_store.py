"""Runs made by hand for the tests of the store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from whence import store
from whence.dtypes import DTYPES, Array
from whence.records import Call, Ref, RunInfo, Sketch, Statistics

STATISTICS = Statistics(6, -1.5, 2.0, 0.25, 1.0, None, 1, 2, 3)
SKETCH = Sketch(2**64 - 1, 1.0, None, 3.5)


def raw(array: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Canonical bytes of an array."""
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """An array of random bit patterns: NaNs with payloads, denormals, -0.0 and all."""
    known = DTYPES[dtype]
    noise = np.random.default_rng(seed).integers(
        0, 2 if known.kind == "bool" else 256, math.prod(shape) * known.itemsize, dtype=np.uint8
    )
    made: Array = noise.view(known.numpy).reshape(shape)
    return made


def add(
    writer: store.Writer, array: Array, dtype: str, *, digest: bool = True, **more: object
) -> int:
    """Put an array into a writer."""
    data = raw(array)
    taken = xxhash.xxh3_128_digest(data.data) if digest else b""
    return writer.record(dtype, array.shape, data, taken, STATISTICS, SKETCH, **more)  # type: ignore[arg-type]


def same(found: Array, wanted: Array) -> bool:
    """Dtype, shape and bits."""
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and found.tobytes() == wanted.tobytes()
    )


def new(path: Path) -> Path:
    """A run folder."""
    return store.create(
        path, RunInfo(command=("python", "infer.py"), environment={"SEED": "1"}, seed=7)
    )


def call(number: int, *refs: Ref, scope: str = "layers.0", step: int = 0, parent: int = -1) -> Call:
    """A call with references."""
    return Call(
        id=number,
        scope=scope,
        root="Net",
        step=step,
        order=number,
        parent=parent,
        refs=refs,
        op_type="Linear",
    )


def shards(run: Path) -> list[Path]:
    """All shards of a run."""
    return sorted(run.glob("rank*/shard-*.safetensors"))


def only_process(run: Path) -> Path:
    """The folder of the only process of a run."""
    (folder,) = run.glob("rank*")
    return folder


def mounted(tmp_path: Path, options: str) -> Iterator[Path]:
    """A small tmpfs, or a skip with the reason."""
    import subprocess

    place = tmp_path / "mount"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
