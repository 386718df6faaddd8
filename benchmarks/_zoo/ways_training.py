"""Training steps done otherwise. The drive returns the losses and the parameters afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.sides import Inputs, NotHere, Side, call, first, normal
from _zoo.ways import way


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: each part can be another function."""

    steps: int = 2
    optimiser: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(
        m.parameters(), lr=1e-2, foreach=False
    )
    loss: Callable[[Tensor, Tensor], Tensor] = lambda out, wanted: F.mse_loss(out, wanted)
    backward: Callable[[nn.Module, Inputs, Callable[[Tensor, Tensor], Tensor]], Tensor] | None = (
        None
    )
    clip: Callable[[nn.Module], Any] = lambda m: nn.utils.clip_grad_norm_(
        m.parameters(), 1.0, foreach=False
    )
    zero: Callable[[torch.optim.Optimizer], None] = lambda o: o.zero_grad()
    forward: Callable[[nn.Module, Inputs], Any] = call
    factor: float = 1.0


def wanted_for(out: Tensor, rows: slice = slice(None)) -> Tensor:
    """What an output is trained towards: numbers by its shape without rows."""
    return torch.stack([normal(f"wanted {i}", *out.shape[1:]) for i in range(16)])[rows].to(
        out.dtype
    )


def simple(model: nn.Module, inputs: Inputs, recipe: Recipe) -> Tensor:
    """One forward and one backward pass."""
    out = first(recipe.forward(model, inputs))
    loss = recipe.loss(out, wanted_for(out, slice(len(out))))
    loss.backward()
    return loss.detach()


def train(recipe: Recipe) -> Callable[[nn.Module, Inputs], list[Tensor]]:
    """A drive that trains."""

    def drive(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        optimiser, losses = recipe.optimiser(model), []
        for step in range(recipe.steps):
            given = {k: v.roll(step, 0) if v.dim() else v for k, v in inputs.items()}
            if recipe.backward is not None:
                losses.append(recipe.backward(model, given, recipe.loss))
            else:
                losses.append(simple(model, given, recipe))
            recipe.clip(model)
            optimiser.step()
            recipe.zero(optimiser)
        return [
            *(x / recipe.factor for x in losses),
            *(p.detach().clone() for p in model.parameters()),
        ]

    return drive


PLAIN = Recipe()


def trained(side: Side, **changes: Any) -> Side:
    """The side with a training loop for a drive: the one that it has, with some parts changed."""
    if "rows" not in side.traits or len({len(v) for v in side.inputs.values()}) != 1:
        raise NotHere("no rows")
    side.recipe = replace(side.recipe or PLAIN, **changes)
    side.drive, side.around = train(side.recipe), torch.enable_grad
    _without_chance(side.model.train())
    return side


def _without_chance(model: nn.Module) -> None:
    """Every dropout keeps all, and nothing of speech is masked at random."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)


def _pair(side: Side, reference: dict[str, Any] | None = None, **other: Any) -> tuple[Side, Side]:
    copy = side.copied()
    return trained(side, **(reference or {})), trained(copy, **other)


def _adamw(**how: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, **how)


TRAINING = ("float32",)


@way("optimiser-foreach", TRAINING, "training")
def _foreach(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, optimiser=_adamw(foreach=True))


@way("optimiser-fused", TRAINING, "training")
def _fused(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, optimiser=_adamw(fused=True))


@way("sgd-foreach", TRAINING, "training")
def _sgd(side: Side, seed: int) -> tuple[Side, Side]:
    def sgd(**how: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda m: torch.optim.SGD(
            m.parameters(), lr=0.05, momentum=0.9, nesterov=True, **how
        )

    return _pair(side, {"optimiser": sgd(foreach=False)}, optimiser=sgd(foreach=True))


@way("sgd-fused", TRAINING, "training")
def _sgd_fused(side: Side, seed: int) -> tuple[Side, Side]:
    def sgd(**how: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, **how)

    return _pair(side, {"optimiser": sgd(foreach=False)}, optimiser=sgd(fused=True))


@way("parameters-in-groups", TRAINING, "training")
def _groups(side: Side, seed: int) -> tuple[Side, Side]:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return torch.optim.AdamW(
            [{"params": parameters[::2]}, {"params": parameters[1::2]}], lr=1e-2, foreach=False
        )

    return _pair(side, optimiser=groups)


@way("two-optimisers", TRAINING, "training")
def _two(side: Side, seed: int) -> tuple[Side, Side]:
    class Both:
        def __init__(self, model: nn.Module) -> None:
            parameters = list(model.parameters())
            self.own = [
                torch.optim.AdamW(p, lr=1e-2, foreach=False)
                for p in (parameters[::2], parameters[1::2])
                if p
            ]

        def step(self) -> None:
            for own in self.own:
                own.step()

        def zero_grad(self) -> None:
            for own in self.own:
                own.zero_grad()

    made: Any = Both
    return _pair(side, optimiser=made)


@way("clip-foreach", TRAINING, "training")
def _clip(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, clip=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True))


@way("clip-written-out", TRAINING, "training")
def _clip_written(side: Side, seed: int) -> tuple[Side, Side]:
    def clip(model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total = torch.sqrt(sum((g * g).sum() for g in gradients))  # type: ignore[arg-type]
        for g in gradients:
            g.mul_(torch.clamp(1.0 / (total + 1e-6), max=1.0))

    return _pair(side, clip=clip)


@way("zeroed-in-place", TRAINING, "training")
def _zeroed(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, zero=lambda o: o.zero_grad(set_to_none=False))


@way("loss-written-out", TRAINING, "training")
def _loss(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, loss=lambda out, w: ((out - w) ** 2).mean())


@way("loss-summed-and-divided", TRAINING, "training")
def _loss_sum(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, loss=lambda out, w: F.mse_loss(out, w, reduction="sum") / w.numel())


@way("loss-by-rows", TRAINING, "training")
def _loss_rows(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(
        side,
        loss=lambda out, w: torch.stack(
            [F.mse_loss(a, b) for a, b in zip(out, w, strict=True)]
        ).mean(),
    )


@way("loss-scaled", TRAINING, "training")
def _scaled(side: Side, seed: int) -> tuple[Side, Side]:
    """The loss times 1024, and every gradient divided by it before clipping."""

    def clip(model: nn.Module) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(1024.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)

    return _pair(side, loss=lambda out, w: F.mse_loss(out, w) * 1024.0, clip=clip, factor=1024.0)


def _micro(parts: int, late: bool) -> Callable[..., Tensor]:
    def backward(
        model: nn.Module, inputs: Inputs, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        n, total = len(next(iter(inputs.values()))), []
        for rows in torch.arange(n).tensor_split(parts):
            own = slice(int(rows[0]), int(rows[-1]) + 1)
            out = first(call(model, {k: v[own] for k, v in inputs.items()}))
            share = len(rows) / n
            value = loss(out, wanted_for(out, own)) * (1.0 if late else share)
            value.backward()
            total.append(value.detach() * (share if late else 1.0))
        if late:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.div_(parts)
        return torch.stack(total).sum()

    return backward


@way("micro-batches", TRAINING, "training")
def _micro_batches(side: Side, seed: int) -> tuple[Side, Side]:
    return _pair(side, backward=_micro(2, False))


@way("micro-batches-divided-late", TRAINING, "training")
def _micro_late(side: Side, seed: int) -> tuple[Side, Side]:
    if len(next(iter(side.inputs.values()))) % 2:
        raise NotHere("odd rows")
    return _pair(side, {"backward": _micro(2, False)}, backward=_micro(2, True))


@way("losses-summed-before-backward", TRAINING, "training")
def _together(side: Side, seed: int) -> tuple[Side, Side]:
    def backward(
        model: nn.Module, inputs: Inputs, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        n, losses = len(next(iter(inputs.values()))), []
        for rows in torch.arange(n).tensor_split(2):
            own = slice(int(rows[0]), int(rows[-1]) + 1)
            out = first(call(model, {k: v[own] for k, v in inputs.items()}))
            losses.append(loss(out, wanted_for(out, own)) * (len(rows) / n))
        total = torch.stack(losses).sum()
        total.backward()
        return total.detach()

    return _pair(side, {"backward": _micro(2, False)}, backward=backward)


def _checkpoints(side: Side, reentrant: bool) -> tuple[Side, Side]:
    from torch.utils.checkpoint import checkpoint

    from _zoo.ways_modules import _blocks

    other = side.copied()
    names = _blocks(other)
    if not names:
        raise NotHere("no blocks")
    if hasattr(other.model, "gradient_checkpointing_enable"):
        other.model.config.use_cache = False  # type: ignore[union-attr]
    for name in names:
        module = other.only(name)
        inner = type(module).forward

        def forward(self: Any, *a: Any, inner: Any = inner, **k: Any) -> Any:
            return checkpoint(lambda *b: inner(self, *b, **k), *a, use_reentrant=reentrant)

        from _zoo.editing import become

        become(module, forward)
    return trained(side), trained(other)


@way("checkpointed", TRAINING, "training")
def _checkpointed(side: Side, seed: int) -> tuple[Side, Side]:
    return _checkpoints(side, False)


@way("checkpointed-reentrant", TRAINING, "training", same=1e-3)  # recomputed in float32
def _reentrant(side: Side, seed: int) -> tuple[Side, Side]:
    return _checkpoints(side, True)


@way("trained-under-autocast", TRAINING, "training")
def _autocast(side: Side, seed: int) -> tuple[Side, Side]:
    def forward(model: nn.Module, inputs: Inputs) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = first(call(model, inputs))
        return out.float()

    return _pair(side, forward=forward)


@way("gradients-by-grad", TRAINING, "training")
def _by_grad(side: Side, seed: int) -> tuple[Side, Side]:
    """`torch.autograd.grad`, and the script puts the gradients in place."""

    def backward(
        model: nn.Module, inputs: Inputs, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        out = first(call(model, inputs))
        value = loss(out, wanted_for(out, slice(len(out))))
        parameters = list(model.parameters())
        for p, g in zip(
            parameters, torch.autograd.grad(value, parameters, allow_unused=True), strict=True
        ):
            p.grad = g
        return value.detach()

    return _pair(side, backward=backward)


@way("optimiser-written-out", TRAINING, "training")
def _written(side: Side, seed: int) -> tuple[Side, Side]:
    """AdamW by its formulas, as a class of the user's."""

    class Own(torch.optim.Optimizer):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                    state["step"] += 1
                    state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                    state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    p.mul_(1 - 1e-2 * 0.01)
                    m, v = (
                        state["m"] / (1 - 0.9 ** state["step"]),
                        state["v"] / (1 - 0.999 ** state["step"]),
                    )
                    p.sub_(1e-2 * m / (v.sqrt() + 1e-8))

    made: Any = Own
    return _pair(side, optimiser=made)


@way("rows-in-another-order-while-training", TRAINING, "training")
def _order(side: Side, seed: int) -> tuple[Side, Side]:
    def backward(
        model: nn.Module, inputs: Inputs, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        order = torch.arange(len(next(iter(inputs.values())))).roll(1)
        out = first(call(model, {k: v[order] for k, v in inputs.items()}))
        value = loss(out, wanted_for(out, slice(len(out)))[order])
        value.backward()
        return value.detach()

    return _pair(side, backward=backward)


def _classes(out: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    return out.flatten(0, -2), wanted.flatten(0, -2).argmax(-1)


def _cross_entropy(out: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(*_classes(out, wanted))


@way("cross-entropy-written-out", TRAINING, "training")
def _entropy(side: Side, seed: int) -> tuple[Side, Side]:
    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        scores, labels = _classes(out, wanted)
        own = scores.gather(1, labels[:, None])[:, 0]
        return (torch.logsumexp(scores, 1) - own).mean()

    return _pair(side, {"loss": _cross_entropy}, loss=loss)


@way("cross-entropy-by-probabilities", TRAINING, "training")
def _probabilities(side: Side, seed: int) -> tuple[Side, Side]:
    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        scores, labels = _classes(out, wanted)
        return F.nll_loss(torch.log_softmax(scores, -1), labels, reduction="sum") / len(labels)

    return _pair(side, {"loss": _cross_entropy}, loss=loss)


@way("adam-as-adamw-without-decay", TRAINING, "training")
def _adam(side: Side, seed: int) -> tuple[Side, Side]:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)

    return _pair(side, {"optimiser": _adamw(weight_decay=0.0, foreach=False)}, optimiser=adam)


@way("rmsprop-foreach", TRAINING, "training")
def _rmsprop(side: Side, seed: int) -> tuple[Side, Side]:
    def rmsprop(foreach: bool) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, foreach=foreach)

    return _pair(side, {"optimiser": rmsprop(False)}, optimiser=rmsprop(True))


def _while_training(name: str) -> None:
    """A way of calls, under training: parameters are the same, so gradients are."""

    @way(f"trained-with-{name}", TRAINING, "training")
    def _make(side: Side, seed: int) -> tuple[Side, Side]:
        from _zoo.ways import WAYS

        made = WAYS[name].make(side.copied(), seed)
        assert isinstance(made, Side)
        return trained(side), trained(made)


for _name in (
    "attention-sdpa",
    "attention-softmax-written-out",
    "attention-online-softmax",
    "layer-norm-written-out",
    "rms-norm-written-out",
    "activation-written-out",
    "linear-transposed",
    "linear-split-k",
    "residual-in-the-other-order",
    "experts-batched",
    "blocks-wrapped",
    "recurrent-unrolled",
    "convolution-unfolded",
):
    _while_training(_name)
