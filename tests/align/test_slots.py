"""Which tensor of a call faces which of its partner, for calls of two kinds."""

import msgspec
import numpy as np
import pytest

from handmade import Builder
from whence.align.calls.tensor_slots import pair_slots
from whence.readers import Building, ForeignRun
from whence.readers.figures import with_figures
from whence.records import Ref

RNG = np.random.default_rng(0)
X, Y, Q, K, V = RNG.standard_normal((5, 4, 8)).astype(np.float32)


def called(kind, op_type, inputs, output):
    building = Building("here", "test")
    building.call(
        "it",
        op_type=op_type,
        kind=kind,
        inputs=[building.array(x) for x in inputs],
        outputs=[building.array(output)],
    )
    run = with_figures(ForeignRun(building.run(), "test"))
    return next(c for c in run.calls if c.scope == "it"), run


def faced(one, two):
    (call, reference), (other, target) = called(*one), called(*two)
    slots, mine, theirs = pair_slots(call, other, reference, target)
    return {(s.reference_slot, s.target_slot) for s in slots}, mine, theirs


def test_a_module_is_not_held_against_what_the_last_operator_in_it_read():
    made = ("output.0", "output.0")
    large = (30 * X).astype(np.float32)
    assert faced(("module", "Norm", [large], Y), ("operator", "mul", [X], Y)) == (
        {made},
        ["input.0"],
        ["input.0"],
    )
    assert faced(("operator", "mul", [X], Y), ("module", "Norm", [large], Y)) == (
        {made},
        ["input.0"],
        ["input.0"],
    )
    near = X * np.float32(1.01)
    assert faced(("module", "GELU", [X], Y), ("operator", "gelu", [near], Y)) == (
        {made, ("input.0", "input.0")},
        [],
        [],
    )
    assert faced(("module", "Norm", [large], Y), ("module", "Norm", [X], Y)) == (
        {made, ("input.0", "input.0")},
        [],
        [],
    )


def test_of_two_kinds_of_operators_tensors_face_those_with_their_figures():
    noisy = V * np.float32(1.0001)
    found = faced(
        ("operator", "matmul", [RNG.standard_normal((4, 4)).astype(np.float32), V], Y),
        ("operator", "sdpa", [Q, K, noisy], Y),
    )
    assert ("input.1", "input.2") in found[0]
    assert faced(("operator", "sdpa", [Q, V], Y), ("operator", "sdpa", [Q, K, noisy], Y))[0] >= {
        ("input.1", "input.1")
    }


def test_a_fused_operator_is_not_held_against_what_the_last_of_those_in_it_read():
    """Both write `it`: one reads what the first of the fused ones read, the other what the last
    did, of one shape and size.
    """
    other = RNG.permutation(Q.reshape(-1)).reshape(Q.shape) * np.float32(1.02)
    found, mine, theirs = faced(("operator", "fc", [Q, K], Y), ("operator", "scale", [other], Y))
    assert found == {("output.0", "output.0")}
    assert sorted(mine) == ["input.0", "input.1"] and theirs == ["input.0"]


def parameters(*names):
    """A call with parameters of these names, all of one shape, and its run."""
    made = Builder()
    made.call("it", {f"param.{n}": RNG.standard_normal(8).astype(np.float32) for n in names})
    run = made.run()
    return run.calls[0], run


@pytest.mark.parametrize(
    ("mine", "theirs", "pairs"),
    [
        (("gamma", "b"), ("bias", "weight"), {("gamma", "weight"), ("b", "bias")}),
        (("kernel", "bias"), ("b", "w"), {("kernel", "w"), ("bias", "b")}),
        (("gamma",), ("weight", "mean"), {("gamma", "weight")}),
        (("gamma", "mean"), ("weight",), {("gamma", "weight")}),
        (("one",), ("two", "three"), {("one", "two")}),  # only the shape is left to go by
    ],
)
def test_each_parameter_is_paired_once_and_by_its_usual_name_first(mine, theirs, pairs):
    (call, reference), (other, target) = parameters(*mine), parameters(*theirs)
    slots, _, free = pair_slots(call, other, reference, target)
    assert sorted((s.reference_slot, s.target_slot) for s in slots) == sorted(
        (f"param.{a}", f"param.{b}") for a, b in pairs
    )
    assert sorted(free) == sorted({f"param.{n}" for n in theirs} - {f"param.{b}" for _, b in pairs})


def test_a_gradient_is_not_held_against_an_activation_of_its_shape():
    def backward(slots):
        call, run = called("module", "ViT", list(slots.values()), Q)
        named = zip(slots, call.slots("input"), strict=True)
        refs = tuple(Ref(slot, ref.record) for slot, ref in named)
        return msgspec.structs.replace(call, phase="backward", refs=refs), run

    call, reference = backward({"input.3:output.0": X, "input.grad.1:input.0": Y})
    other, target = backward({"input.0:output.0": X, "input.grad.output.0": K})
    slots, mine, theirs = pair_slots(call, other, reference, target)
    assert [(s.reference_slot, s.target_slot) for s in slots] == [
        ("input.3:output.0", "input.0:output.0")
    ]
    assert mine == ["input.grad.1:input.0"]
    assert theirs == ["input.grad.output.0"]


def test_numbers_that_caches_of_two_kinds_keep_of_themselves_are_two_numbers():
    layer, runs = "input.past_key_values.layers.0", []
    for name, number in (("window", 6), ("length", 0)):
        made = Builder()
        tensors = {f"{layer}.keys": X, f"{layer}.{name}": np.array(number), "output.0": Y}
        made.call("it", tensors, op_type="Net")
        runs.append(made.run())
    slots, mine, theirs = pair_slots(*(run.calls[0] for run in runs), *runs)
    assert {s.reference_slot for s in slots} == {f"{layer}.keys", "output.0"}
    assert (mine, theirs) == ([f"{layer}.window"], [f"{layer}.length"])
