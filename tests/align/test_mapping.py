"""Maps: what a user says of who faces whom, carried out or refused with the line."""

import numpy as np
import pytest

from handmade import Builder, net
from whence import align, api
from whence.align.plan_editor import PlanEditor
from whence.errors import UsageError
from whence.results import CallPair

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 4)).astype(np.float32)
Q, K = (RNG.standard_normal((n, 4)).astype(np.float32) for n in (6, 2))


def run(*calls, root="Net"):
    """Calls given as (scope, {slot: array}), below the first one."""
    made = Builder()
    for i, (scope, slots) in enumerate(calls):
        made.call(scope, slots, parent=-1 if i == 0 else 0, root=root)
    return made.run()


def linear(scope, weight):
    return scope, {"param.weight": weight, "input.0": X, "output.0": X @ weight.T}


SPLIT = run(("", {"input.0": X}), linear("attn.0.q", Q), linear("attn.0.k", K))
FUSED = run(("", {"input.0": X}), linear("blocks.0.qk", np.concatenate([Q, K])))


def written(tmp_path, text):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    return path


def faced(reference, target, path):
    return align.align(reference, target, user_map=align.load_map(path))


def test_names_are_rewritten_before_anything_is_paired(tmp_path):
    a, b = net(), net(names=("enc.first", "enc.second"))
    path = written(
        tmp_path, "names:\n  - {from: enc.first, to: fc1}\n  - {from: 'enc.*', to: fc2}\n"
    )
    plan = faced(a, b, path).plan
    assert [(a.calls[p.reference].scope, p.rule, p.evidence) for p in plan.pairs] == [
        ("", "exact key", ""),
        ("fc1", "user map", "enc.first in the target"),
        ("fc2", "user map", "enc.second in the target"),
    ]
    assert api.compare(a, b, mapping=path).status == "same"


def test_numbers_and_stars_go_over_to_the_other_side(tmp_path):
    a = run(
        ("", {"input.0": X}),
        linear("model.layers.3.attn.q", Q),
        linear("model.layers.12.attn.q", Q * 2),
    )
    b = run(("", {"input.0": X}), linear("h.12.wq.core", Q * 2), linear("h.3.wq.core", Q))
    path = written(
        tmp_path, "pairs:\n  - reference: model.layers.{i}.attn.q\n    target: h.{i}.wq.core\n"
    )
    plan = faced(a, b, path).plan
    assert [(a.calls[p.reference].scope, b.calls[p.target].scope) for p in plan.pairs[1:]] == [
        ("model.layers.3.attn.q", "h.3.wq.core"),
        ("model.layers.12.attn.q", "h.12.wq.core"),
    ]


def test_parts_of_a_fused_call_and_the_other_way_round(tmp_path):
    parts = """
pairs:
  - reference: attn.{i}.q
    target: blocks.{i}.qk
    slots: {output.0: "x[..., 0:6]", param.weight: "x[0:6]"}
  - reference: attn.{i}.k
    target: blocks.{i}.qk
    slots: {output.0: "x[..., 6:8]", param.weight: "x[6:8]"}
"""
    found = faced(SPLIT, FUSED, written(tmp_path, parts))
    for pair in found.plan.pairs[1:]:
        for slot in pair.slots:
            np.testing.assert_array_equal(
                found.target.array(slot.target_record), found.reference.array(slot.reference_record)
            )
    assert [len(p.slots) for p in found.plan.pairs] == [1, 3, 3]
    assert api.compare(SPLIT, FUSED, mapping=tmp_path / "map.yaml").status == "same"
    whole = """
pairs:
  - reference: blocks.{i}.qk
    target: {q: "attn.{i}.q", k: "attn.{i}.k"}
    slots: {output.0: "cat(q, k, axis=-1)", param.weight: "cat(q, k, axis=0)", input.0: q}
"""
    found = faced(FUSED, SPLIT, written(tmp_path, whole))
    assert found.plan.unmatched_target == ()
    assert [s.dims for s in found.plan.pairs[1].slots] == [
        "cat(q, k, axis=-1)",
        "cat(q, k, axis=0)",
        "q",
    ]
    assert api.compare(FUSED, SPLIT, mapping=tmp_path / "map.yaml").status == "same"


def test_a_wrong_part_is_found_wrong_by_comparing(tmp_path):
    spoilt = np.concatenate([Q, K * np.float32(1.01)])
    target = run(("", {"input.0": X}), linear("blocks.0.qk", spoilt))
    text = "pairs:\n"
    for name, rows in (("q", "0:6"), ("k", "6:8")):
        text += (
            f"  - {{reference: attn.0.{name}, target: blocks.0.qk, slots: {{output.0: "
            f'"x[..., {rows}]", param.weight: "x[{rows}]"}}}}\n'
        )
    result = api.compare(SPLIT, target, mapping=written(tmp_path, text))
    assert (result.status, [f.name for f in result.findings]) == ("different", ["attn.0.k"])


def test_two_slots_of_one_call_are_added(tmp_path):
    half = X / 2
    target = run(("", {"input.0": X}), ("norm", {"input.0": X, "output.0": half, "output.1": half}))
    reference = run(("", {"input.0": X}), ("norm", {"input.0": X, "output.0": X + 0}))
    text = (
        "pairs:\n  - {reference: norm, target: norm, slots: {output.0: {dims: a + b, a: "
        "output.0, b: output.1}, input.0: null}}\n"
    )
    found = faced(reference, target, written(tmp_path, text))
    (slot,) = found.plan.pairs[1].slots
    np.testing.assert_array_equal(found.target.array(slot.target_record), X)


def test_what_is_ignored_is_neither_paired_nor_missed(tmp_path):
    path = written(tmp_path, "ignore: {reference: [fc2], target: [fc2]}\n")
    result = api.compare(
        net(), net(change=lambda name, v: v * 2 if name == "y" else v), mapping=path
    )
    assert result.coverage.calls == 2
    assert "the map leaves out 1 calls of the reference" in result.plan.notes


ONE = "pairs:\n  - reference: fc1\n    target: fc1\n    slots: "
WRONG = [
    ("pairs: [", "line 1: not YAML"),
    ("pair: []", "line 1: 'pair' is not known in the map; 'pairs'?"),
    ("pairs:\n  - reference: fc1\n", "line 2: an entry of pairs needs 'target'"),
    (
        "pairs:\n  - {reference: fc1, target: fc1, slot: {}}",
        "line 2: 'slot' is not known in an entry of pairs; 'slots'?",
    ),
    ("pairs: fc1", "line 1: pairs is not a list"),
    (
        "names:\n  - {from: 'a.{i}', to: 'b.{j}'}",
        "line 2: to: 'b.{j}' uses {j}, which 'a.{i}' does not hold",
    ),
    ("names:\n  - {from: zz, to: b}", "line 2: names.from: 'zz' matches no call of the target"),
    (
        "ignore:\n  target: [fcx]",
        "line 2: ignore.target: 'fcx' matches no call of the target; nearest: fc",
    ),
    (
        "pairs:\n  - {reference: fx1, target: fc1}",
        "line 2: pairs.reference: 'fx1' matches no call of the reference; nearest: fc1",
    ),
    (
        "pairs:\n  - {reference: fc1, target: fx1}",
        "line 2: pairs.target: 'fx1' matches no call of the target; nearest: fc1",
    ),
    (
        "pairs:\n  - {reference: fc1, target: fc1}\n  - {reference: 'fc*', target: fc2}",
        "line 3: fc1 was paired on line 2 already",
    ),
    (
        "pairs:\n  - {reference: fc1, target: {a: fc1, b: fc2}}",
        "line 2: several calls of the target need slots with an expression",
    ),
    (
        "pairs:\n  - {reference: fc1, target: {'1': fc1}}",
        "line 2: target: '1' cannot be used in an expression",
    ),
    (ONE + "{output.1: x}", "line 4: fc1 has no slot 'output.1'; it has"),
    (ONE + "{output.0: 'x[0'}", "line 4: 'x[0' is not an expression"),
    (
        ONE + "{output.0: 'x[0:2]'}",
        r"line 4: fc1, output.0: x[0:2] has shape (2, 32), the reference's is (5, 32)",
    ),
    (ONE + "{output.0: 'cat(x, y)'}", "line 4: fc1, output.0: 'y' is not bound; there is x"),
    (
        ONE + "{output.0: {dims: y, y: output.7}}",
        "line 4: fc1 of the target has no slot 'output.7'",
    ),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[w for _, w in WRONG])
def test_what_is_wrong_in_a_map_is_said_with_its_line(tmp_path, text, words):
    with pytest.raises(UsageError) as error:
        faced(net(), net(), written(tmp_path, text))
    assert words in str(error.value)
    assert "map.yaml" in str(error.value)


def test_no_map_there_says_how_to_make_one(tmp_path):
    with pytest.raises(UsageError, match="whence align REF TGT"):
        align.load_map(tmp_path / "none.yaml")


def test_an_empty_map_changes_nothing(tmp_path):
    assert (
        faced(net(), net(), written(tmp_path, "# nothing\n")).plan == align.align(net(), net()).plan
    )


@pytest.mark.parametrize("target", [FUSED, SPLIT, net()], ids=["fused", "same", "other"])
def test_a_proposed_map_says_again_what_was_paired(tmp_path, target):
    from whence.report.plan import plan_map

    reference = net() if target.calls[-1].scope == "fc2" else SPLIT
    proposed = align.align(reference, target)
    again = faced(
        reference,
        target,
        written(tmp_path, plan_map(proposed.plan, proposed.reference, proposed.target)),
    )
    assert [(p.reference, p.target) for p in again.plan.pairs] == [
        (p.reference, p.target) for p in proposed.plan.pairs
    ]


def test_what_a_map_takes_from_a_pair_leaves_all_others_of_it_unmatched(tmp_path):
    """q of the reference was said to be two calls of the target; one is said to be k's then: the
    other is listed.
    """
    halves = np.split(Q, 2)
    target = run(("", {"input.0": X}), linear("a", halves[0]), linear("b", halves[1]))
    both = PlanEditor(SPLIT, target, align.plan(SPLIT, target))
    for call in (1, 2):
        both.release("target", target.calls[call])
    both.release("reference", SPLIT.calls[1])
    both.add(CallPair(1, 1, "fused calls", also=(2,)))
    both.release("target", target.calls[1])
    plan = both.done()[1]
    assert {2} <= set(plan.unmatched_target)
    assert 1 in plan.unmatched_reference
    assert not any(p.reference == 1 for p in plan.pairs)
