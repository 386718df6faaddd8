"""What the compiled graphs of a process returned, as digests in a file: by them a captured program
is held against the same program without a capture. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

FOLDER = "WHENCE_RETURNED"
"""Variable of the environment: the folder for these files; nothing is noted without it."""
OFF = "WHENCE_SWITCHED_OFF"
"""Variable of the environment: names of `inductor_taps.SWITCHES`, joined by commas, that are off in
a program that runs without a capture.
"""


class Execution(msgspec.Struct, frozen=True, array_like=True):
    """One execution of a graph. graph: number in `Returned.graphs`. backward: what is digested are
    the gradients of its inputs, else what it returned and left in its inputs.
    """

    graph: int
    backward: bool
    digest: str


class Returned(msgspec.Struct, frozen=True):
    """What one process computed in compiled graphs.

    rank: of the process. graphs: in the order in which they were compiled. executions: the first of
    them; whole: a digest of all `count`. switched: names of `SWITCHES` that a capture turned off.
    problem: why some of it could not be digested.
    """

    rank: int
    graphs: tuple[str, ...]
    executions: tuple[Execution, ...]
    count: int
    whole: str
    switched: tuple[str, ...] = ()
    problem: str = ""


def environment(folder: Path, off: tuple[str, ...] = ()) -> dict[str, str]:
    """What the environment of a command must hold for its processes to leave these files."""
    return {FOLDER: str(folder), **({OFF: ",".join(off)} if off else {})}


def asked(variables: Mapping[str, str] = os.environ) -> tuple[Path, tuple[str, ...]] | None:
    """(the folder, what is off) that this process was asked for, None where it was not."""
    if not variables.get(FOLDER):
        return None
    return Path(variables[FOLDER]), tuple(filter(None, variables.get(OFF, "").split(",")))


def read(folder: Path) -> list[Returned]:
    """What the processes of a command left, by rank and content: process numbers mean nothing."""
    left = [msgspec.json.decode(file.read_bytes(), type=Returned) for file in folder.glob("*.json")]
    return sorted(left, key=lambda r: (r.rank, r.graphs, r.whole))
