"""The calls of a run with their records, as CSV and JSON."""

from __future__ import annotations

import csv as csv_module
import io
import json as json_module
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from whence.records import Record, Run
from whence.records.columns import has_elements
from whence.report import tables
from whence.report.run.choice import Choice, find, references
from whence.report.run.elements import bytes_by_kind, program_counts

_CALL = ("rank", "root", "step", "micro", "phase", "number", "scope", "op", "op_type", "occurrence")
_RECORD = ("slot", "record", "edge", "dtype", "shape", "device", "count")
_FIGURES = ("min", "max", "mean", "std", "norm", "nan", "inf", "zero")


def csv(run: Run, choice: Choice) -> Iterator[str]:
    """One line a tensor with every figure; columns of `on_record` at the end. Names that look like
    formulas are quoted.
    """
    extra = sorted(
        {column for _, ref in references(run, choice) for column in run.records[ref.record].columns}
    )
    names = ("index", *_CALL, *_RECORD, *_FIGURES, "hash", "kept", "why")
    yield _csv_line([*names, *map(tables.cell, extra)])
    for index, (call, ref) in enumerate(references(run, choice)):
        record = run.records[ref.record]
        s = record.statistics
        key = [index, *(getattr(call, name) for name in _CALL)]
        tensor = [ref.slot, record.id, ref.edge, record.dtype]
        shape = "x".join(map(str, record.shape))
        tail = [
            *(record.device, s.count if s else record.count),
            *(getattr(s, name, None) for name in _FIGURES),
            *(record.hash, "yes" if has_elements(record) else "no", record.why),
            *map(record.columns.get, extra),
        ]
        cells = map(_csv_cell, (*key, *tensor)), [shape], map(_csv_cell, tail)
        yield _csv_line([cell for part in cells for cell in part])


def _csv_cell(value: Any) -> Any:
    """Names cannot act as formulas, floats keep all digits, and what is not known is empty."""
    if isinstance(value, str):
        return tables.cell(value)
    return "" if value is None else repr(value) if isinstance(value, float) else value


def json(run: Run, choice: Choice) -> Iterator[str]:
    """One JSON object: path, ended, info, bytes, steps, programs, notes, calls with their records;
    one call a line.
    """
    programs = {"recorded": len(run.programs), **program_counts(run)}
    head = {
        "path": run.path,
        "ended": run.ended,
        "info": _builtins(run.info),
        "bytes": {
            kind: {"records": n, "bytes": total, "kept_bytes": kept_bytes}
            for kind, (n, total, kept_bytes) in bytes_by_kind(run).items()
        },
        "steps": [_builtins(step) for step in run.steps],
        "programs": programs,
        "notes": [_builtins(note) for note in run.notes],
    }
    yield _dumps(head)[:-1] + ', "calls": ['
    pending = ""
    for call in choice.calls(run):
        entry = {
            **_builtins(call),
            "refs": [
                {
                    "slot": ref.slot,
                    "edge": ref.edge,
                    "record": _record_json(run.records[ref.record]),
                }
                for ref in call.refs
            ],
        }
        if pending:
            yield pending + ","
        pending = _dumps(entry)
    if pending:
        yield pending
    yield "]}"


def one_json(run: Run, name: str, choice: Choice) -> Iterator[str]:
    """One record as JSON: its call, slot and record. Raises UsageError as `find` does."""
    call, ref = find(run, name, choice)
    entry = {
        "call": _builtins(call),
        "slot": ref.slot,
        "record": _record_json(run.records[ref.record]),
    }
    yield _dumps(entry)


def _record_json(record: Record) -> dict[str, Any]:
    entry = _builtins(record)
    s = record.statistics
    entry["statistics"] = (
        None if s is None else {name: getattr(s, name) for name in s.__struct_fields__}
    )
    return entry


def _builtins(struct: msgspec.Struct) -> dict[str, Any]:
    plain_values: dict[str, Any] = msgspec.to_builtins(struct)
    plain_values.pop("t", None)
    return plain_values


def _dumps(value: Any) -> str:
    # JSON has no NaN and no infinity; a hand-made run may hold them as arguments, where text says
    # what they were.
    def finite(item: Any) -> Any:
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)
        if isinstance(item, dict):
            return {str(key): finite(inner) for key, inner in item.items()}
        return [finite(inner) for inner in item] if isinstance(item, (list, tuple)) else item

    try:
        return json_module.dumps(value, ensure_ascii=True, allow_nan=False)
    except ValueError:
        return json_module.dumps(finite(value), ensure_ascii=True, allow_nan=False)


def _csv_line(cells: Sequence[object]) -> str:
    line = io.StringIO()
    csv_module.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()
