"""Pairs of trainings of a small model: done otherwise with the same result, and with a fault."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import whence
from _golden.nets import Record, seeded
from _golden.place import Answers, Case, Place, pair

LOSS_SCALE = 64.0


class Net(nn.Module):
    """An embedding, two residual layers and a head; computes its loss where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            for _ in range(2)
        )
        self.run: Callable[..., Any] = lambda layer, x: layer(x)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """(batch, 6) -> scores (batch, 6, 16), or a loss."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.run(layer, x)
        scores = self.head(x)
        return scores if labels is None else token_loss(scores, labels)


def token_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each token given those before it."""
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _by_hand(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chances = scores[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None])
    return -chances.mean()


def _not_shifted(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


@dataclass
class Training:
    """Two steps of two micro-batches. Every part is a function that another may replace."""

    model: Any
    optimizer: Any
    loss: Callable[..., Any] = lambda t, ids: token_loss(t.model(ids), ids)
    backward: Callable[..., Any] = lambda t, loss: (loss / 2).backward()
    before_step: Callable[..., Any] = lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
    step: Callable[..., Any] = lambda t: t.optimizer.step()
    after_step: Callable[..., Any] = lambda t: None
    zero: Callable[..., Any] = lambda t: t.optimizer.zero_grad()
    precision: torch.dtype | None = None


Twist = Callable[[Training], object]


def _adamw(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.optim.AdamW(model.parameters(), **({"lr": 2**-7} | options))


def _sgd(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.optim.SGD(
        model.parameters(), **({"lr": 2**-5, "momentum": 0.875} | options)
    )


def trained(
    twist: Twist = lambda training: None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    build: Callable[[], nn.Module] = Net,
    **options: Any,
) -> Record:
    """The run of a training in which something is done otherwise."""

    def record(path: Path) -> None:
        torch.manual_seed(0)
        model = build()
        made = optimizer or _adamw()
        training = Training(model, made(model))
        twist(training)
        training.optimizer = training.optimizer or made(model)
        with (
            contextlib.redirect_stderr(io.StringIO()),
            whence.capture(training.model, path, **options),
        ):
            for batch in range(4):
                ids = torch.arange(18).reshape(3, 6) * (5 + 2 * batch) % 16
                with torch.autocast(
                    "cpu", training.precision, enabled=training.precision is not None
                ):
                    loss = training.loss(training, ids)
                training.backward(training, loss)
                if batch % 2:
                    training.before_step(training)
                    training.step(training)
                    training.after_step(training)
                    training.zero(training)

    return record


def _so(**parts: Any) -> Twist:
    def twist(training: Training) -> None:
        for name, part in parts.items():
            setattr(training, name, part)

    return twist


def _scaler(*, unscales: bool) -> Twist:
    """A loss scaler; does it take its scale out again?"""

    def twist(training: Training) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)

        def before(t: Training) -> None:
            if unscales:
                scaler.unscale_(t.optimizer)
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)

        def step(t: Training) -> None:
            if unscales:
                scaler.step(t.optimizer)
                scaler.update()
            else:
                t.optimizer.step()

        training.backward = lambda t, loss: scaler.scale(loss / 2).backward()
        training.before_step, training.step = before, step

    return twist


def _scaled(t: Training, loss: Any) -> None:
    (loss / 2 * LOSS_SCALE).backward()


def _divided(t: Training) -> None:
    for p in t.model.parameters():
        p.grad.div_(LOSS_SCALE)
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)


def _divided_by_two(t: Training) -> None:
    for p in t.model.parameters():
        p.grad.mul_(0.5)
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)


def _clip_by_hand(t: Training) -> None:
    parameters = list(t.model.parameters())
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    factor = (0.5 / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters:
        p.grad.mul_(factor)


def _decay_by_hand(decay: float) -> Twist:
    """The weight decay that the optimiser has in the reference, before its step."""

    def before(t: Training) -> None:
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
        with torch.no_grad():
            for p in t.model.parameters():
                p.mul_(1 - 2**-7 * decay)

    return _so(before_step=before)


def _average(keep: float) -> Twist:
    """Averages of the parameters that take their place after each step."""

    def twist(training: Training) -> None:
        averages = [p.detach().clone() for p in training.model.parameters()]

        def after(t: Training) -> None:
            with torch.no_grad():
                for average, p in zip(averages, t.model.parameters(), strict=True):
                    average.mul_(keep).add_(p, alpha=1 - keep)
                    p.copy_(average)

        training.after_step = after

    return twist


def _clamped(t: Training) -> None:
    with torch.no_grad():
        for p in t.model.parameters():
            p.clamp_(-0.125, 0.125)


def _run(way: Callable[..., Any]) -> Twist:
    return lambda training: setattr(training.model, "run", way)


def _frozen(training: Training) -> None:
    training.model.layers[1][1].weight.requires_grad_(False)


class _Square(torch.autograd.Function):
    """x * x with a backward pass of its own, right or off by `factor`."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return _Square.factor * x * grad


class _Own(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _Square.factor = self.factor
        return _Square.apply(x)


def _own_backward(factor: float) -> Twist:
    def twist(training: Training) -> None:
        training.model.layers[1][2] = _Own(factor)

    return twist


class _Around(nn.Module):
    """A module around the model that computes the loss, as trainers write it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return token_loss(self.net(batch["ids"]), batch["ids"])


def _wrapped(training: Training) -> None:
    training.model = _Around(training.model)
    training.loss = lambda t, ids: t.model({"ids": ids})


def _gradients_by_grad(t: Training, loss: torch.Tensor) -> None:
    parameters = list(t.model.parameters())
    for p, grad in zip(parameters, torch.autograd.grad(loss / 2, parameters), strict=True):
        p.grad = grad if p.grad is None else p.grad + grad


def _last_micro_batch(t: Training, loss: torch.Tensor) -> None:
    t.optimizer.zero_grad()
    (loss / 2).backward()


def _pictures(*, momentum: float = 0.125) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)

        class Pictures(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=momentum)
                self.drop, self.head = nn.Dropout(0.25), nn.Linear(4, 16)

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                x = seeded(18, 1, 5, 5, seed=int(ids.sum()))
                x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
                return self.head(self.drop(x)).view(3, 6, 16)

        return Pictures()

    return build


def _tied(training: Training) -> None:
    training.model.head.weight = nn.Parameter(training.model.head.weight.detach().clone())
    training.model.embed.weight = nn.Parameter(training.model.head.weight.detach())
    training.optimizer = None


_PLAIN = trained()
_LATER = {"steps": "1"}
_UNTOUCHED = _so(before_step=lambda t: None)


def _against(*twist: Any, **how: Any) -> Case:
    return pair(_PLAIN, trained(*twist, **how))


def _optimizers(name: str, **options: Any) -> Case:
    def build(fused: dict[str, Any]) -> Callable[[nn.Module], Any]:
        return lambda model: getattr(torch.optim, name)(model.parameters(), **options, **fused)

    return pair(trained(optimizer=build({})), trained(optimizer=build({"foreach": True})))


def _page(place: Place) -> Answers:
    place.once("ref", _PLAIN)
    place.once("tgt", trained(optimizer=_adamw(eps=1e-4)))
    yield from place.compare("ref", "tgt")
    yield "trace.txt", place.whence("trace", "out/cmp")
    yield "show.txt", place.whence("show", "ref", "--tree")


CASES: dict[str, Case] = {
    "same": pair(_PLAIN, _PLAIN),
    "operators": pair(
        trained(level="op"),
        trained(_so(loss=lambda t, ids: _by_hand(t.model(ids), ids)), level="op"),
    ),
    "autocast": pair(_PLAIN, trained(_so(precision=torch.bfloat16))),
    "fused_step": _against(optimizer=_adamw(fused=True)),
    "foreach_step": pair(
        trained(optimizer=_sgd(foreach=True)), trained(optimizer=_sgd(fused=True))
    ),
    "loss_by_hand": _against(_so(loss=lambda t, ids: _by_hand(t.model(ids), ids))),
    "loss_inside": _against(_so(loss=lambda t, ids: t.model(ids, ids))),
    "loss_in_a_wrapper": _against(_wrapped),
    "loss_not_shifted": _against(_so(loss=lambda t, ids: _not_shifted(t.model(ids), ids))),
    "loss_halved": _against(_so(backward=lambda t, loss: (loss * 0.5).backward())),
    "loss_not_halved": _against(_so(backward=lambda t, loss: loss.backward())),
    "gradient_given": _against(_so(backward=lambda t, loss: loss.backward(torch.tensor(0.5)))),
    "halved_at_the_step": _against(
        _so(backward=lambda t, loss: loss.backward(), before_step=_divided_by_two)
    ),
    "loss_scaler": _against(_scaler(unscales=True)),
    "loss_scaler_left": _against(_scaler(unscales=False)),
    "scaled_by_hand": _against(_so(backward=_scaled, before_step=_divided)),
    "scaled_and_left": pair(
        trained(_UNTOUCHED), trained(_so(backward=_scaled, before_step=lambda t: None))
    ),
    "gradients_by_grad": _against(_so(backward=_gradients_by_grad)),
    "gradient_not_accumulated": _against(_so(backward=_last_micro_batch)),
    "gradients_not_zeroed": _against(_so(zero=lambda t: None)),
    "clipped_by_hand": _against(_so(before_step=_clip_by_hand)),
    "not_clipped": _against(_UNTOUCHED),
    "decay_by_hand": pair(
        trained(optimizer=_adamw(weight_decay=0.125)),
        trained(_decay_by_hand(0.125), _adamw(weight_decay=0.0)),
    ),
    "decay_by_hand_fault": pair(
        trained(optimizer=_adamw(weight_decay=0.125)),
        trained(_decay_by_hand(0.25), _adamw(weight_decay=0.0)),
    ),
    "average_taken_over": _against(_average(0.875)),
    "clamped_after_the_step": _against(_so(after_step=_clamped)),
    "checkpoints": _against(_run(lambda layer, x: checkpoint(layer, x, use_reentrant=False))),
    "checkpoints_reentrant": _against(
        _run(lambda layer, x: checkpoint(layer, x, use_reentrant=True))
    ),
    "detached": _against(_run(lambda layer, x: layer(x.detach()))),
    "frozen": _against(_frozen),
    "own_backward": pair(trained(_own_backward(2.0)), trained(_own_backward(2.25))),
    "weight_decay": _against(optimizer=_adamw(weight_decay=0.5)),
    "betas": _against(optimizer=_adamw(betas=(0.5, 0.999))),
    "learning_rate": pair(trained(optimizer=_sgd()), trained(optimizer=_sgd(lr=2**-4))),
    "nesterov": pair(trained(optimizer=_sgd()), trained(optimizer=_sgd(nesterov=True))),
    "adafactor": _optimizers("Adafactor", lr=0.0625),
    "rmsprop": _optimizers("RMSprop", lr=2**-7, momentum=0.5),
    "batch_norm_momentum": pair(
        trained(build=_pictures()), trained(build=_pictures(momentum=0.25))
    ),
    "tied": _against(_tied),
    "second_step_alone": pair(trained(steps="1"), trained(optimizer=_adamw(eps=1e-4), steps="1")),
    "statistics": pair(
        trained(keep="stats"), trained(optimizer=_adamw(betas=(0.5, 0.999)), keep="stats")
    ),
    "eps": _page,
}
