"""Where one case runs: a folder in which runs are recorded once, and answers asked for anew."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence import cli

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
Answers = Iterator[tuple[str, str]]
"""(name of a part, its text); a part whose name ends in .json or .csv is not held in tests/data."""
BUILDERS = (
    "tests",
    *(f"tests/{name}" for name in ("comparison", "instrument", "replay", "readers")),
)
"""Folders of the tests, whose models and writers of files the cases share."""


def share_builders() -> None:
    """The tests' models can be imported, and those of the other benchmarks; compilers are those of
    the tests.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault("CXX", str(ROOT / "tests" / "compiling" / "g++"))
    for name in (*BUILDERS, "benchmarks"):
        if (path := str(ROOT / name)) not in sys.path:
            sys.path.append(path)


def interpreter(framework: str = "TORCH") -> str:
    """A Python that starts programs: of the tests, which has a framework imported already, or this
    one where its coverage is measured.
    """
    if "COVERAGE_PROCESS_START" in os.environ:
        return sys.executable
    import warm

    return str(getattr(warm, framework))


@dataclass(frozen=True)
class Place:
    """folder: of one case. Whatever a case asks for runs with this as working directory."""

    folder: Path

    def once(self, name: str, make: Callable[[Path], Any]) -> str:
        """The run or file `name`, made by the first who asks."""
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._inside():
                make(path)
        return name

    def shared(self, name: str, make: Callable[[Path], Any]) -> str:
        """Runs that several cases take, made by the first who asks."""
        path = self.folder.parent.parent / "shared" / name
        if not path.exists():
            path.mkdir(parents=True)
            with self._inside():
                make(path)
        return f"../../shared/{name}"

    def clear(self) -> None:
        """Take away what was answered before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        (self.folder / "out").mkdir()

    def whence(self, *words: object) -> str:
        """What a command prints, and its exit code."""
        text = io.StringIO()
        with self._inside(text):
            try:
                code = cli.execute([str(word) for word in words])
            except SystemExit as ended:
                code = ended.code
        return f"$ whence {' '.join(map(str, words))}\n{text.getvalue()}exit code {code}\n"

    def started(self, *words: object, folder: str = ".", **environment: str) -> str:
        """What a program prints that is started here or in a folder below, and its exit code."""
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.folder / folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return f"{done.stdout}{done.stderr}exit code {done.returncode}\n"

    def compare(self, *words: object, to: str = "cmp") -> Answers:
        """The answer of `whence compare`, and every table that it writes."""
        yield f"{to}.txt", self.whence("compare", *words, "-o", f"out/{to}")
        for file in sorted((self.folder / "out" / to).rglob("*")):
            if file.suffix in (".json", ".csv") and file.is_file():
                yield f"{to}.{file.name}", file.read_text(encoding="utf-8")

    def read(self, *names: str) -> Answers:
        """Files that a command wrote."""
        for name in names:
            yield Path(name).name, (self.folder / name).read_text(encoding="utf-8")

    @contextlib.contextmanager
    def _inside(self, text: io.StringIO | None = None) -> Iterator[None]:
        said = text if text is not None else io.StringIO()
        with (
            contextlib.chdir(self.folder),
            _named(),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            yield


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """The words by which this process was started are part of what it records."""
    words = sys.argv[:]
    sys.argv[:] = ["golden.py"]
    try:
        yield
    finally:
        sys.argv[:] = words


Case = Callable[[Place], Answers]


def pair(reference: Callable[[Path], Any], target: Callable[[Path], Any], *words: str) -> Case:
    """Two runs recorded and compared."""

    def case(place: Place) -> Answers:
        place.once("ref", reference)
        place.once("tgt", target)
        yield from place.compare("ref", "tgt", *words)

    return case
