"""Programs with odd ways answer under a capture as without: some of `benchmarks/odd_programs.py`,
each in a fork of this process.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
odd_programs = pytest.importorskip("odd_programs")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("level", ["modules", "op"])
@pytest.mark.parametrize("name", [
    "closerange_3_200", "closed_with_the_standard_ones", "dup2_all", "each_time_take",
    "closed_in_a_hook_backward", "sockets_at_our_numbers", "limited_16_after", "lowest_number",
    "inherited_by_children", "forks_take", "forks_without_python", "stderr_is_a_file",
    "reference_counts", "a_second_backward_foreach", "lists_change_inside", "memory_is_replaced",
])  # fmt: skip
def test_a_program_answers_as_without_a_capture(name, level, tmp_path):
    bare, _ = odd_programs.run(name, None, tmp_path / "bare")
    captured, said = odd_programs.run(name, level, tmp_path / level)
    assert odd_programs.differs(bare, captured) == []
    assert "calls" in said
