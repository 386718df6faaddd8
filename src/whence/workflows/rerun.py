"""Programs that are run repeatedly: a command in processes of its own, or a model in this
process.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from whence.display import listed
from whence.errors import CaptureError, OutputExists, UnreadableRun, UsageError, WhenceError

RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
"""Matches the line of a traceback that names the exception."""

_TAIL_LINES = 15
_INTERRUPTED = 130


class Subject(Protocol):
    """A program that can be run any number of times.

    Both methods return the duration in seconds and raise CaptureError when the program fails.
    """

    @property
    def words(self) -> str: ...

    def bare(self) -> float:
        """Run the program without a capture."""
        ...

    def capture(self, path: Path, *, variant: str = "", **options: Any) -> float:
        """Capture a run into `path`; when the program fails, nothing is left there.

        variant: one of `variants`, "" for the unchanged program.
        """
        ...

    @property
    def variants(self) -> tuple[str, ...]:
        """Harmless changes to the way in which the program is run."""
        ...


class Command:
    """A command that runs in `cwd`; its output is kept only for the error message.

    exit_codes: accepted exit codes. variables: added to the environment of this process; None
    removes a variable.
    """

    variants = ("one thread",)

    def __init__(
        self,
        command: Sequence[str],
        cwd: str = "",
        *,
        exit_codes: Iterable[int] = (0,),
        variables: Mapping[str, str | None] | None = None,
    ) -> None:
        self.command, self.cwd = tuple(command), cwd or str(Path.cwd())
        self.words = shlex.join(self.command)
        self.exit_codes, self.variables = {0, *exit_codes}, dict(variables or {})
        if not Path(self.cwd).is_dir():
            raise UnreadableRun(
                f"the command ran in {self.cwd}, which is not there; give the command again "
                "after --, from where it can run"
            )

    def bare(self) -> float:
        from whence.instrument.launch import child_process, interpreter

        with self._log() as log, contextlib.chdir(self.cwd):
            environment = self.environment()
            interpreter.find(self.command, environment)
            ended = child_process.execute(self.command, environment, log)
            self._check(ended.exit_code, log, "")
        return ended.duration_s

    def capture(
        self,
        path: Path,
        *,
        variant: str = "",
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> float:
        """Capture a run of the command. environment: variables added to those of this process."""
        from whence.workflows.capture.command import run_command

        messages: list[str] = []
        began = time.monotonic()
        absolute = path.absolute()
        with self._log() as log, _whole(absolute), contextlib.chdir(self.cwd):
            variables = {
                **self.environment(),
                **(_ONE_THREAD if variant else {}),
                **(environment or {}),
            }
            code = run_command(
                self.command,
                str(absolute),
                environment=variables,
                log=log,
                tell=messages.append,
                **options,
            )
            self._check(
                code, log, messages[-1] if messages else "", captured=_holds_calls(absolute)
            )
        return time.monotonic() - began

    def environment(self) -> dict[str, str]:
        """The environment in which the command runs."""
        variables = {
            **os.environ,
            **{name: value for name, value in self.variables.items() if value is not None},
        }
        return {
            name: value
            for name, value in variables.items()
            if self.variables.get(name, "") is not None
        }

    def _check(self, code: int, log: Any, message: str, *, captured: bool = True) -> None:
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        if code == 0 or (code in self.exit_codes and captured):
            return
        log.seek(0)
        lines = log.read().decode("utf-8", "replace").splitlines()
        tail = lines[-_TAIL_LINES:]
        raised = next((line for line in reversed(lines) if RAISED.match(line)), "")
        if raised and raised not in tail:  # some say a page more after it
            tail = [raised, "...", *tail]
        output = "\n".join(f"  | {line}" for line in tail) or "  (it printed nothing)"
        hint = (
            ""
            if not captured
            else "; of a program that always ends so, capture it with whence run and give that "
            "run as TGT"
        )
        raise CaptureError(
            f"{self.words} ended with exit code {code}{'; ' if message else ''}{message}; its last "
            f"lines:\n{output}{hint}"
        )

    @staticmethod
    def _log() -> Any:
        return tempfile.TemporaryFile()


_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Program:
    """A model of this process, and the function that uses it. Random numbers start at the same
    state for each run.
    """

    def __init__(self, model: Any, use: Callable[[Any], Any], *, dtype: Any = None) -> None:
        self._model, self._use, self._dtype = model, use, dtype
        self.words = type(model).__name__
        self.variants = (
            "one thread",
            *((str(dtype).removeprefix("torch."),) if dtype is not None else ()),
        )

    def bare(self) -> float:
        return self._timed(self._model)

    def capture(self, path: Path, *, variant: str = "", **options: Any) -> float:
        from whence.workflows.capture.capture import capture

        began = time.monotonic()
        with _whole(path), self._as(variant) as model, capture(model, path, **options):
            self._timed(model)
        return time.monotonic() - began

    def _timed(self, model: Any) -> float:
        import random

        import numpy as np
        import torch

        states = random.getstate(), np.random.get_state()
        discarded = io.StringIO()
        began = time.monotonic()
        try:
            with (
                torch.random.fork_rng(),
                contextlib.redirect_stderr(discarded),
                contextlib.redirect_stdout(discarded),
            ):
                self._use(model)
        except Exception as error:  # whatever the user's model raises
            reason = f"{type(error).__name__}: {error}"
            raise CaptureError(
                f"the model cannot be run as asked: {reason}; run it on these inputs without "
                "whence first"
            ) from error
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        return time.monotonic() - began

    @contextlib.contextmanager
    def _as(self, variant: str) -> Iterator[Any]:
        import copy

        from whence.workflows.rounding.torch_modes import on_threads

        if variant == "one thread":
            with on_threads(1):
                yield self._model
        elif variant:
            yield copy.deepcopy(self._model).to(self._dtype)
        else:
            yield self._model


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Remove a run that did not finish, so that no partial run is left."""
    existed = path.exists()
    try:
        yield
    except BaseException:  # Ctrl-C too
        if not existed:
            shutil.rmtree(path, ignore_errors=True)
        raise


@contextlib.contextmanager
def workplace(
    keep: str | os.PathLike[str] | None, name: str, *, kept: Sequence[str] = ()
) -> Iterator[Path]:
    """A new folder for runs: `keep`, or a temporary one that is removed.

    kept: names that may be in it. Raises OutputExists when it holds anything else.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=f"whence-{name}-") as temporary:
            yield Path(temporary)
        return
    place = Path(keep)
    if place.is_file() or (
        place.is_dir() and any(entry.name not in kept for entry in place.iterdir())
    ):
        raise OutputExists(
            f"{place} is there already; whence {name} writes only into a new or empty folder: "
            "remove it or name another one"
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WhenceError(f"cannot make the folder {place}: {error.strerror or error}") from error
    yield place


def recorded(info: Any, path: str) -> Command:
    """The command that a run was made with, from its run.json: in its folder, with its Python and
    the recorded variables.

    The recorded exit code is accepted. Raises UnreadableRun when the command cannot be run again
    from there, UsageError when it would run with other libraries.
    """
    from whence.instrument.launch.redaction import MASK

    command: Mapping[str, Any] | tuple[str, ...] = info.command
    if not command:
        raise UnreadableRun(
            f"{path} does not say which command made it (captured in code, or scrubbed); give "
            "the command after --"
        )
    if any(MASK in word for word in command):
        raise UnreadableRun(
            f"the command of {path} had secrets, which were not kept; give the command after --"
        )
    as_it_ran = _variables(info, path)
    # A capture in code records what the script was given, not the Python that ran it.
    words = tuple(command)
    if not info.interpreter and words[0].endswith(".py"):
        words = sys.executable, *words
    command_again = Command(
        words,
        info.cwd,
        exit_codes=(info.settings.get("exit_code", 0),),
        variables=as_it_ran,
    )
    _same_versions(command_again, info, path)
    return command_again


def _variables(info: Any, path: str) -> dict[str, str | None]:
    """The environment in which a recorded command runs as it did. Raises UnreadableRun when its
    Python is gone.
    """
    from whence.instrument.launch.redaction import MASK

    variables: dict[str, str | None] = {
        name: value for name, value in info.environment.items() if MASK not in value
    }
    if not info.interpreter:
        return variables
    if not Path(info.interpreter).exists():
        raise UnreadableRun(
            f"{path} was made by {info.interpreter}, which is not there; give the command again "
            "after --"
        )
    variables.setdefault("PYTHONPATH", None)
    folder = str(Path(info.interpreter).parent)
    if (os.environ.get("PATH", "").split(os.pathsep) or [""])[0] != folder:
        variables["PATH"] = os.pathsep.join((folder, os.environ.get("PATH", os.defpath)))
    return variables


def _same_versions(command: Command, info: Any, path: str) -> None:
    """Raise UsageError when a library of the command's Python has another version than recorded."""
    from whence.instrument.launch import interpreter

    with contextlib.chdir(command.cwd):
        environment = command.environment()
        python = interpreter.find(command.command, environment)
        versions = interpreter.check(python, environment) if python is not None else {}
    recorded_versions = {
        name: version
        for name, version in info.versions.items()
        if name in (*interpreter.PACKAGES, "python")
    }
    changed = [
        f"{name} {versions.get(name) or 'is missing'}, was {version}"
        for name, version in recorded_versions.items()
        if versions.get(name) != version
    ]
    if versions and changed:
        raise UsageError(
            f"the program of {path} would not run as it ran: {listed(changed, 3, '; ')}. "
            "Install what was recorded, or give the command "
            "after -- to run it with what is here"
        )


def _holds_calls(path: Path) -> bool:
    from whence.readers.opening import open_run

    try:
        return any(call.refs for call in open_run(str(path)).calls)
    except WhenceError:
        return False
