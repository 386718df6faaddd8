"""Recover and scrub runs."""

from __future__ import annotations

from collections.abc import Sequence


def scrub(path: str, names: Sequence[str] = (), *, force: bool = False) -> tuple[int, int]:
    """Remove elements and what tells who ran what from a run; names, shapes, statistics and hashes
    stay. Cannot be undone.

    names: patterns; only elements of these. Returns how many records lost their elements and how
    many bytes the run shrank by.
    """
    from whence import store

    _check(path)
    result = store.scrub(path, tuple(names) or None, force=force)
    return result.records, result.nbytes


def recover(path: str, *, force: bool = False) -> tuple[str, ...]:
    """Finish a run whose capture was killed; returns a sentence for every process folder. force:
    also while one still writes.
    """
    from whence import store

    _check(path)
    sentences = []
    for result in store.recover(path, force=force):
        parts = [f"{result.folder}: {result.records} records readable"]
        parts += [f"finished {', '.join(result.finished)}"] if result.finished else []
        parts += [f"{result.lost} records without their elements"] if result.lost else []
        parts += [f"{result.cut_bytes} torn bytes cut from the journal"] if result.cut_bytes else []
        sentences.append(", ".join(parts))
    return tuple(sentences)


def _check(path: str) -> None:
    """Raise UnreadableRun when the path is some other output of whence than a run."""
    from whence import store
    from whence.errors import UnreadableRun

    if instead := store.what_instead(path):
        raise UnreadableRun(f"{path} {instead}")
