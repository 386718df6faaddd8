"""Finds the models that an upgrade changes: every model of a catalogue, or a user's program, runs
under two releases.

The outputs of a model are compared first; if their bits differ, everything that it computes is
captured and compared.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import resource
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from whence import disk
from whence.errors import OutputExists, UsageError, WhenceError
from whence.readers.opening import open_run
from whence.results import (
    Comparison,
    Finding,
    ModulePlace,
    Release,
    Status,
    Upgrade,
    Upgraded,
    UpgradeKind,
    VerdictKind,
)
from whence.workflows.notebook_progress import Tell
from whence.workflows.saved import AnyPath
from whence.workflows.upgrade import environments
from whence.workflows.upgrade.environments import Environment
from whence.workflows.upgrade.inside.catalogues import GENERATED

RESULTS = "results.jsonl"
_ASKED = "asked.json"
_WITHOUT_MODELS = ("onnxruntime",)


class _Asked(msgspec.Struct, frozen=True):
    """The options that determine the results in a folder; other options need another folder."""

    first: str
    second: str
    catalogue: str
    train: bool
    version: str


def upgrade(
    first: str,
    second: str,
    output: AnyPath,
    *,
    command: Sequence[str] = (),
    models: str = "",
    catalogue: AnyPath | None = None,
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
    """Processor time in seconds of this process and of finished child processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in used)


def _prepare(folder: Path, first: str, second: str, catalogue: str, train: bool) -> None:
    """Create the folder, or check that its results were made with the same options.

    Raises OutputExists when they were not.
    """
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
        inside = folder / "scripts" / INSIDE
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(environments.INSIDE, inside, dirs_exist_ok=True, ignore=ignored)
        disk.write_file(file, msgspec.json.encode(asked))
    except OSError as error:
        raise WhenceError(f"cannot write into {folder}: {error.strerror or error}") from error


class _Guard:
    """Runs models in two environments and stores each result as a line."""

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
        self.captures = Captures(both, folder, catalogue)
        self._versions: list[dict[str, str]] = [{}, {}]
        self._lock = threading.Lock()

    def models(self, patterns: str, deadline: float, jobs: int) -> tuple[list[Upgraded], list[str]]:
        """(results by name, including those of earlier calls; names of models that were
        not run).
        """
        pair = self._pair()
        names = self._names(patterns, pair)
        done = {name: found for name, found in self._earlier().items() if name in names}
        left = [name for name in names if name not in done]
        self._say(f"{len(left)} models to try" + (f", {len(done)} done before" if done else ""))
        waiting = iter(left)  # shared: each name is taken by one of the threads
        pairs = [pair, *(self._pair() for _ in range(jobs - 1))]
        with contextlib.ExitStack() as stack:
            for one in pairs:
                stack.callback(one.stop)
            if jobs == 1:  # in this thread, so that Ctrl-C ends it in the middle of a model
                self._work(pair, waiting, deadline, done)
            else:
                self._work_together(pairs, waiting, deadline, done)
        return [done[name] for name in names if name in done], [n for n in left if n not in done]

    def _work_together(
        self,
        pairs: Sequence[Pair],
        waiting: Iterator[str],
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
        self, pair: Pair, waiting: Iterator[str], deadline: float, done: dict[str, Upgraded]
    ) -> None:
        for name in waiting:
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
        """Names of the models of either release that match. Raises UsageError for a pattern without
        a match.
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
        """Results of earlier calls; an incomplete line, left by a killed call, is ignored."""
        file = self._folder / RESULTS
        found: dict[str, Upgraded] = {}
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            with contextlib.suppress(msgspec.DecodeError):
                model = msgspec.json.decode(line, type=Upgraded)
                found[model.name] = model
        return found

    def releases(self) -> tuple[Release, Release]:
        """The names of the two environments in results."""
        first, second = (
            Release(e.given, e.python, e.folder, versions)
            for e, versions in zip(self._both, self._versions)
        )
        return first, second


_Answer = dict[str, Any]
_Task = dict[str, Any]
Parameters = list[list[Any]]
"""[name, shape] of each parameter, in the model's order."""
_Deep = Callable[[str, _Task, _Task], Upgraded]
"""(name, task of the first, task of the second) -> result of comparing captures of both."""

_NARROW, _WIDE, _FORMULA = 1e-4, 1e-12, 1e-6
"""Bounds for the relative 2-norm between outputs.

At most _NARROW in float32 and at most _WIDE in float64: two ways to compute one formula. More than
_FORMULA in float64: two formulas if captures leave it open; unknown if captures call it rounding.
"""
_BEYOND_ROUNDING = {
    UpgradeKind.CANNOT_TELL: UpgradeKind.DIFFERS,
    UpgradeKind.BITWISE: UpgradeKind.CANNOT_TELL,
    UpgradeKind.ROUNDING: UpgradeKind.CANNOT_TELL,
}
"""Result of the captures -> the answer when the difference stays in float64."""
_SHOWN = 4


class Pair:
    """Two workers, one for each environment. deep: compares captures."""

    def __init__(self, first: Worker, second: Worker, train: bool, deep: _Deep) -> None:
        self._first, self._second = first, second
        self._train, self.deep = train, deep
        self._known: tuple[_Answer, _Answer] | None = None

    def start(self) -> tuple[_Answer, _Answer]:
        """What both environments contain: `names` of models and `versions`."""
        self._first.launch()
        self._second.launch()
        self._known = self._first.start(), self._second.start()
        return self._known

    def judge(self, name: str) -> Upgraded:
        """Judge the effect of an upgrade on a model."""
        known = [name in side["names"] for side in self._known or self.start()]
        if not all(known):
            return Upgraded(name, UpgradeKind.REMOVED if known[0] else UpgradeKind.ADDED)
        with tempfile.TemporaryDirectory(prefix="whence-upgrade-") as place:
            return _Trial(self, name, place).result()

    def ask(self, first: _Task | None, second: _Task | None) -> tuple[_Answer, _Answer]:
        """Send a task to each worker at the same time and return both answers; {} for no task."""
        workers = (self._first, self._second)
        for worker, task in zip(workers, (first, second)):
            if task is not None:
                worker.send({**task, "train": self._train})
        answers = [
            worker.receive() if task is not None else {}
            for worker, task in zip(workers, (first, second))
        ]
        return answers[0], answers[1]

    def stop(self) -> None:
        """End both processes."""
        self._first.stop()
        self._second.stop()


class _Trial:
    """The attempts for one model.

    Each step may make both sides more alike and records what it had to change in `benign`,
    `settings` and `notes`.
    """

    def __init__(self, pair: Pair, name: str, place: str) -> None:
        self._pair, self._name, self._checkpoint = pair, name, str(Path(place, "checkpoint"))
        self._tasks: tuple[_Task, _Task] = ({"name": name}, {"name": name})
        self._benign: list[str] = []
        self._notes: list[str] = []
        self._settings: tuple[str, ...] = ()
        self._guessed = ""  # why the weights of the two may be other ones
        self._seconds = 0.0

    def result(self) -> Upgraded:
        first, second = self._ask(*self._tasks)
        if not (first["ok"] and second["ok"]):
            return self._unbuilt(first, second)
        if first["chosen"] != second["chosen"]:
            first, second = self._same_choice(first, second)
        else:
            self._choose(first["chosen"])
        if first["parameters"] != second["parameters"]:
            first, second = self._same_weights(first, second)
        if not (first["ok"] and second["ok"]):
            return self._unbuilt(first, second)
        found = Upgraded(self._name, UpgradeKind.BITWISE, model=first["chosen"].get("class", ""))
        changed = _changed(first["settings"], second["settings"])
        self._settings = tuple(_setting_said(key, *both) for key, both in changed.items())
        if not _unequal(first, second):
            return self._finished(found, first)
        again, _ = self._ask(self._tasks[0], None)
        if again["outputs"] != first["outputs"]:
            self._notes.append("the model does not repeat itself under the first release")
            kind = UpgradeKind.CANNOT_TELL
            return self._finished(msgspec.structs.replace(found, kind=kind), first)
        if changed and (named := self._pinned(found, first, changed)) is not None:
            return self._finished(named, first)
        deep = _reshaped(self._finished(self._deeper(found), first), first, second)
        return only_generating(deep, first, second)

    def _ask(self, first: _Task | None, second: _Task | None) -> tuple[_Answer, _Answer]:
        answers = self._pair.ask(first, second)
        self._seconds += sum(answer.get("seconds", 0.0) for answer in answers)
        return answers

    def _choose(self, chosen: Any) -> None:
        self._tasks = tuple({**task, "chosen": chosen} for task in self._tasks)  # type: ignore[assignment]

    def _same_choice(self, first: _Answer, second: _Answer) -> tuple[_Answer, _Answer]:
        """Run both sides with the class, sizes and inputs of one of them, if the other accepts
        them.
        """
        _, tried = self._ask(None, {**self._tasks[1], "chosen": first["chosen"]})
        if tried["ok"]:
            self._choose(first["chosen"])
            return first, tried
        other, _ = self._ask({**self._tasks[0], "chosen": second["chosen"]}, None)
        self._choose(second["chosen"])
        if not other["ok"]:
            return {**first, "ok": False, "error": other["error"]}, {
                **second,
                "ok": False,
                "error": tried["error"],
            }
        self._notes.append(f"the second release does not run as the first does: {tried['error']}")
        return other, second

    def _same_weights(self, first: _Answer, second: _Answer) -> tuple[_Answer, _Answer]:
        """Let the second release load the weights that the first saves, as it would load a user's
        checkpoint.
        """
        self._benign.append(_renamed(first["parameters"], second["parameters"]))
        if not first["chosen"]:
            return self._called_alike(first, second)
        saved, _ = self._ask({**self._tasks[0], "save": self._checkpoint}, None)
        if not saved["ok"]:
            return saved, second
        tasks = {**self._tasks[1], "load": self._checkpoint}
        _, loaded = self._ask(None, tasks)
        if not loaded["ok"]:
            return first, loaded
        if loaded["missing"]:
            few = ", ".join(loaded["missing"][:_SHOWN])
            self._guessed = (
                f"{len(loaded['missing'])} weights are not in the first release's checkpoint: {few}"
            )
        self._tasks = (self._tasks[0], tasks)
        return saved, loaded

    def _called_alike(self, first: _Answer, second: _Answer) -> tuple[_Answer, _Answer]:
        """Give renamed weights of the second release the values of those with the same shape, in
        order.
        """
        called, left = _by_shape(first["parameters"], second["parameters"])
        self._guessed = "weights were matched by their order and shape"
        if left:
            self._guessed = f"{left} weights of the second release match none of the first"
        tasks = {**self._tasks[1], "called": called}
        _, again = self._ask(None, tasks)
        self._tasks = (self._tasks[0], tasks)
        return first, again

    def _pinned(
        self, found: Upgraded, first: _Answer, changed: dict[str, tuple[Any, Any]]
    ) -> Upgraded | None:
        """The result when changed defaults explain the whole difference, else None.

        When a difference remains, the second release keeps the first one's settings from here on.
        """
        settings = _nested({key: both[0] for key, both in changed.items()})
        task = {**self._tasks[1], "settings": settings}
        _, pinned = self._ask(None, task)
        if not pinned["ok"] or pinned["parameters"] != first["parameters"]:
            self._notes.append("the second release cannot be given the first one's settings")
            return None
        if not _unequal(first, pinned):
            words = "; ".join(self._settings[:_SHOWN])
            place = ModulePlace("", cause="settings", words=f"defaults differ: {words}")
            deep = self._deeper(found)
            return msgspec.structs.replace(
                deep,
                kind=UpgradeKind.DIFFERS if deep.kind != UpgradeKind.ROUNDING else deep.kind,
                place=place,
            )
        self._tasks = (self._tasks[0], task)
        self._notes.append("compared with the first release's settings")
        return None

    def _deeper(self, found: Upgraded) -> Upgraded:
        """Decide by float64 whether both compute the same formula; otherwise by comparing
        captures.
        """
        narrow, output = self._distance(wide=False)
        wide, _ = self._distance(wide=True)
        replace = msgspec.structs.replace
        measured = {"largest": narrow, "largest_wide": wide, "output": output}
        if narrow is not None and wide is not None and narrow <= _NARROW and wide <= _WIDE:
            return replace(found, kind=UpgradeKind.ROUNDING, **measured)
        deep = self._pair.deep(self._name, *self._tasks)
        large = narrow is not None and narrow > _NARROW
        if wide is not None and wide > _FORMULA:
            deep = replace(deep, kind=_BEYOND_ROUNDING.get(deep.kind, deep.kind))
        elif large and deep.kind in (UpgradeKind.BITWISE, UpgradeKind.ROUNDING):
            deep = replace(deep, kind=UpgradeKind.CANNOT_TELL)  # captures may miss what made it
        return replace(deep, model=found.model, **measured)

    def _distance(self, wide: bool) -> tuple[float | None, str]:
        """(largest relative 2-norm between outputs of both, name of that output).

        None when there is none, or when a side does not run with these options.
        """
        files = [self._checkpoint + f"-{side}.npz" for side in ("first", "second")]
        tasks = [{**task, "keep": file, "wide": wide} for task, file in zip(self._tasks, files)]
        answers = self._ask(tasks[0], tasks[1])
        if not all(answer["ok"] for answer in answers):
            return None, ""
        return _distance(*files)

    def _finished(self, found: Upgraded, first: _Answer) -> Upgraded:
        kind = found.kind
        notes = [*found.notes, *self._notes]
        if not all(entry[3] for entry in first["outputs"].values()):
            notes.append("outputs hold numbers that are not finite")
        if self._guessed:
            notes.append(self._guessed)
            if kind == UpgradeKind.DIFFERS:
                kind = UpgradeKind.CANNOT_TELL
        return msgspec.structs.replace(
            found,
            kind=kind,
            benign=(*self._benign, *found.benign),
            settings=self._settings,
            notes=tuple(notes),
            modules=first["modules"],
            idle=first["idle"],
            seconds=round(self._seconds + found.seconds, 2),
        )

    def _unbuilt(self, first: _Answer, second: _Answer) -> Upgraded:
        kind = {
            (False, True): UpgradeKind.RUNS_IN_SECOND,
            (True, False): UpgradeKind.FAILS_IN_SECOND,
        }.get((first["ok"], second["ok"]), UpgradeKind.CANNOT_BUILD)
        ran = first if first["ok"] else second
        return Upgraded(
            self._name,
            kind,
            model=(ran.get("chosen") or {}).get("class", ""),
            errors=(first.get("error", ""), second.get("error", "")),
            notes=tuple(self._notes),
            benign=tuple(self._benign),
            seconds=round(self._seconds, 2),
        )


def _unequal(first: _Answer, second: _Answer) -> bool:
    """Whether an output of the first release has other bits in the second, or is missing there."""
    return any(second["outputs"].get(name) != found for name, found in first["outputs"].items())


def _distance(first: str, second: str) -> tuple[float | None, str]:
    found: dict[str, float] = {}
    with np.load(first) as before, np.load(second) as after:
        for name in before.files:
            if name not in after.files or before[name].shape != after[name].shape:
                return None, ""
            one, other = before[name], after[name]
            if (np.isfinite(one) != np.isfinite(other)).any():
                return None, ""
            one, other = (np.where(np.isfinite(array), array, 0.0) for array in (one, other))
            size = float(np.linalg.norm(one)) or float(np.linalg.norm(other))
            found[name] = float(np.linalg.norm(one - other)) / size if size else 0.0
    largest = max(found, key=lambda name: found[name], default="")
    return found.get(largest), largest


def _reshaped(found: Upgraded, first: _Answer, second: _Answer) -> Upgraded:
    """Report a missing output, or one with another shape or dtype, as different, whatever captures
    say.
    """
    for name, (dtype, shape, *_) in first["outputs"].items():
        after = second["outputs"].get(name)
        if after is None:
            words = f"the second release has no output {name}"
        elif after[:2] != [dtype, shape]:
            words = f"output {name} was {dtype} {shape}, is {after[0]} {after[1]}"
        else:
            continue
        place = found.place or ModulePlace("", cause="structural", words=words)
        if found.place is not None:
            place = msgspec.structs.replace(place, words=f"{words}; {place.words}")
        return msgspec.structs.replace(found, kind=UpgradeKind.DIFFERS, place=place)
    return found


def only_generating(found: Upgraded, first: _Answer, second: _Answer) -> Upgraded:
    """Say so where everything but the steps of a generation is equal bit by bit."""
    unequal = [n for n, held in first["outputs"].items() if second["outputs"].get(n) != held]
    if not unequal or not all(name.startswith(GENERATED) for name in unequal):
        return found
    step = min(int(name.removeprefix(GENERATED)) for name in unequal)
    words = f"differs only in `generate`, step {step}"
    place = found.place or ModulePlace("")
    place = msgspec.structs.replace(place, words="; ".join(filter(None, (words, place.words))))
    return msgspec.structs.replace(found, place=place)


def _changed(first: Any, second: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Settings that both have with different values, by dotted name."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in first.keys() & second.keys():
        one, other = first[key], second[key]
        if isinstance(one, dict) and isinstance(other, dict):
            found |= _changed(one, other, f"{prefix}{key}.")
        elif one != other:
            found[f"{prefix}{key}"] = (one, other)
    return dict(sorted(found.items()))


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *folders, last = key.split(".")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    return nested


def _setting_said(key: str, before: Any, after: Any) -> str:
    return f"{key} is {after!r:.60}, was {before!r:.60}"


def _by_shape(first: Parameters, second: Parameters) -> tuple[dict[str, str], int]:
    """(new name -> old name of weights that only one side has, number of new ones without
    a match).
    """
    before, after = (dict(side) for side in (first, second))
    lost = [name for name in before if before[name] != after.get(name)]
    called: dict[str, str] = {}
    left = 0
    for name in after:
        if after[name] != before.get(name):
            fits = next((old for old in lost if before[old] == after[name]), None)
            if fits is None:
                left += 1
            else:
                lost.remove(fits)
                called[name] = fits
    return called, left


def _renamed(first: Parameters, second: Parameters) -> str:
    """Describe weights with another name or shape."""
    before, after = (dict(side) for side in (first, second))
    lost = [name for name in before if before[name] != after.get(name)]
    new = [name for name in after if after[name] != before.get(name)]
    words = f"{len(lost)} weights became {len(new)}"
    if lost and new:
        words += f" ({lost[0]} {before[lost[0]]} -> {new[0]} {after[new[0]]})"
    return f"weights renamed or fused: {words}"


# Processes inside the two environments that build and run models, with a time limit each.

_START_S = 300
_LAST_LINES = 8


class Worker:
    """A process in one environment.

    scripts: folder with the package that it runs. A crash, or a model beyond its time limit, ends
    the process; the next task starts another.
    """

    def __init__(
        self, environment: Environment, scripts: Path, catalogue: str, limit_s: float
    ) -> None:
        self.environment, self._limit_s = environment, limit_s
        self._scripts, self._catalogue = scripts, catalogue
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._held = b""
        self._deadline = 0.0
        self.first: dict[str, Any] = {}

    def start(self) -> dict[str, Any]:
        """What the environment contains: `names` of models and `versions`.

        Raises WhenceError when the environment does not work.
        """
        self.launch()
        if not self.first:
            self.first = self._read(time.monotonic() + _START_S)
        if not self.first["ok"]:
            said = self.first["error"]
            self.stop()
            raise WhenceError(f"{self.environment.given} does not work: {said}")
        return self.first

    def launch(self) -> None:
        """Start the process without waiting; `start` waits for it."""
        if self._process is not None:
            return
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            [self.environment.python, "-m", "whence_inside.worker", self._catalogue],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._scripts,
            env={**os.environ, **self.environment.variables()},
            start_new_session=True,
        )
        self._held, self.first = b"", {}

    def send(self, task: Mapping[str, Any]) -> None:
        """Send a task without waiting; `receive` waits for the answer."""
        self.start()
        self._deadline = time.monotonic() + self._limit_s
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; receive says so
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The answer to the task that was sent, which may say that it crashed or took too long."""
        found = self._read(self._deadline)
        if found.get("ended"):
            self.stop()
        return found

    def _read(self, deadline: float) -> dict[str, Any]:
        """Read one line from the process."""
        assert self._process is not None and self._process.stdout is not None
        number = self._process.stdout.fileno()
        while b"\n" not in self._held:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([number], [], [], left)[0]:
                return _failed(f"it took longer than {self._limit_s:g} s (--limit)")
            piece = os.read(number, 1 << 16)
            if not piece:
                return _failed(f"the process died ({self._ending()}): {self._last_lines()}")
            self._held += piece
        line, _, self._held = self._held.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ending(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_LAST_LINES:])[-600:]

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _failed(words: str) -> dict[str, Any]:
    return {"ok": False, "error": words, "ended": True, "seconds": 0.0}


# Captures of one program in both environments, compared.

INSIDE = "whence_inside"
_ALONE = threading.Lock()  # capturing changes the working folder of this process
_KINDS = {
    Status.SAME: UpgradeKind.ROUNDING,
    Status.DIFFERENT: UpgradeKind.DIFFERS,
    Status.UNDECIDED: UpgradeKind.CANNOT_TELL,
}
_SCRIPT = '''"""{name} under two releases.

Run it in both environments and compare what it prints:

{commands}

What differs, operator by operator:

{captures}
    whence compare run-first run-second
"""

import sys

from whence_inside import worker

FIRST = {first!r}
SECOND = {second!r}

if __name__ == "__main__":
    worker.show({catalogue!r}, SECOND if "second" in sys.argv[1:] else FIRST)
'''


class Captures:
    """Captures programs in two environments.

    folder: of the results, with `scripts`. catalogue: a file that lists models, "" for
    transformers. limit_s: time limit of one capture.
    """

    def __init__(
        self, environments: tuple[Environment, Environment], folder: Path, catalogue: str
    ) -> None:
        self._environments, self._folder, self._catalogue = environments, folder, catalogue

    def model(self, name: str, first: dict[str, Any], second: dict[str, Any]) -> Upgraded:
        """Compare captures of a script that runs the model; the script is kept next to
        the results.
        """
        file = re.sub(r"[^\w-]+", "_", name)
        script = (self._folder / "scripts" / f"{file}.py").absolute()
        first, second = self._checkpoints(script, first, second)
        self._write(script, name, first, second)
        commands = tuple(("python", str(script), side) for side in ("first", "second"))
        found = self._compared(name, commands)
        return _with(found, script=f"scripts/{script.name}")

    def command(self, command: Sequence[str]) -> Upgraded:
        """Compare captures of a user's command."""
        return self._compared(" ".join(command), (command, command))

    def _checkpoints(
        self, script: Path, first: dict[str, Any], second: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Copy the checkpoint that the second release loads next to the script."""
        if not second.get("load"):
            return first, second
        kept = script.with_suffix(".weights")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(second["load"], kept)
        return first, {**second, "load": str(kept.absolute())}

    def _write(
        self, script: Path, name: str, first: dict[str, Any], second: dict[str, Any]
    ) -> None:
        sides = ("first", "second")
        lines = []
        for environment, side in zip(self._environments, sides):
            path = f"PYTHONPATH={environment.folder} " if environment.folder else ""
            lines.append(f"    {path}OMP_NUM_THREADS=1 {environment.python} {script.name} {side}")
        captures = [
            line.replace("    ", f"    whence run -o run-{side} -- env ", 1)
            for line, side in zip(lines, sides)
        ]
        script.write_text(
            _SCRIPT.format(
                name=name,
                commands="\n".join(lines),
                captures="\n".join(captures),
                first=first,
                second=second,
                catalogue=self._catalogue,
            ),
            encoding="utf-8",
        )

    def _compared(self, name: str, commands: Sequence[Sequence[str]]) -> Upgraded:
        from whence.workflows.compare import compare
        from whence.workflows.rerun import Command

        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="whence-upgrade-") as place, _ALONE:
            runs = [str(Path(place, side)) for side in ("first", "second")]
            failed = ["", ""]
            for number, environment in enumerate(self._environments):
                program = Command(commands[number], variables=environment.variables())
                try:
                    program.capture(Path(runs[number]))
                except WhenceError as error:
                    failed[number] = str(error)
            if any(failed):
                return self._not_captured(name, failed)
            try:
                result = compare(*runs)
            except WhenceError as error:
                note = f"the captures cannot be compared: {error}"
                return Upgraded(name, UpgradeKind.CANNOT_TELL, notes=(note,))
            found = self._said(name, result)
        return _with(found, seconds=round(time.monotonic() - began, 2))

    def _not_captured(self, name: str, failed: list[str]) -> Upgraded:
        kind = UpgradeKind.CANNOT_BUILD
        if not failed[0]:
            kind = UpgradeKind.FAILS_IN_SECOND
        elif not failed[1]:
            kind = UpgradeKind.RUNS_IN_SECOND
        return Upgraded(name, kind, errors=(failed[0], failed[1]))

    def _said(self, name: str, result: Comparison) -> Upgraded:
        """A comparison as the result of an upgrade."""
        kind = _KINDS[Status(result.status)]
        place, largest = None, result.effect.error if result.effect is not None else None
        finding = next(iter(result.findings), None)
        if finding is not None:
            first, second = self._lines(result, finding)
            place = ModulePlace(
                finding.name,
                finding.op_type,
                str(finding.cause),
                finding.sentence,
                first,
                second,
                finding.operator,
            )
        elif kind != UpgradeKind.ROUNDING:
            place = _undecided(result)
        if kind == UpgradeKind.ROUNDING and {k for k, n in result.counts.items() if n} <= {
            VerdictKind.IDENTICAL
        }:
            kind = UpgradeKind.BITWISE
        benign = []
        if result.unmatched:
            benign.append(f"{result.unmatched} calls have no partner of their own")
        return Upgraded(
            name,
            kind,
            place=place,
            others=max(0, len(result.findings) - 1),
            benign=tuple(benign),
            largest=largest,
        )

    def _lines(self, result: Comparison, finding: Finding) -> tuple[str, str]:
        """The lines that define the module of a finding in both releases.

        For the second release, the line that calls the operator if it is known.
        """
        found = []
        for run_path, environment in zip((result.reference, result.target), self._environments):
            run = open_run(run_path)
            source = next((c.source for c in run.calls if c.name == finding.name), "")
            found.append(defined(source, environment.folder))
        if ":" in finding.source and finding.side == "target":
            found[1] = finding.source
        folders = [environment.folder for environment in self._environments]
        first, second = (line.replace(f"{f}/", "") for line, f in zip(found, folders))
        return first, second


def defined(source: str, folder: str) -> str:
    """The place "file:line" of "module.Class" if the package folder contains it; otherwise the
    given text.
    """
    module, _, name = source.rpartition(".")
    place = Path(folder, *module.split("."))
    files = [place.with_suffix(".py"), place / "__init__.py"] if folder and module else []
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return source
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if re.match(rf"class {re.escape(name)}\b", line):
            return f"{file}:{number}"
    return source


def _undecided(result: Comparison) -> ModulePlace:
    """Describe what could not be judged."""
    about = result.undecided
    if about is None:
        return ModulePlace("", words=result.headline)
    return ModulePlace(about.name or about.root, about.op_type, words=about.why or result.headline)


def _with(found: Upgraded, **changes: Any) -> Upgraded:
    return msgspec.structs.replace(found, **changes)
