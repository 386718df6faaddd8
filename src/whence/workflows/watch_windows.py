"""Two runs that are captured in windows of steps, compared window by window while they are written;
what was compared and is the same can be deleted, so that only results stay.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from whence.display import listed
from whence.errors import UnreadableRun, UsageError
from whence.results import Comparison, Coverage, Status, VerdictKind

if TYPE_CHECKING:
    from whence.records import Run, RunInfo
    from whence.results.windows import ComparedWindow
    from whence.store.process_reader import ProcessReader

KEPT = 2
"""So many windows that are not the same keep their tensors where others are deleted."""
_MAKING_S = 10.0
"""So long a folder may be there before anything is in it."""
_RANK = {Status.SAME: 0, Status.UNDECIDED: 1, Status.DIFFERENT: 2}


class Look(NamedTuple):
    """An answer about two runs that are watched. writing: runs that were still being written when
    it was made, by programs that may be ended.
    """

    result: Comparison
    writing: Sequence[str | os.PathLike[str]]


def window_steps(info: RunInfo) -> int | None:
    """How many steps a window of a run has; None where it is not captured in windows."""
    steps = info.options.get("window")
    return steps if isinstance(steps, int) else None


def check_windows(paths: tuple[Path, Path], infos: tuple[RunInfo, RunInfo]) -> None:
    """Raise UsageError where two runs have no windows that could be compared."""
    steps = [window_steps(info) for info in infos]
    if steps[0] == steps[1] and steps[0] is not None:
        return
    sentences = [
        f"{path} is captured in windows of {n} steps" if n else f"{path} is not captured in windows"
        for path, n in zip(paths, steps, strict=True)
    ]
    raise UsageError(
        f"{sentences[0]}, {sentences[1]}: capture both with the same whence run --window N to "
        "compare them window by window"
    )


def watch_windows(
    reference: Path,
    target: Path,
    *,
    every: float,
    discard: bool,
    tell: Callable[[str], None] | None,
    **how: Any,
) -> Iterator[Look]:
    """Compare each window that both runs have ended. Yields the answer about all windows so far.

    discard: delete windows that are the same, and of the others all but the first `KEPT`. how:
    arguments of `compare`.
    """
    from whence.comparison.compared_tensors import ComparedTensors
    from whence.workflows.compare import compare

    sides = _Windows(reference), _Windows(target)
    answer = _Answer(sides, discard)
    compared = ComparedTensors()
    last = -1
    while True:
        # Before the folders are looked at: what a run that has ended lacks, it never gets.
        have_ended = [side.has_ended() for side in sides]
        ready = _next_ready(sides, have_ended, last)
        if ready is not None:
            last = ready
            runs = [side.opened(ready) for side in sides]
            if runs[0] is None or runs[1] is None:
                answer.add_missing(ready, runs)
            else:
                began = time.monotonic()
                compared.next_window()
                result = compare(runs[0], runs[1], compared=compared, **how)
                answer.add(ready, result, _steps_of(runs[0]), began)
                yield Look(answer.merged(), [path for side in sides for path in side.writing()])
            continue
        answer.delete()
        if all(have_ended):
            yield Look(answer.merged(is_last=True), ())
            return
        if tell is not None:
            tell(f"{len(answer.windows)} windows compared; waiting for the next")
        time.sleep(every)


def _next_ready(sides: tuple[_Windows, _Windows], have_ended: list[bool], last: int) -> int | None:
    """The next window that both sides have ended, or that one of them has and the other will never
    have; None where it is still to come.
    """
    for side in sides:
        side.look()
    numbers = sorted({n for side in sides for n in side.paths if n > last})
    if not numbers:
        return None
    number = numbers[0]
    for side, has_ended in zip(sides, have_ended, strict=True):
        if not has_ended and not side.is_complete(number):
            return None
    return number


class _Windows:
    """The windows of one run. paths: of those that are there, by number; each is a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths: dict[int, Path] = {}
        self._newest: dict[str, tuple[int, Path]] = {}
        self._has_begun = False

    def look(self) -> None:
        """See which windows are there now, and the newest folder of each process."""
        from whence.store.folder import process_folders, windows_of

        self.paths = {int(path.name[1:]): path for path in windows_of(self.path)}
        self._newest = {
            folder.name: (number, folder)
            for number, path in self.paths.items()
            for folder in process_folders(path)
        }
        self._has_begun = self._has_begun or bool(self._newest)

    def has_ended(self) -> bool:
        """Does no process write any more?"""
        from whence.store.folder import load_info

        self.look()
        if not self._has_begun:
            return "exit_code" in load_info(self.path).settings
        return not any(_is_written(folder) for _, folder in self._newest.values())

    def is_complete(self, number: int) -> bool:
        """Has every process ended this window, or gone on to a later one without it?"""
        from whence.store.folder import PROCESS, load_info, load_process

        for name, (window, folder) in self._newest.items():
            own = self.paths[number] / name if number in self.paths else folder
            is_here = own.parent == self.paths.get(number) and own.exists()
            if is_here and _is_written(own):
                return False
            if not is_here and window <= number and _is_written(folder):
                return False
        if load_info(self.path).options.get("ranks") is not None:
            return True
        folders = [folder for _, folder in self._newest.values()]
        infos = [load_process(folder) for folder in folders if (folder / PROCESS).exists()]
        ranks = {info.rank for info in infos}
        return len(ranks) >= max((info.world_size for info in infos), default=1)

    def writing(self) -> list[Path]:
        """The windows that are being written."""
        self.look()
        return sorted({f.parent for _, f in self._newest.values() if _is_written(f)})

    def opened(self, number: int) -> Run | None:
        """A window; None where it has no call."""
        from whence import store

        has_calls = any(process.calls for process in self._read(number)[0])
        return store.open_run(self.paths[number]) if has_calls else None

    def ends(self, number: int) -> list[str]:
        """How processes left a window, where that was no clean end."""
        processes, unborn = self._read(number)
        return [*(ended for process in processes if (ended := process.ended())), *unborn]

    def _read(self, number: int) -> tuple[list[ProcessReader], list[str]]:
        from whence.store.reader import read_processes

        return read_processes([self.paths[number]] if number in self.paths else [])

    def delete(self, number: int) -> bool:
        """Delete a window, unless a process may still read it; whether it is gone."""
        from whence.store.windows import delete_window

        path = self.paths.get(number)
        if path is None:
            return True
        # A process has mapped a window by the time it has ended the next one.
        newest = [window for window, _ in self._newest.values()]
        if not self.has_ended() and any(window < number + 2 for window in newest):
            return False
        delete_window(path)
        return True


def _is_written(folder: Path) -> bool:
    """Does the process of a folder still write it?"""
    from whence.store.folder import PROCESS, is_writing, load_process
    from whence.store.status import RUNNING, read_status

    if not (folder / PROCESS).exists():  # it is being made, unless its process was killed then
        return time.time() - folder.stat().st_mtime < _MAKING_S
    return read_status(folder).ended == RUNNING and is_writing(folder, load_process(folder))


class _Answer:
    """The answer about all windows so far. windows: what each said."""

    def __init__(self, sides: tuple[_Windows, _Windows], discard: bool) -> None:
        from whence.store.windows import deleted_windows

        self._sides, self._discard = sides, discard
        self._deleted_before = max(deleted_windows(side.path) for side in sides)
        self.windows: list[ComparedWindow] = []
        self._total: Comparison | None = None
        self._details: ComparedWindow
        self._missing: list[str] = []
        self._kept = 0
        self._to_delete: list[int] = []

    def add(self, number: int, result: Comparison, steps: tuple[int, int], began: float) -> None:
        """A window was compared. steps: the first and the last; began: at this time."""
        row = _row(number, result, steps, began)
        if self._discard:
            if result.status != Status.SAME and self._kept < KEPT:
                self._kept += 1
            else:
                row = msgspec.structs.replace(row, kept=False)
                self._to_delete.append(number)
                self.delete()
        self.windows.append(row)
        total = self._total
        if total is None:
            self._total, self._details = result, row
            return
        # The details are those of the first window that says most.
        details = total
        if _RANK[Status(result.status)] > _RANK[Status(total.status)]:
            details, self._details = result, row
        self._total = msgspec.structs.replace(
            details,
            counts=dict(Counter(total.counts) + Counter(result.counts)),
            coverage=_sum(total.coverage, result.coverage),
            unmatched=total.unmatched + result.unmatched,
            incomparable=total.incomparable + result.incomparable,
        )

    def add_missing(self, number: int, runs: list[Run | None]) -> None:
        """Only one of both runs has this window, or none has a call in it."""
        missing = []
        sides = zip(("reference", "target"), self._sides, runs, reversed(runs), strict=True)
        for side, windows, run, other in sides:
            if run is None and other is not None:
                missing.append(f"window {number} is not in the {side}")
            elif run is None:
                missing += [f"window {number} of the {side}: {end}" for end in windows.ends(number)]
        if self._discard and runs == [None, None] and not missing:
            self._to_delete.append(number)
        self._missing += missing

    def delete(self) -> None:
        """Delete what may be deleted by now."""
        self._to_delete = [number for number in self._to_delete if not self._is_deleted(number)]

    def _is_deleted(self, number: int) -> bool:
        gone = [side.delete(number) for side in self._sides]
        return all(gone)

    def merged(self, *, is_last: bool = False) -> Comparison:
        """The answer about all windows so far. Raises UnreadableRun where there was none."""
        from whence.comparison.verdicts.status import failed_alone
        from whence.report.windows import steps
        from whence.store.folder import load_info

        if self._total is None:
            raise UnreadableRun(
                f"{self._sides[0].path} and {self._sides[1].path} have no window with a call in "
                "common: nothing was captured, or all was compared and deleted before; capture "
                "both again with whence run --window N"
            )
        result = self._total
        notes = list(result.notes)
        if len(self.windows) > 1:
            details = steps([self._details])
            notes.append(
                f"counts are of all windows; findings, rows and verdicts of the one of {details}"
            )
        if self._deleted_before:
            notes.append(
                "windows that were compared and deleted before this watch began: "
                f"{self._deleted_before}; it says nothing of them"
            )
        status, why = result.status, result.headline
        if status == Status.SAME and self._missing:
            status = Status.UNDECIDED
            why = f"{listed(self._missing, 1)}: what lies there was not compared"
        if is_last and status == Status.SAME:
            failed = failed_alone(*(load_info(side.path) for side in self._sides))
            status, why = (Status.UNDECIDED, failed) if failed else (status, why)
        return msgspec.structs.replace(
            result,
            status=status,
            headline=why,
            notes=tuple(notes),
            next=result.next if self._details.kept else (),
            windows=tuple(self.windows),
        )


def _row(number: int, result: Comparison, steps: tuple[int, int], began: float) -> ComparedWindow:
    from whence.results.windows import ComparedWindow

    first = next(iter(result.findings), result.undecided)
    return ComparedWindow(
        number,
        *steps,
        str(result.status),
        result.coverage.calls,
        result.coverage.paired,
        result.counts.get(VerdictKind.IDENTICAL, 0),
        len(result.findings),
        (first.name or first.root) if first is not None else "",
        result.effect.error if result.effect is not None else None,
        seconds=round(time.monotonic() - began, 3),
    )


def _steps_of(run: Run) -> tuple[int, int]:
    """The first and the last step of a run."""
    numbers = [call.step for call in run.calls]
    return min(numbers), max(numbers)


def _sum(total: Coverage, more: Coverage) -> Coverage:
    return Coverage(
        total.calls + more.calls,
        total.paired + more.paired,
        total.measured + more.measured,
        total.replayed + more.replayed,
        total.replayable + more.replayable,
        total.root_outputs_measured and more.root_outputs_measured,
        total.inside + more.inside,
        total.covered + more.covered,
    )
