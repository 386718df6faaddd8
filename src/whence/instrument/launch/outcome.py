"""Reports after a command how much was captured, or why nothing was."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from whence.errors import WhenceError
from whence.instrument import FRAMEWORKS
from whence.instrument.launch.child_process import EndedProcess
from whence.instrument.options import CaptureOptions
from whence.instrument.wording import counted, size
from whence.records import Run

RUN_FILE = "run.json"
LOG = "launch.jsonl"
ERRORS = "attach-errors.txt"
_MOST_ERRORS = 3
_SIGNAL = 128  # exit codes above are of commands that the signal of that number stopped
_FULL_BYTES = 1 << 16  # a disk with less is full: a process cannot even begin to write


class Processes(NamedTuple):
    """What the children of a command reported: Pythons started, Pythons that attached, versions
    seen, lines of complaint.
    """

    started: int
    attached: int
    versions: dict[str, str]
    errors: tuple[str, ...]


def collect(run_path: str) -> Processes:
    """What the children wrote down (and the journal they wrote it to, removed: its sum goes into
    run.json).
    """
    folder = Path(run_path)
    started = attached = 0
    versions: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (folder / LOG).read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            started += event.get("event") == "python"
            if event.get("event") == "attached":
                attached += 1
                versions = versions or dict(event.get("versions", {}))
        (folder / LOG).unlink()
    errors: tuple[str, ...] = ()
    with contextlib.suppress(OSError):
        errors = tuple((folder / ERRORS).read_text(encoding="utf-8", errors="replace").splitlines())
    return Processes(started, attached, versions, errors)


def is_gone(run_path: str) -> bool:
    """Whether a run that was created before the command no longer exists."""
    return not Path(run_path, RUN_FILE).exists()


class Outcome(NamedTuple):
    """A command that ended. shown, path: of the run, as the user named it and absolute. reasons:
    why its processes captured nothing, in their own words.
    """

    shown: str
    path: str
    options: CaptureOptions
    ended: EndedProcess
    processes: Processes
    reasons: list[str]


def conclude(
    outcome: Outcome,
    open_run: Callable[[str], Run],
    discard: Callable[[], bool],
    tell: Callable[[str], None],
) -> int:
    """Say in one line what was captured, or why nothing was; return the exit code.

    discard: deletes the run where it holds nothing, and says whether it did.
    """
    shown, path, options, ended, processes, _ = outcome
    if is_gone(path):
        discard()  # a run that it would have replaced is kept
        tell(
            f"whence: the command {ended_words(ended.exit_code)}, and its run is gone: {shown} was "
            "deleted, moved or unmounted while it ran"
        )
        return ended.exit_code or 3
    try:
        run: Run | None = open_run(path)
        problem = ""
    except WhenceError as err:
        run, problem = None, str(err)
    if run is not None and (
        any(call.refs for call in run.calls) or (options.keep == "none" and len(run.calls))
    ):
        tell(_captured(outcome, run))
        if processes.errors:
            tell(
                f"whence: {counted(len(processes.errors), 'process', 'processes')} could not be "
                f"captured, see {shown}/{ERRORS}"
            )
        return ended.exit_code
    if options.waits and processes.attached and not (processes.errors or outcome.reasons):
        discard()
        tell(f"whence: no step was recorded in {shown}: nothing that was waited for happened")
        return ended.exit_code
    reason = why_nothing(run, outcome) or problem
    if not discard():
        reason += f"; {shown} is kept: --force replaces it, or choose another -o"
    how = ended_words(ended.exit_code)
    joined = "but" if ended.exit_code == 0 else "and"
    tell(f"whence: the command {how}, {joined} nothing was captured: {reason}")
    return ended.exit_code or 3


def _captured(outcome: Outcome, run: Run) -> str:
    steps = len({(s.root, s.step) for s in run.steps})
    line = (
        f"whence: captured {counted(steps, 'step')}, {counted(len(run.calls), 'call')}, "
        f"{size(on_disk(outcome.path))} in {outcome.shown}"
    )
    line += _over_budget(run)
    if run.ended:
        line += f"  (not whole: {run.ended})"
    if outcome.ended.exit_code:
        line += (
            f"; the command {ended_words(outcome.ended.exit_code)} (to run it again: --force, or "
            "another -o)"
        )
    return line


def _over_budget(run: Run) -> str:
    """How many steps --max-bytes left without elements, "" where it left none."""
    if not any(note.kind == "budget" for note in run.notes):
        return ""
    every = {(s.rank, s.root, s.step) for s in run.steps}
    bare = {(s.rank, s.root, s.step) for s in run.steps if not s.kept}
    if not bare:
        return ""
    return (
        f"; --max-bytes was reached: {len(bare)} of {counted(len(every), 'step')} hold no "
        "elements, or not all"
    )


def ended_words(exit_code: int) -> str:
    """ "ended with exit code 1", "was stopped by SIGINT"."""
    try:
        return f"was stopped by {signal.Signals(exit_code - _SIGNAL).name}"
    except ValueError:
        return f"ended with exit code {exit_code}"


def on_disk(path: str) -> int:
    """Bytes a run takes on disk; room that a shard reserves for its header and never wrote is not
    counted.
    """
    total = 0
    for file in Path(path).rglob("*"):
        with contextlib.suppress(OSError):
            status = file.lstat()
            total += min(status.st_size, status.st_blocks * 512) if file.is_file() else 0
    return total


def why_nothing(run: Run | None, outcome: Outcome) -> str:
    """The most likely reason why a capture holds no call."""
    options, processes = outcome.options, outcome.processes
    if processes.errors:
        errors = list(dict.fromkeys(processes.errors))
        further = f" (and {len(errors) - _MOST_ERRORS} more)" if errors[_MOST_ERRORS:] else ""
        return "; ".join(errors[:_MOST_ERRORS]) + further
    if not processes.started:
        return (
            "no Python process of the command loaded whence. Does it start Python? Does it replace "
            "PYTHONPATH (write PYTHONPATH=folder:$PYTHONPATH), clear the environment, or run "
            "Python with -I, -S or -E?"
        )
    if not processes.attached and outcome.ended.exit_code > _SIGNAL:
        return f"none of {', '.join(FRAMEWORKS)} was imported yet"
    if not processes.attached:
        return (
            f"none of {', '.join(FRAMEWORKS)} was ever imported "
            f"({counted(processes.started, 'Python process', 'Python processes')})"
        )
    if outcome.reasons:
        return "; ".join(outcome.reasons)
    with contextlib.suppress(OSError):
        if shutil.disk_usage(outcome.path).free < _FULL_BYTES:
            return (
                f"there is no space left for {outcome.shown}; free some, or choose another -o on a "
                "disk with space"
            )
    chosen = [
        n
        for n in ("include", "exclude", "classes", "max_depth", "ids", "steps", "every", "ranks")
        if getattr(options, n) not in ((), None)
    ]
    if chosen and run is not None and len(run.calls):
        return (
            f"none of {counted(len(run.calls), 'module call')} matched the selection "
            f"({_options(chosen)})"
        )
    if chosen:
        return f"no module call matched the selection ({_options(chosen)}), or no module was called"
    if options.level == "io":
        return "no session of ONNX Runtime was run, and --level io listens to nothing else"
    if outcome.ended.exit_code:
        return (
            "it failed before a module (of torch), a layer or predictor (of Paddle), or a session "
            "(of ONNX Runtime) was called"
        )
    return (
        "its framework was imported, but no module was called (of torch), no layer or predictor "
        "(of Paddle), and no session (of ONNX Runtime); operators outside of modules are captured "
        "with --level op"
    )


def _options(names: Sequence[str]) -> str:
    return ", ".join("--" + name.replace("_", "-").replace("classes", "class") for name in names)
