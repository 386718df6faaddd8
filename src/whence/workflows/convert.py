"""Writes a run, or any dump that a reader opens, as files of another tool."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from whence.errors import OutputExists, StoreFailed, UsageError
from whence.workflows.saved import AnyPath, AnyRun, as_run

if TYPE_CHECKING:
    from whence.writers import Written

_OF_DUMPS = (".npy", ".safetensors", ".h5", ".csv", ".json", ".jsonl", ".pt", ".pth")


def formats() -> tuple[str, ...]:
    """The formats that `convert` writes."""
    from whence import writers

    return writers.known()


def convert(
    source: AnyRun,
    destination: AnyPath,
    *,
    to: str,
    force: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Written:
    """Write a run as files of another tool (docs/convert.md); every tensor keeps its dtype, bit by
    bit.

    source: a run, a foreign dump, or an open Run. destination: a new folder (for polygraphy also a
    .json file). to: one of `formats()`. force: replace a destination that holds nothing but dump
    files; a run is never replaced. progress: called with (done, of, name). `destination` appears
    only when everything is written. The result says what was written and, by reason, what the
    format cannot hold. Raises UsageError when there is nothing to write, UnreadableRun,
    OutputExists, StoreFailed, MissingDependency.
    """
    from whence import writers
    from whence.workflows.notebook_progress import counting

    writer = writers.named(to)
    final = Path(os.fspath(destination))
    if isinstance(source, (str, os.PathLike)):
        _check_apart(Path(os.fspath(source)), final)
    _check(final, force)
    run = as_run(source)
    unfinished = final.with_name(f".unfinished-{os.getpid()}-{final.name}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with counting(progress) as count:
            result = writer.write(run, unfinished, tell=count or writers.silent)
        if not result.tensors and not result.described:
            raise UsageError(f"nothing of {run.path} can be written as {to}: {_why(result)}")
        _replace(unfinished, final)
    except OSError as error:
        raise StoreFailed(
            f"cannot write {final}: {error.strerror or error}; nothing was left there"
        ) from error
    finally:
        _remove(unfinished)
    return writers.moved(result, unfinished, final)


def _check_apart(source: Path, destination: Path) -> None:
    """Raise UsageError when the destination and the source contain each other or are the same."""
    inner, outer = source.resolve(), destination.resolve()
    if inner == outer or inner in outer.parents or outer in inner.parents:
        raise UsageError(
            f"{destination} and {source} are inside each other; choose another destination"
        )


def _check(path: Path, force: bool) -> None:
    """Raise OutputExists when the destination must not be replaced."""
    from whence import store

    if not path.name:
        raise UsageError(f"{path} is not a name for a dump")
    if path.is_symlink():
        raise OutputExists(f"{path} is a link; choose another destination")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not force:
        raise OutputExists(f"{path} exists; --force replaces it")
    if path.is_dir():
        if store.is_run(path):
            raise OutputExists(
                f"{path} is a run; a conversion never replaces one: choose another destination"
            )
        strange = next(
            (
                file
                for file in path.rglob("*")
                if not file.is_dir() and file.suffix.lower() not in _OF_DUMPS
            ),
            None,
        )
        if strange is not None:
            raise OutputExists(
                f"{path} holds {strange.relative_to(path)}, which is not a file of a dump; nothing "
                "was deleted"
            )
    elif path.suffix.lower() not in _OF_DUMPS:
        raise OutputExists(f"{path} is not a file of a dump; nothing was deleted")


def _replace(new: Path, final: Path) -> None:
    """Move `new` to `final`; what was there is deleted once the new one is in place."""
    old = final.with_name(f".replaced-{os.getpid()}-{final.name}")
    if final.exists():
        final.rename(old)
    try:
        new.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _why(result: Written) -> str:
    return (
        "; ".join(f"{why} ({len(names)})" for why, names in list(result.left_out.items())[:3])
        or "there is no tensor in it"
    )
