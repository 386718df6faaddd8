"""What a program compiled on a rung, stored as a note of its run. Does not import torch."""

from __future__ import annotations

import msgspec

from whence.instrument.session import Session
from whence.records import Run
from whence.results import GraphOperator

NOTE = "rung"
"""Kind of the note in which a run says what it compiled."""


class Compiled(msgspec.Struct, frozen=True):
    """What a program compiled.

    requests: number of things given to `torch.compile`; backends: that the program named; graphs,
    breaks: number of graphs that dynamo made, and of reasons for graph breaks.
    """

    rung: str
    requests: int = msgspec.field(name="asked")
    backends: tuple[str, ...]
    graphs: int
    breaks: int
    operators: tuple[GraphOperator, ...] = ()
    values: tuple[str, ...] = ()


def note(session: Session, compiled: Compiled) -> None:
    """Leave a note of what was compiled, in a run that holds something."""
    if session.active and (compiled.requests or session.calls):
        session.note(NOTE, msgspec.json.encode(compiled).decode())


def of_run(run: Run) -> list[Compiled]:
    """What the processes of a run compiled."""
    return [msgspec.json.decode(n.text, type=Compiled) for n in run.notes if n.kind == NOTE]
