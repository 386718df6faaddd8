"""What a repro is made of: tensors with their layouts, literals, the check, and the search for the
operator.
"""

import ast
import itertools
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from whence import judge  # noqa: E402
from whence.errors import ReplayRefused  # noqa: E402
from whence.records import Operation, Program  # noqa: E402
from whence.replay.export import isolate, script, script_data, three_way, ways  # noqa: E402
from whence.replay.export.trace import Trace, piece  # noqa: E402
from whence.replay.flatten import Node, flatten  # noqa: E402
from whence.replay.validation import load  # noqa: E402

pytestmark = pytest.mark.torch


def test_tensors_come_back_with_their_layout_and_share_what_they_shared(tmp_path):
    base = torch.arange(60.0)
    tensors = {
        "plain": torch.randn(3, 4),
        "turned": torch.randn(5, 7).t(),
        "expanded": torch.randn(4, 1).expand(4, 6),
        "windows": base.as_strided((4, 3), (2, 1), 5),
        "whole": base,
        "half": torch.randn(6).bfloat16(),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(script_data.save(tensors))
    from safetensors import safe_open  # the vendor's own reader takes the file

    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("plain"), tensors["plain"])
    back = three_way.load(
        path, {script_data.stored(str(t.dtype)[6:]): t.dtype for t in tensors.values()}
    )
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].stride() == tensor.stride()
        assert torch.equal(back[name], tensor)
    back["whole"][6] = 99.0
    assert back["windows"][0, 1] == 99.0


@pytest.mark.parametrize("letters", range(1, 9))
def test_elements_begin_at_a_multiple_of_eight_bytes(letters):
    """So that a file can be mapped and read as numbers of any width."""
    raw = script_data.save({"x" * letters: torch.arange(3.0)})
    size = int.from_bytes(raw[:8], "little")
    assert size % 8 == 0 and json.loads(raw[8 : 8 + size])["__metadata__"]
    assert raw[8 + size :] == np.arange(3, dtype=np.float32).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_check_is_that_of_the_judge(dtype):
    torch.manual_seed(1)
    x = torch.randn(40, 30, dtype=torch.float64)
    r, w = x.exp(), x.to(dtype).exp()
    for far in (0.0, 1e-3, 0.3):
        y = (r * (1 + far * torch.rand_like(r))).to(dtype)
        score, words = three_way.beyond_rounding(y, r, w, terms=9)
        host = [
            t.numpy() if t.dtype is not torch.bfloat16 else t.float().numpy() for t in (y, r, w)
        ]
        if dtype is torch.bfloat16:
            import ml_dtypes

            host[0], host[2] = (
                host[0].astype(ml_dtypes.bfloat16),
                host[2].astype(ml_dtypes.bfloat16),
            )
        local = judge.local(host[0], host[1], host[2], reduction_length=9)
        parts = local.parts()
        assert math.isclose(score, max(parts["rho"], parts["z"]), rel_tol=1e-6), words


def test_the_check_of_nan_shapes_and_integers():
    x = torch.ones(4)
    assert (
        three_way.beyond_rounding(torch.tensor([1.0, math.nan, 1, 1]), x.double(), x)[0] == math.inf
    )
    both = torch.tensor([1.0, math.nan, 1, 1])
    assert three_way.beyond_rounding(both, both.double(), both)[0] <= 1
    assert three_way.beyond_rounding(x[:3], x.double(), x)[0] == math.inf
    assert (
        three_way.beyond_rounding(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([1, 3]))[
            0
        ]
        == math.inf
    )
    assert (
        three_way.beyond_rounding(torch.empty(0), torch.empty(0).double(), torch.empty(0))[0] == 0
    )


def test_float64_reaches_casts_and_constructors():
    def half(x):
        y = torch.ops.aten._to_copy.default(x, dtype=torch.bfloat16)
        return [y + torch.ops.aten.full.default([3], 1 / 3), x + 0]

    made = three_way.wide(half, {"x": torch.tensor([1.0, 2.0, 1 / 3])})
    assert made[0].dtype == torch.float64
    assert made[0].tolist() == [x + 1 / 3 for x in (1.0, 2.0, float(np.float32(1 / 3)))]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        0.1,
        math.inf,
        -math.inf,
        2 - 3j,
        "a'\"\\\n",
        [1, [2.5, None]],
        torch.bfloat16,
    ],
)
def test_literals_read_back(value):
    assert repr(eval(script.literal(value), {"torch": torch})) == repr(value)  # noqa: S307


def test_nothing_else_is_a_literal():
    for value in (object(), print, {"a": 1}, torch.ones(1)):
        with pytest.raises(ReplayRefused):
            script.literal(value)


def traced(operations, outputs, **given):
    program = Program(
        "p",
        tuple(operations),
        tuple(given),
        tuple(outputs),
        input_dtypes=("float32",) * len(given),
        base="float32",
    )
    loaded = load(program)
    trace = Trace()
    made = loaded.run(given, {}, watch=trace)
    return trace, [trace.by_place[o["op"][0]][o["op"][1]] for _, o in outputs], made


def stepped(**settings):
    """A piece of one step of an optimiser, in float32."""
    names = ("step", "exp_avg", "exp_avg_sq")
    operation = Operation(
        "whence.optimizer_step", ("Adam", {"in": 0}, {"in": 1}, [], [], list(names)), settings
    )
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    trace, results, made = traced(
        [operation],
        [("output.param", {"op": [0, 0]}), ("output.exp_avg", {"op": [0, 2]})],
        **{"input.param": x, "input.grad": np.flip(x).copy()},
    )
    return piece(trace, 0, 1, results), made


def test_a_step_in_a_script_is_the_step_of_torchs_own_class():
    operators, made = stepped(lr=0.1, betas=[0.5, 0.9])
    x = torch.from_numpy(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3))
    parameter = torch.nn.Parameter(x.clone())
    parameter.grad = x.flip((0, 1))
    optimizer = torch.optim.Adam([parameter], lr=0.1, betas=(0.5, 0.9))
    optimizer.step()
    np.testing.assert_array_equal(made["output.param"], parameter.detach().numpy())
    case = script.Case(operators, None, ways.Way(), ways.Way())
    text, tensors = script.script(case)
    assert list(tensors) == ["param", "grad"]
    assert "step_alone(torch.optim.Adam, param, grad, dict(), lr=0.1, betas=[0.5, 0.9])" in text
    assert "v2 = kept['exp_avg']" in text


@pytest.mark.parametrize(
    ("arguments", "settings", "reason"),
    [
        (("Optimizer", [], []), {}, "no optimiser Optimizer"),
        (("lr_scheduler", [], []), {}, "no optimiser lr_scheduler"),
        (("Adam(); import os", [], []), {}, "no optimiser"),
        (("Adam", [], []), {"hook": 1}, "takes no hook"),
        (("Adam", [], ["exp_avg'] + x['"]), {}, "whose name is none"),
    ],
)
def test_only_optimisers_of_torch_and_their_settings_are_written(arguments, settings, reason):
    operators, _ = stepped()
    name, names, left = arguments
    step = operators.steps[0]
    step.args = (name, *step.args[1:3], names, [], left)
    step.kwargs, step.results = settings, step.results[: 1 + len(left)]
    operators.results = step.results
    with pytest.raises(ReplayRefused, match=reason):
        script.script(script.Case(operators, None, ways.Way(), ways.Way()))


def test_words_of_a_run_cannot_leave_the_docstring():
    x = np.ones((2, 3), np.float32)
    trace, results, _ = traced(
        [Operation("aten.relu.default", ({"in": 0},))],
        [("output.0", {"op": [0, 0]})],
        **{"input.0": x},
    )
    evil = '""" + print(1) + """ \\" \n import os\x1b[2J'
    way = ways.Way(settings={"threads": "1); import os", "matmul_precision": "'x'"})
    case = script.Case(piece(trace, 0, 1, results), None, way, way, title=evil, story=[evil, evil])
    text, tensors = script.script(case)
    tree = ast.parse(text)
    assert not [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print" and n.lineno < 20
    ]
    assert "import os\n\n" not in text.partition('"""\n\n')[0]
    assert "\x1b" not in text
    assert "threads" not in text.partition("def check")[0].partition("import torch")[2]
    assert list(tensors) == ["x"]


def test_settings_of_a_compiler_that_are_taken_over():
    pytest.importorskip("torch._inductor")
    asked = {
        "cpp.inject_relu_bug_TESTING_ONLY": "accuracy",
        "cpp.cxx": "evil",
        "max_fusion_size": 3,
        "no_such_name": 1,
        "epilogue_fusion": "a;b",
        "cuda.cutlass_dir": "x",
        "__class__": 1,
        "trace.enabled": True,
        "cpp.inject_log1p_bug_TESTING_ONLY": "accuracy",
    }
    fine, left = ways.known_config("torch._inductor.config", asked)
    assert fine == {
        "cpp.inject_relu_bug_TESTING_ONLY": "accuracy",
        "max_fusion_size": 3,
        "cpp.inject_log1p_bug_TESTING_ONLY": "accuracy",
    }
    assert sorted([*fine, *left]) == sorted(asked)


def chain():
    x = np.linspace(-2, 2, 600, dtype=np.float32).reshape(20, 30)
    steps = [
        Operation("aten.sin.default", ({"in": 0},)),
        Operation("aten.abs.default", ({"op": [0, 0]},)),
        Operation("aten.log1p.default", ({"op": [1, 0]},)),
        Operation("aten.exp.default", ({"op": [2, 0]},)),
    ]
    return traced(steps, [("output.0", {"op": [3, 0]})], **{"input.0": x})


class Broken(torch.utils._python_dispatch.TorchDispatchMode):
    """Operators of a machine on which `after`, run right behind `before` ("" for anything), is
    off.
    """

    def __init__(self, *names):
        super().__init__()
        self.names, self.seen = names, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name != "clone":
            self.seen.append(name)
        return out * 1.01 if tuple(self.seen[-len(self.names) :]) == self.names else out


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_the_shortest_wrong_stretch_is_found_in_few_looks(count):
    """Of operators that are wrong together only, from a first to a last."""
    for first, end in itertools.combinations(range(count + 1), 2):
        looks = []

        class Known(isolate.Drill):
            def __init__(self):
                self._until = math.inf

            def _score(self, low, high, first=first, end=end, looks=looks):
                looks.append((low, high))
                assert len(looks) <= 2 * math.ceil(math.log2(count + 1))
                return 2.0 if low <= first and high >= end else None if high < first else 1.0

        assert Known()._bisected(count) == (first, end)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (("log1p",), (2, 3)),
        (("abs", "log1p"), (1, 3)),
        (("sin", "abs", "log1p", "exp"), (0, 4)),
        (("nothing",), None),
    ],
)
def test_the_shortest_run_of_operators_that_is_wrong(wrong, found, monkeypatch):
    trace, results, _ = chain()
    run = isolate.Piece.run

    def off(self, given):
        if not monkeypatch_on:
            return run(self, given)
        with Broken(*wrong):
            return run(self, given)

    monkeypatch_on = False
    real = isolate.run_as

    def run_as(way, pieces):
        nonlocal monkeypatch_on
        monkeypatch_on = True
        try:
            return real(way, pieces)
        finally:
            monkeypatch_on = False

    monkeypatch.setattr(isolate.Piece, "run", off)
    monkeypatch.setattr(isolate, "run_as", run_as)
    drilled = isolate.Drill(trace, results, ways.Way()).smallest()
    assert (drilled and (drilled.begin, drilled.end)) == found


def test_a_child_is_put_where_it_was_called():
    inner = Program(
        "i",
        (
            Operation("aten.mul.Tensor", ({"in": 0}, {"param": "param.w"})),
            Operation("aten.view.default", ({"op": [0, 0]}, [{"dim": [0, 0]}, -1])),
        ),
        ("input.0",),
        (("output.0", {"op": [1, 0]}),),
        ("param.w",),
        input_dtypes=("float32",),
        base="float32",
    )
    outer = Program(
        "o",
        (
            Operation("aten.sin.default", ({"in": 0},)),
            Operation("aten.add.Tensor", ({"in": 1}, {"in": 0})),
        ),
        ("input.0", "0:output.0"),
        (("output.0", {"op": [1, 0]}), ("0:input.0", {"op": [0, 0]})),
        input_dtypes=("float32", "float32"),
        base="float32",
        calls=((0, 1),),
    )
    nodes = {
        0: Node(0, outer, (5,), frozenset({0}), {}),
        5: Node(5, inner, (), frozenset(), {"input.0": (4, 6)}),
    }
    flat = flatten(0, nodes.__getitem__)
    assert [o.name.split(".")[1] for o in flat.program.operations] == ["sin", "mul", "view", "add"]
    assert flat.origins == {"input.0": (0, "input.0"), "param.w@5": (5, "param.w")}
    x, w = np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32)
    made = load(flat.program).run({"input.0": x}, {"param.w@5": w})["output.0"]
    np.testing.assert_allclose(made, np.sin(x) * w + x, rtol=1e-6)
