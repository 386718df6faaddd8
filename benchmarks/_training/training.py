"""A training loop of which every part can be done otherwise."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

import whence
from _training.fresh_models import Lion
from _training.subjects import IGNORED, MICRO_BATCHES, Batch, batches, is_text, made

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token given those before it."""
    scores, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(scores.float(), wanted, ignore_index=IGNORED)


def aligned_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token that a decoder was to give at its place."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def class_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each image."""
    return cross_entropy(logits.float(), labels, label_smoothing=0.1)


@dataclass
class Training:
    """A model and how it is trained.

    options: of the optimiser. groups: the optimiser's groups of parameters. loss: of logits and
    labels; None where the model makes its loss by itself. accumulate: what becomes of a loss before
    its backward pass. auxiliary: weight of the loss that the model adds. limit: of the norm of
    gradients, None for no clipping. precision: of autocast, None without. device: where the model
    and its batches lie. wrap: puts something around the model. ranks: processes that each take some
    rows of a batch, 0 for one without a process group. steps: those that are captured, as
    `whence.capture` takes them; None for all. Others are called at their time with this training:
    after_backward (and the number of the micro-batch), before_step, after_step, and zero where
    gradients are zeroed.
    """

    name: str
    model: nn.Module
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]
    groups: Callable[[nn.Module], Any]
    loss: Loss | None
    accumulate: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss / MICRO_BATCHES
    auxiliary: float = 0.02
    limit: float | None = 0.5
    clip: Callable[..., Any] = lambda parameters, limit: nn.utils.clip_grad_norm_(parameters, limit)
    precision: torch.dtype | None = None
    threads: int = 1
    device: str = "cpu"
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    ranks: int = 0
    steps: str | None = None
    after_backward: Callable[[Training, int], None] | None = None
    before_clipping: Callable[[Training], None] | None = None
    before_step: Callable[[Training], None] | None = None
    after_step: Callable[[Training], None] | None = None
    step: Callable[[Training], None] = lambda training: training.optimizer.step()
    zero: Callable[[Training], None] = lambda training: training.optimizer.zero_grad()
    backward: Callable[[Training, torch.Tensor], None] = lambda training, loss: loss.backward()
    call: Callable[..., Any] | None = None
    optimizer: Any = field(init=False)

    def loss_of(self, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch."""
        inputs = dict(batch)
        call = self.call or self.model
        if self.loss is None:
            return call(**inputs).loss
        labels = inputs.pop("labels")
        out = call(**inputs)
        loss = self.loss(out.logits, labels)
        extra = getattr(out, "aux_loss", None)
        return loss if extra is None else loss + self.auxiliary * extra


def decayed_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, and norms and biases without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.95)}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.95, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.95)}),
}


def _loss_of(name: str) -> Loss:
    if name == "t5":
        return aligned_loss
    return token_loss if is_text(name) else class_loss


def training_of(
    name: str, optimizer: str, *, autocast: bool = False, device: str = "cpu", **options: Any
) -> Training:
    """How a model is trained where nothing is done otherwise. options: of the model."""
    kind, hyper_parameters = _OPTIMIZERS[optimizer]
    return Training(
        name,
        made(name, **options),
        kind,
        dict(hyper_parameters),
        decayed_groups,
        _loss_of(name),
        precision=torch.bfloat16 if autocast else None,
        device=device,
    )


def train(training: Training, folder: Path) -> Path:
    """Capture a training into a folder."""
    if not training.ranks:
        return _train(training, folder)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        # A fork, since what a training does otherwise are functions that cannot be sent.
        torch.multiprocessing.start_processes(
            _of_one_rank,
            (training, folder, f"{scratch}/meeting"),
            training.ranks,
            start_method="fork",
        )
    return folder


def _of_one_rank(rank: int, training: Training, folder: Path, meeting: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(training.ranks))
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=training.ranks
    )
    _train(training, folder, rank)
    distributed.barrier()
    distributed.destroy_process_group()


def _train(training: Training, folder: Path, rank: int = 0) -> Path:
    training.model = model = training.wrap(training.model).to(training.device)
    torch.set_num_threads(training.threads)
    torch.manual_seed(2)
    training.optimizer = training.kind(training.groups(model), **training.options)
    capture = whence.capture(model, folder, force=True, steps=training.steps)
    with contextlib.redirect_stderr(io.StringIO()), capture:
        for number, batch in enumerate(batches(training.name)):
            moved = {
                name: tensor.to(training.device).chunk(max(training.ranks, 1))[rank]
                for name, tensor in batch.items()
            }
            _micro_batch(training, moved, number % MICRO_BATCHES)
            if (number + 1) % MICRO_BATCHES == 0:
                _step(training)
    torch.set_num_threads(1)
    return folder


def _micro_batch(training: Training, batch: Batch, number: int) -> None:
    device, precision = training.device, training.precision
    with torch.autocast(device, precision or torch.bfloat16, enabled=precision is not None):
        loss = training.loss_of(batch)
    training.backward(training, training.accumulate(loss))
    if training.after_backward is not None:
        training.after_backward(training, number)


def _step(training: Training) -> None:
    if training.before_clipping is not None:
        training.before_clipping(training)
    if training.limit is not None:
        training.clip(training.model.parameters(), training.limit)
    if training.before_step is not None:
        training.before_step(training)
    training.step(training)
    if training.after_step is not None:
        training.after_step(training)
    training.zero(training)
