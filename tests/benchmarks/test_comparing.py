"""The benchmark of comparisons compares what it says: both dtypes on the same tokens."""

import functools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
comparing = pytest.importorskip("comparing")


def test_both_runs_read_the_same_tokens(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparing, "Model", functools.partial(comparing.Model, 97, 32, 48))
    monkeypatch.setattr(comparing, "VOCABULARY", 97)
    monkeypatch.setattr(comparing, "FORWARDS", 1)
    monkeypatch.setattr(comparing, "TOKENS", 4)
    monkeypatch.setattr(comparing, "ROUNDS", 1)
    monkeypatch.setattr(sys, "argv", ["comparing.py", "--json", str(tmp_path / "figures.json")])
    comparing.main()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["exit"] == 0 and figures["answer"].startswith("SAME")
    assert figures["ratio"] > figures["ratio_without_import"] > 0
    assert "how sure" in capsys.readouterr().out
