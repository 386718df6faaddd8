"""A capture of some steps is compared as what it is: steps that were left out count nowhere."""

import pytest
import torch

import whence

pytestmark = pytest.mark.torch


def captured(path, by):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    net[2].register_forward_hook(lambda module, args, out: out * by)
    draw = torch.Generator().manual_seed(1)
    with whence.capture(net, path, steps="0:3"), torch.no_grad():
        for _ in range(40):
            net(torch.randn(2, 4, generator=draw))


def test_steps_that_were_left_out_count_nowhere(tmp_path):
    for name, by in (("a", 1.0), ("b", 1.1)):
        captured(tmp_path / name, by)
    found = whence.compare(tmp_path / "a", tmp_path / "b", occurrences=True)
    assert found.status == "different"
    table = found.occurrences
    assert {(row.name, row.count, row.compared) for row in table.rows if row.by == "type"} == {
        ("Linear", 6, 6),
        ("Tanh", 3, 3),
    }
    assert not [note for note in found.notes if "were replayed" in note]
    assert found.coverage.replayed == found.coverage.paired
