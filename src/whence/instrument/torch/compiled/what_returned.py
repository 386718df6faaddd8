"""Results of the compiled graphs of a process, as digests in a file: they allow to compare a
captured program with the same program without a capture. Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

FOLDER = "WHENCE_RETURNED"
"""Environment variable with the folder for these files; without it nothing is noted."""
OFF = "WHENCE_SWITCHED_OFF"
"""Environment variable with names of `inductor_taps.SWITCHES`, joined by commas, that are off in a
program without a capture.
"""


class Execution(msgspec.Struct, frozen=True, array_like=True):
    """One execution of a graph. graph: index in `Returned.graphs`. backward: whether the digest is
    of the gradients of its inputs, else of what it returned and changed in its inputs.
    """

    graph: int
    backward: bool
    digest: str


class Returned(msgspec.Struct, frozen=True):
    """What one process computed in compiled graphs.

    rank: of the process. graphs: in order of compilation. executions: the first ones; whole: a
    digest of all `count` executions. switched: names of `SWITCHES` that a capture turned off.
    problem: why some results have no digest.
    """

    rank: int
    graphs: tuple[str, ...]
    executions: tuple[Execution, ...]
    count: int
    whole: str
    switched: tuple[str, ...] = ()
    problem: str = ""


def environment(folder: Path, off: tuple[str, ...] = ()) -> dict[str, str]:
    """Environment variables that make the processes of a command write these files."""
    return {FOLDER: str(folder), **({OFF: ",".join(off)} if off else {})}


def asked(variables: Mapping[str, str] = os.environ) -> tuple[Path, tuple[str, ...]] | None:
    """(folder, names of switches that are off) as requested in the environment of this process;
    None without a request.
    """
    if not variables.get(FOLDER):
        return None
    return Path(variables[FOLDER]), tuple(filter(None, variables.get(OFF, "").split(",")))


def read(folder: Path) -> list[Returned]:
    """What the processes of a command wrote, sorted by rank and content, since process ids have no
    meaning.
    """
    left = [msgspec.json.decode(file.read_bytes(), type=Returned) for file in folder.glob("*.json")]
    return sorted(left, key=lambda r: (r.rank, r.graphs, r.whole))
