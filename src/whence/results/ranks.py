"""What the ranks of one run must agree in, and whether they do."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from whence.display import Described


class RankVerdict(StrEnum):
    """What a check says, the worst last."""

    NOTHING = "nothing to check"
    FINE = "fine"
    WARNING = "warning"
    UNKNOWN = "cannot tell"
    FAULT = "fault"


class RankCheckKind(StrEnum):
    """What is checked."""

    REPLICAS = "replicas"
    COLLECTIVES = "collectives"
    ROWS = "rows"
    DRAWS = "random numbers"
    SETTINGS = "settings"


class RankCause(StrEnum):
    """Why ranks part, as far as the run shows it. In one step, what stands first here leads to the
    rest.
    """

    OTHER_START = "other start"
    CHANGED = "changed outside of the optimizer"
    OTHER_SEQUENCE = "other sequence"
    MIXED_UP = "mixed up"
    SAME_ROWS = "same rows"
    OTHER_SEED = "other seed"
    OTHER_SETTING = "other setting"
    OTHER_GROUP = "other group"
    NOT_REDUCED = "not reduced"
    OTHER_STATE = "other state"
    OTHER_STEP = "other step"
    NOT_SYNCHRONISED = "not synchronised"
    NOT_JOINED = "not joined"
    OTHER_COUNT = "other count"
    SAME_SEED = "same seed"


class RankFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something in which ranks part, where it is first seen. scope, tensor: of what; "" of what is
    no tensor. tensors: how many part there. step: -1 before the first.
    """

    check: RankCheckKind
    verdict: RankVerdict
    cause: RankCause
    sentence: str
    ranks: tuple[int, ...]
    step: int = -1
    scope: str = ""
    tensor: str = ""
    tensors: int = 1
    evidence: tuple[str, ...] = ()


class RankCheck(msgspec.Struct, frozen=True):
    """One check: what it says of how much, and what it found."""

    kind: RankCheckKind
    verdict: RankVerdict
    words: str
    findings: tuple[RankFinding, ...] = ()


class RankGroup(msgspec.Struct, frozen=True):
    """A group of ranks, and how many collectives and messages its ranks issued in it."""

    name: str
    purpose: str
    ranks: tuple[int, ...]
    issued: int


class CollectiveRow(msgspec.Struct, frozen=True):
    """Collectives of one form, as the rank with the most of them issues. fewest, most: in a step;
    before: before the first step. nbytes: in the step with the most.
    """

    kind: str
    op: str
    dtype: str
    ranks: tuple[int, ...]
    purpose: str
    by: str
    before: int
    fewest: int
    most: int
    nbytes: int


class RankReport(Described, msgspec.Struct, frozen=True):
    """The ranks of one run: their groups, what they send, and the checks. meshes: as DTensors state
    them, in words. steps: how many were seen. ended: what the run lacks (its end, ranks), ""
    where it is whole.
    """

    run: str
    ranks: tuple[int, ...]
    steps: int
    groups: tuple[RankGroup, ...]
    meshes: tuple[str, ...]
    collectives: tuple[CollectiveRow, ...]
    checks: tuple[RankCheck, ...]
    ended: str = ""

    @property
    def findings(self) -> tuple[RankFinding, ...]:
        """What was found: faults first, in the order of steps, causes before what they lead to."""
        found = [finding for check in self.checks for finding in check.findings]
        order, causes = list(RankVerdict), list(RankCause)
        return tuple(
            sorted(found, key=lambda f: (-order.index(f.verdict), f.step, causes.index(f.cause)))
        )

    @property
    def verdict(self) -> RankVerdict:
        """The worst of all checks; of a run that is not whole, no pass."""
        order = list(RankVerdict)
        least = RankVerdict.UNKNOWN if self.ended else RankVerdict.NOTHING
        return max((least, *(check.verdict for check in self.checks)), key=order.index)
