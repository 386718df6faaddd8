"""Faults of the layouts in `more_layouts`, planted after the rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from _training_ranks import more_layouts
from _training_ranks.faults import Fault
from _training_ranks.layouts import Training, one_with_experts
from _training_ranks.more_layouts import exchanged, one_in_micro_batches, scheduled


def not_scaled() -> Training:
    """The schedule leaves gradients as they are, with losses that are means."""
    return scheduled(ScheduleGPipe, scale=False)


def summed_losses() -> Training:
    """The last stage adds the losses of tokens up."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    return scheduled(Schedule1F1B, loss=loss)


def doubled_gradient() -> Training:
    """The last stage hands twice its gradient back."""
    training = scheduled(ScheduleGPipe)

    def twice(_: Any, args: Any) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: gradient * 2)

    if dist.get_rank() == dist.get_world_size() - 1:
        training.net.register_forward_pre_hook(twice)
    return training


def other_weights() -> Training:
    """The last stage drops its norm's weight."""
    training = scheduled(Schedule1F1B)
    if dist.get_rank() == dist.get_world_size() - 1:
        training.net.norm.forward = lambda x: F.rms_norm(x, (x.shape[-1],), None, 1e-5)
    return training


def _doubled(name: str) -> Training:
    """FSDP2 with TP, gradients whose names end so are added up and not divided."""
    training = more_layouts.fsdp_tp()

    def twice(training: Training) -> None:
        for own, parameter in training.net.named_parameters():
            if own.endswith(name):
                parameter.grad *= 2

    training.after_backward = twice
    return training


def sum_for_mean() -> Training:
    """All gradients are sums over the pairs."""
    return _doubled("")


def one_sum_for_mean() -> Training:
    """One gradient is a sum."""
    return _doubled("layers.1.mlp.up.weight")


def rotated() -> Training:
    """Tokens come back from their experts in another order."""
    training = more_layouts.all_to_all()

    def back(x: torch.Tensor, sent: list[int], taken: list[int]) -> torch.Tensor:
        return exchanged(x, sent, taken).roll(1, 0)

    training.net.layers[1].mlp.back = back
    return training


def experts_not_divided() -> Training:
    """Gradients of experts are not divided by the ranks whose tokens they are of."""
    training = more_layouts.all_to_all()

    def mean(training: Training) -> None:
        for name, parameter in training.net.named_parameters():
            if parameter.grad is not None and ".experts." not in name:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    training.after_backward = mean
    return training


def more_faults() -> Iterator[Fault]:
    """Every planted fault."""
    held = partial(Fault, held_out=True)
    micro, experts = one_in_micro_batches, one_with_experts
    loss = r"loss|gradients"
    yield held("schedule does not divide gradients", not_scaled, loss, "div", reference=micro)
    yield held("losses of a stage summed", summed_losses, "loss", "reduction|div", reference=micro)
    yield held(
        "stage hands back twice its gradient", doubled_gradient, r"^Net.* backward|layers\.0", "",
        reference=micro,
    )  # fmt: skip
    yield held("last stage without a norm's weight", other_weights, "^norm", "", reference=micro)
    twice = "sum over ranks|twice|2 x|mul"
    yield held("FSDP2 with TP, sum for mean", sum_for_mean, "gradients", twice, 4)
    yield held("FSDP2 with TP, one sum for mean", one_sum_for_mean, "gradients", twice, 4)
    yield held("tokens back in another order", rotated, r"layers\.1\.mlp", "", reference=experts)
    yield held(
        "gradients of experts not divided", experts_not_divided, "gradients",
        "not divided by the 2 ranks", reference=experts,
    )  # fmt: skip
