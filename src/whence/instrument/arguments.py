"""The options of a capture as keyword arguments in code, for type checkers: a misspelt one is
refused before the program runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, TypedDict

Slots = Literal["both", "input", "output"]
Keep = Literal["full", "stats", "none"]
Level = Literal["modules", "op", "graph", "logits", "io"]
GraphMode = Literal["exact", "deep", "fx"]
Positions = Literal["last", "all"]


class SharedArguments(TypedDict, total=False):
    """What every kind of capture takes. A single name stands for a list of one; sizes are bytes or
    text such as "20GB". logits: short for level="logits".
    """

    include: str | Iterable[str]
    exclude: str | Iterable[str]
    classes: str | Iterable[str]
    max_depth: int | None
    ids: str | Iterable[str]
    no_children: bool
    slots: Slots
    ranks: str | Iterable[int] | None
    keep: Keep
    max_bytes: str | int | None
    print_pattern: str | None
    seed: int | None
    deterministic: bool
    no_inputs: str | Iterable[str]
    programs: bool
    gradients: bool
    weights: str | Iterable[str]
    patch: str | Iterable[str]
    patch_from: str | os.PathLike[str]
    recompute: bool
    inject: str
    level: Level
    logits: bool
    logits_module: str
    positions: Positions
    force_tokens: str | os.PathLike[str]
    samples: int | None
    dedup: bool
    graph_mode: GraphMode
    graph_buffers: bool
    graph_anyway: bool
    rung: str
    disabled_optimizers: tuple[str, ...]


class StepsArgument(SharedArguments, total=False):
    """steps: which steps are captured, "START:STOP" or a pair, the stop excluded, or several.
    every: one of so many too. when, for_steps: what has the next steps recorded. ring:
    so many steps are kept in memory until something happens, in ring_size bytes.
    """

    steps: str | int | range | tuple[int, int | None] | Iterable[str] | None
    every: int | None
    when: str | Iterable[str]
    for_steps: int
    ring: int | None
    ring_size: str | int | None


class ForceArgument(SharedArguments, total=False):
    """force: replace an existing run."""

    force: bool


class CaptureArguments(StepsArgument, ForceArgument, total=False):
    """Keyword arguments of `whence.capture`, one for each field of `CaptureOptions`."""
