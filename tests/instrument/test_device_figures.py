"""Tensors that a device reads where they lie: by Triton's interpreter, which a process has or has
not, and the device of a test by numpy.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from whence import _kernels, dtypes
from whence.frameworks import host

pytestmark = pytest.mark.torch
INTERPRETED = Path(__file__).with_name("device_figures_interpreted.py")


@pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="needs triton (300 MB): pip install triton"
)
def test_by_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def left_of(data, dtype):
    """What a device leaves of some bytes, as `join_units` wants it, one step after the other."""
    n, block, unit = data.size, _kernels.HASH_BLOCK, _kernels.UNIT_BYTES
    secret = [int(w) for w in _kernels.SECRET_WORDS[:24]]
    out = bytearray(data[-64:].tobytes())
    for start in range(0, (n - 1) // block * block + 1, block):
        sums = [0] * 8
        for stripe in range(min(16, ((n - 1) - start) // 64)):
            words = data[start + 64 * stripe :][:64].view(np.uint64).tolist()
            for i, word in enumerate(words):
                key = word ^ secret[stripe + i]
                sums[i] += words[i ^ 1] + (key & 0xFFFFFFFF) * (key >> 32)
        out += np.array([s % (1 << 64) for s in sums], np.uint64).tobytes()
    for start in range(0, n if dtype else 0, unit):
        part = data[start : start + unit]
        with np.errstate(invalid="ignore"):
            values = part.view(dtypes.DTYPES[dtype].numpy).astype(np.float64)
        x = values[np.isfinite(values)]
        counted = np.isnan(values).sum(), np.isinf(values).sum(), (values == 0).sum()
        check = _kernels.checksum(part, dtypes.DTYPES[dtype].itemsize)
        out += np.array([*map(int, counted), check], np.uint64).tobytes()
        ends = (x.min(), x.max()) if x.size else (np.inf, -np.inf)
        sums = [x.sum(), (x**2).sum(), ((x - x.mean()) ** 2).sum() if x.size else 0.0]
        powers = np.abs(x).sum(), (x**3).sum(), (x**4).sum()
        out += np.array([*ends, *sums, *powers], np.float64).tobytes()
    return np.frombuffer(out, np.uint64).copy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64", ""])
def test_what_a_device_leaves_is_joined_to_the_digest_and_the_figures_of_all(dtype):
    rng = np.random.default_rng(0)
    lengths = [248, 320, 1024, 1032, 1088, 2048, 8192, 8200, 30_000]
    contents = [rng.integers(0, 2, n, dtype=np.uint8) * 63 for n in lengths]
    if dtype == "bool":
        contents = [c % 2 for c in contents]
    lefts = [left_of(content, dtype) for content in contents]
    got = host.join_units(
        [(u.ctypes.data, c.size, dtype) for u, c in zip(lefts, contents, strict=True)]
    )
    for content, left, (digest, figures) in zip(contents, lefts, got, strict=True):
        assert left.nbytes == host.units_bytes(content.size, dtype)
        assert digest == host.digest(content)
        if not dtype:
            assert figures is None
            continue
        for mine, theirs in zip(figures, host.statistics(content, dtype), strict=True):
            for field in mine.__struct_fields__:
                assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=1e-12)


def test_without_triton_device_tensors_are_described_on_the_host(monkeypatch):
    from whence.instrument.torch.device_figures import DeviceReader

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reader = DeviceReader()
    assert not reader.reads(torch.device("cuda", 0))
    assert reader.problem == ""


def test_what_begins_at_no_word_is_left_to_the_host():
    from whence.instrument.torch.device_figures import layout

    words = torch.zeros(4000, dtype=torch.int16)
    for count in (4000, 512, 122):
        assert layout(words[1:count], "int16") is None
        assert layout(words[4:count], "int16") is not None
