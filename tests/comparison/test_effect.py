"""What the differences come to at the outputs of the models, against numpy."""

import numpy as np
import pytest

from handmade import bfloat16, net
from whence import api
from whence.report import effect as words_of
from whence.results import Effect


def scaled(name, factor=1.5):
    return lambda n, value: value * factor if n == name else value


def test_nothing_differs():
    assert api.compare(net(), net()).effect is None


def test_the_largest_error_of_an_output_is_its_relative_norm():
    reference, target = net(), net(change=scaled("y", 1.25))
    effect = api.compare(reference, target).effect
    a, b = reference.array(5).astype(np.float64), target.array(5).astype(np.float64)
    assert effect.error == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
    assert (effect.name, effect.slot, effect.step, effect.rank) == ("Net", "output.0", 0, 0)
    assert (effect.outputs, effect.differing, effect.unmeasured) == (1, 1, 0)
    assert (effect.rows, effect.moved) == (5, 0)  # a factor moves no largest element


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_rows_whose_largest_element_moves(dtype):
    def change(name, value):
        if name == "y":
            value = value.copy()
            value[[0, 3]] *= -1
        return value

    reference, target = net(dtype), net(dtype, change=change)
    effect = api.compare(reference, target).effect
    a, b = (run.array(5).astype(np.float64).argmax(-1) for run in (reference, target))
    assert effect.moved == int((a != b).sum()) > 0
    assert words_of.words(effect).endswith(f"argmax changed in {effect.moved} of 5 rows")


def test_a_fault_inside_that_no_output_shows():
    hidden = api.compare(net(), net(change=lambda n, v: v + 1 if n == "h" else v))
    assert hidden.effect.differing == 1
    quiet = Effect(outputs=2, rows=4)
    assert words_of.words(quiet) == (
        "none: the outputs of the model are bitwise equal; argmax unchanged in all 4 rows"
    )


def test_outputs_that_could_not_be_measured_are_said_to_be_unknown():
    assert words_of.words(Effect(outputs=2, unmeasured=1)) == (
        "not known: 1 output could not be measured; 2 others bitwise equal"
    )
    effect = api.compare(net(keep=False), net(change=scaled("y"), keep=False)).effect
    assert effect.from_statistics and effect.rows == 0
    assert "statistics differ by" in words_of.words(effect)
    assert words_of.words(Effect(unmeasured=1)) == (
        "not known: no output of the model could be measured"
    )


def test_an_output_that_the_target_lacks_is_not_taken_for_equal():
    def cut(name, value):
        return value[:, :4] if name == "y" else value

    effect = api.compare(net(), net(change=cut)).effect
    assert (effect.outputs, effect.unmeasured) == (0, 1)
    assert words_of.words(effect).startswith("not known")


def test_infinite_errors():
    def change(name, value):
        if name == "y":
            value = value.copy()
            value[0, 0] = np.inf
        return value

    effect = api.compare(net(), net(change=change)).effect
    assert effect.error is None
    assert words_of.words(effect).startswith("Net output.0 is not finite on one side")


def test_tokens_take_the_place_of_rows():
    assert words_of.words(Effect(tokens=8, tokens_changed=1)) == "1 of 8 tokens changed"
