"""Trainings of which one, or both, put something around the model, and take the loss inside of it
or behind it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from transformers.utils import ModelOutput

from _training.clean import Clean, Twist, nothing, otherwise, token_loss_by_hand
from _training.faults import (
    BACKWARD,
    FORWARD,
    LOSS,
    Fault,
    other_class_loss,
    other_token_loss,
    padding_counted,
)
from _training.loss_places import INSIDE, PLAIN_CLASSES, both, half_detached, warm
from _training.training import Loss, Training

HAS_PEFT = importlib.util.find_spec("peft") is not None
"""Without peft its pairs are left out."""


class _Held(nn.Module):
    """A model among the parts of another module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"net": model})

    def forward(self, **inputs: torch.Tensor) -> Any:
        """What the model returns."""
        return self.parts["net"](**inputs)


class _Step(nn.Module):
    """A module whose forward pass is a step of a training."""

    def __init__(self, model: nn.Module, loss: Loss | None, auxiliary: float) -> None:
        super().__init__()
        self.backbone = model
        self._loss, self._auxiliary = loss, auxiliary

    def forward(self, **batch: torch.Tensor) -> Any:
        """The loss alone."""
        if self._loss is None:
            return ModelOutput(loss=self.backbone(**batch).loss)
        labels = batch.pop("labels")
        out = self.backbone(**batch)
        loss = self._loss(out.logits, labels)
        extra = getattr(out, "aux_loss", None)
        return ModelOutput(loss=loss if extra is None else loss + self._auxiliary * extra)


class _WithCriterion(nn.Module):
    """A classifier whose loss is a module beside it."""

    def __init__(self, model: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.encoder, self.criterion = model, nn.CrossEntropyLoss(label_smoothing=smoothing)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss, and the logits."""
        logits = self.encoder(pixel_values=pixel_values).logits
        return ModelOutput(loss=self.criterion(logits, labels), logits=logits)


def around(wrap: Callable[[nn.Module], nn.Module], ranks: int = 0) -> Twist:
    """Something around the model."""
    return otherwise(wrap=wrap, ranks=ranks)


def stepping(training: Training) -> None:
    """A module around the model computes the loss of the training."""

    def wrap(model: nn.Module) -> nn.Module:
        loss, training.loss = training.loss, None
        return _Step(model, loss, training.auxiliary)

    training.wrap = wrap


def with_criterion(smoothing: float) -> Twist:
    """The same of a classifier, by a module beside it."""
    return both(INSIDE, around(lambda model: _WithCriterion(model, smoothing)))


def _adapted(model: Any) -> nn.Module:
    import peft

    layers = {"gpt2": ["c_attn"], "t5": ["q", "v"], "vit": ["q_proj", "v_proj"]}
    kinds = {"gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "vit": None}
    torch.manual_seed(3)
    name = model.config.model_type
    config = peft.LoraConfig(
        r=2, target_modules=layers[name], task_type=kinds[name], init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


_AVERAGED, _HELD = around(AveragedModel), around(_Held)
_DDP = {ranks: around(DistributedDataParallel, ranks) for ranks in (1, 2)}
_DDP_HELD = around(lambda model: DistributedDataParallel(_Held(model)), 1)
_IN_BOTH = {"averaged": _AVERAGED, "held": _HELD, "step": stepping}
_MODELS = (("gpt2", "adamw"), ("t5", "adamw"), ("mixtral", "sgd"), ("vit", "sgd"))


def _behind(model: str) -> Twist:
    """The loss that the model would compute, behind it."""
    return PLAIN_CLASSES if model in ("vit", "resnet", "convnext") else nothing


def wrapped_pairs() -> Iterator[Clean]:
    """Every pair that must not be flagged."""
    for model, kind in _MODELS:
        behind = _behind(model)
        for words, twist in _IN_BOTH.items():
            there, here = both(INSIDE, twist), both(behind, twist)
            yield Clean(f"inside / behind, {words}", model, kind, here, reference=INSIDE)
            yield Clean(f"inside, {words} / behind", model, kind, behind, reference=there)
            yield Clean(f"inside / behind, both {words}", model, kind, here, True, there)
            yield Clean(f"inside / inside, {words}", model, kind, there, reference=INSIDE)
            yield Clean(f"behind, {words} / behind", model, kind, behind, reference=here)
    for model, kind in (*_MODELS, ("convnext", "rmsprop"), ("resnet", "adamw")):
        behind, one, two = _behind(model), _DDP[1], _DDP[2]
        yield Clean("inside / behind, DDP", model, kind, both(behind, one), reference=INSIDE)
        there = both(INSIDE, one)
        yield Clean("inside, DDP / behind", model, kind, behind, True, there)
        there = both(INSIDE, _DDP_HELD)
        yield Clean("inside, DDP around held / behind", model, kind, behind, reference=there)
        here, there = both(behind, two), both(INSIDE, two)
        yield Clean("inside / behind, both DDP, 2 ranks", model, kind, here, reference=there)
    for model, kind in (("gpt2", "adamw"), ("t5", "adamw"), ("vit", "sgd")):
        two, behind = _DDP[2], _behind(model)
        here, there = both(behind, two), both(INSIDE, two)
        yield Clean("inside / behind, DDP, 2 ranks", model, kind, here, reference=INSIDE)
        yield Clean("inside, DDP, 2 ranks / behind", model, kind, behind, reference=there)
        if HAS_PEFT:
            adapted = around(_adapted)
            here, there = both(behind, adapted), both(INSIDE, adapted)
            yield Clean("inside / behind, both LoRA", model, kind, here, reference=there)
            yield Clean("behind / inside, both LoRA", model, kind, there, True, here)
    for model, kind in (("vit", "adamw"), ("convnext", "rmsprop")):
        twist = with_criterion(0.0)
        yield Clean("inside / behind, a criterion", model, kind, twist, reference=INSIDE)
        yield Clean("behind, a criterion / inside", model, kind, INSIDE, True, twist)
    by_hand = both(otherwise(loss=token_loss_by_hand), stepping)
    yield Clean("inside / behind, step by hand", "gpt2", "adamw", by_hand, reference=INSIDE)


def _fault_places() -> dict[str, tuple[Twist, Twist]]:
    """What the reference does otherwise, and the target."""
    places = {
        "inside / behind, held": (INSIDE, _HELD),
        "inside, averaged / behind": (both(INSIDE, _AVERAGED), nothing),
        "inside / behind, step": (INSIDE, stepping),
        "inside / behind, both held": (both(INSIDE, _HELD), _HELD),
        "inside, DDP / behind": (both(INSIDE, _DDP[1]), nothing),
        "inside / behind, both DDP, 2 ranks": (both(INSIDE, _DDP[2]), _DDP[2]),
    }
    if HAS_PEFT:
        adapted = around(_adapted)
        places["inside / behind, both LoRA"] = both(INSIDE, adapted), adapted
    return places


def wrapped_faults() -> Iterator[Fault]:
    """Every planted fault."""
    of_tokens = {
        "labels not shifted": other_token_loss(shift=0),
        "mean over ignored tokens": otherwise(loss=padding_counted),
        "label smoothing 0.02": other_token_loss(label_smoothing=0.02),
        "a sum": other_token_loss(reduction="sum"),
        "not divided": otherwise(accumulate=lambda value: value),
    }
    of_classes = {
        "logits / 1.02": otherwise(loss=warm),
        "smoothing": other_class_loss(),
        "half detached": otherwise(loss=half_detached),
    }
    no_auxiliary = {"no auxiliary loss": otherwise(auxiliary=0.0)}
    here = {"name": LOSS, "phase": FORWARD}
    back = {"name": rf"{LOSS[:-5]}(/loss)?(:.*)?", "phase": BACKWARD}
    for words, (reference, target) in _fault_places().items():
        is_adapted = "LoRA" in words
        planted = [("gpt2", "adamw", of_tokens), ("vit", "sgd", of_classes)]
        planted += [] if is_adapted else [("mixtral", "sgd", {**of_tokens, **no_auxiliary})]
        for model, kind, faults in planted:
            for fault, twist in faults.items():
                place = back if fault == "half detached" else here
                wrong = both(twist, target)
                yield Fault(f"{words}: {fault}", model, kind, wrong, reference=reference, **place)
    smooth = with_criterion(0.05)
    yield Fault("a criterion: smoothing", "convnext", "adamw", smooth, reference=INSIDE, **here)
