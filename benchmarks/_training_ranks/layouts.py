"""The same training over several ranks, in every way that torch or programs of its users do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from _training_ranks.collectives import Columns, Parallel, Rows, collective, gathered, piece, total
from _training_ranks.net import STEPS, WIDTH, Net, batch, loss_of, optimizer_of


@dataclass
class Training:
    """A model on one rank and how it is trained.

    call: what is called, the model or what wraps it. rows: those of this rank, of a batch. loss: of
    logits and labels. Others are called at their time with this training.
    """

    net: nn.Module
    call: Callable[..., torch.Tensor]
    rows: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = loss_of
    after_backward: Callable[[Training], None] = lambda training: None
    run: Callable[[Training, torch.Tensor, torch.Tensor], None] = lambda training, ids, labels: (
        training.loss(training.call(ids), labels).backward()
    )
    optimizer: Any = None
    learning_rate: float = 1e-2
    before: list[Callable[[Training], None]] = field(default_factory=list)


def train(training: Training) -> None:
    """Run all steps."""
    training.optimizer = optimizer_of(training.net, training.learning_rate)
    for step in range(STEPS):
        ids, labels = batch(step)
        training.run(training, training.rows(ids), training.rows(labels))
        training.after_backward(training)
        training.optimizer.step()
        training.optimizer.zero_grad()


def rows_of_rank(whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a batch."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _mesh(name: str) -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def one() -> Training:
    """One rank."""
    net = Net()
    return Training(net, net)


def ddp() -> Training:
    """Data parallel: torch adds gradients up while the backward pass runs."""
    net = Net()
    return Training(net, nn.parallel.DistributedDataParallel(net), rows_of_rank)


def fsdp() -> Training:
    """Data parallel with parameters in pieces."""
    net, mesh = Net(), _mesh("dp")
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return Training(net, net, rows_of_rank)


def tp() -> Training:
    """Tensor parallel by DTensors: heads, the inner axis of the MLP, the vocabulary."""
    net, mesh = Net(), _mesh("tp")
    columns = {f"attn.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    rows = {"attn.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    for layer in net.layers:
        parallelize_module(layer, mesh, columns | rows)
    parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return Training(net, net)


def sp() -> Training:
    """Tensor parallel, with tokens in pieces where norms and sums are."""
    net, mesh = Net(), _mesh("tp")
    apart: dict[str, Any] = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    inner = {f"attn.{n}": ColwiseParallel(input_layouts=Shard(1)) for n in "qkv"}
    outer = {
        n: RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        for n in ("attn.o", "mlp.down")
    }
    for layer in net.layers:
        plan = apart | inner | outer | {"mlp.up": ColwiseParallel(input_layouts=Shard(1))}
        parallelize_module(layer, mesh, plan)
    first = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    )
    last = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    ends = {"embed": first, "norm": SequenceParallel(), "head": last}
    parallelize_module(net, mesh, ends)
    return Training(net, net)


def mean_of_gradients(training: Training, group: Any = None) -> None:
    """What a program of its own does to gradients before the step."""
    for parameter in training.net.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def dp() -> Training:
    """Data parallel by hand: the mean over ranks between backward pass and step."""
    net = Net()
    return Training(net, net, rows_of_rank, after_backward=mean_of_gradients)


def megatron() -> Training:
    """Tensor parallel by hand."""
    return Training(net := cut(Net(), Parallel()), net)


def cut(net: Net, parallel: Parallel) -> Net:
    """The model over a tensor parallel group."""
    for layer in net.layers:
        for name in "qkv":
            setattr(layer.attn, name, Columns(getattr(layer.attn, name), parallel))
        layer.attn.o = Rows(layer.attn.o, parallel)
        layer.mlp.up = Columns(layer.mlp.up, parallel)
        layer.mlp.down = Rows(layer.mlp.down, parallel)
    return net


def dp_tp(tell: Callable[[Any], None] = lambda group: None) -> Training:
    """Tensor parallel in pairs of neighbours, data parallel between the pairs. tell: is given the
    group of a pair.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    replicas, group = mesh.get_group("dp"), mesh.get_group("tp")
    tell(group)
    net = cut(Net(), Parallel(group))

    def rows(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(dist.get_world_size(replicas))[dist.get_rank(replicas)]

    return Training(net, net, rows, after_backward=lambda t: mean_of_gradients(t, replicas))


def ep() -> Training:
    """Experts on ranks, rows of the batch on ranks: tokens are gathered, results scattered."""
    return ep_of(Net(experts=True))


def ep_of(net: Net) -> Training:
    """`ep` of a model with experts."""
    n = dist.get_world_size()
    for layer in net.layers:
        layer.mlp = SpreadExperts(layer.mlp)

    def mean(training: Training) -> None:
        for name, parameter in training.net.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(parameter.grad)
            if parameter.grad is not None:
                parameter.grad /= n

    return Training(net, net, rows_of_rank, after_backward=mean)


def one_with_experts() -> Training:
    """One rank with experts."""
    return Training(net := Net(experts=True), net)


ep.reference = one_with_experts


class SpreadExperts(nn.Module):
    """Experts of which this rank has some."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        n, rank = dist.get_world_size(), dist.get_rank()
        self.router = whole.router
        each = len(whole.experts) // n
        mine = range(rank * each, (rank + 1) * each)
        self.experts = nn.ModuleDict({str(i): whole.experts[i] for i in mine})
        self.order = list(range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        share, choice = self.router(tokens).softmax(-1).max(-1)
        every, weight = self._gathered(tokens), self._gathered(share)
        chosen = gathered(choice, 0, None)
        out = torch.zeros_like(every)
        for number, expert in self.experts.items():
            own = (chosen == int(number)).nonzero().squeeze(-1)
            out = out.index_add(0, own, expert(every[own]) * weight[own, None])
        return self._scattered(out).view_as(x)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return collective(
            x, lambda y: gathered(y, 0, None), lambda g: piece(total(g, None), 0, None)
        )

    def _scattered(self, x: torch.Tensor) -> torch.Tensor:
        return collective(
            x, lambda y: piece(total(y, None), 0, None), lambda g: gathered(g, 0, None)
        )


class Stage(nn.Module):
    """This rank's layers of a pipeline."""

    def __init__(self, whole: Net, parts: list[str]) -> None:
        super().__init__()
        layers = {str(i): whole.layers[i] for i in range(len(whole.layers)) if str(i) in parts}
        self.embed = whole.embed if "embed" in parts else None
        self.layers = nn.ModuleDict(layers)
        self.norm = whole.norm if "head" in parts else None
        self.head = whole.head if "head" in parts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None else x


_STAGES = {2: [["embed", "0"], ["1", "head"]], 4: [["embed"], ["0"], ["1"], ["head"]]}


def pp() -> Training:
    """Stages that send activations forward and gradients back."""
    rank, n = dist.get_rank(), dist.get_world_size()
    net = Stage(Net(), _STAGES[n][rank])

    def run(training: Training, ids: torch.Tensor, labels: torch.Tensor) -> None:
        x = ids
        if rank > 0:
            x = torch.empty(*ids.shape, WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = training.call(x)
        if rank < n - 1:
            dist.send(out.detach().contiguous(), rank + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        else:
            training.loss(out, labels).backward()
        if rank > 0:
            dist.send(x.grad.contiguous(), rank - 1)

    return Training(net, net, run=run)


LAYOUTS = {f.__name__: f for f in (ddp, fsdp, tp, sp, dp, megatron, ep, pp, dp_tp)}
ON_FOUR = {"dp_tp", "fsdp_tp"}
"""Those that need 4 ranks."""
