"""A dump of leaf modules against a run that has the modules around them too: what lies between is
neither missing nor at fault.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("h5py")

from torch import nn  # noqa: E402

import whence  # noqa: E402
from whence import store  # noqa: E402
from whence.writers.formats import torch_xray  # noqa: E402

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
        )

    residual = 1.0

    def forward(self, x):
        return self.residual * x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.norm, self.head = (
            nn.ModuleList(Block() for _ in range(3)),
            nn.LayerNorm(16),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def compared(folder, change=lambda net: None):
    """A run against the .h5 of another one, as torch_xray writes it: leaf modules alone."""
    for name in ("reference", "target"):
        torch.manual_seed(0)
        net = Net().eval()
        if name == "target":
            change(net)
        with torch.no_grad(), whence.capture(net, folder / name):
            net(torch.linspace(-2, 2, 128).reshape(8, 16))
    torch_xray.write(store.open_run(folder / "target"), folder / "h5", leaves=True)
    return whence.compare(folder / "reference", folder / "h5")


def test_clean_is_same(tmp_path):
    result = compared(tmp_path)
    # The blocks around are opened: their code is judged as that of the whole.
    assert (result.status, result.coverage.replayed) == ("same", result.coverage.calls)
    assert not result.without_partner


def test_a_leaf_is_named_and_nothing_behind_it(tmp_path):
    result = compared(tmp_path, lambda net: setattr(net.blocks[1].norm, "eps", 0.1))
    assert [(f.name, f.verdict) for f in result.findings] == [("blocks.1.norm", "introduced")]


def test_code_around_leaves_is_still_seen(tmp_path):
    result = compared(tmp_path, lambda net: setattr(net.blocks[1], "residual", 1.5))
    assert result.status == "different"
    assert all(f.verdict == "introduced" for f in result.findings)


def test_tokens_that_the_target_does_not_show_blame_no_embedding(tmp_path):
    for name, ids in (("reference", [[1, 2, 3]]), ("target", [[1, 2, 4]])):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 4)).eval()
        with (
            torch.no_grad(),
            whence.capture(net, tmp_path / name, slots="both" if name == "reference" else "output"),
        ):
            net(torch.tensor(ids))
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status != "same"
    assert not [f for f in result.findings if f.confidence == "certain"]
