"""Captures of one program in both environments, compared."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whence.errors import WhenceError
from whence.readers.opening import open_run
from whence.results import ModulePlace, Status, Upgraded, UpgradeKind, VerdictKind

if TYPE_CHECKING:
    from whence.results import Comparison, Finding
    from whence.workflows.upgrade.environments import Environment

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
    """Runs programs in two environments. folder: of the results, with `scripts`. catalogue: a file
    that lists models, "" for transformers. limit_s: of one capture.
    """

    def __init__(
        self, environments: tuple[Environment, Environment], folder: Path, catalogue: str
    ) -> None:
        self._environments, self._folder, self._catalogue = environments, folder, catalogue

    def model(self, name: str, first: dict[str, Any], second: dict[str, Any]) -> Upgraded:
        """What captures of a model's script say; it is kept beside the results."""
        file = re.sub(r"[^\w-]+", "_", name)
        script = (self._folder / "scripts" / f"{file}.py").absolute()
        first, second = self._checkpoints(script, first, second)
        self._write(script, name, first, second)
        commands = tuple(("python", str(script), side) for side in ("first", "second"))
        found = self._compared(name, commands)
        return _with(found, script=f"scripts/{script.name}")

    def command(self, command: Sequence[str]) -> Upgraded:
        """What captures of a user's command say."""
        return self._compared(" ".join(command), (command, command))

    def _checkpoints(
        self, script: Path, first: dict[str, Any], second: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The checkpoint that the second loads is kept with the script."""
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
        """A comparison in the words of an upgrade."""
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
        """Where both releases define the module of a finding; of the second the line that calls
        the operator, where that is known.
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
    """ "file:line" of "module.Class", where the folder of packages has it; else what was given."""
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
    """What could not be judged."""
    about = result.undecided
    if about is None:
        return ModulePlace("", words=result.headline)
    return ModulePlace(about.name or about.root, about.op_type, words=about.why or result.headline)


def _with(found: Upgraded, **changes: Any) -> Upgraded:
    return msgspec.structs.replace(found, **changes)
