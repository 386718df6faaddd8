"""Working dtypes: what a 16-bit or float64 replay of a recording computes, against torch running
the module itself in that dtype.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import program_recording as recording  # noqa: E402
import program_zoo as modules  # noqa: E402

from whence.replay import stepwise  # noqa: E402
from whence.replay.dtype_policy import DtypePolicy  # noqa: E402

pytestmark = pytest.mark.torch
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}

# Modules whose casts must be recovered from a float32 recording for a 16-bit replay to round where
# the code rounds.
CASTS = {
    "llama norm": lambda: (modules.LlamaNorm(64), (modules.g(4, 9, 64) * 3,)),
    "float norm": lambda: (modules.FloatNorm(64), (modules.g(4, 9, 64) * 3,)),
    "softmax in float32": lambda: (modules.Softmax32(), (modules.g(9, 64),)),
    "rotary": lambda: (modules.Rotary(16), (modules.g(2, 300, 16), torch.arange(300))),
    "weight dtype": lambda: (modules.WeightDtype(32), (modules.g(9, 32),)),
    "masked": lambda: (modules.Masked(), (modules.g(9, 64), modules.g(9, 64) > 0)),
    "linear": lambda: (torch.nn.Linear(64, 32), (modules.g(9, 64),)),
    "layer norm": lambda: (torch.nn.LayerNorm(64), (modules.g(9, 64),)),
    "gelu": lambda: (torch.nn.GELU(), (modules.g(9, 64),)),
    "sdpa": lambda: (modules.Attention(), (modules.heads(0), modules.heads(1), modules.heads(2))),
    "constant from data": lambda: (modules.FromData(), (modules.g(3, 4),)),
    "mean by size": lambda: (modules.MeanBySize(), (modules.g(3, 7),)),
}


def lowered(value, dtype):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("working", LOW)
@pytest.mark.parametrize("name", CASTS)
def test_low_replay_of_a_float32_recording_is_the_module_in_that_dtype(name, working, mode):
    torch.manual_seed(0)
    module, inputs = CASTS[name]()
    low = copy.deepcopy(module).to(LOW[working])
    given = [lowered(t, LOW[working]) for t in inputs]
    with mode():
        _, recorded = recording.record(module, *inputs)
        want = low(*given)
    # The rotary's table is a plain attribute, which `.to(dtype)` does not round.
    params = {s: recording.host(t) for s, t in recording.caller_code.tensors_of(low)}
    arrays = {
        s: recording.host(t)
        for s, t in recording.flat({str(i): t for i, t in enumerate(given)}, "input")
    }
    got = recorded.load().run(arrays, params, working=working)["output.0"]
    assert recording.same(got, recording.host(want)), (got.dtype, want.dtype)


def test_a_half_recording_keeps_its_explicit_float32():
    module = modules.LlamaNorm(64).to(torch.bfloat16)
    x = modules.g(4, 64).to(torch.bfloat16)
    _, recorded = recording.record(module, x)
    want = copy.deepcopy(module).to(torch.float16)(x.to(torch.float16))
    params = {s: a.astype(np.float16) for s, a in recorded.params.items()}
    got = recorded.load().run(recorded.inputs, params, working="float16")["output.0"]
    assert recording.same(got, recording.host(want))
    assert (
        recorded.load().run(recorded.inputs, recorded.params, working="float32")["output.0"].dtype
        == np.float32
    )
    wide = recorded.load().run(recorded.inputs, recorded.params, working="float64")["output.0"]
    exact = (
        x.double()
        * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
        * module.weight.double()
    )
    np.testing.assert_allclose(wide, exact.detach().numpy(), rtol=1e-14)


@pytest.mark.parametrize(
    ("base", "working", "asked", "expected"),
    [
        ("float32", "float64", "float16", "float64"),
        ("float32", "float64", "complex64", "complex128"),
        ("float32", "float32", "bfloat16", "float32"),  # what the reference computes coarsely
        ("float32", "float32", "float64", "float64"),
        ("float32", "bfloat16", "float64", "float64"),
        ("float32", "bfloat16", "float16", "float16"),
        ("float32", "bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "bfloat16", "float16"),
        ("float32", "bfloat16", "int64", "int64"),
        ("float32", "recorded", "float32", "float32"),
    ],
)
def test_a_dtype_that_the_code_names(base, working, asked, expected):
    """The dtype of the model is the one that a run exchanges; others stay as the code says, and a
    run in float32 leaves none of 16 bits.
    """
    policy = DtypePolicy(working, getattr(torch, base), None)
    step = SimpleNamespace(base="_to_copy")
    got = policy.argument(getattr(torch, asked), step, torch.zeros(2))
    assert got is getattr(torch, expected)


def test_float64_is_float64_throughout():
    """Positions, tables and Python numbers too: the wide replay of a rotary agrees with one written
    in float64.
    """
    module, (x, positions) = modules.Rotary(16), (modules.g(2, 300, 16), torch.arange(300))
    _, recorded = recording.record(module, x, positions)
    wide = recorded.load().run(recorded.inputs, recorded.params, working="float64")["output.0"]
    angles = positions[:, None].double() * module.inv.double()
    angles = torch.cat([angles, angles], -1)
    y = x.double()
    want = y * angles.cos() + torch.cat([-y[..., 8:], y[..., :8]], -1) * angles.sin()
    np.testing.assert_allclose(wide, want.numpy(), rtol=1e-12, atol=1e-13)


def test_integers_divided_are_divided_in_float64():
    class Scaled(torch.nn.Module):
        def forward(self, positions):
            return torch.sin(positions / 7)

    _, recorded = recording.record(Scaled(), torch.arange(10))
    got = recorded.load().run(recorded.inputs, {}, working="float64")["output.0"]
    assert recording.same(got, np.sin(np.arange(10) / 7))


def test_inputs_are_kept_as_given_when_asked():
    _, recorded = recording.record(modules.Softmax32(), modules.g(3, 8))
    assert (
        recorded.load().run(recorded.inputs, {}, working="bfloat16")["output.0"].dtype
        == recording.BF16
    )
    kept = recorded.load().run(recorded.inputs, {}, working="bfloat16", convert=False)["output.0"]
    assert (
        kept.dtype == recording.BF16
    )  # the code casts back to the dtype of x, which the recording calls its base


def test_nothing_given_is_written():
    for module, x in (
        (torch.nn.BatchNorm1d(4), modules.g(6, 4)),
        (modules.InPlaceOnInput(), modules.g(6, 4)),
    ):
        _, recorded = recording.record(module, x)
        for a in (*recorded.inputs.values(), *recorded.params.values()):
            a.flags.writeable = False
        before = {s: a.copy() for s, a in (recorded.inputs | recorded.params).items()}
        assert recorded.check() == ""
        recorded.run("float64")
        assert all(
            recording.same(before[s], a) for s, a in (recorded.inputs | recorded.params).items()
        )


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("linear", 8),
        ("conv2d", 27),
        ("layer norm", 8),
        ("batch norm train", 100),
        ("softmax", 7),
        ("sdpa", 8),
        ("gelu", 1),
        ("lstm", 12),
    ],
)
def test_reduction_length(name, terms):
    module, inputs = modules.USABLE[name]()
    _, recorded = recording.record(module, *inputs)
    loaded = recorded.load()
    for _ in range(2):  # the second run is not bounded again
        loaded.run(recorded.inputs, recorded.params)
        assert loaded.length == terms


def test_attention_of_mixed_dtypes_is_written_out_in_the_coarsest():
    """Positions that are added in float32 leave queries and keys in float32, values are not."""
    q, k, v = (modules.heads(i, t=40, d=32).to(torch.bfloat16) for i in range(3))
    low = stepwise.attention({"query": q, "key": k, "value": v})[0]
    mixed = stepwise.attention({"query": q.float(), "key": k.float(), "value": v})[0]
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(low, mixed)


def test_stepwise_is_another_rounding_of_the_same_thing():
    q, k, v = (modules.heads(i, t=40, d=32).to(torch.bfloat16) for i in range(3))
    _, recorded = recording.record(modules.Attention(causal=True), q, k, v)
    fused = recorded.run("bfloat16")["output.0"].astype(np.float64)
    steps = recorded.run("bfloat16", stepwise=True)["output.0"].astype(np.float64)
    wide = recorded.run("float64")["output.0"]
    off_fused, off_steps = (np.linalg.norm(a - wide) / np.linalg.norm(wide) for a in (fused, steps))
    assert 0 < off_fused < off_steps < 0.02
    exact = recorded.run("float64", stepwise=True)["output.0"]
    np.testing.assert_allclose(exact, wide, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        "layer norm",
        "rms norm",
        "group norm",
        "sdpa",
        "sdpa causal",
        "sdpa mask",
        "sdpa additive mask",
        "sdpa grouped",
        "lstm",
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_written_out_operators_agree_with_the_fused_ones(name, mode):
    module, inputs = modules.USABLE[name]()
    with mode():
        _, recorded = recording.record(module, *inputs)
    wide, steps = recorded.run("float64"), recorded.run("float64", stepwise=True)
    np.testing.assert_allclose(steps["output.0"], wide["output.0"], rtol=1e-6, atol=1e-6)


def test_self_attention_on_the_fast_path():
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = modules.g(2, 5, 8)
    with torch.inference_mode():
        _, recorded = recording.record(module, x, x, x)
    assert [o.name for o in recorded.program().operations] == [
        "aten._native_multi_head_attention.default"
    ]
    assert recorded.check() == ""
    wide, steps = recorded.run("float64"), recorded.run("float64", stepwise=True)
    np.testing.assert_allclose(steps["output.0"], wide["output.0"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "of_groups"),
    [
        ((24, 16), (3, 16, 8), lambda a, b, i, j, g: a[i:j] @ b[g]),
        ((3, 8, 16), (16, 24), lambda a, b, i, j, g: a[g] @ b[:, i:j]),
        ((8, 24), (24, 16), lambda a, b, i, j, g: a[:, i:j] @ b[i:j]),
        ((3, 8, 16), (3, 16, 8), None),
    ],
)
def test_grouped_products_in_float64_are_torchs_in_float32(a, b, of_groups):
    torch.manual_seed(0)
    a, b = (torch.randn(*shape).requires_grad_() for shape in (a, b))
    ends = torch.tensor([8, 8, 24], dtype=torch.int32) if of_groups else None
    wide = [x.detach().double().requires_grad_() for x in (a, b)]
    (product,) = stepwise.grouped_product({"self": wide[0], "mat2": wide[1], "offs": ends})
    product.square().sum().backward()
    single = torch._grouped_mm(a, b, ends)
    single.square().sum().backward()
    assert product.dtype == torch.float64
    assert torch.allclose(product.float(), single, atol=1e-5)
    for one, other in zip(wide, (a, b), strict=True):
        assert torch.allclose(one.grad.float(), other.grad, atol=1e-4)
    if of_groups:
        spans = [(0, 8, 0), (8, 8, 1), (8, 24, 2)]
        parts = [of_groups(*wide, *span) for span in spans]
        whole = torch.stack(parts) if a.ndim == b.ndim else torch.cat(parts, int(a.ndim == 3))
        assert torch.equal(product, whole)
