"""An MLP, on one process or split over the ranks of torchrun; --broken scales the part of rank 1."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

WIDTH, HIDDEN = 16, 32
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group("gloo")


class Up(nn.Linear):
    """Its outputs are split over the ranks."""


class Down(nn.Linear):
    """Its inputs are split over the ranks, whose parts are summed."""

    def forward(self, x):
        part = nn.functional.linear(x, self.weight)
        if "--broken" in sys.argv and rank == 1:
            part = part * 0.97
        if world > 1:
            dist.all_reduce(part)
        return part


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = Up(WIDTH, HIDDEN // world, bias=False)
        self.down = Down(HIDDEN // world, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


model = MLP().eval()
torch.manual_seed(0)
up, down = torch.randn(HIDDEN, WIDTH) / 4, torch.randn(WIDTH, HIDDEN) / 4
with torch.no_grad():
    model.up.weight.copy_(up.chunk(world)[rank])
    model.down.weight.copy_(down.chunk(world, 1)[rank])
    model(torch.randn(4, WIDTH))
if world > 1:
    dist.destroy_process_group()
