"""`whence mcp`: an agent finds a planted fault by the tools alone; answers are bounded, errors are
errors of the protocol.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import inside
import whence
from whence.cli import mcp as tools
from whence.errors import UnreadableRun, UsageError

INFER = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).eval()
if "--broken" in sys.argv:
    model[2].eps = 0.5
with torch.no_grad():
    print(model(torch.randn(4, 16)).sum().item())
"""


# -- answers of a bounded size ----------------------------------------------------------------------------------------


def test_small_answers_are_as_they_are():
    assert json.loads(tools.bounded({"a": [1, 2], "b": "x" * 500})) == {"a": [1, 2], "b": "x" * 500}
    assert json.loads(tools.bounded({"a": [1]}, {"calls": 7})) == {
        "a": [1],
        "omitted": {"calls": 7},
    }


def test_the_largest_lists_are_cut_and_counted():
    data = {
        "status": "different",
        "findings": [
            {"name": f"layers.{i}", "also": [f"x{j}" for j in range(50)]} for i in range(99)
        ],
        "few": [1, 2, 3],
        "omitted": {"findings": 1},
    }
    text = tools.bounded(data, limit=5000)
    assert len(text.encode()) <= 5000
    cut = json.loads(text)
    assert (cut["status"], cut["few"]) == ("different", [1, 2, 3])
    assert cut["findings"][0]["name"] == "layers.0", "the first stays"
    assert len(cut["findings"]) + cut["omitted"]["findings"] == 100
    assert cut["findings"][0]["also"][0] == "x0"


def test_long_texts_are_cut_last():
    text = tools.bounded({"list": list(range(100)), "printed": "ä" * 30_000}, limit=4000)
    cut = json.loads(text)
    assert len(text.encode()) <= 4000
    assert cut["printed"].endswith("…")
    assert cut["omitted"]["printed"] > 20_000


def test_numbers_that_json_does_not_have():
    assert json.loads(tools.bounded({"a": float("nan"), 3: float("inf")})) == {"a": None, "3": None}


# -- the tools --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, by in (("ref", 1.0), ("tgt", 1.5)):
        with whence.recording(name) as run:
            run.add("first", np.arange(12, dtype=np.float32))
            run.add("second", np.arange(12, dtype=np.float32) * by)
    return tmp_path


def test_compare_and_show_answer_as_the_commands_do(folder):
    answer = json.loads(tools.compare("ref", "tgt", output="cmp"))
    assert answer["status"] == "different"
    assert answer["findings"][0]["name"] == "second"
    printed = inside.whence(folder, "compare", "ref", "tgt", "--format", "json").stdout
    assert {*json.loads(printed)} == {*answer}
    assert (folder / "cmp" / "report.json").exists()
    shown = json.loads(tools.show("ref"))
    assert [call["name"] for call in shown["calls"]] == ["first", "second"]
    one = json.loads(tools.show("ref", "first"))
    assert one == json.loads(
        inside.whence(folder, "show", "ref", "first", "--format", "json").stdout
    )
    assert json.loads(tools.trace("cmp", "second"))


def test_a_long_run_is_shown_in_part(tmp_path):
    with whence.recording(tmp_path / "long") as run:
        for number in range(300):
            run.add(f"layers.{number}.attention.output", np.ones(3, np.float32))
    text = tools.show(str(tmp_path / "long"))
    assert len(text.encode()) <= tools.LIMIT
    shown = json.loads(text)
    assert shown["calls"][0]["name"] == "layers.0.attention.output"
    assert len(shown["calls"]) + shown["omitted"]["calls"] == 300


def test_errors_are_those_of_the_commands(folder):
    with pytest.raises(UnreadableRun, match="check the spelling"):
        tools.compare("ref", "nowhere")
    with pytest.raises(UsageError, match="no call named"):
        tools.show("ref", "thrid")
    with pytest.raises(UsageError, match="close the quote"):
        tools.capture("python 'infer.py", "captured")
    with pytest.raises(UnreadableRun, match="is a run, not a comparison"):
        tools.repro("new", "ref")


def test_without_the_package_it_says_what_to_install(tmp_path):
    check = (
        "import sys; sys.modules['mcp'] = None; from whence import cli; "
        "raise SystemExit(cli.execute(['mcp']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "whence mcp needs mcp, which is not installed here: pip install 'mcp" in done.stderr


# -- the server -------------------------------------------------------------------------------------------------------


async def talk(folder):
    """What an agent does: capture twice, compare, show, trace, repro, and one mistake."""
    from mcp import Client, StdioServerParameters

    server = StdioServerParameters(
        command=sys.executable, args=["-m", "whence", "mcp"], env={**os.environ}, cwd=str(folder)
    )
    answers = {}
    async with Client(server) as client:
        answers["tools"] = {tool.name: tool for tool in (await client.list_tools()).tools}

        async def call(key, tool, **arguments):
            result = await client.call_tool(tool, arguments)
            answers[key] = (result.is_error, result.content[0].text)

        python = sys.executable
        await call("ref", "capture", command=f"{python} infer.py", output="ref")
        await call("tgt", "capture", command=f"{python} infer.py --broken", output="tgt")
        await call("compare", "compare", reference="ref", target="tgt", output="cmp")
        await call("show", "show", run="ref", name="2")
        await call("trace", "trace", comparison="cmp")
        await call("repro", "repro", output="repro")
        await call("wrong", "compare", reference="ref", target="nowhere")
        await call("failed", "capture", command=[python, "nofile.py"], output="none")
        await call("mistyped", "compare", reference=3)
        await call("unknown", "diff", reference="ref")
    return answers


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the client and what it is built on
def test_an_agent_finds_the_fault(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("mcp", reason="pip install 'mcp>=2'")
    (tmp_path / "infer.py").write_text(INFER)
    answers = asyncio.run(talk(tmp_path))
    assert {*answers["tools"]} == {"capture", "compare", "show", "trace", "repro"}
    for name, tool in answers["tools"].items():
        assert tool.description.startswith(getattr(tools, name).__doc__.split(".")[0])
        assert "output" in tool.input_schema["properties"] or name in ("show", "trace")
    parsed = {
        key: json.loads(answer[1])
        for key, answer in answers.items()
        if key not in ("tools", "wrong", "mistyped", "unknown")
    }
    assert not any(answers[key][0] for key in parsed)
    assert parsed["ref"]["exit_code"] == 0
    assert "captured 1 step" in parsed["ref"]["captured"][-1]
    assert float(parsed["ref"]["printed"])
    finding = parsed["compare"]["findings"][0]
    assert (parsed["compare"]["status"], finding["name"]) == ("different", "2")
    assert parsed["compare"]["next"]
    assert parsed["show"]["call"]["number"] == "2"
    assert parsed["trace"]["steps"]
    assert parsed["repro"]["holds"] is True
    assert Path(tmp_path / "repro" / "repro.py").is_file()
    errors = {key: json.loads(answers[key][1]) for key in ("wrong", "mistyped", "unknown")}
    assert all(answers[key][0] for key in errors)
    assert errors["wrong"]["kind"] == "UnreadableRun"
    assert errors["wrong"]["error"].startswith("no run at nowhere")
    assert {*errors["mistyped"]["arguments"]} == {"reference", "target"}
    assert errors["mistyped"]["error"].startswith("compare: reference: Input should be")
    assert "the tools are capture, compare, show" in errors["unknown"]["error"]
    assert parsed["failed"]["exit_code"] == 2
    assert parsed["failed"]["run"] == ""
    assert "nofile.py" in parsed["failed"]["printed"]
