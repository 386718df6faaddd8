"""Reads logs and texts with printed tensors, or with lines, tables and trees of their statistics.

`encodings.printed_text` parses prints of torch, numpy, jax, tensorflow and mindspore.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from whence import dtypes
from whence.errors import UnreadableRun
from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import figure_tables, limits, printed_text
from whence.readers.encodings.archive import File
from whence.readers.encodings.number_text import Digits, Values
from whence.readers.encodings.printed_text import Print
from whence.readers.source import Place, suffix_of
from whence.readers.unread import TENSOR_SUFFIXES
from whence.records import Run, Statistics

LOOKS_LIKE = "a log with printed tensors, or a log or table of their mean, std, min and max"
ORDER = 85
LOOSE = True
ALONE = "a log with printed tensors"
_LOGS = (".txt", ".log", ".out", ".err", "")
_TEXTS = (*_LOGS, *figure_tables.SUFFIXES)
_LARGEST = 256 << 20  # bytes of a log that is read
_HEAD = 4096
_FAR_BYTES = 4 << 20  # how far into a log its first tensor may stand


def sniff(place: Place) -> bool:
    if place.is_folder:
        suffixes = set(map(suffix_of, place.files))
        is_all = not place.hidden and not suffixes & TENSOR_SUFFIXES  # else a log beside a dump
        return is_all and any(_is_ours(place, name) for name in place.files)
    if place.suffix not in _LOGS or b"\0" in place.head:
        return figure_tables.sniff(place.head, place.suffix)
    with place.path.open("rb") as file:
        text = file.read(_FAR_BYTES).decode("utf-8", "replace")
    return bool(printed_text.MARK.search(text)) or printed_text.has_figures(
        figure_tables.of_columns(text)
    )


def open_run(place: Place) -> Run:
    """Returns each print as a label, in the order of the text; a line that counts steps begins a
    step.
    """
    building = Building(place.path, "printed")
    items = named_tensors.of_files(building, place, lambda name: _is_ours(place, name), _items)
    named_tensors.add_labels(building, *named_tensors.in_order(items))
    return building.run()


def _is_ours(place: Place, name: str) -> bool:
    return place.shows(name, _TEXTS, sniff)


def _items(building: Building, file: File) -> Iterator[Named]:
    if file.size > _LARGEST:
        raise UnreadableRun(f"{file.name} has {file.size} bytes; give the part of one step")
    text = bytes(file.part(0, file.size)).decode("utf-8", "replace")
    if "\0" in text:
        raise UnreadableRun(f"{file.name} holds zeros: it was not written to its end")
    if figure_tables.sniff(bytes(file.head(_HEAD)), suffix := suffix_of(file.name)):
        text = figure_tables.lines(text, suffix)
    else:
        text = figure_tables.of_columns(text)
    shown = list(printed_text.prints(text))
    words = [printed.name.split() for printed in shown]
    begin = sum(1 for _ in itertools.takewhile(lambda same: len({*same}) == 1, zip(*words)))
    # what all lines of figures begin with is a logger's, unless it is the word of a number
    begin *= any(printed.figures for printed in shown)
    begin *= all(its[begin : begin + 1] > ["A"] for its in words)
    for printed, its in zip(shown, words, strict=True):
        printed.name = "_".join(its[begin:])
        yield _named(printed)


def _named(printed: Print) -> Named:
    name, dtype = printed.name, printed.dtype if printed.dtype in dtypes.DTYPES else ""
    if printed.figures:
        why = "the text has its figures, no elements"
        texts = list(printed.figures.values())
        step = Values.of(texts, (len(texts),), Digits.of(texts)).step
        options: dict[str, Any] = {"statistics": _statistics(printed), "quantum": step}
        return Named(name, dtype or "float32", printed.shape, None, why, printed.step,
                     ordered=True, is_text=True, options=options)  # fmt: skip
    try:
        values = printed.values(dtype)
    except ValueError as error:
        why = printed.why or f"its print holds what is not a number: {str(error)[:80]}"
        return Named(name, dtype or "float32", (), None, why, printed.step, ordered=True)
    array = values.array
    options = {"quantum": values.step, "whole": printed.whole}
    return Named(name, dtypes.of(array).name, array.shape, lambda: array, step=printed.step,
                 ordered=True, row=printed.row, options=options)  # fmt: skip


def _statistics(printed: Print) -> Statistics:
    numbers = {key: float(text) for key, text in printed.figures.items()}
    finite = {key: number for key, number in numbers.items() if math.isfinite(number)}
    low, high, mean, std, norm = map(finite.get, ("min", "max", "mean", "std", "norm"))
    count = limits.count(printed.shape)
    if mean is None and "sum" in finite:
        mean = finite["sum"] / max(count, 1)
    has_nan = any(map(math.isnan, numbers.values()))
    return Statistics(count, low, high, mean, std, norm, int(has_nan), 0, 0)
