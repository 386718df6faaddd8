"""Which rows and tokens of one run are which of the other's, from what the root was asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handmade import Builder, record
from whence import dtypes
from whence.align.batches import align
from whence.align.batches.align import Axes, SeenTokens, _between, axes
from whence.align.batches.batch import batches_of
from whence.align.batches.padding import _parts
from whence.align.batches.prompts import Prompt, together
from whence.align.batches.sequences import Piece, matched, same_batches, sequences_of
from whence.align.call_sites import coarser_input
from whence.records import MemoryRun
from whence.results import Parted, SlotPair

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((50, 4)).astype(np.float32)


def run(*steps, root="Lm"):
    """A root that turns ids into rows of a table, once per step; each step is a dict of its inputs,
    ids first.
    """
    made = Builder()
    for step, inputs in enumerate(steps):
        out = TABLE[np.asarray(next(iter(inputs.values())))]
        slots = {f"input.{name}": np.array(array) for name, array in inputs.items()}
        made.call("", {**slots, "output.0": out}, op_type=root, root=root, step=step, leaf=True)
    return made.run()


def sequences(own):
    found = batches_of(own, own.calls)
    assert found is not None
    return [
        (a.tokens, [(p.call, p.row, p.start, p.stop) for p in a.pieces])
        for a in sequences_of(found)
    ]


def cache(tokens):
    return np.zeros((1, 2, tokens, 3), np.float32)


IDS = np.array([[5, 6, 7, 8]])
PAD = {
    "input_ids": np.array([[0, 0, 3, 4], [5, 6, 7, 8]]),
    "attention_mask": np.array([[0, 0, 1, 1], [1, 1, 1, 1]]),
}


def test_separate_prompts_are_sequences_of_their_own():
    assert sequences(run({"input_ids": IDS}, {"input_ids": IDS})) == [
        ((5, 6, 7, 8), [(0, 0, 0, 4)]),
        ((5, 6, 7, 8), [(1, 0, 0, 4)]),
    ]


def test_padding_is_no_part_of_a_sequence_on_either_side():
    assert sequences(run(PAD)) == [((3, 4), [(0, 0, 2, 4)]), ((5, 6, 7, 8), [(0, 1, 0, 4)])]
    right = {
        "input_ids": PAD["input_ids"][:, ::-1],
        "attention_mask": PAD["attention_mask"][:, ::-1],
    }
    assert sequences(run(right))[0] == ((4, 3), [(0, 0, 0, 2)])


@pytest.mark.parametrize(
    "second",
    [
        {"past_key_values.layers.0.keys": cache(2)},
        {"position_ids": np.array([[2]])},
        {"attention_mask": np.ones((1, 3), np.int64)},
    ],
    ids=["cache", "positions", "mask"],
)
def test_a_step_that_goes_on_with_a_cache_joins_the_sequence(second):
    steps = (
        {"input_ids": IDS[:, :2], "position_ids": np.array([[0, 1]])},
        {"input_ids": IDS[:, 2:3], **second},
    )
    assert sequences(run(*steps)) == [((5, 6, 7), [(0, 0, 0, 2), (1, 0, 0, 1)])]


def test_the_whole_prompt_again_adds_its_last_token():
    assert sequences(run({"input_ids": IDS[:, :2]}, {"input_ids": IDS[:, :3]})) == [
        ((5, 6, 7), [(0, 0, 0, 2), (1, 0, 2, 3)])
    ]


@pytest.mark.parametrize("names", [("input_ids", "positions"), ("0", "1")])
def test_rows_of_a_flattened_batch_are_told_by_their_positions(names):
    steps = (
        dict(zip(names, (np.array([1, 2, 3, 9]), np.array([0, 1, 2, 0])), strict=True)),
        dict(zip(names, (np.array([4, 8]), np.array([3, 1])), strict=True)),
    )
    assert sequences(run(*steps)) == [
        ((1, 2, 3, 4), [(0, 0, 0, 3), (1, 0, 0, 1)]),
        ((9, 8), [(0, 1, 3, 4), (1, 1, 1, 2)]),
    ]


def test_positions_that_follow_on_each_other_by_chance_are_two_rows():
    steps = (
        {"input_ids": np.array([1, 2, 9, 8, 7]), "positions": np.array([0, 1, 0, 1, 2])},
        {"input_ids": np.array([3, 6]), "positions": np.array([2, 3])},
        {"input_ids": np.array([4, 5]), "positions": np.array([3, 4])},
    )
    assert [tokens for tokens, _ in sequences(run(*steps))] == [(1, 2, 3, 4), (9, 8, 7, 6, 5)]


def test_one_form_is_left_alone_and_reordered_rows_are_not():
    def form(*arrays):
        own = run(*({"input_ids": np.asarray(a)} for a in arrays))
        return batches_of(own, own.calls)

    assert same_batches(form([[1, 2], [3, 4]]), form([[1, 2], [3, 9]]))
    assert not same_batches(form([[1, 2], [3, 4]]), form([[3, 4], [1, 2]]))
    assert not same_batches(form([[1, 2], [3, 4]]), form([[1, 2]], [[3, 4]]))
    calls = form([[1, 2]], [[3, 4]]), form([[3, 4]], [[1, 2]])
    assert not same_batches(*calls)
    assert same_batches(*calls, in_this_order=True)  # as each step of a training depends on them
    assert same_batches(form([[1]], [[2]]), form([[2]], [[1]]))  # tokens, by chance


def test_rows_of_numbers_are_known_in_the_coarser_dtype():
    rows = RNG.standard_normal((4, 3, 2)).astype(np.float32)
    narrow = dtypes.named("bfloat16").numpy
    runs = []
    for batches in ([rows], [rows[2:].astype(narrow), rows[:2].astype(narrow)]):
        made = Builder()
        for step, x in enumerate(batches):
            made.call("", {"input.x": x, "output.0": x}, op_type="Net", root="Net", step=step)
        runs.append(made.run())
    coarse = coarser_input([(own, own.calls) for own in runs])
    assert coarse == "bfloat16"
    assert coarser_input([(runs[0], runs[0].calls)] * 2) == ""
    pairs = matched(*(sequences_of(batches_of(own, own.calls, coarse)) for own in runs))
    places = {(m.reference.pieces[0].row, m.target.pieces[0].call) for m in pairs}
    assert places == {(0, 1), (1, 1), (2, 0), (3, 0)}


def test_sequences_match_whole_or_by_a_common_start():
    def of(*rows):
        own = run(*({"input_ids": np.array([row])} for row in rows))
        return sequences_of(batches_of(own, own.calls))

    left, right = (
        of([1, 2, 3, 4], [5, 6, 7], [1, 2, 3, 4], [9, 9]),
        of([5, 6, 7], [1, 2, 3, 8], [1, 2, 3, 4], [40, 41]),
    )
    found = [(left.index(a), right.index(b), n) for a, b, n, _ in matched(left, right)]
    assert found == [(0, 2, 4), (1, 0, 3), (2, 1, 3)]


def test_what_the_other_run_asked_tells_rows_of_one_length_apart():
    """Request 0 is done after two tokens; what comes at position 2 goes on with request 1, as long,
    not with the first.
    """
    steps = [([1, 2, 3, 4], [0, 1, 0, 1]), ([5], [2])]
    found = batches_of(
        own := run(*({"input_ids": np.array(i), "positions": np.array(p)} for i, p in steps)),
        own.calls,
    )
    assert [a.tokens for a in sequences_of(found)] == [(1, 2, 5), (3, 4)]
    for known in ([(1, 2), (3, 4, 5)], [(1, 2), (3, 4, 9)]):
        assert [a.tokens for a in sequences_of(found, known)] == [(1, 2), (3, 4, 5)]


@pytest.mark.parametrize(
    ("slot", "sights", "expected"),
    [
        ("output.0", [((1, 5, 8), 1, 5, 5), ((1, 1, 8), 1, 1, 6)], Axes(0, 1)),
        ("output.0", [((1, 3, 5, 8), 1, 5, 5), ((1, 3, 1, 8), 1, 1, 6)], Axes(0, 2)),
        ("output.0", [((5, 2, 8), 2, 5, 5), ((1, 2, 8), 2, 1, 6)], Axes(1, 0)),
        ("output.keys", [((1, 2, 5, 8), 1, 5, 5), ((1, 2, 6, 8), 1, 1, 6)], Axes(0, None, 2)),
        ("output.keys", [((1, 1, 1, 8), 1, 1, 1), ((1, 1, 2, 8), 1, 1, 2)], Axes(0, None, 2)),
        ("input.attention_mask", [((1, 1, 5, 5), 1, 5, 5), ((1, 1, 1, 6), 1, 1, 6)], Axes(0, 2, 3)),
        ("output.logits", [((1, 1, 50), 1, 5, 5), ((1, 1, 50), 1, 1, 6)], Axes(0, None, None, 1)),
        ("output.0", [((5, 8), None, 5, 5), ((2, 8), None, 2, 2)], Axes(None, 0)),
        ("output.0", [((2, 50), None, 9, 9, 2), ((1, 50), None, 1, 1, 1)], Axes(last=0)),
        ("output.0", [((2, 50), None, 9, 9, 2), ((3, 50), None, 3, 3, 2)], None),
        ("output.0", [((20, 4), 4, 5, 5)], Axes(flat=0)),
        ("output.0", [((1, 4, 5, 5), 4, 5, 5)], Axes(None, 2)),
        ("output.0", [((1, 4, 1, 1), 4, 1, 1)], Axes(None, 0)),
        (
            "output.past_key_values.layers.0.keys",
            [((1, 2, 3, 8), 1, 5, 5), ((1, 2, 3, 8), 1, 1, 6)],
            None,
        ),
        ("output.0", [((16,), 1, 5, 5), ((16,), 1, 1, 6)], Axes()),
        ("output.0", [((1, 5, 8), 1, 5, 5), ((1, 7, 8), 1, 1, 6)], None),
        ("output.0", [((1, 5, 8), 1, 5, 5), ((5, 8), 1, 5, 5)], None),
    ],
)
def test_axes_follow_what_the_root_was_given(slot, sights, expected):
    assert axes(slot, False, [SeenTokens(*s) for s in sights]) == expected


def outputs(own):
    return [own.array(next(r.record for r in c.refs if r.slot == "output.0")) for c in own.calls]


@pytest.mark.parametrize("swap", [False, True])
def test_both_runs_come_to_one_form_with_the_same_bits(swap):
    single = run({"input_ids": np.array([[3, 4]])}, {"input_ids": IDS})
    sides = (single, run(PAD))[:: -1 if swap else 1]
    faced = align.align_batches(*sides)
    left, right, joined = faced.reference, faced.target, faced.joined
    assert faced.notes[0].startswith("2 of 2 sequences")
    assert {j.side for j in joined} == ({"target"} if not swap else {"reference", "target"})
    one, other = (
        {(c.step, c.micro): a for c, a in zip(r.calls, outputs(r), strict=True)}
        for r in (left, right)
    )
    assert one.keys() == other.keys()
    for key, array in one.items():
        np.testing.assert_array_equal(array, other[key])
    assert sorted(a.shape for a in one.values()) == [(1, 2, 4), (1, 4, 4)]


def test_steps_face_the_whole_and_what_was_not_asked_of_both_is_told():
    whole = run({"input_ids": IDS}, {"input_ids": np.array([[30, 31]])})
    steps = run(
        {"input_ids": IDS[:, :2], "position_ids": np.array([[0, 1]])},
        {"input_ids": IDS[:, 2:3], "position_ids": np.array([[2]])},
    )
    faced = align.align_batches(whole, steps)
    left, right = faced.reference, faced.target
    np.testing.assert_array_equal(outputs(right)[0], TABLE[IDS[:, :3]])
    np.testing.assert_array_equal(outputs(left)[0], TABLE[IDS[:, :3]])
    assert len(left.calls) == 2
    assert faced.notes[0].startswith("1 of 2 sequences are paired")
    assert faced.parted == [Parted("Lm", 0, 0, 3, 4, 8, None)]
    faced = align.align_batches(steps, whole)
    assert "1 sequences of the target have no partner: step 1 row 0" in faced.notes
    assert faced.parted == []


def test_runs_asked_nothing_in_common_stay_as_they_are():
    a, b = run({"input_ids": IDS}), run({"input_ids": np.array([[30, 31]])})
    assert align.align_batches(a, b) == align.AlignedBatches(a, b)


@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        # (tokens, how many came with the first call)
        ([("abcd", 2)], [("abxy", 2)], [(0, 0, 2)]),  # the same prompt, answered otherwise
        ([("abcd", 2)], [("abcx", 3)], [(0, 0, 3)]),  # all of the longer prompt
        ([("abcd", 2)], [("abxx", 3)], []),
        ([("abc", 3)], [("abcde", 5)], [(0, 0, 3)]),  # all of the shorter sequence
        ([("abcd", 2), ("abxy", 2)], [("abxy", 2), ("abcd", 2)], [(0, 0, 2), (1, 1, 2)]),
        ([("abcd", 4)], [("axcd", 4), ("abcdef", 6)], [(0, 1, 4)]),  # the one that agrees longest
        ([("abcd", 4), ("abcd", 4)], [("abcdef", 6)], [(0, 0, 4)]),  # each once
    ],
)
def test_prompts_are_paired_by_their_ids_else_by_how_they_start(left, right, pairs):
    call = run({"input_ids": IDS}).calls[0]
    sides = [
        [
            Prompt(call, row, tuple(map(ord, text)), first, (0,))
            for row, (text, first) in enumerate(side)
        ]
        for side in (left, right)
    ]
    assert [tuple(pair) for pair in together(*sides)] == pairs


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=5),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_the_pieces_of_some_tokens_hold_these_tokens(cut, start, length):
    """cut: of each piece, where it begins in its call and how many tokens it has."""
    pieces = [
        Piece(call, 0, begin, begin + tokens, begin + tokens)
        for call, (begin, tokens) in enumerate(cut)
    ]
    every = [(p.call, t) for p in pieces for t in range(p.start, p.stop)]
    found = _between(pieces, start, start + length)
    assert [(p.call, t) for p in found for t in range(p.start, p.stop)] == every[
        start : start + length
    ]
    ends = {p.call: p.stop for p in pieces}
    assert all(p.start < p.stop for p in found)
    assert all(p.whole == (p.stop == ends[p.call]) for p in found)


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"padding"}, True),
        ({"padding", "ids"}, True),
        ({"padding", "mask"}, False),
        ({"padding", "no mask"}, False),
        ({"tokens", "padding"}, False),
        (set(), False),
    ],
)
def test_padding_parts_where_equal_masks_leave_it_open(changed, parts):
    """What else has the shape of a mask, such as ids or positions, is none."""
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
    real = mask.astype(bool)
    arrays = [mask, np.arange(8).reshape(2, 4), RNG.standard_normal((2, 4, 3)).astype(np.float32)]
    other = [a.copy() for a in arrays]
    other[0] += "mask" in changed
    other[1] += "ids" in changed
    other[2][~real] += "padding" in changed
    other[2][real] += "tokens" in changed
    names = ["input.attention_mask", "input.input_ids", "output.0"]
    kept = [k for k in range(3) if k or "no mask" not in changed]
    runs = [
        MemoryRun([], [record(k, a) for k, a in enumerate(side)], dict(enumerate(side)))
        for side in (arrays, other)
    ]
    slots = [SlotPair(names[k], names[k], k, k) for k in kept]
    assert _parts(*runs, slots, real) is parts
