"""--level op: code that one side has otherwise is judged by its module; a fault in it is named,
with its line; nothing else is.
"""

import re

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import whence
from whence.errors import ReplayRefused
from whence.records import Call, Record, Ref
from whence.replay.composed import compose
from whence.report.answer import answer

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
torch.set_num_threads(1)


class Experts(nn.Module):
    """Two of three experts for each token; `way` says how they are computed."""

    def __init__(self, way, act=F.silu):
        super().__init__()
        self.way, self.act = way, act
        self.up, self.down = (
            nn.Parameter(torch.randn(3, 12, 8) * 0.3),
            nn.Parameter(torch.randn(3, 8, 12) * 0.3),
        )

    def one(self, x, e):
        return F.linear(self.act(F.linear(x, self.up[e])), self.down[e])

    def forward(self, x, weights, chosen):
        out = torch.zeros_like(x)
        if self.way == "loop":
            for e in range(3):
                token, k = torch.where(chosen == e)
                if len(token):
                    out.index_add_(0, token, self.one(x[token], e) * weights[token, k, None])
        elif self.way == "sorted":
            flat = chosen.reshape(-1)
            order = torch.argsort(flat, stable=True)
            token, held, begin = order // 2, weights.reshape(-1)[order], 0
            made = torch.empty(len(order), 8)
            for e, n in enumerate(torch.bincount(flat, minlength=3).tolist()):
                part = slice(begin, begin + n)
                made[part] = self.one(x[token[part]], e) * held[part, None]
                begin += n
            out.index_add_(0, token, made)
        else:
            h = self.act(torch.einsum("th,eih->eti", x, self.up))
            y = torch.einsum("eti,ehi->eth", h, self.down)
            out = torch.einsum("eth,te->th", y, torch.zeros(len(x), 3).scatter_(1, chosen, weights))
        return out


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)

    def forward(self, x):
        found = torch.topk(self.gate(x).softmax(-1), 2)
        return found.values, found.indices


class Sparse(nn.Module):
    def __init__(self, way, act):
        super().__init__()
        self.router, self.experts, self.out = Router(), Experts(way, act), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(x + self.experts(x, *self.router(x)))


class Norm(nn.Module):
    def __init__(self, eps, fused):
        super().__init__()
        self.eps, self.fused, self.weight = eps, fused, nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x):
        if self.fused:
            return F.rms_norm(x, (8,), self.weight, self.eps)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, fused, scale=0.5):
        super().__init__()
        self.fused, self.scale = fused, scale
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        else:
            y = (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, fused, scale=0.5, eps=1e-6):
        super().__init__()
        self.norm, self.attention = Norm(eps, fused), Attention(fused, scale)

    def forward(self, x):
        return x + self.attention(self.norm(x))


def ran(path, make, x, train=False):
    """The run of a model at the level of operators: a forward pass, or a step of training."""
    torch.manual_seed(0)
    model = make()
    with whence.capture(model, path, level="op"):
        if train:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(x).square().mean().backward()
            optimizer.step()
        else:
            with torch.no_grad():
                model(x)
    return path


TOKENS = torch.randn(9, 8, generator=torch.Generator().manual_seed(3))
TEXT = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))


def sparse(way, act=F.silu):
    return lambda: Sparse(way, act)


def layers(*args, **kwargs):
    return lambda: nn.Sequential(Layer(*args, **kwargs), Layer(*args, **kwargs))


def compared(folder, one, other, x, train=False):
    return whence.compare(ran(folder / "ref", one, x, train), ran(folder / "tgt", other, x, train))


@pytest.mark.parametrize(
    "ways", [("loop", "sorted"), ("sorted", "loop"), ("loop", "batched"), ("batched", "sorted")]
)
def test_experts_written_otherwise_are_the_same(tmp_path, ways):
    result = compared(tmp_path, sparse(ways[0]), sparse(ways[1]), TOKENS)
    assert (result.status, result.findings) == ("same", ())
    assert result.coverage.share == 1.0
    assert any(
        "experts: both runs have other operators there" in note for note in result.plan.notes
    )


def test_a_wrong_function_in_rewritten_experts_is_named_with_its_line(tmp_path):
    result = compared(tmp_path, sparse("loop"), sparse("batched", F.gelu), TOKENS)
    (found,) = result.findings
    assert (found.name, found.cause, found.operator) == ("experts", "semantic", "aten.gelu.default")
    assert "gelu runs only in the target in place of silu" in found.sentence
    assert re.search(r"test_rewritten_modules\.py:\d+$", found.source)


@pytest.mark.parametrize("train", [False, True])
def test_fused_attention_and_norms_are_the_same(tmp_path, train):
    result = compared(tmp_path, layers(False), layers(True), TEXT, train)
    assert result.findings == ()
    assert result.status == "same"


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("changed", "where"), [({"scale": 0.55}, "attention"), ({"eps": 1e-2}, "norm")]
)
def test_a_fault_in_rewritten_code_is_the_only_one(tmp_path, changed, where, train):
    result = compared(tmp_path, layers(False), layers(True, **changed), TEXT, train)
    assert {f.name.rpartition(".")[2] for f in result.findings} == {where}
    assert [(f.cause, f.phase) for f in result.findings] == [("semantic", "")]


class Cache:
    """Keys and values of the tokens so far, which a module reads although it is given no tensor."""

    def __init__(self):
        self.keys = self.values = None


class CachedAttention(Attention):
    """left: what a layer leaves to the next beside its result, in no argument of either."""

    def __init__(self, fused, left, scale=0.5, stale=1.0):
        super().__init__(fused, scale)
        self.left, self.stale = left, stale

    def forward(self, x, cache):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if cache.keys is not None:
            k = torch.cat([cache.keys if self.stale == 1 else cache.keys * self.stale, k], 2)
            v = torch.cat([cache.values, v], 2)
        cache.keys, cache.values = k, v
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        else:
            y = (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v
        if self.left:
            y = y + self.left.pop()
        elif self.left is not None:
            self.left.append(y * 0.5)
        return self.o(y.transpose(1, 2).flatten(-2))


class Decoder(nn.Module):
    """Two layers, each with a cache. wrong: the layer that is changed. aside: does the first leave
    something to the second?
    """

    def __init__(self, fused, wrong=1, aside=False, **changed):
        super().__init__()
        left = [] if aside else None
        self.layers = nn.ModuleList(
            [CachedAttention(fused, left, **(changed if i == wrong else {})) for i in range(2)]
        )
        self.caches = [Cache(), Cache()]

    def forward(self, x):
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = x + layer(x, cache)
        return x


def generated(path, fused, dtype=torch.float32, **changed):
    """The run of four steps that share a cache, at the level of operators."""
    torch.manual_seed(0)
    model = Decoder(fused, **changed).to(dtype)
    with whence.capture(model, path, level="op"), torch.no_grad():
        for length in (6, 1, 1, 1):
            generator = torch.Generator().manual_seed(length)
            model(torch.randn(2, length, 8, generator=generator).to(dtype))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aside", [False, True])
def test_what_earlier_calls_left_is_the_target_s_own(tmp_path, dtype, aside):
    ref = generated(tmp_path / "ref", False, aside=aside)
    tgt = generated(tmp_path / "tgt", True, dtype, aside=aside)
    result = whence.compare(ref, tgt)
    assert (result.status, result.findings) == ("same", ())
    assert any("other operators" in note for note in result.plan.notes)
    assert "rounding explains every difference" in answer(result)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("changed", [{"scale": 0.55}, {"stale": 1.02}])
def test_a_fault_beside_a_cache_is_the_only_one(tmp_path, changed, wrong):
    ref = generated(tmp_path / "ref", False)
    tgt = generated(tmp_path / "tgt", True, wrong=wrong, **changed)
    result = whence.compare(ref, tgt)
    assert {(f.name, f.cause) for f in result.findings} == {(f"layers.{wrong}", "semantic")}
    assert "rounding explains every difference" not in answer(result)


def test_what_a_faulty_layer_left_aside_is_not_blamed_on_its_reader(tmp_path):
    ref = generated(tmp_path / "ref", False, aside=True)
    tgt = generated(tmp_path / "tgt", True, aside=True, wrong=0, scale=0.55)
    result = whence.compare(ref, tgt)
    assert {f.name for f in result.findings} == {"layers.0"}


def test_a_further_run_of_the_reference_is_brought_to_the_same_form(tmp_path):
    again = ran(tmp_path / "again", sparse("loop"), TOKENS)
    ref, tgt = (
        ran(tmp_path / "ref", sparse("loop"), TOKENS),
        ran(tmp_path / "tgt", sparse("batched"), TOKENS),
    )
    result = whence.compare(ref, tgt, again=[again])
    assert (result.status, result.repetition.calls) == ("same", 0)


def test_operators_that_all_face_each_other_stay_calls(tmp_path):
    result = compared(tmp_path, layers(False), layers(False, scale=0.55), TEXT)
    assert [(f.name, f.op_type) for f in result.findings] == [("0.attention", "mul")]
    assert not any("other operators" in note for note in result.plan.notes)


def test_a_wrong_gradient_in_a_rewritten_module_is_a_fault(tmp_path):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * torch.sigmoid(x)  # without the second term

    class Act(nn.Module):
        def __init__(self, wrong):
            super().__init__()
            self.wrong = wrong

        def forward(self, x):
            return Wrong.apply(x) if self.wrong else F.silu(x)

    def make(wrong):
        return lambda: nn.Sequential(nn.Linear(8, 8), Act(wrong), nn.Linear(8, 8))

    result = compared(tmp_path, make(False), make(True), TOKENS, train=True)
    assert result.status == "different"
    assert [f.name for f in result.findings] == ["1"]


def operator(number, op, given, made, program="", **more):
    refs = tuple(Ref(f"input.{k}", r) for k, r in enumerate(given)) + tuple(
        Ref(f"output.{k}", r) for k, r in enumerate(made)
    )
    return Call(
        number,
        "m",
        "Net",
        0,
        number,
        op=op,
        kind="operator",
        op_type=op,
        refs=refs,
        program=program,
        parent=9,
        **more,
    )


def test_what_cannot_be_run_again_is_not_composed():
    records = [Record(i, "float32", (2,), why="not kept") for i in range(3)]
    module = Call(9, "m", "Net", 0, 9, refs=(Ref("input.0", 0), Ref("output.0", 1)))
    with pytest.raises(ReplayRefused, match=r"aten\.rand\.default: draws random numbers"):
        compose(
            module,
            [operator(0, "aten.rand.default", [0], [1], no_program="draws random numbers")],
            {},
            records,
        )
    with pytest.raises(ReplayRefused, match="made where no operator was recorded"):
        compose(module, [], {}, records)


def test_code_that_writes_parts_of_a_tensor_is_the_same_as_code_that_joins_them(tmp_path):
    """`made[part] = ...` writes memory that a later operator reads under another record."""

    class Filled(nn.Module):
        def forward(self, x):
            made = torch.empty(4, 8)
            made[:2] = x[:2] * 2
            made[2:] = x[2:4] + 1
            return made.sum(0)

    class Joined(nn.Module):
        def forward(self, x):
            return torch.cat((x[:2] * 2, x[2:4] + 1)).sum(0) if x.shape[0] else x

    result = compared(
        tmp_path, lambda: nn.Sequential(Filled()), lambda: nn.Sequential(Joined()), TOKENS
    )
    assert (result.status, result.findings) == ("same", ())
    other = compared(
        tmp_path / "b", lambda: nn.Sequential(Filled()), lambda: nn.Sequential(Shifted()), TOKENS
    )
    (found,) = other.findings
    assert found.name == "0"
    right = np.concatenate((TOKENS[:2].numpy() * 2, TOKENS[2:4].numpy() + 1)).sum(0)
    assert np.isclose(found.worst_reference, right[found.worst_index], rtol=1e-6)


class Shifted(nn.Module):
    def forward(self, x):
        return torch.cat((x[:2] * 2, x[2:4] + 1.5)).sum(0)
