"""A target of named tensors against a reference whose parts are called one after the other, with no
call around them.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import whence  # noqa: E402

pytestmark = pytest.mark.torch
WIDTH = 12


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = (
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Parts(torch.nn.Module):
    """Never called itself: an engine calls its parts."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Block(), Block()
        self.head = torch.nn.Linear(WIDTH, 5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    torch.manual_seed(0)
    parts, x = Parts().eval(), torch.randn(7, WIDTH)
    path = tmp_path_factory.mktemp("roots") / "reference"
    with torch.no_grad(), whence.capture(parts, path):
        encoded = parts.encoder(x)
        decoded = parts.decoder(encoded)
        scores = parts.head(decoded)
    assert len({c.id for c in whence.open_run(path).calls if c.parent == -1}) == 3
    return path, {
        "x": x.numpy(),
        "encoded": encoded.numpy(),
        "decoded": decoded.numpy(),
        "scores": scores.numpy(),
    }


def shown(arrays, names, wrong=""):
    return {name: arrays[name] * np.float32(1.02 if name == wrong else 1) for name in names}


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (("scores",), "scores"),
        (("decoded",), "decoded"),
        (("x", "scores"), "scores"),
        (("x", "encoded", "scores"), "scores"),
        (("encoded", "decoded", "scores"), "encoded"),
        (("x", "encoded", "decoded", "scores"), "encoded"),
        (("x", "encoded", "decoded", "scores"), "decoded"),
    ],
)
def test_a_wrong_tensor_is_never_the_same(reference, names, wrong, replay):
    path, arrays = reference
    result = whence.compare(path, shown(arrays, names, wrong), replay=replay)
    assert result.status == "different" if replay else result.status != "same"
    assert all(f.name for f in result.findings)


def test_what_lies_in_several_roots_is_named_by_first_and_last(reference):
    path, arrays = reference
    (finding,) = whence.compare(path, shown(arrays, ("scores",), "scores")).findings
    first, _, last = finding.name.partition("..")
    assert "encoder" in first or "Block" in first
    assert "head" in last or "Linear" in last


def test_the_output_of_one_root_is_not_judged_as_the_input_of_the_next(reference):
    path, arrays = reference
    result = whence.compare(path, shown(arrays, ("x", "encoded", "decoded", "scores"), "encoded"))
    (finding,) = result.findings
    assert "encoder" in finding.name or finding.name == "Block"


@pytest.mark.parametrize(
    "names", [("scores",), ("encoded",), ("x", "scores"), ("x", "encoded", "decoded", "scores")]
)
@pytest.mark.parametrize("replay", [True, False])
def test_right_tensors_are_no_fault(reference, names, replay):
    path, arrays = reference
    result = whence.compare(path, shown(arrays, names), replay=replay)
    assert (result.status != "different", result.findings) == (True, ())


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())


class Port(torch.nn.Module):
    """Another model, as the new one beside the old one in the script of a port."""

    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.part(x) * 1.5


def test_a_model_that_only_one_side_ran_is_no_pass(tmp_path):
    """The model beside it pairs and is bitwise equal, which says nothing of this one."""
    torch.manual_seed(0)
    both = torch.nn.ModuleDict({"net": Net(), "port": Port(), "loss": torch.nn.MSELoss()}).eval()
    x = torch.randn(4, WIDTH)
    ran = {"alone": ["net"], "beside": ["net", "port"]}
    for name, models in ran.items():
        with torch.no_grad(), whence.capture(both, tmp_path / name):
            for model in models:
                both[model](x)
    with torch.no_grad(), whence.capture(both, tmp_path / "with_loss"):
        y = both["net"](x)
        both["loss"](y, x)
    alone = tmp_path / "alone"
    result = whence.compare(alone, tmp_path / "beside")
    assert result.status == "undecided"
    assert "only the target ran Port" in result.headline
    assert whence.compare(tmp_path / "beside", alone).status == "undecided"
    assert whence.compare(alone, tmp_path / "with_loss").status == "same", "a loss is no model"
    assert whence.compare(tmp_path / "beside", tmp_path / "beside").status == "same"
