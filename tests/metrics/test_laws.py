"""What must hold for any input (hypothesis), and what the callers of `measure_many` rely on."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whence import _kernels, dtypes
from whence.errors import UsageError
from whence.metrics import METRICS, histogram_edges, installed, measure, measure_many, numpy_pass

pairs = sys.modules["whence.metrics.measure"]  # the package has a function of this name

ERRORS = (
    "max_abs_err",
    "mean_abs_err",
    "rmse",
    "rel_l2",
    "mean_err",
    "max_rel_err",
    "ulp_max",
    "nan_mismatch",
    "inf_mismatch",
    "sign_mismatch",
)


@st.composite
def arrays(draw, names=tuple(dtypes.DTYPES)):
    """Any bytes at all, seen as an array of any dtype: every NaN payload, denormal and infinity."""
    kind = dtypes.named(draw(st.sampled_from(names)))
    shape = draw(st.sampled_from([(1,), (3,), (2, 3), (17, 5), (700, 3), (2, 1100)]))
    seed, special = draw(st.integers(0, 2**32 - 1)), draw(st.booleans())
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    if kind.kind == "bool":
        raw &= 1
    x = raw.view(kind.numpy).reshape(shape)
    if not special and kind.kind in ("float", "complex"):
        x = np.random.default_rng(seed).standard_normal(shape).astype(kind.numpy)
    return x


ANY = settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)


@ANY
@given(arrays(), st.booleans())
def test_identical_gives_zero(x, kernels):
    measured = measure(x, x.copy(), kernels=kernels)
    assert (
        measured.identical
        and measured.values["values_equal"] == 1.0
        and measured.max_abs_index is None
    )
    for name in ERRORS:
        assert measured.values[name] in (0.0, None), name
    assert sum(measured.histogram) == measured.histogram[0] == measured.values["compared"]


@ANY
@given(arrays(), arrays())
def test_both_passes_agree(r, t):
    n = min(r.size, t.size)
    r, t = r.reshape(-1)[:n].reshape(1, n), t.reshape(-1)[:n].reshape(1, n)
    a, b = measure(r, t, kernels=False), measure(r, t, kernels=True)
    assert (a.identical, a.histogram, a.whys, a.max_abs_index) == (
        b.identical,
        b.histogram,
        b.whys,
        b.max_abs_index,
    )
    assert list(a.values) == list(b.values)
    size = 1e-13 * min(
        max(abs(a.values["reference_norm"] or 0), abs(a.values["target_norm"] or 0)), 1e300
    )
    for name, value in a.values.items():
        other = b.values[name]
        if value is None or other is None:
            assert value is other, name
        elif name in ("mean_err", "reference_mean", "target_mean"):
            assert other == pytest.approx(value, rel=1e-12, abs=size), name
        elif name in ("scale_estimate", "cosine_similarity"):
            assert other == pytest.approx(value, rel=1e-9, abs=1e-12 * max(1.0, abs(value))), name
        elif name not in ("worst_row", "worst_channel"):
            assert other == pytest.approx(value, rel=1e-11), name


@ANY
@given(
    arrays(names=("float32", "bfloat16", "float64", "int8", "int64", "complex64")),
    st.integers(1, 50),
    st.booleans(),
)
def test_chunks_agree_with_the_whole(x, cut, kernels):
    y = np.roll(x, 1)
    whole = measure(x, y, kernels=kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "SPLIT_BYTES", 0)
        patch.setattr(pairs, "BATCH_BYTES", cut * 16)
        patch.setattr(numpy_pass, "CHUNK", cut)
        parts = measure(x, y, kernels=kernels)
    assert (parts.identical, parts.histogram, parts.whys, parts.max_abs_index) == (
        whole.identical,
        whole.histogram,
        whole.whys,
        whole.max_abs_index,
    )
    size = 1e-13 * min(
        max(abs(whole.values["reference_norm"] or 0), abs(whole.values["target_norm"] or 0)), 1e300
    )
    for name, value in whole.values.items():
        if value is None or not math.isfinite(value):
            assert parts.values[name] == value, name
        elif name in (
            "cosine_similarity",
            "scale_estimate",
            "mean_err",
            "reference_mean",
            "target_mean",
        ):
            assert parts.values[name] == pytest.approx(value, rel=1e-6, abs=max(size, 1e-9)), name
        elif name not in ("worst_row", "worst_channel"):
            assert parts.values[name] == pytest.approx(value, rel=1e-11), name


@ANY
@given(
    arrays(names=("float32", "float16", "int32", "bfloat16")),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_shuffled_elements_are_a_permutation(x, random, kernels):
    order = list(range(x.size))
    random.shuffle(order)
    y = x.reshape(-1)[order].reshape(x.shape)
    values = measure(x, y, kernels=kernels).values
    assert values["permuted"] == 1.0 - values["values_equal"]


def test_order_and_many_threads():
    rng = np.random.default_rng(0)
    many = [(np.float32(rng.standard_normal(1 + i % 50)), i) for i in range(300)]
    for threads in (1, 2, 5):
        got = measure_many(
            ((x, x + np.float32(i)) for x, i in many), kernels=True, threads=threads, tier="core"
        )
        assert [round(m.values["max_abs_err"]) for m in got] == list(range(300))


def test_a_generator_is_not_held(monkeypatch):
    monkeypatch.setattr(pairs, "BATCH_BYTES", 1 << 12)
    made, most = [], 0

    class Watched(np.ndarray):
        pass

    def stream():
        nonlocal most
        for _ in range(200):
            x = np.zeros(1024, np.float32).view(Watched)
            made.append(weakref.ref(x))
            most = max(most, sum(ref() is not None for ref in made))
            yield x, x

    for kernels in (False, True):
        measure_many(stream(), kernels=kernels, threads=2)
    gc.collect()
    assert most < 40 and all(ref() is None for ref in made)


def test_input_is_not_written():
    x = np.arange(10, dtype=np.float32)
    x.flags.writeable = False
    y = x + 1
    y.flags.writeable = False
    assert measure(x, y, kernels=True).values["mean_err"] == 1.0


def test_unknown_tier():
    with pytest.raises(UsageError, match="unknown tier 'fast'; known: same, core, full"):
        measure(np.zeros(1), np.zeros(1), tier="fast")


def test_core_has_the_core_metrics_only():
    measured = measure(np.zeros(3), np.ones(3), tier="core")
    assert (
        set(measured.values) == {m.name for m in METRICS if m.tier == "core"}
        and measured.histogram == ()
    )


def test_without_the_compiled_pass_numpy_measures(monkeypatch):
    monkeypatch.setattr(_kernels, "compiled", None)
    x = np.linspace(1, 2, 100, dtype=np.float32)
    assert [m.identical for m in measure_many((x, x) for _ in range(9))] == [True] * 9
    assert measure(x, x[::-1].copy()).values["permuted"] == 1.0
    with pytest.raises(ImportError, match="whence has no compiled kernels"):
        measure(x, x, kernels=True)


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.int8])
def test_joint_codes_and_elements_give_the_same(dtype, monkeypatch):
    rng = np.random.default_rng(3)
    pair = rng.integers(-9, 9, (2, 5000)).astype(dtype)
    by_elements = measure(*pair)
    monkeypatch.setattr(pairs, "JOINT_FROM", 1000)
    by_codes = measure(*pair)
    assert by_elements.identical == by_codes.identical
    assert by_elements.histogram == by_codes.histogram and by_elements.whys == by_codes.whys
    known = {name: value for name, value in by_elements.values.items() if value is not None}
    assert {name: by_codes.values[name] for name in known} == pytest.approx(known, rel=1e-12)


def test_edges_of_the_histogram():
    edges = histogram_edges()
    assert len(edges) == _kernels.BINS
    x = np.array([0.0, *edges[1:]])
    assert measure(np.zeros_like(x), x, kernels=False).histogram == (1,) * _kernels.BINS
    below = np.nextafter(np.array(edges[2:]), 0)
    assert measure(np.zeros_like(below), below).histogram == (0, *(1,) * 62, 0)


def test_every_metric_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for metric in METRICS:
        definition = metric.definition.replace("|", "\\|")
        assert f"| `{metric.name}` | {metric.tier} | {definition} |" in text, metric.name
        assert metric.definition and metric.source and metric.tier in ("core", "full")
    assert len({m.name for m in METRICS}) == len(METRICS)


def test_metrics_of_installed_packages(monkeypatch):
    class Entry:
        def __init__(self, name, thing):
            self.name, self._thing = name, thing

        def load(self):
            return self._thing

    def gap(r, t):
        return 1.0

    entries = [Entry("b", gap), Entry("a", ("named", gap))]
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group: entries if group == "whence.metrics" else [],
    )
    assert installed() == [("named", gap), ("b", gap)]
