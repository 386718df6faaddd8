"""The scripted agent names what was planted, reading only JSON."""

import json
import sys
from pathlib import Path

import pytest

import warm

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
agent = pytest.importorskip("agent")
pytest.importorskip("torch", reason="captures a torch program")


@pytest.mark.parametrize("fault", ["weight", "scale", "cap"])
def test_an_agent_names_the_module(fault, tmp_path, monkeypatch):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(agent.sys, "executable", warm.TORCH)
    monkeypatch.setattr(sys, "argv", ["agent.py", "--only", fault, "--json", str(figures)])
    agent.main()
    (row,) = json.loads(figures.read_text())
    assert row["right"] and row["calls"] <= agent.CALLS
    assert row["characters"] < 20_000
