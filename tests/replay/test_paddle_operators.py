"""Operators of Paddle as programs: against what Paddle itself computes, and against numpy in
float64 where it stands alone.

Every operator that is known must be in one of the two: a new one without a test fails.
"""

import importlib.util
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import warm
import whence
from whence.comparison.programs import programs as statics
from whence.errors import ReplayRefused
from whence.replay import paddle_translation, validation
from whence.replay.paddle_translation import Operand

pytestmark = pytest.mark.torch
CAPTURE = Path(__file__).parent.parent / "instrument"
RANDOM = np.random.default_rng(0)


def some(*shape):
    return RANDOM.standard_normal(shape)


def computed(op_type, attributes, operands, outputs=("Out",), made=None):
    """What the program of an operator computes in float64. operands: slot -> array."""
    given = {
        slot: Operand(f"input.{slot}", str(array.dtype), array.shape)
        for slot, array in operands.items()
    }
    program = paddle_translation.program(
        op_type, attributes, given, {o: f"output.{o}" for o in outputs}, made or {}
    )
    loaded = validation.load(program, [])
    found = loaded.run({slot: operands[slot[6:]] for slot in program.inputs}, {}, working="float64")
    return {slot[7:]: array for slot, array in found.items()}


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(0, "bool"), (1, "int16"), (2, "int32"), (3, "int64"), (20, "uint8"), (21, "int8")]
    + [(code, "float64") for code in (4, 5, 6, 22)]  # in a run in float64
    + [(code, "complex128") for code in (23, 24)],
)
def test_a_number_names_the_dtype_that_paddles_format_gives_it(code, dtype):
    """VarType.Type of framework.proto."""
    x = np.array([0.0, 1.0, 2.0, 3.0])
    out = computed("cast", {"out_dtype": code}, {"X": x})["Out"]
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, x.astype(dtype))


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def normed(x, axes, epsilon):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attention(q, k, v, scale, mask=0.0):
    """(batch, token, head, channel), heads of k and v repeated."""
    times = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, np.repeat(k, times, 2), np.repeat(v, times, 2)))
    return (softmax(q @ k.swapaxes(-1, -2) * scale + mask) @ v).transpose(0, 2, 1, 3)


def convolved(x, w, stride=1, pad=0):
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[
        :, :, ::stride, ::stride
    ]
    return np.einsum("bchwij,ocij->bohw", windows, w)


X, Y, V, P = some(2, 3, 4), some(2, 3, 4), some(4), np.abs(some(2, 3, 4)) + 0.1
M, W, B, IMAGE, KERNEL = some(4, 5), some(5, 4), some(5), some(1, 2, 5, 5), some(3, 2, 3, 3)
IDS, Q, K = np.array([[0, 2], [1, 2]]), some(1, 3, 4, 8), some(1, 5, 2, 8)
MASK = some(1, 4, 3, 5)
CAUSAL = np.triu(np.full((3, 5), -np.inf), 3)
LAST = {"axis": -1}

# operator, attributes, operands, expected (of "Out", or by slot)
CASES = [
    *(
        (f"elementwise_{name}", {"axis": axis}, {"X": P, "Y": y}, f(P, shaped))
        for names, f in (
            (("add",), np.add),
            (("sub", "subtract"), np.subtract),
            (("mul", "multiply"), np.multiply),
            (("div", "divide"), np.divide),
            (("max", "maximum"), np.maximum),
            (("min", "minimum"), np.minimum),
            (("pow",), np.power),
            (("floordiv", "floor_divide"), np.floor_divide),
            (("mod", "remainder"), np.mod),
        )
        for name in names
        for axis, y, shaped in (
            (-1, P[1] + 0.3, P[1] + 0.3),
            (1, P[0, :, 0] + 0.3, (P[0, :, 0] + 0.3)[:, None]),
        )
    ),
    *(
        (
            f"fused_elementwise_{name}",
            {"fuse_activation": "relu"},
            {"X": X, "Y": Y},
            np.maximum(f(X, Y), 0),
        )
        for name, f in (
            ("add", np.add),
            ("sub", np.subtract),
            ("mul", np.multiply),
            ("div", np.divide),
        )
    ),
    ("floordiv", {}, {"0": P, "1": np.full((4,), 0.3)}, np.floor_divide(P, 0.3)),
    ("matmul_v2", {"trans_x": True, "trans_y": True}, {"X": X, "Y": some(2, 5, 3)}, None),
    ("matmul_v2", {"trans_x": False, "trans_y": True}, {"X": V, "Y": X}, X @ V),
    (
        "matmul",
        {"transpose_X": False, "transpose_Y": True, "alpha": 0.5},
        {"X": X, "Y": Y},
        0.5 * X @ Y.swapaxes(-1, -2),
    ),
    ("mul", {"x_num_col_dims": 2, "y_num_col_dims": 1}, {"X": X, "Y": M}, X @ M),
    ("mul", {"x_num_col_dims": 1, "y_num_col_dims": 2}, {"X": X, "Y": some(3, 4, 5)}, None),
    (
        "fc",
        {"in_num_col_dims": 2, "activation_type": "relu"},
        {"Input": X, "W": M, "Bias": B},
        np.maximum(X @ M + B, 0),
    ),
    (
        "fc",
        {"in_num_col_dims": 2, "fuse_activation": "relu", "fused_output_scale": 2.5},
        {"Input": X, "W": M, "Bias": B},
        2.5 * np.maximum(X @ M + B, 0),
    ),
    ("fc", {"in_num_col_dims": 1}, {"Input": X, "W": some(12, 2)}, None),
    ("linear", {}, {"0": X, "1": M, "2": B}, X @ M + B),
    ("linear_v2", {}, {"0": X, "1": M, "2": B}, X @ M + B),
    (
        "fused_gemm_epilogue",
        {"trans_x": False, "trans_y": True, "activation": "relu"},
        {"X": X[0], "Y": W, "Bias": B},
        np.maximum(X[0] @ W.T + B, 0),
    ),
    (
        "fused_gemm_epilogue",
        {"trans_x": True, "trans_y": False, "activation": "none"},
        {"X": M, "Y": M, "Bias": B},
        M.T @ M + B,
    ),
    (
        "fused_matmul",
        {"trans_y": True, "matmul_alpha": 0.25, "fuse_activation": "swish", "fuse_alpha": 1.3},
        {"X": X, "Y": Y, "ResidualData": np.ones((2, 3, 3))},
        None,
    ),
    (
        "fused_matmul",
        {"fused_reshape_x": [0, 2, 2, 3], "fused_transpose_x": [0, 2, 1, 3]},
        {"X": some(2, 2, 6), "Y": some(2, 2, 3, 2)},
        None,
    ),
    (
        "fused_conv2d",
        {"strides": [2, 2], "paddings": [1, 1], "fuse_activation": "relu"},
        {"Input": IMAGE, "Filter": KERNEL, "Bias": np.arange(3.0)},
        np.maximum(convolved(IMAGE, KERNEL, 2, 1) + np.arange(3.0)[:, None, None], 0),
    ),
    (
        "conv2d",
        {"strides": [1, 1], "paddings": [0, 0]},
        {"Input": IMAGE, "Filter": KERNEL},
        convolved(IMAGE, KERNEL),
    ),
    ("hard_sigmoid", {"slope": 0.3, "offset": 0.4}, {"X": X}, np.clip(X * 0.3 + 0.4, 0, 1)),
    ("hard_swish", {}, {"X": 3 * X}, 3 * X * np.clip(3 * X + 3, 0, 6) / 6),
    ("swish", {"beta": 1.7}, {"X": X}, X * sigmoid(1.7 * X)),
    ("swiglu", {}, {"0": X}, X[..., :2] * sigmoid(X[..., :2]) * X[..., 2:]),
    ("swiglu", {}, {"0": X, "1": Y}, X * sigmoid(X) * Y),
    ("logical_not", {}, {"X": X > 0}, ~(X > 0)),
    (
        "gelu",
        {"approximate": False},
        {"X": X},
        X * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(X),
    ),
    (
        "gelu",
        {"approximate": True},
        {"X": X},
        0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))),
    ),
    ("scale", {"scale": 2.0, "bias": 1.0, "bias_after_scale": False}, {"X": X}, (X + 1) * 2),
    (
        "scale",
        {"bias": 0.5, "bias_after_scale": True},
        {"X": X, "ScaleTensor": np.array([3.0])},
        X * 3 + 0.5,
    ),
    ("softmax", {"axis": 1}, {"X": X}, softmax(X, 1)),
    ("reduce_mean", {"dim": [1], "keep_dim": True}, {"X": X}, X.mean(1, keepdims=True)),
    ("reduce_sum", {"dim": [0, -1], "keep_dim": False}, {"X": X}, X.sum((0, 2))),
    ("reduce_max", {"dim": [0], "reduce_all": True}, {"X": X}, X.max()),
    ("reduce_min", {"dim": [-1]}, {"X": X}, X.min(-1)),
    ("reduce_amax", {"dim": [-1]}, {"X": X}, X.max(-1)),
    ("reduce_amin", {"dim": [-1]}, {"X": X}, X.min(-1)),
    (
        "reduce_logsumexp",
        {"axis": [1], "keepdim": True},
        {"X": X},
        np.log(np.exp(X).sum(1, keepdims=True)),
    ),
    (
        "layer_norm",
        {"begin_norm_axis": 1, "epsilon": 0.3},
        {"X": X, "Scale": some(12) * 0 + 2, "Bias": np.arange(12.0)},
        {
            "Y": normed(X, (1, 2), 0.3) * 2 + np.arange(12.0).reshape(3, 4),
            "Mean": X.mean((1, 2)),
            "Variance": X.var((1, 2)),
        },
    ),
    (
        "rms_norm",
        {"epsilon": 0.2, "begin_norm_axis": 2},
        {"0": X, "1": V},
        X / np.sqrt((X**2).mean(-1, keepdims=True) + 0.2) * V,
    ),
    (
        "rms_norm",
        {"epsilon": 0.2},
        {"0": X, "1": X[0]},
        X / np.sqrt((X**2).mean((1, 2), keepdims=True) + 0.2) * X[0],
    ),
    (
        "sync_batch_norm",
        {"is_test": True, "epsilon": 0.1},
        {
            "X": X,
            "Scale": P[0, :, 0],
            "Bias": P[0, :, 1],
            "Mean": P[0, :, 2],
            "Variance": P[0, :, 3],
        },
        {
            "Y": (X - P[0, :, 2, None]) / np.sqrt(P[0, :, 3, None] + 0.1) * P[0, :, 0, None]
            + P[0, :, 1, None]
        },
    ),
    ("arg_max", {"axis": 1, "keepdims": True}, {"X": X}, X.argmax(1)[:, None]),
    ("arg_min", {"axis": 0, "flatten": True}, {"X": X}, X.argmin()),
    ("lookup_table_v2", {"padding_idx": 2}, {"Ids": IDS, "W": W}, W[IDS] * (IDS != 2)[..., None]),
    ("lookup_table", {"padding_idx": -1}, {"Ids": IDS, "W": W}, W[IDS]),
    ("reshape2", {"shape": [0, -1, 2]}, {"X": X}, X.reshape(2, 6, 2)),
    ("transpose2", {"axis": [2, 0, 1]}, {"X": X}, X.transpose(2, 0, 1)),
    ("squeeze2", {"axes": [0]}, {"X": X[:1]}, X[0]),
    ("unsqueeze2", {"axes": [1]}, {"X": X}, X[:, None]),
    ("flatten_contiguous_range", {"start_axis": 1, "stop_axis": 2}, {"X": X}, X.reshape(2, 12)),
    ("expand_v2", {"shape": [2, 3, 4]}, {"X": X[:1]}, np.broadcast_to(X[:1], (2, 3, 4))),
    ("expand_as_v2", {"target_shape": [2, 3, 4]}, {"X": X[:1]}, np.broadcast_to(X[:1], (2, 3, 4))),
    (
        "slice",
        {"axes": [1, 2], "starts": [-2, 1], "ends": [9, -1], "decrease_axis": []},
        {"Input": X},
        X[:, -2:9, 1:-1],
    ),
    (
        "strided_slice",
        {"axes": [2], "starts": [-1], "ends": [-9], "strides": [-2]},
        {"Input": X},
        X[:, :, ::-2],
    ),
    ("tril_triu", {"lower": True, "diagonal": -1}, {"X": X}, np.tril(X, -1)),
    ("tril_triu", {"lower": False, "diagonal": 1}, {"X": X}, np.triu(X, 1)),
    ("sum", {}, {"X.0": X, "X.1": Y}, X + Y),
    ("sum", {"axis": [1], "keepdim": True}, {"0": X}, X.sum(1, keepdims=True)),
    (
        "flash_attn",
        {"causal": True, "is_test": True},
        {"0": Q, "1": K, "2": K},
        attention(Q, K, K, 8**-0.5, CAUSAL),
    ),
    (
        "flash_attn",
        {"causal": False, "is_test": True},
        {"0": Q, "1": K, "2": K, "4": MASK},
        attention(Q, K, K, 8**-0.5, MASK),
    ),
    (
        "memory_efficient_attention",
        {"scale": 0.3, "is_test": True},
        {"0": Q, "1": K, "2": K, "3": MASK},
        attention(Q, K, K, 0.3, MASK),
    ),
    (
        "variable_length_memory_efficient_attention",
        {"scale": 0.3},
        {
            "0": Q.transpose(0, 2, 1, 3),
            "1": K.transpose(0, 2, 1, 3),
            "2": K.transpose(0, 2, 1, 3),
            "5": MASK,
        },
        attention(Q, K, K, 0.3, MASK).transpose(0, 2, 1, 3),
    ),
    *(
        (name, {}, {"X": X}, X)
        for name in (
            "share_data",
            "memcpy",
            "memcpy_h2d",
            "memcpy_d2h",
            "contiguous",
            "transfer_layout",
            "onednn_to_paddle_layout",
        )
    ),
]


def written_out(op_type, given):
    """The expected results that take more than an expression."""
    a, b = given["X" if "X" in given else "Input"], given.get("Y", given.get("W"))
    if op_type == "matmul_v2":
        return a.swapaxes(-1, -2) @ b.swapaxes(-1, -2)
    if op_type in ("mul", "fc"):
        return a.reshape(2, 12) @ b.reshape(12, -1)
    if "ResidualData" in given:
        z = 0.25 * a @ b.swapaxes(-1, -2) + 1
        return z * sigmoid(1.3 * z)
    return a.reshape(2, 2, 2, 3).transpose(0, 2, 1, 3) @ b


@pytest.mark.parametrize(
    ("op_type", "attributes", "given", "expected"),
    CASES,
    ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)],
)
def test_computes_what_numpy_does(op_type, attributes, given, expected):
    expected = written_out(op_type, given) if expected is None else expected
    expected = expected if isinstance(expected, dict) else {"Out": np.asarray(expected)}
    made = {slot: array.shape for slot, array in expected.items()}
    found = computed(op_type, attributes, given, tuple(expected), made)
    for slot, array in expected.items():
        assert found[slot].shape == array.shape
        np.testing.assert_allclose(found[slot], array, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("op_type", "attributes", "given"),
    [
        ("block_multihead_attention", {}, {"X": X}),
        ("dropout", {"p": 0.5, "is_test": False}, {"X": X}),
        ("batch_norm", {"is_test": False}, {"X": X}),
        ("cumsum", {"reverse": True}, {"X": X}),
        ("elementwise_add", {"Scale_x": 3.0}, {"X": X, "Y": Y}),
        ("fc", {"scale_in": 2.0}, {"Input": X, "W": M}),
    ],
)
def test_refuses_what_it_does_not_know(op_type, attributes, given):
    with pytest.raises(ReplayRefused):
        computed(op_type, attributes, given)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A run of a program with one operator after the other, with the programs that replay takes."""
    if importlib.util.find_spec("paddle") is None:
        pytest.skip("paddlepaddle is not installed: pip install paddlepaddle==3.3.1")
    folder = tmp_path_factory.mktemp("zoo")
    script = folder / "run.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(CAPTURE)!r})\nimport paddle_operator_zoo as zoo\n"
        "from paddle.inference import Config, create_predictor\n"
        "config = Config('zoo.json', "
        "'zoo.pdiparams')\nconfig.disable_glog_info()\nconfig.disable_mkldnn()\n"
        "made = create_predictor(config)\n"
        "for name, array in zip(made.get_input_names(), zoo.given()): "
        "made.get_input_handle(name).copy_from_cpu(array)\nmade.run()\n"
    )
    for words in (
        [CAPTURE / "paddle_operator_zoo.py", "."],
        ["-m", "whence", "run", "-o", "run", "--", warm.PADDLE, script],
    ):
        done = subprocess.run(
            [warm.PADDLE, *map(str, words)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            env=dict(os.environ),
        )
        assert done.returncode == 0, done.stderr[-3000:]
    run = whence.open_run(str(folder / "run"))
    return statics.apply_programs(run, run, ())[0]


@pytest.mark.paddle
def test_computes_what_paddle_does(zoo):
    wrong, right = [], set()
    for call in (c for c in zoo.calls if c.kind == "operator"):
        if not call.program:
            wrong.append((call.op_type, call.no_program))
            continue
        program, arrays = (
            zoo.programs[call.program],
            {r.slot: zoo.array(r.record) for r in call.refs},
        )
        found = validation.load(program, []).run(
            {s: arrays[s] for s in program.inputs},
            {s: arrays[s] for s in program.params},
            working="float64",
        )
        same = all(
            a.shape == arrays[s].shape and np.allclose(a, arrays[s], 1e-5, 1e-5, equal_nan=True)
            for s, a in found.items()
        )
        (right.add(call.op_type) if same else wrong.append((call.op_type, call.scope)))
    # Paddle changes the layout around one pooling after it has saved the program; what it did then
    # is not believed, not taken.
    assert [w for w in wrong if w[0] not in ("transpose", "pool2d")] == []
    assert len([w for w in wrong if w[0] == "pool2d"]) <= 1
    assert "transpose" in right
    assert "pool2d" in right
    tested = right | {case[0] for case in CASES}
    assert sorted(name for name in paddle_translation.known() if name not in tested) == []
