"""TF32 on a GPU is named where the target allows it and a kernel is further off than float32."""

import json
import warnings

import msgspec
import pytest
import torch
from torch import nn

import whence
from whence.comparison.options import CompareOptions
from whence.comparison.pipeline import compare_runs
from whence.records import Over
from whence.replay.declared_semantics import round_mantissa

pytestmark = pytest.mark.torch


def with_ten_bits(x, w, *rest):
    """A product of matrices as a GPU computes it in TF32."""
    short = [torch.from_numpy(round_mantissa(t.numpy())).float() for t in (x, w)]
    return torch.einsum("ij,jk->ik", *(t.double() for t in short)).float()


def captured(path, *, tf32):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU()), torch.randn(8, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced
        library = torch.library.Library("aten", "IMPL")
        if tf32:
            library.impl("mm", with_ten_bits, "CPU")
    try:
        with torch.no_grad(), whence.capture(model, path):
            model(x)
    finally:
        library._destroy()
    return whence.open_run(path)


class OnGPU(Over):
    """A run that says that it was made on a GPU, with these settings."""

    def __init__(self, base, **settings):
        super().__init__(base)
        self.notes = [
            msgspec.structs.replace(
                note,
                text=json.dumps({**json.loads(note.text), "devices": ["cuda:0"], **settings}),
            )
            if note.kind == "settings"
            else note
            for note in base.notes
        ]


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"matmul_precision": "high"}, True), ({"matmul_precision": "highest"}, False)],
)
def test_tf32_that_is_allowed_is_named(tmp_path, settings, named):
    reference = captured(tmp_path / "reference", tf32=False)
    target = OnGPU(captured(tmp_path / "target", tf32=True), **settings)
    result = compare_runs(reference, target, CompareOptions())
    assert result.status == "different" and result.findings[0].cause == "kernel"
    assert ("the target allows TF32" in result.findings[0].sentence) == named


class Routed(nn.Module):
    """A model whose router computes in float32, whatever the model is kept in."""

    def __init__(self):
        super().__init__()
        self.one, self.router, self.other = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.one(x)
        weight = self.router.to(torch.float32)(x.float()).softmax(-1)
        return self.other(x * weight.to(x.dtype))


@pytest.mark.parametrize("exact", ["", "other"])
def test_a_router_that_was_in_16_bits_with_its_model_is_no_fault(tmp_path, exact):
    """With a parameter that kept its digits, the model was not in 16 bits: rounding is a fault."""
    torch.manual_seed(0)
    reference, x = Routed(), torch.randn(4, 16).bfloat16()
    target = Routed()
    target.load_state_dict(reference.state_dict())
    target.bfloat16()
    if exact:
        target.other.weight.data = reference.other.weight.data
        target.other.register_forward_pre_hook(lambda m, args: (args[0].float(),))
        target.other.float().weight.data.copy_(reference.other.weight.data)
    for name, model, given in (("reference", reference, x.float()), ("target", target, x)):
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(given)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    if not exact:
        assert result.status == "same"
        assert any("router.weight" in note for note in result.notes)
    else:
        assert [f.name for f in result.findings if f.cause == "parameter"][:1] == ["router"]
