"""Creates a run on disk, and runs a command under capture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    from whence.instrument.arguments import CaptureArguments
    from whence.instrument.launch.launcher import RunStore
    from whence.records import RunInfo


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
    bare: bool = True,
    **options: Unpack[CaptureArguments],
) -> int:
    """Run any Python command under capture and return its exit code, or 3 when it ended with 0 and
    nothing was captured. A run in which nothing was captured is deleted again. run_path: a folder,
    or the URL of one in an object store, to which the run is uploaded while the command runs.

    options: fields of `CaptureOptions` (strings as on the command line are read). Progress and the
    outcome go to stderr, or `tell`. environment: of the command, None for ours. log: takes what the
    command prints instead of our terminal. library: a profile of a library that saves its tensors,
    with its white list, number of tokens and folder (docs/labels.md). labels_only: listen to no
    module. bare: after a capture of compiled graphs, run the command once more without one, and
    note in the run whether being watched changed what it computes. Raises UsageError, CaptureError
    or OutputExists before anything was started, StoreFailed where the run could not be uploaded.
    """
    from whence import store
    from whence.instrument.launch import launcher
    from whence.instrument.options import make
    from whence.workflows.capture.collect_labels import labelled_launch
    from whence.workflows.capture.setup import beyond_disk, check_patch
    from whence.workflows.upload import uploaded

    chosen = make(**options)
    check_patch(chosen, run_path)
    extra = labelled_launch(library, library_runner, library_max, library_dump, environment)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def launched(path: str, variables: Mapping[str, str] | None) -> int:
        if warning := beyond_disk(chosen.max_bytes, path):
            (tell or say)(warning)
        return launcher.launch(
            command,
            path,
            chosen,
            attach="whence.api:attach_labels" if labels_only else "whence.api:attach",
            runs=_runs(),
            terminal=launcher.Terminal(tell or say, variables, log),
            extra=extra,
        )

    def capture(path: str) -> int:
        if chosen.level != "graph":
            return launched(path, environment)
        from whence.workflows.capture.bare import Bare

        with Bare(command, chosen, environment, tell or say, wanted=bare) as measured:
            code = launched(path, measured.environment)
            measured.measure(path)
        return code

    if store.is_url(run_path):
        return uploaded(run_path, chosen.force, capture, tell or say)
    return capture(run_path)


def _runs() -> RunStore:
    """The functions by which the launcher creates and reads runs."""
    from whence import store
    from whence.instrument.launch import launcher

    def create(path: str, info: RunInfo, force: bool) -> None:
        store.create(path, info, force=force)

    def discard(path: str, also: Collection[str], folder: bool) -> bool:
        return store.discard(path, also=also, folder=folder)

    def set_aside(path: str, also: Collection[str], force: bool) -> store.SetAside:
        return store.SetAside(path, also=also, force=force)

    return launcher.RunStore(
        create, store.update_info, store.open_run, discard, store.reasons, set_aside
    )
