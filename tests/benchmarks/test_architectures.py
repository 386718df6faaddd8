"""The benchmark of every architecture, on one of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each type runs in a forked process")
def test_a_type_is_run_in_every_way_and_with_a_fault(tmp_path):
    results = tmp_path / "results.jsonl"
    ran = subprocess.run(
        [sys.executable, "architectures.py", "--only", "^gpt2$", "--results", results],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert {row["way"]: row["grade"] for row in rows} == {
        "float64": "silent",
        "bfloat16": "silent",
        "attention": "silent",
        "twice-the-rows": "silent",
        "rows-turned": "silent",
        "fault": "named",
    }, ran.stdout
