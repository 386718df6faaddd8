"""From the first token whose logits are off to the layer: both programs run again. A function of
this process stands in the place of the recorded command.
"""

import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

import whence
from whence import api
from whence.api import compare_layers
from whence.cli import execute
from whence.comparison.answer.next_steps import next_steps
from whence.errors import OutputExists, UnreadableRun, UsageError
from whence.results import Status
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


class Asked(dict):
    """Options by run; factors: of the programs."""

    def __init__(self, factors):
        super().__init__()
        self.factors = factors


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Two runs of logits in the current folder; the options with which they are run again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["generate.py"])  # the command that a capture in code records
    factors = {"reference": 1.0, "target": 1.2}
    options = Asked(factors)

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


def test_texts_that_part_within_rounding_are_decided_by_the_layers(asked):
    """The answer about logits is undecided; the command that it prints decides."""
    undecided = parted(whence.compare("reference", "target"))
    runs = [api.open_run(name) for name in ("reference", "target")]
    lines = [step.command for step in next_steps(undecided, *runs)]
    assert lines[0] == "whence compare reference target --layers layers"
    assert any("--force-tokens runs/reference" in line for line in lines)
    result = compare_layers(undecided, output="layers")
    assert [(f.name, f.step) for f in result.findings] == [("1", 2)]
    assert asked["target"]["steps"] == ":3"


def test_right_layers_do_not_acquit_tokens_that_nothing_compared(asked):
    shutil.rmtree("target")
    generate("target", 1.0, level="logits")
    asked.factors["target"] = 1.0
    result = compare_layers(parted(whence.compare("reference", "target")), output="layers")
    assert result.status == "undecided"
    assert result.headline.startswith("no layer is at fault up to step 2; behind it: ")


def parted(result):
    """The answer if the texts had parted at token 2, within rounding."""
    generation = result.generation
    tokens = tuple(replace(t, verdict="explained") for t in generation.tokens[:3])
    prompts = tuple(replace(p, first=2, outcome="explained") for p in generation.prompts)
    generation = replace(
        generation, tokens=tokens, prompts=prompts, suspect=-1, compared=3, logits_only=True
    )
    return replace(
        result, status=Status.UNDECIDED, findings=(), generation=generation, headline="they part"
    )


def test_an_interrupted_call_goes_on_with_the_run_that_it_left(asked, capsys, monkeypatch):
    logits = whence.compare("reference", "target")
    first, complete = [], Command.capture

    def stopped(program, path, **options):
        if path.name == "target" and not first:
            first.append(path)
            raise KeyboardInterrupt
        complete(program, path, **options)

    monkeypatch.setattr(Command, "capture", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare_layers(logits, output="layers")
    asked.clear()
    assert [f.name for f in compare_layers(logits, output="layers").findings] == ["1"]
    assert list(asked) == ["target"]
    with pytest.raises(OutputExists, match="remove it or name another one"):
        compare_layers(logits, output="layers")


def test_a_run_that_is_older_than_the_logits_is_not_gone_on_with(asked):
    generate("layers/reference", 1.0, keep="full", steps=":3")
    os.utime("reference/run.json")
    with pytest.raises(OutputExists, match="layers is there already"):
        compare_layers(whence.compare("reference", "target"), output="layers")
    assert not asked


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
