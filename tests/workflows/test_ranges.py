"""How the tensors of one run would fit formats with fewer bits."""

import json

import pytest
import torch
from torch import nn

import whence
from whence.cli import execute
from whence.errors import UsageError

pytestmark = pytest.mark.torch


def captured(folder, keep="full", scale=1.0, dtype=torch.float32):
    """One training step whose second layer gets and makes large values, with tiny gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    with torch.no_grad():
        net[0].bias.fill_(scale)
    with whence.capture(net, folder, keep=keep, force=True):
        (net(torch.ones(4, 8, dtype=dtype)).mean() * 1e-9).backward()
    return folder


def use(result, scope, slot, phase="forward"):
    (tensor,) = [t for t in result.tensors if (t.scope, t.slot, t.phase) == (scope, slot, phase)]
    return tensor, dict(zip(result.formats, tensor.formats, strict=True))


def test_what_overflows_and_what_becomes_zero_is_told_by_tensor(tmp_path):
    result = whence.ranges(captured(tmp_path / "run", scale=1e5))
    tensor, formats = use(result, "0", "output.0")
    assert tensor.elements == 32
    assert 9e4 < tensor.largest < 1.1e5
    assert (formats["float16"].overflows, formats["float16"].overflow) == (True, 32)
    assert not formats["bfloat16"].overflows
    assert not formats["float8_e4m3fn scaled"].overflows
    gradient, formats = use(result, "1", "output.grad.param.bias", "backward")
    assert formats["float16"].zero == gradient.elements == 8
    assert formats["bfloat16"].zero == formats["float8_e5m2 scaled"].zero == 0
    assert (result.unread, result.unmeasured) == (0, 0)
    assert repr(result).startswith("RANGES")


def test_statistics_say_what_overflows_and_not_what_becomes_zero(tmp_path):
    result = whence.ranges(captured(tmp_path / "run", "stats", scale=1e5), ["float16"])
    tensor, formats = use(result, "0", "output.0")
    assert tensor.elements == 0
    assert formats["float16"].overflows
    assert result.unread == len(result.tensors) > 5


def test_every_tensor_is_counted_once(tmp_path):
    result = whence.ranges(captured(tmp_path / "run"))
    assert [t.slot for t in result.tensors if t.scope == "1" and t.phase == "forward"] == [
        "param.weight",
        "param.bias",
        "output.0",
    ]


def test_tensors_at_the_ends_of_their_own_dtype_are_listed(tmp_path):
    folder = captured(tmp_path / "run", dtype=torch.float16, scale=65504)
    tensor, _ = use(whence.ranges(folder), "0", "param.bias")
    assert tensor.saturated == 8


def test_the_command_names_what_is_lost(tmp_path, capsys):
    folder = captured(tmp_path / "run", scale=1e5)
    assert execute(["ranges", str(folder), "--dtype", "float16", "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert "float16                   3 tensors" in out
    assert "largest 1e+05 at step 0, 100 % too large" in out
    assert "100 % become zero" in out
    assert execute(["ranges", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["formats"][0] == "float16"


def test_a_name_that_is_no_format_is_refused(tmp_path, capsys):
    folder = captured(tmp_path / "run")
    with pytest.raises(UsageError, match=r"'fp17' is not a floating-point dtype; known: float32,"):
        whence.ranges(folder, ["fp17"])
    assert execute(["ranges", str(tmp_path / "nothing")]) == 3
    assert "nothing" in capsys.readouterr().err
