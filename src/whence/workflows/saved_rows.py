"""The rows and verdicts of a saved comparison, read from its file when they are looked at: those of
a million pairs need little memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from whence.errors import UnreadableRun
from whence.results import Comparison, Row, Verdict
from whence.results.sequence import MadeOnDemand

T = TypeVar("T")
# Every item of both lists begins with this field, and no object inside of one does. In a text a
# quotation mark is escaped, so that these bytes are never a part of one.
_FIRST = b'{"pair":'
_NEXT = b"}," + _FIRST
_ROWS, _VERDICTS, _BEHIND = b',"rows":[', b'],"verdicts":[', b'],"headline":'
_PLAN = b',"plan":{"pairs":['


def without_plan(path: str | os.PathLike[str]) -> Comparison:
    """A comparison written before, for its tables: its plan is empty, and its rows and verdicts are
    decoded each time they are looked at. Raises UnreadableRun.
    """
    from whence.store import is_url
    from whence.workflows.saved import load_comparison

    if is_url(os.fspath(path)):
        from whence.workflows.saved_at_url import report_here

        with report_here(os.fspath(path)) as copy:  # its pages outlast its name
            return _of_file(copy, os.fspath(path))
    place = Path(path)
    try:
        return _of_file(place / "report.json" if place.is_dir() else place, os.fspath(path))
    except OSError:
        return load_comparison(place)  # says what is there instead


def _of_file(file: Path, path: str) -> Comparison:
    """As `without_plan`. path: as the user named it. Raises UnreadableRun, and OSError
    where the file cannot be opened.
    """
    from whence.workflows.saved import decoded_report, not_readable

    if not file.stat().st_size:
        return decoded_report(file, path)  # says so
    with file.open("rb") as opened:
        text = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    plan = text.find(_PLAN)
    rows = text.find(_ROWS, plan + len(_PLAN))
    verdicts = text.find(_VERDICTS, rows)
    behind = text.find(_BEHIND, verdicts + len(_VERDICTS))
    if min(plan, rows, verdicts, behind) < 0:
        return decoded_report(file, path)  # written by hand, or by another whence
    rest = text[:plan] + b',"plan":{"pairs":[]}' + _ROWS + _VERDICTS + text[behind:]
    try:
        result = msgspec.json.decode(rest, type=Comparison)
        return msgspec.structs.replace(
            result,
            rows=_items(text, rows + len(_ROWS), verdicts, Row),
            verdicts=_items(text, verdicts + len(_VERDICTS), behind, Verdict),
        )
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableRun(not_readable(path, error)) from error


def _items(text: mmap.mmap, start: int, stop: int, form: type[T]) -> MadeOnDemand[T]:
    """The items of a list that stands from one place to another."""
    starts = [start] if stop > start else []
    at = text.find(_NEXT, start, stop)
    while at >= 0:
        starts.append(at + 2)
        at = text.find(_NEXT, at + 2, stop)
    places = np.array([*starts, stop + 1], np.int64)
    decoder: Any = msgspec.json.Decoder(list[form])  # type: ignore[valid-type]

    def made(first: int, last: int) -> Iterator[T]:
        yield from decoder.decode(b"[" + text[int(places[first]) : int(places[last]) - 1] + b"]")

    return MadeOnDemand(len(starts), made)
