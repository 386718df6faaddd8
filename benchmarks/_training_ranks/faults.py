"""Faults of ranks to plant in the trainings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _training_ranks import layouts
from _training_ranks.collectives import Parallel, same, total
from _training_ranks.layouts import Training
from _training_ranks.net import Net
from whence.results import Comparison

Make = Callable[[], Training]


@dataclass(frozen=True)
class Fault:
    """A fault. where, words: patterns of the place and of the sentence of the first finding; ""
    where the headline alone has to say it, by `words`.
    """

    title: str
    make: Make
    where: str
    words: str
    ranks: int = 2
    reference: Make = layouts.one
    held_out: bool = False

    def answer(self, result: Comparison) -> str:
        """ "named" with its cause, "placed" without, "wrong", "missed" or the status."""
        if not self.where:
            return "named" if re.search(self.words, result.headline or "") else str(result.status)
        if not result.findings:
            return "missed" if result.status == "same" else str(result.status)
        first = result.findings[0]
        if not re.search(self.where, f"{first.name} {first.phase}"):
            return "wrong"
        return "named" if re.search(self.words, first.sentence) else "placed"


def _megatron(twist: Callable[[Net], None]) -> Make:
    def make() -> Training:
        net = layouts.cut(Net(), Parallel())
        twist(net)
        return Training(net, net)

    return make


def _sum_of(module: Any, **ways: Any) -> None:
    """This module adds up over ranks in another way."""
    module.parallel = Parallel()
    for name, way in ways.items():
        setattr(module.parallel, name, way)


def _stale_shard(net: Net) -> None:
    weight = net.layers[1].mlp.up.weight
    dist.broadcast(weight.data, 0)


def _cut_along_the_other_axis(net: Net) -> None:
    whole = Net().layers[0].attn.o.weight.detach()
    n, rank = dist.get_world_size(), dist.get_rank()
    net.layers[0].attn.o.weight.data.copy_(whole.chunk(n, 0)[rank].T)


def gradient_of_input_not_reduced() -> Training:
    return _megatron(lambda net: _sum_of(net.layers[1].mlp.up, sum_back=same))()


def _dp(after_backward: Callable[[Training], None]) -> Make:
    def make() -> Training:
        training = layouts.dp()
        training.after_backward = after_backward
        return training

    return make


def _reduced(parameter: Any, divisor: int, group: Any = None, times: int = 1) -> None:
    for _ in range(times):
        dist.all_reduce(parameter.grad, group=group)
    parameter.grad /= divisor


def _every(change: Callable[[str, Any], None]) -> Callable[[Training], None]:
    def after_backward(training: Training) -> None:
        for name, parameter in training.net.named_parameters():
            if parameter.grad is not None:
                change(name, parameter)

    return after_backward


def no_sync() -> Training:
    training = layouts.ddp()

    def run(training: Training, ids: torch.Tensor, labels: torch.Tensor) -> None:
        with training.call.no_sync():
            training.loss(training.call(ids), labels).backward()

    training.run = run
    return training


def ignored() -> Training:
    net = Net()
    ignore = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(net, ["layers.1.norm2.weight"])
    return Training(net, nn.parallel.DistributedDataParallel(net), layouts.rows_of_rank)


def other_weights() -> Training:
    training = layouts.dp()
    if dist.get_rank() == 1:
        with torch.no_grad():
            torch.manual_seed(1)
            training.net.layers[0].mlp.up.weight.normal_(std=0.1)
    return training


def in_pairs() -> Training:
    training = layouts.dp()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[dist.get_rank() // 2]
    training.after_backward = _every(lambda name, p: _reduced(p, 2, own))
    return training


def other_learning_rate() -> Training:
    training = layouts.dp()
    training.learning_rate = 1e-2 if dist.get_rank() == 0 else 2e-2
    return training


def _fsdp_sum() -> Training:
    training = layouts.fsdp()
    for module in training.net.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return training


def same_rows() -> Training:
    training = layouts.dp()
    training.rows = lambda whole: whole.chunk(dist.get_world_size())[0]
    return training


def _loss_divided() -> Training:
    training = layouts.ddp()
    training.loss = lambda logits, labels: layouts.loss_of(logits, labels) / dist.get_world_size()
    return training


def _experts_in_another_order() -> Training:
    training = layouts.ep()
    experts = training.net.layers[1].mlp.experts
    numbers = list(experts)
    swapped = [experts[number] for number in reversed(numbers)]
    for number, expert in zip(numbers, swapped, strict=True):
        experts[number] = expert
    return training


def _experts_not_divided() -> Training:
    training, n = layouts.ep(), dist.get_world_size()
    training.after_backward = _every(
        lambda name, p: None if ".experts." in name else _reduced(p, n)
    )
    return training


def _router_not_reduced() -> Training:
    training, n = layouts.ep(), dist.get_world_size()

    def change(name: str, parameter: Any) -> None:
        if ".experts." in name:
            parameter.grad /= n
        elif "layers.1.mlp.router" not in name:
            _reduced(parameter, n)

    training.after_backward = _every(change)
    return training


@contextlib.contextmanager
def _sending(change: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """What a rank sends to a destination is something else."""
    previous = dist.send
    dist.send = lambda x, to: previous(change(to, x).contiguous(), to)
    try:
        yield
    finally:
        dist.send = previous


def _pp(change: Callable[[int, torch.Tensor], torch.Tensor]) -> Make:
    def make() -> Training:
        training = layouts.pp()
        run = training.run

        def changed(training: Training, ids: torch.Tensor, labels: torch.Tensor) -> None:
            with _sending(change):
                run(training, ids, labels)

        training.run = changed
        return training

    return make


def _earlier(wanted: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """What was sent to a rank in the step before."""
    kept: list[torch.Tensor] = []

    def change(to: int, x: torch.Tensor) -> torch.Tensor:
        if to != wanted:
            return x
        kept.append(x.clone())
        return kept[-2] if len(kept) > 1 else x

    return change


def _mean_in_a_hook() -> Training:
    training = layouts.ddp()

    def hook(bucket: Any) -> Any:
        n = dist.get_world_size()
        work = dist.all_reduce(bucket.buffer().div_(n), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].div_(n))

    # torch refuses annotations that are text, as they all are here.
    training.call.register_comm_hook(None, lambda _, bucket: hook(bucket))
    return training


def _bias_everywhere(net: Net) -> None:
    down = net.layers[1].mlp.down
    down.forward = lambda x: down.parallel.reduced(nn.functional.linear(x, down.weight, down.bias))


def _swapped_heads(net: Net) -> None:
    whole = Net().layers[0].attn.q.weight.detach()
    n, rank = dist.get_world_size(), dist.get_rank()
    net.layers[0].attn.q.weight.data.copy_(whole.chunk(n, 0)[n - 1 - rank])


def _biases_left_out() -> Training:
    training, n = layouts.dp(), dist.get_world_size()
    training.after_backward = _every(
        lambda name, p: None if name.endswith("bias") else _reduced(p, n)
    )
    return training


def _other_group() -> Training:
    training = layouts.dp_tp()
    mesh = layouts.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    training.net.layers[1].mlp.down.parallel = Parallel(mesh.get_group("dp"))
    return training


def _shard_of_before() -> Training:
    training = layouts.fsdp()
    weight = training.net.layers[1].mlp.up.weight
    kept = weight.to_local().detach().clone()
    rows = training.rows

    def again(whole: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            weight.to_local().detach().copy_(kept)
        return rows(whole)

    training.rows = again
    return training


def _tokens_twice() -> Training:
    training = layouts.ep()
    part = training.net.layers[0].mlp
    scattered = part._scattered
    part._scattered = lambda x: scattered(x) * dist.get_world_size()
    return training


def faults() -> Iterator[Fault]:
    """All of them; those held out were planted after the rules had been written."""
    nothing, mlp = "sum over ranks is missing", r"^layers\.1\.mlp\.down "
    twice = "summed over ranks twice"
    in_place = "the sum over ranks in the place of the mean"
    mean = "the mean over ranks in the place of the sum"
    yield Fault(
        "TP: no sum",
        _megatron(lambda net: _sum_of(net.layers[1].mlp.down, sum_up=same)),
        mlp,
        nothing,
    )
    yield Fault(
        "TP: summed twice",
        _megatron(
            lambda net: _sum_of(
                net.layers[1].mlp.down, sum_up=lambda x: total(total(x, None), None)
            )
        ),
        mlp,
        twice,
    )
    yield Fault(
        "TP: mean for sum",
        _megatron(lambda net: _sum_of(net.layers[1].mlp.down, sum_up=lambda x: total(x, None) / 2)),
        mlp,
        mean,
    )
    yield Fault(
        "TP: no sum of the input's gradient",
        gradient_of_input_not_reduced,
        r"^layers\.1\.mlp\.up backward",
        nothing,
    )
    yield Fault(
        "TP: stale shard",
        _megatron(_stale_shard),
        r"^layers\.1\.mlp\.up ",
        "rank 1 holds the piece of rank 0",
    )
    yield Fault(
        "TP: weight cut along the other axis",
        _megatron(_cut_along_the_other_axis),
        r"^layers\.0\.attn\.o ",
        "axis",
    )
    yield Fault("DDP: no_sync left on", no_sync, "grad", "not reduced over the ranks")
    yield Fault("DDP: a parameter ignored", ignored, r"norm2|grad", "not reduced over the ranks")
    yield Fault(
        "DP: sum for mean", _dp(_every(lambda name, p: _reduced(p, 1))), "gradients", in_place
    )
    yield Fault(
        "DP: summed twice",
        _dp(_every(lambda name, p: _reduced(p, 2, times=2))),
        "gradients",
        in_place,
    )
    yield Fault("DP: wrong group", in_pairs, "gradients", "another group", ranks=4)
    yield Fault(
        "DP: a rank with weights of its own", other_weights, r"^layers\.0\.mlp\.up ", "rank 1"
    )
    yield Fault(
        "DP: a rank with another learning rate", other_learning_rate, "optimizer", "lr|rank 1"
    )
    yield Fault("FSDP2: sum for mean", _fsdp_sum, "grad", in_place)
    yield Fault("DP: the same rows on all ranks", same_rows, "^Net ", "train on the same rows")
    yield Fault(
        "DDP: loss divided by the ranks too",
        _loss_divided,
        "sum of|loss",
        "mean over ranks is taken twice|mean over ranks in",
    )
    with_experts: Any = layouts.one_with_experts
    yield Fault(
        "EP: experts in another order",
        _experts_in_another_order,
        r"^layers\.1\.mlp\.experts",
        "expert",
        reference=with_experts,
    )
    yield Fault(
        "EP: gradients of experts not divided",
        _experts_not_divided,
        "gradients",
        "not divided",
        reference=with_experts,
    )
    yield Fault(
        "EP: the router's gradient not added up",
        _router_not_reduced,
        "gradients",
        "not reduced over the ranks",
        reference=with_experts,
    )
    yield Fault("PP: activations of the step before", _pp(_earlier(1)), "^(Net|layers.1) ", "stale")
    yield Fault("PP: gradients of the step before", _pp(_earlier(0)), "Net backward", "stale")
    yield Fault(
        "DDP: mean taken twice in a hook",
        _mean_in_a_hook,
        "sum of",
        "mean over ranks is taken twice",
        held_out=True,
    )
    yield Fault(
        "TP: bias added on every rank",
        _megatron(_bias_everywhere),
        mlp,
        "bias is added on every rank",
        held_out=True,
    )
    yield Fault(
        "TP: ranks' pieces swapped",
        _megatron(_swapped_heads),
        r"^layers\.0\.attn\.q ",
        "holds the piece of rank",
        held_out=True,
    )
    yield Fault(
        "DP: biases not reduced", _biases_left_out, "gradients", "not reduced", held_out=True
    )
    yield Fault(
        "DP and TP: sum over the other group", _other_group, mlp, "sum", ranks=4, held_out=True
    )
    yield Fault(
        "FSDP2: a shard of the step before",
        _shard_of_before,
        r"^layers\.1\.mlp\.up ",
        "stale|rank 1",
        held_out=True,
    )
    yield Fault(
        "EP: tokens summed twice",
        _tokens_twice,
        r"^layers\.0(\.mlp)? ",
        "twice|2 x",
        reference=with_experts,
        held_out=True,
    )
