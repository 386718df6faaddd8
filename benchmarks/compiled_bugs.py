"""Silent bugs of torch.compile on a processor: does `whence ladder` name the stage, and the place?

    python benchmarks/compiled_bugs.py [--bisect] [NAME ...]

The programs are in `_compiled/bugs.py`. One that this torch computes right is "mended" and counts
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
from torch.utils._pytree import tree_leaves

import whence


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


def tried(bug: Bug, *, bisect: bool) -> tuple[str, str]:
    """(the answer, what the ladder says)."""
    if not shown(bug):
        return "mended", ""
    result = whence.ladder(bug.program, bug.inputs(), bisect_pass=bisect)
    named = result.compiler_pass
    words = f"{result.stages} {result.sentence} {named.name if named else ''}"
    if result.status != "different":
        return ("HIDDEN" if result.status == "same" else "undecided"), words
    if not any(re.fullmatch(bug.stage, stage) for stage in result.stages[:1]):
        return "other stage", words
    return ("stage and place" if re.search(bug.place, words) else "stage"), words


def main() -> None:
    """Prints a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bisect", action="store_true")
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers: list[str] = []
    for bug in BUGS:
        name: Any = bug.program.__name__
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
