"""With a capture around it a program computes the same bits, draws the same random numbers, and
keeps its hooks and its memory.
"""

import collections
import contextlib
import copy
import dataclasses
import gc
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from live_torch import bits, call, captured, process, ref, seeded, slots, tensor, unchanged
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import whence
from whence.store import open_run

pytestmark = pytest.mark.torch
T, M = torch.Tensor, nn.Module


class Net(nn.Module):
    """Residual block with everything that has state: dropout, batch norm, a shared layer called
    twice, a hook.
    """

    def __init__(self, inplace=True):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.act, self.drop = (
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=inplace),
            nn.Dropout(0.3),
        )
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = nn.Parameter(self.fc1.weight.detach().t().clone())

    def forward(self, x):
        x = self.drop(self.act(self.norm(self.fc1(x))))
        x = x + self.fc2(self.fc2(x))
        return self.head(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def x(*shape):
    return torch.randn(*(shape or (4, 6)))


def train(model, steps=3, optimizer=torch.optim.Adam):
    opt = optimizer(model.parameters(), 0.01)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = model(x()).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


def hooked():
    net = Net()
    net.fc1.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    net.fc1.register_forward_hook(lambda m, a, o: o + 1)
    net.fc2.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    net.register_forward_hook(lambda m, a, k, o: o * 3, with_kwargs=True)
    return net


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.ReLU()) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    nothing: object = None
    many: tuple = ()


Pair = collections.namedtuple("Pair", "first second")


class Returns(nn.Module):
    """Returns what it is told to; the child makes sure it is a container."""

    def __init__(self, shape):
        super().__init__()
        self.child, self.shape = nn.Linear(6, 6), shape

    def forward(self, x):
        y = self.child(x)
        return self.shape(y)


RETURNED = {
    "none": lambda y: None,
    "dict": lambda y: {"a": y, "b": {"c": [y + 1, None]}},
    "tuple": lambda y: (y, (y * 2, {"k": y})),
    "namedtuple": lambda y: Pair(y, y * 2),
    "dataclass": lambda y: Answer(y, many=(y, y + 1)),
    "structseq": lambda y: y.max(dim=1),
    "number": lambda y: 3.5,
    "object": lambda y: types.SimpleNamespace(y=y, n=3),
    "generator": lambda y: None,
    "same": lambda y: (y, y),
}

INPUTS = {
    "transposed": lambda: x(6, 4).t(),
    "expanded": lambda: x(1, 6).expand(4, 6),
    "strided": lambda: x(8, 12)[::2, ::2],
    "offset": lambda: x(9, 6)[5:],
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 6),
    "one": lambda: x(1),
    "bool": lambda: x() > 0,
    "complex": lambda: torch.complex(x(), x()),
    "conjugated": lambda: torch.complex(x(), x()).conj(),
    "negative_view": lambda: torch._neg_view(x()),
    "imaginary": lambda: torch.tensor([1 + 2j]).conj().imag,
    "bf16": lambda: x().bfloat16(),
    "fp8": lambda: x().to(torch.float8_e4m3fn),
    "fp8_transposed": lambda: x().to(torch.float8_e5m2).t(),
    "int8": lambda: torch.arange(10, dtype=torch.int8),
    "uint16": lambda: torch.arange(10).to(torch.uint16),
    "nan": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "channels_last": lambda: x(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "inference": lambda: _inference(),
    "requires_grad": lambda: x().requires_grad_(),
    "grad_view": lambda: (x().requires_grad_() * 2).t(),
    "from_numpy": lambda: torch.from_numpy(np.arange(6.0)),
}


def _inference():
    with torch.inference_mode():
        return x()


class Passes(nn.Module):
    def forward(self, *args, **kwargs):
        return args[0] if args else next(iter(kwargs.values()))


class PassesOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf = Passes()

    def forward(self, *args, **kwargs):
        return self.leaf(*args, **kwargs)


# ---- programs


def autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x())


def inference(model):
    with torch.inference_mode():
        return model.eval()(x()), model(x())


def no_grad(model):
    with torch.no_grad():
        return model(x())


def functional(model):
    params = {k: v.detach() * 2 for k, v in model.named_parameters()}
    return torch.func.functional_call(model, params, (x(),)), model(x())


def gradients(model):
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p, row):
        return torch.func.functional_call(model, p, (row,)).square().sum()

    one = torch.func.grad(loss)(params, x(6))
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x())
    value, tangent = torch.func.jvp(lambda v: model(v), (x(),), (x(),))
    jac = torch.func.jacrev(lambda v: model(v))(x(6))
    return one, per_sample, value, tangent, jac


def forward_ad(model):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x(), x())
        out = model(dual)
        return tuple(torch.autograd.forward_ad.unpack_dual(out))


def second_order(model):
    inp = x().requires_grad_()
    (g,) = torch.autograd.grad(model(inp).square().sum(), inp, create_graph=True)
    return torch.autograd.grad(g.square().sum(), list(model.parameters()), allow_unused=True)


def deep_copied(model):
    twin = copy.deepcopy(model)
    return twin(x()), model(x())


def parametrized():
    net = Net()
    nn.utils.parametrizations.weight_norm(net.fc1)
    nn.utils.parametrizations.spectral_norm(net.fc2)
    return net


def pruned():
    net = Net()
    prune.l1_unstructured(net.fc1, "weight", 0.5)
    return net


def replaced_weight(model):
    a = model(x())
    model.fc1.weight = nn.Parameter(model.fc1.weight.detach() * 2)
    b = model(x())
    model.fc2.weight.data.mul_(3)
    return a, b, model(x())


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def encoder_fast(model):
    with torch.no_grad():
        return model.eval()(
            x(2, 5, 8), src_key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        )


def encoder_train(model):
    return train_on(model, x(2, 5, 8))


def train_on(model, value):
    loss = model(value).square().mean()
    loss.backward()
    return loss.detach()


def recurrent(model):
    return model(x(2, 5, 6)), model(x(2, 5, 6), (x(2, 2, 8), x(2, 2, 8)))


def micro_batches(model):
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for _ in range(3):
            model(x()).mean().backward()
        opt.step()
        opt.zero_grad()
    return model(x())


def checkpointed(model):
    v = x().requires_grad_()
    model(v).square().sum().backward()
    return v.grad


def child_alone(model):
    return model.fc1(x()), model(x()), model.act(x(4, 8))


class MakesModules(nn.Module):
    def forward(self, x):
        return nn.Softmax(dim=0)(nn.ReLU()(x)) + nn.LogSoftmax(dim=0)(nn.ReLU()(x))


class Swaps(nn.Module):
    """Hands its input on after changing it in place, as caches do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x, cache):
        y = self.fc(x)
        cache["k"] = torch.cat([cache["k"], y]) if "k" in cache else y
        x.mul_(2)
        return cache["k"].sum()


def with_cache(model):
    with torch.no_grad():
        cache, value = {}, x()
        return [model(value, cache) for _ in range(3)], cache, value


def lazy():
    return nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())


PROGRAMS = {
    "forward": (Net, lambda m: m(x())),
    "eval": (lambda: Net().eval(), lambda m: m(x())),
    "no_grad": (Net, no_grad),
    "inference_mode": (Net, inference),
    "autocast": (Net, autocast),
    "training": (Net, train),
    "training_sgd_momentum": (
        Net,
        lambda m: train(m, optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    ),
    "training_lbfgs_free": (Net, lambda m: train(m, optimizer=torch.optim.AdamW)),
    "micro_batches": (Net, micro_batches),
    "hooks": (hooked, train),
    "tied": (Tied, lambda m: train_on(m, torch.arange(5))),
    "checkpoint_reentrant": (lambda: Checkpointed(True), checkpointed),
    "checkpoint": (lambda: Checkpointed(False), checkpointed),
    "encoder_fast_path": (encoder, encoder_fast),
    "encoder_train": (encoder, encoder_train),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m: m(*[x(2, 5, 8)] * 3),
    ),
    "attention_eval": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        lambda m: m(*[x(2, 5, 8).detach()] * 3),
    ),
    "lstm": (lambda: nn.LSTM(6, 8, 2, batch_first=True, dropout=0.2), recurrent),
    "parametrized": (parametrized, train),
    "pruned": (pruned, train),
    "functional_call": (Net, functional),
    "transforms": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), gradients),
    "forward_ad": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()), forward_ad),
    "second_order": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)),
        second_order,
    ),
    "deepcopy": (Net, deep_copied),
    "replaced_weight": (Net, replaced_weight),
    "child_alone": (Net, child_alone),
    "makes_modules": (MakesModules, lambda m: [m(x()) for _ in range(3)]),
    "cache_in_a_dict": (Swaps, with_cache),
    "lazy": (lazy, lambda m: m(x())),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, tmp_path):
    make, use = PROGRAMS[name]
    unchanged(make, use, tmp_path / "run")


@pytest.mark.parametrize("name", RETURNED)
def test_whatever_is_returned(name, tmp_path):
    unchanged(lambda: Returns(RETURNED[name]), lambda m: m(x()), tmp_path / "run")


@pytest.mark.parametrize("name", INPUTS)
def test_whatever_is_given(name, tmp_path):
    def use(model):
        with torch.no_grad():
            return model(INPUTS[name]()), model(named=INPUTS[name]()), model([INPUTS[name]()])

    run = unchanged(PassesOn, use, tmp_path / "run")
    first = call(run, "leaf")
    record = run.records[ref(first, "input.0").record]
    seeded()
    PassesOn()
    given = INPUTS[name]()
    assert record.shape == tuple(given.shape)
    if record.elements is None:
        assert record.why
        assert name in ("meta", "sparse", "csr")
    else:
        assert bits(tensor(run, first, "input.0"))[-1] == bits(given.contiguous())[-1]
        assert record.stride == (() if given.is_contiguous() else given.stride())


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "stats"},
        {"keep": "none"},
        {"programs": False},
        {"slots": "input"},
        {"include": "fc1"},
        {"max_bytes": 0},
    ],
)
def test_with_options(options, tmp_path):
    unchanged(Net, train, tmp_path / "run", **options)


# ---- the models of the benchmark


BENCH = ("decoder", "vit", "vit_sdpa", "cnn", "lstm", "dec_sharp", "cnn_dc")


@pytest.fixture
def bench(shared, monkeypatch):
    folder = shared / "faultbench"
    if not (folder / "public").is_dir():
        pytest.skip("the benchmark models are not beside this checkout")
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    from public import models

    yield models
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("public", "fb"):
            del sys.modules[name]


def bench_model(models, name):
    if name == "decoder":
        return models.decoder(1, "s")
    if name == "vit_sdpa":
        return models.vit(1, fused=True)
    return getattr(models, name)(1)


@pytest.mark.shared
@pytest.mark.parametrize("name", BENCH)
def test_benchmark_models(name, bench, tmp_path):
    def use(model):
        _, inputs = bench_model(bench, name)
        with torch.no_grad():
            out = [model.eval()(*inputs)]
        model.train()
        outputs = model(*inputs)
        loss = sum(
            o.float().square().mean()
            for o in ([outputs] if isinstance(outputs, torch.Tensor) else outputs)
        )
        loss.backward()
        return [*out, outputs]

    unchanged(lambda: bench_model(bench, name)[0], use, tmp_path / "run", max_bytes=50_000_000)


@pytest.mark.shared
def test_benchmark_models_under_another_backend(bench, tmp_path):
    from fb.backends import make_backend

    def use(model):
        _, inputs = bench_model(bench, "decoder")
        with torch.no_grad(), make_backend("alt", 3):
            return model.eval()(*inputs)

    unchanged(lambda: bench_model(bench, "decoder")[0], use, tmp_path / "run")


# ---- modes and subclasses of the program's own


class SeesOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesOperators, SeesFunctions])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_a_mode_of_the_program_sees_only_the_program(mode, grad, tmp_path):
    def use(model):
        inputs = x(6, 4).t(), x()
        with mode() as watching, grad():
            out = [model(v) for v in inputs]
        return out, watching.seen

    run = unchanged(Net, use, tmp_path / "run")
    assert len(run.records) > 10


def test_a_mode_inside_the_model(tmp_path):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            with SeesOperators() as a, SeesFunctions() as b:
                y = self.fc(x.t().contiguous().t())
            return y, a.seen, b.seen

    unchanged(Inner, lambda m: m(x()), tmp_path / "run")


def test_a_default_device_is_a_mode(tmp_path):
    def use(model):
        with torch.device("cpu"):
            return model(torch.randn(4, 6))

    run = unchanged(lambda: Net().eval(), use, tmp_path / "run")
    assert call(run, "fc1").program


class Watched(torch.Tensor):
    """Counts what is done to it at the function level."""

    seen = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_sees_only_the_program(tmp_path):
    def use(model):
        Watched.seen = []
        with torch.no_grad():
            out = model(x().as_subclass(Watched)), model(x(6, 4).as_subclass(Watched).t())
        seen = list(Watched.seen)
        return [bits(o.as_subclass(torch.Tensor)) for o in out], seen

    run = unchanged(lambda: Net().eval(), use, tmp_path / "run")
    record = run.records[ref(call(run, "fc1"), "input.0").record]
    assert (record.subclass, record.shape) == ("Watched", (4, 6))
    assert run.array(record.id).shape == (4, 6)


def two_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor


def test_wrapper_subclasses_are_unwrapped_by_their_own_protocol(tmp_path):
    TwoTensor = two_tensors()

    def use(model):
        a = x(3, 6)
        return [bits(t) for t in _parts(model(TwoTensor(a, a * 2)))]

    run = unchanged(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()), use, tmp_path / "run")
    first = call(run, "0")
    assert {"input.0.a", "input.0.b"} <= set(slots(first))
    assert torch.equal(tensor(run, first, "input.0.b"), 2 * tensor(run, first, "input.0.a"))
    assert first.arguments["input.0"] == "TwoTensor(a, b)"


def _parts(t):
    return [getattr(t, n).detach() for n in t.__tensor_flatten__()[0]]


class Opaque(torch.Tensor):
    """A wrapper that tells nobody what it holds."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = torch.utils._pytree.tree_map(lambda v: v.inner if isinstance(v, Opaque) else v, args)
        out = func(*args, **(kwargs or {}))
        return Opaque(out) if isinstance(out, torch.Tensor) else out


def test_a_wrapper_without_a_protocol_is_a_record_with_a_reason(tmp_path):
    run = unchanged(
        lambda: nn.Sequential(nn.Tanh()), lambda m: bits(m(Opaque(x())).inner), tmp_path / "run"
    )
    record = run.records[ref(call(run, "0"), "input.0").record]
    assert record.elements is None
    assert "Opaque" in record.why
    assert record.subclass == "Opaque"


def test_fake_and_nested_tensors(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def use(model):
        with FakeTensorMode(allow_non_fake_inputs=True):
            shape = model(torch.ones(2, 6)).shape
        nested = torch.nested.nested_tensor([x(2, 6), x(3, 6)], layout=torch.jagged)
        out = model(nested)
        return shape, [bits(t.detach()) for t in out.unbind()]

    unchanged(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()), use, tmp_path / "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_tensors(tmp_path):
    def use(model):
        q = torch.quantize_per_tensor(x(), 0.1, 0, torch.qint8)
        return model(q).int_repr()

    run = unchanged(PassesOn, use, tmp_path / "run")
    record = run.records[ref(call(run, "leaf"), "input.0").record]
    assert record.dtype == "qint8"
    assert "qint8" in record.why


# ---- exceptions, generators, threads, nesting


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.fc, self.error = nn.Linear(6, 6), error

    def forward(self, x):
        self.fc(x)
        raise self.error


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Root(nn.Module):
    def __init__(self, child):
        super().__init__()
        self.before, self.child, self.after = nn.Linear(6, 6), child, nn.Linear(6, 6)

    def forward(self, x):
        x = self.before(x)
        with contextlib.suppress(ZeroDivisionError):
            self.child(x)
        return self.after(x)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such token"),
        KeyboardInterrupt(),
        Unprintable(),
        SystemExit(3),
        StopIteration(4),
        GeneratorExit(),
    ],
)
def test_what_a_forward_raises_is_raised(error, tmp_path):
    model = Root(Fails(error))
    before = process()
    with pytest.raises(type(error)) as caught, whence.capture(model, tmp_path / "run"):
        model(x())
    assert caught.value is error
    assert process() == before
    run = open_run(tmp_path / "run")
    assert run.ended == ""
    assert type(error).__name__ in call(run, "child").error
    assert type(error).__name__ in call(run, "").error
    assert call(run, "before").error == ""
    assert "output.0" in slots(call(run, "child.fc"))
    assert "output.0" not in slots(call(run, "child"))


def test_a_step_that_raised_is_followed_by_whole_ones(tmp_path):
    model = Root(Fails(ValueError("once")))

    def use(m):
        with contextlib.suppress(ValueError):
            m(x())
        m.child = nn.Identity()
        return m(x())

    run = captured(model, tmp_path / "run", use)
    again = call(run, "", at=1)
    assert (again.parent, again.error, again.number) == (-1, "", "0")
    assert call(run, "child", at=1).parent == again.id


def test_an_error_that_the_model_handles(tmp_path):
    run = unchanged(
        lambda: Root(Fails(ZeroDivisionError("fine"))), lambda m: m(x()), tmp_path / "run"
    )
    assert call(run, "child").error == "ZeroDivisionError: fine"
    assert call(run, "").error == ""


class Yields(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        for layer in (self.a, self.b, self.a):
            x = layer(x)
            yield x


class DrivesGenerators(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = Yields(), Yields(), nn.Linear(6, 6)

    def forward(self, x):
        out = [self.last(a + b) for a, b in zip(self.one(x), self.two(x))]
        left_open = self.one(x)
        next(left_open)
        return out


def test_generators(tmp_path):
    run = unchanged(DrivesGenerators, lambda m: (m(x()), list(m.one(x()))), tmp_path / "run")
    assert {c.parent for c in run.calls if c.scope == "last"} == {call(run, "").id}


def test_threads(tmp_path):
    before = process()
    one, two = Net().eval(), Net().eval()
    root = nn.ModuleList([one, two])
    inputs = [x() for _ in range(40)]
    with torch.no_grad():
        expected = [[bits(m(v)) for v in inputs] for m in (one, two)]
    got: list = [None, None, None]

    def work(place, model):
        with torch.no_grad():
            got[place] = [bits(model(v)) for v in inputs]

    with whence.capture(root, tmp_path / "run"):
        threads = [
            threading.Thread(target=work, args=(i, m)) for i, m in enumerate((one, two, one))
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert got == [expected[0], expected[1], expected[0]]
    assert process() == before
    run = open_run(tmp_path / "run")
    assert run.ended == ""
    assert [n for n in run.notes if n.kind == "error"] == []
    roots = [c for c in run.calls if c.parent == -1]
    assert len(roots) == 120
    assert sorted(c.step for c in roots if c.scope == "0") == list(range(80))
    kids = collections.Counter(c.parent for c in run.calls)
    assert {kids[c.id] for c in roots} == {7}
    assert len({c.order for c in run.calls}) == len(run.calls)


def test_nested_captures(tmp_path):
    before = process()

    def use(model):
        with whence.capture(model.fc2, tmp_path / f"inner{use.count}"):
            use.count += 1
            return model(x())

    use.count = 0
    outer = unchanged(lambda: Net().eval(), use, tmp_path / "outer")
    inner = open_run(tmp_path / "inner1")
    assert process() == before
    assert [c.scope for c in inner.calls] == ["", ""]
    assert all(c.program for c in inner.calls)
    assert len([c for c in outer.calls if c.scope == "fc2"]) == 2
    assert call(outer, "fc2").program


def test_captures_that_overlap(tmp_path):
    before = process()
    net = Net().eval()
    first, second = whence.capture(net, tmp_path / "1"), whence.capture(net, tmp_path / "2")
    first.__enter__()
    second.__enter__()
    net(x())
    first.__exit__(None, None, None)
    net(x())
    second.__exit__(None, None, None)
    assert process() == before
    assert [len([c for c in open_run(tmp_path / n).calls if c.parent == -1]) for n in "12"] == [
        1,
        2,
    ]


def test_someone_else_wraps_call_meanwhile(tmp_path):
    from torch._dynamo import utils

    original = nn.Module.__call__
    assert utils.unpatched_nn_module_call is original
    net = Net().eval()
    with whence.capture(net, tmp_path / "run"):
        ours = nn.Module.__call__
        nn.Module.__call__ = lambda self, *a, **k: ours(self, *a, **k)
    theirs = nn.Module.__call__
    try:
        assert net(x()).shape == (4, 6)
        assert nn.Module.__call__ is theirs
    finally:
        nn.Module.__call__ = original
    assert (
        utils.unpatched_nn_module_call is original
    )  # else dynamo compiles our wrapper from here on


# ---- memory


class Leaves(nn.Module):
    """Notes which activations still live when it is done."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.alive: list = []

    def forward(self, x):
        watching = []
        for layer in self.layers:
            x = layer(x)
            watching.append(weakref.ref(x))
            self.alive.append(sum(w() is not None for w in watching))
        return x


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_activations_die_as_they_do_without(grad, tmp_path):
    def use(model):
        with grad():
            model(x())
        return model.alive

    gc.disable()
    try:
        unchanged(Leaves, use, tmp_path / "run")
    finally:
        gc.enable()


class Cache:
    """As the caches of transformers: a plain object with a list of layers that hold the tensors."""

    def __init__(self):
        self.layers = [types.SimpleNamespace(k=None) for _ in range(2)]


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x, cache):
        for fc, layer in zip(self.fc, cache.layers):
            y = fc(x)
            layer.k = y if layer.k is None else torch.cat([layer.k, y])
        return layer.k.sum()


def test_nothing_outlives_its_owner(tmp_path):
    model = Caches().eval()
    gc.disable()
    try:
        with torch.no_grad(), whence.capture(model, tmp_path / "run"):
            cache = Cache()
            for _ in range(3):
                out = model(x(), cache)
            watching = [weakref.ref(cache.layers[0].k), weakref.ref(out), weakref.ref(cache)]
            storage = cache.layers[1].k.untyped_storage()
            weak = torch.multiprocessing.reductions.StorageWeakRef(storage)
            del cache, out, storage
            assert [w() for w in watching] == [None, None, None]
            assert weak.expired()
            temporary = nn.Linear(6, 6)
            model.fc[0], old = temporary, weakref.ref(model.fc[0].weight)
            model(x(), Cache())
            assert old() is None
            temporary, again = weakref.ref(temporary.weight), None
            model.fc[0].weight = nn.Parameter(torch.ones(6, 6))
            assert temporary() is again
    finally:
        gc.enable()


def test_a_capture_that_ended_holds_nothing(tmp_path):
    model = Net()
    with whence.capture(model, tmp_path / "run") as session:
        model(x())
    gone = [weakref.ref(model), weakref.ref(model.fc1.weight)]
    del model
    gc.collect()
    assert [g() for g in gone] == [None, None]
    del session


def test_a_model_that_is_let_go_frees_its_parameters(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    held = nn.Sequential(model)
    with whence.capture(held, tmp_path / "run"):
        held(torch.ones(1, 2))  # with a graph: its backward pass may still come
        kept = [weakref.ref(p) for p in model.parameters()]
        del held[0], model
        gc.collect()
        assert [k() for k in kept] == [None, None]


@pytest.mark.parametrize("clip", [
    lambda p: nn.utils.clip_grad_value_(p, clip_value=0.01),
    lambda p: nn.utils.clip_grad_value_(p, 0.01, foreach=True),
    lambda p: nn.utils.clip_grad_value_(parameters=p, clip_value=0.01),
    lambda p: nn.utils.clip_grad_norm_(parameters=p, max_norm=0.01, norm_type=1.0, foreach=False),
    lambda p: nn.utils.get_total_norm(tensors=[q.grad for q in p], foreach=False),
])  # fmt: skip
def test_arguments_of_clipping_may_be_named(clip, tmp_path):
    def clipped(model):
        model(torch.ones(1, 2)).sum().backward()
        returned = clip(list(model.parameters()))
        return [returned, *(p.grad for p in model.parameters())]

    model = nn.Linear(2, 2)
    bare = clipped(copy.deepcopy(model))
    with whence.capture(model, tmp_path / "run") as session:
        inside = clipped(model)
        assert session.active
    assert all(a is b or torch.equal(a, b) for a, b in zip(bare, inside, strict=True))


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_", "get_total_norm"])
def test_functions_that_clip_may_be_wrapped_by_others(name, tmp_path, monkeypatch):
    previous = getattr(nn.utils, name)
    monkeypatch.setattr(nn.utils, name, lambda *args, **kwargs: previous(*args, **kwargs))
    model = nn.Linear(2, 2)
    with whence.capture(model, tmp_path / "run") as session:
        model(torch.ones(1, 2)).sum().backward()
        given = [p.grad if "total" in name else p for p in model.parameters()]
        getattr(nn.utils, name)(given, *([] if "total" in name else [0.01]))
        assert session.active
