"""Dumps the outputs of modules with a hook of a few lines, where whence is not installed: python dump.py FOLDER [--port]"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 4)
).eval()
if "--port" in sys.argv:
    model[1].beta = 1.05  # the fault
folder = Path(sys.argv[1], "step0", "rank0")
folder.mkdir(parents=True)


def save(number, name):
    def hook(_, inputs, output):
        np.save(folder / f"{number:05}_{name}.input.0.npy", inputs[0].numpy())
        np.save(folder / f"{number:05}_{name}.output.0.npy", output.numpy())

    return hook


for number, (name, module) in enumerate(model.named_children()):
    module.register_forward_hook(save(number, f"layer{name}"))
with torch.no_grad():
    model(torch.randn(4, 16))
