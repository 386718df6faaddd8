"""Marks: every note that code asks for is written and read in one place, with the texts of the run
format.
"""

import msgspec
import pytest

from whence.records import Call, Program, marks
from whence.records.marks import Mark, NoProgram, has_mark, mark, mark_value, mark_values

TEXTS = {
    Mark.NOT_SELECTED: "not selected",
    Mark.OPENED: "its code is judged as that of the call around it",
    Mark.HIDDEN: "inside not seen",
    Mark.PATCHED: "patched from ",
    Mark.PATCHED_AS: ", where it is called ",
    Mark.MEMORY_ORDER: "its elements may stand as a kernel library lays them out in memory",
    Mark.PUT_TOGETHER: "put together: the dump has no call for the whole",
    Mark.INPUTS_UNKNOWN: "what it read is not known",
    Mark.STORED_WIDER: "the dump does not say in what dtype it was computed",
    Mark.UNORDERED: "the dump does not say which tensor was made before which",
    Mark.LOGGED: "some of what a kernel held, logged while it ran",
    Mark.TAKES: "takes ",
    Mark.WRITES: "writes ",
    Mark.REWRITTEN: "its program runs operators that the reference's does not: names say little",
    Mark.OPSET: "opset ",
    Mark.OF_MODULE: "of module ",
    Mark.ONEDNN: "a kernel of oneDNN",
    Mark.NODE: "node ",
    Mark.KERNEL: "kernel ",
    Mark.MOVES: "only moves elements: held against what it was given",
    Mark.JOINED: "joined from ",
    Mark.OF_PIECES: "joined of the pieces that ",
    Mark.SHOWN_RANK: "of the ranks' replicas, shown is that of rank ",
    Mark.TRANSLATED: "translated from ",
    Mark.COMPOSED: "composed of operators",
    Mark.TAKEN_TOGETHER: " taken together",
    Mark.EXECUTED_IN: "executed in ",
}
WITH_VALUE = (
    Mark.UNORDERED,
    Mark.HIDDEN,
    Mark.PATCHED,
    Mark.PATCHED_AS,
    Mark.TAKES,
    Mark.WRITES,
    Mark.OPSET,
    Mark.OF_MODULE,
    Mark.NODE,
    Mark.KERNEL,
    Mark.JOINED,
    Mark.OF_PIECES,
    Mark.SHOWN_RANK,
    Mark.TRANSLATED,
    Mark.TAKEN_TOGETHER,
    Mark.EXECUTED_IN,
)


def noted(*notes, no_program=""):
    return Call(0, "fc", "Net", 0, 0, notes=notes, no_program=no_program)


def test_texts_are_those_of_the_run_format():
    assert {kind: kind.value for kind in Mark} == TEXTS


@pytest.mark.parametrize("kind", Mark)
def test_what_is_written_is_read_and_nothing_else(kind):
    value = "a.b of 3" if kind in WITH_VALUE else ""
    note = mark(kind, value)
    assert type(note) is str
    call = noted("before", note, "behind")
    assert has_mark(call, kind)
    assert mark_value(call, kind) == value
    assert not has_mark(noted("before", "behind"), kind)
    assert [other for other in Mark if has_mark(call, other)] == [kind]
    assert msgspec.convert(msgspec.to_builtins(call), Call) == call


@pytest.mark.parametrize("kind", [kind for kind in Mark if kind not in WITH_VALUE])
def test_a_mark_without_value_is_the_whole_note(kind):
    assert not has_mark(noted(f"{kind}, perhaps"), kind)
    assert not has_mark(noted(f"not {kind}"), kind)


def test_a_patched_call_says_from_where_and_under_what_name():
    text = f"compiled; {mark(Mark.PATCHED, 'runs/a')}{mark(Mark.PATCHED_AS, 'model.fc')}"
    assert has_mark(noted(text), Mark.PATCHED)
    assert mark_value(noted(text), Mark.PATCHED_AS) == "model.fc"


def test_all_values_are_read_in_order():
    call = noted("takes w_0 as Y", "writes out", "takes b_0 as Bias")
    assert mark_values(call, Mark.TAKES) == ["w_0 as Y", "b_0 as Bias"]
    assert mark_value(noted("other"), Mark.TAKES) == ""


def test_programs_are_marked_like_calls():
    program = Program("p", (), (), (), notes=("in-place", mark(Mark.COMPOSED)))
    assert has_mark(program, Mark.COMPOSED)
    assert not has_mark(program, Mark.TRANSLATED)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("compiled by inductor", NoProgram.COMPILED),
        ("runs compiled code", NoProgram.RUNS_COMPILED),
        ("scripted: no program is recorded", NoProgram.SCRIPTED),
        ("draws random numbers (aten.rand)", NoProgram.RANDOM),
    ],
)
def test_reasons_without_program(reason, kind):
    call = noted(no_program=reason)
    assert [k for k in NoProgram if marks.is_without_program(call, k)] == [kind]
    assert marks.is_hidden_by_compiler(call) is (kind is not NoProgram.RANDOM)
    assert marks.was_compiled(call) is (kind is not NoProgram.RANDOM)
    assert not marks.is_without_program(call)


def test_a_compiled_call_is_known_by_its_note_too():
    call = noted(mark(Mark.HIDDEN, "compiled: "))
    assert marks.was_compiled(call)
    assert not marks.is_hidden_by_compiler(call)
    assert marks.hidden_inside(call) == "compiled: inside not seen"
    assert marks.hidden_inside(noted("not selected", "compiled: inside not seen")) == ""
    assert not marks.was_compiled(noted("not compiled"))


def test_joined_calls():
    assert marks.gathered("rows 0-3", 1) == "joined from rows 0-3 of 1 call"
    assert marks.is_gathered(noted(marks.gathered("rows", 2)))
    assert marks.is_of_pieces(noted(marks.of_pieces(4)))
    assert not marks.is_gathered(noted(marks.of_pieces(4)))
    assert marks.shown_rank(noted(marks.shown(3))) == "3"
    assert marks.shown_rank(noted()) == ""
