"""Which module made the logits of a capture of logits alone: a model may scale or cap what its last
module returns before it returns it itself.
"""

from __future__ import annotations

from whence.records.run import Note, Run

LAST_LAYER = "re:[^.]+"
"""Pattern of `logits_module`: the last module that the model itself calls, where what it returns is
as wide as what the model returns.
"""
_MADE_BY = "logits-module"


def note_of_maker(scope: str, root: str) -> Note:
    """The note that the logits of `root` are what its module `scope` returned."""
    return Note(_MADE_BY, f"the logits of {root} are what its {scope} returned", scope)


def maker_of(run: Run) -> str:
    """The module whose output a run of logits alone holds; "" for what the model returned."""
    return next((note.scope for note in run.notes if note.kind == _MADE_BY), "")
