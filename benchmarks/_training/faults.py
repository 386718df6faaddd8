"""What is planted into trainings: each a slip that somebody made, and where it must be named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from _training import layers
from _training.clean import (
    Twist,
    checkpointed,
    nothing,
    optimizer,
    otherwise,
)
from _training.subjects import IGNORED
from _training.training import Training
from whence.results import Comparison

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


@dataclass(frozen=True)
class Fault:
    """A pair of trainings of which the target has a fault.

    name: what the name of the finding, alone or with its slot, must match in full. phase, step:
    its phase (a pattern) and step, where step -1 is any. The others as in `Clean`.
    """

    words: str
    model: str
    optimizer: str
    target: Twist
    name: str
    phase: str
    autocast: bool = False
    reference: Twist = nothing
    options: tuple[tuple[str, Any], ...] = ()
    step: int = 0

    @property
    def title(self) -> str:
        """The line of the table."""
        precision = "bf16 autocast" if self.autocast else "fp32"
        return f"{self.model}, {self.optimizer}, {precision}: {self.words}"

    def answer(self, result: Comparison) -> str:
        """How the fault was named (see benchmarks/training_faults.py)."""
        met = [
            any(self._is_at(name, f.phase, f.step) for name in (f.name, f"{f.name}:{f.slot}"))
            for f in result.findings
        ]
        if met:
            return "first" if met[0] else "named" if any(met) else "wrong"
        return "wider" if result.status == "undecided" else "missed"

    def _is_at(self, name: str, phase: str, step: int) -> bool:
        here = re.fullmatch(self.name, name) and re.fullmatch(self.phase, phase or FORWARD)
        return bool(here) and self.step in (-1, step)


# ---- losses


def other_token_loss(**wrong: Any) -> Twist:
    """A loss of tokens with another argument."""
    shift = wrong.pop("shift", 1)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept = slice(None, -shift) if shift else slice(None)
        scores, wanted = logits[:, kept].flatten(0, 1), labels[:, shift:].flatten()
        arguments = {"ignore_index": IGNORED, **wrong}
        return nn.functional.cross_entropy(scores.float(), wanted, **arguments)

    return otherwise(loss=loss)


def other_class_loss(**wrong: Any) -> Twist:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        arguments = {"label_smoothing": 0.1, **wrong}
        return nn.functional.cross_entropy(logits.float(), labels, **arguments)

    return otherwise(loss=loss)


def padding_counted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over tokens that count, over the number of all."""
    scores, wanted = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    total = nn.functional.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="sum")
    return total / wanted.numel()


def padding_ignored(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Ignores the token of padding instead of the labels that count for nothing."""
    scores, wanted = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    wanted = torch.where(wanted == IGNORED, 5, wanted)
    return nn.functional.cross_entropy(scores, wanted, ignore_index=0)


# ---- modules


def swapped(name: str, change: Callable[[nn.Module], nn.Module]) -> Twist:
    def twist(training: Training) -> None:
        layers.swap(training.model, name, change)

    return twist


def _dropout(name: str, scale: float) -> Twist:
    """Dropout behind a layer."""
    return swapped(name, lambda layer: layers.Behind(layer, layers.FixedDropout(32, scale)))


def _frozen(name: str) -> Twist:
    def twist(training: Training) -> None:
        training.model.get_parameter(name).requires_grad_(False)

    return twist


def _padding_gradient(padding: int | None) -> Twist:
    def twist(training: Training) -> None:
        training.model.model.embed_tokens.padding_idx = padding

    return twist


def _counted_twice(training: Training) -> None:
    """As where two copies of a tied weight are summed that both have the whole gradient."""
    training.model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * 2)


def _no_rng(training: Training) -> None:
    options = {"use_reentrant": False, "preserve_rng_state": False}
    training.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _momentum_of_norms(training: Training) -> None:
    for module in training.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.9


# ---- gradients


def _micro_batch_lost(training: Training, number: int) -> None:
    """Gradients are zeroed after the first backward pass of a step."""
    if number == 0:
        training.optimizer.zero_grad()


def _overwritten(name: str) -> Twist:
    def before_step(training: Training) -> None:
        training.model.get_parameter(name).grad.mul_(1.1)

    return otherwise(before_step=before_step)


def _gradient_of_last(training: Training, loss: torch.Tensor) -> None:
    """The gradient of one weight is that of the last micro-batch alone."""
    training.model.get_parameter("model.layers.1.mlp.up_proj.weight").grad = None
    loss.backward()


def _clip_each(parameters: Any, limit: float) -> None:
    """Clips every gradient by its own norm."""
    for parameter in parameters:
        nn.utils.clip_grad_norm_([parameter], limit)


# ---- steps of the optimiser


def _groups(*, norms: float, matrices: float = 0.1) -> Twist:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": matrices},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": norms},
        ]

    return otherwise(groups=groups)


class _NoCorrection(torch.optim.AdamW):
    """AdamW that forgets to correct the bias of its moments."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        del closure
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                square = parameter.grad.square()
                state["exp_avg_sq"].mul_(second).add_(square, alpha=1 - second)
                share = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                parameter.add_(share, alpha=-group["lr"])


def _averaged(decay: float) -> Twist:
    """Keeps a moving average of the weights, and goes on from it every step."""

    def twist(training: Training) -> None:
        model = training.model.to(training.device)
        kept = [p.detach().clone() for p in model.parameters()]

        @torch.no_grad()
        def after_step(training: Training) -> None:
            for average, parameter in zip(kept, training.model.parameters(), strict=True):
                average.mul_(decay).add_(parameter, alpha=1 - decay)
                parameter.copy_(average)

        training.after_step = after_step

    return twist


def _scheduled(factor: float) -> Twist:
    """A schedule of the learning rate. factor: of each step."""

    def twist(training: Training) -> None:
        def after_step(training: Training) -> None:
            for group in training.optimizer.param_groups:
                group["lr"] *= factor

        training.after_step = after_step

    return twist


LOSS = r".*/loss"
_UP = "model.layers.1.mlp.up_proj"
ACTIVATION = "model.layers.0.mlp.act_fn"
_ANY_PARAMETER = r".*/[\w]+"
_ANY_SUM = r".*/sum of .*\.grad"


def faults() -> Iterator[Fault]:
    """Every planted fault."""
    yield from _in_losses()
    yield from _in_modules()
    yield from _in_gradients()
    yield from _in_steps()


def _in_losses() -> Iterator[Fault]:
    text, image = ("llama", "adamw"), ("vit", "sgd")
    loss = {"name": LOSS, "phase": FORWARD}
    yield Fault("sum of losses for mean", *text, other_token_loss(reduction="sum"), **loss)
    counted = otherwise(loss=padding_counted)
    yield Fault("mean over ignored tokens too", *text, counted, **loss)
    other = otherwise(loss=padding_ignored)
    yield Fault("tokens of padding ignored", "llama", "sgd", other, **loss)
    yield Fault("labels not shifted", "mixtral", "sgd", other_token_loss(shift=0), **loss)
    yield Fault("labels shifted by two", *text, other_token_loss(shift=2), **loss, autocast=True)
    yield Fault("no label smoothing", *image, other_class_loss(label_smoothing=0.0), **loss)
    smoothed = other_class_loss(label_smoothing=0.12)
    yield Fault("label smoothing 0.12", "resnet", "adamw", smoothed, **loss, autocast=True)
    whole = otherwise(accumulate=lambda value: value)
    yield Fault("loss not divided", "vit", "adamw", whole, **loss)
    yield Fault("loss not divided", "mixtral", "adamw", whole, **loss, autocast=True)
    yield Fault(
        "auxiliary loss times 0.002", "mixtral", "adamw", otherwise(auxiliary=0.002), **loss
    )
    yield Fault("no auxiliary loss", "mixtral", "sgd", otherwise(auxiliary=0.0), **loss)


def _in_modules() -> Iterator[Fault]:
    back = {"name": ACTIVATION + r"(\..*)?", "phase": BACKWARD}

    def wrong(kind: str) -> Twist:
        return swapped(ACTIVATION, lambda _: layers.CustomSiLU(kind))

    yield Fault("backward by hand, sign", "llama", "adamw", wrong("sign"), **back)
    yield Fault("backward by hand, term missing", "llama", "sgd", wrong("term"), **back)
    scaled = wrong("scale")
    yield Fault("backward by hand, times 1.05", "llama", "adamw", scaled, **back, autocast=True)
    right = wrong("")
    yield Fault(
        "both by hand, term missing", "llama", "sgd", wrong("term"), **back, reference=right
    )
    front = {"phase": FORWARD}
    yield Fault(
        "detached branch", "llama", "adamw",
        swapped("model.layers.1.self_attn.k_proj", layers.Detached),
        r"model\.layers\.1\.self_attn(\..*)?", **front,
    )  # fmt: skip
    yield Fault(
        "detached branch", "vit", "sgd", swapped("vit.layers.1.layernorm_after", layers.Detached),
        r"vit\.layers\.1(\..*)?", **front,
    )  # fmt: skip
    yield Fault(
        "weight frozen", "mixtral", "adamw", _frozen("model.layers.0.self_attn.o_proj.weight"),
        r"model\.layers\.0\.self_attn\.o_proj(\..*)?", **front,
    )  # fmt: skip
    norm = "model.layers.1.post_attention_layernorm"
    for scale in (1.0, 1 / 0.9**2):
        yield Fault(
            f"dropout, rest times {scale:.2f}", "llama", "adamw", _dropout(norm, scale),
            re.escape(norm) + r"(\.behind)?", **front, reference=_dropout(norm, 1 / 0.9),
            autocast=scale == 1.0,
        )  # fmt: skip
    yield Fault(
        "gradient of the padding token", "llama", "sgd", _padding_gradient(None),
        r"model\.embed_tokens", BACKWARD,
    )  # fmt: skip
    low = swapped("model.layers.1.input_layernorm", layers.LowNorm)
    yield Fault(
        "norm in bf16", "llama", "adamw", low, r"model\.layers\.1\.input_layernorm", **front,
        autocast=True,
    )  # fmt: skip
    for model in ("llama", "vit"):
        name = "attention_dropout" if model == "llama" else "hidden_dropout_prob"
        layer = "model.layers" if model == "llama" else "vit.layers"
        yield Fault(
            "checkpoints without RNG", model, "adamw", _no_rng, layer + r"\.\d\..*", FORWARD,
            options=((name, 0.3),), reference=checkpointed(reentrant=False),
        )  # fmt: skip
    yield Fault(
        "momentum of batch norms", "resnet", "sgd", _momentum_of_norms,
        r"resnet\.embedder\.embedder\.normalization", **front,
    )  # fmt: skip


def _in_gradients() -> Iterator[Fault]:
    tied = (("tie_word_embeddings", True),)
    embedding = r"model\.embed_tokens.*"
    yield Fault(
        "tied weight counted twice", "llama", "adamw", _counted_twice, embedding, BACKWARD,
        options=tied,
    )  # fmt: skip
    no_zero = otherwise(zero=lambda training: None)
    yield Fault("gradients never zeroed", "llama", "adamw", no_zero, _ANY_SUM, BACKWARD, step=1)
    yield Fault("gradients never zeroed", "resnet", "sgd", no_zero, _ANY_SUM, BACKWARD, step=1)
    late = otherwise(after_backward=_micro_batch_lost)
    yield Fault("gradients zeroed too late", "vit", "sgd", late, _ANY_SUM, BACKWARD)
    lost = otherwise(backward=_gradient_of_last)
    yield Fault(
        "gradient not accumulated", "llama", "sgd", lost,
        re.escape(_UP) + r"/sum of weight\.grad", BACKWARD,
    )  # fmt: skip
    written = _overwritten("model.layers.0.self_attn.v_proj.weight")
    value = r".*/gradients:output\.model\.layers\.0\.self_attn\.v_proj\.weight"
    yield Fault("gradient times 1.1 before the step", "llama", "adamw", written, value, OPTIMIZER)
    yield Fault(
        "gradient times 1.1 before the step", "mixtral", "sgd", written, value, OPTIMIZER,
        autocast=True,
    )  # fmt: skip
    clipping = r".*/gradients"
    yield Fault("clipped to 0.45", "llama", "adamw", otherwise(limit=0.45), clipping, OPTIMIZER)
    missing = otherwise(limit=None)
    yield Fault("not clipped", "vit", "sgd", missing, clipping, OPTIMIZER)
    yield Fault("not clipped", "mixtral", "adamw", missing, clipping, OPTIMIZER, autocast=True)
    each = otherwise(clip=_clip_each)
    yield Fault("each gradient clipped by its norm", "resnet", "sgd", each, clipping, OPTIMIZER)


def _in_steps() -> Iterator[Fault]:
    step = {"name": _ANY_PARAMETER, "phase": OPTIMIZER}
    norms = r".*(norm|bias|classifier|layernorm|normalization).*"
    yield Fault("weight decay on norms", "llama", "adamw", _groups(norms=0.1), norms, OPTIMIZER)
    yield Fault("no weight decay", "vit", "adamw", _groups(norms=0.0, matrices=0.0), **step)
    yield Fault("betas (0.9, 0.999)", "llama", "adamw", optimizer(betas=(0.9, 0.999)), **step)
    yield Fault("eps 1e-6", "mixtral", "adamw", optimizer(eps=1e-6), **step, autocast=True)
    yield Fault("momentum 0.8", "resnet", "sgd", optimizer(momentum=0.8), **step, step=1)
    yield Fault("nesterov", "vit", "sgd", optimizer(nesterov=True), **step, autocast=True)
    yield Fault("dampening", "llama", "sgd", optimizer(dampening=0.1), **step, step=1)
    yield Fault("lr 1.1e-3", "resnet", "adamw", optimizer(lr=1.1e-3), **step)
    yield Fault(
        "schedule of the learning rate", "llama", "adamw", _scheduled(0.8), **step, step=1,
        reference=_scheduled(0.9),
    )  # fmt: skip
    yield Fault("Adam for AdamW", "llama", "adamw", otherwise(kind=torch.optim.Adam), **step)
    yield Fault("no bias correction", "llama", "adamw", otherwise(kind=_NoCorrection), **step)
    yield Fault(
        "moving average of weights", "llama", "sgd", _averaged(0.9), _ANY_PARAMETER, OPTIMIZER,
        reference=_averaged(0.5), step=-1,
    )  # fmt: skip
