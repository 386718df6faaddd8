"""The two environments of an upgrade: installed with pip, folders of packages, or interpreters."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from whence.errors import UsageError, WhenceError
from whence.workflows.notebook_progress import Tell

INSIDE = Path(__file__).parent / "inside"
_NAME = re.compile(r"[\w.-]+(\[[^\]]*\])?")
"""Matches the distribution in a requirement, with its extras."""
_ROUNDS = 4
_INSTALL_S = 1800
_SHOWN_LINES = 6


class Environment(NamedTuple):
    """A Python interpreter with an optional package folder.

    folder: comes first on the module path, "" for none. given: as the user named it. package: the
    requested distribution, "" for a folder or an interpreter.
    """

    given: str
    python: str
    folder: str = ""
    package: str = ""

    def variables(self) -> dict[str, str]:
        """Environment variables for its processes.

        One thread, so that neither the number of cores nor their load changes a sum; libraries stay
        offline.
        """
        beside = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, (self.folder, beside)))
        python_folder = str(Path(self.python).parent)
        return {
            "PATH": os.pathsep.join((python_folder, os.environ.get("PATH", os.defpath))),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **({"PYTHONPATH": path} if path else {}),
        }


def opened(given: str, folder: Path, python: str | None, tell: Tell) -> Environment:
    """The environment that `given` names: an interpreter, a folder of packages, or a requirement.

    A requirement is installed with pip below `folder`, unless it is there already. python: installs
    and runs it, None for this interpreter. Raises UsageError, and WhenceError when pip fails.
    """
    path = Path(given)
    runs = python or sys.executable
    if path.is_file() and os.access(path, os.X_OK) and not given.endswith((".whl", ".gz")):
        return Environment(given, str(path.absolute()))
    if path.is_dir():
        inner = path / "bin" / "python"
        if inner.is_file():
            return Environment(given, str(inner.absolute()))
        return Environment(given, runs, str(path.absolute()))
    if os.sep in given and not path.is_file():
        raise UsageError(f"{given} is not there; give a requirement, a folder or an interpreter")
    place = folder / re.sub(r"[^\w.=-]+", "_", Path(given).name)
    if not (place / "installed.json").is_file():
        _install(given, place, runs, tell)
    stated = json.loads((place / "installed.json").read_text(encoding="utf-8"))
    return Environment(given, runs, str(place.absolute()), stated["package"])


def _install(given: str, place: Path, python: str, tell: Tell) -> None:
    """Install a release without its requirements, then the requirements that are not met."""
    partial = place.with_name(place.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tell(f"installing {given}")
    _pip(python, partial, [given], given)
    package = _distribution(partial, given)
    installed, wanted = [given], [package]
    for _ in range(_ROUNDS):
        unmet = [line for line in _unmet(python, partial, wanted) if line not in installed]
        if not unmet:
            break
        tell(f"installing {', '.join(unmet)}, which {given} demands")
        _pip(python, partial, unmet, given)
        installed += unmet
        wanted = [_NAME.match(line)[0] for line in unmet]  # type: ignore[index]
    else:
        raise WhenceError(
            f"{given}: its requirements are not met after {_ROUNDS} rounds of pip "
            f"({', '.join(unmet)}); install it into an environment of its own and give its Python"
        )
    (partial / "installed.json").write_text(
        json.dumps({"package": package, "installed": installed}), encoding="utf-8"
    )
    shutil.rmtree(place, ignore_errors=True)
    partial.replace(place)


def _pip(python: str, place: Path, requirements: Sequence[str], given: str) -> None:
    """Install into a folder. Raises WhenceError with the attempted command and pip's last lines.

    pip deletes a package's folder that exists already, even one that several distributions share
    (`nvidia`). So it installs into a temporary folder, whose files are then moved over `place`.
    """
    beside = place.with_name(place.name + ".round")
    shutil.rmtree(beside, ignore_errors=True)
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(beside), *requirements]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WhenceError(
            f"{given}: pip did not run to its end ({error}); "
            "install the release yourself and give the folder or the Python"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "WARNING" not in line]
        said = "\n".join(f"  | {line[:300]}" for line in lines[-_SHOWN_LINES:])
        raise WhenceError(
            f"pip cannot install {' '.join(requirements)} for {given} "
            f"(pip install --no-deps --target FOLDER):\n{said}\n"
            "check the version, or install it yourself and give the folder or the Python"
        )
    _lay_over(beside, place)


def _lay_over(source: Path, place: Path) -> None:
    """Move all files of a folder into another one, merging folders that exist in both."""
    for entry in source.iterdir():
        target = place / entry.name
        if entry.is_dir() and target.is_dir():
            _lay_over(entry, target)
        else:
            entry.replace(target)
    source.rmdir()


def _distribution(place: Path, given: str) -> str:
    """The name of the distribution that was installed first."""
    folders = sorted(place.glob("*.dist-info"))
    if not folders:
        raise WhenceError(
            f"pip installed no distribution for {given}; name a package, as transformers==5.20.0"
        )
    return folders[0].name.removesuffix(".dist-info").rpartition("-")[0]


def _unmet(python: str, place: Path, names: Sequence[str]) -> list[str]:
    """Requirements of distributions that nothing in the environment satisfies."""
    variables = {**os.environ, **Environment("", python, str(place)).variables()}
    done = subprocess.run(
        [python, str(INSIDE / "requirements.py"), *names],
        capture_output=True,
        text=True,
        env=variables,
        check=False,
    )
    if done.returncode:
        raise WhenceError(
            f"{python} cannot read what {', '.join(names)} needs: {done.stderr[-300:]}"
        )
    return [str(line) for line in json.loads(done.stdout)]
