"""The digest of a line of a journal is of what it says but for times, and an index that lacks it is
as good.
"""

import by_hand_store as hand
import msgspec
import numpy as np
import pytest

from whence import store
from whence.records import Call, Collective, Note, Ref
from whence.records.collective import CollectiveKind
from whence.store import index, line_digests
from whence.store.columns import save, whole_column
from whence.store.line_digests import KINDS, Says

CALL = Call(
    0, "layer", "Net", 0, 0, leaf=True, refs=(Ref("output.0", 0),), seconds=0.25,
    arguments={"seconds": 3},
)  # fmt: skip


def written(path, *lines):
    with store.Writer(hand.new(path)) as writer:
        hand.add(writer, np.arange(4, dtype=np.float32), "float32")
        for line in lines:
            if isinstance(line, Call):
                writer.call(line)
            elif isinstance(line, Note):
                writer.note(line)
            else:
                writer.collective(line)
    return store.open_run(path)


def same(one, other):
    return store.say_the_same(one, other)


def changed(line, **fields):
    return msgspec.structs.replace(line, **fields)


@pytest.mark.parametrize(
    ("line", "other", "is_same"),
    [
        (CALL, changed(CALL, seconds=0.5), True),
        (CALL, changed(CALL, seconds=0.0), True),
        (CALL, changed(CALL, arguments={"seconds": 4}), False),
        (CALL, changed(CALL, arguments={}), False),
        (CALL, changed(CALL, op_type="Linear"), False),
        (Note("programs", "in 3 s"), Note("programs", "in 4 s"), True),
        (Note("info", "in 3 s"), Note("info", "in 4 s"), False),
        (Note("programs", "x"), Note("info", "x"), False),
    ],
)
def test_times_may_differ_and_nothing_else(tmp_path, line, other, is_same):
    runs = [
        written(tmp_path / name, *([CALL] if isinstance(each, Note) else []), each)
        for name, each in (("a", line), ("b", other))
    ]
    assert same(*runs) is is_same


def test_what_a_call_says_is_in_the_index(tmp_path):
    calls = [
        CALL,
        Call(1, "b", "Net", 0, 1, kind="label", notes=("x",), program="p", refs=CALL.refs),
        Call(2, "c", "Net", 0, 2, kind="of the future", error="ValueError", refs=CALL.refs),
    ]
    (process,) = written(tmp_path / "run", *calls).readers
    columns = process.index.columns
    assert [KINDS[code] for code in columns["call_kind"]] == ["module", "label", "other"]
    assert columns["call_says"].tolist() == [
        Says.ARGUMENTS,
        Says.NOTES | Says.PROGRAM,
        Says.ERROR,
    ]


def test_an_index_without_them_is_used_and_they_are_made_of_the_journal(tmp_path):
    lines = [CALL, Note("info", "x")]
    runs = [written(tmp_path / name, *lines) for name in ("a", "b")]
    (process,) = runs[0].readers
    expected = {name: process.said[name].tolist() for name in index.LATER}
    file = process.folder / "index.safetensors"
    loaded = index.load(process.folder, process.journal.size)
    names = [n.encode() for n in loaded.names]
    columns = {k: whole_column(v) for k, v in loaded.columns.items() if k not in index.LATER}
    columns["names"] = whole_column(np.frombuffer(b"".join(names), np.uint8))
    starts = np.cumsum([0, *map(len, names)]).astype(np.int64)
    columns["names_at"] = whole_column(starts)
    save(file, columns, {"format": "1", "journal_bytes": str(process.journal.size)})
    again = store.open_run(tmp_path / "a")
    (process,) = again.readers
    assert not set(index.LATER) & set(process.index.columns)
    assert {name: process.said[name].tolist() for name in index.LATER} == expected
    assert same(again, runs[1])


def test_a_text_that_is_no_unicode_is_compared_as_it_is(tmp_path, monkeypatch):
    def refuse(lines):
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates")

    class Encoder:
        encode_lines = staticmethod(refuse)

    monkeypatch.setattr(line_digests.journal_file, "encoder", Encoder)
    texts = iter(line_digests._of_calls([CALL, CALL]))
    assert list(texts) == [None, None]


def test_when_a_collective_was_issued_may_differ(tmp_path):
    one = Collective(CollectiveKind.ALL_REDUCE, 0, 1, 0, op="sum", at=3.0)
    runs = [
        written(tmp_path / str(number), CALL, each)
        for number, each in enumerate((one, changed(one, at=4.0), changed(one, op="avg")))
    ]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])
