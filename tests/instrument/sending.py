"""Two processes of gloo that send in every way, captured or not: prints what the first receives."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

import whence


def everything(net, x):
    held = [x.clone() for _ in range(3)]
    dist.all_reduce(held[0])
    work = dist.all_reduce(held[1], op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    dist.broadcast(held[2], 1)
    gathered = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(gathered, x)
    piece = torch.empty(1, 4)
    dist.reduce_scatter_tensor(piece, x.clone())
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x)
    summed = functional.all_reduce(x, "sum", dist.group.WORLD)
    other, taken = 1 - dist.get_rank(), torch.empty_like(x)
    messages = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, taken, other)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    dist.barrier()
    parallel = nn.parallel.DistributedDataParallel(net)
    parallel(x).sum().backward()
    grads = [p.grad for p in net.parameters()]
    return torch.cat([t.flatten() for t in (*held, *gathered, piece, swapped, summed + 0, taken)]
                     + [g.flatten() for g in grads])  # fmt: skip


def recorded(folder, rank):
    return sum(c.rank == rank for c in whence.open_run(folder).collectives)


def run(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.randn(2, 4) + rank
    bare = everything(net, x)
    net.zero_grad()
    with whence.capture(net, folder):
        seen = everything(net, x)
    assert torch.equal(bare, seen)
    before = recorded(folder, rank)
    dist.all_reduce(x)
    assert recorded(folder, rank) == before > 0  # the capture has ended
    dist.destroy_process_group()


if __name__ == "__main__":
    store = Path(tempfile.mkdtemp()) / "store"
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            run(rank, store, sys.argv[1])
            sys.exit()
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(ended))
