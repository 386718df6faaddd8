"""Models that send tokens to experts: rounding may send one elsewhere where two scores are nearly
tied, and what it becomes then is no rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from whence.records.run import Note, Run

EXPERTS = "experts"
"""Kind of the note of a capture that sees no modules, and a model that has such."""
_NOTE = "it sends tokens to experts, and logits alone do not show to which"
_NAMES = re.compile(
    r"(?i:expert|router)|MoE|Moe(?=[A-Z]|$)|(?:^|[._])moe(?:[._]|$)|(?:^|_)moe(?=_|$)"
)


def names_experts(names: Iterable[str]) -> bool:
    """Does one of these names of modules or types say that tokens are sent to experts?"""
    return any(map(_NAMES.search, names))


def note_of_experts(modules: Iterable[tuple[str, object]], root: str) -> Note | None:
    """The note for a capture that looks at no module, None where no module is of experts. modules:
    those of the model, by name; root: name of the model.
    """
    names = (text for name, module in modules for text in (name, type(module).__name__))
    return Note(EXPERTS, _NOTE, root) if names_experts(names) else None


def has_experts(run: Run) -> bool:
    """Does the run's model send tokens to experts, as far as its notes and names of calls say?"""
    return any(note.kind == EXPERTS for note in run.notes) or names_experts(
        {name for call in run.calls for name in (call.op_type, call.scope)}
    )
