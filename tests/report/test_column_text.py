"""What equal calls give as columns is written as the same items would be, one object each."""

import dataclasses

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import whence
from whence import store
from whence.records import Call, Ref, RunInfo
from whence.report.files import everything_json, table_csv
from whence.results import CallPair, Evidence, Measured, Row, Verdict, VerdictKind, columns
from whence.results.sequence import MadeOnDemand

SAME = Measured("same", True, {"rel_l2": 0.0, "max_abs_err": 0.0})
OTHER = Measured("core", False, {"rel_l2": 0.5, "worst": None}, {"worst": 'of "x", y'}, (1, 2))
TEXT = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ["layers.0.q", 'a "b", c', "=1+1", "two\nlines", "\x00\x7f", "é—🙂", "1000000000000000"]
)
NUMBER = st.integers(0, 10**6) | st.sampled_from([10**12, 2**40])
SHAPE = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
# names and shapes repeat from call to call
FEW = st.lists(TEXT, min_size=1, max_size=3)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of two equal runs."""
    folder = tmp_path_factory.mktemp("runs")
    return whence.compare(_written(folder / "a"), _written(folder / "b"))


def _written(path, differing=()):
    """Steps of a model of three blocks of two leaves; `differing` records are off."""
    with store.Writer(store.create(path, RunInfo())) as writer:

        def add(number):
            shape = (4,) if number % 3 else (2, 2)
            data = np.full(4, number + (number in differing) * 1e-3, np.float32).view(np.uint8)
            return writer.record("float32", shape, data, xxhash.xxh3_128_digest(data), None, None)

        made, begun = 0, 0
        for step in range(12):
            root, last = begun, add(made)
            first, made, begun = last, made + 1, begun + 1
            for block in range(3):
                above, read = begun, last
                begun += 1
                for leaf in ("a", 'b,"c"'):
                    refs = (Ref("input.0", last), Ref("output.0", add(made)))
                    last, made = made, made + 1
                    scope = f"{block}.{leaf}"
                    writer.call(
                        Call(begun, scope, "net", step, begun, parent=above, leaf=True, refs=refs)
                    )
                    begun += 1
                refs = (Ref("input.0", read), Ref("output.0", last))
                writer.call(Call(above, str(block), "net", step, above, parent=root, refs=refs))
            refs = (Ref("input.0", first), Ref("output.0", last))
            writer.call(Call(root, "", "net", step, root, refs=refs))
    return path


def whole(sequence):
    return sequence if isinstance(sequence, tuple) else tuple(sequence)


def as_items(result):
    """The comparison with an object for each item."""
    plan = msgspec.structs.replace(result.plan, pairs=whole(result.plan.pairs))
    rows, verdicts = whole(result.rows), whole(result.verdicts)
    return msgspec.structs.replace(result, rows=rows, verdicts=verdicts, plan=plan)


def text_of(result):
    return b"".join(everything_json(result)), "".join(table_csv(result))


def on_demand(part, length, examples=None):
    return MadeOnDemand(length, lambda _start, _stop: part, examples)


@st.composite
def row_columns(draw):
    names, slots = draw(FEW), draw(FEW)
    forms = draw(st.lists(st.tuples(TEXT, SHAPE), min_size=1, max_size=3))
    calls = [
        (draw(NUMBER), draw(st.sampled_from(names)), draw(st.sampled_from(names)), *place)
        for place in draw(st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=3))
    ]
    count = draw(st.integers(1, 6))
    of_row = [
        (
            draw(st.integers(0, len(calls) - 1)),
            draw(st.sampled_from(slots)),
            draw(NUMBER),
            draw(st.integers(0, len(forms) - 1)),
        )
        for _ in range(count)
    ]
    like = Row(0, "", "", 0, 0, 0, "", "", 0, 0, "", "", (), (), "identical", draw(TEXT), SAME)
    part = columns.RowColumns(like, calls, forms, *map(list, zip(*of_row, strict=True)), {})
    rows = list(part)
    others = {
        place: msgspec.structs.replace(rows[place], verdict="introduced", measured=OTHER)
        for place in draw(st.sets(st.integers(0, count - 1)))
    }
    return dataclasses.replace(part, others=others)


@given(part=row_columns())
def test_rows_are_written_as_items(compared, part):
    rows = tuple(part)
    quick = msgspec.structs.replace(compared, rows=on_demand(part, len(rows), rows))
    assert text_of(quick) == text_of(as_items(quick))


@given(
    calls=st.lists(st.tuples(NUMBER, st.lists(st.tuples(TEXT, NUMBER), max_size=3)), min_size=1),
    rule=TEXT,
)
def test_pairs_are_written_as_items(compared, calls, rule):
    slots = [slot for _, of_call in calls for slot in of_call]
    part = columns.PairColumns(
        CallPair(0, 0, rule),
        [call for call, _ in calls],
        [len(of_call) for _, of_call in calls],
        [slot for slot, _ in slots],
        [record for _, record in slots],
    )
    plan = msgspec.structs.replace(compared.plan, pairs=on_demand(part, len(calls)))
    quick = msgspec.structs.replace(compared, plan=plan)
    assert text_of(quick) == text_of(as_items(quick))


@given(
    keys=st.lists(st.tuples(NUMBER, st.integers(-1, 3)), min_size=1),
    sentence=TEXT,
    places=st.sets(st.integers(0, 4)),
)
def test_verdicts_are_written_as_items(compared, keys, sentence, places):
    whole_call = Verdict(
        0, VerdictKind.IDENTICAL, evidence=Evidence.TWO_DUMPS, sentence=sentence, numbers={"a": 0.0}
    )
    part = columns.VerdictColumns(
        whole_call,
        whole_call.replace(numbers={}),
        [pair for pair, _ in keys],
        [stretch for _, stretch in keys],
        {
            place: Verdict(place, VerdictKind.INTRODUCED, score=2.0)
            for place in places
            if place < len(keys)
        },
    )
    quick = msgspec.structs.replace(compared, verdicts=on_demand(part, len(keys)))
    assert text_of(quick) == text_of(as_items(quick))


@pytest.mark.parametrize("differing", [(), (9, 38)])
@pytest.mark.parametrize("batch", [1, 3, 4096])
def test_the_files_do_not_depend_on_where_columns_end(differing, batch, tmp_path, monkeypatch):
    reference = _written(tmp_path / "a")
    quick = whence.compare(reference, _written(tmp_path / "b", differing))
    assert isinstance(quick.rows, MadeOnDemand)
    text = text_of(as_items(quick))
    monkeypatch.setattr("whence.results.sequence._BATCH", batch)
    assert text_of(quick) == text


def test_nothing_is_made_for_an_equal_row(compared, monkeypatch):
    def made(*_):
        raise AssertionError("an item was made")

    for kind in ("Row", "CallPair", "SlotPair"):
        monkeypatch.setattr(columns, kind, made)
    assert isinstance(compared.rows, MadeOnDemand)
    assert len(text_of(compared)[1].splitlines()) == 1 + len(compared.rows)
