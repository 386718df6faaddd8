"""Tensor parallelism, sequence parallelism and FSDP of torch itself, on two real processes, against
the same model on one.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

import warm
import whence
from whence.store import open_run

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

NET = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.layers = nn.Embedding(20, 8), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.arange(12).reshape(2, 6)
"""

RANK = """
import os, sys
import torch.distributed as dist
from net import IDS, Net, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module
import whence

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def tp(net):
    for layer in net.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def sequence(net):
    apart = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}
    apart["down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    for layer in net.layers:
        parallelize_module(layer, mesh, apart)
    first = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(net, mesh, {"emb": first, "head": head})


def fsdp(net):
    for module in (*(m for layer in net.layers for m in (layer.up, layer.down, layer)), net):
        fully_shard(module, mesh=mesh)
    return net


def ran(net, ids, training):
    with CommDebugMode() as comms:
        out = net(ids)
        if training:
            with loss_parallel():
                torch.nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
    grads = [p.grad.to_local().clone() for p in net.parameters()] if training else []
    return getattr(out, "_local_tensor", out).detach().clone(), grads, dict(comms.get_comm_counts())


for name, make in (("tp", tp), ("sequence", sequence), ("fsdp", fsdp), ("wrong", tp)):
    net, training = make(Net()), name == "sequence"
    ids = IDS.chunk(2)[rank] if name == "fsdp" else IDS
    if name == "wrong" and rank == 1:
        net.layers[1].up.weight._local_tensor.data[2] *= 1.5
    with torch.set_grad_enabled(training):
        ran(net, ids, training)  # the first one also sets up what FSDP needs
        net.zero_grad()
        plain = ran(net, ids, training)
        net.zero_grad()
        with whence.capture(net, f"{name}.{rank}"):
            seen = ran(net, ids, training)
    assert torch.equal(plain[0], seen[0]) and plain[2] == seen[2], name
    assert len(plain[1]) == len(seen[1]) and all(map(torch.equal, plain[1], seen[1])), name
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "net.py").write_text(NET)
    (folder / "rank.py").write_text(textwrap.dedent(RANK))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    command = [warm.TORCH, "rank.py", str(folder / "store")]
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**env, "RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in (0, 1)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert "capture stopped" not in "".join(said)
    for name in (
        "tp",
        "sequence",
        "fsdp",
        "wrong",
    ):  # what `whence run` does of itself: the ranks in one folder
        shutil.move(
            next((folder / f"{name}.1").glob("rank00001-*")),
            (folder / f"{name}.0").rename(folder / name),
        )
    room = runpy.run_path(str(folder / "net.py"))
    with torch.no_grad(), whence.capture(net := room["Net"](), folder / "reference"):
        net(room["IDS"])
    return folder


@pytest.mark.parametrize("name", ["tp", "sequence", "fsdp"])
def test_the_ranks_are_the_same_as_one_process(runs, name):
    found = whence.compare(runs / "reference", runs / name)
    assert (found.status, found.findings) == ("same", ())
    assert found.coverage.measured == found.coverage.calls


def test_a_fault_in_the_piece_of_one_rank_is_named(runs):
    found = whence.compare(runs / "reference", runs / "wrong")
    first = found.findings[0]
    assert (found.status, first.name, first.slot, first.cause) == (
        "different",
        "layers.1.up",
        "param.weight",
        "parameter",
    )
    assert "rank 1" in first.sentence or "row 8" in first.sentence


def test_a_piece_is_recorded_with_its_place(runs):
    own = open_run(runs / "sequence")
    head = next(c for c in own.calls if c.scope == "head" and c.rank == 1)
    records = {r.slot: own.records[r.record] for r in head.refs}
    assert (records["param.weight"].shape, records["param.weight"].subclass) == ((10, 8), "DTensor")
    weight, out = head.placements["param.weight"], head.placements["output.0"]
    assert (weight.shape, weight.mesh, weight.ranks, weight.places, weight.names) == (
        (20, 8),
        (2,),
        (0, 1),
        ("shard 0",),
        ("tp",),
    )
    assert (out.shape, out.places, records["output.0"].shape) == (
        (2, 6, 20),
        ("shard 2",),
        (2, 6, 10),
    )


def test_what_the_program_says_is_not_guessed(runs, monkeypatch):
    """Without the placements, how the pieces lie must be found out from their elements: with them,
    no element is needed for it.
    """
    from whence.align.ranks import join

    asked: list[str] = []
    guess = join.between
    monkeypatch.setattr(join, "between", lambda *given: asked.append("") or guess(*given))
    whence.compare(runs / "reference", runs / "sequence")
    with_placements = len(asked)
    asked.clear()
    from whence.align.ranks.groups import Side

    monkeypatch.setattr(Side, "placements", lambda *_: [])
    whence.compare(runs / "reference", runs / "sequence")
    assert with_placements < len(asked)
