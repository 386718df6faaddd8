"""A run on disk, and a command run under capture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from whence.records import Run, RunInfo


def open_run(path: str) -> Run:
    """A run on disk or a foreign dump (docs/formats.md), lazily.

    Raises UnreadableRun saying what was found instead, MissingDependency when a dump needs a package to be read.
    """
    from whence import readers, store

    here = Path(path)
    if not here.exists() or (here / "run.json").exists() or any(here.glob("rank[0-9][0-9][0-9][0-9][0-9]-*")):
        return store.open_run(path)
    from whence.workflows.capture.dump import below

    inside = below(here)
    return readers.open_run(path) if inside is None else store.open_run(inside)


def open_to_show(path: str, *, every: bool = True) -> Run:
    """As `open_run`, with figures of a dump's tensors, which are taken when they are looked at.

    every: all will be looked at; then beyond 4 GiB of elements none get figures, since reading them all would take minutes.
    """
    from whence.readers.figures import described_when_shown

    return described_when_shown(open_run(path), every=every)


def run_command(
    command: Sequence[str],
    run_path: str,
    *,
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    tell: Callable[[str], None] | None = None,
    library: str = "",
    library_runner: str = "",
    library_max: int | None = None,
    library_dump: str = "",
    labels_only: bool = False,
    **options: Any,
) -> int:
    """Run any Python command under capture and return its exit code, or 3 when it ended with 0 and nothing was captured.

    options: fields of `CaptureOptions` (strings as on the command line are read). Progress and the outcome go to stderr, or `tell`.
    environment: of the command, None for ours. log: takes what the command prints instead of our terminal.
    library: a profile of a library that saves its tensors, with its white list, number of tokens and folder (docs/labels.md).
    labels_only: listen to no module.
    Raises UsageError, CaptureError or OutputExists before anything was started.
    """
    from whence import store
    from whence.instrument.launch import launcher
    from whence.instrument.options import make
    from whence.workflows.capture.capture import check_patch
    from whence.workflows.capture.collect_labels import labelled_launch

    chosen = make(**options)
    check_patch(chosen, run_path)
    extra = labelled_launch(library, library_runner, library_max, library_dump, environment)

    def create(path: str, info: RunInfo, force: bool) -> None:
        store.create(path, info, force=force)

    return launcher.launch(
        command,
        run_path,
        chosen,
        attach="whence.api:attach_labels" if labels_only else "whence.api:attach",
        create=create,
        update=store.update_info,
        open_run=open_run,
        tell=tell or (lambda line: print(line, file=sys.stderr, flush=True)),
        environment=environment,
        log=log,
        extra=extra,
    )


def scrub(path: str, names: Sequence[str] = (), *, force: bool = False) -> tuple[int, int]:
    """Remove elements and what tells who ran what from a run; names, shapes, statistics and hashes stay. Cannot be undone.

    names: patterns; only elements of these. Returns how many records lost their elements and how many bytes the run shrank by.
    """
    from whence import store

    done = store.scrub(path, tuple(names) or None, force=force)
    return done.records, done.nbytes


def recover(path: str, *, force: bool = False) -> tuple[str, ...]:
    """Finish a run whose capture was killed; returns a sentence for every process folder. force: also while one still writes."""
    from whence import store

    told = []
    for done in store.recover(path, force=force):
        parts = [f"{done.folder}: {done.records} records readable"]
        parts += [f"finished {', '.join(done.finished)}"] if done.finished else []
        parts += [f"{done.lost} records without their elements"] if done.lost else []
        parts += [f"{done.cut_bytes} torn bytes cut from the journal"] if done.cut_bytes else []
        told.append(", ".join(parts))
    return tuple(told)


def warmup() -> None:
    """Compile the compare kernels into the cache, saying so on stderr."""
    from whence import _kernels

    _kernels.warmup(report=lambda line: print(line, file=sys.stderr, flush=True))
