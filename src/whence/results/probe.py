"""Which properties, that need no second run, one model has."""

from __future__ import annotations

import msgspec

from whence.display import Described
from whence.results.precision import PrecisionTable
from whence.results.verdict import Status, Word


class Property(Word):
    """A question that one model answers by being run in variants."""

    CAUSALITY = "causality"
    """Nothing before a position may depend on what comes after it."""
    PADDING = "padding"
    """Real positions may not depend on padding."""
    BATCH = "batch"
    """A row may not depend on the rows beside it, their number, or its place among them."""
    CHUNKING = "chunking"
    """Reading in pieces with a cache gives what reading at once gives."""
    REPEAT = "repeat"
    """The same call gives the same result."""
    PACKING = "packing"
    """Documents that share a row do not see each other."""
    EQUIVARIANCE = "equivariance"
    """Heads, experts and channels are alike: permuted with their weights, they give the same."""
    SENSITIVITY = "sensitivity"
    """Every input, position, adapter and expert reaches an output."""
    HEALTH = "health"
    """No operator of the call loses what the outputs need: by overflow, underflow, cancellation."""
    PRECISION = "precision"
    """Which modules may compute in a narrower type. Asked for by name only: many calls."""


BY_DEFAULT = tuple(name for name in Property if name != Property.PRECISION)
"""What is asked where nothing is chosen."""


class Held(Word):
    """Whether a property, or one variant of it, holds."""

    EXACT = "bit for bit"
    ROUNDING = "within rounding"
    VIOLATED = "violated"
    OBSERVED = "not so"
    """It does not hold, and nothing says that it should."""
    UNKNOWN = "cannot tell"
    ABSENT = "does not apply"
    REACHED = "reached"
    """What was changed moved an output."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """Numbers are lost that the outputs need; the model computes what it is written to compute."""
    MEASURED = "measured"


class OperatorPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator of the model. scope: of the module that runs it, "" for the root. op_type: class
    of this module. line: "file:line" of the program. after: where the guilty operator may be one
    of several whose results cannot be told apart by position, the first of them.
    """

    operator: str
    scope: str = ""
    op_type: str = ""
    line: str = ""
    after: str = ""


class Variant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The model run otherwise, compared with the model run as it was.

    name: what was changed. moved: the largest difference at the positions that may not move, in
    root mean squares of the output; ulp: the same in units of the last place. in_float64: `moved`
    of the same two runs in float64, None where they were not made. effect: how far the outputs
    moved where they may, None where nothing may. differing: elements that moved, of `count`.
    first: where the difference begins. why: why it is judged so, or could not be.
    """

    name: str
    held: Held
    moved: float = 0.0
    ulp: float = 0.0
    in_float64: float | None = None
    effect: float | None = None
    differing: int = 0
    count: int = 0
    first: OperatorPlace | None = None
    why: str = ""


class Symptom(Word):
    """In which way an operator loses numbers."""

    NONFINITE = "not finite"
    """NaN or Inf of finite inputs."""
    RANGE = "end of range"
    """Magnitudes within two bits of the largest finite number, of inputs that are not."""
    UNDERFLOW = "underflow"
    """Results too small for the dtype: zero, or subnormal."""
    CANCELLATION = "cancellation"
    """A sum, a difference, a mean or a variance that is small beside its terms."""
    AMPLIFICATION = "amplification"
    """Any other operator that makes a rounding of its inputs larger."""
    SATURATION = "saturation"
    """Rows of a softmax whose largest probability is 1, or bounded functions at their bound."""


class HealthFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator that loses numbers.

    dtype: of its results. amplification: how many times larger a relative rounding of its inputs is
    at its result, in root mean squares; 2**n loses n bits. share: of the elements (of the rows for
    a softmax) that are at the end of the range, underflow or are saturated. largest: magnitude of
    its result. effect: how far the outputs move by it, in root mean squares of the output, in
    float64; None where that was not measured. also: further modules of which the same line does
    it. meaning: in words.
    """

    symptom: Symptom
    first: OperatorPlace
    dtype: str
    amplification: float = 0.0
    share: float = 0.0
    largest: float = 0.0
    effect: float | None = None
    also: tuple[str, ...] = ()
    meaning: str = ""


class SpreadShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which part of the spread at the output (the mean square of the differences) goes away when
    all calls of one operator, or of the modules that run it, are computed row by row (on as many
    threads as before). calls: in which the spread begins. scope: of the module, "" where it begins
    in several.
    """

    operator: str
    calls: int
    share: float
    scope: str = ""


class PropertyAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether one property holds.

    cause: of a violation, in words. power: how large a violation would have been seen. why: why it
    cannot be told or does not apply. next: what to type. findings: of `health`, the worst first.
    precision: of `precision`.
    """

    property: Property
    held: Held
    variants: tuple[Variant, ...] = ()
    cause: str = ""
    power: str = ""
    why: str = ""
    next: str = ""
    notes: tuple[str, ...] = ()
    shares: tuple[SpreadShare, ...] = ()
    findings: tuple[HealthFinding, ...] = ()
    precision: PrecisionTable | None = None


class Probed(Described, msgspec.Struct, frozen=True):
    """What variants of one call of one model show.

    status: different where a property is violated, undecided where one cannot be told or none
    applies, else same.
    model: its class. inputs: of the call, in words. command: that ran it, () in code.
    """

    status: Status
    model: str
    inputs: str
    answers: tuple[PropertyAnswer, ...]
    command: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PropertyAnswer:
        """The answer about one property. Raises KeyError where it was not asked for."""
        for answer in self.answers:
            if answer.property == name:
                return answer
        raise KeyError(name)
