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
