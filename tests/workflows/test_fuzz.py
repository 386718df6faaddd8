"""Kernels against their references on shapes, layouts and values."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import whence
from whence.cli import execute
from whence.errors import UsageError
from whence.results import FaultKind
from whence.workflows.operator_fuzz.forms import form
from whence.workflows.operator_fuzz.fuzz import LAYOUTS, VALUES, Case, LaidOut, arrays, plan

pytestmark = pytest.mark.torch
torch.set_num_threads(1)
HERE = Path(__file__).parent
ROWS = ("x: float32[rows, cols]",)
NORM = (*ROWS, "w: float32[cols]")


@pytest.fixture(autouse=True)
def kernels_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def tried(kernel, reference, inputs=ROWS, **how):
    return whence.fuzz(f"fuzzed_kernels:{kernel}", f"fuzzed_kernels:{reference}", inputs, **how)


@pytest.mark.parametrize(
    ("kernel", "reference", "inputs", "how"),
    [
        ("tiled_total", "total", ROWS, {}),
        ("softmax", "softmax", ("x: bfloat16[rows, cols]",), {}),
        ("scaled", "scaled", NORM, {"arguments": {"eps": 1e-6}}),
        ("numba_maximum", "maximum", ROWS, {}),
        ("custom_doubled", "doubled", ("x: float16[n]",), {}),
    ],
)
def test_sound_kernels_are_silent(kernel, reference, inputs, how):
    result = tried(kernel, reference, inputs, cases=70, **how)
    assert result.status == "same" and result.cases > 50, result.faults


@pytest.mark.parametrize(
    ("kernel", "reference", "inputs", "kind", "how"),
    [
        ("total_without_tail", "total", ROWS, FaultKind.WRONG, {}),
        ("bare_softmax", "softmax", ROWS, FaultKind.NOT_FINITE, {}),
        ("scaled_once", "scaled", NORM, FaultKind.KEEPS_STATE, {"arguments": {"eps": 1e-6}}),
        ("scaled_in_place", "scaled", NORM, FaultKind.WRITES_INPUT, {"arguments": {"eps": 1e-6}}),
        ("numba_maximum_from_zero", "maximum", ROWS, FaultKind.WRONG, {}),
        ("total_of_memory", "total", ROWS, FaultKind.WRONG, {}),
        ("crashing", "total", ROWS, FaultKind.RAISES, {}),
        ("custom_doubled_in_half", "doubled", ("x: float32[n]",), FaultKind.WRONG, {}),
    ],
)
def test_faults_are_named(kernel, reference, inputs, kind, how):
    faults = tried(kernel, reference, inputs, cases=100, **how).faults
    assert kind in {fault.kind for fault in faults}


def test_a_failing_input_is_shrunk():
    (fault,) = tried("total_without_tail", "total", cases=60).faults
    assert fault.case.startswith("rows=1, cols=33") and fault.cases > 1
    assert fault.got is not None and fault.got != pytest.approx(fault.exact)


def test_the_written_test_fails_on_the_fault_and_passes_when_it_is_mended(tmp_path):
    (fault,) = tried("total_without_tail", "total", cases=60, tests=tmp_path).faults
    text = Path(fault.test).read_text()
    compile(text, fault.test, "exec")
    namespace = {"__file__": fault.test}
    exec(text, namespace)  # noqa: S102 - the file that was just written
    (check,) = [value for name, value in namespace.items() if name.startswith("test_")]
    with pytest.raises(AssertionError, match="times what rounding makes"):
        check()
    mended = {"__file__": fault.test}
    exec(text.replace("total_without_tail", "tiled_total"), mended)  # noqa: S102
    next(value for name, value in mended.items() if name.startswith("test_"))()


def test_the_exact_result_alone_answers_where_it_can(monkeypatch):
    import fuzzed_kernels

    calls = []
    monkeypatch.setattr(fuzzed_kernels, "doubled", lambda x: calls.append(x.dtype) or x * 2)
    kernel, reference = "fuzzed_kernels:custom_doubled", "fuzzed_kernels:doubled"
    assert whence.fuzz(kernel, reference, ("x: float32[n]",), cases=40).status == "same"
    assert set(calls) == {torch.float64}


def test_what_a_kernel_refuses_is_no_fault():
    result = tried("picky", "total", cases=60)
    assert result.status == "same" and result.refused > 20
    assert "multiple of 8" in result.refusal


def test_kinds_of_values_may_be_left_out():
    without = ["large", "negative", "wide", "cancelling", "spike", "row of -inf", "inf", "-inf"]
    without += ["nan"]
    assert tried("bare_softmax", "softmax", cases=40, without=without).status == "same"
    with pytest.raises(UsageError, match="no values are called 'infinite'"):
        tried("bare_softmax", "softmax", without=["infinite"])


def test_bad_words_say_what_is_wanted():
    with pytest.raises(UsageError, match="cannot read the form"):
        tried("total", "total", ("float32 x",))
    with pytest.raises(UsageError, match="no dtype is called 'float31'"):
        tried("total", "total", ("x: float31[n]",))
    with pytest.raises(UsageError, match="say what the kernel takes"):
        tried("total", "total", ())
    with pytest.raises(UsageError, match="has no nothing"):
        tried("nothing", "total")
    with pytest.raises(UsageError, match="refuses every input"):
        whence.fuzz(_refusing, "fuzzed_kernels:doubled", ROWS, cases=5)
    with pytest.raises(UsageError, match="a test names the kernel"):
        whence.fuzz(torch.neg, torch.neg, ROWS, cases=1, tests="found")


def _refusing(x):
    raise NotImplementedError("on this device")


def test_every_kind_of_values_and_every_layout_is_tried():
    cases = list(plan([form(text) for text in ROWS], 160))
    assert {case.values for case in cases} == set(VALUES)
    assert {case.layout for case in cases} == set(LAYOUTS)
    assert {0, 1, 31, 32, 33, 127, 1025} <= {case.size_of["cols"] for case in cases}
    assert len(cases) == 160 and cases == list(plan([form(text) for text in ROWS], 160))


@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(3, 5), (1, 1), (0, 4), (4, 0)])
def test_layouts_hold_the_same_values(layout, size, is_torch):
    case = Case((("rows", size[0]), ("cols", size[1])), layout=layout)
    (array,) = arrays([form(ROWS[0])], case).values()
    held = LaidOut(array, layout, is_torch)
    assert np.array_equal(np.asarray(held.value), array) and not held.is_written()
    if array.size:
        if layout == "one row repeated":
            return
        held.value[0, 0] = 7
        assert held.is_written()


C = """
void total(const float *x, float *y, long rows, long cols) {
    for (long r = 0; r < rows; r++) {
        double sum = 0;
        for (long c = 0; c < cols; c++) sum += x[r * cols + c];
        y[r] = (float)sum;
    }
}
void total_by_fours(const float *x, float *y, long rows, long cols) {
    for (long r = 0; r < rows; r++) {
        double sum = 0;
        for (long c = 0; c + 4 <= cols; c += 4)
            for (long k = 0; k < 4; k++) sum += x[r * cols + c + k];
        y[r] = (float)sum;
    }
}
void total_and_one_more(const float *x, float *y, long rows, long cols) {
    total(x, y, rows, cols);
    y[rows] = 0;
}
void total_or_none(const float *x, float *y, long rows, long cols) {
    if (cols == 1) x = 0, y = 0, rows = 1;
    total(x, y, rows, cols);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_functions_of_c(tmp_path):
    (tmp_path / "kernels.c").write_text(C)
    library = tmp_path / "kernels.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "kernels.c"], check=True)
    how = {"outputs": ["y: float32[rows]"], "cases": 60}
    reference = "fuzzed_kernels:total"
    assert whence.fuzz(f"{library}:total", reference, ROWS, **how).status == "same"
    (tail,) = whence.fuzz(f"{library}:total_by_fours", reference, ROWS, **how).faults[:1]
    assert tail.kind in (FaultKind.WRONG, FaultKind.NOT_FINITE) and "cols=1" in tail.case
    (outside,) = whence.fuzz(f"{library}:total_and_one_more", reference, ROWS, **how).faults
    assert outside.kind == FaultKind.WRITES_OUTSIDE and "y" in outside.words
    (crash,) = whence.fuzz(f"{library}:total_or_none", reference, ROWS, **how).faults
    assert crash.kind == FaultKind.RAISES and "crashes" in crash.words and "cols=1" in crash.case
    with pytest.raises(UsageError, match="say what it writes"):
        whence.fuzz(f"{library}:total", reference, ROWS)
    with pytest.raises(UsageError, match="cannot be loaded"):
        whence.fuzz(f"{library}:none", reference, ROWS, **how)


def test_an_onnx_file_against_the_definition_of_its_operators(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper = onnx.helper
    node = helper.make_node("Softmax", ["x"], ["y"], axis=-1)
    kinds = [helper.make_tensor_value_info(n, 1, ["rows", "cols"]) for n in ("x", "y")]
    graph = helper.make_graph([node], "g", kinds[:1], kinds[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "softmax.onnx")
    result = whence.fuzz(str(tmp_path / "softmax.onnx"), cases=50)
    assert result.cases > 40
    assert {fault.kind for fault in result.faults} <= {FaultKind.NOT_FINITE}, result.faults


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Embedding(40, 16), torch.nn.LayerNorm(16))
    with whence.capture(model.eval(), "run"), torch.no_grad():
        model(torch.randint(0, 40, (3, 7)))
    return "run"


def test_a_recorded_call_against_its_program_in_float64(run):
    result = whence.fuzz(f"{run}:1", cases=60)
    assert result.status == "same" and result.cases > 40, result.faults
    assert whence.fuzz(f"{run}:0", cases=30).cases > 20  # numbers of rows stay within the table
    with pytest.raises(UsageError, match="has no call 'layer'"):
        whence.fuzz(f"{run}:layer")
    with pytest.raises(UsageError, match="name one of them"):
        whence.fuzz(f"{run}:")


def test_a_kernel_against_a_recorded_call(run, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef norm(x, b, w):\n"
        "    centred = x - x.mean(-1, keepdim=True)\n"
        "    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-3) * w + b\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        (fault, *_) = whence.fuzz("mine:norm", f"{run}:1", cases=60, tests="found").faults
        assert fault.kind == FaultKind.WRONG and Path(fault.test).is_file()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", fault.test], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "times what rounding makes" in done.stdout
    finally:
        sys.path.remove(str(tmp_path))


TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def double(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

def doubled(x):
    x, y = x.contiguous(), torch.empty(x.shape)
    double[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), SIZE=64)
    return y

def doubled_in_whole_tiles(x):
    x, y = x.contiguous(), torch.zeros(x.shape)
    double[(x.numel() // 64,)](x, y, x.numel(), SIZE=64)
    return y
"""


def test_triton_in_its_interpreter(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    (tmp_path / "in_triton.py").write_text(TRITON)
    monkeypatch.syspath_prepend(str(tmp_path))
    how = {"inputs": ("x: float32[n]",), "cases": 60, "without": ("inf", "-inf", "nan")}
    assert whence.fuzz("in_triton:doubled", "fuzzed_kernels:doubled", **how).status == "same"
    (fault, *_) = whence.fuzz(
        "in_triton:doubled_in_whole_tiles", "fuzzed_kernels:doubled", **how
    ).faults
    assert fault.kind == FaultKind.WRONG and fault.case.startswith("n=1")


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "ops",
        "fuzz",
        "fuzzed_kernels:scaled_in_place",
        "fuzzed_kernels:scaled",
        "--cases",
        "4",
    ]
    words += ["--input", NORM[0], "--input", NORM[1], "--argument", "eps=1e-6"]
    assert execute(words) == 1
    assert "FAULT" in (out := capsys.readouterr().out) and "writes its input" in out
    assert execute([*words, "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["kind"] == "writes its input"
    words[2] = "fuzzed_kernels:scaled"
    assert execute(words) == 0
    assert "SOUND" in capsys.readouterr().out
    assert execute([*words[:-1], "eps"]) == 3
    assert sys.modules["fuzzed_kernels"]
