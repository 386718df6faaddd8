"""Runs of many records are shown from their columns."""

import dataclasses

import numpy as np
import pytest

import whence
from whence.records.columns import _taken, columns_of, program_fields
from whence.report.run import Choice
from whence.report.run import text as shown
from whence.store import StoredRun


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
