"""Faults of ranks that one run shows, and clean trainings in which ranks differ rightly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _training_ranks import faults, layouts
from _training_ranks.collectives import Parallel
from _training_ranks.layouts import Training
from _training_ranks.net import Net
from whence.results import RankCause, RankReport

Make = Callable[[], Training]


@dataclass(frozen=True)
class OneRunFault:
    """A fault. cause: of the first finding; words: a pattern of its sentence and evidence. hangs:
    the job does, and is killed.
    """

    title: str
    make: Make
    cause: RankCause
    words: str
    ranks: int = 2
    hangs: bool = False
    held_out: bool = False

    def answer(self, report: RankReport) -> str:
        """ "named" with its cause, "placed" without, "wrong", "missed"."""
        if not report.findings:
            return "missed"
        first = report.findings[0]
        named = re.search(self.words, "; ".join((first.sentence, *first.evidence)))
        if first.cause == self.cause:
            return "named" if named else "placed"
        return "placed" if named else "wrong"


# ---- models with more in them


class _Batches(nn.BatchNorm1d):
    """Normalises channels over rows and tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


def _with_batch_norm(net: Net) -> Net:
    net.norm = nn.Sequential(net.norm, _Batches(net.head.in_features))
    return net


def _with_dropout(net: Any) -> Any:
    for layer in net.layers:
        layer.norm2 = nn.Sequential(layer.norm2, nn.Dropout(0.25))
    return net


def _seeded(training: Training, seed: int) -> Training:
    torch.manual_seed(seed)
    return training


def _by_hand(net: Any) -> Training:
    return Training(
        net, net, layouts.rows_of_rank, after_backward=lambda t: layouts.mean_of_gradients(t)
    )


def _constants(net: Net) -> Net:
    """Biases of zero and norms of one, as models are when they are made."""
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.ones_(parameter)
    return net


def dropout_dp() -> Training:
    """Data parallel with dropout of its own on every rank."""
    return _seeded(_by_hand(_with_dropout(Net())), 5 + dist.get_rank())


def dropout_tp() -> Training:
    """Tensor parallel with the same dropout on all ranks, of what they all hold."""
    net = _with_dropout(layouts.cut(Net(), Parallel()))
    return _seeded(Training(net, net), 5)


def batch_norm_ddp() -> Training:
    """DDP, which broadcasts buffers."""
    net = _with_batch_norm(Net())
    return Training(net, nn.parallel.DistributedDataParallel(net), layouts.rows_of_rank)


def zero_biases_tp() -> Training:
    """Tensor parallel where pieces of biases begin alike."""
    net = layouts.cut(_constants(Net()), Parallel())
    return Training(net, net)


def zero_biases_ep() -> Training:
    """Experts whose biases begin alike."""
    return layouts.ep_of(_constants(Net(experts=True)))


def accumulated_ddp() -> Training:
    """Two micro-batches, of which the first is not reduced."""
    training = layouts.ddp()

    def run(training: Training, ids: torch.Tensor, labels: torch.Tensor) -> None:
        with training.call.no_sync():
            training.loss(training.call(ids[:1]), labels[:1]).backward()
        training.loss(training.call(ids[1:]), labels[1:]).backward()

    training.run = run
    return training


def evaluated_alike() -> Training:
    """All ranks evaluate on the same rows between steps."""
    training = layouts.dp()

    def after_backward(training: Training) -> None:
        layouts.mean_of_gradients(training)
        training.net.eval()
        with torch.no_grad():
            training.call(torch.arange(16).view(2, 8))
        training.net.train()

    training.after_backward = after_backward
    return training


CLEAN = {
    f.__name__: f
    for f in (
        dropout_dp,
        dropout_tp,
        batch_norm_ddp,
        zero_biases_tp,
        zero_biases_ep,
        accumulated_ddp,
        evaluated_alike,
    )
}


# ---- faults


def _after(change: Callable[[Training, int], None], make: Make = layouts.dp) -> Make:
    """Something else between the backward pass and the step, by the number of the step."""

    def made() -> Training:
        training = make()
        steps = iter(range(100))
        training.after_backward = lambda t: change(t, next(steps))
        return training

    return made


def _other_start() -> Training:
    net = Net()
    torch.manual_seed(dist.get_rank())
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    return _by_hand(net)


def _one_not_reduced(training: Training, step: int) -> None:
    for name, parameter in training.net.named_parameters():
        if name != "layers.1.mlp.up.weight":
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _one_more(training: Training, step: int) -> None:
    if dist.get_rank() == 1 and step == 1:
        dist.all_reduce(torch.ones(32, 16))
    layouts.mean_of_gradients(training)


def _in_another_order(training: Training, step: int) -> None:
    attention = training.net.layers[0].attn
    pair = [attention.q.weight, attention.k.weight]
    rest = [p for p in training.net.parameters() if all(p is not one for one in pair)]
    for parameter in (*(reversed(pair) if dist.get_rank() == 1 else pair), *rest):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _other_operation(training: Training, step: int) -> None:
    op = dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM
    for parameter in training.net.parameters():
        dist.all_reduce(parameter.grad, op=op)
        parameter.grad /= dist.get_world_size()


def _other_dtype(training: Training, step: int) -> None:
    for parameter in training.net.parameters():
        gradient = parameter.grad
        dist.all_reduce(gradient.view(torch.int32) if dist.get_rank() == 1 else gradient)
        gradient /= dist.get_world_size()


def _changed(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    if dist.get_rank() == 1 and step == 1:
        with torch.no_grad():
            training.net.layers[1].attn.o.weight[0, 0] += 1e-3


def _state_cleared(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    if dist.get_rank() == 0 and step == 2:
        weight = training.net.layers[0].mlp.down.weight
        training.optimizer.state[weight]["exp_avg"].zero_()


def _other_clipping(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    limit = 0.1 if dist.get_rank() == 0 else 0.5
    nn.utils.clip_grad_norm_(training.net.parameters(), limit)


class _Over(Exception):
    pass


def _fewer_steps(training: Training, step: int) -> None:
    if dist.get_rank() == 1 and step == 2:
        raise _Over
    layouts.mean_of_gradients(training)


def faults_of_one_run() -> Iterator[OneRunFault]:
    """All of them; those held out were planted after the rules had been written."""
    yield from _used_for_the_rules(RankCause)
    yield from _held_out(RankCause)


def _used_for_the_rules(c: type[RankCause]) -> Iterator[OneRunFault]:
    yield OneRunFault("no broadcast at the start", _other_start, c.OTHER_START, "different values")
    yield OneRunFault(
        "DDP: no_sync left on", faults.no_sync, c.NOT_REDUCED, "takes its own.*not reduced"
    )
    yield OneRunFault(
        "one gradient not reduced",
        _after(_one_not_reduced),
        c.NOT_REDUCED,
        r"layers\.1\.mlp\.up\.weight: each of ranks 0 and 1",
    )
    yield OneRunFault(
        "reduced in pairs",
        faults.in_pairs,
        c.OTHER_GROUP,
        "over ranks 0 and 1 and over ranks 2 and 3",
        ranks=4,
    )
    yield OneRunFault(
        "another learning rate",
        faults.other_learning_rate,
        c.OTHER_SETTING,
        "lr is 0.01 on rank 0, 0.02 on rank 1",
    )
    yield OneRunFault(
        "DP: the same dropout",
        lambda: _seeded(_by_hand(_with_dropout(Net())), 5),
        c.SAME_SEED,
        "the same random numbers",
    )
    yield OneRunFault(
        "TP: another dropout on each rank",
        lambda: _seeded(dropout_tp(), 5 + dist.get_rank()),
        c.OTHER_SEED,
        r"different random numbers.*layers\.0\.norm2",
    )
    yield OneRunFault("the same rows", faults.same_rows, c.SAME_ROWS, "train on the same rows")
    yield OneRunFault(
        "one more all_reduce",
        _after(_one_more),
        c.OTHER_SEQUENCE,
        "rank 1 issues one more",
        hangs=True,
    )
    yield OneRunFault(
        "two all_reduces in another order",
        _after(_in_another_order),
        c.MIXED_UP,
        "what rank 0 takes for it, rank 1 takes for that of",
    )
    yield OneRunFault(
        "another operation", _after(_other_operation), c.OTHER_SEQUENCE, r"\(max\).*\(sum\)|\(sum\)"
    )
    yield OneRunFault("another dtype", _after(_other_dtype), c.OTHER_SEQUENCE, "int32")
    yield OneRunFault(
        "buffers of batch norm",
        lambda: _by_hand(_with_batch_norm(Net())),
        c.NOT_SYNCHRONISED,
        "running_mean",
    )
    yield OneRunFault(
        "a parameter changed at step 1",
        _after(_changed),
        c.CHANGED,
        r"layers\.1\.attn\.o\.weight: changed on rank 1",
    )
    yield OneRunFault(
        "TP: gradient of a norm not reduced",
        faults.gradient_of_input_not_reduced,
        c.NOT_REDUCED,
        r"layers\.1\.norm2\.weight",
    )
    yield OneRunFault(
        "state of the optimizer cleared",
        _after(_state_cleared),
        c.OTHER_STATE,
        r"exp_avg of layers\.0\.mlp\.down\.weight",
    )
    yield OneRunFault(
        "another limit of clipping", _after(_other_clipping), c.OTHER_SETTING, "0.1 on rank 0"
    )
    yield OneRunFault(
        "one rank ends early",
        _after(_fewer_steps),
        c.NOT_JOINED,
        "rank 1 does not join",
        hangs=True,
    )


# ---- planted after the rules were written


def _own_root(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    for name, buffer in training.net.named_buffers():
        if name.endswith("running_mean"):
            dist.broadcast(buffer, dist.get_rank())


def _schedule_on_one_rank(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    if dist.get_rank() == 0 and step:
        training.optimizer.param_groups[0]["lr"] *= 0.9


def _other_betas(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    if dist.get_rank() == 1:
        training.optimizer.param_groups[0]["betas"] = (0.9, 0.95)


def _fsdp_same_rows() -> Training:
    training = layouts.fsdp()
    training.rows = lambda whole: whole.chunk(dist.get_world_size())[0]
    return training


def _over_the_other_group() -> Training:
    made: list[Any] = []
    training = layouts.dp_tp(made.append)
    training.after_backward = lambda t: layouts.mean_of_gradients(t, made[0])
    return training


def _barrier_on_one_rank(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    if dist.get_rank() == 0 and step == 1:
        dist.barrier()


def _clipped_on_one_rank(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    if dist.get_rank() == 0:
        nn.utils.clip_grad_norm_(training.net.parameters(), 0.1)


def _half_sent() -> Training:
    training = layouts.pp()
    send = dist.send

    def run(training: Training, ids: torch.Tensor, labels: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            out = training.call(ids)
            send(out.detach().bfloat16(), 1)
            return
        x = torch.empty(*ids.shape, 16)
        dist.recv(x, 0)
        training.loss(training.call(x), labels).backward()

    training.run = run
    return training


def _cleared_on_one_rank(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    if dist.get_rank() == 1:
        training.net.layers[0].attn.v.weight.grad.zero_()


def _other_norm_in_tp() -> Training:
    net = layouts.cut(Net(), Parallel())
    if dist.get_rank() == 1:
        net.layers[0].norm1.weight.data *= 1.01
    return Training(net, net)


def _other_sizes_in_another_order(training: Training, step: int) -> None:
    parameters = list(training.net.parameters())
    if dist.get_rank() == 1 and step == 1:
        parameters[0], parameters[1] = parameters[1], parameters[0]
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _buffers_not_broadcast() -> Training:
    net = _with_batch_norm(Net())
    call = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    return Training(net, call, layouts.rows_of_rank)


def _one_step_more(training: Training, step: int) -> None:
    layouts.mean_of_gradients(training)
    if dist.get_rank() == 1 and step == 1:
        training.optimizer.step()


def _held_out(c: type[RankCause]) -> Iterator[OneRunFault]:
    def held_out(
        title: str, make: Make, cause: RankCause, words: str, ranks: int = 2, *, hangs: bool = False
    ) -> OneRunFault:
        return OneRunFault(title, make, cause, words, ranks, hangs, held_out=True)

    yield held_out(
        "DDP: a parameter is ignored", faults.ignored, c.NOT_REDUCED, r"layers\.1\.norm2\.weight: "
    )
    yield held_out(
        "each rank broadcasts its own",
        _after(_own_root, lambda: _by_hand(_with_batch_norm(Net()))),
        c.OTHER_SEQUENCE,
        "broadcast from rank",
        hangs=True,
    )
    yield held_out(
        "a schedule on one rank", _after(_schedule_on_one_rank), c.OTHER_SETTING, "lr is 0.009"
    )
    yield held_out("other betas", _after(_other_betas), c.OTHER_SETTING, "0.95")
    yield held_out("FSDP2: the same rows", _fsdp_same_rows, c.SAME_ROWS, "same rows")
    yield held_out(
        "DP over the group of TP", _over_the_other_group, c.OTHER_GROUP, "reduced over", 4
    )
    yield held_out(
        "a barrier on one rank",
        _after(_barrier_on_one_rank),
        c.OTHER_SEQUENCE,
        "one more than rank 1: barrier|is barrier",
        hangs=True,
    )
    yield held_out(
        "clipping on one rank",
        _after(_clipped_on_one_rank),
        c.OTHER_SETTING,
        "0.1 on rank 0, None on rank 1",
    )
    yield held_out(
        "PP: a message of another dtype",
        _half_sent,
        c.OTHER_SEQUENCE,
        "message 0 from rank 0 to rank 1 is bfloat16",
        hangs=True,
    )
    yield held_out(
        "a gradient cleared on one rank",
        _after(_cleared_on_one_rank),
        c.NOT_REDUCED,
        r"layers\.0\.attn\.v\.weight: rank 1 has another",
        4,
    )
    yield held_out(
        "one weight starts from others",
        faults.other_weights,
        c.OTHER_START,
        r"layers\.0\.mlp\.up\.weight: ranks 0 and 1 start",
    )
    yield held_out(
        "TP: a norm starts from others", _other_norm_in_tp, c.OTHER_START, r"layers\.0\.norm1"
    )
    yield held_out(
        "DP: the same dropout on two of four",
        lambda: _seeded(_by_hand(_with_dropout(Net())), 5 + dist.get_rank() % 2),
        c.SAME_SEED,
        "ranks 0",
        4,
    )
    yield held_out(
        "all_reduces of other sizes in another order",
        _after(_other_sizes_in_another_order),
        c.OTHER_SEQUENCE,
        "another order",
        hangs=True,
    )
    yield held_out(
        "DDP: buffers not broadcast", _buffers_not_broadcast, c.NOT_SYNCHRONISED, "running_mean"
    )
    yield held_out(
        "one step more on a rank",
        _after(_one_step_more),
        c.OTHER_COUNT,
        "rank 1 4",
        hangs=True,
    )
