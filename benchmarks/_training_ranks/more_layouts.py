"""Trainings over ranks: schedules of pipelines, two meshes, FSDP1, messages from all to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from _training_ranks.collectives import collective
from _training_ranks.layouts import (
    _STAGES,
    Stage,
    Training,
    one_with_experts,
    rows_of_rank,
)
from _training_ranks.net import ROWS, Net, loss_of


def scheduled(kind: Any, *, scale: bool = True, loss: Callable[..., Any] = loss_of) -> Training:
    """A pipeline of which torch runs the stages. scale: are gradients divided by the number of
    micro-batches?
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    net = Stage(Net(), _STAGES[n][rank])
    stage = PipelineStage(net, rank, n, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=ROWS, loss_fn=loss, scale_grads=scale)

    def run(training: Training, ids: torch.Tensor, labels: torch.Tensor) -> None:
        if rank == 0:
            schedule.step(ids)
        elif rank == n - 1:
            schedule.step(target=labels)
        else:
            schedule.step()

    return Training(net, net, run=run)


def gpipe() -> Training:
    """All forward passes, then all backward passes."""
    return scheduled(ScheduleGPipe)


def one_f_one_b() -> Training:
    """One forward pass, one backward pass."""
    return scheduled(Schedule1F1B)


def one_in_micro_batches() -> Training:
    """One rank that adds the gradients of as many micro-batches up."""
    net = Net()

    def run(training: Training, ids: torch.Tensor, labels: torch.Tensor) -> None:
        for part, wanted in zip(ids.chunk(ROWS), labels.chunk(ROWS), strict=True):
            (training.loss(training.call(part), wanted) / ROWS).backward()

    return Training(net, net, run=run)


gpipe.reference = one_in_micro_batches
one_f_one_b.reference = one_in_micro_batches


def _pairs() -> Any:
    shape = (dist.get_world_size() // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def fsdp_tp() -> Training:
    """Tensor parallel in pairs of neighbours, parameters in pieces between the pairs."""
    net, mesh = Net(), _pairs()
    columns = {f"attn.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    rows = {"attn.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    for layer in net.layers:
        parallelize_module(layer, mesh["tp"], columns | rows)
    parallelize_module(net, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    for layer in net.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    group = mesh.get_group("dp")

    def own(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    return Training(net, net, own)


def fsdp1() -> Training:
    """Parameters in pieces of one flat tensor a module."""
    net = Net()
    for place, layer in enumerate(net.layers):
        net.layers[place] = FullyShardedDataParallel(
            layer, device_id=torch.device("cpu"), use_orig_params=True
        )
    whole = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return Training(whole, whole, rows_of_rank)


def exchanged(x: torch.Tensor, sent: list[int], taken: list[int]) -> torch.Tensor:
    """Rows of x to the ranks that they belong to, and those of others from them."""
    out = x.new_empty(sum(taken), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), taken, sent)
    return out


class ExchangedExperts(nn.Module):
    """Experts of which this rank has some: each token goes to the rank of its expert and back."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        n, rank = dist.get_world_size(), dist.get_rank()
        self.router = whole.router
        self.each = len(whole.experts) // n
        mine = range(rank * self.each, (rank + 1) * self.each)
        self.experts = nn.ModuleDict({str(i): whole.experts[i] for i in mine})
        self.back = exchanged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        share, choice = self.router(tokens).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice // self.each, minlength=dist.get_world_size())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, taken = counts.tolist(), theirs.tolist()
        rows = self._moved(tokens[order], sent, taken)
        numbers = exchanged(choice[order], sent, taken)
        out = torch.zeros_like(rows)
        for number, expert in self.experts.items():
            own = (numbers == int(number)).nonzero().squeeze(-1)
            out = out.index_add(0, own, expert(rows[own]))
        back = self._moved(out, taken, sent, self.back)
        weighted = back * share[order, None]
        return torch.zeros_like(tokens).index_add(0, order, weighted).view_as(x)

    def _moved(
        self, x: torch.Tensor, sent: list[int], taken: list[int], way: Any = exchanged
    ) -> torch.Tensor:
        return collective(x, lambda y: way(y, sent, taken), lambda g: exchanged(g, taken, sent))


def all_to_all() -> Training:
    """Experts on ranks, rows of the batch on ranks: tokens travel."""
    net = Net(experts=True)
    for layer in net.layers:
        layer.mlp = ExchangedExperts(layer.mlp)
    n = dist.get_world_size()

    def mean(training: Training) -> None:
        for name, parameter in training.net.named_parameters():
            if parameter.grad is None:
                continue
            if ".experts." not in name:
                dist.all_reduce(parameter.grad)
            parameter.grad /= n

    return Training(net, net, rows_of_rank, after_backward=mean)


all_to_all.reference = one_with_experts

MORE_LAYOUTS = {f.__name__: f for f in (gpipe, one_f_one_b, fsdp_tp, fsdp1, all_to_all)}
