"""Reads numbers as text: .csv and the output of `np.savetxt`, lists in .json and .jsonl, the
outputs of `trtexec --exportOutput`, and the lines `0: 1.234567` of llama.cpp's model conversion.

Sources: numpy.savetxt; TensorRT, samples/common/sampleReporting.cpp (exportJSONOutput); llama.cpp,
examples/model-conversion/logits.cpp.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from whence import dtypes
from whence.errors import UnreadableRun
from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import figure_tables, limits, number_text, raw_form, torch_file
from whence.readers.encodings.archive import File
from whence.readers.encodings.number_text import Digits, Values
from whence.readers.encodings.pickle_values import TorchTensor
from whence.readers.source import Place, suffix_of
from whence.records import Run

LOOKS_LIKE = "a text of numbers: .csv, np.savetxt, lists in .json or .jsonl"
ORDER = 86
LOOSE = True
_LARGEST = 256 << 20  # bytes of a text that is parsed
_JSON = (".json", ".jsonl", ".ndjson")
_TABLES = (".csv", ".tsv", ".txt", ".dat", ".out", ".log", "")
_NAMED = frozenset((*_JSON, *_TABLES)) - {""}
# Settings and timings also hold lists of numbers.
_SETTINGS = re.compile(
    r"config|settings|tokenizer|vocab|index|requirements|manifest|shapes?\.|meta"
    r"|\btim(?:es?|ings?)\b|latenc|profil|benchmark",
    re.IGNORECASE,
)
_CELL = re.compile(rf"{number_text.NUMBER}|True|False")
_BETWEEN = re.compile(r"[ \t]*[,;][ \t]*|[ \t]+")
_NUMBERED = re.compile(rf"(\d+): ({number_text.NUMBER})")
_LIST = re.compile(rb"\[\s*-?(?:\d+\.\d*(?:[eE][-+]?\d+)?|-?nan|-?inf|NaN|-?Infinity)\s*[,\]]")
_ARRAY = re.compile(rb"\s*\[[\s\[]*-?\d")
_FILES = ("k05VTVBZ", "UEsDB")
"""How files of np.save, and archives of np.savez and torch.save, begin in base64."""
_CODED = re.compile(
    rf'"(?:{"|".join(torch_file.CODED)})"\s*:\s*"[A-Za-z0-9+/]{{8,}}={{0,2}}["A-Za-z0-9+/]'
    rf'|:\s*"(?:{"|".join(_FILES)})'.encode()
)
_ROW = re.compile(r'((?:"[^"]*(?:"|$)|[^"\n])*)(?:\n|$)')
_CELLS = {".csv": ",", ".tsv": "\t"}
_CELL_OF_ROW = {
    mark: re.compile(rf'(?:^|{mark})[ ]*(?:"([^"]*)"?|([^{mark}"]*))') for mark in ",;\t"
}
_NUMBER_CELL = re.compile(rf"\s*{number_text.NUMBER}\s*")
_LIST_IN_CELL = re.compile(
    rf"[\s\[(]*{number_text.NUMBER}(?:[\s,;\[\]()]+{number_text.NUMBER})+[\s,\])]*"
)
_BARE = re.compile(r"(?<=[\s,\[])(-?)(nan|inf)(?=[\s,\]])")  # as C++ writes them
_SHAPES = ("shape", "dims", "dimensions")


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(_is_ours(place, name) for name in place.files)
    if _SETTINGS.search(place.path.name) or figure_tables.sniff(place.head, place.suffix):
        return False
    if place.suffix in _JSON:
        return any(p.search(place.head) for p in (_LIST, _CODED)) or bool(_ARRAY.match(place.head))
    return place.suffix in _TABLES and (
        _is_table(place)
        or (place.suffix in _CELLS and bool(_named_rows(place.head.decode("utf-8", "replace"))))
    )


def open_run(place: Place) -> Run:
    """Returns the tensors of a text; its digits determine their precision."""
    building = Building(place.path, "numbers")
    items = named_tensors.of_files(building, place, lambda name: _is_ours(place, name), _items)
    if any(item.options["quantum"] for item in items):  # weights are compared bit by bit
        named_tensors.add_labels(building, *named_tensors.in_order(items))
    else:
        named_tensors.add(building, items)
    return building.run()


def _is_ours(place: Place, name: str) -> bool:
    return place.shows(name, _NAMED, sniff)


def _is_table(place: Place) -> bool:
    """Whether all lines among the first bytes are rows of numbers."""
    try:
        lines = place.head.decode("ascii").split("\n")
    except UnicodeDecodeError:
        return False
    rows = _rows(lines[:-1] if len(lines) > 1 else lines)  # the last may be cut off
    if rows and all(map(_NUMBERED.fullmatch, rows)):
        return len(rows) > 1
    return (len(rows) > 1 or bool(rows and _BETWEEN.search(rows[0]))) and all(map(_cells, rows))


def _named_rows(text: str) -> list[tuple[str, list[list[str]]]]:
    """Returns (name, lists of numbers in the other cells, the longest last) of the rows of a table
    of tensors, below its header; [] where a row is something else. A row may also be a name and the
    numbers of its tensor in as many cells, unless a header calls these something.
    """
    rows: list[tuple[str | None, list[list[str]]]] = []
    flat: list[int] = []
    lines = [line for line in _ROW.findall(text) if line.strip()]
    mark = max(_CELL_OF_ROW, key=lines[0].count) if lines else ","
    for line in lines if text.endswith("\n") else lines[:-1] or lines:
        cells = [quoted or bare for quoted, bare in _CELL_OF_ROW[mark].findall(line)]
        if len(cells) > 1 and all(map(_NUMBER_CELL.fullmatch, cells[1:])):
            is_named = bool(cells[0].strip()) and not _NUMBER_CELL.fullmatch(cells[0])
            rows.append((cells[0] if is_named else None, [cells[1:]]))
            flat.append(len(cells))
            continue
        lists = [re.findall(number_text.NUMBER, c) for c in cells if _LIST_IN_CELL.fullmatch(c)]
        if not lists or _LIST_IN_CELL.fullmatch(cells[0]):
            rows.append((None, lists))
        else:
            rows.append((cells[0], sorted(lists, key=len)))
    has_header = bool(rows and rows[0][0] is None)
    if flat and (max(flat) <= _FEW_FIGURES or (has_header and _are_words(lines[0], mark))):
        return []
    rows = rows[has_header:]
    return (
        [(name, lists) for name, lists in rows if name is not None]
        if all(name is not None for name, _ in rows)
        else []
    )


_FEW_FIGURES = 4
"""Most cells of a row that may be a name and figures about it."""


def _are_words(header: str, mark: str) -> bool:
    """Whether the cells of a header behind its first differ in more than numbers."""
    return len({re.sub(r"[\d\s\"]", "", cell) for cell in header.split(mark)[1:]}) > 1


def _tensors_of_rows(text: str) -> list[tuple[str, Values]]:
    """Returns (name, numbers) of each row, in the shape that a cell states."""
    if not text.endswith("\n"):
        raise ValueError("its last line has no end, so it may be cut off; end it with a line break")
    named = _named_rows(text)
    digits = Digits.of([number for _, lists in named for number in lists[-1]])
    tensors = []
    for name, (*others, numbers) in named:
        shapes = [tuple(map(int, o)) for o in others if all(map(str.isdecimal, o))]
        fitting = [shape for shape in shapes if limits.count(shape) == len(numbers)]
        tensors.append((name, Values.of(numbers, (*fitting, (len(numbers),))[0], digits)))
    return tensors


def _rows(lines: list[str]) -> list[str]:
    """Returns the rows of numbers, without the index and header of a pandas table."""
    rows = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if rows and rows[0].startswith(",") and rows[0] == _frame(rows[0].count(",")):
        return [row.partition(",")[2] for row in rows[1:]]
    return rows


def _frame(columns: int) -> str:
    return "," + ",".join(map(str, range(columns)))


def _cells(row: str) -> list[str]:
    """Returns the numbers of a row, [] where it holds something else."""
    cells = _BETWEEN.split(row.rstrip(",;"))
    return cells if all(map(_CELL.fullmatch, cells)) else []


def _items(building: Building, file: File) -> Iterator[Named]:
    if file.size > _LARGEST:
        raise UnreadableRun(
            f"{file.name} has {file.size} bytes of text; save it as .npy, which is read as it lies"
        )
    text = bytes(file.part(0, file.size))
    try:
        if b"\0" in text:
            raise ValueError("it holds zeros")
        words = text.decode("utf-8")
        is_named = suffix_of(file.name) in _CELLS and _named_rows(words[: limits.HEAD_BYTES])
        read = _tensors_of_rows if is_named else _table
        read = _lists if words.lstrip()[:1] in ("[", "{") else read
        for inner, tensor in torch_file.tensors(read(words)):
            is_of_file = isinstance(tensor, TorchTensor)
            values = Values(tensor.array()) if is_of_file else tensor
            yield _named(values, inner, is_ordered=bool(inner))
    except (ValueError, RecursionError) as error:
        raise UnreadableRun(f"{file.name} is not a whole text of numbers: {error}") from error


def _named(values: Values, name: str, *, is_ordered: bool) -> Named:
    array = values.array
    return Named(
        name,
        dtypes.of(array).name,
        array.shape,
        lambda: array,
        ordered=is_ordered,
        options={"quantum": values.step},
    )


def _table(text: str) -> Values:
    """Returns the table as written; one row or column becomes a vector."""
    if not text.endswith("\n"):
        raise ValueError("its last line has no end, so it may be cut off; end it with a line break")
    lines = _rows(text.split("\n"))
    if numbered := [match for line in lines if (match := _NUMBERED.fullmatch(line))]:
        if [int(match[1]) for match in numbered] != list(range(len(lines))):
            raise ValueError("its lines are not numbered from 0 on")
        rows = [[match[2]] for match in numbered]
    else:
        rows = [_cells(line) for line in lines]
        if not rows or not all(rows):
            raise ValueError("a line holds something else")
    if len({len(row) for row in rows}) != 1:
        raise ValueError("its lines have different numbers of numbers")
    texts = [cell for row in rows for cell in row]
    shape = tuple(n for n in (len(rows), len(rows[0])) if n > 1)
    return Values.of(texts, shape or (1,), Digits.of(texts))


class _Text(str):
    """A number of JSON as it is written."""

    __slots__ = ()


def _lists(text: str) -> Any:
    """Returns the tree of a JSON text, or of one per line, with `Values` for lists of numbers."""
    tree, texts = _parsed(text), list[str]()
    _collect(tree, texts)
    return _tree(tree, Digits.of(texts))


def _parsed(text: str) -> Any:
    load = partial(json.loads, parse_float=_Text, parse_int=_Text, parse_constant=_Text)
    try:
        return load(text)
    except ValueError:
        lines = [line for line in text.split("\n") if line.strip()]
        if len(lines) > 1 and lines[0].rstrip()[-1:] in ("]", "}"):
            return [load(line) for line in lines]
        return load(
            _BARE.sub(lambda match: "NaN" if match[2] == "nan" else f"{match[1]}Infinity", text)
        )


def _collect(tree: Any, texts: list[str]) -> None:
    if isinstance(tree, _Text):
        texts.append(tree)
    elif isinstance(tree, (list, dict)):
        for part in tree if isinstance(tree, list) else tree.values():
            _collect(part, texts)


def _tree(value: Any, digits: Digits) -> Any:
    if isinstance(value, list):
        flat, shape = _flat(value)
        if flat and all(isinstance(part, (_Text, bool)) for part in flat):
            return Values.of([str(part) for part in flat], shape, digits)
        return [_tree(part, digits) for part in value]
    if not isinstance(value, dict):
        return value
    if coded := _coded(value):
        return {key: part for key, part in value.items() if key not in _SHAPES} | coded
    tree = {key: _tree(part, digits) for key, part in value.items()}
    for key, part in value.items():
        if isinstance(part, str) and part.startswith(_FILES):
            del tree[key]
            tree["data"] = base64.b64decode(part, validate=True)
    shape_key = next((key for key in _SHAPES if key in value), "")
    held = next((k for k in torch_file.CONTENTS if isinstance(tree.get(k), Values)), "")
    if not shape_key or not held:
        return tree
    values = tree[held].shaped(_extents(value[shape_key]), str(value.get("dtype", "")))
    return {k: v for k, v in tree.items() if k != shape_key} | {held: values}


def _coded(value: dict[str, Any]) -> dict[str, Values]:
    """Returns {key: tensor} of the bytes in base64 that have their shape and dtype beside them."""
    shape = next((value[key] for key in _SHAPES if key in value), None)
    if not isinstance(shape, list):
        return {}
    texts = {k: t for k, t in value.items() if isinstance(t, str) and k in torch_file.CODED}
    for key, text in texts.items():
        data = base64.b64decode(text, validate=True)
        form = raw_form.of_value({**value, "shape": [int(n) for n in shape]}, len(data))
        if form is not None:
            kind = dtypes.named(form.dtype).numpy
            return {key: Values(np.frombuffer(data, kind).reshape(form.shape))}
    return {}


def _flat(value: list[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Returns (all leaves of regular nested lists, their shape)."""
    shape, flat = [len(value)], value
    while flat and all(isinstance(row, list) and len(row) == len(flat[0]) for row in flat):
        shape.append(len(flat[0]))
        flat = [part for row in flat for part in row]
    return flat, limits.extents(tuple(shape), "a list")


def _extents(value: Any) -> tuple[int, ...]:
    """Parses a shape, given as a list or as "1x3x224"."""
    parts = value.split("x") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(re.fullmatch(r"\d{1,18}", str(p)) for p in parts):
        raise ValueError(f"{str(value)[:40]} is not a shape")
    return limits.extents(tuple(map(int, parts)), "a list")
