"""What the verbs beside `compare` produce: locations, checkups, reproductions, ladders, weight
maps.
"""

from __future__ import annotations

import msgspec

from whence.display import Described
from whence.results.verdict import Finding, Word


class FacedWeight(msgspec.Struct, frozen=True):
    """A parameter of a call of the reference and its partner. dims: how that is brought
    to its axes, "" when it is there already.

    state: "equal" (bit for bit after rounding to the target's dtype), "codes" (each within half a
    step), "scaled" (each row is a multiple, as where a norm was folded in), "differs" with the
    relative 2-norm, or "not compared". rows: of the reference's, which the target has as this one,
    "" where it has them all.
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
    one captured run.
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


class Ladder(Described, msgspec.Struct, frozen=True, omit_defaults=True):
    """The rungs of one program, and the stage of compilation, level of optimisation or release that
    makes the difference.

    status: "same" (none is outside the noise), "different" (a stage is named) or "undecided".
    stages: "dynamo", "aot_autograd", "decomposition", "inductor", or another backend's name; a
    level; a release; several in order where a rung between could not be judged. sentence: why.
    repeats: two runs of the lowest rung were bit-equal.
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
