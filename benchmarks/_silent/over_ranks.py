"""Errors of trainings over ranks, and of what lies between their devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _training_ranks import layouts
from _training_ranks.collectives import Parallel
from _training_ranks.layouts import Training
from _training_ranks.net import Net
from torch import nn

_LIMIT = 0.5
"""Of the norm of gradients."""


def clipped() -> Training:
    """Tensor parallel, with the gradients of all ranks clipped alike."""
    return _clipped(everywhere=True)


def clipped_on_one_rank() -> Training:
    """Gradients of what all ranks hold are clipped on the first alone."""
    return _clipped(everywhere=False)


def _clipped(*, everywhere: bool) -> Training:
    net = layouts.cut(Net(), Parallel())

    def clip(training: Training) -> None:
        parts = [p for name, p in net.named_parameters() if _is_part(name)]
        held = [p for name, p in net.named_parameters() if not _is_part(name)]
        square = sum(p.grad.square().sum() for p in parts)
        dist.all_reduce(square)
        square = square + sum(p.grad.square().sum() for p in held)
        share = (_LIMIT / (square.sqrt() + 1e-6)).clamp(max=1)
        for parameter in (*parts, *(held if everywhere or dist.get_rank() == 0 else ())):
            parameter.grad.mul_(share)

    return Training(net, net, after_backward=clip)


def _is_part(name: str) -> bool:
    return "attn" in name or "mlp.up" in name or name.endswith("mlp.down.weight")


def capacity_of_each_rank() -> Training:
    """Experts whose ranks exchange tokens, one more time where a rank has many: the others wait."""
    training = layouts.ep()
    forward = training.call

    def call(ids: torch.Tensor) -> torch.Tensor:
        out = forward(ids)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(8))
        return out

    training.call = call
    return training


def moved_after_wrapping() -> Training:
    """A model that went to another type and back behind DDP's back: its hooks hold old tensors."""
    net = Net()
    wrapped = nn.parallel.DistributedDataParallel(net)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    net.double()
    net.float()
    return Training(net, wrapped, layouts.rows_of_rank)


def wrapped_now_and_then() -> Training:
    """The second step calls the model that is not wrapped."""
    training = layouts.ddp()
    wrapped, calls = training.call, [0]

    def call(ids: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return training.net(ids) if calls[0] == 2 else wrapped(ids)

    training.call = call
    return training


def sums_lost() -> Training:
    """In the second step one rank receives zeros for the gradient of a layer."""
    seen = [0]

    def mean(training: Training) -> None:
        layouts.mean_of_gradients(training)
        seen[0] += 1
        if seen[0] == 2 and dist.get_rank() == 1:
            training.net.layers[1].mlp.up.weight.grad.zero_()

    net = Net()
    return Training(net, net, layouts.rows_of_rank, after_backward=mean)


def copy_lost() -> Training:
    """What one rank receives of a weight when all are copied to it is zero."""
    training = layouts.dp()
    if dist.get_rank() == 1:
        training.net.layers[0].attn.o.weight.data.zero_()
    return training


def received_nothing() -> Training:
    """A pipeline whose second stage receives zeros in place of the end of a row."""
    training = layouts.pp()
    receive = dist.recv

    def lossy(tensor: torch.Tensor, source: int, *rest: object) -> object:
        done = receive(tensor, source, *rest)
        if dist.get_rank() == 1:
            tensor[..., -4:, :] = 0
        return done

    run = training.run

    def with_loss(training: Training, ids: torch.Tensor, labels: torch.Tensor) -> None:
        dist.recv = lossy
        try:
            run(training, ids, labels)
        finally:
            dist.recv = receive

    training.run = with_loss
    return training
