"""Is another choice among tied scores silent, and a wrong one named? Pairs of small models that
choose: top-k, argmax, sort, routing.

    python benchmarks/ties.py [--split report|tune|second|NUMBER] [--pairs 200] [--faults 40]
                              [--rule replay|dumps|operators] [--json OUT]
                              [--only REGEX] [--verbose]

A benign target computes the same scores by other kernels (another order of sums, exp2 in a softmax,
one rounding instead of two), or picks by another correct algorithm (the reverse order among equals,
a sort that is not stable). Scores tie often: 16 bits, and experts whose weights are each other's
with the halves of the features swapped, so that their scores are equal but for rounding. A fault is
a wrong routing: one that no noise of the dtype's size brings about (`is_wrong`). The pairs of
`tune` and `second` set the rule, those of `report` are drawn from other seeds and are reported in
docs/dev/faultbench.md; a number draws others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import whence
from whence.results import Comparison

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEEDS = {"tune": 0, "second": 1_000_000, "report": 2_000_000}


@dataclass(frozen=True)
class How:
    """How one side computes. linear, softmax, pick: which kernel; fault: what it does wrong, "" for
    nothing. at: token of some faults.
    """

    linear: str = "torch"
    softmax: str = "torch"
    pick: str = "torch"
    fault: str = ""
    at: int = 0


@dataclass(frozen=True)
class Size:
    """Extents of a model. groups: of experts, for grouped routing. tied: are experts alike in
    pairs?
    """

    batch: int
    tokens: int
    width: int
    experts: int
    k: int
    groups: int = 4
    tied: bool = True


# ---- kernels, all of them correct


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: str
) -> torch.Tensor:
    """x @ weight.T + bias, by another order of sums."""
    half = weight.shape[1] // 2
    if how == "split":
        y = (
            x[..., :half].float() @ weight[:, :half].float().T
            + x[..., half:].float() @ weight[:, half:].float().T
        ).to(x.dtype)
    elif how == "reversed":
        y = x.flip(-1) @ weight.flip(-1).T
    elif how == "once":
        y = (x.double() @ weight.double().T).to(x.dtype)
    else:
        y = F.linear(x, weight)
    return y if bias is None else y + bias


def softmax(x: torch.Tensor, how: str) -> torch.Tensor:
    """float32 softmax over the last axis."""
    x = x.float()
    if how == "exp2":
        e = torch.exp2((x - x.amax(-1, keepdim=True)) * 1.4426950408889634)
        return e / e.sum(-1, keepdim=True)
    if how == "log":
        return torch.exp(x - torch.logsumexp(x, -1, keepdim=True))
    if how == "flipped":
        return torch.softmax(x.flip(-1), -1).flip(-1)
    return torch.softmax(x, -1)


def topk(x: torch.Tensor, k: int, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of the last axis in descending order; which of equal ones comes first is up to
    `how`.
    """
    if how == "flip":
        v, i = torch.topk(x.flip(-1), k, -1)
        return v, x.shape[-1] - 1 - i
    if how == "sort":
        v, i = torch.sort(x, dim=-1, descending=True, stable=True)
        return v[..., :k], i[..., :k]
    if how == "ascending":
        v, i = torch.sort(x, dim=-1, stable=True)
        return v.flip(-1)[..., :k], i.flip(-1)[..., :k]
    if how == "one by one":
        left, values, indices = x.clone(), [], []
        for _ in range(k):
            i = left.flip(-1).argmax(-1, keepdim=True)
            i = x.shape[-1] - 1 - i
            values.append(x.gather(-1, i))
            indices.append(i)
            left = left.scatter(-1, i, float("-inf"))
        return torch.cat(values, -1), torch.cat(indices, -1)
    return torch.topk(x, k, -1)


# ---- what is wrong


def misrouted(
    v: torch.Tensor, i: torch.Tensor, scores: torch.Tensor, how: How
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice (values, indices) with a fault of `how`, if it is one of those that change a
    choice.
    """
    n, token = scores.shape[-1], how.at % i.shape[-2]
    if how.fault == "off by one":
        return v, (i + 1) % n
    if how.fault == "smallest":
        return torch.topk(scores, i.shape[-1], -1, largest=False)
    if how.fault == "ascending":
        return v.flip(-1), i.flip(-1)
    if how.fault == "next of the first":
        i = torch.cat((i[..., :1], (i[..., :1] + 1 + torch.arange(i.shape[-1] - 1)) % n), -1)
        return scores.gather(-1, i), i
    if how.fault == "twice the first":
        i = i[..., :1].expand_as(i).contiguous()
        return scores.gather(-1, i), i
    if how.fault == "score of the wrong token":
        i = i.roll(1, -2)
        return scores.gather(-1, i), i
    if how.fault == "one token misrouted":
        i = i.clone()
        i[..., token, :1] = scores[..., token, :].argmin(-1, keepdim=True)
        return scores.gather(-1, i), i
    if how.fault == "only the first half of the experts":
        return torch.topk(scores[..., : n // 2], i.shape[-1], -1)
    if how.fault == "skips the best":
        v, i = torch.topk(scores, i.shape[-1] + 1, -1)
        return v[..., 1:], i[..., 1:]
    return v, i


CHOOSING = (
    "off by one", "smallest", "ascending", "next of the first", "twice the first",
    "score of the wrong token", "one token misrouted", "only the first half of the experts",
    "skips the best",
)  # fmt: skip


# ---- models


def tied(weight: torch.Tensor) -> torch.Tensor:
    """Every second pair of rows: the same but for the halves of the features, which are equal in
    the input.
    """
    half = weight.shape[1] // 2
    out = weight.clone()
    out[1::4] = torch.cat((weight[0::4, half:], weight[0::4, :half]), 1)[: len(out[1::4])]
    return out


class Gate(nn.Module):
    def __init__(self, size: Size, how: How, *, bias: bool = True) -> None:
        super().__init__()
        made = nn.Linear(size.width, size.experts)
        self.weight = nn.Parameter(
            (tied(made.weight.detach()) if size.tied else made.weight.detach()) * 3
        )
        extra = made.bias.detach() * 4
        if size.tied:
            extra[1::4] = extra[0::4][: len(extra[1::4])]
        self.bias = nn.Parameter(extra) if bias else None
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.how.fault in ("no bias", "bias after the choice") else self.bias
        x = x.roll(1, -2) if self.how.fault == "gate reads another token" else x
        return linear(x, self.weight, bias, self.how.linear)


class Experts(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size.experts, size.width) / 2)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        return x + (
            weights[..., None].to(x.dtype) * torch.tanh(x[..., None, :] * self.weight[indices])
        ).sum(-2)


class Pick(nn.Module):
    def __init__(self, size: Size, how: How) -> None:
        super().__init__()
        self.size, self.how = size, how

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return misrouted(*topk(scores, self.size.k, self.how.pick), scores, self.how)


class Router(nn.Module):
    """Scores, softmax, top-k and the normalised weights in one module."""

    def __init__(self, size: Size, how: How) -> None:
        super().__init__()
        self.gate, self.size, self.how = Gate(size, how), size, how
        self.weight, self.bias = self.gate.weight, self.gate.bias
        del self.gate

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = Gate.forward(self, x)  # type: ignore[arg-type]
        scores = softmax(logits, self.how.softmax)
        v, i = misrouted(*topk(scores, self.size.k, self.how.pick), scores, self.how)
        if self.how.fault == "bias after the choice":
            v = softmax(logits + self.bias, self.how.softmax).gather(-1, i)
        return logits, (v / v.sum(-1, keepdim=True)).to(x.dtype), i


class Grouped(nn.Module):
    """Sigmoid scores, a bias that only the choice sees, groups first, unsorted."""

    def __init__(self, size: Size, how: How) -> None:
        super().__init__()
        gate = Gate(size, how)
        self.weight, self.correction, self.size, self.how = gate.weight, gate.bias, size, how

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size, how = self.size, self.how
        logits = linear(x, self.weight, None, how.linear)
        scores = torch.sigmoid(logits.float()).reshape(-1, size.experts)
        biased = scores if how.fault == "no bias" else scores + self.correction.float()
        groups = biased.view(len(biased), size.groups, -1)
        best = groups.topk(2, -1).values.sum(-1)
        if how.fault == "groups by their mean":
            best = groups.mean(-1)
        chosen = topk(best, size.groups // 2, how.pick)[1]
        mask = (
            torch.zeros_like(best)
            .scatter_(1, chosen, 1.0)[..., None]
            .expand_as(groups)
            .reshape_as(biased)
        )
        kept = (
            biased
            if how.fault == "no groups"
            else biased.masked_fill(
                ~mask.bool(), 0.0 if how.fault == "masked by zero" else float("-inf")
            )
        )
        indices = misrouted(*topk(kept, size.k, how.pick), kept, how)[1]
        if how.pick == "torch":
            indices = (
                torch.topk(kept, size.k, -1, sorted=False).indices if not how.fault else indices
            )
        weights = (biased if how.fault == "weights with bias" else scores).gather(1, indices)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights.reshape(*x.shape[:-1], -1).to(x.dtype), indices.reshape(*x.shape[:-1], -1)


class Block(nn.Module):
    """Everything in one module: no output shows what was chosen."""

    def __init__(self, size: Size, how: How) -> None:
        super().__init__()
        router, experts = Router(size, how), Experts(size)
        self.weight, self.bias, self.experts, self.size, self.how = (
            router.weight,
            router.bias,
            experts.weight,
            size,
            how,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, indices = Router.forward(self, x)  # type: ignore[arg-type]
        return x + (weights[..., None] * torch.tanh(x[..., None, :] * self.experts[indices])).sum(
            -2
        )


class Masked(nn.Module):
    """A mask of who goes where, as older Mixtral makes it: experts, rank, token."""

    def __init__(self, size: Size, how: How) -> None:
        super().__init__()
        self.size, self.how = size, how

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = softmax(logits.reshape(-1, self.size.experts), self.how.softmax)
        v, i = misrouted(*topk(scores, self.size.k, self.how.pick), scores, self.how)
        return v, F.one_hot(i, self.size.experts).permute(2, 1, 0)


class Nearest(nn.Module):
    """A codebook: the index of the nearest entry, and nothing else."""

    def __init__(self, size: Size, how: How) -> None:
        super().__init__()
        self.gate, self.how = Gate(size, how), how
        self.weight, self.bias = self.gate.weight, self.gate.bias
        del self.gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = -linear(
            x, self.weight, None if self.how.fault == "no bias" else self.bias, self.how.linear
        )
        if self.how.fault == "largest":
            return distance.argmax(-1)
        if self.how.fault == "off by one":
            return (distance.argmin(-1) + 1) % len(self.weight)
        if self.how.fault == "one token misrouted":
            out = distance.argmin(-1)
            out[..., self.how.at % out.shape[-1]] = distance[
                ..., self.how.at % out.shape[-1], :
            ].argmax(-1)
            return out
        if self.how.pick == "torch":
            return distance.argmin(-1)
        return topk(-distance, 1, self.how.pick)[1][..., 0]


class Sorted(nn.Module):
    """Tokens by their score: order alone, or with the values. kind: "argsort", "sort", "kthvalue",
    "median", "max".
    """

    def __init__(self, size: Size, how: How, kind: str) -> None:
        super().__init__()
        self.size, self.how, self.kind = size, how, kind
        self.weight = nn.Parameter(torch.randn(1, size.width))

    def forward(self, x: torch.Tensor) -> Any:
        score = linear(x, self.weight, None, self.how.linear)[..., 0]
        score = (score * 4).round() / 4 if self.kind == "argsort" else score
        n = score.shape[-1]
        if self.kind in ("argsort", "sort"):
            if self.how.fault == "sorted ascending":
                values, order = torch.sort(score, -1)
            elif self.how.pick == "torch":
                values, order = torch.sort(score, dim=-1, descending=True, stable=True)
            else:
                values, order = topk(score, n, self.how.pick)
            if self.how.fault == "two swapped":
                order = order.clone()
                order[..., [0, n - 1]] = order[..., [n - 1, 0]]
            return order[..., : n // 2] if self.kind == "argsort" else (values, order)
        k = {"kthvalue": n // 3, "median": (n - 1) // 2, "max": n - 1}[self.kind] + (
            1 if self.how.fault == "next rank" else 0
        )
        k = n - 2 if self.kind == "max" and self.how.fault == "next rank" else k
        if self.how.pick != "torch" or self.how.fault:
            values, order = topk(score, n, "ascending")
            return values.flip(-1)[..., k], order.flip(-1)[..., k]
        if self.kind == "kthvalue":
            return torch.kthvalue(score, k + 1, -1)
        return torch.median(score, -1) if self.kind == "median" else torch.max(score, -1)


class Model(nn.Module):
    """A projection, whose halves are equal, then what chooses, then what reads it."""

    def __init__(self, kind: str, size: Size, how: How) -> None:
        super().__init__()
        self.kind, self.size, self.how = kind, size, how
        self.up = nn.Linear(size.width // 2, size.width // 2)
        self.down = nn.Linear(size.width, size.width)
        made = {
            "separate": lambda: (Gate(size, how), Pick(size, how), Experts(size)),
            "router": lambda: (Router(size, how), Experts(size)),
            "container": lambda: (Gate(size, how), Experts(size)),
            "grouped": lambda: (Grouped(size, how), Experts(size)),
            "hidden": lambda: (Block(size, how),),
            "masked": lambda: (Gate(size, how), Masked(size, how)),
            "loop": lambda: (
                Gate(size, how),
                nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(size.experts)),
            ),
            "nearest": lambda: (Nearest(size, how), nn.Embedding(size.experts, size.width)),
            "dispatch": lambda: (Nearest(size, how), Experts(size)),
        }.get(kind, lambda: (Sorted(size, how, kind),))()
        for name, module in zip(("one", "two", "three"), made):
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = torch.cat((h, h), -1)
        return self.down(getattr(self, f"_{self.kind}", self._ordered)(h))

    def _separate(self, h: torch.Tensor) -> torch.Tensor:
        v, i = self.two(softmax(self.one(h), self.how.softmax) if self.size.k % 2 else self.one(h))
        return self.three(h, torch.softmax(v.float(), -1), i)

    def _router(self, h: torch.Tensor) -> torch.Tensor:
        _, weights, i = self.one(h)
        return self.two(h, weights, i)

    _grouped = lambda self, h: self.two(h, *self.one(h))  # noqa: E731

    def _container(self, h: torch.Tensor) -> torch.Tensor:
        scores = softmax(self.one(h), self.how.softmax)
        v, i = misrouted(*topk(scores, self.size.k, self.how.pick), scores, self.how)
        return self.two(h, v / v.sum(-1, keepdim=True), i)

    def _hidden(self, h: torch.Tensor) -> torch.Tensor:
        return self.one(h)

    def _masked(self, h: torch.Tensor) -> torch.Tensor:
        v, mask = self.two(self.one(h))
        return h + (mask.sum(0).T * v).sum(-1).to(h.dtype).reshape(*h.shape[:-1], 1)

    def _loop(self, h: torch.Tensor) -> torch.Tensor:
        flat = h.reshape(-1, h.shape[-1])
        scores = softmax(self.one(flat), self.how.softmax)
        v, i = misrouted(*topk(scores, self.size.k, self.how.pick), scores, self.how)
        out = torch.zeros_like(flat)
        mask = F.one_hot(i, self.size.experts).permute(2, 1, 0)
        for n, expert in enumerate(self.two):
            rank, token = torch.where(mask[n])
            if len(token):
                out.index_add_(0, token, (expert(flat[token]) * v[token, rank, None]).to(h.dtype))
        return out.reshape(h.shape)

    def _nearest(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.two(self.one(h))

    def _dispatch(self, h: torch.Tensor) -> torch.Tensor:
        flat = h.reshape(-1, h.shape[-1])
        expert = self.one(flat)
        order = (
            torch.argsort(expert, stable=True)
            if self.how.pick == "torch"
            else topk(-expert, len(expert), self.how.pick)[1]
        )
        if self.how.fault == "not put back":
            return self.two(
                flat[order], torch.ones_like(flat[:, :1]), expert[order][:, None]
            ).reshape(h.shape)
        out = self.two(flat[order], torch.ones_like(flat[:, :1]), expert[order][:, None])
        return torch.zeros_like(out).index_copy(0, order, out).reshape(h.shape)

    def _ordered(self, h: torch.Tensor) -> torch.Tensor:
        made = self.one(h)
        order = made[1] if isinstance(made, tuple) else made
        order = order[..., None] if order.dim() < 2 else order
        return h.gather(1, order[..., None].expand(*order.shape, h.shape[-1]))


KINDS = (
    "separate", "router", "container", "grouped", "hidden", "masked", "loop", "nearest",
    "dispatch", "argsort", "sort", "kthvalue", "median", "max",
)  # fmt: skip
_GROUPED = (
    "no bias",
    "groups by their mean",
    "no groups",
    "weights with bias",
    "one token misrouted",
    "off by one",
)
# Kind of model -> faults of it, and the module that each is in ("Model" is the code between
# modules).
FAULTS: dict[str, dict[str, str]] = {
    "separate": dict.fromkeys(CHOOSING, "two")
    | {"no bias": "one", "gate reads another token": "one"},
    "router": dict.fromkeys(
        (*CHOOSING, "no bias", "bias after the choice", "gate reads another token"), "one"
    ),
    "container": dict.fromkeys(CHOOSING, "Model") | {"no bias": "one"},
    "grouped": dict.fromkeys(_GROUPED, "one"),
    "hidden": {f: "one" for f in CHOOSING if f != "ascending"}
    | {"no bias": "one", "bias after the choice": "one"},
    "masked": dict.fromkeys(CHOOSING, "two"),
    "loop": dict.fromkeys(
        ("off by one", "smallest", "score of the wrong token", "skips the best"), "Model"
    )
    | {"no bias": "one"},
    "nearest": dict.fromkeys(("largest", "off by one", "no bias", "one token misrouted"), "one"),
    "dispatch": {"not put back": "Model", "off by one": "one"},
    "argsort": dict.fromkeys(("sorted ascending", "two swapped"), "one"),
    "sort": dict.fromkeys(("sorted ascending", "two swapped"), "one"),
    "kthvalue": {"next rank": "one"},
    "median": {"next rank": "one"},
    "max": {"next rank": "one"},
}


# ---- cases


@dataclass(frozen=True)
class Case:
    """A pair of models. culprit: the module at fault, None where nothing is."""

    name: str
    kind: str
    dtype: str
    seed: int
    size: Size
    target: How
    culprit: str | None = None


@dataclass
class Told:
    """What whence said of a case. parted: rows of what the choosing modules returned that differ;
    tied: rows it counts as ties.
    """

    case: Case
    status: str
    named: list[str]
    sentence: str
    tied: int
    parted: int
    incomparable: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def right(self) -> bool:
        if self.case.culprit is None:
            return self.status == "same"
        return (
            self.status == "different" and bool(self.named) and self.named[0] == self.case.culprit
        )


def cases(split: str, pairs: int, faults: int) -> Iterator[Case]:
    """Benign pairs, then faults; every kind of model, dtype and kernel in turn, all else drawn."""
    first = SEEDS[split] if split in SEEDS else int(split)
    draw, again = random.Random(first), random.Random(first + 1)
    dtypes = list(DTYPES)
    for n in range(pairs):
        kind, dtype = KINDS[n % len(KINDS)], dtypes[n // len(KINDS) % 3]
        how = How(
            draw.choice(("torch", "split", "reversed", "once")),
            draw.choice(("torch", "exp2", "log", "flipped")),
            draw.choice(
                ("flip", "sort", "ascending", "one by one", "torch")
                if n % 2
                else ("flip", "ascending")
            ),
        )
        yield Case(f"benign/{n}/{kind}/{dtype}", kind, dtype, first + n, _size(draw), how)
    every = [(kind, fault, culprit) for kind, of in FAULTS.items() for fault, culprit in of.items()]
    draw.shuffle(every)
    for n in range(faults):
        kind, fault, culprit = every[n % len(every)]
        dtype = dtypes[n % 3]
        how = How(draw.choice(("torch", "split")), "torch", "torch", fault, draw.randrange(64))
        size = replace(_size(draw), tied=kind != "loop" and draw.random() < 0.5)
        case = Case(
            f"fault/{n}/{kind}/{dtype}/{fault}", kind, dtype, first + 10_000 + n, size, how, culprit
        )
        for _ in range(_ATTEMPTS):
            if is_wrong(case):
                break
            case = replace(case, seed=case.seed + 1_000, size=replace(_size(again), tied=size.tied))
        else:
            raise SystemExit(f"{case.name}: no draw of it chooses anything wrong")
        yield case


def _size(draw: random.Random) -> Size:
    experts = draw.choice((8, 16, 32))
    return Size(
        draw.choice((1, 2, 3)),
        draw.choice((24, 40, 64)),
        draw.choice((32, 48, 64)),
        experts,
        draw.choice((2, 3, 4)),
    )


def is_wrong(case: Case) -> bool:
    """Does the planted fault choose what no noise of the dtype's size makes a correct model choose?

    Both run in float64, the correct one also on weights and inputs that are off by noise. An
    element of any module's inputs or outputs that the noise leaves as it is, or moves by less than
    a quarter of what the fault does, is evidence.
    """
    model, x = built(case, How(pick="sort"))
    wrong, _ = built(case, How(pick="sort", fault=case.target.fault, at=case.target.at))
    model, wrong, x = model.double(), wrong.double(), x.double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    size = _NOISE * torch.finfo(DTYPES[case.dtype]).eps / 2
    right = outputs(model, x)
    moved = [torch.zeros_like(t) for t in right.values()]
    uneven: set[int] = set()
    for _ in range(_DRAWS):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(_noisy(weights[name], size))
        noisy = outputs(model, _noisy(x, size))
        for n, (name, t) in enumerate(right.items()):
            if name not in noisy or noisy[name].shape != t.shape:
                uneven.add(n)
            else:
                moved[n] = torch.maximum(moved[n], (noisy[name] - t).abs())
    made = outputs(wrong, x)
    for n, (name, t) in enumerate(right.items()):
        if n in uneven:
            continue
        if (
            name not in made
            or made[name].shape != t.shape
            or ((made[name] - t).abs() > 4 * moved[n] + 1e-9).any()
        ):
            return True
    return False


_NOISE = 8.0  # of inputs and weights, in unit roundoffs (one standard deviation)
_DRAWS = 12
_ATTEMPTS = 100


def _noisy(x: torch.Tensor, size: float) -> torch.Tensor:
    return x * (1 + size * torch.randn(x.shape, dtype=x.dtype))


def built(case: Case, how: How) -> tuple[nn.Module, torch.Tensor]:
    """The model of a case, computing so, and its input."""
    torch.manual_seed(case.seed)
    model = Model(case.kind, case.size, how).to(DTYPES[case.dtype]).eval()
    return model, torch.randn(case.size.batch, case.size.tokens, case.size.width // 2).to(
        DTYPES[case.dtype]
    )


def outputs(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every module is given and returns, by its name and the number of the tensor, in
    float64.
    """
    made: dict[str, torch.Tensor] = {}

    def keep(name: str, given: tuple[Any, ...], output: Any) -> None:
        for n, item in enumerate((*given, *(output if isinstance(output, tuple) else (output,)))):
            made[f"{name}/{n}"] = item.double()

    hooks = [
        m.register_forward_hook(lambda *a, name=name: keep(name, *a[1:]))
        for name, m in model.named_modules()
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return made


def run(
    case: Case, folder: Path, compare: Callable[[Path, Path], Comparison], options: dict[str, Any]
) -> Told:
    """Capture both sides and compare them."""
    parted: list[int] = []
    made: list[list[torch.Tensor]] = [[], []]
    for side, how in enumerate((How(), case.target)):
        model, x = built(case, how)
        hooks = [
            m.register_forward_hook(lambda *a, s=side: made[s].extend(_indices(a[2])))
            for m in model.modules()
        ]
        with torch.no_grad():
            model(x)
        for hook in hooks:
            hook.remove()
        with torch.no_grad(), whence.capture(model, folder / str(side), force=True, **options):
            model(x)
    for a, b in zip(*made):
        parted.append(
            int((a != b).reshape(-1, a.shape[-1] if a.dim() else 1).any(-1).sum())
            if a.shape == b.shape
            else -1
        )
    result = compare(folder / "0", folder / "1")
    numbers = [v.numbers.get("tied_rows") or 0 for v in result.verdicts]
    first = result.findings[0].sentence if result.findings else result.headline
    return Told(
        case,
        result.status,
        [f.name for f in result.findings if f.confidence in ("certain", "likely")],
        first,
        int(max(numbers, default=0)),
        sum(parted),
        result.incomparable,
        result.notes,
    )


def _indices(output: Any) -> Iterator[torch.Tensor]:
    for item in output if isinstance(output, tuple) else (output,):
        if isinstance(item, torch.Tensor) and not item.is_floating_point():
            yield item


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--split", default="report", metavar="|".join((*SEEDS, "NUMBER")))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--rule", choices=("replay", "dumps", "operators"), default="replay")
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    told: list[Told] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(options.split, options.pairs, options.faults):
            if not re.search(options.only, case.name):
                continue
            with contextlib.redirect_stderr(io.StringIO()):
                one = run(
                    case,
                    Path(folder),
                    lambda a, b: whence.compare(a, b, replay=options.rule != "dumps"),
                    {"level": "op"} if options.rule == "operators" else {},
                )
            told.append(one)
            if options.verbose or not one.right:
                mark = "right" if one.right else "WRONG"
                print(
                    f"{mark} {case.name} {case.target} -> {one.status} {one.named} tied "
                    f"{one.tied} of {one.parted}: {one.sentence[:260]}"
                )
                sys.stdout.flush()
    scores = summary(told)
    print(json.dumps(scores, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")


def summary(told: list[Told]) -> dict[str, Any]:
    """Counts: benign pairs, those in which an index differs, flagged and undecided ones; faults,
    found, named first.
    """
    benign, faults = (
        [t for t in told if t.case.culprit is None],
        [t for t in told if t.case.culprit is not None],
    )
    return {
        "benign": len(benign),
        "with_another_index": sum(t.parted != 0 for t in benign),
        "flagged": sum(t.status == "different" for t in benign),
        "undecided": sum(t.status == "undecided" for t in benign),
        "faults": len(faults),
        "found": sum(t.status == "different" for t in faults),
        "named_first": sum(t.right for t in faults),
        "missed": sorted(t.case.name for t in faults if not t.right),
        "wrong": dict(Counter(t.case.kind for t in told if not t.right)),
    }


if __name__ == "__main__":
    main()
