"""Whether a program repeats itself, and what in it does not."""

from __future__ import annotations

import msgspec

from whence.display import Described
from whence.results.verdict import Status, Word


class SourceKind(Word):
    """What differs between two runs of one program before anything that follows from it."""

    INPUT = "input"
    """Data that the program hands to a model or a loss."""
    ARGUMENT = "argument"
    """A value beside the tensors that a call is given."""
    STATE = "state"
    """A parameter, a buffer or a state that no captured call made."""
    RANDOM = "random numbers"
    """A call draws random numbers, and the inputs are equal."""
    CODE = "code"
    """A call runs other operators, or the same ones with other numbers."""
    OPERATOR = "operator"
    """A call runs the same operators on equal inputs, and its output differs."""
    CALLS = "calls"
    """A call that only one of the runs makes."""


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where two runs of one program differ although all that it was made from is equal.

    scope, op_type, phase, step, rank, order: of the call. slot: the tensor that differs; of what a
    container's own code hands to a child "K:input.0". operator: of the call's program, "" where it
    is not known. line: where the program calls it. words: what differs. error: relative 2-norm
    of the difference, None where it is not defined. differing: elements that differ, of `count`.
    calls: how many calls of this module differ so. repeats_with: what makes it repeat, each a
    sentence. is_certain: False where a call draws random numbers, and nothing tells whether these
    differ or an operator in it.
    """

    kind: SourceKind
    scope: str
    root: str
    op_type: str
    slot: str
    step: int
    rank: int
    order: int
    words: str
    phase: str = "forward"
    operator: str = ""
    line: str = ""
    error: float | None = None
    differing: int = 0
    count: int = 0
    calls: int = 1
    repeats_with: tuple[str, ...] = ()
    is_certain: bool = True


class TouchedGradient(msgspec.Struct, frozen=True):
    """The gradients of parameters of the first step where one differs. share: part of the squared
    2-norm of all gradients that lies in those that differ. error: relative 2-norm of the difference
    of all of them, None where elements are missing. differing: parameters, of `count`.
    """

    step: int
    share: float
    error: float | None
    differing: int
    count: int


class StepLoss(msgspec.Struct, frozen=True):
    """The loss of one step in the two runs; None where it is not a number."""

    step: int
    first: float | None
    second: float | None


class Repeated(Described, msgspec.Struct, frozen=True):
    """Whether runs of one program are equal bit for bit.

    status: same, different, or undecided, where something was not compared. runs: where they lie,
    () where they were not kept. groups: numbers of runs that are equal to each other, from 1. pair:
    the two runs, from 1, that all that follows is about. sources: what differs first, then what
    differs beside it. tensors, calls: compared. uncompared: tensors of which nothing tells whether
    they are equal. why: why the answer is undecided. losses: of the first step where it differs,
    and of the last. end: name and relative 2-norm of what the last step leaves. next: a command
    that would show more. steps: that were captured, "" for all.
    """

    command: tuple[str, ...]
    status: Status
    runs: tuple[str, ...]
    times: int
    groups: tuple[tuple[int, ...], ...]
    pair: tuple[int, int]
    sources: tuple[Source, ...]
    tensors: int
    calls: int
    uncompared: int
    why: tuple[str, ...] = ()
    gradient: TouchedGradient | None = None
    losses: tuple[StepLoss, ...] = ()
    end: tuple[str, float | None] = ("", None)
    next: str = ""
    steps: str = ""

    @property
    def first(self) -> Source | None:
        """What differs first; None where nothing does."""
        return next(iter(self.sources), None)
