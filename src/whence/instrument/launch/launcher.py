"""Runs a command so that every Python it starts captures itself: environment in, nothing edited.

`site/` waits for a framework in the child, and calls `attaching` there.
"""

from __future__ import annotations

import datetime
import getpass
import json
import os
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from whence import extras
from whence.errors import WhenceError
from whence.instrument import FRAMEWORKS
from whence.instrument.framework import framework
from whence.instrument.launch import attaching, interpreter, redaction
from whence.instrument.launch.child_process import execute
from whence.instrument.launch.outcome import ERRORS, LOG, Outcome, collect, conclude, is_gone
from whence.instrument.options import CaptureOptions
from whence.records import Run, RunInfo
from whence.records.places import WRITTEN, as_text

ENVIRONMENT = "WHENCE_CAPTURE"
SITE = Path(__file__).parent / "site"


class LaunchExtras(NamedTuple):
    """Work beside a capture. environment(environment of the child, path of the run): returns the
    changed environment. ended(path of the run, keep): called afterwards. folder: working folder in
    the run, empty in the end.
    """

    environment: Callable[[dict[str, str], str], dict[str, str]]
    ended: Callable[[str, str], object]
    folder: str


class Aside(Protocol):
    """A run that another one replaces. `keep` returns its new path, "" if there is none."""

    def keep(self, *, in_its_place: bool) -> str: ...

    def delete(self) -> None: ...


class RunStore(NamedTuple):
    """How runs are made and read: create(path, info, force), update(path, **fields of RunInfo),
    open(path); discard(path, also, folder) deletes one that holds nothing, and says whether it did;
    reasons(path): why its processes captured nothing. set_aside(path, names, force): with
    `force`, keeps what the run at `path` wrote out of the way of one that replaces it.
    """

    create: Callable[[str, RunInfo, bool], object]
    update: Callable[..., object]
    open: Callable[[str], Run]
    discard: Callable[[str, Collection[str], bool], bool]
    reasons: Callable[[str], list[str]]
    set_aside: Callable[[str, Collection[str], bool], Aside]


class Terminal(NamedTuple):
    """The surroundings of a command. tell: writes lines for the user (stderr). environment: of the
    command, None for that of this process. log: file that takes the command's output, while its
    input is empty; None: it uses our terminal.
    """

    tell: Callable[[str], None]
    environment: Mapping[str, str] | None = None
    log: IO[bytes] | None = None


def launch(
    command: Sequence[str],
    run_path: str,
    options: CaptureOptions,
    *,
    attach: str,
    runs: RunStore,
    terminal: Terminal,
    extra: LaunchExtras | None = None,
) -> int:
    """Run `command` under capture and return the exit code for the shell: its own, or 3 when it
    ended with 0 and nothing was captured. A run in which nothing was captured is deleted again.

    attach: "module:function" called in the child as function(options, run_path, framework) once a
    framework is imported. extra: what labels need beside. Raises CaptureError before anything is
    started or written; OutputExists from `runs.create`.
    """
    variables = os.environ if terminal.environment is None else terminal.environment
    found = interpreter.find(command, variables)
    versions = interpreter.check(found, variables) if found else {}
    absolute = str(Path(run_path).absolute())
    info = describe(command, options, versions, found.python if found else "")
    is_ours = not Path(absolute).is_dir() or any(Path(absolute).iterdir())
    own = (LOG, ERRORS, *((extra.folder,) if extra is not None else ()))
    replaced = runs.set_aside(absolute, own, options.force)
    try:
        runs.create(absolute, info, options.force)
    except WhenceError:
        replaced.keep(in_its_place=True)
        raise

    def discard() -> bool:
        is_gone = runs.discard(absolute, own, is_ours)
        if kept := replaced.keep(in_its_place=is_gone):
            terminal.tell(f"whence: the run that --force would have replaced is still in {kept}")
        return is_gone

    for leftover in (LOG, ERRORS):  # of a run that --force replaced
        (Path(absolute) / leftover).unlink(missing_ok=True)
    child = child_environment(variables, absolute, options, attach)
    if extra is not None:
        child = extra.environment(child, absolute)
    try:
        ended = execute(command, child, terminal.log)
    except BaseException:  # it could not be started
        discard()
        raise
    processes = collect(absolute)
    if extra is not None:
        extra.ended(absolute, options.keep)
    settings = {
        **info.settings,
        "exit_code": ended.exit_code,
        "duration_s": round(ended.duration_s, 3),
        "python_processes": processes.started,
        "attached_processes": processes.attached,
        WRITTEN: sum(folder.is_dir() for folder in Path(absolute).glob("rank*-*")),
    }
    try:
        runs.update(absolute, versions={**info.versions, **processes.versions}, settings=settings)
    except WhenceError as err:
        if not is_gone(absolute):
            terminal.tell(f"whence: cannot note the end of the command: {err}")
    reasons = runs.reasons(absolute)
    outcome = Outcome(run_path, absolute, options, ended, processes, reasons)
    exit_code = conclude(outcome, runs.open, discard, terminal.tell)
    replaced.delete()
    return exit_code


def describe(
    command: Sequence[str],
    options: CaptureOptions,
    versions: Mapping[str, str] | None = None,
    python: str = "",
) -> RunInfo:
    """Who runs what, when, where and with which versions. Secrets are masked; what cannot be known
    is left empty.

    versions: of the Python that computes; None when that is this process. python: its path.
    """
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = ""
    return RunInfo(
        command=tuple(as_text(word) for word in redaction.command(command)),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        user=user,
        host=socket.gethostname(),
        cwd=as_text(Path.cwd()),
        versions=dict(interpreter.versions_here() if versions is None else versions),
        git=git_state(Path.cwd()),
        seed=options.seed,
        deterministic=options.deterministic,
        options=options.asdict(),
        environment=redaction.environment(os.environ),
        interpreter=python,
    )


def git_state(folder: Path) -> str:
    """Commit of the checkout around `folder`, with " (dirty)" when tracked files differ; "" without
    git or checkout.
    """

    def git(*words: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
        return process.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + (" (dirty)" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""


def child_environment(
    environment: Mapping[str, str], run_path: str, options: CaptureOptions, attach: str
) -> dict[str, str]:
    """The environment that makes every Python below capture itself; nothing else in it changes,
    save what seeds need.
    """
    child = dict(environment)
    config = {
        "run": run_path,
        "launcher": attaching.__name__,
        "attach": attach,
        "frameworks": FRAMEWORKS,
        "options": options.asdict(),
        "source": extras.whence_source(),
    }
    child[ENVIRONMENT] = json.dumps(config)
    search_path = child.get("PYTHONPATH", "")
    child["PYTHONPATH"] = str(SITE) + (os.pathsep + search_path if search_path else "")
    if options.seed is not None:
        child["PYTHONHASHSEED"] = str(options.seed)
    if options.deterministic:
        child.setdefault("PYTHONHASHSEED", "0")
        for name in FRAMEWORKS:
            for variable, value in framework(name).VARIABLES.items():
                child.setdefault(variable, value)
    return child
