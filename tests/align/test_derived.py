import numpy as np
import pytest

from handmade import Builder, record
from whence.align import DerivedTensors
from whence.align.derived_run import text
from whence.align.dims import Unfit
from whence.errors import ElementsMissing

RNG = np.random.default_rng(0)
Q, K = (
    RNG.standard_normal((3, 4)).astype(np.float32),
    RNG.standard_normal((3, 2)).astype(np.float32),
)


def run(*arrays, keep=True):
    made = Builder(keep=keep)
    made.call("", {f"output.{i}": array for i, array in enumerate(arrays)}, op_type="Net")
    return made.run()


def test_a_made_tensor_is_read_like_any_other():
    making = DerivedTensors(run(Q, K))
    joined = making.add("cat(q, k, axis=-1)", {"q": [0], "k": [1]}, "shapes")
    cut = making.add("x[..., 1:5]", {"x": [joined]})
    derived = making.done()
    assert derived.records[joined].shape == (3, 6)
    np.testing.assert_array_equal(derived.array(cut), np.concatenate([Q, K], -1)[:, 1:5])
    assert not derived.array(cut).flags.writeable
    np.testing.assert_array_equal(derived.array(0), Q)
    assert text(derived, cut) == "cat(q, k, axis=-1)[..., 1:5]"
    assert text(derived, 0) == ""


def test_nothing_made_is_the_run_itself_and_each_tensor_is_made_once():
    own = run(Q, K)
    making = DerivedTensors(own)
    assert making.add("x", {"x": [1]}) == 1
    assert making.done() is own
    assert making.add("x.T", {"x": [0]}) == making.add("x.T", {"x": [0]}) == 2


def test_figures_survive_a_change_of_order_and_the_hash_a_change_of_shape():
    making = DerivedTensors(run(Q, K))
    turned, grown = making.add("x.T", {"x": [0]}), making.add("t d -> 1 t d", {"x": [0]})
    derived = making.done()
    assert derived.records[turned].statistics == derived.records[0].statistics
    assert derived.records[turned].hash == ""
    assert (
        derived.records[grown].hash
        == derived.records[0].hash
        == record(0, derived.array(grown)).hash
    )


def test_what_does_not_fit_is_refused_when_planned():
    making = DerivedTensors(run(Q, K, K.astype(np.float16)))
    with pytest.raises(Unfit, match="do not fit"):
        making.add("cat(q, k, axis=0)", {"q": [0], "k": [1]})
    with pytest.raises(Unfit, match="float32 and float16"):
        making.add("cat(q, k, axis=0)", {"q": [1], "k": [2]})


def test_what_was_not_kept_cannot_be_made_and_says_so():
    making = DerivedTensors(run(Q, K, keep=False))
    at = making.add("cat(q, k, axis=-1)", {"q": [0], "k": [1]})
    with pytest.raises(ElementsMissing, match=r"made as cat\(q, k, axis=-1\): statistics only"):
        making.done().array(at)
