"""Declared semantics against independent oracles: torch's and torchao's own quantisation, bit
patterns, float64 products.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.errors import ReplayRefused
from whence.records import Operation, Program
from whence.replay import declared_semantics
from whence.replay.declared_semantics import Grid, Ties, fake_quantise, round_mantissa, scales

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
RNG = np.random.default_rng(3)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per", ["tensor", "channel", "axis 1"])
def test_fake_quantisation_is_torchs(bits, symmetric, per):
    x = RNG.standard_normal((24, 40)).astype(np.float32) + 0.3
    axis = 1 if per == "axis 1" else 0
    grid = Grid(bits, "channel" if per != "tensor" else "tensor", axis, symmetric=symmetric)
    scale, zero = (a.astype(np.float32).reshape(-1) for a in scales(x, grid))
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    t = torch.from_numpy(x)
    if per == "tensor":
        want = torch.fake_quantize_per_tensor_affine(t, float(scale[0]), int(zero[0]), low, high)
    else:
        want = torch.fake_quantize_per_channel_affine(
            t, torch.from_numpy(scale), torch.from_numpy(zero).int(), axis, low, high
        )
    got = fake_quantise(x, grid, working="float32")
    # torch multiplies with a rounded reciprocal: a code on a tie may fall to the other side, one
    # step away.
    step = np.broadcast_to(
        scale.reshape([-1 if a == axis and per != "tensor" else 1 for a in range(2)]), x.shape
    )
    off = np.abs(got - want.numpy()) > 1e-5 * np.abs(got) + 1e-7
    assert off.mean() < 1e-3
    assert (np.abs(got - want.numpy())[off] <= 1.001 * step[off]).all()


def test_scales_by_hand():
    x = np.array([[-4.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert scales(x, Grid(8, "channel"))[0][0, 0] == 4 / 127
    assert scales(x, Grid(8, "channel", span="full"))[0][0, 0] == 4 / 127.5
    scale, zero = scales(x, Grid(8, "channel", symmetric=False))
    assert (scale[0, 0], zero[0, 0]) == (6 / 255, -128 + 170)
    assert scales(x, Grid(4, "group", group=2))[0][0, :, 0].tolist() == [4 / 7, 1 / 7]
    assert scales(x, Grid(8, "token", format="e4m3"))[0][0, 0] == 4 / 448
    assert (fake_quantise(x, Grid(8, "channel"))[1] == 0).all()


@pytest.mark.parametrize(
    ("code", "near"), [(0.3, 0), (0.495, 1), (10.3, 0), (10.45, 1), (100.3, 1)]
)
def test_what_rounding_of_the_code_itself_may_move_over_a_tie_is_near_one(code, near):
    """A code of 100, known to one part in 128, may be off by most of a step; one of 0.3 may not."""
    ties = Ties(2.0**-7)
    values = fake_quantise(np.array([[code]]), Grid(8), np.float64(1.0), ties=ties, flips=(0,))
    assert ties.per_vector == near
    nearest = np.rint(code)
    assert values.item() == (nearest + (1 if code > nearest else -1) if near else nearest)


def test_ties_go_to_even_and_can_be_told():
    x = np.array([[0.5, 1.5, 2.5, -0.5, 0.4]])
    assert fake_quantise(x, Grid(8), np.float64(1.0)).tolist() == [[0.0, 2.0, 2.0, 0.0, 0.4 // 1]]
    ties = Ties(1e-6)
    got = fake_quantise(x, Grid(8), np.float64(1.0), ties=ties, flips=(0, 1, 2, 3))
    assert (ties.per_vector, got.tolist()) == (4, [[1.0, 1.0, 3.0, -1.0, 0.0]])
    at_the_end = np.array([[127.5, 3.0]])
    fake_quantise(at_the_end, Grid(8), np.float64(1.0), ties=ties)
    assert ties.per_vector == 0, "both ways are clipped to 127"


def test_groups_must_fit():
    with pytest.raises(ReplayRefused, match="no groups of 5"):
        fake_quantise(np.ones((2, 12)), Grid(4, "group", group=5))
    with pytest.raises(ReplayRefused, match="no axis 2"):
        fake_quantise(np.ones((2, 12)), Grid(4, "channel", 2))


@pytest.mark.parametrize(
    ("name", "kind"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_eight_bit_floats_are_torchs(name, kind):
    x = RNG.standard_normal((16, 64)).astype(np.float32)
    top = float(ml_dtypes.finfo(kind).max)
    scale = torch.from_numpy(np.abs(x).max(1, keepdims=True) / top)
    small = (torch.from_numpy(x) / scale).to(
        torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
    )
    np.testing.assert_allclose(
        fake_quantise(x, Grid(8, "token", format=name), working="float32"),
        (small.float() * scale).numpy(),
        rtol=1e-6,
    )


def test_torchaos_dynamic_activations():
    quant = pytest.importorskip("torchao.quantization.quant_primitives")
    x = torch.from_numpy(RNG.standard_normal((6, 64)).astype(np.float32))
    for mapping, grid in (
        (quant.MappingType.SYMMETRIC, Grid(8, "token", span="full")),
        (quant.MappingType.ASYMMETRIC, Grid(8, "token", symmetric=False)),
    ):
        scale, zero = quant.choose_qparams_affine(x, mapping, (1, 64), torch.int8)
        mine, point = scales(x.numpy(), grid)
        np.testing.assert_allclose(mine.reshape(-1), scale.numpy().reshape(-1), rtol=1e-6)
        assert point.reshape(-1).tolist() == zero.reshape(-1).tolist()


def by_bits(x, how):
    """TF32 by cutting 13 bits off the pattern."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    if how == "even":
        bits = bits + 0x0FFF + ((bits >> 13) & 1)
    elif how == "away":
        bits = bits + 0x1000
    return (bits & 0xFFFFE000).astype(np.uint32).view(np.float32)


@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30),
        min_size=1,
        max_size=40,
    )
)
def test_ten_bits_of_mantissa(values):
    x = np.array(values, np.float32)
    for how in ("even", "away", "truncate"):
        assert np.array_equal(round_mantissa(x, how), by_bits(x, how).astype(np.float64))


@pytest.mark.parametrize("how", ["even", "away", "truncate"])
@pytest.mark.parametrize("working", ["float64", "recorded"])
def test_a_program_with_tf32_operands(how, working):
    from whence.replay.validation import load

    transposed = Operation("aten.t.default", ({"param": "param.weight"},))
    product = Operation("aten.addmm.default", ({"param": "param.bias"}, {"in": 0}, {"op": [0, 0]}))
    program = Program(
        "p",
        (transposed, product),
        ("input.0",),
        (("output.0", {"op": [1, 0]}),),
        ("param.weight", "param.bias"),
        base="float32",
        input_dtypes=("float32",),
    )
    edited = declared_semantics.with_tf32(program, how)
    assert edited is not None
    x, w, b = (RNG.standard_normal(s).astype(np.float32) for s in ((5, 32), (7, 32), (7,)))
    got = load(edited).run({"input.0": x}, {"param.weight": w, "param.bias": b}, working=working)[
        "output.0"
    ]
    want = by_bits(x, how).astype(np.float64) @ by_bits(w, how).astype(np.float64).T + b
    np.testing.assert_allclose(
        got,
        want,
        rtol=1e-12 if working == "float64" else 1e-5,
        atol=1e-12 if working == "float64" else 1e-5,
    )
    assert (
        declared_semantics.with_tf32(declared_semantics.gelu_program(program, "erf"), how) is None
    )


def test_gelu_forms():
    from whence.replay.validation import load

    x = np.linspace(-6, 6, 101)
    program = Program(
        "p",
        (Operation("aten.gelu.default", ({"in": 0},)),),
        ("input.0",),
        (("output.0", {"op": [0, 0]}),),
        input_dtypes=("float32",),
    )

    def run(p):
        return load(p).run({"input.0": x}, {}, working="float64")

    from scipy.special import erf, expit

    forms = {
        "erf": x * (1 + erf(x / 2**0.5)) / 2,
        "tanh": x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "sigmoid": x * expit(1.702 * x),
    }
    for form, want in forms.items():
        np.testing.assert_allclose(
            run(declared_semantics.gelu_program(program, form))["output.0"], want, atol=1e-12
        )
        assert declared_semantics.computes_gelu(program, form, run) == (form == "erf")
    edited = declared_semantics.with_gelu(program, "tanh")
    assert edited is not None
    np.testing.assert_allclose(run(edited)["output.0"], forms["tanh"], atol=1e-12)
    assert declared_semantics.with_gelu(program, "erf") is None
    assert declared_semantics.with_gelu(edited, "erf") is not None
