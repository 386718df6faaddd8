"""The observer effect of a capture: results with capture compared with results without."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from whence.records.run import Run

SETTING = "bare"
"""Name of the setting of a run that holds its `Observed`."""
SWITCHED = "switched"
"""Kind of the note that lists the settings of the program that a capture changed to see inside."""


class Effect(StrEnum):
    """What a run of the same command without a capture shows about a captured one, in words."""

    NONE = "none"
    CHANGED = "being watched changed the result"
    UNMEASURED = "not measured against the program without a capture"
    OUT_OF_REACH = "not measured against the program without the capture that its code asks for"


class Observed(msgspec.Struct, frozen=True):
    """An effect with its reason. why: extent of the measurement, what differs first, or why nothing
    could be measured.
    """

    effect: Effect
    why: str

    @property
    def words(self) -> str:
        """Effect and reason in one sentence."""
        return f"{self.effect}: {self.why}"

    @property
    def is_doubt(self) -> bool:
        """Whether the program may compute other results without the capture."""
        return self.effect in (Effect.CHANGED, Effect.UNMEASURED)


_NOT_YET = "whence run did not come to it"
_IN_CODE = "whence run --level graph -- COMMAND measures it"


def observed(run: Run) -> Observed | None:
    """Returns the effect of the capture on a run; None where its capture changed no setting, or the
    version that wrote it did not record that.
    """
    kept = run.info.settings.get(SETTING)
    if kept is not None:
        try:
            return msgspec.convert(kept, Observed)
        except msgspec.ValidationError:
            return Observed(Effect.UNMEASURED, "what its run.json says of it cannot be read")
    if any(note.kind == SWITCHED for note in run.notes):
        return Observed(
            Effect.UNMEASURED if run.info.interpreter else Effect.OUT_OF_REACH,
            _NOT_YET if run.info.interpreter else _IN_CODE,
        )
    return None
