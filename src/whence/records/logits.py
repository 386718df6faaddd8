"""Records which module computed the logits of a capture of logits alone: a model may scale or cap
the output of its last module before it returns it.
"""

from __future__ import annotations

from whence.records.run import Note, Run

LAST_LAYER = "re:[^.]+"
"""Pattern of `logits_module`: the last module that the model itself calls, where its output is as
wide as the model's.
"""
_MADE_BY = "logits-module"


def note_of_maker(scope: str, root: str) -> Note:
    """Returns the note that the logits of `root` are the output of its module `scope`."""
    return Note(_MADE_BY, f"the logits of {root} are what its {scope} returned", scope)


def maker_of(run: Run) -> str:
    """Returns the module whose output a run of logits alone holds; "" for the model's
    own output.
    """
    return next((note.scope for note in run.notes if note.kind == _MADE_BY), "")
