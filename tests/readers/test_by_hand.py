"""The hook of docs/howto/by-hand.md, as a user pastes it."""

import json
import os
import pathlib
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import whence

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "by-hand.md"


def test_the_hook_names_a_fault(tmp_path):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {}
    exec(code, names)  # noqa: S102 - the page is ours
    for side in ("reference", "target", "again"):
        torch.manual_seed(0)
        parts = [
            torch.nn.Linear(8, 8),
            torch.nn.Tanh(),
            torch.nn.Linear(8, 8),
            torch.nn.Linear(8, 4),
        ]
        model = torch.nn.Sequential(*parts)
        if side == "target":
            model[2].register_forward_hook(lambda _module, _given, made: -made)
        names["tap"](model, tmp_path / side)
        with torch.no_grad():
            for _ in range(2):
                model(torch.randn(3, 8))
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert (result.status, result.findings[0].name) == ("different", "2")
    assert {row.step for row in result.rows} == {0, 1}
    assert whence.compare(tmp_path / "reference", tmp_path / "again").status == "same"


def snippets():
    page = PAGE.read_text(encoding="utf-8")
    part = page.partition("## Hooks that people write")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", part, re.DOTALL)


@pytest.mark.parametrize("number", range(5))
def test_a_hook_that_people_write_names_a_fault(number, tmp_path):
    assert len(snippets()) == 5
    for side in ("reference", "target", "again"):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(12)]
        model = torch.nn.Sequential(*layers)
        if side == "target":
            model[2][0].register_forward_hook(lambda _module, _given, made: -made)
        (tmp_path / side).mkdir()
        names = {"torch": torch, "np": np, "pickle": pickle, "pathlib": pathlib}
        names |= {"out": tmp_path / side}
        exec(snippets()[number], names | {"model": model, "x": torch.randn(3, 8)})  # noqa: S102
        torch.set_printoptions(profile="default")
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert (result.status, result.findings[0].name) == ("different", "2.0")
    assert whence.compare(tmp_path / "reference", tmp_path / "again").status == "same"


def test_entries_that_were_sorted_are_no_order(tmp_path):
    h5py, random = pytest.importorskip("h5py"), np.random.default_rng(0)
    names = ["embed", *(f"layers.{k}.{part}" for k in range(12) for part in ("attn", "mlp"))]
    tensors = {name: random.standard_normal((4, 8)).astype("f4") for name in names}
    for side in ("reference", "target"):
        with h5py.File(tmp_path / f"{side}.h5", "w") as file:
            error, made = 0.0, {}
            for name, tensor in tensors.items():
                error = 0.1 if side == "target" and name == "layers.2.mlp" else 4 * error
                made[name] = tensor + min(error, 0.8) * random.standard_normal((4, 8))
            for name in sorted(made):
                file[name] = made[name]
    result = whence.compare(tmp_path / "reference.h5", tmp_path / "target.h5")
    assert result.findings[0].name == "layers.2.mlp"


def test_names_with_underscores_nest_where_modules_show_their_inputs(tmp_path):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(x + torch.tanh(self.dense(x)))

    for side in ("reference", "target"):
        torch.manual_seed(0)
        model, tensors = torch.nn.Sequential(Layer(), Layer()), {}

        def hook(name, tensors=tensors):
            def save(_module, given, made):
                tensors[f"{name}_in"], tensors[f"{name}_out"] = given[0], made.clone()

            return save

        if side == "target":
            model[1].dense.register_forward_hook(lambda _module, _given, made: 1.5 * made)
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(hook(f"layer_{name}".replace(".", "_")))
        with torch.no_grad():
            model(torch.randn(3, 8))
        torch.save(tensors, tmp_path / f"{side}.pt")
    result = whence.compare(tmp_path / "reference.pt", tmp_path / "target.pt")
    assert [finding.name for finding in result.findings] == ["layer_1_dense"]


@pytest.mark.parametrize("prefix", ["", "pid_1."])
def test_first_differences_with_nothing_in_common_name_no_part(prefix, tmp_path):
    tensor = np.random.default_rng(0).standard_normal((4, 8)).astype("f4")
    for side, factor in (("reference", 1), ("target", -1)):
        (tmp_path / side).mkdir()
        for name, sign in (("bn.a", factor), ("gate.b", factor), ("z.c", 1)):
            np.save(tmp_path / side / f"{prefix}{name}.npy", sign * tensor)
        for path in (tmp_path / side).iterdir():
            os.utime(path, (1, 1))
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "undecided"


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_norm_stands_behind_the_convolution_whose_result_it_scales(tmp_path, norm_first):
    random = np.random.default_rng(0)
    for side in ("reference", "target"):
        x = np.random.default_rng(1).standard_normal((2, 3, 5, 5)).astype("f4")
        w = np.random.default_rng(2).standard_normal((3, 3)).astype("f4")
        (tmp_path / side).mkdir()

        def conv(x, w=w):
            return np.einsum("oc,nchw->nohw", w, x)

        def norm(x):
            return x * np.float32([2, 3, 4]).reshape(3, 1, 1) + 1

        if norm_first:  # with something between that is kept nowhere
            scaled = norm(x) + (0.5 * random.standard_normal(x.shape) if side == "target" else 0)
            tensors = {"bn1": scaled, "conv1": conv(np.maximum(scaled, 0))}
        else:
            product = conv(x) + (0.5 * random.standard_normal(x.shape) if side == "target" else 0)
            tensors = {"bn1": norm(product), "conv1": product}
        for name, tensor in {"stem": x, **{f"stages.0.{k}": v for k, v in tensors.items()}}.items():
            np.save(tmp_path / side / f"{name}.npy", tensor.astype("f4"))
            os.utime(tmp_path / side / f"{name}.npy", (0, 0))
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.findings[0].name == ("stages.0" if norm_first else "stages.0.conv1")


def test_texts_in_hdf5_are_no_tensors(tmp_path):
    h5py = pytest.importorskip("h5py")
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    for side in ("ref", "bad"):
        with h5py.File(tmp_path / f"{side}.h5", "w") as file:
            file["prompts"] = ["one", "two"]
            file["labels"] = np.array([b"a", b"b"])
            for n in range(3):
                file[f"activations/layer_{n}"] = (
                    x * (n + 1) * (-1 if (side, n) == ("bad", 1) else 1)
                )
    result = whence.compare(tmp_path / "ref.h5", tmp_path / "bad.h5")
    assert (result.status, result.findings[0].name) == ("different", "activations.layer_1")


def test_layers_are_told_apart_in_stacks_and_classes_in_lists(tmp_path):
    """hidden_states of a prompt beside its logits, and hooks that keep the class of each module."""
    rng = np.random.default_rng(0)
    layers, logits = rng.normal(size=(5, 4, 8)), rng.normal(size=(4, 9))
    classes = ["Norm", "Linear", "Linear", "Gelu", "Linear", "Norm", "Linear", "Linear", "Gelu"]
    arrays = [rng.normal(size=(4, 8)).astype(np.float32) for _ in classes]
    for side, factor in (("ref", 1), ("bad", 1.5)):
        for name in ("json", "list"):
            (tmp_path / name / side).mkdir(parents=True)
        held = np.concatenate([layers[:3], factor * layers[3:]])
        line = {
            "tokens": [1, 2],
            "logits": (factor * logits).tolist(),
            "hidden_states": held.tolist(),
        }
        (tmp_path / "json" / side / "golden.jsonl").write_text(json.dumps(line))
        kept = [(c, a * (factor if n > 5 else 1)) for n, (c, a) in enumerate(zip(classes, arrays))]
        (tmp_path / "list" / side / "acts.pkl").write_bytes(pickle.dumps(kept))
    for name, first in (("json", "hidden_states.3"), ("list", "Linear.3")):
        result = whence.compare(tmp_path / name / "ref", tmp_path / name / "bad")
        assert (result.status, result.findings[0].name) == ("different", first)
