"""A small decoder, whole or cut over ranks as Megatron cuts it, with faults of many ranks to plant.
As a program: spawns its ranks.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, TOKENS, VOCABULARY, LAYERS = 64, 4, 24, 96, 3


class Norm(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + torch.randn(WIDTH) / 10), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        return self.o_proj((scores @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.after = None

    def forward(self, x):
        out = self.down(self.act(self.up(x)))
        return self.after(out) if self.after is not None else out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = Norm(), Attention(HEADS), Norm(), Mlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def ids():
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def total(y, fault=""):
    """The sum over ranks, or what a fault makes of it."""
    if fault == "lost":  # rank 0 goes on with twice its own
        y = y * 2 if dist.get_rank() == 0 else torch.zeros_like(y)
    if fault != "no_sum":
        y = y.clone()
        dist.all_reduce(y)
    if fault == "twice":
        dist.all_reduce(y)
    return y / dist.get_world_size() if fault == "mean" else y


class Rows(nn.Module):
    """A Linear of which this rank holds some of the inputs."""

    def __init__(self, whole, fault, summed, tokens=False):
        super().__init__()
        self.tokens = tokens  # leave this rank's part of the tokens only
        n, rank = dist.get_world_size(), dist.get_rank()
        self.weight, self.bias = (
            nn.Parameter(whole.weight.detach().chunk(n, 1)[rank].clone()),
            whole.bias,
        )
        self.fault, self.summed = fault, summed

    def forward(self, x):
        if self.fault == "bias":
            return total(F.linear(x, self.weight, self.bias))
        y = F.linear(x, self.weight)
        if not self.summed:  # added up later; the bias once, on rank 0
            return y + self.bias if dist.get_rank() == 0 else y
        y = total(y, self.fault) + self.bias
        return y.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() if self.tokens else y


def gathered(y, axis, *, backwards=False):
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y.contiguous())
    return torch.cat(parts[::-1] if backwards else parts, axis)


class TokenNorm(Norm):
    """A norm of this rank's tokens that leaves those of all."""

    def forward(self, x):
        return gathered(super().forward(x), 1)


class Vocabulary(nn.Module):
    """An embedding of which this rank holds some of the rows."""

    def __init__(self, whole, fault, tokens):
        super().__init__()
        n, rank = dist.get_world_size(), dist.get_rank()
        self.weight, self.fault, self.tokens = (
            nn.Parameter(whole.weight.detach().chunk(n, 0)[rank].clone()),
            fault,
            tokens,
        )
        self.first = rank * len(self.weight)

    def forward(self, ids):
        mine = (ids >= self.first) & (ids < self.first + len(self.weight))
        y = F.embedding((ids - self.first) * mine, self.weight) * mine[..., None]
        y = total(y, self.fault)
        return y.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() if self.tokens else y


class Gathered(nn.Module):
    """A Linear of which this rank holds some of the outputs, and which leaves all of them."""

    def __init__(self, whole, fault):
        super().__init__()
        n, rank = dist.get_world_size(), dist.get_rank()
        self.weight, self.fault = (
            nn.Parameter(whole.weight.detach().chunk(n, 0)[rank].clone()),
            fault,
        )

    def forward(self, x):
        return gathered(F.linear(x, self.weight), -1, backwards=self.fault == "order")


FAULTS = (
    "clean",
    "later",
    "tokens",
    "vocabulary",
    "no_sum",
    "lost",
    "twice",
    "mean",
    "bias",
    "order",
    "shard",
    "one_rank",
)


def cut(net, fault):
    """The same net over the ranks of the process group; faults lie in layer 1."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for number, layer in enumerate(net.layers):
        here = fault if number == 1 else ""
        for name, part in [
            ("q_proj", layer.attn),
            ("k_proj", layer.attn),
            ("v_proj", layer.attn),
            ("up", layer.mlp),
        ]:
            linear = getattr(part, name)
            mine = 0 if here == "shard" and name == "up" else rank
            linear.weight = nn.Parameter(linear.weight.detach().chunk(n, 0)[mine].clone())
            linear.bias = nn.Parameter(linear.bias.detach().chunk(n, 0)[rank].clone())
        layer.attn.heads //= n
        layer.attn.o_proj = Rows(layer.attn.o_proj, "", summed=True, tokens=fault == "tokens")
        if fault == "later":
            layer.mlp.after = total
        layer.mlp.down = Rows(
            layer.mlp.down, here, summed=fault != "later", tokens=fault == "tokens"
        )
        if here == "one_rank" and rank == 1:
            layer.norm2.eps = 0.05
        if fault == "tokens":
            for name in ("norm1", "norm2"):
                getattr(layer, name).__class__ = TokenNorm
    if fault == "tokens":
        net.norm.__class__ = TokenNorm
    if fault in ("tokens", "vocabulary"):
        net.embed = Vocabulary(
            net.embed, "no_sum" if fault == "vocabulary" else "", fault == "tokens"
        )
    net.head = Gathered(net.head, fault)
    return net


def rank_main(rank, world, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with torch.no_grad():
        for fault in FAULTS:
            kind = type(fault, (Net,), {})
            cut(kind(), fault).eval()(ids())
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 3:
        rank_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        world, store = sys.argv[1:]
        # Launchers hand on an environment of their own making.
        own = dict(os.environ, PYTHONPATH=os.environ.get("PROGRAM_PATH", ""))
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(r), world, store], env=own)
            for r in range(int(world))
        ]
        raise SystemExit(max([rank.wait(240) for rank in ranks]))
