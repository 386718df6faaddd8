"""What is kept and when, how failures end, and what a human is told; with a sink made by hand and
no framework.
"""

import sys
import threading

import numpy as np
import pytest
import xxhash

from whence.errors import StoreFailed, UsageError
from whence.instrument import options
from whence.instrument.options import CaptureOptions
from whence.instrument.session import Content, Form, Origin, Session, load_on_record
from whence.records import Call


class Kept:
    """A sink that counts bytes, and fails where it is told to."""

    def __init__(self, fails=()):
        self.lines, self.nbytes, self.closed, self.fails, self.known = [], 0, 0, set(fails), set()

    def _may(self, what):
        if what in self.fails or "all" in self.fails:
            raise StoreFailed(f"no room for a {what}")

    def record(self, dtype, shape, data, digest, statistics, sketch, **more):
        self._may("record")
        if data is not None and digest not in self.known:
            self.known.add(digest)
            self.nbytes += data.size
        self.lines.append(("record", data is not None, more))
        return sum(line[0] == "record" for line in self.lines) - 1

    def call(self, call):
        self._may("call")
        self.lines.append(("call", call))

    def note(self, note):
        self._may("note")
        self.lines.append(("note", note))

    def step(self, step):
        self._may("step")
        self.lines.append(("step", step))

    def program(self, program):
        self._may("program")

    def close(self):
        self.closed += 1
        self._may("close")


def session(sink, *, max_bytes=10**9, on_record=None, **given):
    said = []
    made = Session(
        lambda rank: sink,
        options.make(**given),
        max_bytes=max_bytes,
        on_record=on_record,
        say=said.append,
    )
    made.said = said
    return made


def give(made, slot="output.0", nbytes=1000, content=None, scope="fc"):
    data = np.full(nbytes, 0 if content is None else content, np.uint8)
    give.serial += content is None
    if content is None:
        data[:4] = np.frombuffer(give.serial.to_bytes(4, "little"), np.uint8)
    return made.record(
        Form("uint8", (nbytes,)),
        Content(xxhash.xxh3_128_digest(data.tobytes()), nbytes=nbytes, data=data),
        Origin(scope, slot, "Linear"),
    )


give.serial = 0


def test_parameters_are_counted_apart_in_the_announcement():
    made = session(Kept(), max_bytes=1_000_000)
    for step in range(3):
        made.begin_step("Net")
        if step == 0:
            give(made, "param.weight", 500_000)
        give(made, nbytes=1000)
        give(made, nbytes=1500)
        made.end_step("Net", step)
    assert made.said == [
        "whence: capturing Net: 500 kB of parameters + 2.5 kB per step; room for about 200 steps"
    ]


def test_a_thousand_steps_are_grouped_and_one_is_one():
    made = session(Kept(), max_bytes=2_600_000)
    made.begin_step("Net")
    give(made)
    made.end_step("Net", 0)
    assert made.said == ["whence: capturing Net: 1 kB per step; room for about 2 600 steps"]
    made = session(Kept(), max_bytes=1500)
    made.begin_step("Net")
    give(made)
    made.end_step("Net", 0)
    assert made.said == ["whence: capturing Net: 1 kB per step; room for 1 step"]


@pytest.mark.parametrize("at_terminal", [True, False])
def test_the_size_of_a_step_is_for_a_terminal_and_a_warning_for_all(
    at_terminal, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: at_terminal, raising=False)
    for max_bytes, is_warning in ((10_000, False), (500, True)):
        made = Session(lambda rank: Kept(), CaptureOptions(), max_bytes=max_bytes)
        made.begin_step("Net")
        for _ in range(2):
            made.over_budget("fc", 0)
            give(made)
        made.end_step("Net", 0)
        said = capsys.readouterr().err
        assert bool(said) == (at_terminal or is_warning), said
        assert ("no whole step fits" in said) == is_warning


def test_the_steps_announced_are_the_steps_kept():
    for parameters, size, budget in ((0, 1000, 10_500), (5000, 700, 9000), (100, 100, 1000)):
        sink = Kept()
        made = session(sink, max_bytes=budget)
        for step in range(30):
            made.begin_step("Net")
            if step == 0 and parameters:
                give(made, "param.weight", parameters)
            give(made, nbytes=size)
            made.end_step("Net", step)
        kept = sum(line[1].kept for line in sink.lines if line[0] == "step")
        assert made.said[0].endswith(f"; room for {kept} steps")
        assert sink.nbytes <= budget


def test_no_step_fits():
    made = session(Kept(), max_bytes=1500)
    made.begin_step("Net")
    for _ in range(4):
        made.over_budget("fc", 0)
        give(made)
    made.end_step("Net", 0)
    assert made.said == [
        "whence: Net: no whole step fits into --max-bytes 1.5 kB; from here on only statistics and "
        "hashes are kept"
    ]
    assert not made.elements_on


def test_bytes_on_their_way_count():
    made = session(Kept(), max_bytes=1500)
    give(made)
    made.over_budget("fc", 0, waiting=400)
    assert made.elements_on
    made.over_budget("fc", 0, waiting=600)
    assert not made.elements_on


def test_a_call_that_began_in_time_is_kept_whole():
    sink = Kept()
    made = session(sink)
    made.elements_on = False
    data = np.zeros(4, np.uint8)
    content = Content(b"1" * 16, nbytes=4, data=data)
    made.record(Form("uint8", (4,)), content, Origin("", "output.0", "", keep=True))
    content = Content(b"2" * 16, nbytes=4, data=data)
    made.record(Form("uint8", (4,)), content, Origin("", "output.0", "", keep=False))
    assert [line[1] for line in sink.lines if line[0] == "record"] == [True, False]


@pytest.mark.parametrize("what", ["record", "call", "note", "step", "program", "all"])
def test_the_first_failure_ends_the_capture_and_is_told_once(what):
    sink = Kept(fails=[what])
    made = session(sink)
    made.begin_step("Net")
    give(made)
    made.call(Call(id=0, scope="", root="Net", step=0, order=0))
    made.note("settings", "x")
    made.end_step("Net", 0)
    made.program(None)
    made.close()
    assert not made.active
    stopped = [line for line in made.said if "capture stopped" in line]
    assert len(stopped) == 1
    assert "the program goes on: no room for a" in stopped[0]
    assert sink.closed == 2  # again at the end: it may now be able to say why


def test_a_closed_stderr_is_no_failure():
    def broken(_):
        raise ValueError("I/O operation on closed file")

    made = Session(lambda rank: Kept(), options.make(print_pattern="*"), max_bytes=10, say=broken)
    made.begin_step("Net")
    assert give(made) == 0
    made.end_step("Net", 0)
    made.fail("x")


def test_numbers_are_given_once_across_threads():
    made, got = session(Kept()), []

    def take():
        got.extend(made.next_order() for _ in range(5000))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(got) == list(range(20_000))


def test_unmatched_patterns_are_noted_at_the_end():
    sink = Kept()
    made = session(sink, include=["fc", "nothing"])
    made.selector.wants("fc", "Linear", 1, "1", 0)
    give(made)
    made.close()
    notes = [line[1] for line in sink.lines if line[0] == "note"]
    assert [(n.kind, "'nothing'" in n.text) for n in notes] == [("selection", True)]


@pytest.mark.parametrize(
    ("result", "columns"),
    [
        (3, {"value": 3.0}),
        ([1, 2.5], {"value0": 1.0, "value1": 2.5}),
        ({"a": True}, {"a": 1.0}),
        (None, None),
        ("text", None),
        ({"a": object()}, None),
    ],
)
def test_what_on_record_may_return(result, columns):
    sink = Kept()
    made = session(sink, on_record=lambda *_: result)
    give(made)
    (record,) = [line for line in sink.lines if line[0] == "record"]
    assert record[2]["columns"] == columns
    assert len([line for line in sink.lines if line[0] == "note"]) == (
        columns is None and result is not None
    )


def test_on_record_is_not_noted_for_ever():
    sink = Kept()
    made = session(sink, on_record=lambda *_: 1 / 0)
    for _ in range(100):
        give(made)
    assert sum(line[0] == "note" for line in sink.lines) == 20
    assert sum(line[0] == "record" for line in sink.lines) == 100


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere_at_all:f", "cannot import 'nowhere_at_all'"),
        ("json:nothing", "has no function 'nothing'"),
        ("json", "module:function"),
    ],
)
def test_an_on_record_that_cannot_be_found(spec, words):
    with pytest.raises(UsageError, match=words):
        load_on_record(spec)


def test_a_step_fits_for_certain_whatever_is_still_on_its_way():
    sink = Kept()
    made = session(sink, max_bytes=1000)
    assert made.step_fits("Net", 400)  # none was seen yet: what waits may be as much as the next
    assert not made.step_fits("Net", 600)
    made.begin_step("Net")
    made.sink().nbytes = 300
    made.end_step("Net", 0)
    made.begin_step("Net")
    assert made.step_fits("Net", 350)  # 650 and as much as the step so far
    assert not made.step_fits("Net", 360)
    assert session(Kept(), max_bytes=10, keep="stats").step_fits("Net", 10**9)
