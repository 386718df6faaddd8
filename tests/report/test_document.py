"""The parts of an answer, and how they are shown."""

from whence.display import listed
from whence.report.document import Table, few, text

BAD = "\x1b[31mred"


def test_a_field_has_its_title_once_and_goes_where_it_says_nothing():
    parts = [("ANSWER", ["first", "", "second"]), ("  empty", ""), ("  none", []), ("  no", None)]
    assert text(parts) == f"{'ANSWER':<19}first\n{'':<19}second\n"


def test_a_title_never_touches_its_text():
    assert text([("a title of many words", "text")]) == "a title of many words text\n"


def test_nothing_that_a_terminal_obeys_is_shown():
    parts = [(BAD, BAD), BAD, Table([(BAD, "x"), ("y", BAD)], right=(0,))]
    assert "\x1b" not in text(parts)
    assert text([Table([(BAD, "x"), ("y", "z")], right=(0,))]).splitlines()[1].endswith("y  z")


def test_the_first_of_many_and_how_many_more():
    assert list(few("abcd", 2, str.upper)) == ["A", "B", "and 2 more"]
    assert list(few("ab", 1, noun="more name", where="!")) == ["a", "and 1 more name!"]
    assert list(few("ab", 2)) == ["a", "b"]


def test_long_lines_are_broken_under_their_field():
    assert text([("TITLE", "word " * 20)], width=60).splitlines()[1].startswith(" " * 19 + "word")


def test_names_in_a_sentence():
    assert listed([], 2) == ""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c"], 2, "; ") == "a; b and 1 more"
    assert listed(["a"] * 1205, 1) == "a and 1 204 more"
