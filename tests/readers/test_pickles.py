"""Tensors that were pickled without torch.save: by pickle.dump, by np.save of a dict."""

import pickle

import ml_dtypes
import numpy as np
import pytest

import whence
from readers import hostile
from whence.errors import UnreadableRun
from whence.readers import open_run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ARRAY = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
TREE = {
    "array": ARRAY,
    "again": ARRAY,
    "columns": np.asfortranarray(ARRAY),
    "big": ARRAY.astype(">f8"),
    "half": torch.tensor(ARRAY).bfloat16(),
    "brain": ARRAY.astype(ml_dtypes.bfloat16),
    "turned": torch.tensor(ARRAY).T,
    "weights": torch.nn.Parameter(torch.tensor(ARRAY)),
}


def elements(run):
    return {c.scope: run.array(c.slots("output")[0].record) for c in run.calls if c.leaf}


def numpy_of(value):
    if isinstance(value, np.ndarray):
        return value
    plain = value.detach()
    return plain.float().numpy() if plain.dtype == torch.bfloat16 else plain.numpy()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("suffix", [".pkl", ".pt"])
def test_arrays_and_tensors_of_every_protocol_are_bit_exact(protocol, suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(pickle.dumps(TREE, protocol=protocol))
    read = elements(open_run(path))
    assert list(read) == list(TREE)
    for name, value in TREE.items():
        assert read[name].tobytes() == numpy_of(value).astype(read[name].dtype).tobytes(), name
    assert read["half"].dtype.name == "bfloat16" and read["array"].dtype == np.float32


def test_np_save_of_a_dict_is_its_tensors(tmp_path):
    np.save(tmp_path / "x.npy", TREE, allow_pickle=True)
    np.savez(tmp_path / "y.npz", held=np.array({"q": ARRAY}, object), plain=ARRAY)
    np.save(tmp_path / "z.npy", np.array([ARRAY, ARRAY[0]], object), allow_pickle=True)
    assert list(elements(open_run(tmp_path / "x.npy"))) == list(TREE)
    assert list(elements(open_run(tmp_path / "y.npz"))) == ["held.q", "plain"]
    assert [a.shape for a in elements(open_run(tmp_path / "z.npy")).values()] == [(3, 4), (4,)]


def test_names_of_pairs_and_of_dicts_that_say_theirs(tmp_path):
    tree = [("b", ARRAY), ("a", torch.tensor(ARRAY))]
    (tmp_path / "pairs.pkl").write_bytes(pickle.dumps(tree))
    said = [{"name": "fc", "input": ARRAY + 1, "output": ARRAY}, {"name": "act", "value": ARRAY}]
    (tmp_path / "said.pkl").write_bytes(pickle.dumps(said))
    assert list(elements(open_run(tmp_path / "pairs.pkl"))) == ["b", "a"]
    calls = {c.scope: [r.slot for r in c.refs] for c in open_run(tmp_path / "said.pkl").calls}
    assert sorted(calls["fc"]) == ["input.0", "output.0"] and "act" in calls


def test_an_array_of_jax_is_one_of_numpy(tmp_path):
    """As `jax.Array.__reduce__` writes it; jax is not needed."""

    class OfJax:
        def __reduce__(self):
            function, args, state = ARRAY.__reduce__()
            return _reconstruct_array, (function, args, state, {"weak_type": False})

    data = pickle.dumps({"x": OfJax()}, protocol=4)
    old = _reconstruct_array.__module__.encode()
    assert old in data
    ours = pickle.dumps(old.decode(), protocol=4)[11:-2]
    theirs = pickle.dumps("jax._src.array", protocol=4)[11:-2]
    assert ours in data
    data = data.replace(ours, theirs)
    path = tmp_path / "x.pkl"
    path.write_bytes(data[:2] + data[11:])  # without the frame, whose length no longer holds
    np.testing.assert_array_equal(elements(open_run(path))["x"], ARRAY)


def _reconstruct_array(function, args, state, aval):
    raise AssertionError("nothing in a dump is executed")


def test_a_planted_fault_is_named_and_an_unknown_tensor_never_passes(tmp_path):
    states = [ARRAY * scale for scale in range(1, 6)]
    for name, factor in (("ref", 1), ("bad", -1)):
        tree = {
            f"layers.{i}": torch.tensor(s * (factor if i > 2 else 1)) for i, s in enumerate(states)
        }
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps(tree))
    assert whence.compare(tmp_path / "ref.pkl", tmp_path / "ref.pkl").status == "same"
    result = whence.compare(tmp_path / "ref.pkl", tmp_path / "bad.pkl")
    assert result.status != "same" and "layers.3" in str(result)
    (tmp_path / "odd.pkl").write_bytes(pickle.dumps({"x": ARRAY, "y": _Odd()}))
    assert whence.compare(tmp_path / "odd.pkl", tmp_path / "odd.pkl").status == "undecided"


class _Odd:
    """What a library that is not known here makes of bytes."""

    def __reduce__(self):
        return memoryview, (bytes(range(256)),)


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path):
    path = tmp_path / "x.pkl"
    path.write_bytes(hostile.evil_pickle(tmp_path / "marker"))
    with pytest.raises(UnreadableRun):
        open_run(path)
    np.save(tmp_path / "y.npy", {"a": ARRAY}, allow_pickle=True)
    header = (tmp_path / "y.npy").read_bytes()[:128]
    (tmp_path / "y.npy").write_bytes(header + hostile.evil_pickle(tmp_path / "marker"))
    with pytest.raises(UnreadableRun):
        open_run(tmp_path / "y.npy")
    assert not (tmp_path / "marker").exists()


def test_spoilt_pickles_cost_tensors_or_are_refused(tmp_path):
    sample = tmp_path / "sample"
    sample.mkdir()
    (sample / "a.pkl").write_bytes(pickle.dumps({k: TREE[k] for k in ("array", "half")}))
    np.save(sample / "b.npy", {"array": ARRAY, "half": TREE["half"]}, allow_pickle=True)
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        hostile.survives(what, path)


def test_pickles_behind_each_other_are_all_read_and_a_cut_one_is_refused(tmp_path):
    """A hook that appends to one file: what follows the first object is not passed over."""
    for side, factor in (("ref", 1), ("bad", 3)):
        with (tmp_path / f"{side}.pkl").open("wb") as file:
            for n in range(4):
                value = ARRAY + n if n < 2 else factor * (ARRAY + n) ** 2
                pickle.dump((f"layers.{n}", value), file)
    held = elements(open_run(tmp_path / "bad.pkl"))
    assert list(held) == [f"layers.{n}" for n in range(4)]
    np.testing.assert_array_equal(held["layers.3"], 3 * (ARRAY + 3) ** 2)
    result = whence.compare(tmp_path / "ref.pkl", tmp_path / "bad.pkl")
    assert (result.status, result.findings[0].name) == ("different", "layers.2")
    whole = (tmp_path / "bad.pkl").read_bytes()
    (tmp_path / "cut.pkl").write_bytes(whole[:-20])
    with pytest.raises(UnreadableRun):
        open_run(tmp_path / "cut.pkl")


def test_a_number_beside_names_that_come_again_is_that_of_the_layer(tmp_path):
    held = [(n, name, ARRAY + n) for n in range(3) for name in ("attn", "mlp")]
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(held))
    assert list(elements(open_run(path))) == [f"{n}.{name}" for n, name, _ in held]
    path.write_bytes(pickle.dumps([(7, "attn", ARRAY), (7, "mlp", ARRAY)]))
    assert list(elements(open_run(path))) == ["attn", "mlp"]
