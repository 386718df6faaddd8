"""What generated tests stand on: tensors rebuilt as recorded, figures against numpy, references
that no simulated device touches.
"""

import ast
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from whence.frameworks.torch_arrays import to_host  # noqa: E402
from whence.judge import replay_error  # noqa: E402
from whence.replay import stepwise  # noqa: E402
from whence.replay.export import pytest_files, support, three_way  # noqa: E402
from whence.replay.export.support import __main__ as runner  # noqa: E402
from whence.replay.export.support import check as reproduced  # noqa: E402
from whence.replay.export.support import tensor  # noqa: E402

pytestmark = pytest.mark.torch
NOWHERE = support.Settings(Path("nowhere"))
STRIDES = [
    ((3, 4), None),
    ((3, 4), (1, 3)),
    ((3, 4), (0, 1)),
    ((5, 3), (1, 1)),
    ((2, 0, 3), None),
    ((), None),
    ((2, 3, 2), (9, 3, 1)),
    ((1,), (7,)),
]


def test_it_needs_torch_and_nothing_else(tmp_path):
    pytest_files._copy_support(tmp_path / "operator_support")
    files = list((tmp_path / "operator_support").glob("*.py"))
    nodes = [n for file in files for n in ast.walk(ast.parse(file.read_text()))]
    found = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    found |= {(n.module or "").split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom)}
    own = {"torch", "pytest", "operator_support"}
    assert len(files) == 11 and found - set(sys.stdlib_module_names) == own


CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.getgroup("operators").addoption("--seed", type=int, default=0)

def pytest_configure(config):
    if config.option.seed == 9:
        raise pytest.UsageError("no such seed")

@pytest.fixture
def check(request):
    def checked(sample):
        assert sample != request.config.option.seed, request.node.name
    return checked
"""
TESTS = """
import pytest

@pytest.mark.parametrize("sample", [3, 14])
def test_addmm(check, sample):
    check(sample)

def test_topk(check):
    pytest.skip("of no kind")
"""


def test_tests_run_without_pytest(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest", pytest)  # which is put back
    (tmp_path / "conftest.py").write_text(CONFTEST)
    assert runner.main(tmp_path, []) == 1  # nothing ran
    (tmp_path / "test_addmm.py").write_text(TESTS)
    capsys.readouterr()
    assert runner.main(tmp_path, []) == 0
    assert capsys.readouterr().out == "2 passed, 1 skipped\n"
    assert runner.main(tmp_path, ["--seed", "14"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAILED test_addmm.py::test_addmm[14] - test_addmm[14]")
    assert said.endswith("1 passed, 1 failed, 1 skipped\n")
    with pytest.raises(SystemExit, match="no such seed"):
        runner.main(tmp_path, ["--seed", "9"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.5, 3.0, 100.0])
def test_the_travelling_score_is_that_of_replay(dtype, factor):
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn(40, 64, generator=generator, dtype=torch.float64)
    noise = torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    u = torch.finfo(dtype).eps / 2
    working = wide.to(dtype)
    output = (wide * (1 + factor * u * noise)).to(dtype)
    output[3, 5] = math.nan
    wide[3, 5] = math.nan
    working[3, 5] = math.nan
    replayed = replay_error.measure(*map(to_host, (output, wide, working)), reduction_length=64)
    parts = replayed.parts()
    travelling = support.measure(output, wide, [working], length=64)
    assert travelling.local == pytest.approx(replayed.rho, rel=1e-9)
    assert travelling.score == pytest.approx(max(parts["rho"], parts["z"]), rel=1e-9)
    in_a_script, _ = three_way.beyond_rounding(output, wide, working, 64)
    assert in_a_script == pytest.approx(travelling.score, rel=1e-9)


@pytest.mark.parametrize(
    ("index", "beyond"), [([0, 3], False), ([0, 4], True), ([-1, 0], True), ([3, 900], True)]
)
def test_an_index_beyond_its_tensor_is_wrong(index, beyond):
    x = torch.tensor([5.0, 3.0, 4.0, 7.0])
    pick = reproduced.picks_of(torch.ops.aten.topk.default, {"self": x, "k": 2})["output.1"]
    if beyond:
        with pytest.raises(reproduced.Wrong, match="beyond its tensor"):
            pick(torch.tensor(index))
    else:
        assert pick(torch.tensor(index)).tolist() == [5.0, 7.0]


def bits(t):
    t = torch.view_as_real(t) if t.is_complex() else t
    return torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize(("shape", "stride"), STRIDES)
def test_a_tensor_is_rebuilt_bit_by_bit_in_its_layout(dtype, shape, stride, tmp_path):
    spec = tensor(dtype, shape, stride=stride, offset=5 if stride else 0, data={1: "x"})
    kind = support.DTYPES[dtype]
    size = spec.reach + 3
    owner = torch.randint(0, 100, (size * kind.itemsize,), dtype=torch.uint8)
    owner = (owner % 2).to(torch.bool) if kind is torch.bool else owner.view(kind)
    recorded = owner.as_strided(shape, spec.stride, spec.offset)
    raw = bytes(bits(recorded).tolist())
    head = json.dumps(
        {"x": {"dtype": "U8", "shape": [len(raw)], "data_offsets": [3, 3 + len(raw)]}}
    ).encode()
    (tmp_path / "data.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + b"???" + raw
    )
    value = support.Data(tmp_path / "data.safetensors").read("x", dtype, shape)
    made = support.Built({"x": spec}, {"x": value}).make()["x"]
    assert (made.dtype, tuple(made.shape), made.stride()) == (kind, shape, spec.stride)
    assert torch.equal(bits(made), bits(recorded))
    wide = support.Built({"x": spec}, {"x": value}).make(floating=torch.float64)["x"]
    assert wide.stride() == spec.stride
    assert wide.dtype is (
        torch.float64 if kind.is_floating_point else torch.complex128 if kind.is_complex else kind
    )


def test_tensors_that_share_memory_do_so_again():
    whole = torch.arange(12.0)
    a, b = (
        tensor("float32", (8,), storage="m"),
        tensor("float32", (2, 3), stride=(3, 1), offset=6, storage="m"),
    )
    built = support.Built(
        {"a": a, "b": b, "c": [a]}, {"a": whole[:8], "b": whole[6:].reshape(2, 3), "c.0": whole[:8]}
    )
    made = built.make()
    made["a"][6] = -1
    assert made["b"][0, 0] == -1
    assert made["c"][0][6] == -1
    assert built.make()["b"][0, 0] == 6, "each call gets tensors of its own"


def ulps(a, b):
    """Distance in representable numbers, by walking them."""
    steps = 0
    while a != b:
        a, steps = np.nextafter(a, b), steps + 1
    return steps


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_figures_against_numpy(dtype):
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((7, 9)).astype(np.float32).astype(np.float64)
    working = wide.astype(dtype)
    output = working.copy()
    output[2, 3] = np.nextafter(np.nextafter(output[2, 3], np.array(9, dtype)), np.array(9, dtype))
    output[1, 1] += np.array(0.25, dtype)
    found = support.measure(
        torch.from_numpy(output), torch.from_numpy(wide), [torch.from_numpy(working)]
    )
    error = np.abs(output.astype(np.float64) - wide)
    assert found.worst == error.max()
    assert found.counts == [int((error > 10.0**-k).sum()) for k in range(1, 9)]
    assert (found.least, found.greatest, found.numel) == (wide.min(), wide.max(), 63)
    assert found.score > 1
    small = np.array([1.0, -2.0], dtype)
    moved = np.array([np.nextafter(small[0], np.array(2, dtype)), small[1]], dtype)
    assert (
        support.measure(torch.from_numpy(moved), torch.from_numpy(small.astype(np.float64)), []).ulp
        == ulps(moved[0], small[0])
        == 1
    )


def test_the_local_error_is_the_error_over_the_noise_floor():
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(4000)
    working, output = (
        wide + 3e-6 * rng.standard_normal(4000),
        wide + 9e-6 * rng.standard_normal(4000),
    )
    made = [torch.from_numpy(x.astype(np.float32)) for x in (output, working)]
    found = support.measure(made[0], torch.from_numpy(wide), made[1:])
    error, floor = (np.linalg.norm(m.numpy().astype(np.float64) - wide) for m in made)
    assert found.local == pytest.approx(error / floor, rel=1e-12)
    assert 2.9 < found.local < 3.1
    assert found.score <= 1


@pytest.mark.parametrize(
    ("output", "wide", "working", "nan", "inf"),
    [
        ([math.nan, 1], [math.nan, 1], [math.nan, 1], 0, 0),
        ([math.nan, 1], [2, 1], [2, 1], 1, 0),
        ([math.inf, 1], [2, 1], [2, 1], 0, 1),
        ([math.inf, 1], [1e39, 1], [math.inf, 1], 0, 0),
        ([-math.inf, 1], [math.inf, 1], [math.inf, 1], 0, 1),
        ([2, 1], [math.nan, 1], [math.nan, 1], 1, 0),
        ([-3.4028234e38, 1], [-3.4028234e38, 1], [-3.4028234e38, 1], 0, 0),
    ],
)
def test_what_is_not_finite_must_be_so_on_both_sides(output, wide, working, nan, inf):
    found = support.measure(
        *(torch.tensor(t, dtype=d) for t, d in ((output, torch.float32), (wide, torch.float64))),
        [torch.tensor(working, dtype=torch.float32)],
    )
    assert (found.nan, found.inf) == (nan, inf)
    assert (found.score > 1) == bool(nan + inf)


def test_integers_are_equal_or_wrong():
    right = torch.tensor([1, 2, 3])
    assert support.measure(right, right, [right]).score == 0
    found = support.measure(torch.tensor([1, 2, 4]), right, [right])
    assert found.score == math.inf
    assert "[2]" in found.why


KINDS = [
    ("aten.t.default", {"self": 1}, "view"),
    ("aten.view.default", {"self": 1, "size": [1]}, "view"),
    ("aten.slice.Tensor", {"self": 1}, "view"), ("aten.zeros.default", {"size": [1]}, "creation"),
    ("aten.empty_like.default", {"self": 1}, "creation"),
    ("aten.new_zeros.default", {"self": 1}, "creation"),
    ("aten.arange.default", {"end": 3}, "creation"),
    ("aten.native_dropout.default", {"input": 1, "p": 0.5, "train": True}, "random"),
    ("aten.bernoulli_.float", {"self": 1, "p": 0.5}, "random"),
    ("aten.native_dropout.default", {"input": 1, "p": 0.0, "train": True}, "plain"),
    ("aten.rand_like.default", {"self": 1}, "random"),
    ("aten.mm.default", {"self": 1, "mat2": 1}, "plain"),
    ("aten.add_.Tensor", {"self": 1, "other": 1}, "plain"),
    ("aten.add.out", {"self": 1, "other": 1, "out": 1}, "plain"),
    ("aten.clone.default", {"self": 1}, "plain"),
    ("aten.split.Tensor", {"self": 1, "split_size": 1}, "view"),
    ("aten._foreach_add_.Scalar", {"self": [1], "scalar": 1}, "plain"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "named", "expected"), KINDS)
def test_views_and_random_and_new_tensors_are_recognised(op, named, expected):
    assert support.kind(support.overload(op), named) == expected


def test_what_an_operator_writes():
    assert support.written(support.overload("aten.add_.Tensor"), {"self": 1}) == ["self"]
    assert support.written(support.overload("aten.add.out"), {"out": 1}) == ["out"]
    norm = support.overload("aten.native_batch_norm.default")
    assert support.written(norm, {"training": True, "running_mean": 1, "running_var": 1}) == [
        "running_mean",
        "running_var",
    ]
    assert support.written(norm, {"training": False, "running_mean": 1, "running_var": 1}) == []


LENGTHS = [
    ("mm", {"self": (3, 50), "mat2": (50, 700)}),
    ("addmm", {"self": (7,), "mat1": (3, 50), "mat2": (50, 7)}),
    ("bmm", {"self": (2, 3, 50), "mat2": (2, 50, 7)}),
    ("convolution", {"input": (1, 6, 9, 9), "weight": (4, 6, 3, 3), "transposed": False}),
    ("convolution", {"input": (1, 6, 9, 9), "weight": (6, 4, 3, 3), "transposed": True}),
    ("sum", {"self": (4, 5, 6), "dim": [1, 2]}), ("mean", {"self": (4, 5)}),
    ("_softmax", {"self": (4, 5), "dim": 1}),
    ("native_layer_norm", {"input": (4, 8), "normalized_shape": [8]}),
    ("add", {"self": (100,), "other": (100,)}),
]  # fmt: skip


@pytest.mark.parametrize(("base", "shapes"), LENGTHS)
def test_the_length_of_a_sum_is_that_of_replay(base, shapes):
    named = {k: torch.zeros(v) if isinstance(v, tuple) else v for k, v in shapes.items()}
    assert support.reduction_length(base, named) == stepwise.reduction_length(base, named)


WRITTEN = {
    "native_layer_norm": {
        "input": (4, 3, 8),
        "normalized_shape": [8],
        "weight": (8,),
        "bias": (8,),
        "eps": 1e-5,
    },
    "native_group_norm": {
        "input": (4, 6, 5),
        "weight": (6,),
        "bias": (6,),
        "N": 4,
        "C": 6,
        "HxW": 5,
        "group": 3,
        "eps": 1e-5,
    },
    "_fused_rms_norm": {"input": (4, 8), "normalized_shape": [8], "weight": (8,), "eps": None},
    "_scaled_dot_product_flash_attention_for_cpu": {
        "query": (1, 2, 5, 8),
        "key": (1, 2, 5, 8),
        "value": (1, 2, 5, 8),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("base", WRITTEN)
def test_fused_operators_written_out_compute_the_same(base):
    torch.manual_seed(0)
    named = {
        k: torch.randn(v, dtype=torch.float64) if isinstance(v, tuple) else v
        for k, v in WRITTEN[base].items()
    }
    right = support.invoke(support.Operators(), f"aten.{base}.default", named)
    made = support.WRITTEN_OUT[base](named)
    assert torch.allclose(made[0], right[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_the_error_function_written_out_is_that_of_vector_kernels(dtype):
    x = torch.linspace(-6, 6, 4001).to(dtype)
    for table in (support.WRITTEN_OUT, stepwise.WRITTEN_OUT):
        (made,) = table["erf"]({"self": x})
        off = (made.double() - torch.erf(x.double())).abs().max()
        assert made.dtype == torch.erf(x).dtype
        assert (1e-7 < off < 4e-7) if dtype is torch.float32 else (off < 1e-7)
    assert stepwise.WRITTEN_OUT["erf"](
        {"self": torch.tensor([-0.0, math.inf, -math.inf, math.nan])}
    )[0].tolist()[1:3] == [1, -1]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_written_out(approximate):
    x = torch.linspace(-6, 6, 4001)
    (made,) = support.WRITTEN_OUT["gelu"]({"self": x, "approximate": approximate})
    assert torch.allclose(
        made, torch.nn.functional.gelu(x, approximate=approximate), rtol=0, atol=1e-6
    )


def test_special_values_are_all_there():
    settings = support.Settings(Path("nowhere"), factory="special", cpu_init=True)
    made = support.Elements(settings, support.Data(Path("nowhere")), "t", None, full=True).of(
        "self", tensor("float32", (400,), values=(-3, 4))
    )
    assert made.isnan().any()
    assert {math.inf, -math.inf, torch.finfo(torch.float32).max, 0.0, -3.0, 4.0} <= set(
        made.tolist()
    )
    assert ((made != 0) & (made.abs() < torch.finfo(torch.float32).tiny)).any()
    assert made[made == 0].signbit().any()
    mild = support.Elements(settings, support.Data(Path("nowhere")), "t", None, full=False).of(
        "self", tensor("float32", (400,), values=(-3, 4))
    )
    assert mild.isfinite().all()


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int64", "uint8", "bool", "float8_e4m3fn", "complex64"]
)
def test_random_elements_lie_in_their_range_and_repeat(dtype):
    def drawn(seed):
        settings = support.Settings(Path("nowhere"), factory="random", seed=seed)
        low, high = (0, 1) if dtype == "bool" else (2, 9)
        return support.Elements(settings, support.Data(Path("nowhere")), "t", None, full=True).of(
            "x", tensor(dtype, (500,), values=(low, high))
        )

    one = drawn(1)
    assert one.dtype is support.DTYPES[dtype]
    assert torch.equal(bits(one), bits(drawn(1)))
    assert not torch.equal(bits(one), bits(drawn(2)))
    if dtype == "complex64":
        assert one.abs().max() <= 9
    elif dtype != "bool":
        values = one.to(torch.float64)
        assert 2 <= values.min() < 3 < 8 < values.max() <= 9


def test_samples_of_one_distribution_are_told_from_others():
    torch.manual_seed(0)
    normal = torch.randn(3000)
    assert support.kolmogorov_smirnov(normal, torch.randn(3000)) < 1
    assert support.kolmogorov_smirnov(normal, torch.randn(3000) * 1.5) > 1
    assert (
        support.kolmogorov_smirnov(
            (torch.rand(3000) < 0.9).float(), (torch.rand(3000) < 0.9).float()
        )
        < 1
    )
    assert (
        support.kolmogorov_smirnov(
            (torch.rand(3000) < 0.9).float(), (torch.rand(3000) < 0.7).float()
        )
        > 1
    )


class Wrong(TorchDispatchMode):
    """A device whose every floating result is 1 % too large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return (
            out * 1.01
            if isinstance(out, torch.Tensor) and out.is_floating_point() and "mm" in str(func)
            else out
        )


def checked(op, /, **arguments):
    check = support.Check(support.Settings(Path("nowhere"), factory="random"), "t")
    check(op, None, **arguments)


def test_a_simulated_device_is_seen_and_does_not_touch_the_reference():
    shapes = {"self": tensor("float32", (8, 8)), "mat2": tensor("float32", (8, 8))}
    checked("aten.mm.default", **shapes)
    with Wrong(), pytest.raises(AssertionError, match=r"error .* x its floor"):
        checked("aten.mm.default", **shapes)
    with Wrong():
        checked("aten.add.Tensor", self=shapes["self"], other=shapes["mat2"])
    with Wrong(), pytest.raises(AssertionError, match=r"grad\."):
        support.Check(support.Settings(Path("nowhere"), factory="random"), "t").gradient(
            "aten.mm.default", None, {}, **shapes
        )


def test_ties_may_be_pointed_at_in_any_order():
    class Last(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return torch.full_like(out, 3 if tied else 2) if "argmax" in str(func) else out

    flat = tensor("float32", (4,), values=(1.0, 1.0))
    tied = True
    with Last():
        checked("aten.argmax.default", self=flat)
    tied = False
    with Last(), pytest.raises(AssertionError, match=r"output\.0"):
        checked("aten.argmax.default", self=tensor("float32", (400,), values=(-1.0, 1.0)))


def test_an_operator_that_writes_is_judged_by_what_it_wrote():
    class Lazy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return args[0] if "add_" in str(func) else func(*args, **(kwargs or {}))

    two = {"self": tensor("float32", (40,)), "other": tensor("float32", (40,))}
    checked("aten.add_.Tensor", **two)
    with Lazy(), pytest.raises(AssertionError, match=r"mutated\.self"):
        checked("aten.add_.Tensor", **two)


def test_a_view_must_be_one():
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out.clone() if str(func) == "aten.t.default" else out

    checked("aten.t.default", self=tensor("float32", (3, 4)))
    with Copies(), pytest.raises(AssertionError, match="of self"):
        checked("aten.t.default", self=tensor("float32", (3, 4)))


def test_a_missing_operator_and_a_wrong_argument_are_errors():
    with pytest.raises(AssertionError, match=r"aten\.mm\.nothing does not exist"):
        checked("aten.mm.nothing", self=tensor("float32", (3, 4)))
    with pytest.raises(BaseException, match=r"takes no argument|raised"):
        checked("aten.t.default", self=tensor("float32", (3, 4)), foo=1)
