"""Models that route tokens to experts: rounding may route a token elsewhere where two scores are
nearly tied, and the resulting difference is larger than rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from whence.records.run import Note, Run

EXPERTS = "experts"
"""Kind of the note of a capture without modules whose model has experts."""
_NOTE = "it sends tokens to experts, and logits alone do not show to which"
_NAMES = re.compile(
    r"(?i:expert|router)|MoE|Moe(?=[A-Z]|$)|(?:^|[._])moe(?:[._]|$)|(?:^|_)moe(?=_|$)"
)


def names_experts(names: Iterable[str]) -> bool:
    """Whether one of these names of modules or types indicates experts."""
    return any(map(_NAMES.search, names))


def note_of_experts(modules: Iterable[tuple[str, object]], root: str) -> Note | None:
    """Returns the note for a capture that records no module; None where no module has experts.
    modules: those of the model, by name; root: name of the model.
    """
    names = (text for name, module in modules for text in (name, type(module).__name__))
    return Note(EXPERTS, _NOTE, root) if names_experts(names) else None


def has_experts(run: Run) -> bool:
    """Whether the run's model routes tokens to experts, according to its notes and
    names of calls.
    """
    return any(note.kind == EXPERTS for note in run.notes) or names_experts(
        {name for call in run.calls for name in (call.op_type, call.scope)}
    )
