"""When two trainings part, and where."""

from __future__ import annotations

import msgspec

from whence.display import Described
from whence.results.verdict import Status, Word


class PartKind(Word):
    """What differs at the step where two trainings part, before anything that follows from it."""

    BATCH = "batch"
    """What the program hands to the model."""
    PARAMETER = "parameter"
    """A parameter or buffer that is another one than the optimiser left."""
    STATE = "optimiser state"
    """A state of the optimiser that is another one than its last step left."""
    SETTING = "setting"
    """A learning rate, another hyper-parameter, a limit of clipping, an argument of a call."""
    RANDOM = "random numbers"
    """A call that draws random numbers, and its inputs agree."""
    FORWARD = "forward"
    """What a module makes of inputs that agree."""
    LOSS = "loss"
    """The loss, of outputs of the model that agree."""
    BACKWARD = "backward"
    """A gradient, of gradients and activations that agree."""
    GRADIENTS = "gradients"
    """What is done to gradients between the backward pass and the optimiser."""
    OPTIMIZER = "optimiser"
    """What the optimiser makes of parameters, gradients and state that agree."""
    CALLS = "calls"
    """A call that one run makes, and the other made until then."""


class Parting(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where two trainings part.

    scope, root, op, op_type, phase, step, micro, rank: of the call. slot: the tensor, "" where it
    is not a tensor that differs. words: what differs. error: estimate of the relative difference;
    None where it is not a number. noise: the relative difference that this tensor had until then,
    or that follows from its inputs, or that a repetition made. inputs: the largest relative
    difference of what it was made from, None where that is nothing that was captured. others:
    tensors or settings of other calls that differ in the same way in this step. source:
    "file:line" or class. during: the step of the training in which it is seen, where the call
    counts other ones (a model that is evaluated alone), else -1.
    """

    kind: PartKind
    scope: str
    root: str
    op: str
    op_type: str
    phase: str
    step: int
    slot: str
    words: str
    micro: int = 0
    rank: int = 0
    error: float | None = None
    noise: float | None = None
    inputs: float | None = None
    others: int = 0
    during: int = -1
    source: str = ""

    @property
    def name(self) -> str:
        """The module, or the part of the step behind a slash."""
        whole = self.scope or self.root
        return f"{whole}/{self.op}" if self.op else whole


class StepDrift(msgspec.Struct, frozen=True):
    """One step of both runs. reference, target: the loss, None where it is not recorded or not a
    number. apart: median relative difference of all tensors; of a repetition where `repetition`.
    band: difference of the loss that noise makes.
    """

    step: int
    reference: float | None
    target: float | None
    apart: float | None
    repetition: float | None = None
    band: float | None = None


class Diverged(Described, msgspec.Struct, frozen=True):
    """When two trainings part.

    status: same (never by more than noise), different (they part), undecided. reference, target,
    repetitions: paths. part: where; of an undecided answer the first difference, where it is
    remarkable. first: the first tensor that is not equal bit for bit. steps: of both runs. tensors:
    compared in each step; uncompared: those of the reference that are not. why: why the answer is
    undecided, each a sentence. notes: what else is to be known. drift: every step. blind: the first
    step from which on noise is so large that a fault no longer stands out, -1 for none. next:
    commands that show more.
    """

    status: Status
    reference: str
    target: str
    repetitions: tuple[str, ...]
    part: Parting | None
    first: Parting | None
    steps: tuple[int, ...]
    tensors: int
    uncompared: int
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    drift: tuple[StepDrift, ...] = ()
    blind: int = -1
    next: tuple[str, ...] = ()
