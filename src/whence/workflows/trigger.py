"""Asks a captured program to record now, or to stop recording."""

from __future__ import annotations

import os
from pathlib import Path

from whence.errors import UsageError
from whence.workflows.saved import storing

_LISTENS = ("steps", "every", "when", "ring")


def trigger(
    run: str | os.PathLike[str], *, steps: int | None = None, on: bool = False, off: bool = False
) -> str:
    """Have the processes that write a run record so many steps from now on (None: as many as
    for_steps says), with `on` all, with `off` none any more. Returns a sentence.

    Raises UnreadableRun where there is no run, UsageError where nothing writes it or listens,
    StoreFailed where its folder cannot be written to.
    """
    from whence import store
    from whence.instrument.step_choice.requests import Asked, Request, ask
    from whence.store.folder import load_info, process_folders

    if (steps is not None) + on + off > 1:
        raise UsageError("steps, on and off exclude each other")
    path = Path(run)
    about = load_info(path)
    if not any(name in about.options for name in _LISTENS):
        raise UsageError(
            f"{path} records every step and listens to nobody: capture it with --when asked, or "
            "with --steps, --every or --ring"
        )
    if about.finished or (process_folders(path) and not store.is_written(path)):
        raise UsageError(f"no process writes {path} (any more): there is nobody to ask")
    asked = Asked.ON if on else Asked.OFF if off else Asked.STEPS
    with storing(f"ask in {path}"):
        ask(path, Request(asked, steps))
    what = {
        Asked.ON: "every step is recorded",
        Asked.OFF: "nothing is recorded",
        Asked.STEPS: f"{'the next' if steps is None else steps} steps are recorded",
    }
    return f"asked: from the next step on {what[asked]}"
