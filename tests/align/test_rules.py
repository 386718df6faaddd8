"""Each rule by itself, on runs made by hand."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handmade import net, record
from whence import align
from whence.align import module_names
from whence.align.calls import call_sequences as order
from whence.align.calls.fingerprints import Feature
from whence.errors import UsageError
from whence.records import Call, MemoryRun, Ref


def chain(layers, *, root="Net", scope="layers.{}", seed=0, dtype=np.float32):
    """A chain of calls below one root. layers: (name or None for its place, op_type, key of its
    weight or None, rows of its output).
    """
    records, calls, known = [], [], {}

    def add(array):
        records.append(record(len(records), np.asarray(array, dtype=dtype)))
        return len(records) - 1

    at = first = add(np.random.default_rng(99).standard_normal((2, 8)))
    for k, (name, op_type, weight, rows) in enumerate(layers):
        refs = [Ref("input.0", at)]
        if weight is not None:
            if weight not in known:
                known[weight] = add(np.random.default_rng(weight).standard_normal((8, 8)))
            refs.append(Ref("param.weight", known[weight]))
        at = add(np.random.default_rng(1000 + seed + k).standard_normal((rows, 8)))
        refs.append(Ref("output.0", at))
        path = scope.format(k) if name is None else name
        calls.append((path, op_type, refs))
    out = [
        Call(k, path, root, 0, k + 1, op_type=kind, parent=len(calls), leaf=True, refs=tuple(refs))
        for k, (path, kind, refs) in enumerate(calls)
    ]
    out.append(
        Call(
            len(calls),
            "",
            root,
            0,
            0,
            op_type="Net",
            refs=(Ref("input.0", first), Ref("output.0", at)),
        )
    )
    return MemoryRun(out, records, {})


def paired(left, right, **how):
    plan = align.plan(left, right, **how)
    return {
        left.calls[p.reference].scope: (right.calls[p.target].scope, p.rule)
        for p in plan.pairs
        if left.calls[p.reference].scope
    }


def linear(*weights):
    return [(None, "Linear", w, 2) for w in weights]


# ---- names


@pytest.mark.parametrize(
    ("one", "other", "rule"),
    [
        (
            "mlp.linear_fc1.ColumnParallelLinear.0",
            "mlp.linear_fc1.ColumnParalleLinear",
            "normalised name",
        ),
        ("layers.0.qkv.QKVParallelLinear.0", "layers[0].qkv", "normalised name"),
        ("decoder.self_attn.q_proj", "decoder.self_atn.q_proj", "similar name"),
        ("h.0.attention.q", "h.0.attention.q_proj", "similar name"),
    ],
)
def test_one_name_in_two_spellings(one, other, rule):
    left = chain([(one, "ColumnParallelLinear", 1, 2), ("x.y", "ReLU", None, 2)])
    right = chain([(other, "Linear", 2, 2), ("x.y", "ReLU", None, 2)], seed=7)
    assert paired(left, right, match="names")[one] == (other, rule)


def test_numbers_are_never_a_typo():
    assert module_names.likeness("layer10", "layer11") == module_names.likeness("3", "4") == 0.0
    left, right = chain([("a.b1", "Linear", 1, 2)]), chain([("a.b2", "Linear", 2, 2)], seed=3)
    assert paired(left, right, match="names") == {}


def test_a_prefix_that_one_side_has():
    tail = ["embed", "blocks.0.q", "blocks.0.k", "blocks.1.q", "blocks.1.k"]
    left = chain(
        [(f"model.{n}", "Linear", k, 2) for k, n in enumerate(tail)] + [("head", "Linear", 9, 2)]
    )
    right = chain(
        [(n, "Linear", k + 50, 2) for k, n in enumerate(tail)] + [("head", "Linear", 99, 2)], seed=5
    )
    found = paired(left, right, match="names")
    assert {a: b for a, (b, _) in found.items()} == {
        **{f"model.{n}": n for n in tail},
        "head": "head",
    }


def test_families_of_classes():
    assert module_names.family("QKVParallelLinear") == module_names.family("Linear") == "linear"
    assert module_names.family("LlamaRMSNorm") == module_names.family("nn.LayerNorm") == "norm"
    assert (
        module_names.family("VocabParallelEmbedding")
        == module_names.family("Embedding")
        == "embedding"
    )
    assert module_names.family("Net") == ""


# ---- order


def test_the_alignment_is_the_best_of_all_by_brute_force():
    def best(s, i=0, j=0):
        if i == s.shape[0] or j == s.shape[1]:
            return 0.0
        take = s[i, j] + best(s, i + 1, j + 1) if s[i, j] >= order.LEAST else -np.inf
        return max(best(s, i + 1, j), best(s, i, j + 1), take)

    rng = np.random.default_rng(0)
    for _ in range(60):
        s = rng.uniform(0, 9, (rng.integers(1, 6), rng.integers(1, 6)))
        found = order.align(s, order.LEAST)
        if not found.doubtful:
            assert sum(x for *_, x in found.pairs) == pytest.approx(best(s))
        assert found.pairs == sorted(found.pairs)


def test_equal_siblings_with_one_missing_are_ambiguous_not_guessed():
    left = chain([(f"a.{k}", "Linear", None, 2) for k in "xyz"])
    right = chain([(f"b.{k}", "Linear", None, 2) for k in "pq"], seed=50)
    plan = align.plan(left, right)
    assert [p.rule for p in plan.pairs] == ["exact key"]  # the roots
    assert len(plan.ambiguous) == 3
    assert not plan.unmatched_reference


def test_the_parts_of_long_sequences_are_found_without_a_table():
    tokens = [(k % 7, k % 11, 0, k // 40, 1) for k in range(4000)]
    left, right = tokens[:1000] + tokens[1010:], tokens[:3000] + tokens[3005:]
    found = order._anchors(left, right)
    assert len(found) > 100
    assert all(left[i] == right[j] for i, j in found)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("content", [0, 7])
def test_a_long_stretch_of_one_layer_is_paired_in_order_and_one_of_another_length_is_not(
    monkeypatch, content
):
    """Too long to be searched, and cut by what occurs once: a lone layer in front."""
    monkeypatch.setattr(order, "_CELLS", 4)

    def feature(kind):
        return Feature(
            kind=kind,
            family=kind,
            word=0,
            shapes=1,
            weight=1,
            content=content,
            layout=0,
            out=1,
            out_hash=0,
            container=False,
            elements=frozenset(),
            moments=(0.0, 0.0, 0.0),
            out_moments=(0.0, 0.0, 0.0, 0.0),
        )

    lone, layer = feature(1), feature(2)
    left, right = [lone, *[layer] * 9], [feature(3), lone, *[layer] * 9]
    found = order.sequence(left, right, str)
    assert [(i, j) for i, j, _ in found.pairs] == [(k, k + 1) for k in range(10)]
    found = order.sequence(left, [*right, layer], str)
    assert [(i, j) for i, j, _ in found.pairs] == [(0, 1)], "which of ten has gone nobody can tell"


def test_parallel_siblings_in_another_order_are_told_by_their_parameters():
    def attention(order, scope):
        run = chain([(scope[k], "Linear", ord(k), 2) for k in order])
        calls = [
            msgspec.structs.replace(c, refs=(Ref("input.0", 0), *c.refs[1:])) if c.scope else c
            for c in run.calls
        ]
        return MemoryRun(calls, run.records, {})

    left = attention("qkv", {"q": "a.one", "k": "a.two", "v": "a.three"})
    right = attention("vqk", {"q": "z.alpha", "k": "z.beta", "v": "z.gamma"})
    assert {a: b for a, (b, _) in paired(left, right).items()} == {
        "a.one": "z.alpha",
        "a.two": "z.beta",
        "a.three": "z.gamma",
    }


def test_exchanged_weights_of_a_chain_do_not_cross_the_pairs():
    """Where one layer feeds the next, weights in another place are the fault, not another order."""
    left, right = chain(linear(1, 2, 3, 4)), chain(linear(1, 3, 2, 4), scope="stack.{}", seed=9)
    assert {a: b for a, (b, _) in paired(left, right).items()} == {
        f"layers.{k}": f"stack.{k}" for k in range(4)
    }


# ---- numbers that mean something else


def test_a_layer_inserted_moves_the_numbers_behind_it():
    left, right = chain(linear(1, 2, 3, 4, 5)), chain(linear(1, 2, 77, 3, 4, 5), seed=9)
    found = paired(left, right)
    assert {a: b for a, (b, _) in found.items()} == {
        "layers.0": "layers.0",
        "layers.1": "layers.1",
        "layers.2": "layers.3",
        "layers.3": "layers.4",
        "layers.4": "layers.5",
    }
    assert found["layers.0"][1] == "exact key"
    assert found["layers.2"][1] == "order"
    assert paired(left, right, match="names")["layers.2"] == ("layers.2", "exact key")


def test_as_many_layers_keep_their_numbers_whatever_their_weights():
    left, right = chain(linear(1, 2, 3, 4)), chain(linear(2, 3, 4, 1), seed=9)
    assert all(a == b and rule == "exact key" for a, (b, rule) in paired(left, right).items())


def test_a_sequential_with_one_more_entry():
    kinds = [
        (None, "Linear", 1, 2),
        (None, "ReLU", None, 2),
        (None, "Linear", 2, 2),
        (None, "ReLU", None, 2),
        (None, "Linear", 3, 2),
    ]
    left, right = (
        chain(kinds, scope="{}"),
        chain([kinds[0], (None, "Dropout", None, 2), *kinds[1:]], scope="{}", seed=9),
    )
    assert {a: b for a, (b, _) in paired(left, right).items()} == {
        "0": "0",
        "1": "2",
        "2": "3",
        "3": "4",
        "4": "5",
    }


def test_another_class_alone_keeps_its_name():
    """A fault: the activation was replaced. The pair stays, and is judged."""
    left = chain(
        [(None, "Linear", 1, 2), (None, "ReLU", None, 2), (None, "Linear", 2, 2)], scope="{}"
    )
    right = chain(
        [(None, "Linear", 1, 2), (None, "Dropout", None, 2), (None, "Linear", 2, 2)],
        scope="{}",
        seed=9,
    )
    assert {a: b for a, (b, _) in paired(left, right).items()} == {"0": "0", "1": "1", "2": "2"}


def test_a_module_called_once_less_loses_the_right_call():
    def shared(skip):
        layers = []
        for k in range(4):
            layers.append((f"l.{k}", "Linear", k, 2))
            if k != skip:
                layers.append(("act", "ReLU", None, 2))
        run = chain(layers, seed=0 if skip is None else 40)
        seen, calls = 0, []
        for c in run.calls:
            calls.append(msgspec.structs.replace(c, occurrence=seen) if c.scope == "act" else c)
            seen += c.scope == "act"
        return MemoryRun(calls, run.records, {})

    left, right = shared(None), shared(1)
    plan = align.plan(left, right)
    facing = [(left.calls[p.reference], right.calls[p.target]) for p in plan.pairs]
    found = {a.occurrence: b.occurrence for a, b in facing if a.scope == "act"}
    assert found == {0: 0, 2: 1, 3: 2}
    assert [left.calls[i].occurrence for i in plan.unmatched_reference] == [1]


# ---- slots


def test_parameters_under_another_name_and_outputs_by_content():
    a = net()
    calls = []
    for c in a.calls:
        slots = [
            r.slot.replace("param.weight", "param.kernel").replace("output.0", "output.last")
            for r in c.refs
        ]
        refs = tuple(msgspec.structs.replace(r, slot=slot) for r, slot in zip(c.refs, slots))
        kind = c.op_type.replace("Linear", "Dense")
        calls.append(
            msgspec.structs.replace(
                c, scope=c.scope.replace("fc", "dense"), op_type=kind, refs=refs
            )
        )
    plan = align.plan(a, MemoryRun(calls, a.records, a._arrays))
    slots = {(s.reference_slot, s.target_slot) for p in plan.pairs for s in p.slots}
    assert {("param.weight", "param.kernel"), ("output.0", "output.last")} <= slots
    assert not any(p.only_reference or p.only_target for p in plan.pairs)


@pytest.mark.parametrize(("op_type", "crossed"), [("Same", False), ("Other", True)])
def test_exchanged_arguments_are_a_fault_in_one_class_and_another_signature_in_two(
    op_type, crossed
):
    rng = np.random.default_rng(0)
    records = [record(k, rng.standard_normal((3, 4)).astype(np.float32)) for k in range(3)]

    def run(first, second, kind):
        refs = (Ref("input.0", first), Ref("input.1", second), Ref("output.0", 2))
        return MemoryRun([Call(0, "f", "Net", 0, 0, op_type=kind, refs=refs)], records, {})

    (pair,) = align.plan(run(0, 1, "Same"), run(1, 0, op_type)).pairs
    at = {s.reference_slot: s.target_slot for s in pair.slots}
    assert at["input.0"] == ("input.1" if crossed else "input.0")


# ---- match


def test_match_exact_and_names_stop_where_they_say():
    left, right = chain(linear(1, 2)), chain(linear(1, 2), scope="layers[{}]", seed=9)
    other = chain(linear(1, 2), scope="b{}", seed=9)
    assert paired(left, right, match="exact") == {}
    assert {rule for _, rule in paired(left, right, match="names").values()} == {"normalised name"}
    assert paired(left, other, match="names") == {}
    assert {rule for _, rule in paired(left, other, match="auto").values()} == {"order"}


def test_match_order_is_line_by_line():
    left, right = chain(linear(1, 2)), chain(linear(3, 4), scope="b{}", seed=9)
    plan = align.plan(left, right, match="order")
    assert {p.rule for p in plan.pairs} == {"line by line"}
    assert len(plan.pairs) == 3


def test_match_order_names_the_first_line_that_disagrees():
    left = chain([*linear(1, 2), (None, "Linear", 3, 5), *linear(4)])
    right = chain([*linear(1), (None, "Linear", 3, 5), *linear(2, 4)], scope="b{}")
    with pytest.raises(
        UsageError,
        match=r"line 2 disagrees: reference layers\.1 \(Linear\) \[2, 8\], target b1 \(Linear\) "
        r"\[5, 8\]",
    ):
        align.plan(left, right, match="order")


def test_match_order_wants_as_many_calls():
    with pytest.raises(
        UsageError,
        match=r"4 calls against 3; only reference has layers\.2 \(Linear\) \[2, 8\] at line 3",
    ):
        align.plan(chain(linear(1, 2, 3)), chain(linear(1, 2), scope="b{}"), match="order")


def test_another_word_for_match():
    with pytest.raises(UsageError, match="match 'fuzzy': auto, exact, names or order"):
        align.plan(net(), net(), match="fuzzy")


# ---- nearest


def test_the_nearest_candidate_says_why():
    left, right = chain(linear(1, 2)), chain(linear(1, 2), scope="b{}", seed=9)
    plan = align.plan(left, right, match="exact")
    found = align.nearest(left, right, plan, plan.unmatched_reference)
    assert ("layers.1", "b1") in [(n.name, n.candidate) for n in found]
    assert all(
        "parameters equal (64 elements)" in n.why for n in found if n.name.startswith("layers")
    )


# ---- laws

NAMES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b.0", "b.1", "module.b.0", "b[0]", "c", "cc", "x.y"]),
        st.sampled_from(["Linear", "ReLU", "Foo", "RowParallelLinear"]),
        st.sampled_from([None, 1, 2]),
        st.sampled_from([2, 3]),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda x: x[0],
)


@settings(max_examples=150)
@given(NAMES, NAMES, st.sampled_from(["auto", "names", "exact"]))
def test_every_call_of_either_side_ends_in_exactly_one_place(one, two, match):
    left, right = chain(one), chain(two, root="Other", seed=3)
    plan = align.plan(left, right, match)
    mine = (
        [p.reference for p in plan.pairs]
        + list(plan.unmatched_reference)
        + [a for a, _ in plan.ambiguous]
    )
    paired_right = [p.target for p in plan.pairs]
    doubtful = {b for _, others in plan.ambiguous for b in others}
    assert sorted(mine) == list(range(len(left.calls)))
    assert len(set(paired_right)) == len(paired_right)
    assert sorted([*paired_right, *plan.unmatched_target, *doubtful]) == list(
        range(len(right.calls))
    )


@settings(max_examples=50)
@given(NAMES)
def test_a_run_faces_itself_by_exact_keys(layers):
    run = chain(layers)
    plan = align.plan(run, run)
    assert {(p.reference, p.target, p.rule) for p in plan.pairs} == {
        (c.id, c.id, "exact key") for c in run.calls
    }


def test_a_layer_inserted_below_another_prefix_moves_the_numbers_too():
    def deep(weights, prefix):
        return [
            (f"{prefix}.{k}.{name}", "Linear", 10 * w + i, 2)
            for k, w in enumerate(weights)
            for i, name in enumerate(("up", "down"))
        ]

    left, right = (
        chain(deep((1, 2, 3, 4), "h")),
        chain(deep((1, 7, 2, 3, 4), "model.layers"), seed=9),
    )
    found = {a: b for a, (b, _) in paired(left, right).items()}
    place = {0: 0, 1: 2, 2: 3, 3: 4}
    assert found == {
        f"h.{k}.{n}": f"model.layers.{j}.{n}" for k, j in place.items() for n in ("up", "down")
    }


def test_parts_of_a_fused_call_are_left_for_expressions():
    """gate_proj and up_proj against gate_up_proj: neither is it, and nothing else is moved."""
    rng = np.random.default_rng(0)

    def block(parts):
        records = [record(0, rng.standard_normal((2, 8)).astype(np.float32))]
        calls = []
        for name, rows in parts:
            weight, out = (
                np.random.default_rng(rows).standard_normal((rows, 8)),
                rng.standard_normal((2, rows)),
            )
            records += [
                record(len(records) + k, a.astype(np.float32)) for k, a in enumerate((weight, out))
            ]
            refs = (
                Ref("input.0", 0),
                Ref("param.weight", len(records) - 2),
                Ref("output.0", len(records) - 1),
            )
            calls.append(
                Call(
                    len(calls),
                    f"mlp.{name}",
                    "Net",
                    0,
                    len(calls) + 1,
                    op_type="Linear",
                    parent=len(parts),
                    leaf=True,
                    refs=refs,
                )
            )
        calls.append(Call(len(calls), "", "Net", 0, 0, op_type="Net", refs=(Ref("input.0", 0),)))
        return MemoryRun(calls, records, {})

    left = block([("gate_proj", 12), ("up_proj", 12), ("down_proj", 5)])
    right = block([("gate_up_proj", 24), ("down", 5)])
    plan = align.plan(left, right)
    assert {left.calls[p.reference].scope: right.calls[p.target].scope for p in plan.pairs} == {
        "": "",
        "mlp.down_proj": "mlp.down",
    }
    assert [left.calls[i].scope for i in plan.unmatched_reference] == [
        "mlp.gate_proj",
        "mlp.up_proj",
    ]
    assert plan.ambiguous == ()
