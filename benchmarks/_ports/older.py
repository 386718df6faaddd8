"""Ports of nets of other days: convolutions with norms folded into them, and a recurrent tagger."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _ports.pair import Pair, Port, Ported, filled, forward, normal, own, parameter, whole


class ResidualBlock(nn.Module):
    """Two convolutions with norms, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(after), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.down = nn.Sequential()
        if before != after:
            around = nn.Conv2d(before, after, 1, stride, bias=False)
            self.down = nn.Sequential(around, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, channels, height, width)."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.down(x))


class Residuals(nn.Module):
    """A stem and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2)
        self.mean, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes."""
        x = self.layer1(self.pool(self.relu(self.bn(self.conv(x)))))
        return self.fc(self.mean(self.layer2(x)).flatten(1))


class ResidualsPort(Ported):
    """Norms folded into the convolutions before them."""

    def __init__(self, model: Residuals, fault: str) -> None:
        super().__init__(fault)
        a, b = model.layer1, model.layer2
        pairs = [(model.conv, model.bn), (a.conv1, a.bn1), (a.conv2, a.bn2)]
        pairs += [(b.conv1, b.bn1), (b.conv2, b.bn2), (b.down[0], b.down[1])]
        self.convs = nn.ModuleList(self.folded(i, *pair) for i, pair in enumerate(pairs))
        self.weight, self.bias = parameter(model.fc.weight), parameter(model.fc.bias)

    def folded(self, i: int, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
        """One convolution for both."""
        scale = norm.weight / torch.sqrt(
            norm.running_var + (1e-1 if self.has("eps", i) else norm.eps)
        )
        mean = 0 if self.has("mean", i) else norm.running_mean
        sizes = conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding
        module = nn.Conv2d(*sizes)
        module.weight = parameter(conv.weight * scale[:, None, None, None])
        module.bias = parameter(norm.bias - mean * scale)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes."""
        pool = F.avg_pool2d if self.fault == "average" else F.max_pool2d
        x = pool(self.convs[0](x).relu(), 3, 2, 1)
        x = (self.convs[2](self.convs[1](x).clamp_min(0)) + x).relu()
        y = self.convs[3](x).relu()
        y = y.clamp(max=1) if self.fault == "clamped" else y
        x = self.convs[4](y) + self.convs[5](x)
        x = x if self.fault == "open" else x.relu()
        x = x.amax((2, 3)) if self.fault == "highest" else x.mean((2, 3))
        return torch.addmm(self.bias, x, self.weight.t())


def residuals(fault: str) -> Pair:
    """Convolutions with folded norms."""
    model = filled(Residuals())
    for i, module in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        module.running_mean.copy_(0.3 * normal(module.num_features, seed=i))
        module.running_var.copy_(0.5 + normal(module.num_features, seed=i + 50).abs())
    return Pair(model, ResidualsPort(model, fault), (normal(2, 3, 33, 33),), forward)


class Tagger(nn.Module):
    """Two layers both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(50, 24), nn.Linear(64, 7)
        self.rnn = nn.LSTM(24, 32, 2, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of each word."""
        return self.out(self.rnn(self.emb(ids))[0])


class TaggerPort(Ported):
    """Gates by hand, one direction after the other."""

    def __init__(self, model: Tagger, fault: str) -> None:
        super().__init__(fault)
        self.lookup, self.head = own(model.emb), own(model.out)
        rnn = model.rnn
        self.numbers = nn.ParameterDict()
        for i in range(2):
            for way, end in (("forth", ""), ("back", "_reverse")):
                parts = {
                    n: getattr(rnn, f"{n}_l{i}{end}")
                    for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                }
                self.numbers[f"{way}{i}_w"] = parameter(parts["weight_ih"])
                self.numbers[f"{way}{i}_u"] = parameter(parts["weight_hh"])
                second = 0 if self.has("bias", i) else parts["bias_hh"]
                self.numbers[f"{way}{i}_b"] = parameter(parts["bias_ih"] + second)

    def run(self, x: Tensor, i: int, way: str) -> Tensor:
        """One direction of one layer."""
        w, u, b = (self.numbers[f"{way}{i}_{n}"] for n in "wub")
        is_faulty = way == "forth"
        h = c = x.new_zeros(len(x), 32)
        states, xs = [], x @ w.T + b
        for t in range(x.shape[1]):
            a, f, g, o = (xs[:, t] + h @ u.T).chunk(4, 1)
            a, f = (f, a) if is_faulty and self.has("gates", i) else (a, f)
            new = torch.sigmoid(g) if is_faulty and self.has("sigmoid", i) else torch.tanh(g)
            c = torch.sigmoid(f) * c + torch.sigmoid(a) * new
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of each word."""
        x = self.lookup(ids)
        for i in range(2):
            back = self.run(x.flip(1), i, "back")
            back = back if self.has("unflipped", i) else back.flip(1)
            ways = [self.run(x, i, "forth"), back]
            x = torch.cat(ways[::-1] if self.has("order", i) else ways, -1)
        return self.head(x)


def tagger(fault: str) -> Pair:
    """A recurrent net by hand."""
    model = filled(Tagger())
    return Pair(model, TaggerPort(model, fault), (whole(3, 8, below=50),), forward)


_FOLDED = "layer1.conv1 layer1.bn1"
PORTS = (
    Port(
        "residual net",
        residuals,
        {
            "eps": _FOLDED,
            "mean": _FOLDED,
            "average": "pool",
            "clamped": "layer2.relu layer2",
            "open": "layer2.relu layer2",
            "highest": "mean",
        },
    ),
    Port(
        "tagger",
        tagger,
        dict.fromkeys(("gates", "sigmoid", "unflipped", "order", "bias"), "rnn"),
    ),
)
