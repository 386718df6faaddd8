"""What trainers make of a step: functional gradients, scalers, schedules, averages, buckets, flat
optimisers, dropout by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.editing import become, named
from _zoo.irregular import Dropping
from _zoo.sides import Inputs, NotHere, Side, call, first
from _zoo.ways import way
from _zoo.ways_training import (
    TRAINING,
    _cross_entropy,
    _micro,
    _pair,
    trained,
    wanted_for,
)

Loss = Callable[[Tensor, Tensor], Tensor]
Optimiser = Callable[[nn.Module], torch.optim.Optimizer]


def _sgd(**how: Any) -> Optimiser:
    return lambda m: torch.optim.SGD(m.parameters(), **{"lr": 0.05, "foreach": False, **how})


def not_clipped(model: nn.Module) -> None:
    """Leave gradients as they are."""


def _held(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters()}


# ---- where gradients come from


@way("gradients-by-function", TRAINING, "training")
def _by_function(side: Side, seed: int) -> tuple[Side, Side]:
    def backward(model: nn.Module, inputs: Inputs, loss: Loss) -> Tensor:
        def value(held: dict[str, Tensor]) -> Tensor:
            out = first(
                torch.func.functional_call(model, held, (), inputs)
                if not all(k.isdigit() for k in inputs)
                else torch.func.functional_call(model, held, tuple(inputs.values()))
            )
            return loss(out, wanted_for(out, slice(len(out))))

        gradients, result = torch.func.grad_and_value(value)(_held(model))
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        return result.detach()

    return _pair(side, backward=backward)


@way("gradients-row-by-row", TRAINING, "training")
def _by_rows(side: Side, seed: int) -> tuple[Side, Side]:
    """A gradient for each row, vectorised, and their mean, as private training takes them."""
    if "plain" not in side.traits:
        raise NotHere("not plain")

    def backward(model: nn.Module, inputs: Inputs, loss: Loss) -> Tensor:
        def value(held: dict[str, Tensor], wanted: Tensor, *row: Tensor) -> Tensor:
            out = first(torch.func.functional_call(model, held, tuple(r[None] for r in row)))
            return loss(out, wanted[None])

        with torch.no_grad():
            out = first(call(model, inputs))
            wanted = wanted_for(out, slice(len(out)))
        rows = torch.func.vmap(torch.func.grad_and_value(value), (None, 0, *[0] * len(inputs)))
        gradients, values = rows(_held(model), wanted, *inputs.values())
        for name, p in model.named_parameters():
            p.grad = gradients[name].mean(0)
        return values.mean().detach()

    return _pair(side, backward=backward)


@way("two-backward-passes", TRAINING, "training")
def _two_passes(side: Side, seed: int) -> tuple[Side, Side]:
    """A loss of two terms: their sum at once, and one after the other."""

    def terms(out: Tensor, wanted: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        return loss(out, wanted), 0.1 * out.square().mean()

    def together(model: nn.Module, inputs: Inputs, loss: Loss) -> Tensor:
        out = first(call(model, inputs))
        a, b = terms(out, wanted_for(out, slice(len(out))), loss)
        (a + b).backward()
        return (a + b).detach()

    def apart(model: nn.Module, inputs: Inputs, loss: Loss) -> Tensor:
        out = first(call(model, inputs))
        a, b = terms(out, wanted_for(out, slice(len(out))), loss)
        a.backward(retain_graph=True)
        b.backward()
        return (a + b).detach()

    return _pair(side, {"backward": together}, backward=apart)


@way("gradients-in-own-buffers", TRAINING, "training")
def _buffers(side: Side, seed: int) -> tuple[Side, Side]:
    """Hooks add each micro-batch's gradients to buffers, which the optimiser is handed."""
    inner = _micro(2, False)

    def backward(model: nn.Module, inputs: Inputs, loss: Loss) -> Tensor:
        held: dict[Any, Tensor] = {}

        def add(p: Any) -> None:
            held[p] = p.grad.clone() if p not in held else held[p] + p.grad
            p.grad = None

        handles = [p.register_post_accumulate_grad_hook(add) for p in model.parameters()]
        value = inner(model, inputs, loss)
        for handle in handles:
            handle.remove()
        for p, g in held.items():
            p.grad = g
        return value

    return _pair(side, {"backward": inner}, backward=backward)


# ---- between backward and step


@way("gradients-in-buckets", TRAINING, "training")
def _in_buckets(side: Side, seed: int) -> tuple[Side, Side]:
    """Gradients are laid into one row of numbers, divided, and laid back, as ranks do."""

    def clip(model: nn.Module) -> None:
        own = [p for p in model.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in own]) * 2
        flat = flat / 2
        for p, g in zip(own, flat.split([p.numel() for p in own]), strict=True):
            p.grad.copy_(g.view_as(p))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)

    return _pair(side, clip=clip)


@way("clip-by-total-norm", TRAINING, "training")
def _total(side: Side, seed: int) -> tuple[Side, Side]:
    def clip(model: nn.Module) -> None:
        own = [p for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in own], foreach=False)
        nn.utils.clip_grads_with_norm_(own, 1.0, norm, foreach=False)

    return _pair(side, clip=clip)


class Scaled:
    """An optimiser behind torch's scaler of gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.own = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)

    def step(self) -> None:
        with torch._C.DisableTorchFunction():  # its scale is float32 for good
            self.scaler.step(self.own)
            self.scaler.update()

    def zero_grad(self) -> None:
        self.own.zero_grad()


@way("scaler-of-gradients", TRAINING, "training")
def _scaler(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, **scaling())


def scaling(late: bool = False) -> dict[str, Any]:
    """The parts of a step with a scaler. late: gradients are clipped before they are unscaled."""
    held: list[Scaled] = []

    def optimiser(model: nn.Module) -> Any:
        held[:] = [Scaled(model)]
        return held[0]

    def backward(model: nn.Module, inputs: Inputs, loss: Loss) -> Tensor:
        out = first(call(model, inputs))
        value = loss(out, wanted_for(out, slice(len(out))))
        with torch._C.DisableTorchFunction():
            scaled = held[0].scaler.scale(value)
        scaled.backward()
        return value.detach()

    def clip(model: nn.Module) -> None:
        if not late:
            with torch._C.DisableTorchFunction():
                held[0].scaler.unscale_(held[0].own)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)

    return {"optimiser": optimiser, "backward": backward, "clip": clip}


# ---- losses


@way("loss-in-chunks", TRAINING, "training")
def _chunks(side: Side, seed: int) -> tuple[Side, Side]:
    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        scores, labels = out.flatten(0, -2), wanted.flatten(0, -2).argmax(-1)
        parts = zip(scores.tensor_split(3), labels.tensor_split(3), strict=True)
        return sum(F.cross_entropy(a, b, reduction="sum") for a, b in parts) / len(labels)  # type: ignore[return-value]

    return _pair(side, {"loss": _cross_entropy}, loss=loss)


def labelled(out: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and labels, of which every third says nothing (-100)."""
    scores, labels = out.flatten(0, -2), wanted.flatten(0, -2).argmax(-1)
    return scores, torch.where(torch.arange(len(labels)) % 3 == 2, -100, labels)


def ignoring(out: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of the labels that say something."""
    return F.cross_entropy(*labelled(out, wanted))


@way("labels-ignored-by-a-mask", TRAINING, "training")
def _masked(side: Side, seed: int) -> tuple[Side, Side]:
    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        scores, labels = labelled(out, wanted)
        mask = labels >= 0
        each = F.cross_entropy(scores, labels.clamp(min=0), reduction="none")
        return (each * mask).sum() / mask.sum()

    return _pair(side, {"loss": ignoring}, loss=loss)


@way("labels-smoothed-by-hand", TRAINING, "training")
def _smoothed(side: Side, seed: int) -> tuple[Side, Side]:
    def own(out: Tensor, wanted: Tensor) -> Tensor:
        scores, labels = out.flatten(0, -2), wanted.flatten(0, -2).argmax(-1)
        return F.cross_entropy(scores, labels, label_smoothing=0.1)

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        scores = torch.log_softmax(out.flatten(0, -2), -1)
        hot = F.one_hot(wanted.flatten(0, -2).argmax(-1), scores.shape[-1]).to(scores.dtype)
        return -((0.9 * hot + 0.1 / scores.shape[-1]) * scores).sum(-1).mean()

    return _pair(side, {"loss": own}, loss=loss)


@way("rate-in-the-loss", TRAINING, "training")
def _rate(side: Side, seed: int) -> tuple[Side, Side]:
    """The loss times the rate, and steps of one."""
    reference = {"optimiser": _sgd(), "clip": not_clipped}
    loss: Loss = lambda out, w: F.mse_loss(out, w) * 0.05  # noqa: E731
    return _pair(side, reference, optimiser=_sgd(lr=1.0), clip=not_clipped, loss=loss, factor=0.05)


@way("loss-negated-and-maximised", TRAINING, "training")
def _maximised(side: Side, seed: int) -> tuple[Side, Side]:
    loss: Loss = lambda out, w: -F.mse_loss(out, w)  # noqa: E731
    return _pair(side, {"optimiser": _sgd()}, optimiser=_sgd(maximize=True), loss=loss, factor=-1.0)


@way("decay-in-the-loss", TRAINING, "training")
def _decay(side: Side, seed: int) -> tuple[Side, Side]:
    """Half the sum of squares of all parameters beside the loss, in place of decay."""

    def backward(model: nn.Module, inputs: Inputs, loss: Loss) -> Tensor:
        out = first(call(model, inputs))
        value = loss(out, wanted_for(out, slice(len(out))))
        squares = sum(p.square().sum() for p in model.parameters())
        (value + 0.05 * squares).backward()
        return value.detach()

    reference = {"optimiser": _sgd(weight_decay=0.1), "clip": not_clipped}
    return _pair(side, reference, optimiser=_sgd(), clip=not_clipped, backward=backward)


# ---- optimisers and schedules


class Flat:
    """An optimiser of one long parameter that all others are copied into and out of."""

    def __init__(self, model: nn.Module) -> None:
        self.own = list(model.parameters())
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in self.own]))
        self.inner = torch.optim.AdamW([self.flat], lr=1e-2, foreach=False)

    @torch.no_grad()
    def step(self) -> None:
        parts = [
            (p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in self.own
        ]
        self.flat.grad = torch.cat(parts)
        self.inner.step()
        for p, new in zip(self.own, self.flat.split([p.numel() for p in self.own]), strict=True):
            p.copy_(new.view_as(p))

    def zero_grad(self) -> None:
        for p in self.own:
            p.grad = None


@way("optimiser-of-one-long-parameter", TRAINING, "training")
def _flat(side: Side, seed: int) -> tuple[Side, Side]:
    made: Any = Flat
    return _pair(side, optimiser=made)


@way("stepped-in-backward", TRAINING, "training")
def _in_backward(side: Side, seed: int) -> tuple[Side, Side]:
    """Each parameter steps as soon as its gradient is there."""

    class Own:
        def __init__(self, model: nn.Module) -> None:
            self.own = {
                p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()
            }
            for p in self.own:
                p.register_post_accumulate_grad_hook(self.take)

        def take(self, p: Any) -> None:
            self.own[p].step()
            self.own[p].zero_grad()

        def step(self) -> None:
            """Has been done."""

        def zero_grad(self) -> None:
            """Has been done."""

    made: Any = Own
    return _pair(side, {"clip": not_clipped}, optimiser=made, clip=not_clipped)


class Scheduled:
    """SGD whose rate halves after every step. by: "torch" or "hand"; late: one step too late."""

    def __init__(self, model: nn.Module, by: str, late: bool = False) -> None:
        self.inner = _sgd(momentum=0.9)(model)
        self.by, self.late, self.count = by, late, 0
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.inner, 0.5)

    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.late and self.count == 1:
            return
        if self.by == "torch":
            self.schedule.step()
        else:
            for group in self.inner.param_groups:
                group["lr"] = 0.05 * 0.5**self.count

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def scheduled(by: str, late: bool = False) -> dict[str, Any]:
    """The part of a step with a schedule."""
    return {"optimiser": lambda m: Scheduled(m, by, late), "steps": 3}


@way("schedule-by-hand", TRAINING, "training")
def _schedule(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, scheduled("torch"), **scheduled("hand"))


@way("step-with-a-closure", TRAINING, "training")
def _closure(side: Side, seed: int) -> tuple[Side, Side]:
    class Own:
        def __init__(self, model: nn.Module) -> None:
            self.inner = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            self.model = model

        def step(self) -> None:
            def closure() -> float:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)
                return 0.0

            self.inner.step(closure)

        def zero_grad(self) -> None:
            self.inner.zero_grad()

    made: Any = Own
    return _pair(side, optimiser=made, clip=not_clipped)


def averaged(how: str, decay: float = 0.9) -> dict[str, Any]:
    """The parts of a training whose weights in the end are the average of those on the way.
    how: "loop", "foreach" or "torch".
    """

    class Own:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.count = model, 0
            self.inner = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            self.kept = [p.detach().clone() for p in model.parameters()]
            self.torch = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
            )
            self.torch.n_averaged += 1

        @torch.no_grad()
        def step(self) -> None:
            self.inner.step()
            own = list(self.model.parameters())
            if how == "loop":
                for k, p in zip(self.kept, own, strict=True):
                    k.mul_(decay).add_(p, alpha=1 - decay)
            elif how == "foreach":
                torch._foreach_lerp_(self.kept, own, 1 - decay)
            else:
                self.torch.update_parameters(self.model)
                self.kept = [p.detach() for p in self.torch.module.parameters()]
            self.count += 1
            if self.count == 2:
                for p, k in zip(own, self.kept, strict=True):
                    p.copy_(k)

        def zero_grad(self) -> None:
            self.inner.zero_grad()

    return {"optimiser": Own, "steps": 3}


@way("average-by-foreach", TRAINING, "training")
def _average(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, averaged("loop"), **averaged("foreach"))


@way("average-by-torch", TRAINING, "training")
def _average_torch(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, averaged("loop"), **averaged("torch"))


# ---- dropout


def seeded(model: nn.Module, inputs: Inputs) -> Any:
    """A call whose random numbers are the same in every run."""
    torch.manual_seed(7)
    return call(model, inputs)


def dropping(side: Side) -> list[str]:
    """Names of modules with dropout of their own."""
    names = named(side, Dropping)
    if not names:
        raise NotHere("no dropout by a seed")
    return names


def by_hand(self: Any, x: Tensor) -> Tensor:
    """Dropout as torch draws it."""
    if not self.training:
        return x
    return x * torch.empty_like(x).bernoulli_(self.keep).div_(self.keep)


@way("dropout-by-hand", TRAINING, "training")
def _dropout(side: Side, seed: int) -> tuple[Side, Side]:
    reference, other = trained(side.copied(), forward=seeded), trained(side, forward=seeded)
    for name in dropping(other):
        become(other.only(name), type(other.only(name)).forward, drop=by_hand)
        other.touched.add(name)
    return reference, other


def recomputed(side: Side, keeps_seed: bool) -> None:
    """Have branches with dropout computed again for the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for name in dropping(side):
        kind: Any = type(side.only(name))

        def branch(self: Any, x: Tensor, inner: Any = kind.branch) -> Tensor:
            return checkpoint(inner, self, x, use_reentrant=False, preserve_rng_state=keeps_seed)  # type: ignore[return-value]

        become(side.only(name), kind.forward, branch=branch)


@way("checkpointed-with-dropout", TRAINING, "training")
def _recomputed(side: Side, seed: int) -> tuple[Side, Side]:
    reference, other = trained(side.copied(), forward=seeded), trained(side, forward=seeded)
    recomputed(other, True)
    return reference, other
