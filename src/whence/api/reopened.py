"""The two runs of a comparison that was made, face to face again as they were then."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whence import align
from whence.api import printed, statics
from whence.api.comparing import CompareOptions, brought_face_to_face
from whence.api.labelled import plain
from whence.api.results import load_policy
from whence.api.runs import open_run
from whence.errors import UnreadableRun
from whence.results import Comparison

if TYPE_CHECKING:
    from whence.api.modelling import Models


def reopened(compared: Comparison, model: Models | None = None) -> tuple[align.Aligned, CompareOptions]:
    """Both runs and their plan, and the options they were compared with as far as these were written down.

    model: as `compare` takes it. Raises UnreadableRun when a run is not where it was.
    """
    asked = compared.asked
    for path in (compared.reference, compared.target):
        if not Path(path).exists():
            raise UnreadableRun(f"{path} is not there; run this where whence compare was run, or compare the runs again where they are now")
    options = CompareOptions(
        allow=tuple(asked.get("allow", ())), match=asked.get("match", "auto"),
        chart=align.load_map(asked["mapping"]) if "mapping" in asked else None,
        policy=load_policy(asked["policy"]) if "policy" in asked else None, model=model,
    )  # fmt: skip
    left, right = open_run(compared.reference), open_run(compared.target)
    left, right, _ = statics.laid(left, right, statics.programs(compared.program_files or None, open_run))
    left, right, _ = plain(*printed.alike(*statics.agreed(left, right)))
    _, _, aligned = brought_face_to_face(left, right, options)
    return aligned, options
