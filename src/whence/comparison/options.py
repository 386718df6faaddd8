"""What the caller of a comparison chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from whence import align
from whence.comparison.compared_tensors import ComparedTensors
from whence.comparison.replays.user_model import Models
from whence.engines import Engine
from whence.judge.policy import Policy


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How two runs are compared.

    replay: run the reference's programs on the target's inputs where they are usable. tier: how
    much is measured per pair. rtol, atol: for the `close_share` column only; no verdict is based on
    them. allow: vendor namespaces whose operators may be replayed. policy: declared differences.
    match: by which rules calls are paired (`align.plan`). chart: which calls are paired, as the
    user says. sample: "all" replays every call, "auto" a few steps of many and what stands out.
    budget: seconds for all replays. threads: for measuring; None takes all cores. progress: called
    with (done, of, what). model: the user's own, for calls of the reference without a usable
    program. views: of other tools, by name. occurrences: count the executions of each operator,
    also where calls are modules. stated: labels are paired because the program says so, and nothing
    tells what lies between (`judge.stated`). engine: workers for what takes long; None does all in
    this process. compared: what comparisons of earlier steps have judged, which is no finding of
    this one; what this one judges is added. partial: runs that end early, lack ranks or hold files
    that cannot be read may be the same in what is there. ignore: patterns of file names (`fnmatch`,
    relative to a run) that need not be read.
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
    compared: ComparedTensors | None = field(default=None, compare=False)
    progress: Callable[[int, int, str], None] | None = field(default=None, compare=False)
    engine: Engine | None = field(default=None, compare=False)
