"""Files of torch.save compared: state dicts, tensors with names, folders. The loader itself is
tested in parts/test_torch_file.py.
"""

import os
import pickle

import numpy as np
import pytest

import whence
from readers import hostile
from whence.errors import ElementsMissing
from whence.readers import open_run
from whence.readers.assembly.spoken_names import tell

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))


def labels(run):
    return {c.scope: run.array(c.slots("output")[0].record) for c in run.calls if c.leaf}


def test_a_state_dict_is_parameters_of_modules(tmp_path):
    torch.save({"state_dict": net().state_dict(), "epoch": 3}, tmp_path / "a.pt")
    calls = {c.scope: c for c in open_run(tmp_path / "a.pt").calls}
    assert set(calls) == {"", "0", "1", "2"}
    assert [r.slot for r in calls["0"].refs] == ["param.weight", "param.bias"]
    assert calls["0"].kind == "module"


def test_weights_that_differ_are_named_and_equal_ones_are_the_same(tmp_path):
    reference, target = net().state_dict(), net().state_dict()
    torch.save(reference, tmp_path / "ref.pt")
    torch.save(
        {k: v.clone() for k, v in target.items()},
        tmp_path / "same.pt",
        _use_new_zipfile_serialization=False,
    )
    torch.save({k: v.bfloat16() for k, v in target.items()}, tmp_path / "rounded.pt")
    target["2.weight"][1] *= -1
    torch.save(target, tmp_path / "bad.pt")
    del target["2.weight"]
    torch.save({**reference, "2.weight": torch.zeros(5, 8)}, tmp_path / "shape.pt")
    ref = str(tmp_path / "ref.pt")
    assert whence.compare(ref, str(tmp_path / "same.pt")).status == "same"
    assert whence.compare(ref, str(tmp_path / "rounded.pt")).status == "same"
    result = whence.compare(ref, str(tmp_path / "bad.pt"))
    assert result.status == "different"
    assert [(f.name, f.verdict, f.slot) for f in result.findings] == [
        ("2", "param-diff", "param.weight")
    ]
    assert "sign flipped in row 1" in result.findings[0].sentence
    assert whence.compare(ref, str(tmp_path / "shape.pt")).status == "undecided"


def test_a_weight_that_only_one_side_has_is_never_a_pass(tmp_path):
    state = net().state_dict()
    torch.save(state, tmp_path / "whole.pt")
    torch.save({k: v for k, v in state.items() if k != "1.bias"}, tmp_path / "bias.pt")
    torch.save({k: v for k, v in state.items() if not k.startswith("1.")}, tmp_path / "module.pt")
    for name, said in {"bias": "1.bias", "module": "1"}.items():
        for pair in ((name, "whole"), ("whole", name)):
            result = whence.compare(
                *(str(tmp_path / f"{side}.pt") for side in pair), min_coverage=0
            )
            assert result.status == "undecided", pair
            assert (
                f"only the {'reference' if pair[0] == 'whole' else 'target'} has {said}"
                in result.headline
            )


def test_gradients_under_the_names_of_weights_may_differ_by_rounding(tmp_path):
    state = net().state_dict()
    for name, scale in {"ref": 1.0, "tgt": 1 + 2**-20}.items():
        torch.save({k: v * scale for k, v in state.items()}, tmp_path / f"grads_{name}.pt")
        torch.save({k: v * scale for k, v in state.items()}, tmp_path / f"{name}.pt")
    assert whence.compare(str(tmp_path / "ref.pt"), str(tmp_path / "tgt.pt")).status == "different"
    result = whence.compare(str(tmp_path / "grads_ref.pt"), str(tmp_path / "grads_tgt.pt"))
    assert not [f for f in result.findings if f.verdict == "param-diff"]


def test_a_checkpoint_faces_a_capture_of_its_model(tmp_path):
    model = net()
    with torch.no_grad(), whence.capture(model, str(tmp_path / "run")):
        model(torch.ones(2, 4))
    state = model.state_dict()
    torch.save(state, tmp_path / "good.pt")
    state["1.weight"] = state["1.weight"].clone() + 1
    torch.save(state, tmp_path / "bad.pt")
    result = whence.compare(str(tmp_path / "good.pt"), str(tmp_path / "run"))
    assert not result.findings
    result = whence.compare(str(tmp_path / "bad.pt"), str(tmp_path / "run"))
    assert [(f.name, f.verdict) for f in result.findings] == [("1", "param-diff")]


def test_tensors_with_names_are_labels_in_the_order_of_the_file(tmp_path):
    tree = {
        "zebra": torch.ones(3),
        "layers": [{"a": torch.zeros(2)}, {"a": torch.zeros(2).bfloat16()}],
        "note": "text",
    }
    torch.save(tree, tmp_path / "a.pt")
    run = open_run(tmp_path / "a.pt")
    leaves = sorted((c for c in run.calls if c.leaf), key=lambda c: c.order)
    assert [c.scope for c in leaves] == ["zebra", "layers.0.a", "layers.1.a"]
    assert run.records[leaves[2].slots("output")[0].record].dtype == "bfloat16"


def test_a_folder_of_tensors(tmp_path):
    draw = np.random.default_rng(0)
    for name, fault in {"ref": 1.0, "bad": 2.0}.items():
        x = torch.tensor(
            draw.standard_normal((4, 16)) if name == "ref" else np.load(tmp_path / "x.npy")
        )
        np.save(tmp_path / "x.npy", x.numpy())
        for step in range(2):
            (tmp_path / name / f"step{step}").mkdir(parents=True)
            for i in range(3):
                y = x * (i + 1) * (fault if i == 1 else 1.0)
                torch.save(y, tmp_path / name / f"step{step}" / f"{i}_block{i}.pt")
    result = whence.compare(str(tmp_path / "ref"), str(tmp_path / "bad"))
    assert (result.status, result.findings[0].name, result.findings[0].step) == (
        "different",
        "block1",
        0,
    )
    assert whence.compare(str(tmp_path / "ref"), str(tmp_path / "ref")).status == "same"


def test_phases_of_a_served_model_are_steps():
    files = [f"dp0/{p}/lm_head/rank1.pt" for p in ("decode_b4_10", "decode_b4_2", "prefill_s128_0")]
    said = tell(files, [""] * 3)
    assert [tuple(one) for one in said] == [("lm_head", 2, 1), ("lm_head", 1, 1), ("lm_head", 0, 1)]
    assert [one.step for one in tell(files[:2], ["", ""])] == [2, 1]
    others = ["decode/x.pt", "prefill_x/x.pt", "decoder_b1_0/x.pt"]
    assert {one.step for one in tell(others, [""] * 3)} == {0}


def test_parts_of_a_checkpoint_are_one(tmp_path):
    state = list(net().state_dict().items())
    torch.save(dict(state[:2]), tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(state[2:]), tmp_path / "pytorch_model-00002-of-00002.bin")
    torch.save(dict(state), tmp_path / "whole.pt")
    (tmp_path / "parts").mkdir()
    for path in list(tmp_path.glob("*.bin")):
        path.rename(tmp_path / "parts" / path.name)
    assert whence.compare(str(tmp_path / "whole.pt"), str(tmp_path / "parts")).status == "same"


def test_a_tensor_that_is_not_read_is_incomparable_and_named(tmp_path):
    class Quantised:  # as torch writes a tensor of qint8
        def __reduce__(self):
            storage = torch.storage.TypedStorage(
                wrap_storage=torch.ones(2).untyped_storage(), dtype=torch.float32, _internal=True
            )
            return torch._utils._rebuild_qtensor, (storage, 0, (2,), (1,), (), False, {})

    torch.save({"a": torch.ones(3), "q": Quantised()}, tmp_path / "a.pt")
    run = open_run(tmp_path / "a.pt")
    whys = {c.scope: run.records[c.slots("output")[0].record].why for c in run.calls if c.leaf}
    assert "_rebuild_qtensor is not read" in whys["q"]
    assert whence.compare(str(tmp_path / "a.pt"), str(tmp_path / "a.pt")).status == "undecided"


def test_spoilt_dumps_cost_tensors_or_are_refused(tmp_path):
    sample = tmp_path / "sample"
    sample.mkdir()
    torch.save({"w": torch.arange(6.0), "b": torch.ones(2).bfloat16()}, sample / "a.pt")
    torch.save(torch.ones(3), sample / "b.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        hostile.survives(what, path, "torch_tensors")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_protocol_of_pickle_is_read(protocol, zipped, tmp_path):
    kept = {
        "h1": torch.randn(3, 4),
        "h2": torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
        "h3": np.asfortranarray(np.ones((2, 3))),
    }
    torch.save(
        kept, tmp_path / "x.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped
    )
    run = open_run(tmp_path / "x.pt")
    for record, expected in zip(run.records, kept.values(), strict=True):
        np.testing.assert_array_equal(run.array(record.id), np.asarray(expected))
    with (tmp_path / "plain.pt").open("wb") as file:
        pickle.dump({"h1": np.arange(5.0), "h2": bytearray(b"no tensor")}, file, protocol=protocol)
    run = open_run(tmp_path / "plain.pt")
    np.testing.assert_array_equal(run.array(0), np.arange(5.0))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_cost_themselves(zipped, tmp_path):
    plain = torch.randn(4, 5)
    quantised = {
        "q8": torch.quantize_per_tensor(plain, 0.1, 10, torch.quint8),
        "q32": torch.quantize_per_tensor(plain, 0.1, 0, torch.qint32),
        "q4": torch.quantize_per_tensor(plain, 0.1, 0, torch.quint4x2),
        "rows": torch.quantize_per_channel(
            plain, torch.full((4,), 0.5), torch.zeros(4), 0, torch.qint8
        ),
    }
    torch.save(
        {"h0": plain, **quantised, "h1": plain.half()},
        tmp_path / "x.pt",
        _use_new_zipfile_serialization=zipped,
    )
    run = open_run(tmp_path / "x.pt")
    by_name = {c.scope: c.slots("output")[0].record for c in run.calls if c.scope}
    np.testing.assert_array_equal(run.array(by_name["h0"]), plain.numpy())
    np.testing.assert_array_equal(run.array(by_name["h1"]), plain.half().numpy())
    for name in quantised:
        with pytest.raises(ElementsMissing, match="_rebuild_qtensor is not read"):
            run.array(by_name[name])


def stacked(fault=0.0):
    """Outputs of layers with parts, by name, of which one is wrong."""
    draw = torch.Generator().manual_seed(0)
    made = {}
    x = torch.randn(4, 16, generator=draw)
    for layer in (2, 10):
        for part in ("b", "a"):
            x = torch.tanh(x @ torch.randn(16, 16, generator=draw) / 2)
            x = x + fault * (layer == 2 and part == "b")
            made[f"layer_{layer}", part] = x
    return made


def written_by_layer(folder, made):
    folder.mkdir()
    for layer in ("layer_2", "layer_10"):
        torch.save({p: x for (k, p), x in made.items() if k == layer}, folder / f"{layer}.pt")


def test_the_alphabet_of_files_is_no_order_of_layers(tmp_path):
    written_by_layer(tmp_path / "ref", stacked())
    written_by_layer(tmp_path / "bad", stacked(1.0))
    for path in tmp_path.rglob("*.pt"):
        os.utime(path, (0, 0))
    result = whence.compare(str(tmp_path / "ref"), str(tmp_path / "bad"))
    assert result.status != "same"
    assert "layer_10" not in {finding.name.split(".")[0] for finding in result.findings}


def test_of_several_first_differences_the_whole_is_named(tmp_path):
    names = {"ref": 0.0, "bad": 1.0}
    for name, fault in names.items():
        made = {"layer_1.c": torch.ones(3, 4)} | {".".join(k): x for k, x in stacked(fault).items()}
        (tmp_path / name).mkdir()
        for key, x in made.items():
            torch.save(x, tmp_path / name / f"{key}.pt")
            os.utime(tmp_path / name / f"{key}.pt", (0, 0))
    result = whence.compare(str(tmp_path / "ref"), str(tmp_path / "bad"))
    assert [finding.name for finding in result.findings] == ["layer_2"]
    assert "layer_2.a, layer_2.b" in result.findings[0].sentence


@pytest.mark.parametrize(("bias", "status"), [(1e-8, "same"), (1.0, "different")])
def test_a_gradient_that_cancels_is_measured_against_its_module(bias, status, tmp_path):
    draw = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.fc.weight": torch.randn(8, 8, generator=draw) for n in range(3)}
    for name in ("ref", "tgt"):
        noise = bias * torch.randn(8, generator=draw)
        (tmp_path / name).mkdir()
        torch.save(weights | {"layers.1.fc.bias": noise}, tmp_path / name / "grads.pt")
    result = whence.compare(str(tmp_path / "ref"), str(tmp_path / "tgt"))
    assert result.status == status
    assert all(finding.name.startswith("layers.1.fc") for finding in result.findings)
