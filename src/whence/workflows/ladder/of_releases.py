"""Climbs releases of ONNX Runtime: the same command runs with one release after the other first on
its module path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whence.errors import CaptureError, UsageError
from whence.records import Run
from whence.results import LadderKind
from whence.workflows.ladder.climbers import Climber, Stairs
from whence.workflows.ladder.of_levels import nodes_of, sessions_of, settings_of

_PACKAGE = "onnxruntime"
_VERSION = re.compile(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_INSTALLED = "installed"


class ReleasesCommand(Climber):
    """A command that runs under several releases.

    folders: each contains a package onnxruntime; they are tried in this order. With a single
    folder, the installed release comes second.
    """

    def __init__(
        self, command: Sequence[str], folders: Sequence[str], options: Mapping[str, Any]
    ) -> None:
        from whence.workflows.rerun import Command

        self._subject, self._options = Command(command), dict(options)
        self.words = self._subject.words
        self._folders: dict[str, str] = {}
        for folder in folders:
            version = version_in(folder)
            if version in self._folders:
                raise UsageError(
                    f"{self._folders[version]} and {folder} both hold onnxruntime {version}; give "
                    "one of them"
                )
            self._folders[version] = str(Path(folder).absolute())
        self.stairs = Stairs(LadderKind.RELEASES, next(iter(self._folders)), sees_inside=True)

    def capture(self, path: Path, rung: str) -> float:
        """Run the command with a release. Raises CaptureError when it imported another one."""
        from whence.readers.opening import open_run

        folder = self._folders.get(rung)
        paths = [folder, self._subject.environment().get("PYTHONPATH")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))} if folder else {}
        seconds = self._subject.capture(path, environment=environment, **self._options)
        version = release_of(open_run(str(path)))
        if folder and version != rung:
            raise CaptureError(
                f"the command imported onnxruntime {version or '(none)'}, not the {rung} in "
                f"{folder}: it sets the path of its Python itself; leave that to PYTHONPATH"
            )
        return seconds

    def facts(self, path: Path, run: Run) -> dict[str, Any]:
        """The number of nodes that ran."""
        return {"nodes": nodes_of(run)}

    def rungs(self, base: Run) -> Sequence[str]:
        """All releases after the first."""
        behind = list(self._folders)[1:]
        return behind or [_INSTALLED]

    def notes(self, base: Run) -> list[str]:
        """A note when the program creates no session."""
        if sessions_of(base):
            return []
        return ["the program runs no session of ONNX Runtime: what is compared is something else"]


def release_of(run: Run) -> str:
    """The ONNX Runtime release that a run's sessions were created with, "" for none."""
    stated = (facts.get(_PACKAGE, "") for facts in settings_of(run))
    return str(next(filter(None, stated), run.info.versions.get(_PACKAGE, "")))


def version_in(folder: str) -> str:
    """The release in a folder, read without importing it. Raises UsageError when there is none."""
    path = Path(folder) / _PACKAGE / "__init__.py"
    try:
        match = _VERSION.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        match = None
    if match is None:
        raise UsageError(
            f"{folder} holds no release of ONNX Runtime ({path} is missing or states no version); "
            f"make one with: pip install --no-deps --target {folder} onnxruntime==1.20.1"
        )
    return match[1]
