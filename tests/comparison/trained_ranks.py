"""Trainings of a small model on two ranks of gloo, as a program: each is captured into a folder of
its own, and must leave the parameters that it leaves without a capture.
"""

import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import whence

WIDTH, ROWS, STEPS = 8, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Placed(nn.Module):
    """A model that learns where its inputs stand. With one row a rank, the gradient of that is the
    very tensor that is the gradient of what it is added to.
    """

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.tokens, self.places = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x):
        return self.net(self.tokens(x) + self.places(torch.arange(5)[None]))


class Task(nn.Module):
    """A model and its loss, each called from outside, as frameworks' tasks are written."""

    def __init__(self):
        super().__init__()
        self.net, self.criterion = Net(), nn.MSELoss()


class Squares(nn.Module):
    """A loss of one's own."""

    def forward(self, out, wanted):
        return (out - wanted).square().mean()


class Half(nn.Module):
    """The first or the second stage of a pipeline."""

    def __init__(self, whole, rank):
        super().__init__()
        self.layers = nn.ModuleDict({str(rank): whole.layers[rank]})
        self.head = whole.head if rank else None

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


SQUARES = Squares()


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, WIDTH, generator=draw), torch.randn(ROWS, 5, 3, generator=draw)


def rows(whole):
    return whole.chunk(2)[dist.get_rank()]


def plain(call, net, x, y):
    nn.functional.mse_loss(call(x), y).backward()


def cut(call, net, x, y):
    plain(call, net, rows(x), rows(y))


def placed(call, net, x, y):
    x, y = x[:2], y[:2]
    plain(call, net, *((rows(x), rows(y)) if dist.is_initialized() else (x, y)))


def criterion(call, net, x, y):
    nn.MSELoss()(call(rows(x)).flatten(0, 1), rows(y).flatten(0, 1)).backward()


def scaled_task(call, net, x, y):
    (net.criterion(call(x), y) / 4).backward()


def cut_scaled_task(call, net, x, y):
    scaled_task(call, net, rows(x), rows(y))


def task(call, net, x, y):
    net.criterion(call(x), y).backward()


def cut_task(call, net, x, y):
    task(call, net, rows(x), rows(y))


def from_outside(call, net, x, y):
    if dist.is_initialized():
        x, y = rows(x), rows(y)
    (SQUARES(call(x), y) / 4).backward()


def unsynced_criterion(call, net, x, y):
    with call.no_sync():
        criterion(call, net, x, y)


def unsynced(call, net, x, y):
    with call.no_sync():
        cut(call, net, x, y)


def summed(call, net, x, y):
    cut(call, net, x, y)
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)


def staged(call, net, x, y):
    if dist.get_rank():
        x = torch.empty_like(x)
        dist.recv(x, 0)
        plain(call, net, x.requires_grad_(), y)
        dist.send(x.grad, 0)
    else:
        out = call(x)
        dist.send(out.detach(), 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, 1)
        out.backward(gradient)


def mean_of_squares(out, wanted):
    return nn.functional.mse_loss(out, wanted)


def in_micro_batches(call, net, x, y):
    for part, wanted in zip(x.chunk(ROWS), y.chunk(ROWS), strict=True):
        (mean_of_squares(call(part), wanted) / ROWS).backward()


def scheduled(scale=True):
    """The two stages of a pipeline as torch runs them."""
    net, rank = Half(Net(), dist.get_rank()), dist.get_rank()
    stage = PipelineStage(net, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, ROWS, mean_of_squares, scale_grads=scale)

    def run(call, net, x, y):
        schedule.step(target=y) if rank else schedule.step(x)

    return net, net, run


def sharded():
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, net, cut


def parallel():
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for layer in net.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, net, plain


def replicated(run):
    net = Net()
    return net, nn.parallel.DistributedDataParallel(net), run


def replicated_task(run):
    net = Task()
    return net, nn.parallel.DistributedDataParallel(net.net), run


def replicated_placed():
    net = Placed()
    return net, nn.parallel.DistributedDataParallel(net), placed


def by_hand(run, net):
    return net, net, run


RUNS = {
    "ddp": lambda: replicated(cut),
    "criterion": lambda: replicated(criterion),
    "fsdp": sharded,
    "tp": parallel,
    "scheduled": scheduled,
    "not_scaled": lambda: scheduled(scale=False),
    "pp": lambda: by_hand(staged, Half(Net(), dist.get_rank())),
    "placed": replicated_placed,
    "task": lambda: replicated_task(cut_task),
    "scaled_task": lambda: replicated_task(cut_scaled_task),
    "unsynced": lambda: replicated(unsynced),
    "unsynced_criterion": lambda: replicated(unsynced_criterion),
    "summed": lambda: by_hand(summed, Net()),
}


def train(net, call, run):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        run(call, net, *batch(step))
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in net.parameters()]


def on_rank(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, make in RUNS.items():
        bare = train(*make())
        made = make()
        with whence.capture(made[0], f"{folder}/{name}"):
            seen = train(*made)
        assert all(map(torch.equal, bare, seen)), name
    dist.destroy_process_group()


def program(rank=None, store=None):
    """A whole program, for `whence run`: the loss is a class of its own, scaled behind its call."""
    torch.set_num_threads(1)
    net = Net()
    if rank is None:
        train(net, net, from_outside)
        return
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(net, nn.parallel.DistributedDataParallel(net), from_outside)
    dist.destroy_process_group()


def on_two_ranks(run):
    """Run `run(rank, store)` in two forks; returns the worst exit code."""
    children, store = [], tempfile.mkdtemp() + "/store"
    for rank in range(2):
        child = os.fork()
        if not child:
            code = 1
            try:
                run(rank, store)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children)


def captures(folder):
    """Capture every training; returns the worst exit code of its ranks."""
    net = Net()
    with whence.capture(net, f"{folder}/one"):
        train(net, net, plain)
    net = Net()
    with whence.capture(net, f"{folder}/one_in_micro_batches"):
        train(net, net, in_micro_batches)
    net = Placed()
    with whence.capture(net, f"{folder}/one_placed"):
        train(net, net, placed)
    for name, run in {"task": task, "scaled_task": scaled_task}.items():
        net = Task()
        with whence.capture(net, f"{folder}/one_{name}"):
            train(net, net.net, run)
    return on_two_ranks(lambda rank, store: on_rank(rank, store, folder))


if __name__ == "__main__":
    match sys.argv[1]:
        case "program":
            program()
        case "program-on-ranks":
            mp.spawn(program, (tempfile.mkdtemp() + "/store",), 2)
        case folder:
            raise SystemExit(captures(folder))
