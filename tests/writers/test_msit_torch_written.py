"""Folders as msit writes them: read back bit by bit, and what they cannot hold is said."""

import json

import pytest

import whence

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(2)
        )

    def forward(self, x, *, mask):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x) * mask
        return x, [x + 1, x > 0]


def test_there_and_back(tmp_path):
    torch.manual_seed(0)
    model, made = Net().eval(), []
    model.layers[1].register_forward_hook(lambda m, i, o: made.append(o.clone()))
    with whence.capture(model, tmp_path / "run"), torch.no_grad():
        for step in range(2):
            out = model(
                torch.full((1, 8), step + 1.0, dtype=torch.bfloat16),
                mask=torch.ones((), dtype=torch.bfloat16),
            )
    written = whence.convert(tmp_path / "run", tmp_path / "dump", to="msit_torch")
    for step in range(2):
        assert torch.equal(
            torch.load(
                tmp_path / "dump" / str(step) / "root.layers.1" / "output.pth", weights_only=True
            ),
            made[step],
        )
    whole = tmp_path / "dump" / "1" / "root"
    assert sorted(p.name for p in whole.iterdir()) == [
        "input_0.pth",
        "output_0.pth",
        "output_1_0.pth",
        "output_1_1.pth",
    ]
    assert torch.equal(torch.load(whole / "output_1_1.pth", weights_only=True), out[1][1])
    left = {why: len(names) for why, names in written.left_out.items()}
    assert left == {
        "called again in the same token": 2,
        "a keyword input, a named output, or changed in place": 2,
    }
    tree = json.loads((tmp_path / "dump" / "model_tree.json").read_text())
    assert [kid["name"] for kid in tree["children"][0]["children"]] == [
        "root.layers.0",
        "root.layers.1",
    ]
    assert not whence.compare(tmp_path / "dump", tmp_path / "dump").findings
