"""Models that are divided otherwise: one function in float64, or two."""

import math

import pytest

torch = pytest.importorskip("torch")

from pathlib import Path  # noqa: E402

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import whence  # noqa: E402

WIDTH, DEPTH = 24, 3


class Cell(nn.Module):
    """A product behind a norm, with a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.shrink = nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.shrink(self.act(self.grow(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell() for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = cell(x)
        return self.last(x)


class Written(nn.Module):
    """The same in code of one module."""

    def __init__(self, net: Net, *, eps: float = 1e-5, scale: float = 1.0, folds: bool = False):
        super().__init__()
        self.eps, self.scale, self.folds = eps, scale, folds
        names = {name.replace(".", "_"): tensor for name, tensor in net.named_parameters()}
        for name, tensor in names.items():
            tensor = tensor.detach().clone()
            for cell in range(DEPTH) if folds else ():
                gain = names[f"cells_{cell}_gain"].detach()
                if name == f"cells_{cell}_shrink_weight":
                    tensor = tensor * gain[:, None]
                if name == f"cells_{cell}_shrink_bias":
                    tensor = tensor * gain
            self.register_parameter(name, nn.Parameter(tensor))

    def of(self, name: str) -> Tensor:
        return getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            spread, mean = torch.var_mean(x, -1, keepdim=True, unbiased=False)
            eps = self.eps if i == 1 else 1e-5
            h = (x - mean) * torch.rsqrt(spread + eps)
            h = h * self.of(f"cells_{i}_norm_weight") + self.of(f"cells_{i}_norm_bias")
            h = F.gelu(h @ self.of(f"cells_{i}_grow_weight").T + self.of(f"cells_{i}_grow_bias"))
            h = h @ self.of(f"cells_{i}_shrink_weight").T + self.of(f"cells_{i}_shrink_bias")
            h = h if self.folds else h * self.of(f"cells_{i}_gain")
            x = x + h * (self.scale if i == 1 else 1.0)
        return x @ self.last_weight.T + self.last_bias


def compared(folder: Path, first: nn.Module, second: nn.Module, x: Tensor, level: str = "modules"):
    runs = folder / "first", folder / "second"
    for model, run in zip((first, second), runs, strict=True):
        with torch.no_grad(), whence.capture(model, run, level=level):
            model(x)
    return whence.compare(*runs)


def net(dtype) -> tuple[Net, Tensor]:
    torch.manual_seed(3)
    return Net().to(dtype), torch.randn(5, WIDTH).to(dtype)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_in_one_piece_is_the_same(tmp_path, dtype, folds):
    model, x = net(dtype)
    written = Written(model.float(), folds=folds).to(dtype)
    assert compared(tmp_path, model.to(dtype), written, x).status == "same"


@pytest.mark.parametrize("fault", [{"eps": 1e-2}, {"scale": 1.03}, {"scale": 0.9}])
def test_less_than_its_rounding_is_a_fault_where_nothing_was_folded(tmp_path, fault):
    model, x = net(torch.bfloat16)
    answer = compared(tmp_path, model, Written(model, **fault).to(torch.bfloat16), x)
    assert answer.status == "different"
    assert "in float64" in answer.findings[0].sentence


def test_a_few_times_its_rounding_is_a_fault_beside_a_fold(tmp_path):
    model, x = net(torch.bfloat16)
    written = Written(model.float(), scale=0.9, folds=True).to(torch.bfloat16)
    answer = compared(tmp_path, model.to(torch.bfloat16), written, x)
    assert answer.status == "different"
    assert answer.findings[0].cause == "semantic"


class Attention(nn.Module):
    """Scores are scaled behind the product, or the query before it."""

    def __init__(self, *, before: bool = False, by: float = 1.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.before, self.by = before, by

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scale = self.by / math.sqrt(WIDTH)
        scores = (q * scale) @ k.mT if self.before else q @ k.mT * scale
        return self.o(scores.softmax(-1) @ v)


class Stack(nn.Module):
    def __init__(self, **how) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(**how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(("by", "status"), [(1.0, "same"), (1.3, "different")])
def test_a_scale_on_the_query_among_operators(tmp_path, by, status):
    torch.manual_seed(5)
    first, second = Stack(), Stack(before=True, by=by)
    second.load_state_dict(first.state_dict())
    x = 4 * torch.randn(2, 9, WIDTH)
    pair = (m.to(torch.bfloat16) for m in (first, second))
    assert compared(tmp_path, *pair, x.to(torch.bfloat16), level="op").status == status


class Scaled(nn.Module):
    """A norm by size alone, whose weight comes behind its cast or, `early`, before it."""

    def __init__(self, *, early: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.early, self.eps = nn.Parameter(torch.rand(WIDTH) + 0.5), early, eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * self.weight.float()).to(x.dtype) if self.early else self.weight * h.to(x.dtype)


class Running(nn.Module):
    """A decaying sum over places, one after the other or, `at_once`, by a table of powers."""

    def __init__(self, *, at_once: bool = False, seen: int = 99) -> None:
        super().__init__()
        self.inner, self.rate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.outer, self.at_once, self.seen = nn.Linear(WIDTH, WIDTH), at_once, seen

    def forward(self, x: Tensor) -> Tensor:
        x, rate = self.inner(x), torch.sigmoid(self.rate)
        if self.at_once:
            gaps = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
            table = rate ** gaps.clamp(min=0)[..., None]
            is_seen = (gaps >= 0) & (gaps < self.seen)
            return self.outer(torch.einsum("tsd,bsd->btd", table * is_seen[..., None], x))
        state, states = torch.zeros_like(x[:, 0]), []
        for place in range(x.shape[1]):
            state = rate * state + x[:, place]
            states.append(state)
        return self.outer(torch.stack(states, 1))


@pytest.mark.parametrize(
    ("kind", "how", "fault"),
    [(Scaled, {"early": True}, {"eps": 3e-3}), (Running, {"at_once": True}, {"seen": 7})],
)
def test_less_than_the_rounding_of_operators_is_a_fault(tmp_path, kind, how, fault):
    answers = []
    for number, options in enumerate((how, {**how, **fault})):
        torch.manual_seed(6)
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH))
        second = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(**options), nn.Linear(WIDTH, WIDTH))
        second.load_state_dict(first.state_dict())
        pair = (m.to(torch.bfloat16) for m in (first, second))
        x = torch.randn(2, 9, WIDTH).to(torch.bfloat16)
        answers.append(compared(tmp_path / str(number), *pair, x, level="op"))
    assert [answer.status for answer in answers] == ["same", "different"]
    assert answers[1].findings[0].name.startswith("1")


class Experts(nn.Module):
    """Two of four experts a row: each on its rows, or all of them on every row."""

    def __init__(self, *, dense: bool = False) -> None:
        super().__init__()
        self.route, self.dense = nn.Linear(WIDTH, 4), dense
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.route(rows).softmax(-1).topk(2, -1)
        if self.dense:
            table = torch.zeros(len(rows), 4, dtype=x.dtype).scatter(1, chosen, weights)
            every = torch.stack([e.weight for e in self.experts])
            every = torch.einsum("nd,efd->nef", rows, every)
            every = every + torch.stack([e.bias for e in self.experts])
            return x + torch.einsum("nef,ne->nf", every, table).view_as(x)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return x + out.view_as(x)


def test_experts_on_every_row_are_the_same_among_operators(tmp_path):
    torch.manual_seed(7)
    first, second = (nn.Sequential(Experts(dense=d), nn.Linear(WIDTH, 5)) for d in (False, True))
    second.load_state_dict(first.state_dict())
    pair = (m.to(torch.bfloat16) for m in (first, second))
    x = torch.randn(2, 9, WIDTH).to(torch.bfloat16)
    assert compared(tmp_path, *pair, x, level="op").status == "same"


class Router(nn.Module):
    """The best two of eight and their shares, which are divided where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = scores.topk(2, -1).indices
        shares = scores.gather(-1, chosen)
        shares /= shares.sum(-1, keepdim=True)
        return chosen, shares


class Routed(nn.Module):
    """Attention, and gains that a router chooses."""

    def __init__(self, *, before: bool = False) -> None:
        super().__init__()
        self.mix, self.router = Attention(before=before), Router()
        self.gains = nn.Parameter(torch.rand(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        chosen, shares = self.router(x)
        return x * (self.gains[chosen] * shares[..., None].to(x.dtype)).sum(-2)


@pytest.mark.parametrize("seed", [10, 12])
def test_a_choice_that_rounding_turns_is_no_constant(tmp_path, seed):
    torch.manual_seed(seed)
    first, second = (
        nn.Sequential(
            Routed(before=before),
            nn.Linear(WIDTH, WIDTH),
            Routed(before=before),
            nn.Linear(WIDTH, 5),
        )
        for before in (False, True)
    )
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 40, WIDTH).to(torch.bfloat16)
    pair = (m.to(torch.bfloat16) for m in (first, second))
    assert compared(tmp_path, *pair, x, level="op").status == "same"


class Stream(nn.Module):
    """What layers add up, in their dtype or, `wide`, in float32."""

    def __init__(self, *, wide: bool = False, by: float = 1.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Scaled() for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last, self.wide, self.by = Scaled(), wide, by
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.float() if self.wide else x
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = (
                x * self.by + layer(norm(x).to(kind))
                if number == 1
                else x + layer(norm(x).to(kind))
            )
        return self.head(self.last(x).to(kind))


@pytest.mark.parametrize(("by", "status"), [(1.0, "same"), (1.02, "different")])
def test_what_drowns_behind_a_wider_sum_is_not_taken_back(tmp_path, by, status):
    torch.manual_seed(8)
    first, second = Stream(), Stream(wide=True, by=by)
    second.load_state_dict(first.state_dict())
    pair = (m.to(torch.bfloat16) for m in (first, second))
    x = torch.randn(4, 9, WIDTH).to(torch.bfloat16)
    assert compared(tmp_path, *pair, x).status == status


class Inlined(Cell):
    """The norm runs without a call of its module."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.shrink(self.act(self.grow(self.norm.forward(x))))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", [False, True])
def test_a_parameter_held_by_the_code_around_is_rounded_as_there(tmp_path, seed, fault):
    torch.manual_seed(seed)
    first, x = Net(), torch.randn(2, 9, WIDTH)
    for cell in first.cells:
        nn.init.normal_(cell.norm.weight)
        nn.init.normal_(cell.norm.bias)
    second = Net()
    second.cells[0] = Inlined()
    second.load_state_dict(first.state_dict())
    if fault:
        second.cells[0].norm.eps = 0.2
    for name, model, kind in (("a", first, torch.float32), ("b", second, torch.bfloat16)):
        with torch.no_grad(), whence.capture(model.to(kind), tmp_path / name):
            model(x.to(kind))
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    assert result.status == ("different" if fault else "same")
    if fault:
        assert result.findings[0].name == "cells.0.norm"
