"""Trainings of which one takes the loss that the model computes, and the other computes it from the
model's logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from _training.clean import (
    Clean,
    Twist,
    checkpointed,
    eager_attention,
    optimizer,
    otherwise,
    token_loss_by_hand,
    token_loss_summed,
)
from _training.faults import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    LOSS,
    Fault,
    layers,
    other_class_loss,
    other_token_loss,
    padding_counted,
    padding_ignored,
    swapped,
)
from _training.training import MICRO_BATCHES, Training

INSIDE = otherwise(loss=None)
PLAIN_CLASSES = other_class_loss(label_smoothing=0.0)
_TEXT = (("llama", "adamw"), ("mixtral", "sgd"), ("gpt2", "adamw"), ("t5", "lion"))
_IMAGES = (("vit", "sgd"), ("resnet", "adamw"), ("convnext", "rmsprop"))


def both(*twists: Twist) -> Twist:
    """One after the other."""

    def twist(training: Training) -> None:
        for each in twists:
            each(training)

    return twist


def place_pairs() -> Iterator[Clean]:
    """Every pair that must not be flagged."""
    for model, kind in _TEXT:
        for autocast in (False, True):
            yield Clean("loss inside / behind", model, kind, lambda _: None, autocast, INSIDE)
            yield Clean("loss behind / inside", model, kind, INSIDE, autocast)
    for model, kind in _IMAGES:
        for autocast in (False, True):
            yield Clean("loss inside / behind", model, kind, PLAIN_CLASSES, autocast, INSIDE)
            yield Clean("loss behind / inside", model, kind, INSIDE, autocast, PLAIN_CLASSES)
    for model, kind in (("llama", "sgd"), ("mixtral", "adamw"), ("gpt2", "lion")):
        by_hand = otherwise(loss=token_loss_by_hand)
        yield Clean("loss inside / behind, by hand", model, kind, by_hand, reference=INSIDE)
        summed = otherwise(loss=token_loss_summed)
        yield Clean("loss inside / behind, a sum divided", model, kind, summed, reference=INSIDE)
        eager = both(eager_attention, INSIDE)
        yield Clean("loss behind / inside, eager attention", model, kind, eager)
        lower = both(otherwise(precision=torch.bfloat16), INSIDE)
        yield Clean("loss behind / inside, bf16 autocast", model, kind, lower)
    fused = optimizer(fused=True)
    yield Clean("loss inside / behind, fused", "llama", "adamw", fused, reference=INSIDE)
    again = checkpointed(reentrant=False)
    yield Clean("loss inside / behind, checkpoints", "llama", "adamw", again, reference=INSIDE)
    half = otherwise(accumulate=lambda loss: loss * (1.0 / MICRO_BATCHES))
    yield Clean("loss inside / behind, loss * 0.5", "mixtral", "adamw", half, reference=INSIDE)


def warm(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss of logits that are a little smaller."""
    return nn.functional.cross_entropy(logits.float() / 1.02, labels)


def half_detached(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that sends back half of its gradient."""
    logits = 0.5 * logits.float() + 0.5 * logits.float().detach()
    return nn.functional.cross_entropy(logits, labels)


def place_faults() -> Iterator[Fault]:
    """Every planted fault."""
    here = {"name": LOSS, "phase": FORWARD, "reference": INSIDE}
    for model, kind in (("llama", "adamw"), ("mixtral", "sgd"), ("gpt2", "lion")):
        yield Fault("behind, labels not shifted", model, kind, other_token_loss(shift=0), **here)
        yield Fault("behind, shifted by two", model, kind, other_token_loss(shift=2), **here)
        counted = otherwise(loss=padding_counted)
        yield Fault("behind, mean over ignored tokens", model, kind, counted, **here)
        ignored = otherwise(loss=padding_ignored)
        yield Fault("behind, padding ignored", model, kind, ignored, **here, autocast=True)
        smoothed = other_token_loss(label_smoothing=0.02)
        yield Fault("behind, label smoothing 0.02", model, kind, smoothed, **here)
        whole = otherwise(accumulate=lambda value: value)
        yield Fault("behind, not divided", model, kind, whole, **here)
    for weight in (0.0, 0.018):
        less = otherwise(auxiliary=weight)
        yield Fault(f"behind, auxiliary loss times {weight}", "mixtral", "adamw", less, **here)
    for model, kind in _IMAGES:
        yield Fault("behind, logits / 1.02", model, kind, otherwise(loss=warm), **here)
        yield Fault("behind, label smoothing 0.1", model, kind, other_class_loss(), **here)
        half = otherwise(loss=half_detached)
        back = {"name": rf"{LOSS[:-5]}(/loss)?(:.*)?", "phase": BACKWARD, "reference": INSIDE}
        yield Fault("behind, half of the logits detached", model, kind, half, **back)
    for model, kind in _IMAGES:  # the reference behind the model, the target inside and otherwise
        other = {"name": LOSS, "phase": FORWARD}
        yield Fault("inside, no label smoothing", model, kind, INSIDE, **other)
    sign = swapped(ACTIVATION, lambda _: layers.CustomSiLU("sign"))
    yield Fault(
        "behind, and a backward of the wrong sign", "llama", "adamw", sign,
        ACTIVATION + r"(\..*)?", BACKWARD, reference=INSIDE,
    )  # fmt: skip
    norm = swapped("model.layers.1.input_layernorm", layers.LowNorm)
    yield Fault(
        "inside, and a norm in bf16", "llama", "adamw", both(INSIDE, norm),
        r"model\.layers\.1\.input_layernorm", FORWARD, autocast=True,
    )  # fmt: skip
