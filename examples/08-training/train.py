"""A training of twelve steps; with --new the optimiser decays weights that it should leave alone, from step 5 on."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
inputs = torch.randn(64, 8)
labels = inputs.prod(1, keepdim=True)
for step in range(12):
    if step == 5 and "--new" in sys.argv:
        optimizer.param_groups[0]["weight_decay"] = 0.5
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), labels)
    loss.backward()
    optimizer.step()
print(loss.item())
