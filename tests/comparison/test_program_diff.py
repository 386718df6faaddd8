"""The longest common subsequence that lays two programs beside each other, against the plain table
of its length.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.align.calls import sequence_alignment
from whence.align.calls.sequence_alignment import blocks
from whence.comparison.replays.program_difference import differing_sizes
from whence.errors import UsageError

WORDS = st.lists(st.sampled_from("abcd"), max_size=24)


def longest(a, b):
    """Length of a longest common subsequence, by the table of all prefixes (O(nm))."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(row[j], before[j + 1]))
    return row[-1]


@given(WORDS, WORDS)
def test_blocks_cover_both_in_order_and_pair_as_many_as_can_be(a, b):
    found = blocks(a, b)
    ends = [(0, 0), *((a1, b1) for _, a1, _, b1, _ in found)]
    assert [(a0, b0) for a0, _, b0, _, _ in found] == ends[:-1]
    assert ends[-1] == (len(a), len(b))
    paired = 0
    for a0, a1, b0, b1, equal in found:
        assert a1 > a0 or b1 > b0
        if equal:
            assert a[a0:a1] == b[b0:b1]
            paired += a1 - a0
    assert paired == longest(a, b)


@pytest.mark.parametrize("place", range(6))
def test_one_more_operator_moves_no_other(place):
    plain = list("abcdef")
    more = [*plain[:place], "x", *plain[place:]]
    assert sum(a1 - a0 for a0, a1, _, _, equal in blocks(plain, more) if equal) == 6
    assert [more[b0:b1] for _, _, b0, b1, equal in blocks(plain, more) if not equal] == [["x"]]


def test_too_much_work_is_refused_with_what_was_shared(monkeypatch):
    monkeypatch.setattr(sequence_alignment, "_MAX_WORK", 50)
    with pytest.raises(
        UsageError, match="share 1 operators at their ends; between them are 40 and 40"
    ):
        blocks(["s", *range(40)], ["s", *range(100, 140)])


def test_other_sizes_of_a_split_are_told():
    from types import SimpleNamespace

    def step(sizes):
        tensor = {"in": 0}
        return SimpleNamespace(name="aten.split_with_sizes", args=[tensor, sizes, -1], kwargs={})

    (clause,) = differing_sizes(step([4, 8]), step([8, 4]))
    assert "[4, 8] in the reference, [8, 4] in the target" in clause
    assert differing_sizes(step([4, 8]), step([4, 8])) == []
