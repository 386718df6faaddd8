"""Compares two runs while they are still being written: after every step that both have finished,
until the result is final.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from whence.errors import UnreadableRun
from whence.records import Run
from whence.records.marks import WRITING
from whence.results import Comparison, Confidence, Status
from whence.workflows.notebook_progress import Tell
from whence.workflows.saved import AnyPath


class _Side(NamedTuple):
    """The current state of a run. ended_steps: (rank, root, step) of the finished steps."""

    run: Run
    writing: bool
    ended_steps: frozenset[tuple[int, str, int]]

    @property
    def last(self) -> int:
        """The last finished step, -1 before the first."""
        return max((step for *_, step in self.ended_steps), default=-1)


def watch(
    reference: AnyPath,
    target: AnyPath,
    *,
    output: AnyPath | None = None,
    force: bool = False,
    every: float = 1.0,
    tell: Tell | None = None,
    **how: Any,
) -> Iterator[Comparison]:
    """Compare two runs while one or both are still being written: yields comparisons, the last of
    which is the answer.

    Whenever a side has finished further steps, the steps that both have finished are compared; when
    nothing more is written, everything is. The last comparison is that one, or the first with a
    certain finding. A run that does not exist yet is waited for. every: seconds between two
    looks. output: a folder that holds the latest comparison. tell: called with what is waited for.
    how: arguments of `compare`. Raises what `compare` raises.
    """
    from whence.workflows.saved import check_output, write

    if output is not None:
        check_output(Path(output), force)
    for result in _looks(reference, target, every=every, tell=tell, **how):
        if output is not None:
            write(result, os.fspath(output))
        is_certain = result.status == Status.DIFFERENT and any(
            finding.confidence == Confidence.CERTAIN for finding in result.findings
        )
        yield result
        if is_certain:
            return


def _looks(
    reference: AnyPath,
    target: AnyPath,
    *,
    every: float,
    tell: Tell | None,
    **how: Any,
) -> Iterator[Comparison]:
    """The comparisons over all steps that both runs have finished, one whenever there are more."""
    from whence.workflows.compare import compare

    state_before: tuple[Any, ...] = ()
    while True:
        sides = [_looked(path, tell) for path in (reference, target)]
        if None not in sides:
            reference_side, target_side = (side for side in sides if side is not None)
            writing = reference_side.writing or target_side.writing
            state = (
                writing,
                *(
                    (side.ended_steps, len(side.run.calls) if not side.writing else 0)
                    for side in (reference_side, target_side)
                ),
            )
            if state != state_before and (
                not writing or min(reference_side.last, target_side.last) >= 0
            ):
                state_before, began = state, time.monotonic()
                runs = (
                    _shared(reference_side, target_side)
                    if writing
                    else (reference_side.run, target_side.run)
                )
                # up to the common step; the final comparison uses the whole runs
                so_far = {**how, "partial": True} if writing else how
                yield compare(*runs, **so_far)
                if not writing:
                    return
                # A comparison costs more for longer runs; at most half of the time is spent on
                # looking.
                time.sleep(time.monotonic() - began)
            elif tell is not None:
                tell(f"{reference_side.last + 1} and {target_side.last + 1} steps have ended")
        time.sleep(every)


def _looked(path: AnyPath, tell: Tell | None) -> _Side | None:
    from whence.readers import opening

    try:
        run = opening.open_run(os.fspath(path))
    except UnreadableRun as error:
        if Path(path).exists() and not _unborn(path):
            raise
        if tell is not None:
            tell(f"waiting for {os.fspath(path)}: {str(error).splitlines()[0]}")
        return None
    return _Side(run, WRITING in run.ended, frozenset((s.rank, s.root, s.step) for s in run.steps))


def _unborn(path: AnyPath) -> bool:
    """Whether this is a run into which nothing was written yet and whose command is still
    running.
    """
    from whence.store.folder import load_info

    try:
        return "exit_code" not in load_info(Path(path)).settings
    except UnreadableRun:
        return False


def _shared(reference_side: _Side, target_side: _Side) -> tuple[Run, Run]:
    """Both runs up to the last step that every side still being written has finished."""
    last = min(side.last for side in (reference_side, target_side) if side.writing)
    return _ended(reference_side, last), _ended(target_side, last)


def _ended(side: _Side, last: int) -> Run:
    import msgspec

    from whence.records import Over

    calls = [
        c
        for c in side.run.calls
        if c.step <= last and ((c.rank, c.root, c.step) in side.ended_steps or not side.writing)
    ]
    places = {call.id: place for place, call in enumerate(calls)}
    return Over(
        side.run,
        [
            msgspec.structs.replace(c, id=places[c.id], parent=places.get(c.parent, -1))
            for c in calls
        ],
    )
