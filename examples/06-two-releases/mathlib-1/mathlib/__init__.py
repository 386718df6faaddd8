"""Release 1 of a library of layers."""

import torch
from torch import nn

__version__ = "1"


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.up(x)
