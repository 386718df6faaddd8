"""Tensors that a device reads where they lie. Triton's interpreter is the device, from the start of
the process on: `test_device_figures` runs these.
"""

import numpy as np
import pytest
import torch
from test_staging import hand_on, infer, infer_inference_mode, run_of, train

from whence import dtypes
from whence.frameworks import host, torch_arrays
from whence.instrument.call_frames import Looks
from whence.instrument.torch import device_figures
from whence.instrument.torch.tensor_identity import StagingRing

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def quiet():
    """The interpreter computes with numpy, which warns of what a device does without a word."""
    with np.errstate(all="ignore"):
        yield


def fail(error):
    raise error


def read(tensors, names, looks=None):
    """(digest, figures) of tensors as the ring hands them over, and of how many no bytes came."""
    got = []
    ring = StagingRing(fail, looks=looks)
    assert ring.reader.reads(torch.device("cpu")), ring.reader.problem
    for tensor, name in zip(tensors, names, strict=True):
        layout = device_figures.layout(tensor, name)
        ring.describe(tensor, lambda a: got.append((a.digest, a.figures, a.copied)), name, layout)
    ring.close()
    assert [copied for _, _, copied in got] == [None] * len(tensors)
    return [(digest, figures) for digest, figures, _ in got]


def agree(got, expected):
    """Counts, extremes and checksum exactly, sums to the rounding of another order."""
    for mine, theirs in zip(got, expected, strict=True):
        for field in mine.__struct_fields__:
            a, b = getattr(mine, field), getattr(theirs, field)
            if field in ("min", "max") or not isinstance(a, float):
                assert a == b, field
            else:
                size = expected[1].abs_sum / max(1, expected[0].count) if field == "mean" else b
                size = expected[1].abs_sum and max(abs(size), 1e-6 * expected[1].abs_sum)
                assert a == pytest.approx(b, rel=1e-11, abs=1e-12 * (size or 1)), field


NAMES = [n for n, d in dtypes.DTYPES.items() if d.code >= 0 and n != "float64"]


@pytest.mark.parametrize("name", NAMES)
def test_digests_and_figures_are_those_of_the_bytes(name):
    rng = np.random.default_rng(1)
    dtype = dtypes.DTYPES[name]
    tensors = []
    for count in (1, 7, 100, 250, 1000, 2048, 2049, 5001, 70_001):
        data = rng.integers(0, 2 if name == "bool" else 256, count * dtype.itemsize, dtype=np.uint8)
        if dtype.is_floating and count % 2:
            data = (rng.standard_normal(count) * 3 + 100).astype(dtype.numpy).view(np.uint8)
        tensors.append(torch.from_numpy(data.copy()).view(torch_arrays.TORCH[name]))
    got = read(tensors, [name] * len(tensors))
    for tensor, (digest, figures) in zip(tensors, got, strict=True):
        data = torch_arrays.canonical(tensor)
        assert digest == host.digest(data)
        agree(figures, host.statistics(data, name, kernels=True))


def test_a_digest_alone_and_what_is_not_finite():
    odd = torch.tensor([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5] * 700)
    none = torch.full((3000,), np.nan)
    (digest, figures), (_, of_none), (alone, no_figures) = read(
        [odd, none, odd], ["float32", "float32", ""]
    )
    assert digest == alone == host.digest(torch_arrays.canonical(odd))
    assert no_figures is None
    agree(figures, host.statistics(torch_arrays.canonical(odd), "float32"))
    assert (of_none[0].nan, of_none[0].mean) == (3000, None)


def test_what_is_left_to_the_host():
    words = torch.zeros(4000, dtype=torch.int16)
    layout = device_figures.layout
    assert layout(torch.zeros(500, dtype=torch.float64), "float64") is None  # squares may overflow
    assert layout(torch.zeros(500, dtype=torch.float64), "") is not None
    assert layout(torch.zeros(500, dtype=torch.complex64), "complex64") is None
    assert layout(torch.zeros(0), "float32") is None
    for count in (4000, 512, 122):  # of any size that is hashed there: no 64-bit words begin there
        assert layout(words[1:count], "int16") is None
    assert layout(words[4:], "int16") is not None
    assert layout(words[1:9], "int16") is not None  # copied as it is


def test_what_is_looked_at_later_is_looked_at_before_the_program_goes_on():
    looks = Looks()
    ring = StagingRing(fail, looks=looks)
    ring.reader.reads(torch.device("cpu"))
    got, value = [], torch.ones(1000)
    expected = host.digest(torch_arrays.canonical(value))
    layout = device_figures.layout(value, "float32")
    looks.deferred = True
    ring.describe(value, lambda a: got.append(a.digest), "float32", layout)
    assert looks.pending
    looks.finish()
    assert not looks.pending
    value.zero_()
    ring.close()
    assert got == [expected]


def test_more_than_one_table_holds(monkeypatch):
    monkeypatch.setattr(device_figures, "TABLE_ROWS", 3)
    monkeypatch.setattr(device_figures, "PIECE", 1)
    device_figures._layout.cache_clear()
    tensors = [torch.randn(n) for n in (15_000, 300, 3, 16_000, 2000, 10_000)]
    got = read(tensors, ["float32"] * 6, Looks())
    assert [d for d, _ in got] == [host.digest(torch_arrays.canonical(t)) for t in tensors]
    assert device_figures.layout(torch.zeros(25_000), "float32") is None
    device_figures._layout.cache_clear()


@pytest.mark.parametrize("use", [infer, infer_inference_mode, train, hand_on])
def test_the_same_run_as_without_a_device(use, tmp_path, monkeypatch):
    described = []
    describe = StagingRing.describe
    monkeypatch.setattr(
        StagingRing, "describe", lambda *args: described.append(args[1]) or describe(*args)
    )
    (one, out_one, _), (two, out_two, _) = (
        run_of(tmp_path / str(s), use, staged=s, keep="stats") for s in (False, True)
    )
    assert out_one == out_two
    assert [n for n in two.notes if n.kind in ("error", "device")] == []
    assert len(described) > 0.9 * len(two.records)
    assert [(c.key(), [(r.slot, r.record, r.edge) for r in c.refs]) for c in one.calls] == [
        (c.key(), [(r.slot, r.record, r.edge) for r in c.refs]) for c in two.calls
    ]
    for a, b in zip(one.records, two.records, strict=True):
        for field in ("dtype", "shape", "stride", "storage_offset", "hash", "elements"):
            assert getattr(a, field) == getattr(b, field)
        agree((b.statistics, b.sketch), (a.statistics, a.sketch))


def test_where_the_kernel_does_not_run_the_host_describes_and_a_note_says_so(tmp_path, monkeypatch):
    def broken(self, device):
        self.problem = "CompilationError: no compiler"

    monkeypatch.setattr(device_figures.DeviceReader, "_prepared", broken)
    run, _, _ = run_of(tmp_path / "run", infer, staged=True, keep="stats")
    assert all(r.statistics is not None for r in run.records)
    (note,) = [n for n in run.notes if n.kind == "device"]
    assert "no compiler" in note.text


def test_elements_that_are_wanted_come_over(tmp_path, monkeypatch):
    monkeypatch.setattr(StagingRing, "describe", None)
    run, _, _ = run_of(tmp_path / "run", infer, staged=True)
    assert all(r.elements is not None for r in run.records)
