"""Where an error comes from: occurrences of a call, and the way back along the data flow."""

from __future__ import annotations

from typing import Any

import msgspec

from whence.display import Described


class Occurrence(msgspec.Struct, frozen=True):
    """One execution of an operator. number: which of its executions, from 1. call: of the
    reference. rel_l2: of its worst output.
    """

    number: int
    call: int
    name: str
    op_type: str
    step: int
    verdict: str
    rel_l2: float


class Counted(msgspec.Struct, frozen=True):
    """The executions of one operator, by "type" or by "name", in order over all steps.

    count: of the reference; compared: those that could be. equal: how many of these before the
    first that differs; differing: how many differ in any bit. first_difference: the first of these;
    first_significant: the first that rounding does not explain.
    """

    by: str
    name: str
    count: int
    compared: int
    equal: int
    differing: int
    first_difference: Occurrence | None
    first_significant: Occurrence | None


class Occurrences(msgspec.Struct, frozen=True):
    """When operators first differ. first_difference, first_significant: of the whole run; None
    where there is none.
    """

    first_difference: Occurrence | None
    first_significant: Occurrence | None
    rows: tuple[Counted, ...]


class TracedInput(msgspec.Struct, frozen=True):
    """Something an operator read. name: of who wrote it last, or of the parameter or input of the
    model; call: that, -1 for none.

    state: "equal", "within noise", "differs", "not compared", of a label "equal as far as shown".
    """

    slot: str
    name: str
    state: str
    rel_l2: float | None
    call: int


class TracedStep(msgspec.Struct, frozen=True):
    """One operator on the way back. verdict: "not compared" where nobody saw what it made. rel_l2:
    of its worst output.
    """

    call: int
    name: str
    op_type: str
    occurrence: int
    step: int
    verdict: str
    rel_l2: float | None
    inputs: tuple[TracedInput, ...]


class Origin(Described, msgspec.Struct, frozen=True):
    """Where a difference comes from. steps: from the tensor asked for to the operator it ends at,
    `call` of the reference.

    among: operators before it whose output was not compared, any of which may be the one.
    attributes: of the operator; target_attributes: those that are others in the target. labels:
    what its kernel logged. missing: what it read and was not captured, with what to do. outcome:
    "target wrong", "reference wrong", "both within bound: ..", "not asked: ..", "inputs
    insufficient: ..", "equal". sentence: of its verdict.
    """

    steps: tuple[TracedStep, ...]
    call: int
    among: tuple[str, ...] = ()
    attributes: dict[str, Any] = {}
    target_attributes: dict[str, Any] = {}
    labels: tuple[TracedInput, ...] = ()
    missing: tuple[str, ...] = ()
    outcome: str = ""
    sentence: str = ""
    source: str = ""
