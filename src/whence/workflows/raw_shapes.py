"""Raw bytes of one run in the dtype and shape that the user says, or that the other run's tensor of
the same name has.
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
    """The forms that NAME=2x12x64:float32 says, by name. Raises UsageError."""
    forms: dict[str, Form] = {}
    for shape_words in shapes:
        name, is_said, text = shape_words.rpartition("=")
        if not is_said or not name:
            raise UsageError(f"shape {shape_words!r}: NAME=2x12x64:float32 is expected")
        forms[name] = raw_form.read(text)
    return forms


def with_shapes(runs: Sequence[Any], shapes: Sequence[str]) -> tuple[list[Any], list[str]]:
    """(the runs, those with raw bytes opened where they were paths; all shapes that these were
    opened with). Raises UnreadableRun, UsageError.
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
    """One run of two. raw: its files of raw bytes that nothing tells the shape of, and their sizes.
    run: None while it cannot be opened, for which `error` is the reason.
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
    """The files of a dump that may hold raw bytes."""
    if path.is_dir() and (path / "run.json").exists():
        return {}
    files = path.rglob("*") if path.is_dir() else [path] if path.is_file() else []
    return {
        file.relative_to(path).as_posix() if file != path else file.name: file.stat().st_size
        for file in files
        if file.suffix.lower() in raw_form.SUFFIXES and file.is_file()
    }


def _alike(side: _Side, other: Run) -> dict[str, Form]:
    """The forms of files that tensors of the other run of the same name have, where they fit."""
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
    """Records by the name that a file of theirs alone would have, its step and its rank."""
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
