"""Eight steps of an optimiser without a schedule."""

import torch
from pytorch_optimizer import ScheduleFreeRAdam
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = ScheduleFreeRAdam(model.parameters(), lr=1e-2)
optimizer.train()
data, labels = torch.randn(8, 16), torch.randint(4, (8,))
for _ in range(8):
    loss = nn.functional.cross_entropy(model(data), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
