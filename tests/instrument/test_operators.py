"""--level op: the program computes the same bits, every operator is a call that can be rebuilt,
compiled code stays compiled.
"""

import contextlib
import threading
from pathlib import Path

import pytest
import torch
from live_torch import bits, process, random_states, seeded, tensor, unchanged
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import whence
from processors import skip_without_bfloat16_lstm
from whence import api
from whence.errors import UsageError
from whence.instrument.torch.sources import is_the_program
from whence.store import open_run

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def ended():
    yield
    whence.end_dump()


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        return self.fc(nn.functional.relu(self.norm(self.conv(x)), inplace=True).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, again=False, drop=0.2):
        super().__init__()
        self.norm, self.qkv, self.out, self.again = (
            nn.LayerNorm(8),
            nn.Linear(8, 24),
            nn.Linear(8, 8),
            again,
        )
        self.drop = nn.Dropout(drop)

    def core(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))

    def forward(self, x):
        return x + (checkpoint(self.core, x, use_reentrant=False) if self.again else self.core(x))


def image():
    return torch.randn(2, 3, 5, 5)


def train(make_input, steps=2, optimizer=torch.optim.Adam, autocast=False):
    def use(model):
        chosen = optimizer(model.parameters(), lr=0.01)
        seen = []
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = model(make_input()).float().pow(2).mean()
            loss.backward()
            seen.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
            chosen.step()
            chosen.zero_grad()
        return seen

    return use


def infer(make_input, grad, autocast=False):
    def use(model):
        with (
            grad(),
            torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext(),
        ):
            return [model(make_input()) for _ in range(2)]

    return use


def tokens():
    return torch.randn(2, 5, 8)


class InPlace(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[:, 1:3].mul_(2)
        y.add_(x).clamp_(-1, 1)
        out = torch.empty_like(x)
        torch.add(x, y, out=out)
        buffer = torch.empty(3, 4)
        for i in range(3):
            buffer[i] = i
        return (
            out.t(),
            y.unbind(0),
            buffer,
            torch.rand(3, generator=torch.Generator().manual_seed(3)),
            x.new_zeros(2).bernoulli_(0.5),
        )


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.bilinear = (
            nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1),
            nn.Bilinear(8, 8, 4),
        )

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.bilinear(y.float(), y.float())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2 + x.sin() * 0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return Double.apply(self.fc(x))


PROGRAMS = {
    "conv and batch norm": (Conv, train(image)),
    "adam, foreach": (
        Conv,
        train(image, optimizer=lambda p, lr: torch.optim.AdamW(p, lr, foreach=True)),
    ),
    "sgd, fused": (Conv, train(image, optimizer=lambda p, lr: torch.optim.SGD(p, lr, fused=True))),
    "attention and dropout": (Block, train(tokens)),
    "checkpoint": (lambda: nn.Sequential(Block(again=True), Block(again=True)), train(tokens)),
    "autocast": (Block, train(tokens, autocast=True)),
    "no_grad": (lambda: Block().eval(), infer(tokens, torch.no_grad)),
    "inference_mode": (lambda: Block().eval(), infer(tokens, torch.inference_mode)),
    "inference_mode, autocast": (
        lambda: nn.Sequential(Block(), Lstm()).eval(),
        infer(tokens, torch.inference_mode, autocast=True),
    ),
    "autocast, no_grad": (
        lambda: nn.Sequential(Block(), Lstm()).eval(),
        infer(tokens, torch.no_grad, autocast=True),
    ),
    "in place": (InPlace, infer(lambda: torch.randn(4, 4), torch.no_grad)),
    "lstm": (Lstm, train(tokens)),
    "own function": (Own, train(tokens)),
}


@pytest.mark.parametrize("options", [{}, {"samples": 1, "dedup": True}], ids=["all", "samples"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_computes_the_same_bits(name, options, tmp_path):
    make, use = PROGRAMS[name]
    if "autocast" in name and name != "autocast":
        skip_without_bfloat16_lstm()
    run = unchanged(make, use, tmp_path / "run", level="op", **options)
    assert any(c.kind == "operator" for c in run.calls)


def rebuilt(run, call):
    """The operator, run again on what the run holds of it: func(*by schema order)."""
    namespace, base, overload = call.op.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    held = {r.slot: run.records[r.record] for r in call.refs}

    def given(slot):
        record = held[slot]
        made = (
            torch.empty_strided(record.shape, record.stride, dtype=getattr(torch, record.dtype))
            if record.stride
            else None
        )
        if record.elements is None:
            return (
                made
                if made is not None
                else torch.empty(record.shape, dtype=getattr(torch, record.dtype))
            )
        elements = tensor(run, call, slot)
        if made is None:
            return elements
        once = tuple(
            slice(0, 1) if s == 0 else slice(None) for s in record.stride
        )  # an expanded axis
        made[once] = elements[once]
        return made

    def plain(value):
        if isinstance(value, list):
            return [plain(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((kind, at),) = value.items()
        if kind == "slot":
            return given(at)
        if kind == "generator":
            return torch.Generator()
        return (
            torch.device(at)
            if kind == "device"
            else float(at)
            if kind == "float"
            else getattr(torch, at)
        )

    args, kwargs = [], {}
    for a in func._schema.arguments:
        parts = sorted(
            (s for s in held if s.startswith(f"input.{a.name}.")),
            key=lambda s: int(s.rpartition(".")[2]),
        )
        if f"input.{a.name}" in held:
            value = given(f"input.{a.name}")
        elif a.name in call.arguments:
            value = plain(call.arguments[a.name])
        elif parts:
            value = [given(s) for s in parts]
        else:
            continue
        kwargs[a.name] = value
    state = next((tensor(run, call, s) for s in held if s.startswith("state.")), None)
    if state is not None:
        for generator in [v for v in kwargs.values() if isinstance(v, torch.Generator)] or [
            torch.default_generator
        ]:
            generator.set_state(state)
    with torch.no_grad():
        out = func(*args, **kwargs)
    return out, kwargs


@pytest.mark.parametrize(
    "name", ["conv and batch norm", "adam, foreach", "attention and dropout", "in place"]
)
def test_every_call_can_be_rebuilt_from_the_run(name, tmp_path):
    make, use = PROGRAMS[name]
    seeded()
    with whence.capture(make(), tmp_path / "run", level="op") as _:
        pass
    model = make()
    with whence.capture(model, tmp_path / "run", level="op", force=True):
        use(model)
    run = open_run(tmp_path / "run")
    checked = set()
    for call in run.calls:
        if call.kind != "operator" or any(
            a != b and b.startswith("input") for a, b in call.aliases
        ):
            continue
        out, given = rebuilt(run, call)
        results = {r.slot: r for r in call.refs if r.slot.startswith(("output", "mutated"))}
        for slot, found in flat(out, given, results):
            if run.records[results[slot].record].elements is not None:
                assert bits(found)[-1] == bits(tensor(run, call, slot))[-1], (call.op, slot)
                checked.add(call.op)
    assert len(checked) > 8


def flat(out, given, results):
    for slot in results:
        kind, *rest = slot.split(".")
        value = given[rest[0]] if kind == "mutated" else out
        if kind == "mutated" or not isinstance(out, (tuple, list)) or len(rest) == 2:
            rest = rest[1:]
        for part in rest:
            value = value[int(part)]
        yield slot, value


def operators(run, **wanted):
    found = [
        c
        for c in run.calls
        if c.kind == "operator" and all(getattr(c, k) == v for k, v in wanted.items())
    ]
    return sorted(found, key=lambda c: c.order)


def test_names_phases_scopes_and_sources(tmp_path):
    model = Conv()
    with whence.capture(model, tmp_path / "run", level="op"):
        train(image, steps=2)(model)
    run = open_run(tmp_path / "run")
    (first, second) = operators(run, op="aten.convolution.default")
    assert (first.op_type, first.scope, first.phase, first.step, first.occurrence, first.leaf) == (
        "convolution",
        "conv",
        "forward",
        0,
        0,
        True,
    )
    assert second.step == 1
    assert run.calls[first.parent].scope == "conv"
    assert not run.calls[first.parent].leaf
    file, line = first.source.rsplit(":", 1)
    assert file == __file__
    text = Path(file).read_text().splitlines()[int(line) - 1]
    assert "self.conv(x)" in text
    back = operators(run, op="aten.convolution_backward.default")[0]
    assert (back.scope, back.phase, back.forward, back.source) == (
        "conv",
        "backward",
        first.order,
        first.source,
    )
    assert run.calls[back.parent].kind == "region"
    assert run.calls[back.parent].op_type == "backward"
    assert {c.op for c in operators(run, phase="optimizer")} >= {
        "aten.addcdiv_.default",
        "aten.lerp_.Scalar",
    }
    assert {run.calls[c.parent].op_type for c in operators(run, phase="optimizer")} == {"optimizer"}
    loss = operators(run, op="aten.pow.Tensor_Scalar", phase="forward")[0]
    assert (loss.scope, run.calls[loss.parent].op_type) == ("", "region")
    assert (
        "pow(2)" in Path(__file__).read_text().splitlines()[int(loss.source.rsplit(":", 1)[1]) - 1]
    )
    assert len({c.key() for c in run.calls}) == len(run.calls)
    assert all(c.seconds > 0 for c in operators(run))


def test_recomputed_operators_belong_to_their_modules(tmp_path):
    model = nn.Sequential(Block(again=True, drop=0.0))
    with whence.capture(model, tmp_path / "run", level="op"):
        train(tokens, steps=1)(model)
    run = open_run(tmp_path / "run")
    first, again = (
        [c.op for c in operators(run, phase=p, scope="0.qkv") if c.op_type != "detach"]
        for p in ("forward", "recompute")
    )
    assert first == again != []
    back = operators(run, phase="backward", scope="0.qkv", op="aten.mm.default")
    assert len(back) == 2


def test_slots_arguments_aliases_and_state(tmp_path):
    whence.begin_dump(tmp_path / "run")
    x = torch.arange(6.0).reshape(2, 3)
    torch.ops.aten.index_put.default(x, [None, torch.tensor([0, 2])], torch.tensor(7.0))
    y = x.t()
    x.add_(y.t(), alpha=2)
    torch.add(x, x, out=torch.empty(2, 3))
    x.split([1, 2], dim=1)
    torch.full((2,), float("inf"), dtype=torch.float16)
    torch.rand(3)
    x.sum().item()
    whence.end_dump()
    run = open_run(tmp_path / "run")

    def one(op):
        return operators(run, op=op)[0]

    put = one("aten.index_put.default")
    assert put.arguments == {"indices": [None, {"slot": "input.indices.1"}]}
    assert [r.slot for r in put.refs] == [
        "input.self",
        "input.indices.1",
        "input.values",
        "output.0",
    ]
    assert one("aten.t.default").aliases == (("input.self", "output.0"),)
    add = one("aten.add_.Tensor")
    assert [r.slot for r in add.refs] == ["input.self", "input.other", "mutated.self", "output.0"]
    assert add.arguments == {"alpha": 2}
    assert add.aliases == (("input.self", "input.other"),)
    assert tensor(run, add, "mutated.self").tolist() == [[0, 3, 6], [9, 12, 15]]
    assert tensor(run, add, "input.self").tolist() == [[0, 1, 2], [3, 4, 5]]
    into = one("aten.add.out")
    assert [r.slot for r in into.refs] == [
        "input.self",
        "input.other",
        "input.out",
        "mutated.out",
        "output.0",
    ]
    assert run.records[into.refs[2].record].why == "overwritten without being read"
    assert into.aliases == (("input.self", "input.other"),)
    assert [r.slot for r in one("aten.split_with_sizes.default").refs] == [
        "input.self",
        "output.0.0",
        "output.0.1",
    ]
    full = one("aten.full.default").arguments
    assert full["fill_value"] == {"float": "inf"}
    assert full["dtype"] == {"dtype": "float16"}
    assert full["device"] == {"device": "cpu"}
    rand = one("aten.rand.default")
    assert rand.no_program == "draws random numbers"
    torch.set_rng_state(tensor(run, rand, "state.cpu"))
    assert torch.equal(torch.rand(3), tensor(run, rand, "output.0"))
    assert one("aten._local_scalar_dense.default").notes == ("returned 45.0",)


def test_parts_of_one_memory_may_be_written_by_each_other(tmp_path):
    """Halves lie between each other's rows and share no element."""
    whence.begin_dump(tmp_path / "run")
    x = torch.arange(16.0).reshape(4, 4)
    half, gate = x.chunk(2, 1)
    half.mul_(gate)
    x[::2].add_(x[1::2])
    x.sub_(x)
    whence.end_dump()
    run = open_run(tmp_path / "run")
    multiplied, added, subtracted = (
        operators(run, op=f"aten.{name}_.Tensor")[0] for name in ("mul", "add", "sub")
    )
    assert run.programs[multiplied.program] and run.programs[added.program]
    assert subtracted.no_program == "writes into memory that two of its inputs share"


def test_memory_that_was_not_written_is_no_value(tmp_path):
    whence.begin_dump(tmp_path / "run")
    x = torch.empty(1000)
    x[:500].fill_(1.0)
    x + 1
    whence.end_dump()
    run = open_run(tmp_path / "run")
    made, cut, filled, added = operators(run)
    assert {run.records[r.record].why for r in (*made.refs, *cut.refs)} == {
        "memory that was not written yet"
    }
    assert filled.op == "aten.fill_.Scalar"
    assert tensor(run, filled, "mutated.self").tolist() == [1.0] * 500
    assert added.op == "aten.add.Tensor"


def test_samples_and_dedup(tmp_path):
    def use():
        x = torch.ones(3)
        for i in range(40):
            x = x + i
            x * 2.0

    found = []
    for name in ("a", "b"):
        whence.begin_dump(tmp_path / name, samples=2, seed=5)
        use()
        whence.end_dump()
        run = open_run(tmp_path / name)
        adds = operators(run, op="aten.add.Tensor")
        assert len(adds) == 40
        kept = [
            c.occurrence
            for c in adds
            if run.records[c.refs[-1].record].elements is not None and whole(run, c)
        ]
        assert 2 <= len(kept) < 20
        assert {
            run.records[r.record].why
            for c in adds
            if c.occurrence not in kept
            for r in c.refs
            if not held(run, r)
        } == {"not sampled"}
        found.append(kept)
    assert found[0] == found[1]
    whence.begin_dump(tmp_path / "few", samples=0, dedup=True)
    use()
    whence.end_dump()
    run = open_run(tmp_path / "few")
    assert len(operators(run, op="aten.mul.Tensor")) == 1
    assert all(r.elements is None for r in run.records)
    groups = {g.op: g for g in api.signatures(run) if g.op == "aten.mul.Tensor"}
    group = groups["aten.mul.Tensor"]
    assert (group.count, len(group.calls), group.with_elements) == (40, 1, [])
    assert (group.ranges["output.0"].min, group.ranges["output.0"].max) == (
        2.0,
        2.0 * (1 + sum(range(40))),
    )
    assert group.arguments == {"other": 2.0} or [t.slot for t in group.inputs] == [
        "input.self",
        "input.other",
    ]


def held(run, ref):
    return run.records[ref.record].elements is not None


def whole(run, call):
    return all(held(run, r) for r in call.refs)


def test_begin_and_end(tmp_path):
    before = process()
    whence.end_dump()
    whence.begin_dump(tmp_path / "run")
    whence.begin_dump(tmp_path / "run")
    with pytest.raises(UsageError, match="is not ended"):
        whence.begin_dump(tmp_path / "other")
    x = torch.ones(2).sin()
    whence.end_dump(clear_context=False)
    x.cos()
    whence.begin_dump(tmp_path / "run")
    x.tan()
    whence.end_dump()
    whence.end_dump()
    assert process() == before
    assert [c.op_type for c in operators(open_run(tmp_path / "run"))] == ["ones", "sin", "tan"]


def test_modules_in_a_region_are_roots(tmp_path):
    model = Conv().eval()
    whence.begin_dump(tmp_path / "run")
    model(image()).sum()
    whence.end_dump()
    run = open_run(tmp_path / "run")
    assert operators(run, op="aten.convolution.default")[0].scope == "conv"
    assert operators(run, op="aten.sum.default")[0].root == "Conv"


class Scaled(TorchDispatchMode):
    """Makes the n-th result of one operator 1 % too large."""

    def __init__(self, name, at):
        super().__init__()
        self.name, self.left = name, at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func) == self.name:
            self.left -= 1
            if self.left == 0:
                out = out * 1.01
        return out


def run_of(path, make, use, around=contextlib.nullcontext, **options):
    seeded()
    model = make()
    with whence.capture(model, path, level="op", **options), around():
        use(model)
    return str(path)


@pytest.mark.parametrize(
    "make_use",
    [(Conv, train(image, 2)), (lambda: Block(drop=0.0), train(tokens, 2))],
    ids=["conv", "attention"],
)
def test_a_clean_pair_is_the_same_and_a_faulty_operator_is_named(make_use, tmp_path):
    reference = run_of(tmp_path / "ref", *make_use)
    clean = whence.compare(reference, run_of(tmp_path / "clean", *make_use), output=tmp_path / "0")
    assert (clean.status, clean.findings) == ("same", ())
    assert clean.coverage.share > 0.95
    name, scope = (
        ("aten.addmm.default", "fc") if make_use[0] is Conv else ("aten.addmm.default", "qkv")
    )
    for op, at, where, phase in (
        (name, 1, scope, "forward"),
        ("aten.mm.default", 2, None, "backward"),
    ):
        bad = run_of(tmp_path / f"bad{at}", *make_use, around=lambda op=op, at=at: Scaled(op, at))
        result = whence.compare(reference, bad, output=tmp_path / f"{at}")
        assert result.status == "different"
        finding = result.findings[0]
        assert len(result.findings) == 1, [f.name for f in result.findings]
        call = next(
            c
            for c in open_run(bad).calls
            if c.op == op and c.phase == phase and (where is None or c.scope == where)
        )
        assert (finding.op_type, finding.operator, finding.step, finding.evidence) == (
            call.op_type,
            op,
            0,
            "replay",
        )
        assert finding.phase == ("" if phase == "forward" else phase)
        assert finding.name.startswith(where or call.scope)
        assert finding.source.startswith(__file__)


def test_another_dtype_is_no_fault_and_modules_are_compared_by_modules(tmp_path):
    use = infer(tokens, torch.no_grad)
    make = lambda: nn.Sequential(Block(), Block()).eval()  # noqa: E731
    reference = run_of(tmp_path / "op", make, use)
    low = run_of(
        tmp_path / "low",
        lambda: make().bfloat16(),
        lambda m: infer(lambda: tokens().bfloat16(), torch.no_grad)(m),
    )
    assert whence.compare(reference, low, output=tmp_path / "1").findings == ()
    seeded()
    model = make()
    with whence.capture(model, tmp_path / "modules"):
        use(model)
    for n, pair in enumerate(
        [(reference, tmp_path / "modules"), (tmp_path / "modules", reference)]
    ):
        result = whence.compare(str(pair[0]), str(pair[1]), output=tmp_path / f"m{n}")
        assert result.status == "same"
        assert result.coverage.share == 1.0
        assert result.plan.unmatched_reference == result.plan.unmatched_target == ()


# ---- compiled, traced and scripted code

sees_detach_twice = pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="with torch 2.6 and 2.7 a mode of the program below a capture of operators sees each detach twice",
)


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_code_stays_compiled(dynamo, tmp_path):
    graphs, ran = [], []

    def backend(graph, inputs):
        graphs.append(graph)

        def compiled(*args):
            ran.append(torch._C._len_torch_dispatch_stack())
            return graph.forward(*args)

        return compiled

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            torch._dynamo.reset()
            self.before, self.inner = (
                nn.Linear(8, 8),
                torch.compile(Block(drop=0.0), backend=backend, fullgraph=True),
            )

        def forward(self, x):
            return self.inner(self.before(x)).sin()

    function = torch.compile(lambda v: v.mul(3).cos(), backend=backend, fullgraph=True)

    def use(model):
        with torch.no_grad():
            return [(model(v := tokens()), function(v), v.exp()) for _ in range(3)]

    run = unchanged(Outer, use, tmp_path / "run", level="op")
    assert len(graphs) == 4
    assert len(ran) == 12
    assert set(ran) == {0}
    inner = next(c for c in run.calls if c.scope == "inner" and c.kind == "module")
    assert inner.notes == ("compiled: inside not seen",)
    assert {"input.0", "output.0"} <= {r.slot for r in inner.refs}
    seen = [c.op_type for c in operators(run, step=0)]
    assert "sin" in seen
    assert "exp" in seen
    assert "cos" not in seen
    assert not [c for c in operators(run) if c.scope.startswith("inner")]
    assert any(n.kind == "inside-not-seen" for n in run.notes)


@sees_detach_twice
def test_tracers_are_not_listened_to(tmp_path):
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(2, 8)

    def traced():
        made = make_fx(lambda p, v: torch.func.functional_call(model, p, (v,)), tracing_mode="fake")
        return made(dict(model.named_parameters()), x).code, torch.export.export(
            model, (x,)
        ).graph_module.code

    bare = traced()
    with whence.capture(model, tmp_path / "run", level="op"):
        assert traced() == bare
        model(x)
    run = open_run(tmp_path / "run")
    assert [n for n in run.notes if n.kind == "error"] == []
    assert [c.op_type for c in operators(run, scope="0")] == ["t", "addmm"]


def test_function_transforms_and_scripted_code(tmp_path):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())).eval()

    def use(model):
        x = torch.randn(3, 8)
        grads = torch.func.vmap(torch.func.grad(lambda v: model(v).sum()))(x)
        return grads, torch.func.jvp(lambda v: v.sin(), (x,), (x,)), scripted(x)

    run = unchanged(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), use, tmp_path / "run", level="op"
    )
    assert operators(run)


# ---- whatever else runs


def test_errors_of_operators_are_raised_and_recorded(tmp_path):
    with whence.capture(nn.Linear(2, 2), tmp_path / "run", level="op"):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        torch.ones(3).sin()
    run = open_run(tmp_path / "run")
    assert operators(run, op="aten.mm.default")[0].error.startswith("RuntimeError")
    assert operators(run, op="aten.sin.default")[0].error == ""


def test_a_subclass_passes_through(tmp_path):
    class Tagged(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            plain = [a.inner if isinstance(a, Tagged) else a for a in args]
            return Tagged(func(*plain, **(kwargs or {})))

    with whence.capture(nn.Linear(2, 2), tmp_path / "run", level="op"):
        out = Tagged(torch.ones(3)) + 1
    assert type(out) is Tagged
    assert out.inner.tolist() == [2, 2, 2]
    run = open_run(tmp_path / "run")
    add = operators(run, op="aten.add.Tensor")[0]
    assert tensor(run, add, "output.0").tolist() == [2, 2, 2]


@sees_detach_twice
def test_a_mode_of_the_program_sees_only_the_program(tmp_path):
    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def use(model):
        with Counting() as mode:
            model(tokens()).sum().backward()
        return mode.seen

    run = unchanged(lambda: Block(drop=0.0), use, tmp_path / "run", level="op")
    assert operators(run, phase="backward")


def test_threads_that_call_the_model(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    with whence.capture(model, tmp_path / "run", level="op"):
        threads = [
            threading.Thread(target=lambda: [model(torch.ones(2, 4)) for _ in range(5)])
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = open_run(tmp_path / "run")
    assert len(operators(run, op="aten.addmm.default")) == 15
    assert all(run.calls[c.parent].scope == "0" for c in operators(run, op="aten.addmm.default"))


def test_a_custom_operator(tmp_path):
    @torch.library.custom_op("whence_test::twice", mutates_args=("into",))
    def twice(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        into.copy_(x)
        return x * 2

    whence.begin_dump(tmp_path / "run")
    out = torch.ops.whence_test.twice(torch.ones(2), torch.zeros(2))
    whence.end_dump()
    assert out.tolist() == [2, 2]
    found = operators(open_run(tmp_path / "run"), op="whence_test.twice.default")
    assert [r.slot for r in found[0].refs] == ["input.x", "input.into", "mutated.into", "output.0"]


def test_statistics_only_and_topology_only(tmp_path):
    for keep in ("stats", "none"):
        run = unchanged(
            lambda: Block(drop=0.0), train(tokens, 1), tmp_path / keep, level="op", keep=keep
        )
        assert all(r.elements is None for r in run.records)
        assert (run.records[0].statistics is None) == (keep == "none")


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 1},
        {"dedup": True},
        {"level": "op", "samples": -1},
        {"level": "op", "samples": 1, "keep": "stats"},
    ],
)
def test_options_that_cannot_be_meant(wrong, tmp_path):
    with pytest.raises(UsageError), whence.capture(nn.Linear(2, 2), tmp_path / "run", **wrong):
        pass


def test_a_failing_disk_ends_the_capture_not_the_program(tmp_path, monkeypatch):
    from whence.store import Writer

    model = nn.Linear(2, 2)
    expected = bits(model(torch.ones(1, 2)).detach())
    with whence.capture(model, tmp_path / "run", level="op"):
        monkeypatch.setattr(
            Writer, "record", lambda *a, **k: (_ for _ in ()).throw(ZeroDivisionError("no more"))
        )
        assert bits(model(torch.ones(1, 2)).detach()) == expected
        assert random_states() is not None
        assert bits(model(torch.ones(1, 2)).detach()) == expected
    monkeypatch.undo()
    assert torch._C._len_torch_dispatch_stack() == 0


def _record_of(run, op, slot, nth=0):
    made = [c for c in run.calls if c.op == op][nth]
    return run.records[next(r.record for r in made.refs if r.slot == slot)]


@pytest.mark.parametrize(
    "count", [30, 5000, 40000], ids=["small", "16 KiB", "more than is looked at whole"]
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_write_that_torch_does_not_count_is_seen(count, layout, tmp_path):
    x = torch.zeros(count // 10, 10)
    x = x.t() if layout == "transposed" else x
    with whence.capture(nn.Identity(), tmp_path / "run", level="op", keep="stats"):
        x.exp()
        x.numpy()[0, 0] = 7.0  # one element, where a sample looks too
        x.exp()
    run = open_run(tmp_path / "run")
    assert [
        _record_of(run, "aten.exp.default", "input.self", n).statistics.max for n in (0, 1)
    ] == [0.0, 7.0]
    if count <= 1 << 14:
        with whence.capture(nn.Identity(), tmp_path / "again", level="op", keep="stats"):
            x.exp()
            x.numpy()[1, 2] = 9.0  # anywhere
            x.exp()
        run = open_run(tmp_path / "again")
        assert [
            _record_of(run, "aten.exp.default", "input.self", n).statistics.max for n in (0, 1)
        ] == [7.0, 9.0]


def test_a_part_written_through_a_view_is_another_tensor(tmp_path):
    x = torch.zeros(300, 300)
    with whence.capture(nn.Identity(), tmp_path / "run", level="op", keep="stats"):
        y = x.clone()
        rows = y.view(90000)
        rows[5:9].add_(1)  # not where a sample looks
        rows.sum(), y.sum()
    run = open_run(tmp_path / "run")
    assert [
        _record_of(run, "aten.sum.default", "input.self", n).statistics.zero for n in (0, 1)
    ] == [89996, 89996]


def test_conjugate_and_negative_views_are_not_their_base(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 1j])
    with whence.capture(nn.Identity(), tmp_path / "run", level="op"):
        conj = z.conj()
        z.clone(), conj.clone(), z.clone(), z.imag.clone(), conj.imag.clone()
    run = open_run(tmp_path / "run")
    held = [
        run.array(_record_of(run, "aten.clone.default", "input.self", n).id).tolist()
        for n in range(5)
    ]
    assert held == [[1 + 2j, 3 - 1j], [1 - 2j, 3 + 1j], [1 + 2j, 3 - 1j], [2.0, -1.0], [-2.0, 1.0]]


@pytest.mark.parametrize("size", [8, 200])
def test_a_view_made_again_is_the_same_record_until_its_base_changes(size, tmp_path):
    weight = torch.randn(size, size)
    with whence.capture(nn.Identity(), tmp_path / "run", level="op", keep="stats"):
        for n in range(4):
            weight.t().sum()
            if n == 2:
                weight.mul_(2)
    run = open_run(tmp_path / "run")
    views = [
        next(r for r in c.refs if r.slot == "output.0")
        for c in run.calls
        if c.op == "aten.t.default"
    ]
    assert len({v.record for v in views[:3]}) == 1
    assert [v.edge for v in views] == ["", "identity", "identity", ""]
    summed = [
        next(r for r in c.refs if r.slot == "input.self").record
        for c in run.calls
        if c.op == "aten.sum.default"
    ]
    assert summed == [v.record for v in views]


@pytest.mark.parametrize(
    ("file", "is_the_users"),
    [
        (Path(whence.__file__).parent / "demo" / "story.py", True),
        (Path(whence.__file__).parent / "api.py", False),
        (Path(torch.__file__).parent / "nn" / "functional.py", False),
        (Path(threading.__file__), False),
        (Path("/somewhere/model.py"), True),
    ],
)
def test_the_line_that_is_shown_is_the_users(file, is_the_users):
    """The demo is a user of whence that comes with it."""
    assert is_the_program(str(file)) is is_the_users
