"""What sessions of a program were optimised with on a rung, as a note of its run. Needs no
onnxruntime.
"""

from __future__ import annotations

import msgspec

from whence.instrument.session import Session
from whence.records import Run

NOTE = "optimised"
"""Kind of the note in which a run says how its sessions were optimised."""


class Optimized(msgspec.Struct, frozen=True):
    """How the sessions of a process were optimised.

    rung: "" for the level that the program asks for. levels: rungs that the release has.
    optimizers: that changed a graph, in the order in which they first did; rules are named by the
    transformer that applies them. ort_format: files in the runtime's own format, which hold a graph
    that was optimised when they were written.
    """

    rung: str
    sessions: int
    levels: tuple[str, ...]
    optimizers: tuple[str, ...]
    ort_format: tuple[str, ...]


def note(session: Session, optimized: Optimized) -> None:
    """Leave a note of how sessions were optimised, in a run that has some."""
    if session.active and optimized.sessions:
        session.note(NOTE, msgspec.json.encode(optimized).decode())


def of_run(run: Run) -> list[Optimized]:
    """How the sessions of the processes of a run were optimised."""
    return [msgspec.json.decode(n.text, type=Optimized) for n in run.notes if n.kind == NOTE]
