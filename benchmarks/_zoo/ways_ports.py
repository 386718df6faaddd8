"""What ports, compilers and serving engines make of a model: other algorithms, layouts, tracers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.editing import become, edit, linears, named, readers
from _zoo.irregular import Branches, Messages, Packed, Pyramid, SpectralLayer, StateSpace
from _zoo.plain import Experts, GraphNet, HandAttention, Scan
from _zoo.sides import Inputs, NotHere, Side
from _zoo.ways import PRODUCTS, way
from _zoo.ways_attention import KERNELS, masked, use
from _zoo.ways_modules import _every, _plus, _rms_names


def _of_class(name: str, kind: type[nn.Module], forward: Callable[..., Any], **how: Any) -> None:
    @way(name, **how)
    def _make(side: Side, seed: int) -> Side:
        return _every(side, named(side, kind), forward)


# ---- Fourier transforms and complex numbers


def _by_matrices(self: Any, x: Tensor) -> Tensor:
    n, modes = x.shape[-1], self.modes
    angle = 2 * math.pi / n * torch.outer(torch.arange(n), torch.arange(modes)).float()
    cos, sin = angle.cos(), angle.sin()
    real, imaginary = x.float() @ cos, -(x.float() @ sin)
    a, b = self.weight.float().unbind(-1)
    mixed_real = torch.einsum("bim,mio->bom", real, a) - torch.einsum("bim,mio->bom", imaginary, b)
    mixed_imaginary = torch.einsum("bim,mio->bom", real, b) + torch.einsum(
        "bim,mio->bom", imaginary, a
    )
    twice = torch.full((modes,), 2.0 / n)
    twice[0] = 1.0 / n
    return ((mixed_real * twice) @ cos.T - (mixed_imaginary * twice) @ sin.T).to(x.dtype)


def _as_pairs(self: Any, x: Tensor) -> Tensor:
    spectrum = torch.view_as_real(torch.fft.rfft(x.float())[..., : self.modes])
    (p, q), (a, b) = spectrum.unbind(-1), self.weight.float().unbind(-1)

    def mix(s: Tensor, w: Tensor) -> Tensor:
        return (s[:, :, None] * w.permute(1, 2, 0)).sum(1)

    mixed = torch.complex(mix(p, a) - mix(q, b), mix(p, b) + mix(q, a))
    return torch.fft.irfft(mixed, n=x.shape[-1]).to(x.dtype)


_of_class("fourier-by-matrices", SpectralLayer, _by_matrices)
_of_class("complex-as-pairs", SpectralLayer, _as_pairs)


def _step_by_step(self: Any, x: Tensor) -> Tensor:
    pole, read = self.poles()
    state, out = torch.zeros(*x.shape[:2], pole.shape[1], dtype=pole.dtype), []
    for i in range(x.shape[-1]):
        state = pole * state + x[..., i, None].float()
        out.append(2 * (read * state).sum(-1).real)
    return torch.stack(out, -1).to(x.dtype)


def _step_in_reals(self: Any, x: Tensor) -> Tensor:
    pole, read = (torch.view_as_real(t) for t in self.poles())
    (c, s), (p, q) = pole.unbind(-1), read.unbind(-1)
    u = v = torch.zeros(*x.shape[:2], c.shape[1], dtype=c.dtype)
    out = []
    for i in range(x.shape[-1]):
        u, v = c * u - s * v + x[..., i, None].float(), s * u + c * v
        out.append(2 * (p * u - q * v).sum(-1))
    return torch.stack(out, -1).to(x.dtype)


def _toeplitz(self: Any, x: Tensor) -> Tensor:
    kernel = self.kernel(x.shape[-1]).flip(-1)[:, None]
    padded = F.pad(x.float(), (x.shape[-1] - 1, 0))
    return F.conv1d(padded, kernel, groups=len(kernel)).to(x.dtype)


_of_class("states-step-by-step", StateSpace, _step_by_step)
_of_class("states-in-real-numbers", StateSpace, _step_in_reals)
_of_class("states-by-convolution", StateSpace, _toeplitz)


def _turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    return _complex_rotation(q, cos[:, None], sin[:, None]), _complex_rotation(
        k, cos[:, None], sin[:, None]
    )


def _complex_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    if cos.shape[-1] != x.shape[-1]:
        raise NotHere("a part of the channels is rotated")
    turn = torch.complex(cos[..., :half].float(), sin[..., :half].float())
    out = torch.complex(*(t.float() for t in x.chunk(2, -1))) * turn
    return torch.cat([out.real, out.imag], -1).to(x.dtype)


@way("rotary-by-complex-numbers")
def _rotary(side: Side, seed: int) -> Side:
    for name, module in side.model.named_modules():
        own = isinstance(module, HandAttention)
        if own or "apply_rotary_pos_emb" in getattr(type(module).forward, "__globals__", {}):
            try:
                edit(
                    module,
                    (r"apply_rotary_pos_emb\(|rotate\(", r"\g<0>"),
                    apply_rotary_pos_emb=_turn,
                    rotate=_complex_rotation,
                )
            except NotHere:
                continue
            side.touched.add(name)
    if not side.touched:
        raise NotHere("no rotary positions")
    return side


# ---- convolutions, pools


def _convolutions(side: Side, fits: Callable[[Any], bool]) -> list[str]:
    return [
        n
        for n in named(side, nn.Conv1d, nn.Conv2d)
        if type(side.only(n)) in (nn.Conv1d, nn.Conv2d)
        and isinstance(side.only(n).padding, tuple)
        and set(side.only(n).stride) == {1}  # type: ignore[arg-type]
        and set(side.only(n).dilation) == {1}  # type: ignore[arg-type]
        and fits(side.only(n))
    ]


@way("convolution-by-fourier")
def _conv_fourier(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        axes = tuple(range(2, x.dim()))
        x_padded = F.pad(x.float(), [n for p in reversed(self.padding) for n in (p, p)])
        size = x_padded.shape[2:]
        a = torch.fft.rfftn(x_padded, dim=axes)
        b = torch.fft.rfftn(self.weight.float(), s=size, dim=axes).conj()
        out = torch.fft.irfftn(torch.einsum("bi...,oi...->bo...", a, b), s=size, dim=axes)
        for axis, k in zip(axes, self.kernel_size, strict=True):
            out = out.narrow(axis, 0, x_padded.shape[axis] - k + 1)
        bias = 0 if self.bias is None else self.bias.view(-1, *[1] * len(axes)).float()
        return (out + bias).to(x.dtype)

    names = _convolutions(side, lambda m: m.groups == 1 and max(m.kernel_size) > 1)
    return _every(side, names, forward)


@way("convolution-by-winograd", ("float32",))
def _winograd(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        b = x.new_tensor([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
        g = x.new_tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
        a = x.new_tensor([[1, 1, 1, 0], [0, 1, -1, -1]])
        p = self.padding[0]
        tiles = F.pad(x, (p, p, p, p)).unfold(2, 4, 2).unfold(3, 4, 2)
        made = torch.einsum("ij,ncxyjk,lk->ncxyil", b, tiles, b)
        kernel = torch.einsum("ij,ocjk,lk->ocil", g, self.weight, g)
        product = torch.einsum("ncxyil,ocil->noxyil", made, kernel)
        out = torch.einsum("ij,noxyjk,lk->noxyil", a, product, a)
        out = out.permute(0, 1, 2, 4, 3, 5).reshape(*out.shape[:2], 2 * out.shape[2], -1)
        return out if self.bias is None else out + self.bias[:, None, None]

    def fits(m: Any) -> bool:
        return m.groups == 1 and m.kernel_size == (3, 3) and m.padding == (1, 1)

    return _every(side, _convolutions(side, fits), forward)


@way("depthwise-by-shifts")
def _shifts(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight[:, 0].flatten(1)
        padded = F.pad(x, [n for p in reversed(self.padding) for n in (p, p)])
        tiles = padded
        for axis, k in enumerate(self.kernel_size):
            tiles = tiles.unfold(2 + axis, k, 1)
        tiles = tiles.flatten(x.dim())
        out = tiles[..., 0] * weight[:, 0].view(-1, *[1] * (x.dim() - 2))
        for tap in range(1, weight.shape[1]):
            out = out + tiles[..., tap] * weight[:, tap].view(-1, *[1] * (x.dim() - 2))
        return out if self.bias is None else out + self.bias.view(-1, *[1] * (x.dim() - 2))

    def fits(m: Any) -> bool:
        return m.groups == m.in_channels == m.out_channels and m.groups > 1

    return _every(side, _convolutions(side, fits), forward)


@way("pointwise-convolution-as-linear")
def _pointwise(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x.movedim(1, -1), self.weight.flatten(1), self.bias).movedim(-1, 1)

    def fits(m: Any) -> bool:
        return set(m.kernel_size) == {1} and m.groups == 1 and set(m.padding) == {0}

    return _every(side, _convolutions(side, fits), forward)


@way("pooled-by-unfolding")
def _pooled(side: Side, seed: int) -> Side:
    def largest(self: Any, x: Tensor) -> Tensor:
        p = self.padding
        tiles = F.pad(x, (p, p, p, p), value=float("-inf"))
        return (
            tiles.unfold(2, self.kernel_size, self.stride)
            .unfold(3, self.kernel_size, self.stride)
            .amax((-1, -2))
        )

    def mean(self: Any, x: Tensor) -> Tensor:
        k = self.kernel_size
        weight = x.new_full((x.shape[1], 1, k, k), 1 / k**2)
        return F.conv2d(x, weight, stride=self.stride, groups=x.shape[1])

    if not named(side, Pyramid):
        raise NotHere("no pools")
    _every(side, named(side, nn.MaxPool2d), largest)
    return _every(side, named(side, nn.AvgPool2d), mean)


@way("upsampled-by-matrices")
def _upsampled(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.mode == "nearest":
            return x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        for axis in (2, 3):
            n = x.shape[axis]
            place = ((torch.arange(2 * n) + 0.5) / 2 - 0.5).clamp(min=0).to(x.dtype)
            weight = (1 - (place[:, None] - torch.arange(n).clamp(max=n - 1)).abs()).clamp(min=0)
            weight[-1] = F.one_hot(torch.tensor(n - 1), n).to(x.dtype)
            x = torch.einsum("ij,bc...j->bc...i", weight, x.movedim(axis, -1)).movedim(-1, axis)
        return x

    return _every(side, named(side, nn.Upsample), forward)


@way("branches-merged", PRODUCTS)
def _merged(side: Side, seed: int) -> Side:
    """Three branches in one convolution, as a network is deployed."""
    names = named(side, Branches)
    for name in names:
        block: Any = side.only(name)
        with torch.no_grad():
            block.wide.weight[:, :, 1, 1] += block.narrow.weight[:, :, 0, 0]
            block.wide.weight[:, :, 1, 1] += torch.eye(len(block.wide.weight))
            block.wide.bias += block.narrow.bias
        del block.narrow
        side.touched.add(f"{name}.wide")
    return _every(side, names, lambda self, x: F.relu(self.wide(x)))


# ---- rows of several lengths, sums over edges, bags


def _unpacked(self: Any, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Rows with their padding, which a mask takes out of the mean."""
    out, _ = self.rnn(self.embed(tokens))
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(out.dtype)
    return self.head((out * mask[..., None]).sum(1) / lengths[:, None])


_of_class("padded-instead-of-packed", Packed, _unpacked)


@way("rows-in-buckets")
def _buckets(side: Side, seed: int) -> Side:
    """Rows in order of their length, in two batches of their own widths."""
    if not named(side, Packed):
        raise NotHere("rows of one length")

    def drive(model: nn.Module, inputs: Inputs) -> Tensor:
        tokens, lengths = inputs["0"], inputs["1"]
        order = lengths.argsort()
        parts = [(tokens[o, : int(lengths[o].max())], lengths[o]) for o in order.tensor_split(2)]
        return torch.cat([model(*part) for part in parts])[order.argsort()]

    side.drive = drive
    return side


def _total(name: str, total: Callable[..., Tensor]) -> None:
    @way(name)
    def _make(side: Side, seed: int) -> Side:
        names = named(side, Messages)
        if not names:
            raise NotHere("no sums over edges")
        for place in names:
            module = side.only(place)
            become(module, type(module).forward, total=total)
            side.touched.add(place)
        return side


def _sorted_sums(self: Any, values: Tensor, index: Tensor, count: int) -> Tensor:
    lengths = torch.bincount(index, minlength=count)
    ordered = values[index.argsort(stable=True)]
    return torch.stack([part.sum(0) for part in ordered.split(lengths.tolist())])


_total(
    "sums-by-products",
    lambda self, values, index, count: F.one_hot(index, count).to(values.dtype).T @ values,
)
_total("sums-of-sorted-rows", _sorted_sums)
_total(
    "sums-by-scatter",
    lambda self, values, index, count: values.new_zeros(count, values.shape[1]).scatter_reduce(
        0, index[:, None].expand_as(values), values, "sum"
    ),
)


@way("sparse-adjacency", ("float32",))
def _sparse(side: Side, seed: int) -> Side:
    names = named(side, GraphNet)
    if not names:
        raise NotHere("no adjacency")
    for name in names:
        edit(
            side.only(name),
            (r"a @ (self\.\w+\((?:[^()]|\([^()]*\))*\))", r"torch.sparse.mm(a.to_sparse(), \1)"),
        )
        side.touched.add(name)
    return side


def _bag(self: Any, items: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
    rows = F.embedding(items, self.weight)
    if self.mode == "mean":
        return rows.mean(1)
    return (rows * per_sample_weights[..., None]).sum(1)  # type: ignore[index]


_of_class("bags-as-embeddings", nn.EmbeddingBag, _bag)


def _doubled(self: Any, tokens: Tensor) -> Tensor:
    """A scan in log steps: pairs of (decay, value) are combined over distances 1, 2, 4, ..."""
    x = self.norm(self.embed(tokens))
    decay = self.gate(x).sigmoid()
    value, reach = (1 - decay) * self.value(x), 1
    while reach < x.shape[1]:
        before = F.pad(value, (0, 0, reach, 0))[:, : x.shape[1]]
        value = value + decay * before
        decay = decay * F.pad(decay, (0, 0, reach, 0), value=1.0)[:, : x.shape[1]]
        reach *= 2
    return self.head(value)


_of_class("scan-by-doubling", Scan, _doubled)


def _with_capacity(self: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Each expert gets a block of rows of one size, filled up with zeros."""
    hot = F.one_hot(index.flatten(), self.num_experts)
    place = ((hot.cumsum(0) - 1) * hot).sum(1)
    capacity = int(hot.sum(0).max())
    rows = torch.arange(len(x)).repeat_interleave(index.shape[1])
    block = x.new_zeros(self.num_experts, capacity, x.shape[1])
    block[index.flatten(), place] = x[rows]
    out = torch.bmm(F.gelu(torch.bmm(block, self.up.transpose(1, 2))), self.down.transpose(1, 2))
    picked = out[index.flatten(), place].view(*index.shape, -1)
    return (picked * weight[..., None]).sum(1)


_of_class("experts-with-capacity", Experts, _with_capacity)


# ---- linear layers and norms


def _splits(x: Tensor) -> list[Tensor]:
    parts = []
    for _ in range(3):
        part = x.bfloat16().to(x.dtype)
        parts.append(part)
        x = x - part
    return parts


@way("linear-in-three-splits", ("float32",))
def _split(side: Side, seed: int) -> Side:
    """float32 as sums of bfloat16, and the six products that matter."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = _splits(x), _splits(self.weight)
        pairs = [(i, j) for i in range(3) for j in range(3 - i)]
        out = sum(F.linear(a[i], b[j]) for i, j in sorted(pairs, key=sum, reverse=True))
        return _plus(out, self.bias)  # type: ignore[arg-type]

    return _every(side, linears(side), forward)


@way("linear-by-strassen", ("float32",))
def _strassen(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        odd = len(rows) % 2
        halves = F.pad(rows, (0, 0, 0, odd)).chunk(2)
        (a, b), (c, d) = (h.chunk(2, 1) for h in halves)
        (e, f), (g, h) = (t.chunk(2, 1) for t in self.weight.T.chunk(2))
        m1, m2, m3 = (a + d) @ (e + h), (c + d) @ e, a @ (f - h)
        m4, m5, m6, m7 = d @ (g - e), (a + b) @ h, (c - a) @ (e + f), (b - d) @ (g + h)
        top = torch.cat([m1 + m4 - m5 + m7, m3 + m5], 1)
        out = torch.cat([top, torch.cat([m2 + m4, m1 - m2 + m3 + m6], 1)])[: len(rows)]
        return _plus(out.view(*x.shape[:-1], -1), self.bias)

    names = [n for n in linears(side) if all(s % 2 == 0 for s in side.only(n).weight.shape)]  # type: ignore[union-attr]
    return _every(side, names, forward)


@way("rms-norm-by-vector-norm")
def _vector_norm(side: Side, seed: int) -> Side:
    def forward(self: Any, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        return self.weight * (wide / torch.hypot(size, torch.full_like(size, eps**0.5))).to(x.dtype)

    return _every(side, _rms_names(side), forward)


@way("centring-folded", PRODUCTS)
def _centring(side: Side, seed: int) -> Side:
    """The mean is taken out of the layer before, so that the norm need not."""
    links = {
        n: o[0]
        for n, o in readers(side).items()
        if type(side.only(n)) is nn.Linear and len(o) == 1 and type(side.only(o[0])) is nn.LayerNorm
    }
    if not links:
        raise NotHere("no norm behind a linear layer")
    for name, norm in links.items():
        layer: Any = side.only(name)
        with torch.no_grad():
            layer.weight -= layer.weight.mean(0)
            if layer.bias is not None:
                layer.bias -= layer.bias.mean()
        become(
            side.only(norm),
            lambda self, x: _plus(F.rms_norm(x, x.shape[-1:], self.weight, self.eps), self.bias),
        )
        side.touched |= {name, norm}
    return side


# ---- attention


def _pages(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Keys and values lie in pages of four, in no order, and a table finds them."""
    n, size = k.shape[2], 4
    count = -(-n // size)
    table = torch.arange(count).roll(1).flip(0)
    pages = []
    for t in (k, v):
        padded = F.pad(t, (0, 0, 0, count * size - n)).unflatten(2, (count, size))
        stored = torch.empty_like(padded)
        stored[:, :, table] = padded
        pages.append(stored[:, :, table].flatten(2, 3)[:, :, :n])
    return F.scaled_dot_product_attention(q, *pages, mask, scale=scaling).transpose(1, 2)


def _part(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    scores = masked(q @ k.transpose(-2, -1) * scaling, mask).float()
    total = torch.logsumexp(scores, -1, keepdim=True)
    return torch.exp(scores - total).to(q.dtype) @ v, total


def _cascade(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """A shared prefix and what follows, each by itself, merged by their sums."""
    cut = k.shape[2] // 2
    masks = (None, None) if mask is None else (mask[..., :cut], mask[..., cut:])
    a, p = _part(q, k[:, :, :cut], v[:, :, :cut], masks[0], scaling)
    b, r = _part(q, k[:, :, cut:], v[:, :, cut:], masks[1], scaling)
    share = torch.sigmoid(p - r).to(q.dtype)
    return (a * share + b * (1 - share)).transpose(1, 2)


def _base_two(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).float() * (scaling * math.log2(math.e))
    scores = masked(scores, None if mask is None else mask.float() * math.log2(math.e))
    scores = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return ((scores.to(q.dtype) @ v) / scores.sum(-1, keepdim=True).to(q.dtype)).transpose(1, 2)


for _name, _kernel in {"pages": _pages, "prefix-and-rest": _cascade, "base-two": _base_two}.items():

    def _make(side: Side, seed: int, name: str = _name, kernel: Any = _kernel) -> Side:
        return use(side, name, kernel)

    KERNELS[_name] = _kernel
    way(f"attention-{_name}")(_make)


# ---- how a model is kept and called


@way("functional-call")
def _functional(side: Side, seed: int) -> Side:
    """Parameters are handed over with the call."""

    def drive(model: nn.Module, inputs: Inputs) -> Any:
        held = {k: v.detach().clone() for k, v in model.state_dict(keep_vars=True).items()}
        places = tuple(v for k, v in inputs.items() if k.isdigit())
        names = {k: v for k, v in inputs.items() if not k.isdigit()}
        return torch.func.functional_call(model, held, places, names)

    side.drive = drive
    return side


@way("traced-by-symbols")
def _traced(side: Side, seed: int) -> Side:
    if "plain" not in side.traits:
        raise NotHere("not plain")
    side.model = torch.fx.symbolic_trace(side.model).eval()
    return side


@way("exported")
def _exported(side: Side, seed: int) -> Side:
    """The program that torch.export makes, as a module."""
    if "plain" not in side.traits:
        raise NotHere("not plain")
    side.model = torch.export.export(side.model, tuple(side.inputs.values())).module()
    return side


@way("parameters-flat")
def _flat(side: Side, seed: int) -> Side:
    """Every parameter is a view of one long one, as sharded training keeps them."""
    own: list[tuple[nn.Module, str, Any]] = []
    for module in side.model.modules():
        own += [(module, n, p) for n, p in module._parameters.items() if p is not None]
    if len({id(p) for *_, p in own}) < len(own) or not linears(side):
        raise NotHere("shared parameters")
    if {type(m) for m, *_ in own} - {nn.Linear, nn.Embedding, nn.LayerNorm, nn.Conv2d, nn.Conv1d}:
        raise NotHere("other layers")
    side.model.flat = nn.Parameter(torch.cat([p.detach().flatten() for *_, p in own]))
    sizes = [(m, n, p.shape) for m, n, p in own]
    for module, name, _ in own:
        del module._parameters[name]
    names = {id(m): n for n, m in side.model.named_modules()}
    places = [(names[id(m)], n, shape) for m, n, shape in sizes]

    def spread(model: Any, *_: Any) -> None:
        parts = model.flat.split([shape.numel() for *_, shape in places])
        for (place, name, shape), part in zip(places, parts, strict=True):
            setattr(model.get_submodule(place), name, part.view(shape))

    side.model.register_forward_pre_hook(spread)
    return side


@way("weights-loaded-for-each-call")
def _offloaded(side: Side, seed: int) -> Side:
    """Weights are elsewhere, and come before each call of a layer."""
    names = linears(side)
    if not names:
        raise NotHere("no linear layer")
    for name in names:
        module: Any = side.only(name)

        def fetch(m: Any, *_: Any) -> None:
            m.weight = nn.Parameter(m.elsewhere.clone(), requires_grad=False)

        module.register_buffer("elsewhere", module.weight.detach().clone(), persistent=False)
        module.weight = nn.Parameter(torch.zeros_like(module.weight), requires_grad=False)
        module.register_forward_pre_hook(fetch)
    return side


@way("arguments-by-keyword")
def _keywords(side: Side, seed: int) -> Side:
    """The caller hands everything over by name."""
    import inspect

    if "plain" not in side.traits:
        raise NotHere("not plain")
    names = list(inspect.signature(side.model.forward).parameters)
    side.drive = lambda m, i: m(**dict(zip(names, i.values(), strict=False)))
    return side


@way("results-copied-into-one-buffer")
def _into(side: Side, seed: int) -> Side:
    """Linear layers write into a buffer that is there already."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], len(self.weight))
        torch.matmul(x, self.weight.T, out=out)
        return out if self.bias is None else out.add_(self.bias)

    return _every(side, linears(side), forward)
