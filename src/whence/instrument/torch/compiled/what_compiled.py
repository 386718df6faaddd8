"""What a program compiled on a rung, as a note of its run. Needs no torch."""

from __future__ import annotations

import msgspec

from whence.instrument.session import Session
from whence.records import Run

NOTE = "rung"
"""Kind of the note in which a run says what it compiled."""


class Compiled(msgspec.Struct, frozen=True):
    """What a program compiled.

    requests: times something was given to `torch.compile`; backends: that it named; graphs, breaks:
    graphs that dynamo made, and reasons for which it broke off.
    """

    rung: str
    requests: int = msgspec.field(name="asked")
    backends: tuple[str, ...]
    graphs: int
    breaks: int


def note(session: Session, compiled: Compiled) -> None:
    """Leave a note of what was compiled, in a run that holds something."""
    if session.active and (compiled.requests or session.calls):
        session.note(NOTE, msgspec.json.encode(compiled).decode())


def of_run(run: Run) -> list[Compiled]:
    """What the processes of a run compiled."""
    return [msgspec.json.decode(n.text, type=Compiled) for n in run.notes if n.kind == NOTE]
