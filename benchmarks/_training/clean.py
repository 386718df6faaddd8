"""What may be done otherwise in a training without another result than rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from _training.layers import CustomSiLU, swap
from _training.subjects import IGNORED, MICRO_BATCHES
from _training.training import Training

Twist = Callable[[Training], None]


@dataclass(frozen=True)
class Clean:
    """A pair of trainings that compute the same. model, optimizer, autocast, reference: of both
    sides; target, options: what the target does otherwise, and other options of its model.
    """

    words: str
    model: str
    optimizer: str
    target: Twist
    autocast: bool = False
    reference: Twist = lambda training: None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def title(self) -> str:
        """The line of the table."""
        precision = "bf16 autocast" if self.autocast else "fp32"
        return f"{self.model}, {self.optimizer}, {precision}: {self.words}"


def nothing(training: Training) -> None:
    """The same again."""


def otherwise(**changes: Any) -> Twist:
    """Other attributes of the training."""

    def twist(training: Training) -> None:
        for name, value in changes.items():
            setattr(training, name, value)

    return twist


def optimizer(**options: Any) -> Twist:
    """Other options of the optimiser."""

    def twist(training: Training) -> None:
        training.options.update(options)

    return twist


# ---- losses that compute the same


def token_loss_by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, labels = logits.float()[:, :-1], labels[:, 1:]
    kept = labels != IGNORED
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    lost = torch.logsumexp(logits, -1) - picked
    return (lost * kept).sum() / kept.sum()


def token_loss_summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wanted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), wanted, ignore_index=IGNORED, reduction="sum"
    )
    return total / (wanted != IGNORED).sum()


def _class_loss_by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logs = logits.float().log_softmax(-1)
    picked = -logs.gather(-1, labels[:, None]).squeeze(-1)
    return (0.9 * picked - 0.1 * logs.mean(-1)).mean()


# ---- gradients and steps


def _scale_gradient(training: Training, loss: torch.Tensor) -> None:
    loss.backward(torch.tensor(1.0 / MICRO_BATCHES))


def _mean_of_gradients(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(MICRO_BATCHES)


def _clip_by_hand(parameters: Any, limit: float) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.pow(2).sum() for g in gradients]).sum().sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def _clip_in_two_calls(parameters: Any, limit: float) -> None:
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def _scaler(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    training.backward = lambda training, loss: scaler.scale(loss).backward()

    def step(training: Training) -> None:
        scaler.step(training.optimizer)
        scaler.update()

    training.step = step


def _own_gradients(training: Training, loss: torch.Tensor) -> None:
    parameters = [p for p in training.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


# ---- models


def eager_attention(training: Training) -> None:
    training.model.set_attn_implementation("eager")


def checkpointed(*, reentrant: bool) -> Twist:
    def twist(training: Training) -> None:
        options = {"use_reentrant": reentrant}
        training.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if reentrant:
            training.model.enable_input_require_grads()

    return twist


def _compiled(training: Training) -> None:
    training.model.compile()


def _custom_function(training: Training) -> None:
    swap(training.model, "model.layers.0.mlp.act_fn", lambda _: CustomSiLU())


def pairs() -> Iterator[Clean]:
    """Every pair that must not be flagged."""
    yield Clean("the same again", "llama", "adamw", nothing)
    yield Clean("the same again", "mixtral", "sgd", nothing, autocast=True)
    for model in ("llama", "vit"):
        yield Clean("single / fused", model, "adamw", optimizer(fused=True))
    yield Clean("single / fused", "resnet", "sgd", optimizer(fused=True), autocast=True)
    yield Clean("single / foreach", "mixtral", "adamw", optimizer(foreach=True))
    yield Clean("single / foreach", "resnet", "sgd", optimizer(foreach=True))
    yield Clean(
        "foreach / fused",
        "llama",
        "sgd",
        optimizer(fused=True, foreach=False),
        reference=optimizer(foreach=True),
    )
    for autocast in (False, True):
        yield Clean("sdpa / eager attention", "llama", "adamw", eager_attention, autocast)
        yield Clean("sdpa / eager attention", "mixtral", "adamw", eager_attention, autocast)
    yield Clean("sdpa / eager attention", "vit", "sgd", eager_attention)
    yield Clean("1 / 2 threads", "llama", "adamw", otherwise(threads=2))
    yield Clean("1 / 2 threads", "resnet", "adamw", otherwise(threads=2))
    yield Clean("1 / 2 threads", "vit", "sgd", otherwise(threads=2), autocast=True)
    yield Clean("eager / compiled", "llama", "adamw", _compiled)
    yield Clean("eager / compiled", "resnet", "sgd", _compiled)
    yield Clean("checkpoints", "llama", "adamw", checkpointed(reentrant=False))
    yield Clean("checkpoints", "mixtral", "sgd", checkpointed(reentrant=False), autocast=True)
    yield Clean("checkpoints, reentrant", "llama", "adamw", checkpointed(reentrant=True))
    yield Clean("checkpoints, reentrant", "vit", "sgd", checkpointed(reentrant=True))
    for model in ("llama", "vit", "resnet"):
        yield Clean("fp32 / bf16 autocast", model, "adamw", otherwise(precision=torch.bfloat16))
    yield Clean("fp32 / bf16 autocast", "mixtral", "sgd", otherwise(precision=torch.bfloat16))
    zeroed = otherwise(zero=lambda training: training.optimizer.zero_grad(set_to_none=False))
    yield Clean("gradients zeroed in place", "llama", "sgd", zeroed)
    yield Clean("gradients zeroed in place", "vit", "adamw", zeroed)
    yield Clean("GradScaler disabled", "resnet", "sgd", _scaler)
    yield Clean("GradScaler disabled", "mixtral", "adamw", _scaler, autocast=True)
    yield Clean("loss by hand", "llama", "adamw", otherwise(loss=token_loss_by_hand))
    yield Clean("loss by hand", "vit", "sgd", otherwise(loss=_class_loss_by_hand))
    yield Clean("sum of losses divided", "mixtral", "adamw", otherwise(loss=token_loss_summed))
    yield Clean("loss outside / inside", "llama", "sgd", otherwise(loss=None))
    yield Clean("loss outside / inside", "mixtral", "adamw", otherwise(loss=None))
    by_share = otherwise(accumulate=lambda loss: loss * (1.0 / MICRO_BATCHES))
    yield Clean("loss / 2, loss * 0.5", "resnet", "adamw", by_share)
    unscaled = otherwise(accumulate=lambda loss: loss, backward=_scale_gradient)
    yield Clean("loss / 2, gradient 0.5 given", "llama", "adamw", unscaled)
    at_step = otherwise(accumulate=lambda loss: loss, before_clipping=_mean_of_gradients)
    yield Clean("loss / 2, gradients / 2 at the step", "vit", "adamw", at_step)
    yield Clean("clipping by hand", "llama", "sgd", otherwise(clip=_clip_by_hand))
    yield Clean("clipping in two calls", "resnet", "sgd", otherwise(clip=_clip_in_two_calls))
    yield Clean("torch.autograd.grad", "llama", "adamw", otherwise(backward=_own_gradients))
    yield Clean("an activation of its own", "llama", "adamw", _custom_function, autocast=True)


def _loss_scaled(training: Training) -> None:
    """A loss scaler that scales, in float16."""
    scaler = torch.amp.GradScaler(training.device, init_scale=256.0)
    training.precision = torch.float16
    training.backward = lambda training, loss: scaler.scale(loss).backward()
    training.before_clipping = lambda training: scaler.unscale_(training.optimizer)

    def step(training: Training) -> None:
        scaler.step(training.optimizer)
        scaler.update()

    training.step = step


def _scale_left_to_fused_step(training: Training) -> None:
    """The fused step divides by the loss scale itself; nothing is clipped."""
    _loss_scaled(training)
    training.before_clipping, training.limit = None, None
    training.options["fused"] = True


def device_pairs() -> Iterator[Clean]:
    """Further pairs where the trainings run on a device: against the processor, and with a loss
    scaler.
    """
    processor = otherwise(device="cpu")
    for model, optimizer_name in (("llama", "adamw"), ("mixtral", "sgd"), ("vit", "adamw")):
        for autocast in (False, True):
            yield Clean(
                "processor / device", model, optimizer_name, nothing, autocast, reference=processor
            )
    yield Clean("processor / device", "resnet", "sgd", nothing, reference=processor)
    for model in ("llama", "vit", "resnet"):
        yield Clean("fp32 / fp16 autocast with GradScaler", model, "adamw", _loss_scaled)
    unclipped = otherwise(limit=None)
    yield Clean(
        "fp32 / fp16, scale left to the fused step",
        "llama",
        "adamw",
        _scale_left_to_fused_step,
        reference=unclipped,
    )
