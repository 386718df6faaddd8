"""The pairs of the other sets, with reentrant checkpoints in the target."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from _training.clean import Clean, checkpointed, pairs
from _training.faults import Fault, faults
from _training.fresh import fresh_faults, fresh_pairs
from _training.loss_places import both

_MODELS = ("llama", "vit", "gpt2", "t5")
"""Those that have checkpoints of their own. Not Mixtral: what its router computes without a graph
goes into the auxiliary loss, so that reentrant checkpoints are a fault there, which is found.
"""
_LEFT_OUT = re.compile("checkpoint|compiled|autograd.grad|RNG")
"""Other checkpoints, and what is not seen with or without them."""

_Case = TypeVar("_Case", Clean, Fault)


def recomputed_pairs() -> Iterator[Clean]:
    """Every pair that must not be flagged."""
    for case in (*pairs(), *fresh_pairs()):
        yield from _recomputed(case)


def recomputed_faults() -> Iterator[Fault]:
    """Every planted fault."""
    for case in (*faults(), *fresh_faults()):
        yield from _recomputed(case)


def _recomputed(case: _Case) -> Iterator[_Case]:
    if case.model in _MODELS and not _LEFT_OUT.search(case.words):
        target = both(case.target, checkpointed(reentrant=True))
        yield replace(case, words=f"{case.words}, in checkpoints", target=target)
