"""Runs a command so that every Python it starts captures itself: environment in, signals and exit
code passed on, nothing edited.

The child's side (`attach_here`, `apply_determinism`) is here too; what waits for a framework in the
child is `site/`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import getpass
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NamedTuple

from whence.errors import CaptureError, WhenceError
from whence.instrument.launch import interpreter, redaction
from whence.instrument.options import CaptureOptions, decode
from whence.instrument.wording import counted, size
from whence.records import Run, RunInfo

ENVIRONMENT = "WHENCE_CAPTURE"
SITE = Path(__file__).parent / "site"
LOG = "launch.jsonl"
ERRORS = "attach-errors.txt"

_RELAYED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class EndedProcess(NamedTuple):
    """How a command ended: its exit code (128 + n when signal n killed it) and how long it took, in
    seconds.
    """

    exit_code: int
    duration_s: float


class LaunchExtras(NamedTuple):
    """What is done beside a capture. environment(of the child, path of the run): it, changed.
    ended(path of the run, keep): afterwards.
    """

    environment: Callable[[dict[str, str], str], dict[str, str]]
    ended: Callable[[str, str], object]


class Processes(NamedTuple):
    """What the children of a command reported: Pythons started, Pythons that attached, versions
    seen, lines of complaint.
    """

    started: int
    attached: int
    versions: dict[str, str]
    errors: tuple[str, ...]


def launch(
    command: Sequence[str],
    run_path: str,
    options: CaptureOptions,
    *,
    attach: str,
    create: Callable[[str, RunInfo, bool], object],
    update: Callable[..., object],
    open_run: Callable[[str], Run],
    tell: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    extra: LaunchExtras | None = None,
) -> int:
    """Run `command` under capture and return the exit code for the shell: its own, or 3 when it
    ended with 0 and nothing was captured.

    attach: "module:function" called in the child as function(options, run_path, framework) once
    torch or paddle is imported. create(path, info, force), update(path, **fields of RunInfo),
    open_run(path): the store. tell: where lines for the user go (stderr). environment: of the
    command, None for ours. log: takes what the command prints, and it reads nothing; None: our
    terminal is its own. extra: what labels need beside. Raises CaptureError before anything is
    started or written; OutputExists from `create`.
    """
    variables = os.environ if environment is None else environment
    found = interpreter.find(command, variables)
    versions = interpreter.check(found, variables) if found else {}
    absolute = str(Path(run_path).absolute())
    info = describe(command, options, versions, found.python if found else "")
    create(absolute, info, options.force)
    for leftover in (LOG, ERRORS):  # of a run that --force replaced
        (Path(absolute) / leftover).unlink(missing_ok=True)
    child = child_environment(variables, absolute, options, attach)
    ended = execute(
        command, extra.environment(child, absolute) if extra is not None else child, log
    )
    processes = collect(absolute)
    if extra is not None:
        extra.ended(absolute, options.keep)
    settings = {
        **info.settings,
        "exit_code": ended.exit_code,
        "duration_s": round(ended.duration_s, 3),
        "python_processes": processes.started,
        "attached_processes": processes.attached,
    }
    try:
        update(absolute, versions={**info.versions, **processes.versions}, settings=settings)
    except WhenceError as err:
        tell(f"whence: cannot note the end of the command: {err}")
    return conclude(run_path, absolute, options, ended, processes, open_run, tell)


def conclude(
    shown: str,
    absolute: str,
    options: CaptureOptions,
    ended: EndedProcess,
    processes: Processes,
    open_run: Callable[[str], Run],
    tell: Callable[[str], None],
) -> int:
    """Say in one line what was captured, or why nothing was; return the exit code."""
    try:
        run: Run | None = open_run(absolute)
        problem = ""
    except WhenceError as err:
        run, problem = None, str(err)
    if run is not None and (
        any(call.refs for call in run.calls) or (options.keep == "none" and len(run.calls))
    ):
        steps = len({(s.root, s.step) for s in run.steps})
        line = (
            f"whence: captured {counted(steps, 'step')}, {counted(len(run.calls), 'call')}, "
            f"{size(on_disk(absolute))} in {shown}"
        )
        tell(line + (f"  (not whole: {run.ended})" if run.ended else ""))
        if processes.errors:
            tell(
                f"whence: {counted(len(processes.errors), 'process', 'processes')} could not be "
                f"captured, see {shown}/{ERRORS}"
            )
        return ended.exit_code
    reason = why_nothing(run, options, processes) or problem
    if ended.exit_code == 0:
        tell(f"whence: the command ended with 0, but nothing was captured: {reason}")
        return 3
    tell(f"whence: the command ended with {ended.exit_code} and nothing was captured: {reason}")
    return ended.exit_code


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


def why_nothing(run: Run | None, options: CaptureOptions, processes: Processes) -> str:
    """The most likely reason why a capture holds no call."""
    if processes.errors:
        further = (
            f" (and {len(processes.errors) - 1} more in {ERRORS})"
            if len(processes.errors) > 1
            else ""
        )
        return processes.errors[0] + further
    if not processes.started:
        return (
            "no Python that it started saw whence; was PYTHONPATH replaced (write "
            "PYTHONPATH=folder:$PYTHONPATH), the environment "
            "cleared, or a Python run with -I, -S or -E?"
        )
    if not processes.attached:
        return (
            "neither torch nor paddle was ever imported "
            f"({counted(processes.started, 'Python process', 'Python processes')})"
        )
    notes = [
        n.text for n in (run.notes if run is not None else ()) if n.kind in ("error", "selection")
    ]
    if notes:
        return "; ".join(dict.fromkeys(notes))
    chosen = [
        n
        for n in ("include", "exclude", "classes", "max_depth", "ids", "steps", "ranks")
        if getattr(options, n) not in ((), None)
    ]
    if chosen and run is not None and len(run.calls):
        return (
            f"none of {counted(len(run.calls), 'module call')} matched the selection "
            f"({_options(chosen)})"
        )
    if chosen:
        return f"no module call matched the selection ({_options(chosen)}), or no module was called"
    return "its framework was imported, but no module was called, no layer and no predictor"


def _options(names: Sequence[str]) -> str:
    return ", ".join("--" + name.replace("_", "-").replace("classes", "class") for name in names)


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
        command=redaction.command(command),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        user=user,
        host=socket.gethostname(),
        cwd=str(Path.cwd()),
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
    config = {"run": run_path, "launcher": __name__, "attach": attach, "options": options.asdict()}
    child[ENVIRONMENT] = json.dumps(config)
    search_path = child.get("PYTHONPATH", "")
    child["PYTHONPATH"] = str(SITE) + (os.pathsep + search_path if search_path else "")
    if options.seed is not None:
        child["PYTHONHASHSEED"] = str(options.seed)
    if options.deterministic:
        child.setdefault("PYTHONHASHSEED", "0")
        for name, value in _DETERMINISTIC_VARIABLES.items():
            child.setdefault(name, value)
    return child


# Read by the libraries when they start: cuBLAS, TensorFlow's and Paddle's cuDNN, Ascend's
# collectives.
_DETERMINISTIC_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TF_DETERMINISTIC_OPS": "1",
    "FLAGS_cudnn_deterministic": "1",
    "HCCL_DETERMINISTIC": "true",
}


def execute(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None
) -> EndedProcess:
    """Run a command to its end with our stdin, stdout, stderr, terminal and process group; pass
    signals on, each once.

    A Ctrl-C at the terminal reaches the child by itself (same process group) and is not sent again;
    a signal sent to this process alone is. log: a file that takes stdout and stderr instead; stdin
    is empty then. Raises CaptureError when the command cannot be started.
    """
    began = time.monotonic()
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def relay(signum: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(signum)
        elif not sentinel.saw(signum):
            child.send_signal(signum)

    with _Sentinel() as sentinel, _handlers(relay):
        try:
            child = _start(command, environment, log)
        except OSError as err:
            raise CaptureError(f"cannot run {command[0]}: {err.strerror or err}") from err
        for signum in early:
            relay(signum, None)
        status = child.wait()
    return EndedProcess(status if status >= 0 else 128 - status, time.monotonic() - began)


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    streams: dict[str, Any] = (
        {} if log is None else {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    )
    # close_fds=False: descriptors the user opened for the command (make's job server, 3<file) stay
    # open in it; ours never are.
    try:
        return subprocess.Popen(list(command), env=dict(environment), close_fds=False, **streams)
    except OSError as err:
        if err.errno != errno.ENOEXEC:
            raise
        # A script without a first line: every shell runs it with sh.
        return subprocess.Popen(
            ["/bin/sh", *command], env=dict(environment), close_fds=False, **streams
        )


@contextlib.contextmanager
def _handlers(relay: Callable[[int, FrameType | None], None]) -> Any:
    """Relay signals while the command runs. One that was ignored before (nohup) stays ignored, in
    the child too.
    """
    previous: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
        for name in _RELAYED:
            signum = getattr(signal, name, None)
            if signum is not None and signal.getsignal(signum) is not signal.SIG_IGN:
                previous[signum] = signal.signal(signum, relay)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


_SENTINEL = """
import os, signal
for name in %r:
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), lambda n, frame: os.write(1, bytes([n])))
while os.read(0, 1):
    pass
"""


class _Sentinel:
    """A small process beside the child that tells a signal to the whole process group (Ctrl-C, kill
    -INT -PGID) from one to us alone.

    Without it a signal sent to the group would reach the child twice, or one sent to us never.
    """

    WAIT_S = 0.5

    def __enter__(self) -> _Sentinel:
        self._pids: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SENTINEL % (_RELAYED,)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def saw(self, signum: int) -> bool:
        """Did the sentinel receive this signal too, now or within a moment? Without a sentinel:
        Ctrl-C at a terminal counts as seen.
        """
        process = self._process
        if process is None or process.stdout is None:
            return signum == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()
        until = time.monotonic() + self.WAIT_S
        while signum not in self._pids:
            seconds = until - time.monotonic()
            ready = seconds > 0 and select.select([process.stdout], [], [], seconds)[0]
            if not ready:
                return False
            data = os.read(process.stdout.fileno(), 64)
            if not data:
                # It died: of this very signal when that came before its handlers were set.
                return process.wait() == -signum
            self._pids.update(data)
        self._pids.discard(signum)
        return True


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


def attach_here(config: Mapping[str, Any], framework: str = "torch") -> dict[str, Any]:
    """In the child, right after a framework was imported: set determinism, then call the attach
    function named in the configuration.

    Returns what the launcher's journal keeps (versions). Whatever goes wrong is raised: the hook in
    `_site` tells it.
    """
    options = decode(json.dumps(config["options"]))
    apply_determinism(options, framework_only=True, framework=framework)
    module, _, name = str(config["attach"]).partition(":")
    getattr(importlib.import_module(module), name)(options, config["run"], framework)
    return {"versions": interpreter.versions_here()}


def apply_determinism(
    options: CaptureOptions, *, framework_only: bool = False, framework: str = "torch"
) -> None:
    """Set seeds and deterministic kernels in this process as `--seed` and `--deterministic` ask;
    without them nothing changes.

    framework_only: python's and numpy's generators were seeded when they were imported, and the
    program may have drawn since. Operators without a deterministic kernel warn (`warn_only=True`)
    instead of failing.
    """
    if options.seed is not None and not framework_only:
        random.seed(options.seed)
        if "numpy" in sys.modules:
            import numpy as np

            np.random.seed(options.seed)
    if options.seed is None and not options.deterministic:
        return
    if framework == "paddle":
        paddle: Any = importlib.import_module("paddle")
        if options.seed is not None:
            paddle.seed(options.seed)
        if options.deterministic:
            paddle.set_flags({"FLAGS_cudnn_deterministic": True})
        return
    torch: Any = importlib.import_module("torch")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
