"""Runs without programs: what is taken back where it is read is another form, and no fault."""

from itertools import pairwise

import numpy as np
import pytest

from handmade import Builder
from whence import api

DRAW = np.random.default_rng(5)
X, WEIGHT, BEHIND = (DRAW.standard_normal(shape) for shape in ((6, 8), (8, 8), (8, 8)))
SCALE = DRAW.uniform(0.5, 2.0, 8)


def run_of(*calls):
    """A run of a root and these operators: (name, type, slots with their tensors)."""
    held, builder = {}, Builder()

    def single(array):
        return held.setdefault(array.tobytes(), np.float32(array))

    ends = {"input.0": calls[0][2]["input.0"], "output.0": calls[-1][2]["output.0"]}
    root = builder.call("", {slot: single(array) for slot, array in ends.items()}, op_type="Net")
    for name, op_type, slots in calls:
        tensors = {slot: single(array) for slot, array in slots.items()}
        builder.call(name, tensors, op_type=op_type, parent=root)
    return builder.run()


def layer(name, given, weight):
    result = given @ weight
    return (name, "Linear", {"input.0": given, "param.weight": weight, "output.0": result}), result


def scaled_between(*, forgotten=False):
    """Two layers; the first one's output is scaled by an operator of its own."""
    first, hidden = layer("first", X, WEIGHT)
    scaled = hidden if forgotten else hidden * SCALE
    slots = {"input.0": hidden, "param.scale": SCALE, "output.0": scaled}
    last, _ = layer("last", np.tanh(scaled), BEHIND)
    tanh = ("tanh", "Tanh", {"input.0": scaled, "output.0": np.tanh(scaled)})
    return run_of(first, ("scale", "Mul", slots), tanh, last)


def scaled_in_weight(rounding=0.0):
    """rounding: relative error of each operator behind the first layer."""
    first, hidden = layer("first", X, WEIGHT * SCALE)
    squashed = np.tanh(hidden) * (1 + rounding)
    tanh = ("tanh", "Tanh", {"input.0": hidden, "output.0": squashed})
    (name, op_type, slots), result = layer("last", squashed, BEHIND)
    last = name, op_type, {**slots, "output.0": result * (1 + rounding)}
    return run_of(first, tanh, last)


def two_layers(scale=1.0, back=1.0):
    """Two layers, the first one's weight times `scale`, the second one's over `back`."""
    first, hidden = layer("first", X, WEIGHT * scale)
    last, _ = layer("last", hidden, BEHIND / np.broadcast_to(back, 8)[:, None])
    return run_of(first, last)


@pytest.mark.parametrize("turned", [False, True])
def test_a_scale_in_the_weight_is_that_of_an_operator(turned):
    runs = scaled_in_weight(), scaled_between()
    result = api.compare(*reversed(runs) if turned else runs)
    assert result.status == "same"
    assert result.counts["other-form"] == 1
    assert result.coverage.share == 1.0


def test_rounding_of_many_operators_at_the_outputs_changes_nothing():
    result = api.compare(scaled_between(), scaled_in_weight(rounding=4e-7))
    assert result.status == "same", result.findings


def test_a_scale_that_was_forgotten_is_a_fault():
    result = api.compare(scaled_in_weight(), scaled_between(forgotten=True))
    assert result.status == "different"
    assert result.findings[0].name == "first"


def test_a_scale_that_the_next_weight_takes_back():
    result = api.compare(two_layers(), two_layers(SCALE, SCALE))
    assert result.status == "same"
    assert result.counts["other-form"] == 2


@pytest.mark.parametrize(("scale", "back"), [(SCALE, 1.0), (1.0, SCALE), (SCALE, SCALE * 1.01)])
def test_half_of_a_change_is_a_fault(scale, back):
    assert api.compare(two_layers(), two_layers(scale, back)).status == "different"


def written_alone(*calls):
    """Runs that, as printed logs do, show what operators write and never what they read."""
    shown = [(name, op_type, {"output.0": slots["output.0"]}) for name, op_type, slots in calls]
    held, builder = {}, Builder()
    ends = {"output.0": np.float32(calls[-1][2]["output.0"])}
    root = builder.call("", ends, op_type="Net")
    for name, op_type, slots in shown:
        tensors = {slot: held.setdefault(name, np.float32(a)) for slot, a in slots.items()}
        builder.call(name, tensors, op_type=op_type, parent=root)
    return builder.run()


@pytest.mark.parametrize(
    ("behind", "results", "status"),
    [(SCALE, 1.0, "same"), (SCALE * 1.01, 1.0, "different"), (SCALE, 1.02, "different")],
)
def test_where_nobody_says_who_reads_what_the_tensor_must_be_made_behind(behind, results, status):
    first, hidden = layer("first", X, WEIGHT * SCALE)
    last, _ = layer("last", np.tanh(hidden), BEHIND)
    plain, unscaled = layer("first", X, WEIGHT)
    scale = ("scale", "Mul", {"output.0": unscaled * behind})
    end = ("last", "Linear", {"output.0": last[2]["output.0"] * results})
    result = api.compare(written_alone(first, last), written_alone(plain, scale, end))
    assert result.status == status
    assert ("other-form" in result.counts) == (status == "same")


def test_what_hides_an_error_does_not_take_it_back():
    """The same sum in both runs, with something so large that an error of the first layer is lost."""

    def hidden_by(scale):
        first, hidden = layer("first", X, WEIGHT * scale)
        large = np.full_like(hidden, 1e9)
        total = np.float32(hidden) + np.float32(large)
        slots = {"input.0": hidden, "input.1": large, "output.0": total}
        return run_of(first, ("sum", "Add", slots))

    result = api.compare(hidden_by(1.0), hidden_by(1.02))
    assert result.status == "different"
    assert result.findings[0].name == "first"


def test_a_tensor_that_nobody_makes_takes_nothing_back():
    """A dump that shows another output of a layer than what its reader was given."""

    def shown(scale):
        (name, op_type, slots), hidden = layer("first", X, WEIGHT)
        first = (name, op_type, slots | {"output.0": hidden * scale})
        last, _ = layer("last", hidden, BEHIND)
        return run_of(first, last)

    result = api.compare(shown(1.0), shown(1.5))
    assert result.status == "different"
    assert result.findings[0].name == "first"


@pytest.mark.parametrize("place", [1, 2])
def test_a_tensor_that_is_not_made_of_the_suspects_takes_nothing_back(place):
    """A dump that shows the first layer's output as that of a later one, whose block shows its own:
    what reads it was made, but not of what the layer shows.
    """

    def blocks(*, mixed):
        results, builder = [np.float32(X)], Builder()
        for number in range(4):
            results.append(np.float32(np.tanh(results[-1] @ (WEIGHT + number))))
        shown = list(results[1:])
        if mixed:
            shown[place] = shown[0]
        ends = {"input.0": np.float32(X), "output.0": results[-1]}
        root = builder.call("", ends, op_type="Net")
        for number, (given, result) in enumerate(pairwise(results)):
            slots = {"input.0": given, "output.0": result}
            block = builder.call(f"block{number}", slots, op_type="Block", parent=root)
            slots = {"input.0": given, "output.0": shown[number]}
            builder.call(f"block{number}.layer", slots, op_type="Linear", parent=block)
        return builder.run()

    result = api.compare(blocks(mixed=False), blocks(mixed=True))
    assert result.status == "different"
    assert result.findings[0].name in (f"block{place}.layer", f"block{place}")


def test_a_reader_of_what_agrees_is_not_acquitted():
    """Behind a scale that is another form, a parameter that differs without an effect."""

    def with_reader(run):
        hidden = X @ WEIGHT * SCALE
        unused = np.where(np.arange(8)[:, None] == 7, 3.0 if run == "target" else 1.0, BEHIND)
        shown = np.where(np.arange(8) == 7, 0.0, hidden)
        scaled = {"input.0": X @ WEIGHT, "param.scale": SCALE, "output.0": shown}
        first, _ = layer("first", X, WEIGHT * SCALE if run == "reference" else WEIGHT)
        first[2]["output.0"] = shown if run == "reference" else X @ WEIGHT
        last, _ = layer("last", shown, unused)
        calls = (first, last) if run == "reference" else (first, ("scale", "Mul", scaled), last)
        return run_of(*calls)

    result = api.compare(with_reader("reference"), with_reader("target"))
    assert result.status == "different"
    assert result.findings[0].name == "last"


def attended(*, is_fused, kind="Attention", factor=1.0):
    """A layer, then scores, their softmax and a product with it; or all three in one operator."""
    first, hidden = layer("first", X, WEIGHT)
    scores = hidden @ hidden.T / 8
    share = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    result = share @ hidden * factor
    if is_fused:
        slots = {"input.0": hidden, "output.0": result}
        return run_of(first, ("attend", kind, slots))
    return run_of(
        first,
        ("scores", "MatMul", {"input.0": hidden, "input.1": hidden.T, "output.0": scores}),
        ("softmax", "Softmax", {"input.0": scores, "output.0": share}),
        ("attend", "MatMul", {"input.0": share, "input.1": hidden, "output.0": result}),
    )


def test_what_a_fused_operator_does_is_covered():
    result = api.compare(attended(is_fused=False), attended(is_fused=True))
    assert result.status == "same"
    assert result.coverage.share == 1.0


def test_a_fused_operator_that_is_wrong_covers_nothing():
    result = api.compare(attended(is_fused=False), attended(is_fused=True, factor=1.5))
    assert result.status != "same"
    assert result.coverage.share < 1.0


def test_calls_that_a_dump_lacks_are_not_covered():
    """The same operator in both runs does not do what the others did."""
    result = api.compare(attended(is_fused=False), attended(is_fused=True, kind="MatMul"))
    assert result.status == "undecided"
