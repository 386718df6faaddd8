"""Damaged faulty pairs: one of each kind passes for nothing."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
false_comfort = pytest.importorskip("false_comfort")


def test_no_damage_makes_a_faulty_pair_pass(tmp_path):
    reference = false_comfort.capture(tmp_path / "ref", "mlp", 0)
    target = false_comfort.capture(tmp_path / "tgt", "mlp", 0, "scaled")
    cases = list(false_comfort.cases(len(false_comfort.lines_of(reference)), random.Random(0)))
    first = {case.kind: case for case in reversed(cases)}
    assert len(cases) >= 50 and len(first) == 8
    for case in first.values():
        status, said = false_comfort.judged(case, reference, target, tmp_path / "scratch")
        assert status != "same", (case.kind, case.name, said)
