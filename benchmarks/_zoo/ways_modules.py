"""Layers computed by other operators, and modules cut otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.editing import become, edit, is_norm, linears, named, norms, pick
from _zoo.sides import NotHere, Side, replace
from _zoo.ways import ALL, way
from _zoo.ways_weights import name_of


def _every(side: Side, names: list[str], forward: Callable[..., Any]) -> Side:
    if not names:
        raise NotHere("no such module")
    for name in names:
        become(side.only(name), forward)
        side.touched.add(name)
    return side


# ---- linear layers


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def _linear(name: str, forward: Callable[..., Any], dtypes: tuple[str, ...] = ALL) -> None:
    @way(f"linear-{name}", dtypes)
    def _make(side: Side, seed: int) -> Side:
        names = [n for i, n in enumerate(linears(side)) if i % 2 == seed % 2 or seed % 3 == 0]
        return _every(side, names, forward)


_linear("transposed", lambda self, x: _plus(x @ self.weight.T, self.bias))
_linear("einsum", lambda self, x: _plus(torch.einsum("...i,oi->...o", x, self.weight), self.bias))
_linear(
    "as-convolution",
    lambda self, x: F.conv1d(x.reshape(-1, x.shape[-1], 1), self.weight[..., None], self.bias).view(
        *x.shape[:-1], -1
    ),
)
_linear(
    "flat",
    lambda self, x: F.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias).view(
        *x.shape[:-1], -1
    ),
)
_linear(
    "addmm",
    lambda self, x: (
        x.reshape(-1, x.shape[-1]) @ self.weight.t()
        if self.bias is None
        else torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight.t())
    ).view(*x.shape[:-1], -1),
)
_linear(
    "rows-one-by-one", lambda self, x: torch.stack([F.linear(r, self.weight, self.bias) for r in x])
)
_linear(
    "halves-of-outputs",
    lambda self, x: torch.cat(
        [
            F.linear(x, w, b)
            for w, b in zip(
                self.weight.chunk(2),
                (None, None) if self.bias is None else self.bias.chunk(2),
                strict=True,
            )
        ],
        -1,
    ),
)
_linear(
    "halves-of-inputs",
    lambda self, x: _plus(
        F.linear(x[..., ::2], self.weight[:, ::2]) + F.linear(x[..., 1::2], self.weight[:, 1::2]),
        self.bias,
    ),
)
_linear(
    "padded",
    lambda self, x: F.linear(
        F.pad(x, (0, 5)),
        F.pad(self.weight, (0, 5, 0, 3)),
        None if self.bias is None else F.pad(self.bias, (0, 3)),
    )[..., :-3],
)
_linear(
    "bias-as-a-column",
    lambda self, x: (
        F.linear(x, self.weight)
        if self.bias is None
        else F.linear(
            torch.cat([x, torch.ones_like(x[..., :1])], -1),
            torch.cat([self.weight, self.bias[:, None]], 1),
        )
    ),
)
_linear(
    "summed-products", lambda self, x: _plus((x[..., None, :] * self.weight).sum(-1), self.bias)
)
_linear(
    "split-k",
    lambda self, x: _plus(
        torch.stack(
            [
                a @ b.T
                for a, b in zip(x.tensor_split(4, -1), self.weight.tensor_split(4, 1), strict=True)
            ]
        ).sum(0),
        self.bias,
    ),
)
_linear(
    "upcast",
    lambda self, x: F.linear(
        x.float(), self.weight.float(), None if self.bias is None else self.bias.float()
    ).to(x.dtype),
)


class Halves(nn.Module):
    """Two layers that make the two halves of what one made."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        half = layer.out_features // 2
        self.first = nn.Linear(layer.in_features, half, layer.bias is not None)
        self.second = nn.Linear(
            layer.in_features, layer.out_features - half, layer.bias is not None
        )
        with torch.no_grad():
            for own, rows in ((self.first, slice(half)), (self.second, slice(half, None))):
                own.weight.copy_(layer.weight[rows])
                if layer.bias is not None:
                    own.bias.copy_(layer.bias[rows])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], -1)


@way("linear-as-two-modules")
def _two_modules(side: Side, seed: int) -> Side:
    names = linears(side)
    name = pick(names, seed)
    replace(side.model, name, Halves(side.only(name)))  # type: ignore[arg-type]
    side.touched.add(name)
    return side


class Parallel(nn.Module):
    """Two layers that read the two halves of the inputs, summed: a row-parallel layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        half = layer.in_features // 2
        self.ranks = nn.ModuleList(
            nn.Linear(n, layer.out_features, bias=False) for n in (half, layer.in_features - half)
        )
        self.bias = layer.bias
        with torch.no_grad():
            self.ranks[0].weight.copy_(layer.weight[:, :half])
            self.ranks[1].weight.copy_(layer.weight[:, half:])

    def forward(self, x: Tensor) -> Tensor:
        half = self.ranks[0].in_features
        return _plus(self.ranks[0](x[..., :half]) + self.ranks[1](x[..., half:]), self.bias)


@way("linear-parallel-by-rows")
def _parallel(side: Side, seed: int) -> Side:
    name = pick(linears(side), seed)
    replace(side.model, name, Parallel(side.only(name)))  # type: ignore[arg-type]
    side.touched.add(name)
    return side


def _fuse(side: Side, names: list[str], parent: str, attribute: str) -> None:
    layers = [side.only(n) for n in names]
    fused = nn.Linear(
        layers[0].in_features, sum(x.out_features for x in layers), layers[0].bias is not None
    )  # type: ignore[misc, arg-type]
    with torch.no_grad():
        fused.weight.copy_(torch.cat([x.weight for x in layers]))  # type: ignore[misc]
        if fused.bias is not None:
            fused.bias.copy_(torch.cat([x.bias for x in layers]))  # type: ignore[misc]
    module = side.only(parent)
    for name in names:
        delattr(module, name.rpartition(".")[2])
    setattr(module, attribute, fused)
    side.touched |= {parent, *names}


@way("query-key-value-fused")
def _qkv(side: Side, seed: int) -> Side:
    places = [
        n
        for n, m in side.model.named_modules()
        if all(type(getattr(m, f"{k}_proj", None)) is nn.Linear for k in "qkv")
    ]
    if not places:
        raise NotHere("no projections")
    for name in places if seed % 2 else [pick(places, seed)]:
        module = side.only(name)
        sizes = [getattr(module, f"{k}_proj").out_features for k in "qkv"]
        edit(
            module,
            (r"self\.q_proj\((\w+)\)", rf"(_qkv := self.qkv_proj(\1).split({sizes}, -1))[0]"),
            (r"self\.k_proj\(\w+\)", "_qkv[1]"),
            (r"self\.v_proj\(\w+\)", "_qkv[2]"),
        )
        _fuse(side, [f"{name}.{k}_proj" for k in "qkv"], name, "qkv_proj")
    return side


@way("gate-and-up-fused")
def _gate_up(side: Side, seed: int) -> Side:
    places = [
        n
        for n, m in side.model.named_modules()
        if all(type(getattr(m, f"{k}_proj", None)) is nn.Linear for k in ("gate", "up"))
    ]
    if not places:
        raise NotHere("no gated network")
    for name in places if seed % 2 else [pick(places, seed)]:
        edit(
            side.only(name),
            (r"self\.gate_proj\((\w+)\)", r"(_gu := self.gate_up_proj(\1).chunk(2, -1))[0]"),
            (r"self\.up_proj\(\w+\)", "_gu[1]"),
        )
        _fuse(side, [f"{name}.gate_proj", f"{name}.up_proj"], name, "gate_up_proj")
    return side


@way("gate-and-up-apart")
def _gate_up_apart(side: Side, seed: int) -> Side:
    places = [
        n
        for n, m in side.model.named_modules()
        if type(getattr(m, "gate_up_proj", None)) is nn.Linear
    ]
    name = pick(places, seed)
    module: Any = side.only(name)
    replace(side.model, f"{name}.gate_up_proj", Halves(module.gate_up_proj))
    side.touched |= {name, f"{name}.gate_up_proj"}
    return side


# ---- norms, activations, embeddings


def _rms(self: Any, x: Tensor) -> Tensor:
    eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
    wide = x.float()
    out = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return self.weight * out.to(x.dtype)


def _layer_norm(self: Any, x: Tensor) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    out = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + self.eps)
    out = out * self.weight.float()
    return (out if self.bias is None else out + self.bias.float()).to(x.dtype)


def _layer_norm_moments(self: Any, x: Tensor) -> Tensor:
    wide = x.float()
    mean, square = wide.mean(-1, keepdim=True), (wide * wide).mean(-1, keepdim=True)
    out = (wide - mean) / torch.sqrt(square - mean * mean + self.eps) * self.weight
    return (out if self.bias is None else out + self.bias).to(x.dtype)


def _layer_norm_narrow(self: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    out = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
    return out if self.bias is None else out + self.bias


def _rms_names(side: Side) -> list[str]:
    return [
        n
        for n, m in side.model.named_modules()
        if "RMSNorm" in type(m).__name__
        and is_norm(m)
        and getattr(m, "variance_epsilon", getattr(m, "eps", None)) is not None
    ]


@way("rms-norm-written-out")
def _rms_written(side: Side, seed: int) -> Side:
    return _every(side, _rms_names(side), _rms)


@way("rms-norm-by-one-operator")
def _rms_one(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        return F.rms_norm(x, (x.shape[-1],), self.weight, eps)

    names = [n for n in _rms_names(side) if not isinstance(side.only(n), nn.RMSNorm)]
    return _every(side, names, forward)


@way("layer-norm-written-out")
def _ln_written(side: Side, seed: int) -> Side:
    return _every(side, named(side, nn.LayerNorm), _layer_norm)


@way("layer-norm-by-moments", ("float32",))
def _ln_moments(side: Side, seed: int) -> Side:
    return _every(side, named(side, nn.LayerNorm), _layer_norm_moments)


@way("layer-norm-in-its-dtype")
def _ln_narrow(side: Side, seed: int) -> Side:
    return _every(side, named(side, nn.LayerNorm), _layer_norm_narrow)


@way("group-norm-written-out")
def _gn_written(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        grouped = x.view(x.shape[0], self.num_groups, -1).float()
        variance, mean = torch.var_mean(grouped, -1, correction=0, keepdim=True)
        out = ((grouped - mean) * torch.rsqrt(variance + self.eps)).view(x.shape).to(x.dtype)
        axes = [1, -1] + [1] * (x.dim() - 2)
        return out * self.weight.view(axes) + self.bias.view(axes)

    return _every(side, named(side, nn.GroupNorm), forward)


@way("batch-norm-as-scale-and-shift")
def _bn_written(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        shift = self.bias - self.running_mean * scale
        axes = [1, -1] + [1] * (x.dim() - 2)
        return x * scale.view(axes) + shift.view(axes)

    return _every(side, named(side, nn.BatchNorm1d, nn.BatchNorm2d), forward)


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_ACTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "GELU": lambda self, x: (
        x * 0.5 * (1 + torch.erf(x / math.sqrt(2))) if self.approximate == "none" else _tanh_gelu(x)
    ),
    "GELUActivation": lambda self, x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "NewGELUActivation": lambda self, x: F.gelu(x, approximate="tanh"),
    "GELUTanh": lambda self, x: _tanh_gelu(x),
    "GELUTanhActivation": lambda self, x: _tanh_gelu(x),
    "PytorchGELUTanh": lambda self, x: _tanh_gelu(x),
    "FastGELUActivation": lambda self, x: F.gelu(x, approximate="tanh"),
    "BloomGelu": lambda self, x: F.gelu(x, approximate="tanh"),
    "QuickGELUActivation": lambda self, x: x / (1 + torch.exp(-1.702 * x)),
    "SiLU": lambda self, x: x * torch.sigmoid(x),
    "SiLUActivation": lambda self, x: x * torch.sigmoid(x),
    "ReLU": lambda self, x: x.clamp(min=0),
    "Tanh": lambda self, x: 2 * torch.sigmoid(2 * x) - 1,
    "Sigmoid": lambda self, x: 1 / (1 + torch.exp(-x)),
    "LeakyReLU": lambda self, x: torch.where(x > 0, x, x * self.negative_slope),
    "ReLUSquaredActivation": lambda self, x: torch.where(x > 0, x * x, torch.zeros_like(x)),
}


@way("activation-written-out")
def _act_written(side: Side, seed: int) -> Side:
    places = [(n, m) for n, m in side.model.named_modules() if type(m).__name__ in _ACTS]
    if not places:
        raise NotHere("no activation of its own")
    for name, module in places:
        become(module, _ACTS[type(module).__name__])
        side.touched.add(name)
    return side


@way("activation-in-place")
def _act_in_place(side: Side, seed: int) -> Side:
    names = [
        n for n in named(side, nn.ReLU, nn.SiLU, nn.LeakyReLU) if hasattr(side.only(n), "inplace")
    ]
    if not names:
        raise NotHere("no such activation")
    for name in names:
        side.only(name).inplace = True  # type: ignore[assignment]
        side.touched.add(name)
    return side


@way("activation-moved-into-the-linear")
def _act_moved(side: Side, seed: int) -> Side:
    """An engine shows the activation's result under the name of the linear layer."""
    from _zoo.editing import readers

    kinds = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU)
    places = [
        (n, o[0])
        for n, o in readers(side).items()
        if type(side.only(n)) is nn.Linear and len(o) == 1 and isinstance(side.only(o[0]), kinds)
    ]
    if not places:
        raise NotHere("no activation behind a linear layer")
    name, act = places[seed % len(places)]
    function = side.only(act)
    side.only(name).__dict__["_act"] = function
    become(side.only(name), lambda self, x: self._act.forward(F.linear(x, self.weight, self.bias)))
    replace(side.model, act, nn.Identity())
    side.touched |= {name, act}
    return side


@way("embedding-as-product")
def _one_hot(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.one_hot(x, self.num_embeddings).to(self.weight.dtype) @ self.weight

    names = [n for n in named(side, nn.Embedding) if type(side.only(n)) is nn.Embedding]
    return _every(side, names, forward)


@way("embedding-by-index")
def _indexed(side: Side, seed: int) -> Side:
    names = [n for n in named(side, nn.Embedding) if type(side.only(n)) is nn.Embedding]
    return _every(side, names, lambda self, x: self.weight[x])


# ---- convolutions, recurrent nets


@way("convolution-unfolded")
def _unfolded(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(
                x.shape[-2:],
                self.padding,
                self.dilation,
                self.kernel_size,
                self.stride,
                strict=True,
            )
        )
        columns = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        columns = columns.view(x.shape[0], self.groups, -1, columns.shape[-1])
        weight = self.weight.view(self.groups, self.out_channels // self.groups, -1)
        out = torch.einsum("goi,bgil->bgol", weight, columns).reshape(x.shape[0], -1, a, b)
        return out if self.bias is None else out + self.bias[:, None, None]

    names = [
        n
        for n in named(side, nn.Conv2d)
        if isinstance(side.only(n).padding, tuple) and type(side.only(n)) is nn.Conv2d
    ]
    return _every(side, names, forward)


@way("convolution-of-groups-in-a-loop")
def _group_loop(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        bias = [None] * self.groups if self.bias is None else self.bias.chunk(self.groups)
        parts = zip(x.chunk(self.groups, 1), self.weight.chunk(self.groups), bias, strict=True)
        f = F.conv2d if x.dim() == 4 else F.conv1d
        return torch.cat(
            [f(p, w, b, self.stride, self.padding, self.dilation) for p, w, b in parts], 1
        )

    names = [
        n
        for n in named(side, nn.Conv2d, nn.Conv1d)
        if side.only(n).groups > 1 and type(side.only(n)) in (nn.Conv1d, nn.Conv2d)
    ]  # type: ignore[operator]
    return _every(side, names, forward)


@way("convolution-in-two-dimensions")
def _conv_2d(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        pad = self.padding if isinstance(self.padding, str) else (0, self.padding[0])
        return F.conv2d(
            x[:, :, None],
            self.weight[:, :, None],
            self.bias,
            (1, self.stride[0]),
            pad,
            (1, self.dilation[0]),
            self.groups,
        )[:, :, 0]

    names = [
        n
        for n in named(side, nn.Conv1d)
        if type(side.only(n)) is nn.Conv1d and side.only(n).padding_mode == "zeros"
    ]
    return _every(side, names, forward)


@way("convolution-padded-before")
def _padded_before(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        pads = [n for p in reversed(self.padding) for n in (p, p)]
        f = F.conv2d if x.dim() == 4 else F.conv1d
        return f(F.pad(x, pads), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)

    names = [
        n
        for n in named(side, nn.Conv1d, nn.Conv2d)
        if isinstance(side.only(n).padding, tuple)
        and sum(side.only(n).padding)
        and type(side.only(n)) in (nn.Conv1d, nn.Conv2d)
    ]  # type: ignore[arg-type]
    return _every(side, names, forward)


@way("channels-last")
def _channels_last(side: Side, seed: int) -> Side:
    if not named(side, nn.Conv2d):
        raise NotHere("no convolution of images")
    side.model = side.model.to(memory_format=torch.channels_last)
    side.inputs = {
        k: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v
        for k, v in side.inputs.items()
    }
    return side


@way("patches-as-linear")
def _patches(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        p, q = self.kernel_size
        x = (
            x.view(b, c, h // p, p, w // q, q)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(b, h // p, w // q, -1)
        )
        return F.linear(x, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)

    names = [
        n
        for n in named(side, nn.Conv2d)
        if side.only(n).kernel_size == side.only(n).stride
        and side.only(n).kernel_size[0] > 1
        and side.only(n).groups == 1
    ]  # type: ignore[index]
    return _every(side, names, forward)


def _cell(kind: str, x: Tensor, h: Tensor, c: Tensor, w: list[Tensor]) -> tuple[Tensor, Tensor]:
    gates_x, gates_h = F.linear(x, w[0], w[2]), F.linear(h, w[1], w[3])
    if kind == "RNN":
        return torch.tanh(gates_x + gates_h), c
    if kind == "GRU":
        rx, zx, nx = gates_x.chunk(3, -1)
        rh, zh, nh = gates_h.chunk(3, -1)
        r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
        n = torch.tanh(nx + r * nh)
        return (1 - z) * n + z * h, c
    i, f, g, o = (gates_x + gates_h).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _unrolled(self: Any, x: Tensor) -> tuple[Tensor, Any]:
    kind = type(self).__name__
    last = []
    for layer in range(self.num_layers):
        both = []
        for d in range(2 if self.bidirectional else 1):
            suffix = f"_l{layer}" + ("_reverse" if d else "")
            w = [
                getattr(self, k + suffix) for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            h = c = x.new_zeros(x.shape[0], self.hidden_size)
            out = []
            steps = range(x.shape[1])
            for t in reversed(steps) if d else steps:
                h, c = _cell(kind, x[:, t], h, c, w)
                out.append(h)
            both.append(torch.stack(out[::-1] if d else out, 1))
            last.append((h, c))
        x = torch.cat(both, -1)
    hidden, cell = (torch.stack(states) for states in zip(*last, strict=True))
    return x, (hidden, cell) if kind == "LSTM" else hidden


@way("recurrent-unrolled")
def _recurrent(side: Side, seed: int) -> Side:
    return _every(side, named(side, nn.LSTM, nn.GRU, nn.RNN), _unrolled)


@way("cell-written-out")
def _cell_written(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor, h: Tensor) -> Tensor:
        w = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        return _cell("GRU", x, h, h, w)[0]

    return _every(side, named(side, nn.GRUCell), forward)


# ---- mixtures of experts


@way("experts-batched")
def _batched_experts(side: Side, seed: int) -> Side:
    return _experts(side, "batched_mm")


@way("experts-grouped")
def _grouped_experts(side: Side, seed: int) -> Side:
    return _experts(side, "grouped_mm")


def _experts(side: Side, kind: str) -> Side:
    from _zoo.plain import Experts

    own = named(side, Experts)
    if own:
        return _every(side, own, _together if kind == "batched_mm" else _sorted)
    config = getattr(side.model, "config", None)
    if not hasattr(side.model, "set_experts_implementation"):
        raise NotHere("no choice of experts")
    names = [
        n
        for n, m in side.model.named_modules()
        if type(m).__name__.endswith("Experts") or n.endswith("experts")
    ]
    if not names or getattr(config, "_experts_implementation", None) is None:
        raise NotHere("no experts")
    side.model.set_experts_implementation(kind)  # type: ignore[operator]
    side.touched |= set(names)
    return side


def _together(self: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    hidden = F.gelu(torch.einsum("ri,rkoi->rko", x, self.up[index]))
    out = torch.einsum("rki,rkoi->rko", hidden, self.down[index])
    return (out * weight[..., None]).sum(1)


def _sorted(self: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    order = index.flatten().argsort(stable=True)
    rows, parts = order // index.shape[1], []
    counts = index.flatten().bincount(minlength=self.num_experts).tolist()
    for e, part in enumerate(x[rows].split(counts)):
        parts.append(F.linear(F.gelu(F.linear(part, self.up[e])), self.down[e]))
    out = torch.cat(parts) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, rows, out)


@way("experts-dense")
def _dense(side: Side, seed: int) -> Side:
    """Every expert sees every row, and shares of zero take out what was not chosen."""
    from _zoo.plain import Experts

    def forward(self: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        share = torch.zeros(len(x), self.num_experts, dtype=x.dtype).scatter_add_(1, index, weight)
        hidden = F.gelu(torch.einsum("ri,eoi->reo", x, self.up))
        return torch.einsum("rei,eoi,re->ro", hidden, self.down, share)

    own = named(side, Experts)
    if own:
        return _every(side, own, forward)

    def gated(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        x, weight = hidden_states, top_k_weights.to(hidden_states.dtype)
        share = torch.zeros(len(x), self.num_experts, dtype=x.dtype).scatter_add_(
            1, top_k_index, weight
        )
        gate, up = torch.einsum("ri,eoi->reo", x, self.gate_up_proj).chunk(2, -1)
        out = torch.einsum("rei,eoi->reo", self.act_fn(gate) * up, self.down_proj)
        return (out * share[..., None]).sum(1)

    names = [
        n
        for n, m in side.model.named_modules()
        if type(m).__name__.endswith("Experts")
        and all(hasattr(m, k) for k in ("gate_up_proj", "down_proj", "act_fn", "num_experts"))
        and not hasattr(m, "gate_up_proj_bias")
    ]
    return _every(side, names, gated)


@way("experts-as-modules")
def _expert_modules(side: Side, seed: int) -> Side:
    """Each expert is a module of its own."""
    from _zoo.plain import Experts

    def forward(self: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(index == e)
            out[rows] += expert(x[rows]) * weight[rows, slot, None]
        return out

    names = named(side, Experts)
    for name in names:
        module: Any = side.only(name)
        made = []
        for e in range(module.num_experts):
            up, down = (
                nn.Linear(p.shape[2], p.shape[1], bias=False) for p in (module.up, module.down)
            )
            up.weight.data.copy_(module.up[e])
            down.weight.data.copy_(module.down[e])
            made.append(nn.Sequential(up, nn.GELU(), down))
        module.experts = nn.ModuleList(made)
        del module.up, module.down
    return _every(side, names, forward)


# ---- how modules are cut


def _blocks(side: Side) -> list[str]:
    """Names of modules in lists that have children of their own."""
    return [
        f"{n}.{i}".strip(".")
        for n, m in side.model.named_modules()
        if isinstance(m, nn.ModuleList)
        for i, child in enumerate(m)
        if list(child.children())
    ]


class Wrapper(nn.Module):
    """A container that only hands on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *a: Any, **k: Any) -> Any:
        return self.inner(*a, **k)


@way("blocks-wrapped")
def _wrapped(side: Side, seed: int) -> Side:
    names = _blocks(side)
    if not names:
        raise NotHere("no blocks")
    for name in names:
        replace(side.model, name, Wrapper(side.only(name)))
    return side


@way("linear-wrapped")
def _wrapped_leaf(side: Side, seed: int) -> Side:
    name = pick(linears(side), seed)
    replace(side.model, name, nn.Sequential(side.only(name)))
    side.touched.add(name)
    return side


@way("model-wrapped")
def _model_wrapped(side: Side, seed: int) -> Side:
    side.model = Wrapper(side.model).eval()
    return side


@way("leaf-bypassed")
def _bypassed(side: Side, seed: int) -> Side:
    """The parent computes what a child computed, without calling it."""
    places = []
    for name in linears(side):
        parent, _, last = name.rpartition(".")
        if not last.isdigit() and parent:
            places.append((parent, last))
    if not places:
        raise NotHere("no layer with a name")
    parent, last = places[seed % len(places)]
    module = side.only(parent)
    edit(module, (rf"self\.{last}\(", f"self.{last}.forward("))
    side.touched |= {parent, f"{parent}.{last}"}
    return side


@way("norm-inlined")
def _norm_inlined(side: Side, seed: int) -> Side:
    places = [n.rpartition(".")[::2] for n in norms(side)]
    places = [(p, n) for p, n in places if not n.isdigit() and p]
    if not places:
        raise NotHere("no norm with a name")
    parent, last = places[seed % len(places)]
    edit(side.only(parent), (rf"self\.{last}\(", f"self.{last}.forward("))
    side.touched |= {parent, f"{parent}.{last}"}
    return side


@way("children-called-by-name")
def _by_name(side: Side, seed: int) -> Side:
    """A child's argument is handed over by its name."""
    import inspect

    for name in linears(side)[seed % 3 :: 3]:
        parent, _, last = name.rpartition(".")
        if parent and not last.isdigit():
            try:
                edit(side.only(parent), (rf"self\.{last}\((\w+)\)", rf"self.{last}(input=\1)"))
            except NotHere:
                continue
            side.touched |= {parent, name}
    for name in norms(side)[seed % 3 :: 3]:
        parent, _, last = name.rpartition(".")
        first = next(iter(inspect.signature(side.only(name).forward).parameters))
        if parent and not last.isdigit():
            try:
                edit(side.only(parent), (rf"self\.{last}\((\w+)\)", rf"self.{last}({first}=\1)"))
            except NotHere:
                continue
            side.touched |= {parent, name}
    if not side.touched:
        raise NotHere("no call of a child with one argument")
    return side


@way("arguments-swapped")
def _swapped(side: Side, seed: int) -> Side:
    """Experts take their shares and indices in the other order, and their parent knows."""
    for name, module in side.model.named_modules():
        if not type(module).__name__.endswith("Experts"):
            continue
        parent = side.only(name.rpartition(".")[0])
        inner = type(module).forward

        def forward(self: Any, x: Tensor, b: Tensor, a: Tensor, inner: Any = inner) -> Any:
            return inner(self, x, a, b)

        last = name.rpartition(".")[2]
        edit(parent, (rf"self\.{last}\((\w+), (\w+), (\w+)\)", rf"self.{last}(\1, \3, \2)"))
        become(module, forward)
        side.touched |= {name, name_of(side, parent)}
    if not side.touched:
        raise NotHere("no experts")
    return side


@way("arguments-rotary-swapped")
def _swapped_rotary(side: Side, seed: int) -> Side:
    """Attention takes sines before cosines, and its block knows."""
    from _zoo.plain import HandAttention, HandBlock

    if not named(side, HandBlock):
        raise NotHere("no attention of its own")
    for name in named(side, HandAttention):
        inner = HandAttention.forward

        def forward(
            self: Any, x: Tensor, sin: Tensor, cos: Tensor, mask: Tensor, inner: Any = inner
        ) -> Tensor:
            return inner(self, x, cos, sin, mask)

        become(side.only(name), forward)
        side.touched.add(name)
    for name in named(side, HandBlock):
        edit(side.only(name), (r"cos, sin, mask\)", "sin, cos, mask)"))
    return side


def _with_residuals(side: Side, written: str) -> Side:
    """The side with the sums of its blocks' residuals written so."""
    for name in _blocks(side):
        try:
            edit(side.only(name), (r"= residual \+ (\w+)\n", written))
        except NotHere:
            continue
        side.touched.add(name)
    if not side.touched:
        raise NotHere("no residual in that form")
    return side


@way("residual-in-the-other-order")
def _residual(side: Side, seed: int) -> Side:
    return _with_residuals(side, r"= \1 + residual\n")


@way("residual-in-float32")
def _wide_residual(side: Side, seed: int) -> Side:
    return _with_residuals(side, r"= (residual.float() + \1.float()).to(\1.dtype)\n")


@way("modules-renamed")
def _renamed(side: Side, seed: int) -> Side:
    """Every module with a word for a name gets another; the code finds them by properties."""
    count = 0
    for module in list(side.model.modules()):
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        children = dict(module._modules)
        module._modules.clear()
        for name, child in children.items():
            module._modules[name if name.isdigit() else f"{name[:2]}x_{name[::-1]}"] = child
            module.__dict__[name] = child
            count += 1
    if not count:
        raise NotHere("no children")
    return side


@way("dropout-removed")
def _no_dropout(side: Side, seed: int) -> Side:
    names = named(side, nn.Dropout)
    if not names:
        raise NotHere("no dropout")
    for name in names:
        replace(side.model, name, nn.Identity())
    return side


@way("identity-inserted")
def _identity(side: Side, seed: int) -> Side:
    name = pick(linears(side), seed)
    replace(side.model, name, nn.Sequential(nn.Identity(), side.only(name), nn.Dropout(0.1)))
    side.touched.add(name)
    return side


@way("strided-inputs")
def _strided(side: Side, seed: int) -> Side:
    """Linear layers get the same numbers behind other strides."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x.transpose(0, -1).contiguous().transpose(0, -1), self.weight, self.bias)

    return _every(side, linears(side), forward)


@way("transposed-convolution-by-zeros")
def _zeros_between(side: Side, seed: int) -> Side:
    """A transposed convolution as a convolution of what it reads, with zeros between."""

    def forward(self: Any, x: Tensor) -> Tensor:
        (s, _), (k, _), (p, _) = self.stride, self.kernel_size, self.padding
        wide = x.new_zeros(*x.shape[:2], (x.shape[2] - 1) * s + 1, (x.shape[3] - 1) * s + 1)
        wide[:, :, ::s, ::s] = x
        return F.conv2d(wide, self.weight.transpose(0, 1).flip(2, 3), self.bias, 1, k - 1 - p)

    return _every(side, named(side, nn.ConvTranspose2d), forward)


@way("pooled-by-mean")
def _pooled(side: Side, seed: int) -> Side:
    names = [
        n for n in named(side, nn.AdaptiveAvgPool2d) if side.only(n).output_size in (1, (1, 1))
    ]
    return _every(side, names, lambda self, x: x.mean((-2, -1), keepdim=True))


@way("sequential-nested")
def _nested(side: Side, seed: int) -> Side:
    """A sequence becomes two, one in the other."""
    names = [n for n in named(side, nn.Sequential) if n and len(side.only(n)) > 2]  # type: ignore[arg-type]
    if not names:
        raise NotHere("no sequence")
    for name in names:
        children = list(side.only(name).children())
        half = len(children) // 2
        replace(side.model, name, nn.Sequential(nn.Sequential(*children[:half]), *children[half:]))
    return side
