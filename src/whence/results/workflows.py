"""What the verbs beside `compare` produce: locations, checkups, reproductions, ladders, weight
maps, sources of values that are not finite, use of the range of formats, failed checks of
parity, and what lies in a folder.
"""

from __future__ import annotations

import msgspec

from whence.display import Described
from whence.results.comparison import Comparison
from whence.results.verdict import Finding, Word


class FacedWeight(msgspec.Struct, frozen=True):
    """A parameter of a call of the reference and its partner. dims: how that is brought
    to its axes, "" when it is there already.

    state: "equal" (bit for bit after rounding to the target's dtype), "codes" (each within half a
    step), "scaled" (each row is a multiple, as where a norm was folded in), "differs" with the
    relative 2-norm, or "not compared". rows: of the reference's, which the target has as this one,
    "" where it has them all. why: of codes, their scheme, or what is wrong with them.
    """

    reference: str
    name: str
    target: str
    target_name: str
    dims: str
    shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    state: str
    rel_l2: float | None
    rows: str = ""
    why: str = ""


class WeightMap(Described, msgspec.Struct, frozen=True):
    """The paired parameters of two runs, and those without a partner."""

    pairs: tuple[FacedWeight, ...]
    only_reference: tuple[str, ...]
    only_target: tuple[str, ...]


class OutputError(msgspec.Struct, frozen=True):
    """Error of the outputs of one call of a root: its 2-norm and that of the reference's outputs;
    None where not defined (NaN, shapes).

    same_question: False when integers the root was given (tokens) differ, so that the outputs
    answer different questions.
    """

    root: str
    rank: int
    step: int
    micro: int
    error: float | None
    norm: float
    same_question: bool = True


class Explained(Described, msgspec.Struct, frozen=True):
    """One counterfactual: outputs of the reference put in at `points`, on top of all rounds before
    it.

    before, after: rel_l2 of the root's outputs against the reference, over the steps all rounds can
    be compared at. share: of the squared error without any patch that this round took away; shares
    of independent errors add up. steps: (root, step, before, after). calls: how many calls were
    patched. refused: why others were not. finding: what led here. remaining: findings after it.
    """

    name: str
    points: tuple[str, ...]
    calls: int
    before: float | None
    after: float | None
    share: float | None
    steps: tuple[tuple[str, int, float | None, float | None], ...] = ()
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    finding: Finding | None = None
    remaining: tuple[str, ...] = ()


class Location(Described, msgspec.Struct, frozen=True):
    """What the error at the output is made of. status: of reference against target, without any
    patch.

    error: rel_l2 of the root's outputs without a patch; left: with all of them. remaining: findings
    that are left then.
    """

    status: str
    reference: str
    target: str
    command: tuple[str, ...]
    error: float | None
    left: float | None
    rounds: tuple[Explained, ...]
    remaining: tuple[str, ...]
    runs: int
    notes: tuple[str, ...] = ()


class Clean(msgspec.Struct, frozen=True):
    """A run that should agree with the reference. identical: bit for bit. nondeterministic: calls
    that differ on equal inputs.
    """

    name: str
    status: str
    identical: bool
    findings: tuple[str, ...] = ()
    nondeterministic: tuple[str, ...] = ()
    headline: str = ""


class PlantedFault(msgspec.Struct, frozen=True):
    """A known fault and what was said about it.

    outcome: "named first", "named" (not first), "detected" (something else was named), "missed",
    "below rounding" (not found, and too small to be), "no effect" (not found, and the outputs of
    its module are the reference's bits), "not planted". size: error of the module's outputs over
    what its own rounding explains; None when not planted, or infinite. size_class: "clear", "near
    rounding" or "below rounding"; "" when not planted. named: the first finding.
    """

    fault: str
    site: str
    op_type: str
    words: str
    outcome: str
    size: float | None = None
    size_class: str = ""
    named: str = ""
    cause: str = ""


class Checkup(Described, msgspec.Struct, frozen=True):
    """How far whence can be trusted on one program. healthy: silent on every clean run, and every
    clear fault was named first.

    replayable: calls whose program was recorded; not_replayable: reasons with counts, of the
    others. bare_s, captured_s: wall time of the program without and with capture; disk_bytes: of
    one captured run. kernels: which kernels measured, and how to get the others.
    """

    subject: str
    clean: tuple[Clean, ...]
    planted: tuple[PlantedFault, ...]
    calls: int
    replayable: int
    not_replayable: dict[str, int]
    bare_s: float
    captured_s: float
    disk_bytes: int
    healthy: bool
    notes: tuple[str, ...] = ()
    kernels: str = ""


class Reproduction(Described, msgspec.Struct, frozen=True):
    """A script that shows the fault of one finding.

    path: of the script. operators: what it runs, in order. how: "compiled", "kernel", "semantic",
    "parameter" or "recorded" (only what was recorded shows the fault here). default: the side that
    it judges unasked. holds: it fails so, and passes as the reference ran; None where it was not
    run. seen: what each side said. sentence: all that in words. seconds: from the start to the end.
    """

    path: str
    finding: str
    operators: tuple[str, ...]
    how: str
    default: str
    holds: bool | None
    sentence: str
    seen: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


class LadderKind(Word):
    """What a ladder climbs: stages of torch.compile, levels of optimisation of ONNX Runtime, or its
    releases.
    """

    STAGES = "stages"
    LEVELS = "levels"
    RELEASES = "releases"


class RungKind(Word):
    """How a rung stands against the lowest one."""

    BIT_EQUAL = "bit-equal"
    NOISE = "noise"
    OUTSIDE = "outside"
    UNDECIDED = "undecided"
    FAILED = "failed"


class Rung(Described, msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of the ladder: the program compiled as far as `name` goes, optimised to that level,
    or with that release, against the lowest rung.

    verdict: "bit-equal", "noise", "outside", "undecided" (could not be told), or "failed" (did not
    compile or run: `why`). evidence: what it is based on. rel_l2: of the outputs of all root calls,
    against eager; None where not defined. previous_identical, previous_rel_l2: the same against the
    rung before that ran; None for the first. sentence: of what differs most, where something does.
    backends: that the program named itself; graphs, breaks: that dynamo compiled, and reasons for
    which it broke off. nodes: of the optimised graphs. optimizers: that changed one of them, in
    order. node: name and type of the first that differs beyond the noise, "" for none. seconds: of
    the run. run, comparison: folders, "" where they were not kept.
    """

    name: str
    verdict: str
    evidence: str = ""
    rel_l2: float | None = None
    previous_identical: bool | None = None
    previous_rel_l2: float | None = None
    sentence: str = ""
    why: str = ""
    backends: tuple[str, ...] = ()
    graphs: int = 0
    breaks: int = 0
    nodes: int = 0
    optimizers: tuple[str, ...] = ()
    node: str = ""
    seconds: float = 0.0
    run: str = ""
    comparison: str = ""


class Pass(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a bisection named. Torch's compiler bisector: the backend, a subsystem of it, its number
    in there and what that is ("" for none). Of ONNX Runtime: "onnxruntime", the level, and the
    first optimiser that makes the difference when those before it are on.

    node: name and type of the first node that differs where that optimiser is the last one on.
    alone: how the program stands with this optimiser alone off, a `RungKind`; "" where not tried.
    runs: of the program. broken: runs that failed or could not be decided, which count as bad. why:
    it named nothing, and why.
    """

    backend: str
    subsystem: str = ""
    number: int | None = None
    info: str = ""
    node: str = ""
    alone: str = ""
    runs: int = 0
    broken: int = 0
    why: str = ""


class GraphOperator(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator of the program. name: of the node in the graph that dynamo traced, "" where an
    operator was never traced. operator: what it calls ("abs"). source: "file:line" of the program,
    "" where not known. code: that line.
    """

    name: str
    operator: str
    source: str = ""
    code: str = ""


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where in the program a stage of torch.compile goes wrong.

    operators: the smallest piece whose results change when it alone is compiled so far, in order;
    of dynamo, the first operator whose result the traced graph does not compute. of: number of
    operators in all graphs. runs: of the program. why: nothing is named, and why.
    """

    operators: tuple[GraphOperator, ...] = ()
    of: int = 0
    runs: int = 0
    why: str = ""


class Ladder(Described, msgspec.Struct, frozen=True, omit_defaults=True):
    """The rungs of one program, and the stage of compilation, level of optimisation or release that
    makes the difference.

    status: "same" (none is outside the noise), "different" (a stage is named) or "undecided".
    stages: "dynamo", "aot_autograd", "decomposition", "inductor", or another backend's name; a
    level; a release; several in order where a rung between could not be judged. sentence: why.
    repeats: two runs of the lowest rung were bit-equal. place: of torch.compile, where a stage is
    named.
    """

    subject: str
    status: str
    sentence: str
    stages: tuple[str, ...] = ()
    rungs: tuple[Rung, ...] = ()
    repeats: bool = True
    compiler_pass: Pass | None = None
    notes: tuple[str, ...] = ()
    kind: str = LadderKind.STAGES
    place: Place | None = None


class Range(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor that a call read: its slot, dtype and the range of its finite elements; None where
    it was not measured or has none. infinite: how many elements are +-Inf.
    """

    slot: str
    dtype: str
    low: float | None = None
    high: float | None = None
    infinite: int = 0


class NotFinite(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor with NaN or infinities that nothing before it had.

    scope, op_type, phase, step, rank, order: of the call that made it. slot: in that call; of what
    a container's own code handed to a child, "K:input.0". nan, infinite, count: elements. largest:
    the largest finite number of the dtype. read: what the call was given. operator: of the program
    that the call ran, the first that makes it when it is run again ("log"); "" where that is not
    known.
    """

    scope: str
    root: str
    op_type: str
    slot: str
    step: int
    rank: int
    order: int
    nan: int
    infinite: int
    count: int
    dtype: str
    largest: float | None
    phase: str = "forward"
    source: str = ""
    read: tuple[Range, ...] = ()
    operator: str = ""


class Nans(Described, msgspec.Struct, frozen=True):
    """What is not finite in a run.

    first: the first tensor with NaN, or the first that overflowed where there is no NaN or the NaN
    was made of infinities; None where all is finite. then: the NaN that such an overflow became.
    overflowed: tensors with infinities, and no NaN, that calls made of finite inputs, in order.
    after: calls behind the first one that hold NaN or infinities. calls: how many there are.
    unmeasured: tensors without statistics.
    """

    run: str
    first: NotFinite | None
    then: NotFinite | None
    overflowed: tuple[NotFinite, ...]
    after: int
    calls: int
    unmeasured: int


class FormatUse(msgspec.Struct, frozen=True):
    """How one tensor fits a format.

    format: "float16", "float8_e4m3fn scaled" (scaled so that the largest magnitude of each tensor
    is the largest of the format). overflows: whether its largest magnitude is too large for it.
    overflow, zero, subnormal: elements that are not finite any more, that become zero, and that
    keep fewer bits; of the elements that were read.
    """

    format: str
    overflows: bool
    overflow: int = 0
    zero: int = 0
    subnormal: int = 0


class TensorRange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of a call over all steps, micro-batches and ranks: the first call that ended with
    it, so that an output is named and not what reads it.

    times: how often it was seen. elements: how many of them were read, 0 with statistics alone;
    zeros, subnormal, saturated: how many of these are zero, subnormal, or the largest finite number
    of the dtype itself. infinite: of all. largest, smallest: magnitudes of finite elements;
    smallest is of elements that are not zero, None where none was read. step: where the largest one
    is. formats: in the order that was asked for.
    """

    scope: str
    root: str
    op_type: str
    slot: str
    phase: str
    dtype: str
    times: int
    elements: int
    largest: float
    step: int
    smallest: float | None = None
    zeros: int = 0
    subnormal: int = 0
    saturated: int = 0
    infinite: int = 0
    formats: tuple[FormatUse, ...] = ()


class Ranges(Described, msgspec.Struct, frozen=True):
    """How the tensors of a run use the range of floating-point formats.

    formats: names, as in `FormatUse.format`. tensors: in the order of execution. unread: how many
    of them are known by statistics alone, which say what overflows and not what becomes zero.
    unmeasured: records that have neither.
    """

    run: str
    formats: tuple[str, ...]
    tensors: tuple[TensorRange, ...]
    unread: int
    unmeasured: int


class ParityError(AssertionError):
    """Two models do not compute the same, or it cannot be told whether they do. comparison: what
    was found.
    """

    def __init__(self, message: str, comparison: Comparison) -> None:
        super().__init__(message)
        self.comparison = comparison


ParityError.__module__ = "whence.testing"  # where users import it from


class InFloat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One layer of a quantised model, and what leaving it in float brings.

    sqnr_db: of its own results (`LayerCost`). estimated: the share of the squared error at the
    outputs that goes away, by replay; None where that is not known. measured: the same in a run of
    the program where this layer alone is in float, None where none was made. together: with the
    layers before it in the recipe. why_not: why it could not be run in float. cure: what may
    quantise it better, with the figure that says so; "" where nothing shows.
    """

    name: str
    op_type: str
    sqnr_db: float
    estimated: float | None = None
    measured: float | None = None
    together: float | None = None
    why_not: str = ""
    cure: str = ""


class QuantisationRecipe(Described, msgspec.Struct, frozen=True):
    """Which layers to leave in float, in the words of a quantiser.

    error: rel_l2 of the outputs as quantised; left: with the layers of `leave` in float, None where
    nothing was measured. leave: in order of what they bring. others: those that were measured, or
    could not be, and are not worth it. untried: how many layers are left. recipe: lines for `tool`.
    runs: how often the program ran.
    """

    reference: str
    target: str
    tool: str
    recipe: str
    error: float | None
    left: float | None
    leave: tuple[InFloat, ...]
    others: tuple[InFloat, ...]
    untried: int
    runs: int
    notes: tuple[str, ...] = ()
