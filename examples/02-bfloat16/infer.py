"""A block in float32, with --bf16 in bfloat16, with --broken also with a norm that lost its epsilon."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 10)
).eval()
inputs = torch.randn(8, 64)
if "--bf16" in sys.argv:
    model, inputs = model.bfloat16(), inputs.bfloat16()
if "--broken" in sys.argv:
    model[3].eps = 1e-3
with torch.no_grad():
    print(model(inputs).argmax(-1).tolist())
