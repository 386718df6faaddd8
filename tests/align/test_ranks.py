"""Runs of several ranks, made by cutting one full run to pieces: joined, they are that run again,
bit for bit.
"""

import itertools
from types import SimpleNamespace

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handmade import Builder, record
from whence.align import align
from whence.align.dims import parse
from whence.align.ranks import join
from whence.align.ranks.join import joined
from whence.align.ranks.shards import Level, Shard, candidates, node, part_order
from whence.align.user_map import load
from whence.comparison.options import CompareOptions
from whence.comparison.pipeline import compare_runs
from whence.errors import ElementsMissing, UsageError
from whence.records import Call, MemoryRun
from whence.records.marks import shown_rank

WIDTH, HEADS = 16, 32


def tensors(seed=0, layers=2, batch=2, tokens=8):
    """Two-layer Megatron-like blocks in float32: x -> up (columns) -> down (rows) -> + x."""
    rng = np.random.default_rng(seed)
    out, x = [], rng.standard_normal((batch, tokens, WIDTH)).astype(np.float32)
    for _ in range(layers):
        up = rng.standard_normal((HEADS, WIDTH)).astype(np.float32) / 4
        down = rng.standard_normal((WIDTH, HEADS)).astype(np.float32) / 5
        h = np.tanh(x @ up.T).astype(np.float32)
        y = (h @ down.T).astype(np.float32)
        out.append(
            {"x": x, "up": up, "down": down, "h": h, "y": y, "z": (x + y).astype(np.float32)}
        )
        x = out[-1]["z"]
    return out


def write(layers_by_rank, *, root="Net"):
    """A run in which rank r holds layers_by_rank[r], a list of (number, tensors of the layer)."""
    made = Builder()
    for rank, layers in enumerate(layers_by_rank):
        ends = {"input.0": layers[0][1]["x"], "output.0": layers[-1][1]["z"]}
        top = made.call("", ends, op_type=root, root=root, rank=rank)
        for number, t in layers:
            name, of = f"layers.{number}", {"root": root, "rank": rank}
            block = made.call(
                name,
                {"input.0": t["x"], "output.0": t["z"]},
                op_type="Block",
                parent=top,
                leaf=False,
                **of,
            )
            made.call(
                f"{name}.up",
                {"param.weight": t["up"], "input.0": t["x"], "output.0": t["h"]},
                parent=block,
                **of,
            )
            made.call(
                f"{name}.down",
                {"param.weight": t["down"], "input.0": t["h"], "output.0": t["y"]},
                parent=block,
                **of,
            )
    return made.run()


def full(layers):
    return write([list(enumerate(layers))])


def pieces(array, n, axis, how="cat"):
    if how == "zigzag":
        parts = np.split(array, 2 * n, axis)
        return [np.concatenate([parts[r], parts[2 * n - 1 - r]], axis) for r in range(n)]
    if how == "striped":
        return [np.take(array, range(r, array.shape[axis], n), axis) for r in range(n)]
    return np.split(array, n, axis)


def tensor_parallel(layers, n, *, partial=False):
    """Columns of up, rows of down; partial: down's output is recorded before it is summed."""
    out = []
    for rank in range(n):
        mine = []
        for i, t in enumerate(layers):
            h, down = pieces(t["h"], n, 2)[rank], pieces(t["down"], n, 1)[rank]
            y = (h @ down.T).astype(np.float32) if partial else t["y"].copy()
            mine.append(
                (
                    i,
                    {
                        **t,
                        "up": pieces(t["up"], n, 0)[rank],
                        "down": down,
                        "h": h,
                        "y": y,
                        "x": t["x"].copy(),
                        "z": t["z"].copy(),
                    },
                )
            )
        out.append(chained(mine))
    return write(out)


def chained(layers):
    """One record for what leaves a layer and enters the next."""
    for (_, before), (_, after) in itertools.pairwise(layers):
        after["x"] = before["z"]
    return layers


def cut(layers, n, axis, how="cat"):
    """Activations in pieces along one axis, parameters whole: data parallel (0), sequence parallel
    (1).
    """
    out = []
    for rank in range(n):
        mine = [
            (
                i,
                {
                    k: v.copy() if v.ndim == 2 else pieces(v, n, axis, how)[rank]
                    for k, v in t.items()
                },
            )
            for i, t in enumerate(layers)
        ]
        out.append(chained(mine))
    return write(out)


def equal(one, two, *, exactly=True):
    """Every tensor of every call of the first run is in the second, in the same slot."""
    theirs = {c.key(): c for c in two.calls}
    assert {c.key() for c in one.calls} == set(theirs)
    for call in one.calls:
        other = {r.slot: r.record for r in theirs[call.key()].refs}
        for ref in call.refs:
            a, b = one.array(ref.record), two.array(other[ref.slot])
            if exactly:
                np.testing.assert_array_equal(a, b, err_msg=f"{call.scope}:{ref.slot}")
            else:
                np.testing.assert_allclose(
                    a, b, rtol=1e-4, atol=1e-5, err_msg=f"{call.scope}:{ref.slot}"
                )


@settings(max_examples=12)
@given(
    n=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 99),
    swap=st.booleans(),
    how=st.sampled_from(["columns", "data", "sequence", "zigzag", "striped", "copies"]),
)
def test_what_was_cut_is_joined_again_with_the_same_bits(n, seed, swap, how):
    layers = tensors(seed, batch=8, tokens=16)
    made = {
        "columns": lambda: tensor_parallel(layers, n),
        "data": lambda: cut(layers, n, 0),
        "sequence": lambda: cut(layers, n, 1),
        "zigzag": lambda: cut(layers, n, 1, "zigzag"),
        "striped": lambda: cut(layers, n, 1, "striped"),
        "copies": lambda: write(
            [
                chained([(i, {k: v.copy() for k, v in t.items()}) for i, t in enumerate(layers)])
                for _ in range(n)
            ]
        ),
    }[how]()
    one = full(layers)
    left, right, notes = joined(made, one) if swap else joined(one, made)
    assert {c.rank for run in (left, right) for c in run.calls} == {0}
    equal(left, right)
    assert f"{n} ranks joined" in notes[0]


def test_partial_sums_that_are_added_up_later_are_summed():
    layers = tensors()
    one, many = full(layers), tensor_parallel(layers, 4, partial=True)
    left, right, notes = joined(one, many)
    equal(left, right, exactly=False)
    assert "2 sum" in notes[0]
    assert not any("no call adds" in n for n in notes)
    sums = [c for c in right.calls if c.scope.endswith("down")]
    exact = sum(
        many.array(r.record).astype(np.float64)
        for c in many.calls
        for r in c.refs
        if c.scope == "layers.0.down" and r.slot == "output.0"
    )
    np.testing.assert_array_equal(
        right.array(sums[0].slots("output")[0].record), exact.astype(np.float32)
    )


def test_partial_sums_that_nobody_adds_up_stay_what_each_rank_has():
    layers = tensors()
    n, out = 2, []
    for rank in range(n):
        mine = []
        for i, t in enumerate(layers):
            h, down = pieces(t["h"], n, 2)[rank], pieces(t["down"], n, 1)[rank]
            y = (h @ down.T).astype(np.float32)
            x = mine[-1][1]["z"] if mine else t["x"].copy()
            z = (x + (y if i == 1 else t["y"])).astype(np.float32)
            mine.append(
                (
                    i,
                    {
                        "up": pieces(t["up"], n, 0)[rank],
                        "down": down,
                        "h": h,
                        "y": y if i == 1 else t["y"].copy(),
                        "x": x,
                        "z": z,
                    },
                )
            )
        out.append(mine)
    many = write(out)
    _, right, notes = joined(full(layers), many)
    assert any("partial sum of layers.1.down:output.0" in note for note in notes)
    output = next(c for c in right.calls if c.scope == "layers.1.down").slots("output")[0]
    np.testing.assert_array_equal(right.array(output.record), out[0][1][1]["y"])


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("stages", [[1, 3], [2, 1, 1]])
def test_stages_of_a_pipeline(stages, local):
    layers = tensors(layers=sum(stages))
    out, at = [], 0
    for count in stages:
        mine = [
            (i if local else at + i, {k: v.copy() for k, v in layers[at + i].items()})
            for i in range(count)
        ]
        out.append(chained(mine))
        at += count
    left, right, notes = joined(full(layers), write(out))
    equal(left, right)
    assert [c.scope for c in sorted(right.calls, key=lambda c: c.order)] == [
        c.scope for c in sorted(left.calls, key=lambda c: c.order)
    ]
    assert any("stages of a pipeline: rank 0, then rank 1" in note for note in notes)


def test_experts_that_only_some_ranks_have():
    rng = np.random.default_rng(1)
    x, experts = (
        rng.standard_normal((6, 4)).astype(np.float32),
        rng.standard_normal((4, 4, 4)).astype(np.float32),
    )
    chosen = [x[i : i + 3] for i in range(4)]
    norm = rng.standard_normal(4).astype(np.float32)

    def build(rank_of, number):
        made = Builder()
        for rank in sorted(set(rank_of)):
            top = made.call(
                "",
                {"input.0": x.copy(), "output.0": x.copy()},
                op_type="MoE",
                root="MoE",
                rank=rank,
            )
            held = {"param.weight": norm.copy(), "input.0": x.copy(), "output.0": (x * norm).copy()}
            made.call("norm", held, op_type="RMSNorm", parent=top, root="MoE", rank=rank)
            for i in (i for i in range(4) if rank_of[i] == rank):
                held = {
                    "param.weight": experts[i],
                    "input.0": chosen[i],
                    "output.0": (chosen[i] @ experts[i].T).astype(np.float32),
                }
                made.call(f"experts.{number(i)}", held, parent=top, root="MoE", rank=rank)
        return made.run()

    one = build([0] * 4, lambda i: i)
    for number in (lambda i: i, lambda i: i % 2):  # numbered through, and from 0 on each rank
        left, right, _ = joined(one, build([0, 0, 1, 1], number))
        equal(left, right)


def test_a_grid_of_ranks():
    layers = tensors(batch=4)
    out = []
    for d in range(2):
        for t in range(2):
            mine = []
            for i, held in enumerate(layers):
                part = {
                    k: v.copy() if v.ndim == 2 else np.split(v, 2, 0)[d] for k, v in held.items()
                }
                part |= {
                    "up": pieces(held["up"], 2, 0)[t],
                    "down": pieces(held["down"], 2, 1)[t],
                    "h": pieces(part["h"], 2, 2)[t],
                }
                mine.append((i, part))
            out.append(chained(mine))
    left, right, notes = joined(full(layers), write(out))
    equal(left, right)
    assert "cat along axis 0 of cat along axis 2" in notes[0]


def test_both_sides_in_other_pieces():
    layers = tensors()
    left, right, _ = joined(tensor_parallel(layers, 2), tensor_parallel(layers, 4))
    equal(left, right)
    equal(full(layers), right)


def attention(
    world, *, names="qkvo", dtype=np.float32, bias=0.0, statistics=True, seed=0, fused=False
):
    """Three projections of one input cut by rows, in one call if fused, and one cut by columns,
    over `world` ranks.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 6, WIDTH)).astype(np.float32)
    weights = {name: rng.standard_normal((WIDTH, WIDTH)) / 4 for name in "qkvo"}
    biases = {
        name: bias * rng.standard_normal(WIDTH) if bias else np.zeros(WIDTH) for name in "qkvo"
    }
    inside = [x.astype(np.float64) @ weights[n].T + biases[n] for n in "qkv"]
    mixed = np.tanh(inside[0] * inside[1]) + inside[2]
    made = Builder()
    for rank in range(world):
        given, left = x.copy(), (mixed @ weights["o"].T + biases["o"]).astype(dtype)
        top = made.call("", {"input.0": given, "output.0": left}, op_type="Net", rank=rank)
        block = made.call(
            "attn",
            {"input.0": given, "output.0": left},
            op_type="Attention",
            parent=top,
            rank=rank,
            leaf=False,
        )
        parts = []
        for old, y in zip("qkv", inside, strict=True):
            parts.append(
                [
                    np.split(a, world, axis)[rank].astype(dtype)
                    for a, axis in ((weights[old], 0), (biases[old], 0), (y, 2))
                ]
            )
        if fused:
            parts = [
                [np.concatenate([p[k] for p in parts], axis) for k, axis in enumerate((0, 0, 2))]
            ]
        for name, held in zip(names, parts, strict=False):
            slots = {
                "param.weight": held[0],
                "param.bias": held[1],
                "input.0": given,
                "output.0": held[2],
            }
            made.call(f"attn.{name}", slots, op_type="Linear", parent=block, rank=rank)
        slots = {
            "param.weight": np.split(weights["o"], world, 1)[rank].astype(dtype),
            "param.bias": biases["o"].astype(dtype),
            "input.0": np.split(mixed, world, 2)[rank].astype(dtype),
            "output.0": left,
        }
        made.call(f"attn.{names[3]}", slots, op_type="Linear", parent=block, rank=rank)
    run = made.run()
    bare = [msgspec.structs.replace(r, statistics=None, sketch=None) for r in run.records]
    return (
        run
        if statistics
        else MemoryRun(run.calls, bare, {r.id: run.array(r.id) for r in run.records})
    )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bias", [0.0, 1.0])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("swap", [False, True])
def test_pieces_under_other_names_are_joined(world, bias, dtype, swap):
    """Four weights of one shape, which only what the ranks hold together tells apart; a bias of
    zeros is the same in all pieces.
    """
    one, many = attention(1, bias=bias), attention(world, names="abcd", dtype=dtype, bias=bias)
    aligned = align(many, one) if swap else align(one, many)
    names = {("a", "q"), ("b", "k"), ("c", "v"), ("d", "o")}
    met = set()
    for pair in aligned.plan.pairs:
        a, b = aligned.reference.calls[pair.reference], aligned.target.calls[pair.target]
        met.add((a.scope[-1:], b.scope[-1:])[:: 1 if swap else -1])
        for slot in pair.slots:
            mine, theirs = (
                aligned.reference.array(slot.reference_record),
                aligned.target.array(slot.target_record),
            )
            np.testing.assert_allclose(
                theirs.astype(np.float64), mine.astype(np.float64), rtol=1e-2, atol=1e-2
            )
    assert names < met
    assert aligned.plan.unmatched_reference == aligned.plan.unmatched_target == ()
    assert not any("is not known" in note for note in aligned.plan.notes)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bias", [0.0, 1.0])
@pytest.mark.parametrize("fused", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("swap", [False, True])
def test_fused_projections_over_ranks(fused, bias, dtype, swap):
    """One run has q, k and v in one call, each cut by itself, or the whole run has and the ranks
    have three. A bias lies as its weight.
    """
    runs = (
        attention(1, bias=bias, fused=fused[0]),
        attention(4, names="abcd", dtype=dtype, bias=bias, fused=fused[1]),
    )
    found = compare_runs(*(runs[::-1] if swap else runs), CompareOptions(threads=1))
    assert (found.status, found.findings, found.unmatched, found.incomparable) == (
        "same",
        (),
        0,
        0,
    ), found.plan.notes


def test_pieces_of_which_there_are_no_figures_are_told_by_shape_and_order():
    one, many = (
        attention(n, names=names, statistics=False) for n, names in ((1, "qkvo"), (2, "abcd"))
    )
    _, right, _ = joined(one, many)
    shapes = {
        c.scope[-1]: right.records[c.slots("param")[0].record].shape for c in right.calls if c.leaf
    }
    assert shapes == dict.fromkeys("abcd", (WIDTH, WIDTH))


def test_a_piece_whose_siblings_lie_whole_is_joined():
    """Nine layers that every rank holds whole do not use up the votes of the tenth, which is
    cut.
    """
    rng = np.random.default_rng(6)
    x, weights = (
        rng.standard_normal((2, WIDTH)).astype(np.float32),
        rng.standard_normal((9, 8, WIDTH)).astype(np.float32),
    )
    cut = rng.standard_normal((16, WIDTH)).astype(np.float32)
    one, many = Builder(), Builder()
    for made, ranks in ((one, 1), (many, 2)):
        for rank in range(ranks):
            top = made.call(
                "", {"input.0": x.copy(), "output.0": x @ cut.T}, op_type="Net", rank=rank
            )
            for number, weight in enumerate([*weights, np.split(cut, ranks)[rank]]):
                slots = {
                    "param.weight": weight.copy(),
                    "input.0": x.copy(),
                    "output.0": x @ weight.T,
                }
                made.call(f"layers.{number}", slots, parent=top, op_type="Linear", rank=rank)
    left, right, _ = joined(one.run(), many.run())
    for run in (left, right):
        (call,) = (c for c in run.calls if c.scope == "layers.9")
        np.testing.assert_array_equal(run.array(call.slots("param")[0].record), cut)


def test_what_ranks_hold_otherwise_and_nothing_tells_how_is_not_judged():
    """Each rank pads its own part of a vocabulary of 13 to 8: joined along no axis is that the
    reference's.
    """
    rng = np.random.default_rng(5)
    x, weight = (
        rng.standard_normal((2, 6, WIDTH)).astype(np.float32),
        rng.standard_normal((13, WIDTH)).astype(np.float32),
    )
    one, many = Builder(), Builder()
    top = one.call("", {"input.0": x, "output.0": x @ weight.T}, op_type="Net")
    one.call("head", {"param.weight": weight, "input.0": x, "output.0": x @ weight.T}, parent=top)
    for rank in range(2):
        mine = np.concatenate(
            [weight[rank * 7 : rank * 7 + 7], np.zeros((1 + rank, WIDTH), np.float32)]
        )
        given = x.copy()
        top = many.call("", {"input.0": given, "output.0": x @ weight.T}, op_type="Net", rank=rank)
        many.call(
            "head",
            {"param.weight": mine, "input.0": given, "output.0": x @ mine.T},
            parent=top,
            rank=rank,
        )
    for runs in ((one.run(), many.run()), (many.run(), one.run())):
        found = compare_runs(*runs, CompareOptions(threads=1))
        assert (found.status, found.findings) == ("undecided", ())
        rows = {(r.name, r.reference_slot): r.measured for r in found.rows}
        assert all(
            "how it lies on the ranks is not known: 2 ranks differ" in rows["head", s].why
            for s in ("param.weight", "output.0")
        )
        assert found.incomparable


def test_equal_pieces_on_both_sides_face_each_other_rank_by_rank():
    layers = tensors()
    one, two = tensor_parallel(layers, 2), tensor_parallel(layers, 2)
    assert joined(one, two) == (one, two, ())
    alone = full(layers)
    assert joined(alone, alone) == (alone, alone, ())


def test_one_rank_under_another_number():
    run = full(tensors())
    calls = [
        Call(**{f: getattr(c, f) for f in Call.__struct_fields__} | {"rank": 3}) for c in run.calls
    ]
    third = MemoryRun(calls, run.records, {r.id: run.array(r.id) for r in run.records})
    _, right, notes = joined(run, third)
    assert {c.rank for c in right.calls} == {0}
    assert "rank 3 is paired with rank 0" in notes[0]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("apart", [False, True])
def test_parts_that_were_cut_one_by_one(n, apart):
    """q, k, v in one tensor, cut each for itself: [q0 k0 v0 | q1 k1 v1]. apart: the other side has
    three tensors.
    """
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((rows, 8)).astype(np.float32) for rows in (16, 8, 8))
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    one, many = Builder(), Builder()
    top = one.call("", {"input.0": x}, op_type="Net")
    if apart:
        for name, w in zip(("q_proj", "k_proj", "v_proj"), (q, k, v), strict=True):
            one.call(
                name,
                {"param.weight": w, "input.0": x, "output.0": (x @ w.T).astype(np.float32)},
                parent=top,
            )
    else:
        y = np.concatenate([x @ w.T for w in (q, k, v)], -1)
        one.call(
            "qkv",
            {"param.weight": np.concatenate([q, k, v]), "input.0": x, "output.0": y},
            parent=top,
        )
    for rank in range(n):
        mine, theirs = x.copy(), [np.split(w, n)[rank] for w in (q, k, v)]
        root = many.call("", {"input.0": mine}, op_type="Net", rank=rank)
        y = np.concatenate([x @ w.T for w in theirs], -1)
        held = {"param.weight": np.concatenate(theirs), "input.0": mine, "output.0": y}
        many.call("qkv", held, op_type="QKVParallelLinear", parent=root, rank=rank)
    _, right, _ = joined(one.run(), many.run())
    call = next(c for c in right.calls if c.scope == "qkv")
    held = {r.slot: right.array(r.record) for r in call.refs}
    np.testing.assert_array_equal(held["param.weight"], np.concatenate([q, k, v]))
    np.testing.assert_allclose(
        held["output.0"], np.concatenate([x @ w.T for w in (q, k, v)], -1), rtol=1e-4, atol=1e-5
    )


def test_pieces_on_the_wrong_ranks_are_no_layout():
    rng = np.random.default_rng(3)
    whole = rng.standard_normal((8, 4)).astype(np.float32)
    first, second = np.split(whole, 2)
    assert part_order([second, first], [whole], 0) == ()
    assert part_order([first, first], [whole], 0) == ()


def test_a_replica_that_differs_is_told_and_shown():
    layers = tensors()
    made = [
        chained([(i, {k: v.copy() for k, v in t.items()}) for i, t in enumerate(layers)])
        for _ in range(3)
    ]
    made[2][1][1]["y"] = (made[2][1][1]["y"] * 1.5).astype(np.float32)
    one = full(layers)
    _, right, notes = joined(one, write(made))
    assert any(
        "replicas differ from layers.1.down:output.0 on (rel_l2 0.5): rank 2 is used for all" in n
        for n in notes
    )
    call = next(c for c in right.calls if c.scope == "layers.1.down")
    np.testing.assert_array_equal(right.array(call.slots("output")[0].record), made[2][1][1]["y"])
    assert shown_rank(call) == "2"


def test_replicas_apart_by_rounding_are_told():
    layers = tensors()
    made = [
        chained([(i, {k: v.copy() for k, v in t.items()}) for i, t in enumerate(layers)])
        for _ in range(2)
    ]
    made[1][1][1]["y"] = np.nextafter(made[1][1][1]["y"], np.float32(np.inf))
    _, _, notes = joined(full(layers), write(made))
    assert any(
        "replicas of 1 tensor are not bit-equal: they differ by up to" in n
        and "as by rounding" in n
        for n in notes
    )


def test_declared_layouts():
    layers = tensors(tokens=8)
    one, many = full(layers), cut(layers, 2, 1, "zigzag")
    _, right, _ = joined(
        one, many, [Shard("*", "zigzag", 1, "input.*"), Shard("*", "zigzag", 1, "output.*")]
    )
    equal(one, right)
    _, wrong, _ = joined(
        one, many, [Shard("*", "cat", 1, "input.*"), Shard("*", "cat", 1, "output.*")]
    )
    call = wrong.calls[0]
    assert not np.array_equal(
        wrong.array(call.slots("input")[0].record), layers[0]["x"]
    )  # the user's word counts


@pytest.mark.parametrize(
    ("pattern", "axis", "whole"),
    [("extra", 1, True), ("ex*", 1, True), ("*", 0, True), ("other", 1, False), ("", 1, False)],
)
def test_a_map_says_how_a_tensor_lies_that_only_one_side_has(pattern, axis, whole):
    x, hidden = np.random.default_rng(5).standard_normal((2, 4, 6)).astype(np.float32)
    reference, target = Builder(), Builder()
    for made, ranks in ((reference, 1), (target, 2)):
        for rank in range(ranks):
            own = x.copy()
            top = made.call("", {"input.0": own}, root="Net", rank=rank)
            made.call("plain", {"input.0": own}, parent=top, rank=rank)
            if ranks == 2:
                part = pieces(hidden, 2, axis)[rank]
                made.call("extra", {"output.0": part}, parent=top, rank=rank)
    _, right, _ = joined(reference.run(), target.run(), [Shard(pattern, "cat", axis, "output.*")])
    call = next(c for c in right.calls if c.scope == "extra")
    record = call.slots("output")[0].record
    if whole:
        np.testing.assert_array_equal(right.array(record), hidden)
    else:
        with pytest.raises(ElementsMissing, match="how it lies on the ranks is not known"):
            right.array(record)


def test_a_run_without_calls_joins_nothing():
    empty, one = MemoryRun([], [], {}), write([list(enumerate(tensors()))])
    for pair in ((empty, one), (one, empty), (empty, empty)):
        assert joined(*pair) == (*pair, ())


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (
            [
                Shard("layers.*", "cat", 1, "output.0", "line 2"),
                Shard("layers.0*", "sum", slot="output.0", where="line 5"),
            ],
            "line 2.*line 5",
        ),
        ([Shard("layers.0.up", "cat", 7, "output.0")], "has no axis 7"),
        ([Shard("*", "sideways")], "'sideways' is not known; there are replicated"),
    ],
)
def test_declarations_that_cannot_be(declared, says):
    layers = tensors()
    with pytest.raises(UsageError, match=says):
        joined(full(layers), tensor_parallel(layers, 2), declared)


def test_elements_that_were_not_kept_leave_what_shapes_and_hashes_tell():
    layers = tensors()
    many = tensor_parallel(layers, 2)
    bare = MemoryRun(many.calls, many.records, {})
    _, right, _ = joined(full(layers), bare)
    shapes = {(c.scope, r.slot): right.records[r.record].shape for c in right.calls for r in c.refs}
    expected = {
        (c.scope, r.slot): full(layers).records[r.record].shape
        for c in full(layers).calls
        for r in c.refs
    }
    assert shapes == expected


def test_every_expression_is_read_back_as_written():
    shapes = [(2, 4, 6)] * 4
    for layout, whole in candidates(shapes):
        made = node(layout, shapes)
        bound = {f"r{i}": [shape] for i, shape in enumerate(shapes)}
        assert made.shape(bound) == parse(str(made)).shape(bound) == whole
    striped = node((Level("striped", 4, 1),), shapes)
    assert parse(str(striped)).shape({f"r{i}": [s] for i, s in enumerate(shapes)}) == (2, 16, 6)


def parallel(layers, n, *, fault):
    """n ranks of which layer 1's down goes wrong; what follows is computed from what it made."""
    out = [[] for _ in range(n)]
    x = [layers[0]["x"].copy() for _ in range(n)]
    for i, t in enumerate(layers):
        ups, downs = pieces(t["up"], n, 0), pieces(t["down"], n, 1)
        h = [np.tanh(x[r] @ ups[r].T).astype(np.float32) for r in range(n)]
        parts = [(h[r] @ downs[r].T).astype(np.float32) for r in range(n)]
        y = [np.sum(parts, 0, dtype=np.float64).astype(np.float32) for _ in range(n)]
        if i == 1 and fault == "none":
            y = parts
        elif i == 1 and fault == "one":
            y = [(y[0] - parts[5]).astype(np.float32) for _ in range(n)]
        elif i == 1 and fault == "twice":
            y = [(y[0] * n).astype(np.float32) for _ in range(n)]
        z = [(x[r] + y[r]).astype(np.float32) for r in range(n)]
        for r in range(n):
            out[r].append(
                (i, {"x": x[r], "up": ups[r], "down": downs[r], "h": h[r], "y": y[r], "z": z[r]})
            )
        x = z
    return write(out)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "none",
            "the sum over ranks is missing: the parts of ranks 1, 2, 3, 4, 5, 6, 7 are not in it",
        ),
        ("one", "the sum over ranks is not whole: rank 5's part is not in it"),
        ("twice", "summed over ranks twice: output equals 8 x the sum"),
    ],
)
def test_a_sum_over_eight_ranks_that_is_wrong_is_the_finding(fault, says):
    layers = tensors(layers=3, tokens=16)
    found = compare_runs(full(layers), parallel(layers, 8, fault=fault), CompareOptions(threads=1))
    assert found.status == "different"
    assert found.findings[0].name == "layers.1.down"
    assert says in found.findings[0].sentence


def test_a_sum_over_eight_ranks_that_is_right_is_silent():
    layers = tensors(layers=3, tokens=16)
    found = compare_runs(full(layers), parallel(layers, 8, fault=""), CompareOptions(threads=1))
    assert (found.findings, found.incomparable, found.unmatched) == ((), 0, 0)
    joined_slots = {s.dims for p in found.plan.pairs for s in p.slots if s.dims}
    assert joined_slots == {"cat(*ranks, axis=0)", "cat(*ranks, axis=-1)"}


def test_a_map_declares_how_tensors_lie(tmp_path):
    layers = tensors(tokens=8)
    path = tmp_path / "map.yaml"
    path.write_text("ranks:\n  - {names: '*', slot: '*put.0', as: zigzag, axis: 1}\n")
    left, right, _ = joined(full(layers), cut(layers, 2, 1, "zigzag"), load(path).ranks)
    equal(left, right)
    path.write_text(
        "ranks:\n  - {names: '*', slot: output.0, as: zigzag, axis: 1}\n  - {names: layers.0.up, "
        "slot: output.0, as: cat, axis: 2}\n"
    )
    with pytest.raises(UsageError, match=r"map.yaml, line 2.*map.yaml, line 3"):
        joined(full(layers), cut(layers, 2, 1, "zigzag"), load(path).ranks)
    path.write_text("ranks:\n  - {names: '*', as: sideways}\n")
    with pytest.raises(
        UsageError, match=r"map.yaml, line 2: as: 'sideways' is not known; there are replicated"
    ):
        load(path)


def test_stages_of_which_each_is_cut_over_ranks():
    layers = tensors(layers=4)
    out = []
    for start in (0, 2):
        for rank in range(2):
            held = []
            for i in (start, start + 1):
                t = {k: v.copy() for k, v in layers[i].items()}
                t |= {
                    "up": pieces(t["up"], 2, 0)[rank],
                    "down": pieces(t["down"], 2, 1)[rank],
                    "h": pieces(t["h"], 2, 2)[rank],
                }
                held.append((i, t))
            out.append(chained(held))
    left, right, notes = joined(full(layers), write(out))
    equal(left, right)
    assert any("stages of a pipeline: ranks 0, 1, then ranks 2, 3" in note for note in notes)


def test_a_tensor_of_the_other_side_is_found_by_norm_magnitude_and_shape(monkeypatch):
    draw = np.random.default_rng(4)
    arrays = [draw.standard_normal(shape) * scale for shape, scale in (
        ((4, 6), 1.0), ((4, 6), 1.1), ((3, 8), 1.05), ((6, 4), 1.2), ((4,), 1.0),
    )]  # fmt: skip
    records = [record(k, a.astype(np.float32)) for k, a in enumerate(arrays)]
    held = [SimpleNamespace(slot=(("k",), "output.0"), options=[(r.shape, r)]) for r in records[1:]]
    monkeypatch.setattr(join, "_tensors", lambda side: iter(held))
    other = join._OtherSide(None)
    for own in records[1:]:
        assert other.has("output.3", own.shape, own) == 2
    assert other.has("output.0", (4, 6), records[3]) == 1  # the same figures, axes in another order
    assert other.has("output.0", (8, 3), records[1]) == 0
    assert other.has("output.0", (4, 6), records[0]) == 0
    assert other.has("param.weight", (4, 6), records[1]) == 0
    assert other.has("output.0", (4, 6), record(9, np.ones((4, 6), np.float32))) == 0
