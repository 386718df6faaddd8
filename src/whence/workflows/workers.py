"""The workers of a comparison: started with it, ended with it, and what they finished kept until
the answer is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from whence._version import __version__
from whence.workflows.saved import UNFINISHED

if TYPE_CHECKING:
    from whence.engines import Engine
    from whence.records import Run


class Workers(msgspec.Struct, frozen=True):
    """What the caller chose. engine: "local", "processes" or "ray". resume: go on with what lies in
    the folder.
    """

    engine: str = "local"
    workers: int | None = None
    address: str | None = None
    resume: bool = False

    def check(self, output: str | None) -> None:
        """Raise UsageError where that cannot be."""
        from whence.engines import create
        from whence.errors import UsageError

        create(self.engine, workers=self.workers, address=self.address)
        if self.resume and output is None:
            raise UsageError("resume (--resume) needs the folder of the comparison: -o CMP")
        if self.resume and self.engine == "local":
            raise UsageError("resume (--resume) is for engine processes or ray: --engine processes")


@contextmanager
def started(
    chosen: Workers, output: str | None, runs: tuple[Run, Run], options: Mapping[str, object]
) -> Iterator[Engine | None]:
    """The engine, for a block that ends with the answer written.

    options: all that the figures depend on. Raises UsageError where `resume` finds tasks of another
    comparison.
    """
    from whence.engines import Journal, create
    from whence.store import is_url

    if chosen.engine == "local":
        yield None
        return
    journal = None
    # What workers finish is kept beside the answer; a URL takes no file that grows.
    if output is not None and not is_url(output):
        about = {"whence": __version__, "reference": _words(runs[0]), "target": _words(runs[1])}
        about |= {name: _option(value) for name, value in options.items()}
        journal = Journal(Path(output) / UNFINISHED, about, resume=chosen.resume)
    engine = create(chosen.engine, workers=chosen.workers, address=chosen.address, journal=journal)
    assert engine is not None
    try:
        yield engine
    finally:
        engine.close()
    if journal is not None and not getattr(engine, "has_failed", False):
        journal.remove()


def _option(value: object) -> str:
    """An option in words: of a file its path, of a run where it lies."""
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_option, value))
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    return str(getattr(value, "path", type(value).__name__))


def _words(run: Run) -> str:
    """What tells a run from another one: where it lies, and a digest of its tensors and calls, or
    of its files' names, sizes and times.
    """
    from whence.records.places import absolute
    from whence.store import StoredRun

    digest = xxhash.xxh3_64()
    if isinstance(run, StoredRun):
        for process in run.readers:
            digest.update(process.folder.name.encode())
            digest.update(process.index.columns["hash"].data)
            digest.update(process.said["line_digest"].data)
    else:
        place = Path(run.path)
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file():
                status = file.stat()
                digest.update(
                    f"{file.relative_to(place)} {status.st_size} {status.st_mtime_ns}\n".encode()
                )
    counts = f"{len(run.calls)} calls, {len(run.records)} tensors"
    return f"{absolute(run.path)} ({counts}, {digest.hexdigest()})"
