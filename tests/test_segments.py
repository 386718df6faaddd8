"""A name cut into the names it is made of."""

import itertools

import pytest

from counting import counted
from whence.records.fused_names import segments


def graph(*edges):
    return lambda a, b: (a, b) in edges


@pytest.mark.parametrize(
    ("name", "among", "edges", "wanted"),
    [
        ("MulCast_9", ["Mul", "Cast_9", "Cast"], [("Mul", "Cast_9")], ("Mul", "Cast_9")),
        # Taking the longest prefix again and again takes Add_1 and is left with _0Mul.
        (
            "Add_1_0Mul",
            ["Add", "Add_1", "Add_1_0", "Mul", "_0Mul"],
            [("Add_1_0", "Mul")],
            ("Add_1_0", "Mul"),
        ),
        (
            "Add_1Add_1_0",
            ["Add", "Add_1", "Add_1_0", "_1Add_1_0"],
            [("Add_1", "Add_1_0"), ("Add", "x")],
            ("Add_1", "Add_1_0"),
        ),
        # Two members that a third reads.
        (
            "ExpLogAdd",
            ["Exp", "Log", "Add"],
            [("Exp", "Add"), ("Log", "Add")],
            ("Exp", "Log", "Add"),
        ),
        ("ExpLogAdd", ["Exp", "Log", "Add"], [("Exp", "Add")], ()),
        (
            "ExpAddLog",
            ["Exp", "Log", "Add"],
            [("Exp", "Add"), ("Log", "Add")],
            ("Exp", "Add", "Log"),
        ),
        ("ab", ["a", "b", "ab"], [], ()),
        (
            "abc",
            ["a", "bc", "ab", "c"],
            [("a", "bc"), ("ab", "c")],
            (),
        ),  # two ways that fit equally
        ("x", ["x"], [], ()),
        ("", ["x"], [], ()),
    ],
)
def test_the_graph_decides(name, among, edges, wanted):
    assert segments(name, among, graph(*edges)) == wanted


def test_every_way_is_found_that_brute_force_finds():
    among = ["a", "ab", "b", "ba", "aba"]
    for length in range(2, 4):
        for parts in itertools.permutations(among, length):
            chain = list(itertools.pairwise(parts))
            name = "".join(parts)
            ways = [
                p
                for n in range(2, 6)
                for p in itertools.permutations(among, n)
                if "".join(p) == name
            ]
            fits = [w for w in ways if all(e in chain for e in itertools.pairwise(w))]
            assert segments(name, among, graph(*chain)) == (fits[0] if len(fits) == 1 else ()), (
                parts
            )


def test_work_is_bounded():
    with counted() as work:
        assert segments("a" * 300, ["a" * k for k in range(1, 40)], lambda a, b: False) == ()
    assert work.calls < 500_000  # the ways of cutting it are more than 10 ** 89
