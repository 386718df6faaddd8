"""The register of ways: a name -> a function that makes the other side of a pair."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from _zoo.sides import Side

Make = Callable[[Side, int], "Side | tuple[Side, Side]"]


@dataclass(frozen=True)
class Way:
    """dtypes: "float32", "bfloat16" (both sides) and "mixed" (the reference in float32, the other
    in bfloat16). same: how far results in float64 may be apart. kind: "call" (forward passes) or
    "training" (`Side.drive` trains). slow: compiles.
    """

    name: str
    make: Make
    dtypes: tuple[str, ...]
    kind: str = "call"
    slow: bool = False
    same: float = 1e-9


WAYS: dict[str, Way] = {}
ALL = ("float32", "bfloat16", "mixed")
# New weights are products of old ones, so that storing them in bfloat16 rounds them once more.
PRODUCTS = ("float32", "mixed")


def way(
    name: str,
    dtypes: tuple[str, ...] = ALL,
    kind: str = "call",
    slow: bool = False,
    same: float = 1e-9,
) -> Callable[[Make], Make]:
    """Register a way. It gets a side of its own and a seed, and returns the other side, or both."""

    def register(make: Make) -> Make:
        if name in WAYS:
            raise ValueError(name)
        WAYS[name] = Way(name, make, dtypes, kind, slow, same)
        return make

    return register


def load() -> dict[str, Way]:
    """All ways, by importing their files."""
    for subject in ("attention", "calls", "modules", "training", "weights", "ports", "trainers"):
        importlib.import_module(f"_zoo.ways_{subject}")
    return WAYS
