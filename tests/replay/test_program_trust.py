"""Programs are untrusted data: malformed, hostile and oversized ones are refused before anything
runs; so is a recording that lies.
"""

import math

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import program_recording as recording  # noqa: E402
import program_zoo as modules  # noqa: E402

from whence.comparison.replays import self_check  # noqa: E402
from whence.errors import ReplayRefused  # noqa: E402
from whence.records import Operation, Program  # noqa: E402
from whence.replay import allowed_operators, engine, validation  # noqa: E402

pytestmark = pytest.mark.torch
X = {"input.0": np.ones((2, 3), np.float32)}


def program(
    *operations,
    inputs=("input.0",),
    outputs=None,
    params=(),
    base="float32",
    input_dtypes=("float32",),
):
    outputs = outputs or (("output.0", {"op": [len(operations) - 1, 0]}),)
    return Program(
        id="x",
        operations=operations,
        inputs=inputs,
        outputs=outputs,
        params=params,
        base=base,
        input_dtypes=input_dtypes,
    )


def op(name, *args, guard=None, **kwargs):
    return Operation(name, args, kwargs, guard)


IN = {"in": 0}
MALFORMED = {
    "no such operator": program(op("aten.add.Nothing", IN, IN)),
    "not on the list": program(op("aten.from_file.default", "/etc/passwd", False, 10)),
    "replaces memory": program(op("aten.set_.source_Tensor", IN, IN)),
    "resizes": program(op("aten.resize_.default", IN, [10**6])),
    "random": program(op("aten.rand.default", [2, 3])),
    "random dropout": program(op("aten.native_dropout.default", IN, 0.5, True)),
    "random generator": program(op("aten.bernoulli.default", IN)),
    "writes out=": program(op("aten.add.out", IN, IN, out=IN)),
    "vendor": program(op("mylib.kernel.default", IN)),
    "another module": program(op("torch.load.default", "x")),
    "name with dunder path": program(op("aten.__class__.__init__", IN)),
    "name with spaces": program(op("aten.add .Tensor", IN, IN)),
    "empty name": program(op("", IN)),
    "input out of range": program(op("aten.relu.default", {"in": 1})),
    "negative input": program(op("aten.relu.default", {"in": -1})),
    "input that is a bool": program(op("aten.relu.default", {"in": False})),
    "operation from the future": program(op("aten.relu.default", {"op": [0, 0]})),
    "operation as text": program(op("aten.relu.default", {"op": "00"})),
    "unknown param": program(op("aten.relu.default", {"param": "param.weight"})),
    "unknown constant": program(op("aten.relu.default", {"const": 0})),
    "unknown form": program(op("aten.relu.default", {"eval": "1"})),
    "two keys": program(op("aten.relu.default", {"in": 0, "op": [0, 0]})),
    "an object": program(op("aten.relu.default", object())),
    "bytes": program(op("aten.relu.default", b"x")),
    "unknown dtype": program(op("aten._to_copy.default", IN, dtype={"dtype": "object"})),
    "a device": program(op("aten._to_copy.default", IN, device={"device": "cuda:0"})),
    "a sparse layout": program(op("aten._to_copy.default", IN, layout={"layout": "sparse_coo"})),
    "infinite float": program(op("aten.add.Tensor", IN, math.inf)),
    "huge integer": program(op("aten.add.Tensor", IN, 1 << 80)),
    "long text": program(op("aten.einsum.default", "a" * 5000, [IN])),
    "deep nesting": program(op("aten.cat.default", [[[[[[[[[IN]]]]]]]]])),
    "missing argument": program(op("aten.add.Tensor", IN)),
    "too many arguments": program(op("aten.relu.default", IN, IN)),
    "unknown keyword": program(op("aten.relu.default", IN, inplace=True)),
    "keyword twice": program(op("aten.relu.default", IN, self=IN)),
    "keyword that is not a name": program(Operation("aten.relu.default", (IN,), {"a b": 1})),
    "text for a tensor": program(op("aten.relu.default", "x")),
    "list for a tensor": program(op("aten.relu.default", [IN])),
    "tensor for a size": program(op("aten.view.default", IN, [IN])),
    "float for a size": program(op("aten.view.default", IN, [1.5])),
    "dtype for an int": program(op("aten.sum.dim_IntList", IN, {"dtype": "float32"})),
    "dim out of range": program(op("aten.view.default", IN, [{"dim": [3, 0]}])),
    "mul of text": program(op("aten.view.default", IN, [{"mul": ["a"]}])),
    "cast with more": program(op("whence.cast", IN, {"dtype": "float32"}, "sideways")),
    "cast of a number": program(op("whence.cast", 1, {"dtype": "float32"}, "up")),
    "no outputs": Program(id="x", operations=(), inputs=(), outputs=(), params=()),
    "output that is a number": program(op("aten.relu.default", IN), outputs=(("output.0", 1),)),
    "output named twice": program(op("aten.relu.default", IN), outputs=(("a", IN), ("a", IN))),
    "input named twice": program(op("aten.relu.default", IN), inputs=("a", "a")),
    "note": program(op("aten.relu.default", IN), base="complex64"),
    "note dtype": program(op("aten.relu.default", IN), input_dtypes=("object",)),
    "too long": program(*[op("aten.relu.default", IN)] * (validation.MAX_OPERATIONS + 1)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_programs_are_refused_on_loading(name):
    with pytest.raises(ReplayRefused):
        validation.load(MALFORMED[name])


def test_reasons_are_words():
    with pytest.raises(
        ReplayRefused,
        match=r"operator mylib.kernel.default is not on the list .* allow=\(\"mylib::\",\)",
    ):
        validation.load(MALFORMED["vendor"])
    with pytest.raises(
        ReplayRefused, match=r"aten.from_file.default is not on the list of replayable operators"
    ):
        validation.load(MALFORMED["not on the list"])


def test_an_allowed_vendor_namespace_is_looked_up():
    with pytest.raises(ReplayRefused, match="does not exist in torch"):
        validation.load(MALFORMED["vendor"], allow=("mylib::",))


HUGE = {
    "ones": program(op("aten.ones.default", [1 << 20, 1 << 20]), inputs=()),
    "expand and copy": program(
        op("aten.expand.default", {"op": [1, 0]}, [1 << 18, 1 << 18]), op("aten.clone.default", IN)
    ),
    "repeat": program(op("aten.repeat.default", IN, [1 << 20, 1 << 14])),
    "pad": program(op("aten.constant_pad_nd.default", IN, [0, 1 << 40], 0.0)),
    "arange": program(op("aten.arange.default", 1 << 40), inputs=()),
    "outer": program(
        op("aten.arange.default", 1 << 20),
        op("aten.outer.default", {"op": [0, 0]}, {"op": [0, 0]}),
        inputs=(),
    ),
    "interleave": program(op("aten.repeat_interleave.self_int", IN, 1 << 40)),
    "one hot": program(
        op("aten.arange.start", (1 << 40), (1 << 40) + 2),
        op("aten.one_hot.default", {"op": [0, 0]}, -1),
        inputs=(),
    ),
    "upsample": program(
        op("aten.view.default", IN, [1, 1, 2, 3]),
        op("aten.upsample_nearest2d.default", {"op": [0, 0]}, [1 << 20, 1 << 20], None, None),
    ),
    "composite inside": program(
        op("aten.arange.default", 1 << 22),
        op("aten.vander.default", {"op": [0, 0]}, 1 << 20),
        inputs=(),
    ),
    "einsum": program(
        op("aten.arange.default", 1 << 20),
        op("aten.einsum.default", "i,j->ij", [{"op": [0, 0]}, {"op": [0, 0]}]),
        inputs=(),
    ),
    "bincount": program(
        op("aten.full.default", [1], 1 << 40),
        op("aten.bincount.default", {"op": [0, 0]}, None, 1 << 40),
        inputs=(),
    ),
    "bincount minlength": program(
        op("aten.zeros.default", [1], dtype={"dtype": "int64"}),
        op("aten.bincount.default", {"op": [0, 0]}, None, 1 << 40),
        inputs=(),
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_would_be_too_large_is_refused_before_it_runs(name):
    hostile = HUGE[name]
    if name == "expand and copy":
        hostile = program(
            op("aten.slice.Tensor", IN, 0, 0, 1),
            op("aten.slice.Tensor", {"op": [0, 0]}, 1, 0, 1),
            op("aten.expand.default", {"op": [1, 0]}, [1 << 18, 1 << 18]),
            op("aten.clone.default", {"op": [2, 0]}),
            op("aten.relu.default", {"op": [2, 0]}),
        )
    with pytest.raises(ReplayRefused, match=r"would make \d+ bytes"):
        validation.load(hostile).run(X, {})


@pytest.mark.parametrize(
    ("base", "given", "made"),
    [
        ("one_hot", {"self": torch.tensor([0, 3, 1])}, torch.nn.functional.one_hot),
        (
            "one_hot",
            {"self": torch.tensor([0, 3]), "num_classes": 9},
            torch.nn.functional.one_hot,
        ),
        ("bincount", {"input": torch.tensor([0, 3, 1, 5])}, torch.bincount),
        ("bincount", {"input": torch.tensor([0, 3]), "minlength": 9}, torch.bincount),
        (
            "repeat_interleave",
            {"self": torch.arange(3), "repeats": torch.tensor([4, 0, 2])},
            lambda **given: torch.repeat_interleave(given["self"], given["repeats"]),
        ),
        (
            "repeat_interleave",
            {"self": torch.ones(3, 5, dtype=torch.int64), "repeats": torch.tensor([4, 1, 2])},
            lambda **given: torch.repeat_interleave(given["self"], given["repeats"], 0),
        ),
        ("nonzero", {"input": torch.ones(2, 3, 4)}, torch.nonzero),
    ],
)
def test_what_depends_on_elements_is_bounded_by_what_it_makes(base, given, made):
    """Here every element counts, so that the bound is the size."""
    if base == "one_hot":
        result = made(*given.values())
    else:
        result = made(**given)
    assert engine._bound_by_data(base, given) == 8 * result.numel()


def test_the_limit_is_the_callers():
    small = program(op("aten.mul.Tensor", IN, 2))
    assert validation.load(small).run(X, {})["output.0"].sum() == 12
    with pytest.raises(ReplayRefused, match="at most 10 are allowed"):
        validation.load(small, max_bytes=10).run(X, {})


@pytest.mark.parametrize("number", [1, 3])
def test_an_output_that_an_operator_does_not_have(number):
    with pytest.raises(ReplayRefused, match=f"has no output {number}"):
        validation.load(
            program(op("aten.relu.default", IN), outputs=(("output.0", {"op": [0, number]}),))
        ).run(X, {})


def test_missing_inputs_and_unknown_dtypes_are_refused():
    loaded = validation.load(program(op("aten.relu.default", IN)))
    with pytest.raises(ReplayRefused, match=r"needs input.0"):
        loaded.run({}, {})
    with pytest.raises(ReplayRefused, match="float8"):
        loaded.run(X, {}, working="float8")


def test_every_listed_operator_exists_and_none_draws_from_a_generator():
    assert [b for b in allowed_operators.LISTED if not hasattr(torch.ops.aten, b)] == []
    assert not allowed_operators.LISTED & {
        "set_",
        "resize_",
        "from_file",
        "rand",
        "randn",
        "bernoulli",
        "multinomial",
        "randint",
        "normal",
    }


def test_global_random_state_is_never_touched():
    state = torch.get_rng_state()
    _, recorded = recording.record(torch.nn.Dropout(0.5).eval(), modules.g(3, 4))
    assert recorded.check() == ""
    assert torch.equal(state, torch.get_rng_state())


# ---- the self-check


def test_a_recording_that_lies_is_found():
    _, recorded = recording.record(torch.nn.ReLU(), modules.g(3, 4))
    loaded = recorded.load()
    wrong = {"output.0": recorded.outputs["output.0"] + np.float32(0.5)}
    assert "does not reproduce the recording" in self_check.check(
        loaded, recorded.inputs, {}, wrong
    )
    assert "float64" in self_check.check(
        loaded, recorded.inputs, {}, {"output.0": recorded.outputs["output.0"].astype(np.float64)}
    )
    assert (
        self_check.check(loaded, recorded.inputs, {}, {})
        == "none of its recorded outputs were kept"
    )
    assert "needs input.0" in self_check.check(loaded, {}, {}, recorded.outputs)
    near = {"output.0": np.nextafter(recorded.outputs["output.0"], np.float32(10))}
    assert self_check.check(loaded, recorded.inputs, {}, near) == ""
    assert "within 1 ulp" in loaded.check_note
    assert recorded.check(loaded) == ""
    assert loaded.check_note == ""


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn]
)
def test_ulps(dtype):
    a = np.array([1.0, -2.0, 0.0, np.nan], dtype)
    assert self_check.ulps(a, a.copy()) == 0
    b = a.copy()
    bits = b.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[b.dtype.itemsize])
    bits[1] += 3
    assert self_check.ulps(a, b) == 3
    assert self_check.ulps(np.array([0.0], dtype), np.array([-0.0], dtype)) == 0 + 0
    assert self_check.ulps(a, np.array([1.0, -2.0, np.nan, np.nan], dtype)) == np.inf
    assert self_check.ulps(np.zeros(0, dtype), np.zeros(0, dtype)) == 0
    assert self_check.ulps(np.array([np.nan], dtype), -np.array([np.nan], dtype)) == 0


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_a_complex_number_is_as_far_as_its_further_part(dtype):
    real = np.finfo(dtype).dtype.type
    a = np.array([complex(1.5, -2.5), complex(3.0, 4.0)], dtype)
    b = a.copy()
    b.imag[1] = np.nextafter(real(4.0), real(5.0))
    b.real[1] = np.nextafter(np.nextafter(real(3.0), real(0.0)), real(0.0))
    assert self_check.ulps(a, b) == 2
    b.real[0] = np.nan
    assert self_check.ulps(a, b) == np.inf


def test_ulps_of_exact_kinds_and_complex():
    assert self_check.ulps(np.array([1, 2]), np.array([1, 3])) == np.inf
    assert self_check.ulps(np.array([True]), np.array([True])) == 0
    z = np.array([1 + 1j], np.complex64)
    assert self_check.ulps(z, z + np.float32(2**-23)) == 1
    far = np.array([np.finfo(np.float64).max]), np.array([-np.finfo(np.float64).max])
    assert self_check.ulps(*far) > 1e19 / 2
