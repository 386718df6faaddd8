from hypothesis import given, settings
from hypothesis import strategies as st

from handmade import net
from whence import align
from whence.records import Call, MemoryRun, Record, Ref


def run(scopes, *, root="Net", rank=0, occurrences=None, types=None):
    records = [Record(0, "float32", (2,))]
    calls = [
        Call(
            i,
            scope,
            root,
            0,
            i,
            rank=rank,
            op_type=(types or {}).get(i, "Linear"),
            parent=-1 if i == 0 else 0,
            occurrence=(occurrences or {}).get(i, 0),
            refs=(Ref("input.0", 0), Ref("output.0", 0)),
        )
        for i, scope in enumerate(scopes)
    ]
    return MemoryRun(calls, records, {})


def names(plan, left, right):
    return [
        (left.calls[p.reference].scope, right.calls[p.target].scope, p.rule) for p in plan.pairs
    ]


def test_exact_keys_pair_in_execution_order():
    left, right = run(["", "a", "b"]), run(["", "b", "a"])
    assert names(align.plan(left, right), left, right) == [
        ("", "", "exact key"),
        ("a", "a", "exact key"),
        ("b", "b", "exact key"),
    ]


def test_wrappers_and_index_styles_are_normalised():
    left = run(["", "layers.0.fc", "layers.1.fc"])
    right = run(["", "module.layers[0].fc", "_orig_mod.layers.1.fc"], root="Wrapped")
    plan = align.plan(left, right)
    assert {p.rule for p in plan.pairs} == {"normalised name"}
    assert len(plan.pairs) == 3
    assert not plan.unmatched_reference
    assert not plan.unmatched_target


def test_a_wrapper_and_what_it_wraps_do_not_take_each_others_place():
    left = run(["", "fc"], types={0: "Net"})
    right = run(
        ["", "module", "module.fc"],
        root="DistributedDataParallel",
        types={0: "DistributedDataParallel", 1: "Net"},
    )
    plan = align.plan(left, right)
    assert names(plan, left, right) == [
        ("", "module", "normalised name"),
        ("fc", "module.fc", "normalised name"),
    ]
    assert plan.unmatched_target == (0,)


def test_what_fits_several_is_ambiguous_and_not_guessed():
    left = run(["", "fc"], types={1: "X"})
    right = run(["", "module.fc", "_orig_mod.fc"], types={1: "Y", 2: "Z"})
    plan = align.plan(left, right)
    assert plan.ambiguous == ((1, (1, 2)),)
    assert plan.unmatched_reference == ()


def test_positional_and_keyword_inputs_face_each_other():
    a, b = net(), net()
    calls = list(b.calls)
    refs = tuple(
        Ref("input.hidden_states" if r.slot == "input.0" else r.slot, r.record, r.edge)
        for r in calls[1].refs
    )
    calls[1] = Call(**{**{f: getattr(calls[1], f) for f in Call.__struct_fields__}, "refs": refs})
    other = MemoryRun(calls, b.records, b._arrays)
    pair = next(p for p in align.plan(a, other).pairs if a.calls[p.reference].scope == "fc1")
    assert ("input.0", "input.hidden_states") in [
        (s.reference_slot, s.target_slot) for s in pair.slots
    ]
    assert pair.only_reference == pair.only_target == ()


def test_calls_that_were_not_selected_are_not_part_of_the_plan():
    calls = [Call(0, "", "Net", 0, 0), Call(1, "a", "Net", 0, 1, parent=0, notes=("not selected",))]
    some = MemoryRun(calls, [], {})
    plan = align.plan(some, some)
    assert len(plan.pairs) == 1
    assert plan.unmatched_reference == ()


SCOPES = st.lists(
    st.sampled_from(["a", "b.0", "module.b.0", "b[0]", "_orig_mod.c", "c", "layers.1.fc"]),
    min_size=1,
    max_size=8,
    unique=True,
)


@settings(max_examples=60)
@given(SCOPES, SCOPES)
def test_every_call_ends_in_exactly_one_place(one, two):
    left, right = run(["", *one]), run(["", *two])
    plan = align.plan(left, right)
    mine = (
        [p.reference for p in plan.pairs]
        + list(plan.unmatched_reference)
        + [a for a, _ in plan.ambiguous]
    )
    theirs = [p.target for p in plan.pairs] + list(plan.unmatched_target)
    assert sorted(mine) == list(range(len(left.calls)))
    assert len(theirs) == len(set(theirs))
    doubtful = {b for _, others in plan.ambiguous for b in others}
    assert set(theirs) | doubtful == set(range(len(right.calls)))
