"""Two programs that are one function in float64, and of which neither casts what the other does not,
differ in precision, however much one rounds; a cast that one alone makes is a fault.
"""

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch
WIDTH = 32


class Norm(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(1 + torch.rand(WIDTH) / 4)
        self.bias = torch.nn.Parameter(torch.randn(WIDTH) / 8)
        self.how = how

    def forward(self, x):
        return getattr(self, self.how)(x)

    def fused(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias)

    def written_out(self, x, eps=1e-5):
        centred = x - x.mean(-1, keepdim=True)
        deviation = torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
        return centred / deviation * self.weight + self.bias

    def another_epsilon(self, x):
        return self.written_out(x, 0.1)

    def wide(self, x):
        return self.written_out(x.float()).to(x.dtype)

    def narrow_inside(self, x):
        centred = (x - x.mean(-1, keepdim=True)).to(torch.bfloat16)
        deviation = torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        return (centred / deviation).to(x.dtype) * self.weight + self.bias


def compared(folder, reference, target, dtype):
    x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype) + 1
    for name, how in (("r", reference), ("t", target)):
        model = Norm(how).to(dtype)
        with whence.capture(model, folder / name), torch.no_grad():
            model(x)
    return whence.compare(folder / "r", folder / "t")


def test_a_norm_written_out_in_16_bits_differs_in_precision(tmp_path):
    result = compared(tmp_path, "fused", "written_out", torch.bfloat16)
    assert result.status == "same", result.findings


@pytest.mark.parametrize(
    ("reference", "target", "dtype", "words"),
    [
        ("fused", "another_epsilon", torch.bfloat16, ""),
        ("fused", "narrow_inside", torch.float32, "the target casts to bfloat16 inside, the"),
        ("written_out", "narrow_inside", torch.float32, "the target casts to bfloat16 inside, the"),
    ],
)
def test_another_function_and_a_cast_down_are_faults(reference, target, dtype, words, tmp_path):
    result = compared(tmp_path, reference, target, dtype)
    assert result.status == "different"
    assert result.findings[0].cause == "semantic"
    assert words in result.findings[0].sentence


def test_casts_that_only_one_side_makes_acquit_nothing(tmp_path):
    """The reference widens what the target computes in 16 bits."""
    result = compared(tmp_path, "wide", "written_out", torch.bfloat16)
    assert not any("neither casts" in v.sentence for v in result.verdicts)


def test_a_cast_that_the_target_leaves_out_is_named(tmp_path):
    class Net(torch.nn.Module):
        """A norm over the squares alone; rows of one size make its rounding theirs."""

        def __init__(self, widen):
            super().__init__()
            self.weight, self.widen = torch.nn.Parameter(torch.full((WIDTH,), 1.25)), widen

        def forward(self, x):
            wide = x.float() if self.widen else x
            size = wide.pow(2).cumsum(-1)[..., -1:] / WIDTH
            return (wide / size.sqrt()).to(x.dtype) * self.weight

    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)) + 1
    for name, widen, dtype in (("r", True, torch.float32), ("t", False, torch.bfloat16)):
        model = Net(widen).to(dtype)
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(x.to(dtype))
    sentence = whence.compare(tmp_path / "r", tmp_path / "t").findings[0].sentence
    assert "the reference casts to float32 inside, the target does not" in sentence
