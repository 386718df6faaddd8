"""Runs of many records are shown from their columns."""

import dataclasses

import numpy as np
import pytest

import whence
from whence.records import Call, Record
from whence.records.columns import _taken, columns_of, program_fields
from whence.report.run import Choice
from whence.report.run import text as shown
from whence.store import StoredRun
from whence.store.process_reader import ProcessReader


def _record(path):
    with whence.recording(path) as run:
        for step in range(40):
            for name in ("a", "b", "a", "c"):
                run.add(name, np.arange(step % 3, dtype=np.float32), step=step)


def test_columns_are_those_of_the_structs(tmp_path):
    _record(tmp_path / "run")
    run = whence.open_run(tmp_path / "run")
    columns, taken = columns_of(run), _taken(run)
    for field in dataclasses.fields(columns)[1:]:
        own, other = getattr(columns, field.name), getattr(taken, field.name)
        if field.name in ("scope", "root", "op", "slot", "dtype"):
            own, other = np.array(columns.names)[own], np.array(taken.names)[other]
        assert np.array_equal(own, other), field.name
    assert np.array_equal(columns.nbytes(), [4 * (n // 4 % 3) for n in range(160)])
    fields = [(call.leaf, call.program, call.no_program) for call in program_fields(run)]
    assert fields == [(call.leaf, call.program, call.no_program) for call in run.calls]


@pytest.mark.parametrize(
    ("choice", "count"), [(Choice("b"), 40), (Choice(step=3), 4), (Choice("re:[ac]", step=2), 3)]
)
def test_only_what_is_shown_is_decoded(choice, count, tmp_path, monkeypatch):
    _record(tmp_path / "run")
    decoded = []
    for name in ("_call", "_record"):
        made = getattr(StoredRun, name)
        monkeypatch.setattr(
            StoredRun,
            name,
            lambda self, n, made=made, name=name: decoded.append(name) or made(self, n),
        )
    run = whence.open_run(tmp_path / "run")
    lines = list(shown(run, choice))
    assert sum("output.0" in line for line in lines) == count
    assert sorted(decoded) == ["_call"] * count + ["_record"] * count


def test_all_calls_and_records_are_those_looked_up_one_at_a_time(tmp_path):
    _record(tmp_path / "run")
    run = whence.open_run(tmp_path / "run")
    assert list(run.calls) == [run.calls[n] for n in range(len(run.calls))]
    assert list(run.records) == [run.records[n] for n in range(len(run.records))]


def test_a_comparison_decodes_each_line_once(tmp_path, monkeypatch):
    for name, scale in (("a", 1.0), ("b", 1.5)):
        with whence.recording(tmp_path / name) as recording:
            for step in range(50):
                recording.add("h", np.linspace(0, scale, 9, dtype=np.float32), step=step)
    decoded = []
    decode = ProcessReader.decode_line
    monkeypatch.setattr(
        ProcessReader,
        "decode_line",
        lambda self, line, form: decoded.append(line) or decode(self, line, form),
    )
    many = ProcessReader.decode_many

    def counted(self, lines, form):
        for line in many(self, lines, form):
            decoded.append(form)
            yield line

    monkeypatch.setattr(ProcessReader, "decode_many", counted)
    assert whence.compare(tmp_path / "a", tmp_path / "b").coverage.calls == 50
    assert decoded.count(Call) == decoded.count(Record) == 2 * 50
    assert len(decoded) < 2 * (2 * 50) + 300
