"""From the first token whose logits are off to the layer: both programs run again. A function of
this process stands in the place of the recorded command.
"""

from pathlib import Path

import pytest

import whence
from whence import api
from whence.api import compare_layers
from whence.cli import execute
from whence.errors import UnreadableRun, UsageError
from whence.workflows.rerun import Command

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Late(torch.nn.Module):
    """Scales from the third token on."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * (self.factor if x.shape[1] > 3 else 1)


def generate(path, factor, **options):
    torch.manual_seed(0)
    embedding, late = torch.nn.Embedding(16, 8), Late(factor)
    net = torch.nn.Sequential(embedding, late, torch.nn.Linear(8, 16)).eval()
    ids = torch.tensor([[1, 2]])
    with torch.no_grad(), whence.capture(net, path, **options):
        for _ in range(4):
            ids = torch.cat([ids, net(ids)[:, -1:].argmax(-1)], 1)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Two runs of logits in the current folder; the options with which they are run again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["generate.py"])  # the command that a capture in code records
    factors = {"reference": 1.0, "target": 1.2}
    options = {}

    def capture(program, path, **chosen):
        options[path.name] = chosen
        generate(path, factors[path.name], **chosen)

    monkeypatch.setattr(Command, "capture", capture)
    for name, factor in factors.items():
        generate(name, factor, level="logits")
    return options


def test_the_layer_of_the_first_bad_token_is_named(asked):
    logits = whence.compare("reference", "target")
    result = compare_layers(logits, output="层")
    assert [f.name for f in logits.findings] == ["Sequential"]
    assert [(f.name, f.step) for f in result.findings] == [("1", 2)]
    assert asked == {key: {"keep": "full", "steps": ":3"} for key in ("reference", "target")}
    assert {call.step for call in api.open_run("层/target").calls} == {0, 1, 2}


def test_equal_logits_run_nothing_again(asked):
    same = whence.compare("reference", "reference")
    assert compare_layers(same, output="layers") is same
    assert not asked
    assert not Path("layers").exists()


def test_the_command_line_prints_the_answer_of_the_layers(asked, capsys):
    assert execute(["compare", "reference", "target", "--layers", "layers"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("FAULT              1   Late   output.0   step 2, rank 0\n")
    assert "Sequential, step 2" in said.err
    assert execute(["compare", "reference", "target", "--layers", "layers"]) == 3
    assert "layers is there already" in capsys.readouterr().err


def test_what_cannot_be_run_again_is_refused(asked, monkeypatch):
    generate("modules", 1.2)
    with pytest.raises(UsageError, match="these hold the layers"):
        compare_layers(whence.compare("modules", "modules"), output="layers")
    logits = whence.compare("reference", "target")
    monkeypatch.setattr("sys.argv", [""])
    monkeypatch.setattr(Command, "__init__", lambda *_, **__: pytest.fail("it has no command"))
    for name in ("reference", "target"):
        info = Path(name, "run.json")
        info.write_text(info.read_text().replace('"command"', '"no_command"'))
    with pytest.raises(UnreadableRun, match="does not say which command made it"):
        compare_layers(logits, output="layers")
