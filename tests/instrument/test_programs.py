"""The recorder by itself: it never disturbs what it records, and a program it cannot vouch for is
none.
"""

import warnings

import msgspec
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from whence.instrument.torch import caller_code  # noqa: E402
from whence.instrument.torch import program_recorder as tp  # noqa: E402
from whence.records import Program  # noqa: E402

pytestmark = pytest.mark.torch


def record(forward, *inputs, params=(), outputs=None, **options):
    recorder = tp.Recorder(
        [(f"input.{i}", t) for i, t in enumerate(inputs)], list(params), **options
    )
    with recorder:
        out = forward(*inputs)
    given = out if isinstance(out, tuple) else (out,)
    return out, recorder.finish(outputs or [(f"output.{i}", t) for i, t in enumerate(given)])


def names(recording):
    assert recording.program is not None, recording.reason
    return [o.name for o in recording.program.operations]


def test_a_program_is_data():
    weight = torch.randn(5, 4)
    _, recording = record(
        lambda x: torch.nn.functional.linear(x, weight).relu(),
        torch.randn(3, 4),
        params=[("param.weight", weight)],
    )
    program = recording.program
    assert names(recording) == ["aten.t.default", "aten.mm.default", "aten.relu.default"]
    assert program.operations[1].args == ({"in": 0}, {"op": [0, 0]})
    assert (program.inputs, program.params, program.outputs) == (
        ("input.0",),
        ("param.weight",),
        (("output.0", {"op": [2, 0]}),),
    )
    assert recording.constants == []
    assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program


def test_a_program_names_the_line_of_each_of_its_operations():
    def forward(x):
        unused = x.tanh()
        y = x.relu()
        return y + len(unused)

    first = forward.__code__.co_firstlineno
    program = record(forward, torch.randn(3, 4))[1].program
    assert [o.name for o in program.operations] == ["aten.relu.default", "aten.add.Tensor"]
    assert program.lines == tuple(f"{__file__}:{first + n}" for n in (2, 3))


def test_equal_programs_have_equal_ids_and_constants_count():
    x = torch.randn(3, 4)
    ids = {
        record(lambda t, n=n: t * torch.tensor([1.0, 2.0, 3.0, n]), x)[1].program.id
        for n in (4.0, 4.0, 5.0)
    }
    assert len(ids) == 2
    assert (
        record(torch.relu, x)[1].program.id == record(torch.relu, torch.randn(3, 4))[1].program.id
    )
    assert record(torch.relu, x)[1].program.id != record(torch.tanh, x)[1].program.id


def test_every_kind_of_argument():
    def forward(x, z):
        a = torch.nn.functional.pad(x, (1, 1), value=float("-inf")).clamp(min=-1e9)
        b = torch.full((3,), float("nan")).nan_to_num(nan=0.0, posinf=float("inf"))
        c = z * (1 + 2j)
        d = x.to(torch.float64, memory_format=torch.contiguous_format)
        e = torch.cat([a[..., :3], b[None].expand(3, 3)], 0) + torch.arange(3, dtype=torch.float32)
        return e, c, d, torch.einsum("ij,kj->ik", x, x), x[torch.tensor([0, 2])], x[:, None, ::2]

    x, z = torch.randn(3, 4), torch.randn(2, dtype=torch.complex64)
    _, recording = record(forward, x, z)
    text = msgspec.json.encode(recording.program).decode()
    for part in (
        '{"float":"-inf"}',
        '{"float":"nan"}',
        '{"complex":[1.0,2.0]}',
        '{"dtype":"float64"}',
    ):
        assert part in text, part
    assert len(recording.constants) == 1


def test_dead_operations_are_left_out_and_numbers_taken_are_guards():
    def forward(x):
        x * 5
        return x + 1 if bool((x > 0).all()) else x

    _, recording = record(forward, torch.rand(3) + 1)
    assert names(recording) == [
        "aten.gt.Scalar",
        "aten.all.default",
        "aten._local_scalar_dense.default",
        "aten.add.Tensor",
    ]
    assert recording.program.operations[2].guard is True


def test_an_output_may_be_an_input_or_a_parameter():
    weight = torch.randn(3)
    x = torch.randn(3)
    _, recording = record(lambda t: (t, weight), x, params=[("param.weight", weight)])
    assert recording.program.outputs == (
        ("output.0", {"in": 0}),
        ("output.1", {"param": "param.weight"}),
    )


def test_a_changed_input_is_an_output_too():
    x = torch.randn(3)
    recorder = tp.Recorder([("input.0", x)], [])
    with recorder:
        y = x.mul_(2) + 1
    recording = recorder.finish([("output.0", y), ("mutated.input.0", x)])
    assert recording.program.outputs == (
        ("output.0", {"op": [1, 0]}),
        ("mutated.input.0", {"op": [0, 0]}),
    )


def test_a_result_written_into_a_tensor_is_computed_and_copied():
    def forward(x):
        square = torch.empty(3, 3)
        torch.addmm(square, x[:, None], x[None], beta=0, out=square)
        return torch.mul(square, 2, out=torch.empty(3, 3)).sum()

    _, recording = record(forward, torch.rand(3))
    assert [name.split(".")[1] for name in names(recording)][-6:] == [
        *("addmm", "copy_"),
        *("empty", "mul", "copy_"),
        "sum",
    ]
    assert not any("out" in operation.kwargs for operation in recording.program.operations)


@pytest.mark.parametrize(
    ("what", "forward", "reason"),
    [
        ("random", lambda x: x + torch.randn(3), "draws random numbers (aten.randn.default)"),
        (
            "foreign",
            lambda x: x + FOREIGN,
            "reads a tensor that is neither an input, a parameter nor made inside (torch.float32 "
            "(3,))",
        ),
        ("returned foreign", lambda x: FOREIGN, "neither an input, a parameter nor made inside"),
        ("numpy", lambda x: x * x.numpy().sum(), "outside any operator (numpy)"),
        ("data", lambda x: setattr_data(x), "outside any operator (__set__)"),
        (
            "large constant",
            lambda x: x.sum() + torch.tensor([[0.0] * 600] * 600),
            "bytes from Python data",
        ),
        ("not finite", lambda x: x * (x * float("inf")).sum().item(), "not finite"),
        (
            "uninitialised",
            lambda x: x + torch.empty(3),
            "a tensor changed without an operator that wrote it",
        ),
        ("grows", lambda x: torch.mul(x, 2, out=torch.empty(0)), "changes the size of the tensor"),
        ("set_", lambda x: (x * 1).set_(FOREIGN), "replaces the memory of a tensor"),
        ("sparse", lambda x: x.to_sparse(), "sparse"),
    ],
)
def test_reasons(what, forward, reason):
    x = torch.rand(3)
    _, recording = record(forward, x)
    assert recording.program is None, what
    assert reason in recording.reason, recording.reason


FOREIGN = torch.ones(3)


def setattr_data(x):
    y = x * 2
    y.data = FOREIGN
    return y + 1


def test_a_write_that_no_operator_made_is_seen():
    """The version of a tensor moves although nothing was recorded (a mode cannot see an operator of
    another thread).
    """
    import threading

    def forward(x):
        y = x * 2
        z = y + 1
        thread = threading.Thread(target=lambda: y.add_(1))  # modes belong to a thread
        thread.start()
        thread.join()
        return z + y

    _, recording = record(forward, torch.rand(3))
    assert recording.reason == "a tensor changed without an operator that wrote it"


def test_two_inputs_over_one_memory_may_be_read_but_not_written():
    x = torch.rand(6)
    assert record(lambda a, b: a[:4] + b, x, x[:4])[1].program is not None
    _, recording = record(lambda a, b: a.mul_(2)[:4] + b, x, x[:4])
    assert recording.reason == "writes into memory that two of its inputs or parameters share"


def test_a_view_taken_elsewhere_is_read_from_its_base():
    x = torch.rand(6)
    view = x[1:4]
    _, recording = record(lambda a: view * 2, x)
    assert names(recording) == ["aten.as_strided.default", "aten.mul.Tensor"]
    assert recording.program.operations[0].args == ({"in": 0}, [3], [1], 1)


def test_a_failing_recorder_gives_up_and_the_operator_runs_once(monkeypatch):
    for where in ("before", "after", "restored"):
        y = torch.zeros(3)
        recorder = tp.Recorder([("input.0", y)], [])
        with monkeypatch.context() as broken:
            broken.setattr(
                tp if where == "restored" else recorder._operators, where, lambda *a: 1 / 0
            )
            with recorder:
                y.add_(1)
        assert y.tolist() == [1, 1, 1]
        recording = recorder.finish([("output.0", y)])
        assert recording.program is None
        assert "the recorder failed" in recording.reason
        assert "ZeroDivisionError" in recording.reason
    recorder = tp.Recorder([("input.0", None)], [])
    assert "the recorder failed" in recorder.finish([]).reason


def test_an_exception_of_the_program_passes_and_ends_the_recording():
    recorder = tp.Recorder([], [])
    with pytest.raises(RuntimeError, match="size"), recorder:
        torch.ones(3) @ torch.ones(4)
    assert "left the call" in recorder.finish([]).reason
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def test_an_exception_that_the_program_catches_leaves_no_operation():
    def forward(x):
        try:
            return x @ x
        except RuntimeError:
            return x * 2

    _, recording = record(forward, torch.rand(3, 2))
    assert names(recording) == ["aten.mul.Tensor"]


def test_abandon_takes_the_modes_off_at_once():
    recorder = tp.Recorder([], [])
    with recorder:
        assert torch._C._len_torch_dispatch_stack() == 1
        recorder.abandon()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._len_torch_function_stack() == 0
        assert not torch.overrides.has_torch_function((torch.ones(1),))
    assert recorder.finish([]).reason == "calls other modules"


def test_abandon_below_another_mode_only_stops_listening():
    recorder = tp.Recorder([], [])
    with recorder, torch.device("cpu"):
        recorder.abandon()
        torch.ones(3).relu()
    assert recorder.finish([]).program is None
    assert torch._C._len_torch_function_stack() == 0


def test_recorders_nest():
    x = torch.rand(3)
    outer, inner = tp.Recorder([("input.0", x)], []), tp.Recorder([("input.0", x)], [])
    with outer:
        with inner:
            y = x.relu()
        z = y + 1
    assert names(inner.finish([("output.0", y)])) == ["aten.relu.default"]
    assert names(outer.finish([("output.0", z)])) == ["aten.relu.default", "aten.add.Tensor"]


def test_nothing_is_kept_alive():
    import weakref

    x = torch.rand(1000)
    recorder = tp.Recorder([("input.0", x)], [])
    with recorder:
        y = x * 2
        gone = weakref.ref(y.untyped_storage())
        z = y + 1
        del y
        assert gone() is None
    assert recorder.finish([("output.0", z)]).program is not None


def test_modules_that_ask_for_listeners_and_compiled_ones_are_told_apart():
    assert caller_code.asks_for_listeners(nn.MultiheadAttention(4, 2))
    assert caller_code.asks_for_listeners(nn.TransformerEncoderLayer(4, 2))
    assert not caller_code.asks_for_listeners(nn.Linear(4, 2))

    class Scripted(nn.Module):
        def forward(self, x):
            return SCRIPTED(x)

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = COMPILED

        def forward(self, x):
            return self.inner(x)

    assert caller_code.compiled_inside(Scripted()) == "SCRIPTED"
    assert caller_code.compiled_inside(Compiled()) == "inner"
    assert caller_code.compiled_inside(nn.Linear(2, 2)) == ""


def twice(x):
    return x * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.script(twice)
COMPILED = lambda x: x  # noqa: E731
COMPILED._torchdynamo_orig_callable = COMPILED


def test_autocast_casts_of_parameters_are_followed():
    linear = nn.Linear(4, 3)
    x = torch.rand(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x)  # fills the cache: the second call gets the cast weight from nowhere
        _, recording = record(
            linear.forward, x, params=[("param.weight", linear.weight), ("param.bias", linear.bias)]
        )
    assert "aten._to_copy.default" in names(recording)


def test_autocast_under_inference_mode_is_not_listened_to():
    x = torch.rand(2, 4)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        _, recording = record(nn.Linear(4, 3).forward, x)
    assert "autocast under inference_mode" in recording.reason


def test_tensors_of_a_module():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.register_buffer("table", torch.ones(2))
            self.scale, self.parts, self.named = (
                torch.ones(1),
                [torch.ones(1)],
                {"a": torch.ones(1)},
            )

    slots = [slot for slot, _ in caller_code.tensors_of(Many())]
    assert slots == [
        "param.inner.weight",
        "param.inner.bias",
        "param.table",
        "param.scale",
        "param.parts.0",
        "param.named.a",
    ]
