"""Faults of ports, serving engines and trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.editing import become, edit, linears, named, pick
from _zoo.faults import FAULTS, Planted, _base, _convs, _norm_names, _training, _wrong_kernel, fault
from _zoo.irregular import (
    Bags,
    Branches,
    Dropping,
    Messages,
    Packed,
    SpectralLayer,
    StateSpace,
    Tied,
)
from _zoo.plain import Scan
from _zoo.sides import Inputs, NotHere, Side, call, first
from _zoo.ways_attention import masked
from _zoo.ways_modules import _blocks, _rms_names
from _zoo.ways_ports import _part
from _zoo.ways_trainers import (
    averaged,
    dropping,
    ignoring,
    labelled,
    recomputed,
    scaling,
    scheduled,
    seeded,
)
from _zoo.ways_training import _cross_entropy, _micro, trained, wanted_for


def _edit(
    name: str,
    kind: type[nn.Module],
    *changes: tuple[str, str],
    dtypes: tuple[str, ...] = (),
    **also: Any,
) -> None:
    @fault(name, *dtypes)
    def _plant(side: Side, seed: int) -> Planted:
        place = pick(named(side, kind), seed)
        edit(side.only(place), *changes)
        return Planted(place, **also)


__all__ = ["FAULTS"]

# ---- Fourier transforms, complex numbers, states

_edit(
    "fourier-normalised-once",
    SpectralLayer,
    (r"rfft\(x\.float\(\)\)", 'rfft(x.float(), norm="ortho")'),
)
_edit(
    "weights-conjugated",
    SpectralLayer,
    (r"view_as_complex\(self\.weight\.float\(\)\)", r"\g<0>.conj()"),
)
_edit(
    "highest-frequency-lost",
    SpectralLayer,
    (r"torch\.einsum\(.*?weight\)", r"F.pad(\g<0>[..., :-1], (0, 1))"),
)
_edit("convolution-wraps-around", StateSpace, (r"2 \* n", "n"))
_edit("state-read-late", StateSpace, (r"self\.kernel\(n\)", "self.kernel(n).roll(1, -1)"))
_edit("gate-of-the-step-before", Scan, (r"\(1 - decay\[:, i\]\)", "(1 - decay[:, max(i - 1, 0)])"))

# ---- rows of several lengths, sums over edges, bags

_edit("mean-over-padding", Packed, (r"out\.sum\(1\) / lengths\[:, None\]", "out.mean(1)"))
_edit(
    "lengths-off-by-one",
    Packed,
    (r"lengths, True", "(lengths - 1).clamp(min=1), True"),
    also=("rnn",),
)
_edit("edges-turned-round", Messages, (r"source, target = edges", "target, source = edges"))
_edit("degree-forgotten", Messages, (r" / degree\], 1", "], 1"))
_edit(
    "bag-weights-ignored",
    Bags,
    (r"per_sample_weights=weights", "per_sample_weights=torch.ones_like(weights)"),
    also=("sums",),
)


@fault("sums-lose-what-collides")
def _collides(side: Side, seed: int) -> Planted:
    """Rows with the same index overwrite each other."""

    def total(self: Any, values: Tensor, index: Tensor, count: int) -> Tensor:
        out = values.new_zeros(count, values.shape[1])
        out[index] = values
        return out

    name = pick(named(side, Messages), seed)
    become(side.only(name), type(side.only(name)).forward, total=total)
    return Planted(name)


@fault("order-of-rows-not-restored")
def _order(side: Side, seed: int) -> Planted:
    """Rows are sorted by length for the recurrent layer, and stay sorted."""
    name = pick(named(side, Packed), seed)
    edit(
        side.only(name),
        (
            r"return self\.head\(",
            "out = out[lengths.argsort(descending=True)]\n    return self.head(",
        ),
    )
    return Planted(name)


# ---- layers


@fault("share-of-a-rank-lost")
def _rank(side: Side, seed: int) -> Planted:
    """A layer split by its inputs over four ranks, of which the last does not answer."""
    name = pick(linears(side), seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        n = x.shape[-1] * 3 // 4
        return F.linear(x[..., :n], self.weight[:, :n], self.bias)

    become(side.only(name), forward)
    return Planted(name)


@fault("steps-of-groups-shifted", "float32", "mixed")
@torch.no_grad()
def _groups(side: Side, seed: int) -> Planted:
    """Each group of eight weights has the step of its neighbour."""
    name = pick([n for n in linears(side) if side.only(n).weight.shape[1] % 8 == 0], seed)  # type: ignore[union-attr, operator]
    weight: Any = side.only(name).weight
    groups = weight.unflatten(1, (-1, 8))
    step = groups.abs().amax(-1, keepdim=True)
    if step.shape[1] < 2:
        raise NotHere("one group")
    weight.copy_((groups / step * step.roll(1, 1)).flatten(1))
    return Planted(name)


@fault("neighbours-swapped")
@torch.no_grad()
def _nibbles(side: Side, seed: int) -> Planted:
    """The two halves of each byte of codes changed places."""
    name = pick([n for n in linears(side) if side.only(n).weight.shape[1] % 2 == 0], seed)  # type: ignore[union-attr, operator]
    weight: Any = side.only(name).weight
    weight.copy_(weight.unflatten(1, (-1, 2)).flip(-1).flatten(1))
    return Planted(name)


@fault("layout-misread")
def _misread(side: Side, seed: int) -> Planted:
    """Channels last, read as channels first."""
    name = pick([n for n in _convs(side) if isinstance(side.only(n), nn.Conv2d)], seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        return _base(self).forward(self, x.permute(0, 2, 3, 1).reshape(x.shape))

    become(side.only(name), forward)
    return Planted(name)


@fault("channels-of-groups-mixed")
def _mixed(side: Side, seed: int) -> Planted:
    name = pick([n for n in _convs(side) if side.only(n).groups > 1], seed)  # type: ignore[operator]

    def forward(self: Any, x: Tensor) -> Tensor:
        out = _base(self).forward(self, x)
        return out.unflatten(1, (self.groups, -1)).roll(1, 1).flatten(1, 2)

    become(side.only(name), forward)
    return Planted(name)


@fault("upsampled-to-the-corners")
def _corners(side: Side, seed: int) -> Planted:
    name = pick([n for n in named(side, nn.Upsample) if side.only(n).mode == "bilinear"], seed)
    side.only(name).align_corners = True  # type: ignore[assignment]
    return Planted(name)


@fault("pool-padded-with-zeros")
def _zeros(side: Side, seed: int) -> Planted:
    name = pick(named(side, nn.MaxPool2d), seed)
    become(side.only(name), lambda self, x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2))
    return Planted(name)


@fault("branch-not-merged", "float32", "mixed")
@torch.no_grad()
def _branch(side: Side, seed: int) -> Planted:
    """The input's own branch is left out."""
    name = pick(named(side, Branches), seed)
    edit(side.only(name), (r" \+ x\)", ")"))
    return Planted(name)


@fault("norm-over-half")
def _half(side: Side, seed: int) -> Planted:
    """The mean square of one of two ranks' channels."""
    name = pick(_rms_names(side), seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        square = x[..., : x.shape[-1] // 2].float().square().mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(square + eps)).to(x.dtype)

    become(side.only(name), forward)
    return Planted(name)


@fault("norm-epsilon-outside", "float32")
def _outside(side: Side, seed: int) -> Planted:
    """1e-2 added to the deviation, not to the variance."""
    name = pick([n for n in _norm_names(side) if isinstance(side.only(n), nn.LayerNorm)], seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        out = (x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=0, keepdim=True) + 1e-2)
        out = out * self.weight
        return out if self.bias is None else out + self.bias

    become(side.only(name), forward)
    return Planted(name)


@fault("block-skipped")
def _block(side: Side, seed: int) -> Planted:
    """A block gives back what it was given."""
    name = pick(_blocks(side), seed)
    module = side.only(name)
    become(
        module,
        lambda self, x, *a, **k: (
            (x, *r[1:]) if isinstance(r := _base(self).forward(self, x, *a, **k), tuple) else x
        ),
    )
    return Planted(name)


@fault("tied-weight-not-transposed-back", "float32", "mixed")
def _tied(side: Side, seed: int) -> Planted:
    """The decoder keeps the weights that the encoder had before it was scaled."""
    name = pick(named(side, Tied), seed)
    edit(side.only(name), (r"self\.second\.weight\.t\(\)", "(self.second.weight * 1.02).t()"))
    return Planted(name)


# ---- attention


def _halves_merged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Two parts merged as if both weighed the same."""
    if mask is None or k.shape[2] < 4:
        raise NotHere("no mask")
    a, p = _part(q, k[:, :, :2], v[:, :, :2], mask[..., :2], scaling)
    b, r = _part(q, k[:, :, 2:], v[:, :, 2:], mask[..., 2:], scaling)
    share = (torch.sigmoid(p - r) + 0.02).clamp(max=1).to(q.dtype)
    return (a * share + b * (1 - share)).transpose(1, 2)


def _wrong_page(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Two pages of values changed places."""
    if k.shape[2] < 8:
        raise NotHere("one page")
    v = torch.cat([v[:, :, 4:8], v[:, :, :4], v[:, :, 8:]], 2)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scaling).transpose(1, 2)


def _not_shifted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """The first key's weight counts twice in the sum."""
    weights = masked(q @ k.transpose(-2, -1) * scaling, mask).float().softmax(-1)
    weights = weights / (1 + 0.05 * weights[..., :1])
    return (weights.to(q.dtype) @ v).transpose(1, 2)


_wrong_kernel("attention-parts-merged-wrongly", _halves_merged)
_wrong_kernel("attention-wrong-page", _wrong_page)
_wrong_kernel("attention-sum-too-large", _not_shifted)


# ---- state that should not be there


def _called_twice(side: Side) -> Side:
    inner = side.drive

    def drive(model: nn.Module, inputs: Inputs) -> Any:
        inner(model, inputs)
        return inner(model, inputs)

    side.drive = drive
    return side


@fault("state-kept-between-calls", "float32", prepare=_called_twice)
def _kept(side: Side, seed: int) -> Planted:
    """A layer starts from the state that the call before left."""
    name = pick(named(side, nn.GRU, nn.RNN), seed)

    def forward(self: Any, x: Tensor) -> Any:
        out, last = _base(self).forward(self, x, self.__dict__.get("_last"))
        self.__dict__["_last"] = last.detach()
        return out, last

    become(side.only(name), forward)
    return Planted(name)


# ---- training

_TAKEN = ("AccumulateGrad", "gradients", "loss", "backward")


def _pair_of(name: str, reference: dict[str, Any], kinds: tuple[str, ...], **changes: Any) -> None:
    @fault(name, "float32", kind="training", prepare=lambda side: trained(side, **reference))
    def _plant(side: Side, seed: int) -> Planted:
        trained(side, **changes)
        return Planted("<training>", kinds=kinds)


def _adamw(**how: Any) -> Callable[[nn.Module], Any]:
    return lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False, **how)


def _all_tokens(out: Tensor, wanted: Tensor) -> Tensor:
    scores, labels = labelled(out, wanted)
    return F.cross_entropy(scores, labels, reduction="sum") / len(labels)


def _chunk_lost(out: Tensor, wanted: Tensor) -> Tensor:
    scores, labels = out.flatten(0, -2), wanted.flatten(0, -2).argmax(-1)
    n = len(labels) * 3 // 4
    return F.cross_entropy(scores[:n], labels[:n], reduction="sum") / len(labels)


def _bucket_lost(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    for p in list(model.parameters())[-2:]:
        if p.grad is not None:
            p.grad.zero_()


def _by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=False)


def _summed(model: nn.Module, inputs: Inputs, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    n, total = len(next(iter(inputs.values()))), []
    for rows in torch.arange(n).tensor_split(2):
        own = slice(int(rows[0]), int(rows[-1]) + 1)
        out = first(call(model, {k: v[own] for k, v in inputs.items()}))
        value = loss(out, wanted_for(out, own))
        value.backward()
        total.append(value.detach() / 2)
    return torch.stack(total).sum()


def _some(model: nn.Module) -> Any:
    own = list(model.parameters())
    return torch.optim.AdamW(own[:-1] if len(own) > 1 else own, lr=1e-2, foreach=False)


_pair_of("clipped-before-unscaling", scaling(), ("gradients",), **scaling(late=True))
_pair_of("micro-batches-summed", {"backward": _micro(2, False)}, _TAKEN, backward=_summed)
_pair_of("schedule-one-step-late", scheduled("torch"), ("SGD",), **scheduled("torch", late=True))
_pair_of(
    "average-of-another-decay",
    averaged("loop"),
    ("AdamW", "parameters", "Own"),
    **averaged("loop", 0.8),
)
_pair_of("labels-to-ignore-counted", {"loss": ignoring}, ("loss",), loss=_all_tokens)
_pair_of("last-chunk-of-the-loss-lost", {"loss": _cross_entropy}, ("loss",), loss=_chunk_lost)
_training("bucket-of-gradients-lost", "gradients", clip=_bucket_lost)
_training("clipped-by-value", "gradients", clip=_by_value)
_training(
    "decay-coupled",
    "AdamW",
    "Adam",
    optimiser=lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.01, foreach=False),
)
_training("parameter-not-in-the-optimiser", "AdamW", "AccumulateGrad", optimiser=_some)
_pair_of("largest-square-kept", {"steps": 4}, ("AdamW",), optimiser=_adamw(amsgrad=True))


@fault(
    "dropout-not-scaled", "float32", kind="training", prepare=lambda s: trained(s, forward=seeded)
)
def _not_scaled(side: Side, seed: int) -> Planted:
    name = pick(dropping(side), seed)

    def drop(self: Any, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(self.keep) if self.training else x

    become(side.only(name), type(side.only(name)).forward, drop=drop)
    return Planted(name)


@fault(
    "recomputed-with-other-dropout",
    "float32",
    kind="training",
    prepare=lambda s: trained(s, forward=seeded),
)
def _other_mask(side: Side, seed: int) -> Planted:
    name = pick(named(side, Dropping), seed)
    recomputed(side, False)
    return Planted(name, also=tuple(f"{name}.{n}".strip(".") for n in ("norm", "first", "second")))


@fault("gradient-of-a-tied-weight-lost", "float32", kind="training", prepare=trained)
def _tied_gradient(side: Side, seed: int) -> Planted:
    name = pick(named(side, Tied), seed)
    edit(side.only(name), (r"self\.first\.weight\.t\(\)", "self.first.weight.detach().t()"))
    return Planted(name, also=(f"{name}.first".strip("."),))
