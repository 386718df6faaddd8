"""Selection: which calls, slots, ranks and elements a capture takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.instrument.options import make
from whence.instrument.selection import Selector, within

CALLS = [
    ("", "Tiny", 0, "0"),
    ("embed", "Embedding", 1, "1"),
    ("layers.0", "Block", 1, "2"),
    ("layers.0.attn", "Attention", 2, "2_1"),
    ("layers.0.attn.q", "Linear", 3, "2_1_1"),
    ("layers.1", "Block", 1, "3"),
    ("layers.10", "Block", 1, "12"),
    ("head", "Linear", 1, "4"),
]


def wanted(**given):
    selector = Selector(make(**given))
    return [
        number
        for scope, op_type, depth, number in CALLS
        if selector.wants(scope, op_type, depth, number, 0)
    ]


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({}, ["0", "1", "2", "2_1", "2_1_1", "3", "12", "4"]),
        ({"include": "*"}, ["0", "1", "2", "2_1", "2_1_1", "3", "12", "4"]),
        ({"include": "layers.0"}, ["2"]),
        ({"include": "layers.0*"}, ["2", "2_1", "2_1_1"]),
        ({"include": "layers.?"}, ["2", "3"]),
        ({"include": r"re:layers\.\d+"}, ["2", "3", "12"]),
        ({"include": ["embed", "head"]}, ["1", "4"]),
        ({"include": "LAYERS.0"}, []),
        ({"exclude": "layers.*"}, ["0", "1", "4"]),
        ({"include": "layers.*", "exclude": "*.attn*"}, ["2", "3", "12"]),
        ({"classes": "Linear"}, ["2_1_1", "4"]),
        ({"classes": "*d*"}, ["1"]),
        ({"max_depth": 0}, ["0"]),
        ({"max_depth": 1}, ["0", "1", "2", "3", "12", "4"]),
        ({"ids": "0"}, ["0", "1", "2", "2_1", "2_1_1", "3", "12", "4"]),
        ({"ids": "0", "no_children": True}, ["0"]),
        ({"ids": "2"}, ["2", "2_1", "2_1_1"]),
        ({"ids": "2,4", "no_children": True}, ["2", "4"]),
        ({"ids": "2_1"}, ["2_1", "2_1_1"]),
        ({"ids": "1"}, ["1"]),
        ({"ids": "2", "classes": "Linear"}, ["2_1_1"]),
    ],
)
def test_which_calls(given, numbers):
    assert wanted(**given) == numbers


def test_steps_end():
    selector = Selector(make(steps="2:4"))
    assert [selector.wants("a", "A", 1, "1", step) for step in range(6)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_the_answer_is_asked_for_once():
    selector = Selector(make(include="a*"))
    for number in range(1000):
        selector.wants("abc", "A", 1, str(number), number)
    assert len(selector._answers) == 1


def test_one_scope_may_have_several_numbers():
    selector = Selector(make(ids="2"))
    assert [selector.wants("shared", "Linear", 1, number, 0) for number in ("1", "2", "3")] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("slots", "taken"),
    [
        ("both", {"param", "input", "output", "mutated", "grad"}),
        ("input", {"param", "input"}),
        ("output", {"param", "output", "mutated", "grad"}),
    ],
)
def test_slots(slots, taken):
    selector = Selector(make(slots=slots))
    assert {
        kind for kind in ("param", "input", "output", "mutated", "grad") if selector.slots(kind)
    } == taken


def test_ranks():
    assert Selector(make()).rank(5)
    assert [Selector(make(ranks="0,3")).rank(r) for r in range(4)] == [True, False, False, True]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("input_ids", [False, True, True]),
        ("input.input_ids", [False, True, True]),
        ("embed", [True, False, True]),
        ("embed:input.0", [True, False, True]),
        ("embed:*", [True, False, False]),
        ("*", [False, False, False]),
        ("head", [True, True, True]),
    ],
)
def test_names_whose_elements_are_never_kept(name, kept):
    selector = Selector(make(no_inputs=name))
    assert [
        selector.elements(*at)
        for at in (("", "input.input_ids"), ("embed", "input.0"), ("embed", "output.0"))
    ] == kept


def test_what_is_printed():
    assert not Selector(make()).prints("a")
    assert [Selector(make(print_pattern="a*")).prints(s) for s in ("ab", "ba", "ab")] == [
        True,
        False,
        True,
    ]


def test_patterns_that_matched_nothing_are_told():
    selector = Selector(make(include=["layer.*", "embed"], classes="Liner", ids="9"))
    for scope, op_type, depth, number in CALLS:
        selector.wants(scope, op_type, depth, number, 0)
    told = selector.unmatched()
    assert len(told) == 3
    assert told[0].startswith("include: 'layer.*' matched none of 7 modules; nearest: layers.")
    assert told[1].startswith("classes: 'Liner' matched none of 5 classes; nearest: Linear")
    assert told[2].startswith("ids: '9' matched none of 8 tree numbers; nearest: ")
    assert Selector(make(include="a")).unmatched() == [
        "include: 'a' matched none of 0 modules; none was called"
    ]


NUMBERS = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(
    lambda parts: "_".join(map(str, parts))
)


@given(NUMBERS, NUMBERS)
def test_within_is_about_places_not_letters(number, other):
    a, b = number.split("_"), other.split("_")
    assert within(number, (other,)) == (a[: len(b)] == b)
    assert within(number, (other,), children=False) == (a == b)
    assert within(number, ("0",))
