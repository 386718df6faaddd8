"""Which call and which tensor of one run corresponds to which of the other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from whence.display import Described


class Made(msgspec.Struct, frozen=True, array_like=True):
    """A tensor made from others of its run, so that it has the axes of its partner.

    record: its id, behind those of the run. dims: the expression (docs/alignment.md) over the names
    bound in `operands`, each to records of the run or to made ones. why: the evidence.
    """

    record: int
    dims: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    why: str = ""


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """A call of a root put together from several, or cut from one. pieces: (step, row, first token,
    tokens) of each in its own run.

    side: "reference" or "target". root, step, micro: of the call it became.
    """

    side: str
    root: str
    step: int
    micro: int
    pieces: tuple[tuple[int, int, int, int], ...]


class Parted(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of which only the first `tokens` are paired. reference, target: what comes
    next there, None at its end.

    root, step, micro: of the call of the aligned reference. before: tokens ahead of it in the
    target that the reference has not.
    """

    root: str
    step: int
    micro: int
    tokens: int
    of: int
    reference: int | None
    target: int | None
    before: tuple[int, ...] = ()


class SlotPair(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a call is paired with one of another. dims: how the target's reaches the
    reference's axes, "" when it already does.
    """

    reference_slot: str
    target_slot: str
    reference_record: int
    target_record: int
    dims: str = ""

    @property
    def records(self) -> tuple[int, int]:
        """The reference's record and the target's."""
        return self.reference_record, self.target_record


TENSOR_RULE = "tensor"
"""The rule of pairs that were made because tensors are paired, one of which has no call
(`align.tensors`).
"""


class CallPair(msgspec.Struct, frozen=True):
    """A call of the reference is paired with a call of the target. rule: which rule said so ("exact
    key", "normalised name").

    also: further calls of the target that it is paired with, taken together, or that are part of it
    and have no partner of their own.
    """

    reference: int
    target: int
    rule: str
    evidence: str = ""
    slots: tuple[SlotPair, ...] = ()
    only_reference: tuple[str, ...] = ()
    only_target: tuple[str, ...] = ()
    also: tuple[int, ...] = ()


class Plan(Described, msgspec.Struct, frozen=True, omit_defaults=True):
    """Which calls are paired. Unmatched and ambiguous calls are listed, never dropped.

    Calls and records are those of the aligned runs: where calls were joined or tensors made
    (`made_reference`, `made_target`), ids are not those of the run on disk. notes: what was joined,
    cut or left out, in sentences; joined: of what each such root call consists; parted:
    sequences that are not paired to their ends. padded: tensors of the target that hold the
    reference's padding, each with the tensor as the target had it.
    """

    pairs: Sequence[CallPair]
    unmatched_reference: tuple[int, ...] = ()
    unmatched_target: tuple[int, ...] = ()
    ambiguous: tuple[tuple[int, tuple[int, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    joined: tuple[Joined, ...] = ()
    parted: tuple[Parted, ...] = ()
    made_reference: tuple[Made, ...] = ()
    made_target: tuple[Made, ...] = ()
    padded: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.pairs, list):
            msgspec.structs.force_setattr(self, "pairs", tuple(self.pairs))
