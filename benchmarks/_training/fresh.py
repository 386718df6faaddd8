"""Trainings and faults that no rule was set with: other models, other optimisers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from _training import layers
from _training.clean import Clean, Twist, checkpointed, nothing, optimizer, otherwise
from _training.faults import FORWARD, OPTIMIZER, Fault
from _training.subjects import IGNORED, MICRO_BATCHES
from _training.training import Training

# ---- done otherwise, and the same


def _divided_by_foreach(training: Training) -> None:
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    torch._foreach_div_(gradients, MICRO_BATCHES)


def _divided_anew(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / MICRO_BATCHES


def _static_scale(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.grad.mul_(1 / 1024)


def _clamped(parameters: Any, limit: float) -> None:
    for parameter in parameters:
        parameter.grad.clamp_(-limit, limit)


def _clip_values(parameters: Any, limit: float) -> None:
    nn.utils.clip_grad_value_(parameters, limit)


def _decay_by_hand(training: Training) -> None:
    with torch.no_grad():
        for group in training.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["decay"])


def _no_decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.0, "decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "decay": 0.0},
    ]


def _average_beside(training: Training) -> None:
    kept = copy.deepcopy(training.model).to(training.device)

    @torch.no_grad()
    def after_step(training: Training) -> None:
        for average, parameter in zip(kept.parameters(), training.model.parameters(), strict=True):
            average.lerp_(parameter, 0.1)

    training.after_step = after_step


def _scheduler(training: Training) -> None:
    """The rates of `_rates` by a scheduler of torch."""
    scheduled: list[Any] = []

    def after_step(training: Training) -> None:
        if not scheduled:
            scheduled.append(
                torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 0.5**step)
            )
            training.optimizer._opt_called = True
        scheduled[0].step()

    training.after_step = after_step


def _rates(factors: tuple[float, ...]) -> Twist:
    """Learning rates by hand, of the steps after the first."""

    def twist(training: Training) -> None:
        left = list(factors)

        def after_step(training: Training) -> None:
            factor = left.pop(0)
            for group in training.optimizer.param_groups:
                group["lr"] = 1e-3 * factor

        training.after_step = after_step

    return twist


def _channels_last(training: Training) -> None:
    training.model.to(memory_format=torch.channels_last)


class _Tanh(nn.Module):
    """GPT-2's activation as one operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x, approximate="tanh")


def _fused_activation(training: Training) -> None:
    layers.swap(training.model, "transformer.h.1.mlp.act", lambda _: _Tanh())


def _logged(training: Training) -> None:
    def before_step(training: Training) -> None:
        norms = [p.grad.norm().item() for p in training.model.parameters()]
        assert sum(norms) > 0

    training.before_step = before_step


def _aligned_by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kept = labels != IGNORED
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((torch.logsumexp(logits, -1) - picked) * kept).sum() / kept.sum()


def fresh_pairs() -> Iterator[Clean]:
    """Every pair that must not be flagged."""
    half = {"accumulate": lambda loss: loss}
    yield Clean("the same again", "gpt2", "adafactor", nothing)
    yield Clean("single / fused", "gpt2", "adamw", optimizer(fused=True))
    checked = checkpointed(reentrant=False)
    yield Clean("checkpoints", "gpt2", "adamw", checked, autocast=True)
    yield Clean(
        "sdpa / eager attention", "gpt2", "lion",
        lambda training: training.model.set_attn_implementation("eager"),
    )  # fmt: skip
    yield Clean("an activation as one operator", "gpt2", "adamw", _fused_activation, autocast=True)
    yield Clean("rates by a scheduler / by hand", "gpt2", "adamw", _scheduler,
                reference=_rates((0.5, 0.25)))  # fmt: skip
    yield Clean(
        "weight decay by hand", "gpt2", "adamw", otherwise(before_step=_decay_by_hand,
        groups=_no_decay_groups),
    )  # fmt: skip
    yield Clean("single / foreach", "convnext", "rmsprop", optimizer(foreach=True))
    yield Clean("channels last", "convnext", "adamw", _channels_last)
    yield Clean("fp32 / bf16 autocast", "convnext", "adamw", otherwise(precision=torch.bfloat16))
    yield Clean("norms logged", "convnext", "nesterov", _logged)
    yield Clean("1 / 2 threads", "unet", "nesterov", otherwise(threads=2))
    by_foreach = otherwise(before_clipping=_divided_by_foreach, **half)
    yield Clean("loss / 2, gradients / 2 by foreach", "unet", "adamw", by_foreach)
    scaled = otherwise(accumulate=lambda loss: loss / 2 * 1024, before_clipping=_static_scale)
    yield Clean("a scale of 1024, taken out", "unet", "adamw", scaled, autocast=True)
    yield Clean("fp32 / bf16 autocast", "unet", "rmsprop", otherwise(precision=torch.bfloat16))
    by_value = otherwise(clip=_clip_values, limit=0.01)
    yield Clean(
        "clipped by value, by hand", "lstm", "rmsprop", otherwise(clip=_clamped, limit=0.01),
        reference=by_value,
    )  # fmt: skip
    yield Clean("an average of weights beside", "lstm", "adamw", _average_beside)
    yield Clean("fp32 / bf16 autocast", "lstm", "adamw", otherwise(precision=torch.bfloat16))
    yield Clean("loss by hand", "t5", "adafactor", otherwise(loss=_aligned_by_hand))
    yield Clean("fp32 / bf16 autocast", "t5", "adamw", otherwise(precision=torch.bfloat16))
    anew = otherwise(before_clipping=_divided_anew, **half)
    yield Clean("loss / 2, gradients / 2 made anew", "t5", "lion", anew)
    yield Clean("checkpoints", "t5", "nesterov", checked)


# ---- faults


def _smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scores, wanted = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(scores, wanted, ignore_index=IGNORED, label_smoothing=0.05)


def _weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.8, 1.2, logits.shape[1], device=logits.device)
    return nn.functional.cross_entropy(logits.float(), labels, weight, label_smoothing=0.1)


def _last_divided(training: Training, loss: torch.Tensor) -> None:
    """The first micro-batch of a step is not divided."""
    first = all(p.grad is None for p in training.model.parameters())
    (loss if first else loss / MICRO_BATCHES).backward()


def _untied(training: Training) -> None:
    head = training.model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())


def _clipped_each_time(training: Training, number: int) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)


def _frozen(name: str) -> Twist:
    def twist(training: Training) -> None:
        training.model.get_parameter(name).requires_grad_(False)

    return twist


def _average_taken(training: Training) -> None:
    kept = [p.detach().clone().to(training.device) for p in training.model.parameters()]

    @torch.no_grad()
    def after_step(training: Training) -> None:
        for average, parameter in zip(kept, training.model.parameters(), strict=True):
            average.lerp_(parameter, 0.5)
            parameter.copy_(average)

    training.after_step = after_step


def _nearest(training: Training) -> None:
    training.model.grow.mode, training.model.grow.align_corners = "nearest", None


class _Straight(nn.Module):
    """Hands on without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def _past_detached(training: Training) -> None:
    training.model.past = _Straight()


def _decay_everywhere(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), "weight_decay": 0.1}]


def _scaled_after(training: Training) -> None:
    """The scale is taken out of gradients behind clipping."""
    for parameter in training.model.parameters():
        parameter.grad.mul_(1 / 1024)


def _noise(training: Training) -> None:
    draw = torch.Generator().manual_seed(3)
    parameter = training.model.get_parameter("decoder.block.0.layer.2.DenseReluDense.wi.weight")
    noise = torch.randn(parameter.shape, generator=draw).to(parameter.device)
    parameter.grad.add_(noise, alpha=1e-3)


def fresh_faults() -> Iterator[Fault]:
    """Every planted fault."""
    anywhere = r".*/[\w.]+"
    step = {"name": anywhere, "phase": OPTIMIZER}
    loss = {"name": r".*/loss", "phase": FORWARD}
    smoothed = otherwise(loss=_smoothed)
    yield Fault("label smoothing 0.05", "gpt2", "adafactor", smoothed, **loss, autocast=True)
    yield Fault("head not tied", "gpt2", "adamw", _untied, r"(transformer\.wte|lm_head).*", ".*")
    yield Fault(
        "attention scaled by layer", "gpt2", "lion", nothing, r"transformer\.h\.1\.attn(\..*)?",
        FORWARD, options=(), reference=lambda training: _by_layer(training),
    )  # fmt: skip
    yield Fault("rates one step late", "gpt2", "adamw", _rates((1.0, 0.5)), **step, step=1,
                reference=_rates((0.5, 0.25)))  # fmt: skip
    yield Fault("alpha 0.99", "convnext", "rmsprop", optimizer(alpha=0.99), **step)
    norms = r".*(norm|bias|layer_scale|layernorm).*"
    yield Fault(
        "weight decay on norms", "convnext", "adamw", otherwise(groups=_decay_everywhere), norms,
        OPTIMIZER,
    )  # fmt: skip
    only_last = otherwise(accumulate=lambda value: value, backward=_last_divided)
    yield Fault("one micro-batch not divided", "convnext", "adamw", only_last, **loss)
    yield Fault("no nesterov", "unet", "nesterov", optimizer(nesterov=False), **step)
    yield Fault("past detached", "unet", "adamw", _past_detached, r"(past|UNet|up).*", ".*")
    yield Fault("nearest for bilinear", "unet", "adamw", _nearest, r"grow.*", FORWARD)
    yield Fault("weights of classes", "unet", "rmsprop", otherwise(loss=_weighted), **loss)
    late = otherwise(accumulate=lambda value: value / 2 * 1024, before_step=_scaled_after)
    clipping = r".*/gradients.*"
    yield Fault("scale taken out after clipping", "unet", "adamw", late, clipping, OPTIMIZER)
    by_value = otherwise(clip=_clip_values, limit=0.01)
    yield Fault(
        "clipped by value, 0.005", "lstm", "rmsprop", otherwise(clip=_clip_values, limit=0.005),
        clipping, OPTIMIZER, reference=by_value,
    )  # fmt: skip
    each = otherwise(after_backward=_clipped_each_time)
    yield Fault(
        "clipped after each micro-batch", "lstm", "adamw", each, r".*", r"backward|optimizer"
    )
    yield Fault("bias frozen", "lstm", "adamw", _frozen("rnn.bias_hh_l1"), r"rnn.*", ".*")
    yield Fault(
        "average of weights taken", "lstm", "nesterov", _average_taken, anywhere, OPTIMIZER, step=-1
    )
    bias = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    owner = re.escape(bias.removesuffix(".weight"))
    yield Fault("position bias frozen", "t5", "adamw", _frozen(bias), owner + ".*", ".*")
    yield Fault("beta2_decay -0.5", "t5", "adafactor", optimizer(beta2_decay=-0.5), **step)
    yield Fault("betas (0.95, 0.98)", "t5", "lion", optimizer(betas=(0.95, 0.98)), **step)
    noisy = otherwise(before_step=_noise)
    yield Fault("noise on one gradient", "t5", "adamw", noisy, clipping, OPTIMIZER, autocast=True)


def _by_layer(training: Training) -> None:
    attention = training.model.transformer.h[1].attn
    attention.scaling = attention.scaling / 2
