"""A small network, with --compile through torch.compile; --broken scales what its compiled sigmoid computes."""

import sys

import torch
import torch._inductor.config
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.Sigmoid(), nn.Linear(32, 4)).eval()
torch._inductor.config.force_disable_caches = True  # each variant is compiled anew
if "--broken" in sys.argv:  # a compiler with a fault
    from torch._inductor.lowering import lowerings

    aten = torch.ops.aten
    sigmoid, scaled = lowerings[aten.sigmoid.default], lowerings[aten.mul.Tensor]
    lowerings[aten.sigmoid.default] = lambda x: scaled(sigmoid(x), 1.01)
if "--compile" in sys.argv:
    model = torch.compile(model)
with torch.no_grad():
    print(model(torch.linspace(-1, 1, 64).reshape(4, 16)).sum().item())
