"""Finds by bisection the call at which half of the squared error at the output has arisen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from whence.errors import UsageError
from whence.instrument.patch_points import outputs_of
from whence.readers.opening import open_run
from whence.workflows.locate.output_error import Errors, output_errors, squared_error
from whence.workflows.locate.patched_runs import PatchedRuns, explained

if TYPE_CHECKING:
    from whence.records import Call
    from whence.results import Explained


def search(runs: PatchedRuns, unpatched: Errors) -> tuple[list[Explained], list[Errors]]:
    """The shortest run of calls, in the order in which they end, whose patching takes away half of
    the squared error; (rounds, errors before them and after each).

    What a call returns depends on calls that ended before it and on its own code, so with
    everything before it right, the error that goes away with it arose in it. A call that lies in
    another one of the run needs no patch of its own.
    """
    sites = _sites(runs)
    whole = squared_error(unpatched.values())
    if whole is None or whole == 0:
        return [], [unpatched]
    probes = _Probes(runs, sites)
    low, high = -1, len(sites) - 1
    if probes.squared_error(high) > whole / 2:
        note = (
            "the error arises after every module has returned: in the root's own code, or "
            "where a call could not be patched"
        )
        last = msgspec.structs.replace(
            probes.rounds[high], name=f"all {len(sites)} modules", notes=(note,)
        )
        return [last], [unpatched, probes.errors[high]]
    while high - low > 1:
        middle = (low + high) // 2
        if probes.squared_error(middle) <= whole / 2:
            high = middle
        else:
            low = middle
    if low < 0:
        return [probes.rounds[high]], [unpatched, probes.errors[high]]
    probes.squared_error(low)
    earlier = msgspec.structs.replace(
        probes.rounds[low], name=f"the {low + 1} modules that return before it", points=(), notes=()
    )
    errors = [unpatched, probes.errors[low], probes.errors[high]]
    return [earlier, probes.rounds[high]], errors


def _sites(runs: PatchedRuns) -> list[Call]:
    """The first forward call of every module below a root, in the order in which they end."""
    first: dict[tuple[str, str], Call] = {}
    for call in runs.reference.calls:
        if call.parent != -1 and call.phase == "forward" and outputs_of(call):
            first.setdefault((call.root, call.scope), call)
    if not first:
        raise UsageError(f"{runs.path} holds no call below its root, so there is nothing to search")
    return list(first.values())


class _Probes:
    """Runs in which the first sites are patched, each run once. rounds, errors: by the index of the
    last site that is patched.
    """

    def __init__(self, runs: PatchedRuns, sites: Sequence[Call]) -> None:
        self._runs, self._sites = runs, sites
        self.rounds: dict[int, Explained] = {}
        self.errors: dict[int, Errors] = {}

    def squared_error(self, last: int) -> float:
        if last not in self.errors:
            self._run(last)
        square = squared_error(self.errors[last].values())
        return math.inf if square is None else square

    def _run(self, last: int) -> None:
        runs, sites = self._runs, self._sites
        runs.tell(f"bisecting {len(sites)} modules (run {runs.count + 1})")
        points = tuple(runs.point(c.root, c.scope) for c in _outermost(sites[: last + 1]))
        path = runs.capture(f"search-{last}", points, max_depth=0, programs=False)
        run = open_run(str(path))
        self.errors[last] = output_errors(runs.reference, run)
        scope = sites[last].scope
        self.rounds[last] = explained(scope, (runs.point(sites[last].root, scope),), run)
        runs.drop(path)


def _outermost(calls: Sequence[Call]) -> list[Call]:
    ids = {c.id for c in calls}
    return [c for c in calls if c.parent not in ids]
