"""The compiled kernels: one order of summing on every processor, an extension of another version
refused, and numpy where there is none.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

from whence import _kernels, dtypes
from whence.metrics import accumulators

ROOT = Path(__file__).parents[2]
LANES = 16
CODES = {d.code: d for d in dtypes.DTYPES.values() if d.code >= 0}
compiled = _kernels.needed()


@pytest.fixture(params=compiled.instruction_sets())
def instruction_set(request):
    compiled.choose(request.param)
    yield request.param
    compiled.choose(compiled.instruction_sets()[0])


def lanes(values):
    """Their sum as `_kernels` has it: element i goes to lane i % 16, lanes are added by halves."""
    values = np.asarray(values, np.float64)
    whole = np.zeros(-(-values.size // LANES) * LANES)
    whole[: values.size] = values
    sums = np.zeros(LANES)
    for row in whole.reshape(-1, LANES):
        sums += row
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return float(sums[0])


def blocks(x):
    return [x[o : o + _kernels.BLOCK] for o in range(0, x.size, _kernels.BLOCK)]


def sample(code, n, seed):
    """Any bits at all of a type, and in every third block of a float type finite ones only."""
    kind, rng = CODES[code], np.random.default_rng(seed)
    raw = rng.integers(0, 2 if kind.kind == "bool" else 256, (n, kind.itemsize), dtype=np.uint8)
    x = raw.reshape(-1).view(kind.numpy)
    if kind.kind == "float":
        with np.errstate(all="ignore"):
            x[: n // 2] = rng.standard_normal(n // 2).astype(kind.numpy)
    return x


@pytest.mark.parametrize("code", CODES)
def test_sums_have_one_order(instruction_set, code):
    for n in (0, 1, 15, 16, 17, 2047, 2048, 2049, 7000):
        x = sample(code, n, n)
        row = compiled.describe(x.ctypes.data, n, code, 1)
        with np.errstate(all="ignore"):
            wide = [b.astype(np.float64) for b in blocks(x)]
            finite = [b[np.isfinite(b)] for b in wide]
            powers = [
                sum((lanes(f(b)) for b in finite), 0.0)
                for f in (
                    lambda v: v,
                    lambda v: v * v,
                    np.abs,
                    lambda v: v * v * v,
                    lambda v: (v * v) * (v * v),
                )
            ]
        assert row[0] == sum(b.size for b in finite)
        assert row[1] == sum(int(np.isnan(b).sum()) for b in wide)
        assert row[3] == sum(int((b == 0).sum()) for b in finite)
        assert row[4] == min((b.min() for b in finite if b.size), default=np.inf)
        assert row[5] == max((b.max() for b in finite if b.size), default=-np.inf)
        np.testing.assert_equal([row[6], row[7], *row[9:12]], powers)
        assert row[12] == _kernels.checksum(x.view(np.uint8), x.itemsize)
        assert compiled.describe(x.ctypes.data, n, code, 0)[12] == row[12]


def compared(r, t, codes, path):
    rows = accumulators.empty(1)
    pair = np.array([(r.ctypes.data, t.ctypes.data, r.size, *codes, 7, 0, 0, path)], np.int64)
    compiled.compare(
        *(pair.ctypes.data, 1, 2, 1e-3, 1e-5, _kernels.THRESHOLDS.ctypes.data),
        *(rows.floats.ctypes.data, rows.ints.ctypes.data, rows.histogram.ctypes.data),
    )
    return rows


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (2, 2), (7, 7), (12, 7), (3, 4), (5, 5)])
def test_pairs_are_summed_in_this_order(instruction_set, codes):
    n = 7 * 700
    r, t = sample(codes[0], n, 1), sample(codes[1], n, 2)
    t[2048:4000] = r[2048:4000].astype(t.dtype)
    path = _kernels.PATH_64 if 7 in codes else _kernels.PATH_32
    rows = compared(r, t, codes, path)
    with np.errstate(all="ignore"):
        a, b = (np.where(np.isfinite(v), v, 0.0) for v in (r.astype(float), t.astype(float)))
        fine = np.isfinite(r.astype(float)) & np.isfinite(t.astype(float))
        a, b = np.where(fine, a, 0.0), np.where(fine, b, 0.0)
        figures = {
            "rr": a * a,
            "tt": b * b,
            "rt": a * b,
            "dd": (b - a) * (b - a),
            "d_sum": b - a,
            "ad_sum": np.abs(b - a),
        }
        expected = {name: sum(lanes(v) for v in blocks(x)) for name, x in figures.items()}
    assert rows.ints[0, accumulators.I["pairs"]] == fine.sum()
    got = {name: rows[name][0] for name in figures}
    np.testing.assert_equal(got, expected)


@pytest.mark.parametrize("codes", [(3, 3), (4, 6), (5, 5)])
def test_joint_codes_are_counted_alike(instruction_set, codes):
    r, t = sample(codes[0], 7 * 2000, 3), sample(codes[1], 7 * 2000, 4)
    by_codes = compared(r, t, codes, _kernels.PATH_8)
    by_elements = compared(r, t, codes, _kernels.PATH_32)
    ours = [k for k, name in enumerate(_kernels.I_NAMES) if name != "ad_block"]
    assert (by_codes.ints[:, ours] == by_elements.ints[:, ours]).all()
    assert (by_codes.histogram == by_elements.histogram).all()
    np.testing.assert_allclose(by_codes.floats, by_elements.floats, rtol=1e-12)


def test_what_numbers_cannot_mean_is_refused():
    with pytest.raises(ValueError, match="no kernel takes the code 14"):
        compiled.describe(0, 0, 14, 1)
    with pytest.raises(TypeError, match="4 arguments are needed, not 1"):
        compiled.describe(0)
    with pytest.raises(ValueError, match="this processor has no 'abacus'"):
        compiled.choose("abacus")


def test_a_kernel_runs_without_the_gil(monkeypatch):
    """No thread gives the GIL away by itself here: another one runs only while a kernel does."""
    x = np.ones(1 << 23, np.float32)
    begun, ended, seen = threading.Event(), threading.Event(), []

    def describe():
        begun.set()
        for _ in range(20):
            compiled.describe(x.ctypes.data, x.size, 0, 1)
        ended.set()

    thread = threading.Thread(target=describe)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        begun.wait()
        seen.append(ended.is_set())
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen == [False]


def python(code, **environment):
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_numpy_where_it_is_asked_for():
    code = "from whence import _kernels; print(_kernels.compiled, _kernels.about())"
    assert python(code, WHENCE_KERNELS="numpy").stdout == (
        "None numpy, which is slower than the compiled kernels; WHENCE_KERNELS=numpy asks for it\n"
    )
    assert python(code).stdout.endswith("> compiled\n")


NOT_BUILT = """
import sys
sys.modules["whence._compiled"] = None
from whence import _kernels
print(_kernels.about())
"""


def test_an_extension_that_was_not_built():
    assert "they were not built: install whence again where there" in python(NOT_BUILT).stdout
    assert "ModuleNotFoundError" in python(NOT_BUILT, WHENCE_KERNELS="compiled").stderr


def test_an_extension_of_another_version_is_not_used(monkeypatch):
    other = types.SimpleNamespace(COLUMNS=compiled.COLUMNS.replace("pairs", "couples"))
    monkeypatch.setitem(sys.modules, "whence._compiled", other)
    extension, why = _kernels._loaded()
    assert extension is None and "built from another version of the source" in why


@pytest.mark.parametrize("kernels", ["", "compiled"])
def test_without_a_compiler_whence_is_built_all_the_same(tmp_path, kernels):
    try:
        is_old = Version(importlib.metadata.version("setuptools")) < Version("77")
    except importlib.metadata.PackageNotFoundError:
        is_old = True
    if is_old:
        pytest.skip("no setuptools here that reads the license of pyproject.toml")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "native", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"CC": "false", "CXX": "false", "WHENCE_KERNELS": kernels}
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", "out", "-t", "objects"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is (kernels == ""), done.stderr
    assert "false" in done.stderr and not list(tmp_path.glob("out/**/*.so"))
