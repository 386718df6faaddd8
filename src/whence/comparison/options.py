"""What the caller of a comparison chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whence import align
    from whence.comparison.replays.user_model import Models
    from whence.engines import Engine
    from whence.judge.policy import Policy


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How two runs are compared. Fields named like arguments of `whence.compare` are these, read.

    rtol, atol: for the `close_share` column only; no verdict is based on them. chart: which calls
    are paired, as the user says. threads: for measuring; None takes all cores. model: the user's
    own, for calls of the reference without a usable program. views: of other tools, by name.
    stated: labels are paired because the program says so, and nothing tells what lies between
    (`judge.stated`). engine: workers for what takes long; None does all in this process.
    """

    replay: bool = True
    strict: bool = False
    min_coverage: float = 0.9
    tier: str = "full"
    rtol: float = 1e-3
    atol: float = 1e-5
    allow: tuple[str, ...] = ()
    threads: int | None = None
    match: str = "auto"
    sample: str = "auto"
    budget: float | None = None
    policy: Policy | None = None
    chart: align.Map | None = None
    model: Models | None = None
    views: tuple[str, ...] = ()
    stated: bool = False
    partial: bool = False
    ignore: tuple[str, ...] = ()
    occurrences: bool = False
    progress: Callable[[int, int, str], None] | None = field(default=None, compare=False)
    engine: Engine | None = field(default=None, compare=False)
