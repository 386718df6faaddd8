"""Faults that are planted into the target, and which module should be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.editing import become, edit, gemma_like, is_norm, linears, named, pick, readers
from _zoo.plain import Experts, HandAttention, HandBlock, Router
from _zoo.sides import Inputs, NotHere, Side, normal
from _zoo.ways_attention import masked, use
from _zoo.ways_training import trained
from _zoo.ways_weights import _attentions, _fed, factor, heads_of, name_of, one, output_of, rotation


@dataclass(frozen=True)
class Planted:
    """name: of the module to be named first. also: names that are as right. operator: of the
    operator inside it, as aten calls it. kinds: of a fault in a script of training, the types of
    calls that may be named. rounding: it has no effect in float64.
    """

    name: str
    also: tuple[str, ...] = ()
    operator: str = ""
    kinds: tuple[str, ...] = ()
    rounding: bool = False


@dataclass(frozen=True)
class Fault:
    """prepare: makes the side that both sides start from."""

    name: str
    plant: Callable[[Side, int], Planted]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "mixed")
    kind: str = "call"
    prepare: Callable[[Side], Side] | None = None


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, *dtypes: str, kind: str = "call", prepare: Callable[[Side], Side] | None = None
) -> Callable[[Callable[[Side, int], Planted]], Callable[[Side, int], Planted]]:
    """Register a fault. It changes the side that it gets."""

    def register(plant: Callable[[Side, int], Planted]) -> Callable[[Side, int], Planted]:
        if name in FAULTS:
            raise ValueError(name)
        made = Fault(name, plant, kind=kind, prepare=prepare)
        FAULTS[name] = replace(made, dtypes=dtypes) if dtypes else made
        return plant

    return register


def _base(self: Any) -> Any:
    return type(self).__bases__[0]


# ---- linear layers


@fault("output-scaled")
def _scaled(side: Side, seed: int) -> Planted:
    name = pick(linears(side), seed)
    become(side.only(name), lambda self, x: _base(self).forward(self, x) * 1.05)
    return Planted(name, operator="mul")


@fault("bias-missing")
def _no_bias(side: Side, seed: int) -> Planted:
    name = pick([n for n in linears(side) if side.only(n).bias is not None], seed)
    side.only(name).bias = None  # type: ignore[assignment]
    return Planted(name)


@fault("bias-twice")
def _bias_twice(side: Side, seed: int) -> Planted:
    name = pick([n for n in linears(side) if side.only(n).bias is not None], seed)
    become(side.only(name), lambda self, x: F.linear(x, self.weight, self.bias) + self.bias)
    return Planted(name)


@fault("weight-transposed")
def _transposed(side: Side, seed: int) -> Planted:
    name = pick([n for n in linears(side) if len(set(side.only(n).weight.shape)) == 1], seed)  # type: ignore[arg-type]
    side.only(name).weight = nn.Parameter(side.only(name).weight.detach().T.clone())  # type: ignore[operator, union-attr]
    return Planted(name)


@fault("weight-row-zeroed")
@torch.no_grad()
def _row(side: Side, seed: int) -> Planted:
    name = pick(linears(side), seed)
    side.only(name).weight[seed % 5].zero_()  # type: ignore[index, operator]
    return Planted(name)


@fault("weight-element")
@torch.no_grad()
def _element(side: Side, seed: int) -> Planted:
    name = pick(linears(side), seed)
    weight: Any = side.only(name).weight
    weight[seed % 3, seed % 7] += 0.5 * weight.abs().max()
    return Planted(name)


@fault("weights-rounded", "float32")
@torch.no_grad()
def _rounded(side: Side, seed: int) -> Planted:
    name = pick(linears(side), seed)
    weight: Any = side.only(name).weight
    weight.copy_(weight.to(torch.float8_e4m3fn).float())
    return Planted(name)


@fault("computed-in-bfloat16", "float32")
def _narrow(side: Side, seed: int) -> Planted:
    name = pick(linears(side), seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(x.bfloat16(), self.weight.bfloat16(), bias).to(x.dtype)

    become(side.only(name), forward)
    return Planted(name, rounding=True)


@fault("last-input-ignored")
def _ignored(side: Side, seed: int) -> Planted:
    name = pick(linears(side), seed)
    become(side.only(name), lambda self, x: F.linear(x[..., :-1], self.weight[:, :-1], self.bias))
    return Planted(name)


@fault("output-clamped")
def _clamped(side: Side, seed: int) -> Planted:
    name = pick(linears(side), seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        out = _base(self).forward(self, x)
        return out.clamp(-0.5, 0.5)

    become(side.only(name), forward)
    return Planted(name, operator="clamp")


@fault("last-row-wrong")
def _last_row(side: Side, seed: int) -> Planted:
    """A kernel that leaves its last tile out."""
    name = pick(linears(side), seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        out = _base(self).forward(self, x).clone()
        out.view(-1, out.shape[-1])[-1] = 0
        return out

    become(side.only(name), forward)
    return Planted(name)


@fault("wrong-layer-called")
def _other_layer(side: Side, seed: int) -> Planted:
    """One layer has the weights of another of its shape."""
    places: dict[Any, list[str]] = {}
    for n in linears(side):
        places.setdefault((tuple(side.only(n).weight.shape), side.only(n).bias is None), []).append(
            n
        )  # type: ignore[union-attr, arg-type]
    pairs = [names for names in places.values() if len(names) > 1]
    if not pairs:
        raise NotHere("no two layers of one shape")
    names = pairs[seed % len(pairs)]
    a, b = names[seed % len(names)], names[(seed + 1) % len(names)]
    side.only(a).load_state_dict(side.only(b).state_dict())
    return Planted(a)


# ---- norms, activations, embeddings


def _norm_names(side: Side) -> list[str]:
    return [n for n, m in side.model.named_modules() if is_norm(m)]


def _epsilon(module: nn.Module) -> str:
    found = next(
        (k for k in ("variance_epsilon", "eps", "epsilon") if getattr(module, k, None) is not None),
        "",
    )
    if not found:
        raise NotHere("no epsilon")
    return found


@fault("norm-epsilon")
def _eps(side: Side, seed: int) -> Planted:
    name = pick(_norm_names(side), seed)
    setattr(side.only(name), _epsilon(side.only(name)), 3e-2)
    return Planted(name)


@fault("norm-epsilon-small", "float32")
def _eps_small(side: Side, seed: int) -> Planted:
    name = pick(_norm_names(side), seed)
    setattr(side.only(name), _epsilon(side.only(name)), 1e-3)
    return Planted(name)


@fault("norm-without-weight")
@torch.no_grad()
def _no_weight(side: Side, seed: int) -> Planted:
    name = pick([n for n in _norm_names(side) if not gemma_like(side.only(n))], seed)
    side.only(name).weight.fill_(1)  # type: ignore[operator, union-attr]
    return Planted(name)


@fault("norm-weight-plus-one")
@torch.no_grad()
def _plus_one(side: Side, seed: int) -> Planted:
    name = pick(_norm_names(side), seed)
    side.only(name).weight.add_(1)  # type: ignore[operator, union-attr]
    return Planted(name)


@fault("norm-without-bias")
def _no_norm_bias(side: Side, seed: int) -> Planted:
    name = pick([n for n in named(side, nn.LayerNorm) if side.only(n).bias is not None], seed)
    side.only(name).bias = None  # type: ignore[assignment]
    return Planted(name)


@fault("norm-with-another-variance")
def _unbiased(side: Side, seed: int) -> Planted:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt()
        out = out * self.weight
        return out if self.bias is None else out + self.bias

    name = pick([n for n in named(side, nn.LayerNorm) if side.only(n).weight is not None], seed)
    become(side.only(name), forward)
    return Planted(name)


@fault("norm-centred")
def _centred(side: Side, seed: int) -> Planted:
    """An RMS norm that subtracts the mean."""
    name = pick([n for n in _norm_names(side) if "RMS" in type(side.only(n)).__name__], seed)
    become(side.only(name), lambda self, x: _base(self).forward(self, x - x.mean(-1, keepdim=True)))
    return Planted(name)


@fault("norm-over-another-axis")
def _axis(side: Side, seed: int) -> Planted:
    name = pick(named(side, nn.GroupNorm), seed)
    side.only(name).num_groups = 2  # type: ignore[assignment]
    return Planted(name)


_OTHER_ACTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "GELU": lambda self, x: F.gelu(x, approximate="tanh" if self.approximate == "none" else "none"),
    "GELUActivation": lambda self, x: F.gelu(x, approximate="tanh"),
    "NewGELUActivation": lambda self, x: F.gelu(x),
    "GELUTanh": lambda self, x: F.gelu(x),
    "SiLU": lambda self, x: F.gelu(x),
    "SiLUActivation": lambda self, x: F.gelu(x),
    "ReLU": lambda self, x: F.leaky_relu(x, 0.01),
    "Tanh": lambda self, x: F.hardtanh(x),
    "LeakyReLU": lambda self, x: F.leaky_relu(x, 0.1),
}


@fault("activation-of-another-kind")
def _other_act(side: Side, seed: int) -> Planted:
    name = pick([n for n, m in side.model.named_modules() if type(m).__name__ in _OTHER_ACTS], seed)
    become(side.only(name), _OTHER_ACTS[type(side.only(name)).__name__])
    return Planted(name)


@fault("activation-missing")
def _no_act(side: Side, seed: int) -> Planted:
    name = pick([n for n, m in side.model.named_modules() if type(m).__name__ in _OTHER_ACTS], seed)
    become(side.only(name), lambda self, x: x.clone())
    return Planted(name)


@fault("embedding-off-by-one")
def _off_by_one(side: Side, seed: int) -> Planted:
    name = pick(_called(side, nn.Embedding), seed)
    become(side.only(name), lambda self, x: F.embedding((x + 1) % self.num_embeddings, self.weight))
    return Planted(name)


def _called(side: Side, *kinds: type[nn.Module]) -> list[str]:
    from _zoo.editing import calls

    called = {c[0] for c in calls(side)}
    return [n for n in named(side, *kinds) if n in called and type(side.only(n)) in kinds]


@fault("embedding-scaled")
def _embedding(side: Side, seed: int) -> Planted:
    name = pick(_called(side, nn.Embedding), seed)
    become(side.only(name), lambda self, x: F.embedding(x, self.weight) * 1.1)
    return Planted(name)


@fault("embedding-row-swapped")
def _embedding_row(side: Side, seed: int) -> Planted:
    """Two tokens changed places in the table."""
    name = pick(_called(side, nn.Embedding), seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        a = int(x.flatten()[seed % x.numel()])
        b = (a + 1) % self.num_embeddings
        table = self.weight.clone()
        table[[a, b]] = table[[b, a]]
        return F.embedding(x, table)

    become(side.only(name), forward)
    return Planted(name)


# ---- convolutions and recurrent nets


def _convs(side: Side) -> list[str]:
    return [
        n for n in named(side, nn.Conv1d, nn.Conv2d) if type(side.only(n)) in (nn.Conv1d, nn.Conv2d)
    ]


@fault("kernel-flipped")
@torch.no_grad()
def _flipped(side: Side, seed: int) -> Planted:
    name = pick([n for n in _convs(side) if side.only(n).kernel_size[-1] > 1], seed)  # type: ignore[index]
    side.only(name).weight.copy_(side.only(name).weight.flip(-1))  # type: ignore[operator, union-attr]
    return Planted(name)


@fault("padding-of-another-kind")
def _padding(side: Side, seed: int) -> Planted:
    def forward(self: Any, x: Tensor) -> Tensor:
        pads = [n for p in reversed(self.padding) for n in (p, p)]
        f = F.conv2d if x.dim() == 4 else F.conv1d
        return f(
            F.pad(x, pads, "replicate"),
            self.weight,
            self.bias,
            self.stride,
            0,
            self.dilation,
            self.groups,
        )

    names = [
        n
        for n in _convs(side)
        if isinstance(side.only(n).padding, tuple) and sum(side.only(n).padding)
    ]  # type: ignore[arg-type]
    name = pick(names, seed)
    become(side.only(name), forward)
    return Planted(name)


@fault("shifted-by-one-pixel")
def _shifted(side: Side, seed: int) -> Planted:
    name = pick([n for n in _convs(side) if side.only(n).kernel_size[-1] > 1], seed)  # type: ignore[index]
    become(side.only(name), lambda self, x: _base(self).forward(self, x.roll(1, -1)))
    return Planted(name)


@fault("channels-swapped")
@torch.no_grad()
def _channels(side: Side, seed: int) -> Planted:
    name = pick(_convs(side), seed)
    weight: Any = side.only(name).weight
    weight[[0, 1]] = weight[[1, 0]].clone()
    return Planted(name)


@fault("batch-norm-epsilon")
def _bn_eps(side: Side, seed: int) -> Planted:
    name = pick(named(side, nn.BatchNorm2d), seed)
    side.only(name).eps = 0.05  # type: ignore[assignment]
    return Planted(name)


@fault("batch-norm-of-the-batch")
def _bn_batch(side: Side, seed: int) -> Planted:
    name = pick(named(side, nn.BatchNorm2d), seed)
    become(
        side.only(name),
        lambda self, x: F.batch_norm(x, None, None, self.weight, self.bias, True, 0.1, self.eps),
    )
    return Planted(name)


@fault("batch-norm-mean-ignored")
@torch.no_grad()
def _bn_mean(side: Side, seed: int) -> Planted:
    name = pick(named(side, nn.BatchNorm2d), seed)
    side.only(name).running_mean.zero_()  # type: ignore[operator, union-attr]
    return Planted(name)


@fault("gates-in-another-order")
@torch.no_grad()
def _gates(side: Side, seed: int) -> Planted:
    name = pick(named(side, nn.LSTM, nn.GRU, nn.GRUCell), seed)
    module: Any = side.only(name)
    weight = next(p for n, p in module.named_parameters() if n.startswith("weight_ih"))
    n = module.hidden_size
    weight[: 2 * n] = weight[: 2 * n].roll(n, 0).clone()
    return Planted(name)


@fault("recurrent-bias-forgotten")
@torch.no_grad()
def _rnn_bias(side: Side, seed: int) -> Planted:
    name = pick(named(side, nn.LSTM, nn.GRU, nn.RNN, nn.GRUCell), seed)
    next(p for n, p in side.only(name).named_parameters() if n.startswith("bias_hh")).zero_()
    return Planted(name)


# ---- attention


def _attention_names(side: Side) -> list[str]:
    return [n for _, n in _attentions(side)]


def _wrong_kernel(name: str, kernel: Callable[..., Tensor], operator: str = "") -> None:
    @fault(name)
    def _plant(side: Side, seed: int) -> Planted:
        place = pick(_attention_names(side), seed)
        use(side, name, kernel, only=place)
        side.touched.clear()
        return Planted(place, operator=operator)


def _with(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, axis: int = -1
) -> Tensor:
    scores = masked(q @ k.transpose(-2, -1) * scaling, mask)
    weights = torch.softmax(scores, axis, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def _looser(mask: Tensor | None) -> Tensor | None:
    """A causal mask that lets the next token through."""
    if mask is None or mask.shape[-1] < 2:
        raise NotHere("no mask")
    out = mask.clone()
    out[..., :, 1:] = mask[..., :, :-1]
    return out


def _tighter(mask: Tensor | None) -> Tensor | None:
    """A mask that hides one key more."""
    if mask is None:
        raise NotHere("no mask")
    out = mask.clone()
    out[..., 2:, 0] = torch.finfo(mask.dtype).min
    return out


def _repeated_wrongly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups < 2 or k.shape[1] < 2:
        raise NotHere("no groups of heads")
    return _with(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), mask, scaling)


_repeated_wrongly.grouped = True  # type: ignore[attr-defined]

_wrong_kernel("attention-scale", lambda q, k, v, m, s: _with(q, k, v, m, s * 1.15), "mul")
_wrong_kernel("attention-mask-looser", lambda q, k, v, m, s: _with(q, k, v, _looser(m), s))
_wrong_kernel("attention-mask-tighter", lambda q, k, v, m, s: _with(q, k, v, _tighter(m), s))
_wrong_kernel("attention-mask-dropped", lambda q, k, v, m, s: _with(q, k, v, None, s))
_wrong_kernel("attention-heads-swapped", lambda q, k, v, m, s: _with(q, k, v, m, s).roll(1, 2))
_wrong_kernel("attention-softmax-axis", lambda q, k, v, m, s: _with(q, k, v, m, s, -2), "_softmax")
_wrong_kernel("attention-wrong-repetition", _repeated_wrongly)
_wrong_kernel("attention-keys-shifted", lambda q, k, v, m, s: _with(q, k.roll(1, 2), v, m, s))
_wrong_kernel(
    "attention-values-of-the-last-key",
    lambda q, k, v, m, s: _with(q, k, torch.cat([v[:, :, :-1], v[:, :, :1]], 2), m, s),
)


@fault("attention-softmax-rounded", "float32")
def _softmax_rounded(side: Side, seed: int) -> Planted:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        scores = masked(q @ k.transpose(-2, -1) * scaling, mask)
        weights = torch.softmax(scores.bfloat16(), -1).to(q.dtype)
        return (weights @ v).transpose(1, 2)

    place = pick(_attention_names(side), seed)
    use(side, "softmax-rounded", kernel, only=place)
    side.touched.clear()
    return Planted(place, rounding=True)


@fault("frequencies-of-rotary-positions")
@torch.no_grad()
def _theta(side: Side, seed: int) -> Planted:
    names = [
        n for n, m in side.model.named_modules() if isinstance(getattr(m, "inv_freq", None), Tensor)
    ]
    name = pick(names, seed)
    side.only(name).inv_freq.pow_(0.9)  # type: ignore[operator, union-attr]
    return Planted(name)


@fault("positions-doubled")
def _positions(side: Side, seed: int) -> Planted:
    names = [
        n for n, m in side.model.named_modules() if isinstance(getattr(m, "inv_freq", None), Tensor)
    ]
    name = pick(names, seed)
    edit(side.only(name), (r"position_ids\[", "(position_ids + position_ids // 6)["))
    return Planted(name)


@fault("projections-swapped")
def _swapped(side: Side, seed: int) -> Planted:
    """Attention reads keys where values should be."""
    attention, name = one(_attentions(side), seed)
    if attention.k_proj.weight.shape != attention.v_proj.weight.shape:
        raise NotHere("keys and values of other widths")
    edit(attention, (r"self\.v_proj\(", "self.k_proj("))
    return Planted(name, also=(f"{name}.v_proj", f"{name}.k_proj"))


@fault("output-heads-mixed")
@torch.no_grad()
def _heads_mixed(side: Side, seed: int) -> Planted:
    attention, _ = one(_attentions(side), seed)
    o, size = output_of(attention), heads_of(side, attention)
    o.weight.copy_(o.weight.roll(size, 1))
    return Planted(name_of(side, o))


# ---- blocks


def _edited(name: str, *changes: tuple[str, str], only: str = "") -> None:
    @fault(name)
    def _plant(side: Side, seed: int) -> Planted:
        places = []
        for n, m in side.model.named_modules():
            if n and list(m.children()) and not isinstance(m, (nn.Sequential, nn.ModuleList)):
                places.append((n, m))
        places = places[seed % max(1, len(places)) :] + places[: seed % max(1, len(places))]
        for n, module in places:
            try:
                edit(module, *changes)
            except NotHere:
                continue
            return Planted(n)
        raise NotHere("no code of that form")


_edited("residual-dropped", (r"= residual \+ (\w+)\n", r"= \1\n"))
_edited("residual-doubled", (r"= residual \+ (\w+)\n", r"= 2 * residual + \1\n"))
_edited("branch-scaled", (r"= residual \+ (\w+)\n", r"= residual + 0.9 * \1\n"))
_edited("branch-subtracted", (r"= residual \+ (\w+)\n", r"= residual - \1\n"))
_edited(
    "gate-without-activation", (r"self\.act_fn\(self\.gate_proj\((\w+)\)\)", r"self.gate_proj(\1)")
)
_edited(
    "gate-and-up-swapped",
    (
        r"self\.act_fn\(self\.gate_proj\((\w+)\)\) \* self\.up_proj\(\w+\)",
        r"self.gate_proj(\1) * self.act_fn(self.up_proj(\1))",
    ),
)


@fault("norm-skipped")
def _skipped(side: Side, seed: int) -> Planted:
    places = [n.rpartition(".")[::2] for n in _norm_names(side)]
    places = [(p, n) for p, n in places if p and not n.isdigit()]
    if not places:
        raise NotHere("no norm with a name")
    parent, last = places[seed % len(places)]
    edit(side.only(parent), (rf"self\.{last}\((\w+)\)", r"(\1)"))
    return Planted(parent, also=(f"{parent}.{last}",))


# ---- experts


@fault("wrong-expert")
def _wrong_expert(side: Side, seed: int) -> Planted:
    names = [n for n, m in side.model.named_modules() if type(m).__name__.endswith("Experts")]
    name = pick(names, seed)
    module = side.only(name)
    count = int(getattr(module, "num_experts", 6))
    own = isinstance(module, Experts)

    def forward(self: Any, x: Tensor, index: Tensor, *more: Any, **other: Any) -> Any:
        return _base(self).forward(self, x, (index + (index == 0)) % count, *more, **other)

    if own or _takes_index(module):
        become(module, forward)
    else:
        raise NotHere("experts with other arguments")
    return Planted(name)


def _takes_index(module: nn.Module) -> bool:
    import inspect

    names = list(inspect.signature(module.forward).parameters)
    return (len(names) > 1 and "index" in names[1]) or "indices" in (names[1:2] or [""])[0]


@fault("expert-weights-swapped")
@torch.no_grad()
def _experts_swapped(side: Side, seed: int) -> Planted:
    places = [
        (n, m)
        for n, m in side.model.named_modules()
        if any(p.dim() == 3 for p in m.parameters(recurse=False)) and "xpert" in n
    ]
    if not places:
        raise NotHere("no stacked experts")
    name, module = places[seed % len(places)]
    parameter = [p for p in module.parameters(recurse=False) if p.dim() == 3][-1]
    parameter.copy_(parameter.roll(1, 0))
    return Planted(name)


@fault("shares-not-normalised")
def _shares(side: Side, seed: int) -> Planted:
    names = named(side, Router)
    name = pick(names, seed)
    edit(side.only(name), (r"weight / weight\.sum\(-1, keepdim=True\)", "weight"))
    return Planted(name)


@fault("second-expert-dropped")
def _second(side: Side, seed: int) -> Planted:
    name = pick(named(side, Router), seed)

    def forward(self: Any, x: Tensor) -> Any:
        weight, index = _base(self).forward(self, x)
        return weight * torch.tensor([1.0, 0.0], dtype=weight.dtype), index

    become(side.only(name), forward)
    return Planted(name)


@fault("hand-block-arguments")
def _hand(side: Side, seed: int) -> Planted:
    """Cosines and sines are handed over in the wrong order."""
    name = pick(named(side, HandBlock), seed)
    edit(side.only(name), (r"cos, sin, mask\)", "sin, cos, mask)"))
    return Planted(name, also=(f"{name}.attention",))


@fault("hand-rotary-halves")
def _halves(side: Side, seed: int) -> Planted:
    """Keys are not rotated."""
    name = pick(named(side, HandAttention), seed)
    edit(side.only(name), (r", rotate\(k, cos, sin\)", ", k"))
    return Planted(name)


# ---- other ways, done wrongly


@fault("smoothing-without-the-bias", "float32", "mixed")
@torch.no_grad()
def _smooth(side: Side, seed: int) -> Planted:
    """A factor per channel is moved behind a norm whose bias is forgotten."""
    fed = {n: o for n, o in _fed(side).items() if getattr(side.only(n), "bias", None) is not None}
    name = pick(list(fed), seed)
    s = factor("smooth", side.only(name).weight.numel())  # type: ignore[operator, union-attr]
    side.only(name).weight.div_(s)  # type: ignore[operator, union-attr]
    for other in fed[name]:
        side.only(other).weight.mul_(s)  # type: ignore[operator, union-attr]
    return Planted(name, also=tuple(fed[name]))


@fault("norm-folded-into-all-but-one", "float32", "mixed")
@torch.no_grad()
def _one_forgotten(side: Side, seed: int) -> Planted:
    fed = {
        n: o
        for n, o in _fed(side).items()
        if len(o) > 1 and getattr(side.only(n), "bias", None) is None
    }
    name = pick(list(fed), seed)
    norm: Any = side.only(name)
    for other in fed[name][:-1]:
        side.only(other).weight.mul_(norm.weight)  # type: ignore[operator, union-attr]
    norm.weight.fill_(1)
    return Planted(fed[name][-1], also=(name,))


@fault("scale-applied-twice")
@torch.no_grad()
def _twice(side: Side, seed: int) -> Planted:
    """The factor of the scores goes into the query's weights and stays in the code."""
    attention, name = one(_attentions(side), seed)
    attention.q_proj.weight.mul_(attention.q_proj.out_features**-0.5 * 2)
    return Planted(f"{name}.q_proj", also=(name,))


@fault("batch-norm-folded-without-its-mean", "float32", "mixed")
@torch.no_grad()
def _bn_fold(side: Side, seed: int) -> Planted:
    links = {
        n: o[0]
        for n, o in readers(side).items()
        if type(side.only(n)) is nn.Conv2d
        and len(o) == 1
        and isinstance(side.only(o[0]), nn.BatchNorm2d)
    }
    name = pick(list(links), seed)
    conv, norm = side.only(name), side.only(links[name])
    scale: Any = norm.weight / (norm.running_var + norm.eps).sqrt()  # type: ignore[operator]
    conv.weight.mul_(scale[:, None, None, None])  # type: ignore[operator, union-attr]
    if conv.bias is not None:
        conv.bias.mul_(scale)  # type: ignore[operator, union-attr]
    norm.running_mean.zero_()  # type: ignore[operator, union-attr]
    norm.running_var.fill_(1 - norm.eps)  # type: ignore[operator]
    norm.weight.fill_(1)  # type: ignore[operator, union-attr]
    return Planted(links[name], also=(name,))


@fault("rotated-values-not-turned-back", "float32", "mixed")
@torch.no_grad()
def _rotated(side: Side, seed: int) -> Planted:
    attention, name = one(_attentions(side), seed)
    v, size = attention.v_proj, heads_of(side, attention)
    r = rotation(normal("rotation", size, size))
    v.weight.copy_((r @ v.weight.view(-1, size, v.in_features)).reshape(v.weight.shape))
    return Planted(f"{name}.v_proj")


# ---- caches


def _cached(side: Side) -> Side:
    from _zoo.ways_calls import _in_pieces

    if "decoder" not in side.traits:
        raise NotHere("no decoder")
    side.drive = _in_pieces(7)
    return side


@fault("cache-loses-a-key", prepare=_cached)
def _loses(side: Side, seed: int) -> Planted:
    """What an attention left in the cache is shifted before the next piece reads it."""
    inner = side.drive
    place = pick(_attention_names(side), seed)
    layer = int(getattr(side.only(place), "layer_idx", 0) or 0)

    def drive(model: nn.Module, inputs: Inputs) -> Any:
        def before(m: Any, a: Any, k: Any) -> None:
            cache = k.get("past_key_values")
            if cache is not None and cache.get_seq_length() >= 7 and k.get("input_ids") is not None:
                own = cache.layers[layer]
                own.keys = own.keys.roll(1, 2)

        handle = model.register_forward_pre_hook(before, with_kwargs=True)
        try:
            return inner(model, inputs)
        finally:
            handle.remove()

    side.drive = drive
    return Planted(place, also=("",))


# ---- training


def _training(name: str, *kinds: str, **changes: Any) -> None:
    @fault(name, "float32", kind="training", prepare=trained)
    def _plant(side: Side, seed: int) -> Planted:
        trained(side, **changes)
        return Planted("<training>", kinds=kinds)


def _adamw(**how: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: torch.optim.AdamW(m.parameters(), **{"lr": 1e-2, "foreach": False, **how})


def _clipped(limit: float, before: float = 1.0, after: float = 1.0) -> Callable[[nn.Module], None]:
    def clip(model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if before != 1.0:
            for g in gradients:
                g.mul_(before)
        nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=False)
        if after != 1.0:
            for g in gradients:
                g.mul_(after)

    return clip


_training("optimiser-epsilon", "AdamW", optimiser=_adamw(eps=1e-3))
_training("optimiser-betas", "AdamW", optimiser=_adamw(betas=(0.9, 0.99)))
_training("optimiser-decay", "AdamW", optimiser=_adamw(weight_decay=0.1))
_training("optimiser-rate", "AdamW", optimiser=_adamw(lr=1.1e-2))
_training("clip-limit", "gradients", clip=_clipped(0.1))
_training("clip-forgotten", "gradients", clip=lambda m: None)
_training("gradients-doubled", "gradients", clip=_clipped(1.0, after=2.0))
_training("gradients-kept", "AccumulateGrad", "gradients", zero=lambda o: None)
_training("loss-summed", "loss", loss=lambda out, w: F.mse_loss(out, w, reduction="sum"))
_training("loss-of-another-kind", "loss", loss=lambda out, w: F.smooth_l1_loss(out, w))
_training("labels-shifted", "loss", loss=lambda out, w: F.mse_loss(out, w.roll(1, -1)))


@fault("wrong-derivative", "float32", kind="training", prepare=trained)
def _derivative(side: Side, seed: int) -> Planted:
    """A function of the user's whose backward pass is wrong."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 1.1

    name = pick(linears(side), seed)
    become(side.only(name), lambda self, x: Scaled.apply(_base(self).forward(self, x)))
    return Planted(name)


@fault("branch-detached", "float32", kind="training", prepare=trained)
def _detached(side: Side, seed: int) -> Planted:
    name = pick(linears(side), seed)
    become(side.only(name), lambda self, x: _base(self).forward(self, x.detach()))
    return Planted(name)
