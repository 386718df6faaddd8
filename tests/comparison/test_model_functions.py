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
