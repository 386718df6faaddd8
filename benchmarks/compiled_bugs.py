"""Silent bugs of torch.compile on a processor: does `whence ladder` name the stage, and the place?

    python benchmarks/compiled_bugs.py [--planted] [--bisect] [NAME ...]

The programs are in `_compiled/bugs.py`; with --planted, faults planted into the compiler, which are
in `_compiled/planted.py`. One that this torch computes right is "mended" and counts
for nothing. HIDDEN is a bug that the program shows, and its ladder does not: the worst answer.
--bisect also asks torch's bisector for the pass, which names a lowering (some minutes each).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "_compiled"))

import torch
from bugs import BUGS, Bug
from planted import PLANTED, Planted
from torch.utils._pytree import tree_leaves

import whence
from whence.results import Ladder


def shown(bug: Bug) -> bool:
    """Whether compiled and eager differ, in results or in what becomes of the inputs."""
    sides = []
    for program in (bug.program, torch.compile(bug.program)):
        torch.manual_seed(0)
        inputs = bug.inputs()
        sides.append(tree_leaves((program(*inputs), inputs)))
    torch._dynamo.reset()
    return any(
        a.dtype != b.dtype or not torch.allclose(a, b, rtol=1e-3, equal_nan=True)
        for a, b in zip(*sides)
    )


def climbed(bug: Bug, *, bisect: bool) -> Ladder | None:
    """The ladder of a program; None where this torch computes it right."""
    if isinstance(bug, Planted):
        program: Any = bug.program
        made = program if isinstance(program, type) else lambda: program
        with bug.around():
            return whence.ladder(lambda: torch.compile(made(), backend=bug.backend), bug.inputs())
    return whence.ladder(bug.program, bug.inputs(), bisect_pass=bisect) if shown(bug) else None


def tried(bug: Bug, *, bisect: bool) -> tuple[str, str]:
    """(the answer, what the ladder says)."""
    result = climbed(bug, bisect=bisect)
    if result is None:
        return "mended", ""
    named = result.place.operators if result.place is not None else ()
    places = "; ".join(f"{each.source}, {each.code} ({each.operator})" for each in named)
    words = f"{result.stages} {places or result.place}"
    if result.status != "different":
        return ("HIDDEN" if result.status == "same" else "undecided"), words
    if not any(re.fullmatch(bug.stage, stage) for stage in result.stages[:1]):
        return "other stage", words
    return ("stage and place" if re.search(bug.place, places) else "stage"), words


def main() -> None:
    """Prints a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bisect", action="store_true")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers: list[str] = []
    for bug in PLANTED if chosen.planted else BUGS:
        name: Any = bug.name if isinstance(bug, Planted) else bug.program.__name__
        if chosen.names and name not in chosen.names:
            continue
        began = time.process_time()
        answer, words = tried(bug, bisect=chosen.bisect)
        answers.append(answer)
        print(f"{answer:16}{name:26}{time.process_time() - began:5.0f} s  {words}", flush=True)
    shows = [answer for answer in answers if answer != "mended"]
    stages = sum(answer.startswith("stage") for answer in shows)
    places = shows.count("stage and place")
    print(f"{len(shows)} bugs: stage {stages}, place {places}, hidden {shows.count('HIDDEN')}")


if __name__ == "__main__":
    main()
