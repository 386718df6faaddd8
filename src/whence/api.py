"""Wires the rooms: what code and the command line call. This module alone knows the order of the stages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from whence.records import Run, RunInfo


def open_run(path: str) -> Run:
    """A run on disk, lazily. Raises UnreadableRun saying what was found instead."""
    from whence import store

    run: Run = store.open_run(path)
    return run


def run_command(command: Sequence[str], run_path: str, **options: Any) -> int:
    """Run any Python command under capture and return its exit code, or 3 when it ended with 0 and nothing was captured.

    options: fields of `CaptureOptions` (strings as on the command line are read). Progress and the outcome go to stderr.
    Raises UsageError, CaptureError or OutputExists before anything was started.
    """
    from whence import store
    from whence.capture import launch
    from whence.capture.options import make

    def create(path: str, info: RunInfo, force: bool) -> None:
        store.create(path, info, force=force)

    return launch.launch(
        command,
        run_path,
        make(**options),
        attach="whence.api:attach",
        create=create,
        update=store.update_info,
        open_run=open_run,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )


def scrub(path: str) -> None:
    """Remove every element and the command from a run; names, shapes, statistics and hashes stay. Cannot be undone."""
    from whence import store

    store.scrub(path)


def recover(path: str) -> tuple[str, ...]:
    """Finish a run whose capture was killed; returns a line for everything that was repaired."""
    from whence import store

    done = store.recover(path)
    return tuple(done or ())


def warmup() -> None:
    """Compile the compare kernels into the cache, saying so on stderr."""
    from whence import _kernels

    _kernels.warmup(report=lambda line: print(line, file=sys.stderr, flush=True))
