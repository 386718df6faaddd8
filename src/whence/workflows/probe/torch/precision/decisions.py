"""Discrete decisions that a run takes from computed numbers: which experts, what is above a limit.

Where a rounding changes one, the outputs jump; no sum of small errors says how far.
"""

from __future__ import annotations

from typing import Any

import torch

from whence.workflows.probe.torch.trace import Key, Trace

_DECIDE = (
    "topk", "argmax", "argmin", "max.dim", "min.dim", "kthvalue", "multinomial", "gt.", "ge.",
    "lt.", "le.",
)  # fmt: skip

Taken = dict[Key, torch.Tensor]
"""What each deciding operator chose: indices, or whether each element is above a limit."""


class Deciding(Trace):
    """A trace that keeps what a run decides, in `taken`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, begin=1 << 60, change=self._decided)
        self.taken: Taken = {}

    def _decided(self, key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        name = str(func).partition(".")[2]
        if name.startswith(_DECIDE) and args and args[0].is_floating_point():
            indices = out[-1] if isinstance(out, tuple) else out
            self.taken[key] = indices.detach().clone()
        return out


def changed(before: Taken, after: Taken) -> int:
    """How many rows chose otherwise; the order of what was chosen does not count."""
    count = 0
    for key, indices in before.items():
        other = after.get(key)
        if other is None or other.shape != indices.shape:
            count += 1
        elif indices.dim() and key[2].startswith("aten.topk"):
            a, b = indices.sort(-1).values, other.sort(-1).values
            count += int((a != b).any(-1).sum())
        else:
            count += int((indices != other).sum())
    return count


def words(taken: Taken) -> str:
    """ "aten.topk in model.layers.0.mlp.gate and 3 more": what decides, "" for nothing."""
    places = list(dict.fromkeys((key[2].removesuffix(".default"), key[0]) for key in taken))
    if not places:
        return ""
    operator, scope = places[0]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{operator} in {scope or 'the model itself'}{more}"
