"""Programs with odd ways answer under a capture as without: some of `benchmarks/odd_programs.py`,
each in a fork of a process that ran nothing else. A fork of pytest's process would have pytest's
stdout and stderr, and what other tests left open.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
ODD_PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "odd_programs.py"
NAMES = [
    "closerange_3_200", "closed_with_the_standard_ones", "dup2_all", "each_time_take",
    "closed_in_a_hook_backward", "sockets_at_our_numbers", "limited_16_after", "lowest_number",
    "inherited_by_children", "forks_take", "forks_without_python", "stderr_is_a_file",
    "reference_counts", "a_second_backward_foreach", "lists_change_inside", "memory_is_replaced",
]  # fmt: skip


@pytest.mark.parametrize("level", ["modules", "op"])
def test_programs_answer_as_without_a_capture(level):
    ran = subprocess.run(
        [sys.executable, ODD_PROGRAMS, "--levels", level, *NAMES],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert f"{len(NAMES)} programs: 0 no run, {len(NAMES)} alike" in ran.stdout, ran.stdout
    assert ran.returncode == 0, ran.stderr
