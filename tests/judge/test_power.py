"""What would have been named: faults of the stated size, planted in arrays."""

import math

import ml_dtypes
import numpy as np
import pytest

import whence
from whence import judge
from whence.dtypes import unit_roundoff
from whence.judge import LeafEvidence, PairError, judge_leaf, power
from whence.results import CauseKind, VerdictKind

ROWS, LAST = 64, 96
DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def judged(dtype, seed, how=lambda r: r):
    """A correct kernel of this dtype, and what a fault makes of its result before the rounding."""
    rng = np.random.default_rng(seed)
    r = rng.standard_normal((ROWS, LAST)) * np.exp(0.5 * rng.standard_normal((1, LAST)))
    carried = r * (1 + 2.0**-26 * rng.standard_normal(r.shape))
    w, y = (x.astype(DTYPES[dtype]) for x in (carried, how(carried.copy())))
    return judge.local(y, r, w, outputs=200)


def planted(kind, size, seed):
    rng = np.random.default_rng(1000 + seed)

    def change(r):
        rms = math.sqrt((r * r).mean())
        if kind == power.SCALE:
            return r * (1 + size)
        if kind == power.CHANNEL:
            r[:, rng.integers(LAST)] += size * rms
        elif kind == power.ELEMENT:
            r[rng.integers(ROWS), rng.integers(LAST)] += size * rms
        else:
            r += size * rms * rng.standard_normal(r.shape)
        return r

    return change


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", power.KINDS)
def test_faults_of_twice_the_stated_size_are_beyond_a_limit_and_of_a_tenth_are_not(dtype, kind):
    large = small = 0
    for seed in range(20):
        size = power.visible(judged(dtype, seed))[kind]
        large += judged(dtype, seed, planted(kind, 2 * size, seed)).score > 1
        small += judged(dtype, seed, planted(kind, size / 10, seed)).score > 1
    assert large >= 19
    assert small <= 1


def test_nothing_is_promised_of_integers_and_of_stretches():
    codes = np.arange(12).reshape(3, 4)
    assert power.visible(judge.local(codes, codes, codes)) == {}
    r = np.random.default_rng(0).standard_normal((8, 8))
    assert power.visible(judge.whole(r.astype(np.float32), r, [r.astype(np.float32)])) == {}


def test_the_statement_is_about_the_output_that_shows_least():
    sharp, dull = (judged(dtype, 0) for dtype in ("float32", "bfloat16"))
    leaf = LeafEvidence(
        0,
        [PairError(0.0, u=2.0**-8)],
        [PairError(1e-3, u=2.0**-8)],
        2.0**-8,
        local=[("output.0", sharp), ("output.1", dull)],
    )
    numbers = judge_leaf(leaf).numbers
    for kind, size in power.visible(dull).items():
        assert numbers[f"visible_{kind}"] == max(size, power.visible(sharp)[kind])


def rows_scaled(effect):
    """A group norm that keeps a number of each row in 16 bits, by so many unit roundoffs."""
    rng = np.random.default_rng(3)
    u = unit_roundoff("float16")
    r = rng.standard_normal((64, 200))
    scales = 1 + effect * u * rng.choice([-1.0, 1.0], (64, 1))
    return judge.local((r * scales).astype(np.float16), r, r.astype(np.float16))


@pytest.mark.parametrize(
    ("effect", "cause", "verdict"),
    [
        (0.8, CauseKind.KERNEL, VerdictKind.PRECISION),
        (0.8, CauseKind.SEMANTIC, VerdictKind.INTRODUCED),
        (1.5, CauseKind.KERNEL, VerdictKind.INTRODUCED),
    ],
)
def test_a_kernel_may_keep_a_number_of_each_row_in_16_bits(effect, cause, verdict):
    error = rows_scaled(effect)
    assert error.parts()["row"] > 1
    leaf = LeafEvidence(
        0, [], [PairError(1e-3, u=2.0**-11)], 2.0**-11, local=[("output.0", error)], cause=cause
    )
    assert judge_leaf(leaf).verdict == verdict


def test_the_written_out_floor_is_for_targets_that_round_so_much():
    """A target that rounds once is not excused by a replay that rounds at every step."""
    rng = np.random.default_rng(0)
    u = unit_roundoff("float16")
    r = rng.standard_normal((64, 96))
    once = r.astype(np.float16)
    steps = (r * (1 + 2 * u * rng.standard_normal(r.shape))).astype(np.float16)

    def chosen(target):
        first, second = (
            judge.local(target, r, working, written_out=out)
            for working, out in ((once, False), (steps, True))
        )
        return judge.less_suspect(first, second)

    scaled = (r * (1 + u / 2)).astype(np.float16)
    assert chosen(scaled).parts()["slope"] > 1
    rounds_between = (r * (1 + 2 * u * rng.standard_normal(r.shape))).astype(np.float16)
    assert judge.local(rounds_between, r, once).score > 1
    assert chosen(rounds_between).score <= 1


def test_a_call_that_hands_a_tensor_on_promises_nothing(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout()).eval()
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        runs.append(tmp_path / str(dtype))
        with torch.no_grad(), whence.capture(model.to(dtype), runs[-1]):
            model(torch.randn(8, 64).to(dtype))
    result = whence.compare(*runs)
    assert result.status == "same" and {v.evidence for v in result.visible} == {"replay"}
    assert {v.kind: v.calls for v in result.visible}["scale"] == 1
