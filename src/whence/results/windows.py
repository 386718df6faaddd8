"""A comparison by windows of steps: what each of them said."""

from __future__ import annotations

import msgspec


class ComparedWindow(msgspec.Struct, frozen=True):
    """The answer about one window of two runs.

    window: its number. first_step, last_step: of its calls; -1 where it has none. calls: of the
    reference, paired: of these. first: name of the first finding, or of what is undecided. error:
    the largest at the outputs of the models, as relative 2-norm; None where nothing differs or it
    could not be measured. kept: are its tensors still there? seconds: that its comparison took.
    """

    window: int
    first_step: int
    last_step: int
    status: str
    calls: int
    paired: int
    identical: int
    findings: int
    first: str = ""
    error: float | None = None
    kept: bool = True
    seconds: float = 0.0
