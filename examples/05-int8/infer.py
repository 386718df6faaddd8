"""A network with one channel that is 300 times as large as the others: int8 per tensor loses the rest."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
).eval()
with torch.no_grad():
    model[0].weight[0] *= 300
    model[2].weight[:, 0] /= 300
    if "--int8" in sys.argv:  # weights on the grid of 8 bits, one scale a tensor
        for layer in (model[0], model[2], model[4]):
            step = layer.weight.abs().max() / 127
            layer.weight.copy_((layer.weight / step).round() * step)
    print(model(torch.randn(16, 32)).argmax(-1).tolist())
