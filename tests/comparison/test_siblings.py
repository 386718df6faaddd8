"""Modules of one form in one run say what their operators' rounding is."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import whence

WIDTH = 192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class SumsIn16Bits(TorchDispatchMode):
    """A device whose matrix product of these calls adds pieces up in bfloat16."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.number = calls, -1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.mm.default:
            return func(*args, **(kwargs or {}))
        self.number += 1
        if self.number not in self.calls:
            return func(*args)
        x, w = args
        out = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
        for start in range(0, WIDTH, 24):
            piece = slice(start, start + 24)
            out = (out.float() + x[:, piece].float() @ w[piece].float()).to(x.dtype)
        return out


def compared(folder, calls):
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4))).to(dtype)
        x = torch.randn(64, WIDTH).to(dtype)
        device = SumsIn16Bits(calls if name == "b" else ())
        with torch.no_grad(), device, whence.capture(model, folder / name):
            model(x)
    return whence.compare(folder / "a", folder / "b")


def test_a_loss_of_precision_that_siblings_do_without_is_a_fault(tmp_path):
    result = compared(tmp_path, {3})  # the second product of the second block
    assert [(f.name, f.cause) for f in result.findings] == [("1.down", "kernel")]
    assert "3 others of its form in this run" in result.findings[0].sentence


def test_a_loss_that_all_siblings_have_is_a_remark(tmp_path):
    result = compared(tmp_path, {1, 3, 5, 7})
    assert result.status == "same"
    assert [(r.kind, r.name, len(r.also)) for r in result.remarks] == [("suspect", "0.down", 3)]


def test_a_correct_run_has_neither(tmp_path):
    result = compared(tmp_path, set())
    assert (result.status, result.remarks) == ("same", ())


class ScaleAndShift(nn.BatchNorm2d):
    """The same function, written as one product and one sum."""

    def forward(self, x):
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


def test_a_norm_that_is_written_otherwise_rounds_otherwise(tmp_path):
    """Its siblings are of one form with it in the reference alone."""

    def net(written):
        torch.manual_seed(0)
        layers = []
        for number in range(4):
            norm = (ScaleAndShift if written and number == 1 else nn.BatchNorm2d)(8)
            with torch.no_grad():
                norm.running_mean.normal_(0, 2)
                norm.running_var.uniform_(0.5, 2)
                norm.weight.uniform_(0.5, 2)
                norm.bias.normal_()
            layers += [nn.Conv2d(8, 8, 3, padding=1), norm, nn.ReLU()]
        return nn.Sequential(*layers).eval().bfloat16()

    x = torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name, written in (("a", False), ("b", True)):
        with whence.capture(model := net(written), tmp_path / name), torch.no_grad():
            model(x)
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    assert (result.status, result.findings) == ("same", ())
