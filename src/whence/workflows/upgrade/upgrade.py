"""Which models an upgrade changes: every model of a catalogue, and a user's program, under two
releases.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import queue
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from whence import disk
from whence.errors import OutputExists, UsageError, WhenceError
from whence.results import Release, Upgrade, Upgraded
from whence.workflows.upgrade import captures, environments
from whence.workflows.upgrade.one_model import Pair
from whence.workflows.upgrade.workers import Worker

Tell = Callable[[str], None]
RESULTS = "results.jsonl"
_ASKED = "asked.json"
_WITHOUT_MODELS = ("onnxruntime",)


class _Asked(msgspec.Struct, frozen=True):
    """What decides the results in a folder: a call that asks for other things needs another one."""

    first: str
    second: str
    catalogue: str
    train: bool
    version: str


def upgrade(
    first: str,
    second: str,
    output: str | os.PathLike[str],
    *,
    command: Sequence[str] = (),
    models: str = "",
    catalogue: str | os.PathLike[str] | None = None,
    budget_s: float = 7200.0,
    limit_s: float = 120.0,
    jobs: int = 1,
    train: bool = False,
    tell: Tell | None = None,
) -> Upgrade:
    """Run the same models under two releases of a package, and say which of them compute something
    else.

    first, second: requirements for pip ("transformers==5.12.0"), folders of packages, or
    interpreters. output: a folder for environments, results and scripts; what it has from an
    earlier call is used. command: a program that is captured under both as it stands. models: names
    of architectures of transformers, or patterns with *, separated by commas; "" for all of them,
    or none where there is a command. catalogue: a Python file that lists other models. budget_s:
    seconds after which no further model is begun. limit_s: of one model. jobs: how many are tried
    at a time, each in two processes. train: also losses and gradients, in training mode.
    Raises UsageError, OutputExists, WhenceError where an environment does not work; Ctrl-C keeps
    what is done.
    """
    from whence.workflows.notebook_progress import telling

    began, processor = time.monotonic(), _processor_seconds()
    folder, listed = Path(output), str(Path(catalogue).absolute()) if catalogue else ""
    if listed and not Path(listed).is_file():
        raise UsageError(f"{catalogue} is not there; a catalogue is a Python file")
    _prepare(folder, first, second, listed, train)
    with telling(tell) as say:
        both = (
            environments.opened(first, folder / "environments", None, say),
            environments.opened(second, folder / "environments", None, say),
        )
        guard = _Guard(both, folder, listed, limit_s, train, say)
        wanted = bool(models or listed or not command)
        if wanted and not models and not listed and both[0].package in _WITHOUT_MODELS:
            raise UsageError(
                f"whence knows no models of {both[0].package}; give a program after --, or a file "
                "with --catalogue"
            )
        done, untried = guard.models(models, began + budget_s, jobs) if wanted else ([], [])
        if command:
            say(f"capturing {' '.join(command)}")
            done.append(guard.captures.command(command))
        releases = guard.releases()
    return Upgrade(
        *releases,
        models=tuple(done),
        folder=str(folder),
        untried=tuple(untried),
        train=train,
        seconds=round(time.monotonic() - began, 1),
        processor_seconds=round(_processor_seconds() - processor, 1),
    )


def _processor_seconds() -> float:
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in used)


def _prepare(folder: Path, first: str, second: str, catalogue: str, train: bool) -> None:
    """Make the folder, or find that it holds results of the same question."""
    from whence._version import __version__

    held = Path(catalogue).read_bytes() if catalogue else b""
    digest = hashlib.sha256(held).hexdigest()[:16] if held else ""
    asked = _Asked(first, second, digest, train, __version__)
    file = folder / _ASKED
    if file.is_file():
        earlier = msgspec.json.decode(file.read_bytes(), type=_Asked)
        if earlier != asked:
            raise OutputExists(
                f"{folder} holds results of {earlier.first} and {earlier.second}, asked otherwise "
                "(releases, catalogue, --train or version of whence); give another folder with -o"
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise OutputExists(f"{folder} is there already and holds no results of whence upgrade")
    try:
        inside = folder / "scripts" / captures.INSIDE
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(environments.INSIDE, inside, dirs_exist_ok=True, ignore=ignored)
        disk.write_file(file, msgspec.json.encode(asked))
    except OSError as error:
        raise WhenceError(f"cannot write into {folder}: {error.strerror or error}") from error


class _Guard:
    """Tries models in two environments and keeps each result as a line."""

    def __init__(
        self,
        both: tuple[environments.Environment, environments.Environment],
        folder: Path,
        catalogue: str,
        limit_s: float,
        train: bool,
        say: Tell,
    ) -> None:
        self._both, self._folder, self._catalogue = both, folder, catalogue
        self._limit_s, self._train, self._say = limit_s, train, say
        self.captures = captures.Captures(both, folder, catalogue)
        self._versions: list[dict[str, str]] = [{}, {}]
        self._lock = threading.Lock()

    def models(self, patterns: str, deadline: float, jobs: int) -> tuple[list[Upgraded], list[str]]:
        """Results by name, those of earlier calls among them; and what was not tried."""
        pair = self._pair()
        names = self._names(patterns, pair)
        done = {name: found for name, found in self._earlier().items() if name in names}
        left = [name for name in names if name not in done]
        self._say(f"{len(left)} models to try" + (f", {len(done)} done before" if done else ""))
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in left:
            waiting.put(name)
        pairs = [pair, *(self._pair() for _ in range(jobs - 1))]
        with contextlib.ExitStack() as stack:
            for one in pairs:
                stack.callback(one.stop)
            if jobs == 1:
                self._work(pair, waiting, deadline, done)
            else:
                self._work_together(pairs, waiting, deadline, done)
        return [done[name] for name in names if name in done], [n for n in left if n not in done]

    def _work_together(
        self,
        pairs: Sequence[Pair],
        waiting: queue.SimpleQueue[str],
        deadline: float,
        done: dict[str, Upgraded],
    ) -> None:
        failed: list[BaseException] = []

        def work(pair: Pair) -> None:
            try:
                self._work(pair, waiting, deadline, done)
            except BaseException as error:  # noqa: BLE001 - raised again where the threads are waited for
                failed.append(error)

        threads = [threading.Thread(target=work, args=(pair,), daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def _work(
        self,
        pair: Pair,
        waiting: queue.SimpleQueue[str],
        deadline: float,
        done: dict[str, Upgraded],
    ) -> None:
        for name in _taken(waiting):
            if time.monotonic() > deadline:
                return
            found = pair.judge(name)
            with self._lock:
                done[name] = found
                disk.append_line(self._folder / RESULTS, msgspec.json.encode(found) + b"\n")
                self._say(f"{len(done)}: {name} {found.kind}")

    def _pair(self) -> Pair:
        scripts = (self._folder / "scripts").absolute()
        first, second = (
            Worker(environment, scripts, self._catalogue, self._limit_s)
            for environment in self._both
        )
        return Pair(first, second, self._train, self.captures.model)

    def _names(self, patterns: str, pair: Pair) -> list[str]:
        """Names of models of both releases that fit. Raises UsageError for a pattern that fits
        none.
        """
        starts = pair.start()
        self._versions = [dict(start["versions"]) for start in starts]
        known = sorted({name for start in starts for name in start["names"]})
        wanted = [word.strip() for word in patterns.split(",") if word.strip()]
        if not wanted or wanted == ["all"]:
            return known
        for pattern in wanted:
            if not fnmatch.filter(known, pattern):
                raise UsageError(
                    f"no model is called {pattern}; there are {len(known)}, among them "
                    f"{', '.join(known[:8])}"
                )
        return [n for n in known if any(fnmatch.fnmatchcase(n, pattern) for pattern in wanted)]

    def _earlier(self) -> dict[str, Upgraded]:
        """Results of earlier calls; half a line, of a call that was killed, is none."""
        file = self._folder / RESULTS
        found: dict[str, Upgraded] = {}
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            with contextlib.suppress(msgspec.DecodeError):
                model = msgspec.json.decode(line, type=Upgraded)
                found[model.name] = model
        return found

    def releases(self) -> tuple[Release, Release]:
        """The two environments as results name them."""
        first, second = (
            Release(e.given, e.python, e.folder, versions)
            for e, versions in zip(self._both, self._versions)
        )
        return first, second


def _taken(waiting: queue.SimpleQueue[str]) -> Iterator[str]:
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return
