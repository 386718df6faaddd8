"""Which tensor of a call faces which of its partner, for calls of two kinds."""

import numpy as np

from whence.align.calls.tensor_slots import face
from whence.readers import Building, ForeignRun
from whence.readers.figures import with_figures

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
    slots, mine, theirs = face(call, other, reference, target)
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
