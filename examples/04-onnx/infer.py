"""The torch model."""

import torch
from net import make

model, image = make()
with torch.no_grad():
    model(image)
