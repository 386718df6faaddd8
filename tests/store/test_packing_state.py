"""`whence show` says of a packed run against what it is packed, and whether that is there."""

from __future__ import annotations

import shutil
import uuid

import numpy as np
import pytest
from by_hand_store import add, call, new
from click.testing import CliRunner

from whence import api, store
from whence.cli.show import command
from whence.records import Ref

pytest.importorskip("numcodecs")


def written(path, shift=0.0):
    rng = np.random.default_rng(0)
    with store.Writer(new(path)) as writer:
        for number in range(3):
            x = rng.standard_normal(5000).astype(np.float32) * np.float32(1 + shift)
            refs = (Ref("output.0", add(writer, x, "float32")),)
            writer.call(call(number, *refs, scope=f"layers.{number}"))
    return path


def shown(run, *words):
    done = CliRunner().invoke(command, [str(run), *words], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.stderr


def test_show_says_that_a_run_is_packed(tmp_path):
    reference, target = written(tmp_path / "ref"), written(tmp_path / "tgt", 1e-6)
    api.pack(target, tmp_path / "small", against=reference)
    api.pack(target, tmp_path / "alone")
    small = api.packing_state(store.open_run(tmp_path / "small"))
    assert small.found == str(reference)
    assert small.packed_nbytes == sum(
        f.stat().st_size for f in (tmp_path / "small").rglob("*.packed")
    )
    assert small.nbytes == sum(
        f.stat().st_size for f in target.rglob("*.safetensors") if "shard" in f.name
    )
    assert f"packed against {reference}: tensors take" in shown(tmp_path / "small")
    assert "packed, each tensor alone" in shown(tmp_path / "alone", "--format", "json")
    assert "packed" not in shown(target)
    shutil.move(reference, tmp_path / "elsewhere")
    gone = shown(tmp_path / "small", "--tree")
    assert "was not found" in gone
    assert f"whence pack {tmp_path / 'small'} --against REF" in gone
    api.relocate(tmp_path / "small", tmp_path / "elsewhere")
    assert f"packed against {tmp_path / 'elsewhere'}" in shown(tmp_path / "small")


def test_a_packed_run_at_a_url_says_so(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    reference, target = written(tmp_path / "ref"), written(tmp_path / "tgt", 1e-6)
    api.pack(target, tmp_path / "small", against=reference)
    bucket = f"bucket-{uuid.uuid4().hex}"
    api.upload(tmp_path / "small", f"memory://{bucket}/small")
    near = api.packing_state(store.open_run(tmp_path / "small"))
    far = api.packing_state(store.open_run(f"memory://{bucket}/small"))
    assert far == near
    fsspec.filesystem("memory").rm(f"/{bucket}", recursive=True)
