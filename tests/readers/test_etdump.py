"""ETDumps of ExecuTorch, as its runtime wrote them (tests/data/etdump/make.py)."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import whence
from readers.hostile import survives, variants
from whence.api import open_run
from whence.errors import UnreadableRun

DATA = Path(__file__).parent.parent / "data" / "etdump"


def elements(run, scope, occurrence=0, step=0, slot=0):
    (call,) = (
        c
        for c in run.calls
        if (c.scope, c.occurrence, c.step) == (scope, occurrence, step) and c.kind == "label"
    )
    return np.asarray(run.array(call.slots("output")[slot].record))


def test_instructions_are_labels_and_executions_steps():
    run = open_run(DATA / "reference")
    assert [(c.scope, c.step) for c in sorted(run.calls, key=lambda c: c.order)] == [
        (scope, step)
        for step in (0, 1)
        for scope in (
            "", "permute_copy", "addmm", "native_layer_norm", "mul", "relu", "permute_copy",
            "addmm", "_softmax",
        )
    ]  # fmt: skip


@pytest.mark.parametrize("step", [0, 1])
def test_elements_are_what_operators_compute_from_each_other(step):
    run = open_run(DATA / "reference" / "etdump.etdp")
    summed = elements(run, "addmm", step=step)
    normed, mean, rstd = (elements(run, "native_layer_norm", step=step, slot=n) for n in range(3))
    np.testing.assert_allclose(mean, summed.mean(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(normed, (summed - mean) * rstd, rtol=1e-5)
    assert (elements(run, "mul", step=step) == normed).all()
    assert (elements(run, "relu", step=step) == np.maximum(normed, 0)).all()
    last = elements(run, "addmm", 1, step=step)
    exponents = np.exp(last - last.max(-1, keepdims=True))
    shares = exponents / exponents.sum(-1, keepdims=True)
    np.testing.assert_allclose(elements(run, "_softmax", step=step), shares, rtol=1e-6)
    assert last.dtype == np.float32 and last.shape == (2, 4)


def test_a_fault_is_named():
    result = whence.compare(DATA / "reference", DATA / "scaled")
    assert (result.status, result.findings[0].name) == ("different", "mul")
    assert whence.compare(DATA / "reference", DATA / "reference" / "etdump.etdp").status == "same"


def test_without_its_buffer_nothing_is_the_same(tmp_path):
    shutil.copytree(DATA / "reference", tmp_path / "cut")
    buffer = tmp_path / "cut" / "debug.bin"
    buffer.write_bytes(buffer.read_bytes()[:2000])
    assert whence.compare(DATA / "reference", tmp_path / "cut").status == "undecided"
    buffer.unlink()
    result = whence.compare(DATA / "reference", tmp_path / "cut")
    assert result.status == "undecided" and "no .bin beside the ETDump" in result.headline


def test_damage_is_refused(tmp_path):
    whole = (DATA / "reference" / "etdump.etdp").read_bytes()
    for content in (whole[:3000], whole[:9], whole[:12] + b"\xff" * 40):
        (tmp_path / "x.etdp").write_bytes(content)
        with pytest.raises(UnreadableRun, match=r"x\.etdp"):
            open_run(tmp_path / "x.etdp").array(0)
    # one list of executions that is its own list of events, and so on
    table = struct.pack("<HHHHHHI", 12, 8, 0, 4, 0, 4, 0)
    (tmp_path / "x.etdp").write_bytes(b"\x10\0\0\0ED00" + table * 50)
    with pytest.raises(UnreadableRun):
        open_run(tmp_path / "x.etdp")


def test_spoilt_files_are_refused_or_read(tmp_path):
    for spoilt, dump in variants(DATA / "reference", tmp_path):
        survives(spoilt, dump)
