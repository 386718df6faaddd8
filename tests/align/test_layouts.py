"""Layouts on made-up tensors: a change of axes or channels is undone with the same bits; what is
only wrong is left alone.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handmade import Builder, record
from whence.align import align
from whence.align import dims as ex
from whence.align.layout.axes import X, turned, ways
from whence.align.layout.distances import distance
from whence.align.layout.layout_state import LayoutState
from whence.align.layout.permutations import completed, located, taken
from whence.align.layout.provenance import named
from whence.align.layout.refuted_orders import undo_moves_of_equal_parameters
from whence.records import MemoryRun
from whence.results import Made

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@st.composite
def moved(draw):
    """(tensor, the same with axes in another order, neighbours merged, axes of extent one put
    in).
    """
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    y = x.transpose(draw(st.permutations(range(x.ndim))))
    extents = list(y.shape)
    while len(extents) > 1 and draw(st.booleans()):
        at = draw(st.integers(0, len(extents) - 2))
        extents[at : at + 2] = [extents[at] * extents[at + 1]]
    for _ in range(draw(st.integers(0, 2))):
        extents.insert(draw(st.integers(0, len(extents))), 1)
    return x, np.ascontiguousarray(y).reshape(extents)


@settings(max_examples=300)
@given(moved())
def test_some_way_gives_back_the_bits_in_either_direction(pair):
    for have, want in (pair, pair[::-1]):
        found = [
            node.apply({"x": [have]})
            for node in (*ways(have.shape, want.shape), *turned(have.shape))
        ]
        assert any(made.shape == want.shape and np.array_equal(made, want) for made in found)


@settings(max_examples=100)
@given(moved())
def test_every_way_makes_the_shape_it_is_for_and_can_be_written_down(pair):
    have, want = pair
    for node in ways(have.shape, want.shape):
        assert node.shape({"x": [have.shape]}) == want.shape
        again = ex.parse(str(node))
        np.testing.assert_array_equal(again.apply({"x": [have]}), node.apply({"x": [have]}))


def test_ways_of_padded_and_cut_axes():
    assert [str(n) for n in ways((2, 7, 64), (2, 7, 50))] == ["x[..., 0:50]"]
    assert str(ways((14, 64), (2, 7, 50))[0]).startswith("rearrange(x[..., 0:50]")
    assert "pad(x, axis=0, to=64, value=0)" in [str(n) for n in ways((50, 8), (64, 8))]
    assert ways((3, 5), (4, 7)) == []


@st.composite
def orders(draw):
    """(order of channels, extent they are in): stretches, parts of groups, turned grids, any
    permutation.
    """
    a, b, c = (draw(st.integers(1, 6)) for _ in range(3))
    n = a * b * c
    kind = draw(st.sampled_from(["stretch", "groups", "turned", "any"]))
    if kind == "stretch":
        low = draw(st.integers(0, n - 1))
        return np.arange(low, draw(st.integers(low + 1, n))), n
    if kind == "groups":
        low = draw(st.integers(0, b - 1))
        high = draw(st.integers(low + 1, b))
        return np.arange(n).reshape(a, b, c)[:, low:high].reshape(-1), n
    if kind == "turned":
        return np.arange(n).reshape(a, b, c).transpose(
            draw(st.sampled_from([(1, 0, 2), (0, 2, 1), (2, 1, 0)]))
        ).reshape(-1), n
    return np.array(draw(st.permutations(range(n)))), n


@settings(max_examples=300)
@given(orders(), st.integers(0, 2))
def test_an_order_of_channels_is_found_and_written(given_order, axis):
    order, n = given_order
    weight = RNG.standard_normal((n, 5)).astype(np.float32)
    found = located(weight[order], weight)
    np.testing.assert_array_equal(found, order)
    shape = [2, 3, 4]
    shape[axis] = n
    x = RNG.standard_normal(shape).astype(np.float32)
    node = taken(ex.Name("x"), x.shape, axis, order)
    np.testing.assert_array_equal(node.apply({"x": [x]}), np.take(x, order, axis))
    assert node.shape({"x": [x.shape]}) == np.take(x, order, axis).shape
    np.testing.assert_array_equal(ex.parse(str(node)).apply({"x": [x]}), np.take(x, order, axis))


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (np.arange(4, 8), "x[..., 4:8]"),
        (
            np.arange(24).reshape(4, 3, 2)[:, 1].reshape(-1),
            "rearrange(rearrange(x, 'i (g j) -> i g j', g=4)[..., 2:4], 'i g j -> i (g j)')",
        ),
        (
            np.arange(24).reshape(2, 2, 6).transpose(0, 2, 1).reshape(-1),
            "rearrange(x, 'i (h p d) -> i (h d p)', h=2, p=2)",
        ),
    ],
)
def test_layouts_that_people_know_are_written_as_such(order, text):
    assert str(taken(ex.Name("x"), (3, 24), 1, order)) == text


def test_a_few_rows_that_differ_do_not_hide_where_the_others_are():
    weight = floats(24, 6)
    order = np.arange(24).reshape(4, 3, 2)[:, 1].reshape(-1)
    reference = weight[order].copy()
    reference[3] += 1
    found = located(reference, weight)
    assert found[3] == -1
    np.testing.assert_array_equal(completed(found, 24), order)
    scattered = RNG.permutation(24)
    found = located(
        np.where(np.arange(24)[:, None] == 5, 0.5, weight[scattered]).astype(np.float32), weight
    )
    assert completed(found, 24) is None  # no rule that the others follow
    assert located(weight + 1, weight) is None


def test_weights_are_found_in_the_precision_that_the_target_has():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    weight = floats(12, 6)
    order = RNG.permutation(12)
    np.testing.assert_array_equal(located(weight[order], weight.astype(ml_dtypes.bfloat16)), order)


def test_distance_against_numpy_and_what_it_does_not_forgive():
    a, b = floats(5, 7), floats(5, 7)
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert distance(a, b) == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
    assert distance(a, a) == 0.0
    assert distance(a, b[:, :6]) == math.inf
    lowest = np.where(np.arange(7) < 5, a, np.finfo(np.float32).min)
    assert distance(lowest, lowest) == 0.0
    assert distance(a, lowest) == math.inf  # a mask in one of them only
    assert distance(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25
    window = np.where(np.eye(9) > 0, 0.0, -np.inf)  # blocked in more than half of it
    assert distance(window, window) == 0.0
    assert distance(window, window[::-1]) == math.inf
    assert distance(np.full(3, np.nan), np.full(3, np.nan)) == math.inf  # nothing to compare


# ---- runs


def run(name, *, weight, x, y, op="Linear", bias=None, root="Net"):
    """One module `name` in a root, with its records."""
    made = Builder()
    made.call("", {"input.0": x, "output.0": y}, op_type=root, root=root)
    held = {"param.weight": weight} | ({"param.bias": bias} if bias is not None else {})
    made.call(name, {**held, "input.0": x, "output.0": y}, op_type=op, parent=0, root=root)
    return made.run()


@settings(max_examples=60)
@given(st.permutations(range(3)), st.booleans(), st.booleans(), st.booleans())
def test_what_a_run_keeps_otherwise_is_read_as_the_reference_has_it(axes, flat, transposed, merged):
    x, weight = floats(2, 5, 6), floats(8, 6)
    y = (x @ weight.T).astype(np.float32)

    def there(a):
        a = np.ascontiguousarray(a.transpose(axes))
        return a.reshape(-1, a.shape[-1]) if flat else a[None] if merged else a

    other = run("fc", weight=weight.T.copy() if transposed else weight, x=there(x), y=there(y))
    reference = run("fc", weight=weight, x=x, y=y)
    aligned = align(reference, other)
    for pair in aligned.plan.pairs:
        assert pair.only_reference == pair.only_target == ()
        for slot in pair.slots:
            np.testing.assert_array_equal(
                aligned.target.array(slot.target_record), reference.array(slot.reference_record)
            )


def parts(split, *, keep_weights=True, order=(0, 1, 2), groups=1):
    """q, k, v of one input, apart or in one call: in this order, group by group."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 5, 6)).astype(np.float32)
    weights = [rng.standard_normal((8, 6)).astype(np.float32) for _ in range(3)]
    made = Builder()
    made.call("", {"input.0": x, "output.0": x}, op_type="Net")
    if not split:
        weights = [
            np.concatenate([weights[i].reshape(groups, -1, 6) for i in order], 1).reshape(-1, 6)
        ]
    for name, weight in zip("qkv" if split else ["qkv"], weights):
        held = {"param.weight": weight} if keep_weights else {}
        made.call(name, {**held, "input.0": x, "output.0": x @ weight.T}, parent=0)
    return made.run()


@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("turned_round", [False, True])
def test_fused_calls_are_taken_apart_and_put_together(keep_weights, order, groups, turned_round):
    """Told by the rows of the weights, or without weights by the outputs alone."""
    runs = [
        parts(True, keep_weights=keep_weights),
        parts(False, keep_weights=keep_weights, order=order, groups=groups),
    ]
    reference, target = runs[::-1] if turned_round else runs
    aligned = align(reference, target)
    assert aligned.plan.unmatched_reference == aligned.plan.unmatched_target == ()
    fused = [p for p in aligned.plan.pairs if p.rule == "fused calls"]
    assert len(fused) == (1 if turned_round else 3)
    for slot in (s for p in fused for s in p.slots):
        a, b = reference.array(slot.reference_record), aligned.target.array(slot.target_record)
        assert distance(a, b) < 1e-6  # numpy's product of a larger matrix may round otherwise
        if slot.reference_slot.startswith("param"):
            np.testing.assert_array_equal(a, b)


def test_calls_that_are_not_what_extents_suggest_stay_apart():
    target = parts(False)
    arrays = {**{i: target.array(i) for i in range(3)}, 1: floats(24, 6), 2: floats(2, 5, 24)}
    target = MemoryRun(target.calls, [record(i, a) for i, a in arrays.items()], arrays)
    plan = align(parts(True), target).plan
    assert [p.rule for p in plan.pairs] == ["exact key"]
    assert (len(plan.unmatched_reference), len(plan.unmatched_target)) == (3, 1)


@pytest.mark.parametrize("turned_round", [False, True])
def test_what_is_in_another_call_is_no_part_of_a_whole(turned_round):
    """Half of one call's rows and half of another's, as one rank of two holds them: together as
    wide as one of the whole calls.
    """
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 6)).astype(np.float32)
    q, k = (rng.standard_normal((16, 6)).astype(np.float32) for _ in range(2))
    runs = []
    for weights in ({"q": q, "k": k}, {"alpha": q[:8], "beta": k[:8]}):
        made = Builder()
        made.call("", {"input.0": x, "output.0": x}, op_type="Net")
        for name, weight in weights.items():
            made.call(
                name, {"param.weight": weight, "input.0": x, "output.0": x @ weight.T}, parent=0
            )
        runs.append(made.run())
    plan = align(*(runs[::-1] if turned_round else runs)).plan
    assert not [p for p in plan.pairs if p.rule == "fused calls"]


def test_the_parts_of_a_joined_tensor_are_named():
    run = parts(True)
    made = Made(
        7,
        "rearrange(cat(q, k, v, axis=0), '(p h d) i -> (h p d) i', p=3, h=2)",
        (("q", (1,)), ("k", (3,)), ("v", (5,))),
    )
    records = [*run.records, record(7, np.zeros((24, 6), np.float32))]
    different = np.zeros((24, 6), bool)
    different[4:6] = True  # group 0: q 0..4, k 4..8, v 8..12
    assert named({7: made}, records, 7, different) == ("k",)
    different[9] = True
    assert named({7: made}, records, 7, different) == ("k", "v")
    assert named({7: made}, records, 7, np.ones((24, 6), bool)) == ()
    assert named({}, records, 1, different[:8]) == ()


def test_a_norm_beside_a_transposed_matrix_says_nothing_of_it():
    """In a sequence of layers each name is a number: a matrix and a norm have one starred name."""
    x, weight, scale = floats(5, 16), floats(32, 16), floats(32)
    y = (x @ weight.T).astype(np.float32)

    def sequence(weight):
        made = Builder()
        made.call("", {"input.0": x, "output.0": y * scale})
        made.call("0", {"param.weight": weight, "input.0": x, "output.0": y}, parent=0)
        norm = {"param.weight": scale, "input.0": y, "output.0": y * scale}
        made.call("1", norm, op_type="LayerNorm", parent=0)
        return made.run()

    plan = align(sequence(weight), sequence(weight.T.copy())).plan
    assert plan.notes == ("1 tensors of the target were brought to the reference's axes: x.T (1)",)


@pytest.mark.parametrize("is_moved", [False, True])
def test_an_equal_parameter_that_was_moved_takes_its_module_back(is_moved):
    x, weight, bias = floats(5, 6), floats(8, 6), floats(8)
    order = np.array([1, 0, 3, 2, 5, 4, 7, 6])
    runs = [
        run("fc", weight=w, x=x, y=x @ w.T + b, bias=b)
        for w, b in ((weight, bias), (weight[order], bias[order] if is_moved else bias))
    ]
    state = LayoutState(*runs, align(*runs).plan)
    slots = {s.reference_slot: s for s in state.pairs[1].slots}
    state.decided = {
        (s.reference_record, s.target_record): (taken(X, (8,), 0, order), "a guess")
        for name, s in slots.items()
        if name != "input.0"
    }
    assert len(state.decided) == 3
    undo_moves_of_equal_parameters(state)
    assert len(state.decided) == (3 if is_moved else 0)
