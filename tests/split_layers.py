"""Layers that compute the same in three parts, so that their results and gradients round in another
order.
"""

import torch
from torch import nn


class InParts(nn.Linear):
    """Each part uses the weight."""

    def forward(self, x):
        return torch.cat([super(InParts, self).forward(part) for part in x.split(24)])


def run_in_parts(model):
    """Let every linear layer of a model run in parts."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = InParts
