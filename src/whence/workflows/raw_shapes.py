"""Gives raw bytes of one run a dtype and shape: those that the user states, or those of the tensor
of the same name in the other run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whence import dtypes
from whence.errors import UnreadableRun, UsageError
from whence.readers.encodings import raw_form
from whence.readers.encodings.raw_form import Form, Forms
from whence.readers.opening import open_run
from whence.records import Dumped, Lack, Run, missing_of


def forms_of(shapes: Iterable[str]) -> dict[str, Form]:
    """The dtype and shape stated by NAME=2x12x64:float32, by name. Raises UsageError."""
    forms: dict[str, Form] = {}
    for shape_words in shapes:
        name, is_said, text = shape_words.rpartition("=")
        if not is_said or not name:
            raise UsageError(f"shape {shape_words!r}: NAME=2x12x64:float32 is expected")
        forms[name] = raw_form.read(text)
    return forms


def with_shapes(runs: Sequence[Any], shapes: Sequence[str]) -> tuple[list[Any], list[str]]:
    """(the runs, where paths with raw bytes are opened; all shapes used to open them).

    Raises UnreadableRun, UsageError.
    """
    forms, sides = forms_of(shapes), [_Side(run) for run in runs]
    if not any(side.raw for side in sides):
        return list(runs), []
    for side in sides:
        side.open(forms)
    for side, other in zip(sides, sides[::-1], strict=True):
        if side.raw and other.run is not None:
            forms |= _alike(side, other.run)
    for side in sides:
        if side.raw and forms:
            side.open(forms)
        if side.error is not None:
            raise side.error
    stated = [f"{name}={form.text}" for name, form in forms.items()]
    return [side.run for side in sides], stated


class _Side:
    """One of the two runs.

    raw: its files of raw bytes without known shape, with their sizes. run: None while it cannot be
    opened; `error` is the reason.
    """

    def __init__(self, run: Any) -> None:
        self.path = os.fspath(run) if isinstance(run, (str, os.PathLike)) else ""
        self.run: Run | None = None if self.path or isinstance(run, Mapping) else run
        self.error: UnreadableRun | None = None
        self.raw = _raw_files(Path(self.path)) if self.path else {}

    def open(self, forms: Forms) -> None:
        if not self.path:
            return
        self.error = None
        try:
            self.run = open_run(self.path, forms)
        except UnreadableRun as error:
            self.error = error
        else:
            unread = {lack.where for lack in missing_of(self.run) if lack.kind == Lack.UNREAD}
            self.raw = {name: size for name, size in self.raw.items() if name in unread}


def _raw_files(path: Path) -> dict[str, int]:
    """The files of a dump that may contain raw bytes."""
    if path.is_dir() and (path / "run.json").exists():
        return {}
    files = path.rglob("*") if path.is_dir() else [path] if path.is_file() else []
    return {
        file.relative_to(path).as_posix() if file != path else file.name: file.stat().st_size
        for file in files
        if file.suffix.lower() in raw_form.SUFFIXES and file.is_file()
    }


def _alike(side: _Side, other: Run) -> dict[str, Form]:
    """The dtype and shape for each raw file, from the tensor of the same name in the other run, if
    the size fits.
    """
    from whence.readers.assembly.named_tensors import placed

    shapes = _by_name(other)
    is_single = Path(side.path).is_file() and len(other.records) == 1
    forms: dict[str, Form] = {}
    for file, size in side.raw.items():
        number = 0 if is_single else shapes.get(placed(file), -1)
        record = other.records[number] if number >= 0 else None
        if record is not None and record.dtype in dtypes.DTYPES:
            form = raw_form.like(record.shape, record.dtype, size)
            forms |= {file: form} if form is not None else {}
    return forms


def _by_name(run: Run) -> dict[tuple[str, int, int], int]:
    """Records by (name, step, rank), where the name is that of a file with only this record."""
    from whence.readers.assembly.named_tensors import placed

    names: dict[tuple[str, int, int], int] = {}
    for call in run.calls:
        for ref in call.refs:
            slot = "" if ref.slot == "output.0" else f".{ref.slot}"
            names.setdefault((call.scope + slot, call.step, call.rank), ref.record)
            elements = run.records[ref.record].elements
            if isinstance(elements, Dumped):
                names.setdefault(placed(elements.file), ref.record)
    return names
