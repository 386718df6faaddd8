"""What a comparison produces: pairs, measurements, verdicts, findings. Frozen, JSON round trip; what behaves like a method asks the api.

The order in which they arise: `align` makes a Plan of CallPairs, `metrics` fills a Measured per pair of records, `judge`
gives each call a Verdict, `locate` turns verdicts into Findings, `api` puts all into a Comparison, `report` writes it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from whence.display import Displayed, Framed

VERDICTS = (
    "identical", "noise", "declared", "precision", "inherited", "amplified", "introduced",
    "param-diff", "structural", "nondeterministic", "incomparable", "undetermined",
)  # fmt: skip


class Measured(msgspec.Struct, frozen=True):
    """All measurements of one pair of records.

    tier: "same" (bit-identical, nothing else to say), "core", "full", or "none" when nothing could be measured, with `why`.
    values: metric name -> number, None where undefined, with the reason in `whys`. max_abs_index: where the largest error is.
    """

    tier: str
    identical: bool
    values: dict[str, float | None] = {}
    whys: dict[str, str] = {}
    max_abs_index: tuple[int, ...] | None = None
    histogram: tuple[int, ...] = ()
    why: str = ""


_SEVERITY = ("identical", "noise", "declared", "inherited", "amplified", "precision", "nondeterministic", "undetermined", "incomparable",
             "structural", "param-diff", "introduced")  # fmt: skip


def severity(verdict: str) -> int:
    """How bad a verdict is, as a number to order them by."""
    return _SEVERITY.index(verdict)


class Made(msgspec.Struct, frozen=True, array_like=True):
    """A tensor made from others of its run, so that it has the axes of the one it faces.

    record: its id, behind those of the run. dims: the expression (docs/alignment.md) over the names bound in `operands`, each to
    records of the run or to made ones. why: the evidence.
    """

    record: int
    dims: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    why: str = ""


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """A call of a root put together from several, or cut from one. pieces: (step, row, first token, tokens) of each in its own run.

    side: "reference" or "target". root, step, micro: of the call it became.
    """

    side: str
    root: str
    step: int
    micro: int
    pieces: tuple[tuple[int, int, int, int], ...]


class Parted(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of which only the first `tokens` face each other. reference, target: what comes next there, None at its end.

    root, step, micro: of the call of the aligned reference. before: tokens ahead of it in the target that the reference has not.
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
    """One tensor of a call faces one of another. dims: how the target's reaches the reference's axes, "" when it already does."""

    reference_slot: str
    target_slot: str
    reference_record: int
    target_record: int
    dims: str = ""


TENSOR_RULE = "tensor"
"""The rule of pairs that were made because tensors face each other, one of which has no call (`align.tensors`)."""


class CallPair(msgspec.Struct, frozen=True):
    """A call of the reference faces a call of the target. rule: which rule said so ("exact key", "normalised name").

    also: further calls of the target that it faces, put together, or that are part of it and have no partner of their own.
    """

    reference: int
    target: int
    rule: str
    evidence: str = ""
    slots: tuple[SlotPair, ...] = ()
    only_reference: tuple[str, ...] = ()
    only_target: tuple[str, ...] = ()
    also: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who faces whom. Unmatched and ambiguous calls are listed, never dropped.

    Calls and records are those of the aligned runs: where calls were joined or tensors made (`made_reference`, `made_target`), ids
    are not those of the run on disk. notes: what was joined, cut or left out, in sentences; joined: of what each
    such root call consists; parted: sequences that do not face each other to their ends.
    """

    pairs: tuple[CallPair, ...]
    unmatched_reference: tuple[int, ...] = ()
    unmatched_target: tuple[int, ...] = ()
    ambiguous: tuple[tuple[int, tuple[int, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    joined: tuple[Joined, ...] = ()
    parted: tuple[Parted, ...] = ()
    made_reference: tuple[Made, ...] = ()
    made_target: tuple[Made, ...] = ()


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the differences of one region mean, and the noise budget that was applied.

    pair: index into Plan.pairs. stretch: -1 for the call as a whole (a leaf), else the stretch of a container.
    score: error in units of what is allowed (> 1 is flagged); None when it was not judged by a number.
    numbers: what the sentence rests on (e_in, e_out, rho, z, floor, ...). where: the module below the call that it is about, ""
    for the call itself. named: the call of that name, -1 where it is none. operator: the operator inside that it is due to
    ("aten.mul.Tensor"), "" where that is not known. side: whose error it is, "target" or "reference". source: where the code of that
    side calls the operator ("file:line"), "" where that is not known.
    """

    pair: int
    verdict: str
    stretch: int = -1
    evidence: str = ""
    confidence: str = ""
    score: float | None = None
    cause: str = ""
    numbers: dict[str, float | None] = {}
    sentence: str = ""
    slot: str = ""
    where: str = ""
    operator: str = ""
    side: str = "target"
    named: int = -1
    source: str = ""


class Finding(Displayed, msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator at fault. Siblings with one signature are one finding; `also` names the others.

    operator: which operator inside it ("aten.mul.Tensor"), "" where that is not known. side: whose error it is. phase: of an operator that
    is not of the forward pass ("backward", "recompute", "optimizer").
    """

    name: str
    op_type: str
    cause: str
    verdict: str
    confidence: str
    step: int
    rank: int
    evidence: str
    numbers: dict[str, float | None] = {}
    sentence: str = ""
    root: str = ""
    occurrence: int = 0
    slot: str = ""
    source: str = ""
    also: tuple[str, ...] = ()
    worst_index: tuple[int, ...] | None = None
    worst_reference: float | None = None
    worst_target: float | None = None
    pair: int = -1
    operator: str = ""
    side: str = "target"
    phase: str = ""


class Remark(msgspec.Struct, frozen=True, omit_defaults=True):
    """What passes and is worth a look; with --strict it makes the answer. Siblings are one remark; `also` names the others.

    kind: "precision" (more than rounding, as an intermediate of low precision leaves it) or "suspect" (close to its limit).
    """

    kind: str
    name: str
    op_type: str
    step: int
    rank: int
    evidence: str
    sentence: str
    score: float | None = None
    root: str = ""
    source: str = ""
    also: tuple[str, ...] = ()
    pair: int = -1


class Coverage(msgspec.Struct, frozen=True):
    """How much of the run the answer rests on. Counts are of calls of the reference.

    paired: face a call of the target. measured: all their outputs were. replayed: judged by replay as far as anything differed.
    replayable: have a program, or were replayed by the user's model. inside: have no partner and ran again as part of one that has
    (the target shows no inside).
    """

    calls: int
    paired: int
    measured: int
    replayed: int
    replayable: int
    root_outputs_measured: bool
    inside: int = 0

    @property
    def share(self) -> float:
        """Share of the reference's calls that were measured, or replayed inside one that was, 0..1; 0 when there are none."""
        return (self.measured + self.inside) / self.calls if self.calls else 0.0


class Row(msgspec.Struct, frozen=True):
    """One pair of records in the report: names, shapes, verdict of its call, measurements."""

    pair: int
    name: str
    op_type: str
    step: int
    rank: int
    occurrence: int
    reference_slot: str
    target_slot: str
    reference_record: int
    target_record: int
    reference_dtype: str
    target_dtype: str
    reference_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    verdict: str
    rule: str
    measured: Measured


class Repetition(msgspec.Struct, frozen=True):
    """What further runs of the reference said about it (A/A).

    runs: their paths. calls: how many calls of the reference do not repeat themselves although their inputs are equal. names,
    op_types: of these, in execution order, at most twenty. own: largest relative 2-norm by which such a call parts; largest: by
    which any tensor does.
    """

    runs: tuple[str, ...]
    calls: int
    names: tuple[str, ...]
    op_types: tuple[str, ...]
    own: float
    largest: float


class ThirdRun(msgspec.Struct, frozen=True):
    """How far both runs are from a third one in higher precision.

    run: its path. calls: regions where all three could be measured; closer: how many of these the target is closer in. median,
    worst: ratio of the target's root-mean-square error to the reference's over these, and `name`, where the largest is.
    reference_err, target_err: relative 2-norm of the errors of all root outputs together; overlap: the least of theirs.
    """

    run: str
    calls: int
    closer: int
    median: float | None
    worst: float | None
    name: str
    reference_err: float | None
    target_err: float | None
    overlap: float | None


class Declared(msgspec.Struct, frozen=True, omit_defaults=True):
    """A loss that was declared beforehand, or one of quantised layers that was not (`declared` False).

    what: in words. calls: how many. names, op_types: of these calls, each once. sqnr_db: the worst signal-to-quantisation-noise ratio,
    10 log10(sum r^2 / sum (r - y)^2), of any, with `worst` its name; None where it is not defined. snippet: a policy that would declare
    it. reason: the policy's own `why`. ignored: nothing was asked of these calls.
    """

    what: str
    declared: bool
    calls: int
    names: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    sqnr_db: float | None = None
    worst: str = ""
    snippet: str = ""
    reason: str = ""
    ignored: bool = False


class Nearest(msgspec.Struct, frozen=True):
    """A call without a partner, and the call of the other run that comes nearest. side: whose call `name` is. why: in words."""

    side: str
    name: str
    candidate: str
    why: str


class Token(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token that both runs chose behind the same tokens.

    prompt: its number, from 1, as `Prompted.number` has it. index: place in the sequence, from the prompt's first token on.
    step, row: call of the
    root and row of its batch whose logits chose it. reference, target: the tokens that came next, or would have.
    verdict: "identical" (bitwise equal logits), "noise", "explained" (another token, the gap is within the noise), "unexplained",
    "sampled" (another token although the logits agree: not the largest was taken), "off" (logits further apart than rounding takes
    them, the token is the same or could have been), "incomparable". score: over what is allowed, > 1 is flagged. numbers: figures
    (docs/generation.md).
    """

    prompt: int
    index: int
    step: int
    row: int
    target_step: int
    target_row: int
    reference: int
    target: int
    verdict: str
    score: float = 0.0
    numbers: dict[str, float | None] = {}
    why: str = ""


class Prompted(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one prompt. ids: its tokens, which it is known by. root, rank, step, row: the call and row that it came with.

    tokens, target_tokens: generated behind it; compared: how many choices of both were compared, of `of` in the reference.
    outcome: "equal", "explained", "sampled" (parted, and no fault of the model), "unexplained", "off" (no token unexplained, but
    logits that are off), "not compared". flips: (explained, unexplained, sampled). first: place in Generation.tokens of
    the first token that differs, off: of the first from logits that are off; -1 for none. no_effect: modules in its calls whose
    error changed none of its tokens. number: from 1, in the order in which the reference was asked.
    """

    ids: tuple[int, ...]
    root: str
    rank: int
    step: int
    row: int
    target_step: int
    target_row: int
    tokens: int
    target_tokens: int
    compared: int
    of: int
    outcome: str
    flips: tuple[int, int, int] = (0, 0, 0)
    first: int = -1
    off: int = -1
    no_effect: tuple[str, ...] = ()
    number: int = 0

    @property
    def passes(self) -> bool:
        """Is no token another one, save where that is no fault of the model?"""
        return self.outcome in ("equal", "explained", "sampled") or (self.outcome == "off" and self.first < 0)


class Generation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What two runs generated, token by token.

    logits_only: the comparison rests on logits alone, no module was captured. noise: median relative error of the logits that were
    judged to be rounding, None where none differed. compared, of: tokens. alone_reference, alone_target: prompts without a partner.
    forced: the target was fed the reference's tokens. suspect: place in `tokens` of the first that is not explained, -1 for none;
    sentence: it, in words; led_to: the finding behind it, "" where there is none.
    """

    logits_only: bool
    prompts: tuple[Prompted, ...]
    tokens: tuple[Token, ...]
    compared: int
    of: int
    noise: float | None = None
    alone_reference: int = 0
    alone_target: int = 0
    forced: bool = False
    suspect: int = -1
    sentence: str = ""
    led_to: str = ""

    def prompt_of(self, token: Token) -> Prompted:
        """The prompt behind which a token was chosen."""
        return next(prompt for prompt in self.prompts if prompt.number == token.prompt)


class Shown(msgspec.Struct, frozen=True, omit_defaults=True):
    """One side of a row of a view: a tensor of a call, with its figures.

    kind: of the call. file: where the dump keeps the tensor; path: with the dump's own path before it. not_finite: has it NaN or Inf.
    """

    name: str
    kind: str
    op_type: str
    occurrence: int
    phase: str
    slot: str
    step: int
    rank: int
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    path: str = ""
    source: str = ""
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    norm: float | None = None
    not_finite: bool = False


class ViewRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pair of tensors as a view shows it, or one without a partner.

    call: ids of both calls, -1 for none. slot: of the reference, or of the only one. figures: by the tool's formulas; why: its reason for
    none. result, message: as the tool decides. verdict, rel_l2, max_abs_err, note: whence's own.
    """

    call: tuple[int, int]
    slot: str
    reference: Shown | None
    target: Shown | None
    figures: dict[str, float | str | None] = {}
    why: str = ""
    result: str = ""
    message: str = ""
    verdict: str = ""
    rel_l2: float | None = None
    max_abs_err: float | None = None
    note: str = ""


class Occurrence(msgspec.Struct, frozen=True):
    """One execution of an operator. number: which of its executions, from 1. call: of the reference. rel_l2: of its worst output."""

    number: int
    call: int
    name: str
    op_type: str
    step: int
    verdict: str
    rel_l2: float


class Counted(msgspec.Struct, frozen=True):
    """The executions of one operator, by "type" or by "name", in order over all steps.

    count: of the reference; compared: those that could be. equal: how many of these before the first that differs; differing: how
    many differ in any bit. first_difference: the first of these; first_significant: the first that rounding does not explain.
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
    """When operators first differ. first_difference, first_significant: of the whole run; None where there is none."""

    first_difference: Occurrence | None
    first_significant: Occurrence | None
    rows: tuple[Counted, ...]


class TracedInput(msgspec.Struct, frozen=True):
    """Something an operator read. name: of who wrote it last, or of the parameter or input of the model; call: that, -1 for none.

    state: "equal", "within noise", "differs", "not compared", of a label "equal as far as shown".
    """

    slot: str
    name: str
    state: str
    rel_l2: float | None
    call: int


class TracedStep(msgspec.Struct, frozen=True):
    """One operator on the way back. verdict: "not compared" where nobody saw what it made. rel_l2: of its worst output."""

    call: int
    name: str
    op_type: str
    occurrence: int
    step: int
    verdict: str
    rel_l2: float | None
    inputs: tuple[TracedInput, ...]


class Origin(msgspec.Struct, frozen=True):
    """Where a difference comes from. steps: from the tensor asked for to the operator it ends at, `call` of the reference.

    among: operators before it whose output was not compared, any of which may be the one. attributes: of the operator;
    target_attributes: those that are others in the target. labels: what its kernel logged. missing: what it read and was not
    captured, with what to do. outcome: "target wrong", "reference wrong", "both within bound: ..", "not asked: ..", "inputs
    insufficient: ..", "equal".
    sentence: of its verdict.
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


class Comparison(Framed, msgspec.Struct, frozen=True):
    """The whole answer. Every output format is written from this and computes nothing.

    counts: calls by verdict. unmatched, incomparable: how many calls have no partner, and how many pairs of tensors could not be
    measured. without_partner: names of the former, by "reference", "target" and "ambiguous", each once; nearest: what comes
    nearest to some of them. environment: conditions
    in which the runs differ. headline: why the status is what it is, where findings do not say it. repetition: what further runs
    of the reference showed, third: how far both are from the run in higher precision; None when none was given.
    remarks: what passes and is worth a look, which counts with --strict.
    declared: losses that a policy allows, and those of quantised layers without one. generation: what both runs generated.
    views: the rows of each view that was asked for. asked: arguments of `compare` that decide who faces whom and what may be run, where
    they are not the defaults and can be written down.
    programs: what the programs of both runs differ in, in lines; () when they are
    not known. occurrences: when operators first differ; None where it was not asked for and the runs are of modules.
    origin: of runs of operators, where the first significant tensor comes from. program_files: programs that were given.
    """

    status: str
    evidence: str
    reference: str
    target: str
    findings: tuple[Finding, ...]
    first_difference: dict[str, Any] | None
    counts: dict[str, int]
    coverage: Coverage
    unmatched: int
    incomparable: int
    inputs_differ: tuple[str, ...]
    versions: dict[str, str]
    plan: Plan
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    headline: str = ""
    notes: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    without_partner: dict[str, tuple[str, ...]] = {}
    nearest: tuple[Nearest, ...] = ()
    declared: tuple[Declared, ...] = ()
    remarks: tuple[Remark, ...] = ()
    timing: dict[str, float] = {}
    repetition: Repetition | None = None
    third: ThirdRun | None = None
    generation: Generation | None = None
    views: dict[str, tuple[ViewRow, ...]] = {}
    asked: dict[str, Any] = {}
    programs: tuple[str, ...] = ()
    occurrences: Occurrences | None = None
    origin: Origin | None = None
    program_files: tuple[str, ...] = ()

    def report(self, output: str, *, details: int = 40, force: bool = False) -> None:
        """Write it as one HTML page (`whence.report_html`). Raises OutputExists, StoreFailed."""
        import whence

        whence.report_html(self, output, details=details, force=force)


class FacedWeight(msgspec.Struct, frozen=True):
    """A parameter of a call of the reference and the one that faces it. dims: how that is brought to its axes, "" when it is there already.

    state: "equal" (bit for bit after rounding to the target's dtype), "differs" with the relative 2-norm, or "not compared".
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


class WeightMap(msgspec.Struct, frozen=True):
    """The parameters of two runs face to face, and those without a partner."""

    pairs: tuple[FacedWeight, ...]
    only_reference: tuple[str, ...]
    only_target: tuple[str, ...]


class OutputError(msgspec.Struct, frozen=True):
    """Error of the outputs of one call of a root: its 2-norm and that of the reference's outputs; None where not defined (NaN, shapes).

    same_question: False when integers the root was given (tokens) differ, so that the outputs answer different questions.
    """

    root: str
    rank: int
    step: int
    micro: int
    error: float | None
    norm: float
    same_question: bool = True


class Explained(msgspec.Struct, frozen=True):
    """One counterfactual: outputs of the reference put in at `points`, on top of all rounds before it.

    before, after: rel_l2 of the root's outputs against the reference, over the steps all rounds can be compared at. share: of the
    squared error without any patch that this round took away; shares of independent errors add up. steps: (root, step, before, after).
    calls: how many calls were patched. refused: why others were not. finding: what led here. remaining: findings after it.
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


class Location(msgspec.Struct, frozen=True):
    """What the error at the output is made of. status: of reference against target, without any patch.

    error: rel_l2 of the root's outputs without a patch; left: with all of them. remaining: findings that are left then.
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
    """A run that should agree with the reference. identical: bit for bit. nondeterministic: calls that differ on equal inputs."""

    name: str
    status: str
    identical: bool
    findings: tuple[str, ...] = ()
    nondeterministic: tuple[str, ...] = ()
    headline: str = ""


class PlantedFault(msgspec.Struct, frozen=True):
    """A known fault and what was said about it.

    outcome: "named first", "named" (not first), "detected" (something else was named), "missed", "below rounding" (not found, and
    too small to be), "no effect" (not found, and the outputs of its module are the reference's bits), "not planted".
    size: error of the module's outputs over what its own rounding explains; None when not planted, or infinite. size_class: "clear",
    "near rounding" or "below rounding"; "" when not planted. named: the first finding.
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


class Checkup(msgspec.Struct, frozen=True):
    """How far whence can be trusted on one program. healthy: silent on every clean run, and every clear fault was named first.

    replayable: calls whose program was recorded; not_replayable: reasons with counts, of the others.
    bare_s, captured_s: wall time of the program without and with capture; disk_bytes: of one captured run.
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


class OutputMatch(msgspec.Struct, frozen=True, kw_only=True):
    """How far one generated output is another's: two strings, or two lists of tokens.

    unit: "character" (Unicode code points) or "token"; lengths and prefix_length are counted in it. Positions count from 0.
    first_character, first_token: where they first differ within the shorter of the two, None where they do not; of strings a token
    is a word between blanks, of lists of tokens there is no character.
    full: equal over the shorter; half: equal over the first half of it, at least one unit. None where an output is empty: an
    equal nothing is no agreement. longer: "reference" or "target" where full and one goes on behind the other's end.
    """

    unit: str = ""
    reference_length: int | None = None
    target_length: int | None = None
    prefix_length: int | None = None
    first_character: int | None = None
    first_token: int | None = None
    full: bool | None = None
    half: bool | None = None
    longer: str = ""


class PromptMatch(OutputMatch, frozen=True, kw_only=True):
    """One prompt of two files of outputs.

    number: from 1, in the reference's order, then what only the target has. prompt: its text, cut after 1,000 characters.
    verdict: "PASS" (full), "FAIL", or "NO" (nothing could be compared; `why`). before, change: its verdict at the commit before, and
    "newly failing" or "newly passing", where two commits are compared.
    matched_by: "prompt", "position", or "" without a partner. reference_line, target_line: from 1; of an array its elements.
    common, reference_at, target_at: a few units before the first difference and from it on. id: what the file calls it, "" where it
    gives none, or one to several.
    """

    number: int
    prompt: str
    verdict: str
    why: str = ""
    before: str = ""
    change: str = ""
    matched_by: str = ""
    reference_line: int | None = None
    target_line: int | None = None
    common: str = ""
    reference_at: str = ""
    target_at: str = ""
    id: str = ""


class Disagreement(msgspec.Struct, frozen=True):
    """One prompt that occurs twice in a file and was answered in two ways. lines: of the two; match: how far they agree."""

    side: str
    prompt: str
    lines: tuple[int, int]
    match: OutputMatch


class TokenMatch(msgspec.Struct, frozen=True, kw_only=True):
    """What two files of outputs agree on.

    status: "pass" (both rates reach their thresholds), "fail", or "undecided" (no prompt stands on both sides).
    full_match, half_match: share of `count` prompts whose outputs are equal over the shorter, and over its first half; what could
    not be compared is counted in `count` only. None without prompts. *_interval: 95 % (Wilson). thresholds_from: where they come from.
    longer_reference, longer_target: of those with full match, how many go on on one side. not_compared: verdict "NO".
    repeated: prompts that a file holds more than once, each an A/A check; disagreements: those that failed it.
    unreadable: lines that hold no output, with file, number and reason.
    """

    reference: str
    target: str
    status: str
    count: int
    full_match: float | None
    half_match: float | None
    full_count: int
    half_count: int
    full_interval: tuple[float, float]
    half_interval: tuple[float, float]
    full_threshold: float
    half_threshold: float
    thresholds_from: str
    longer_reference: int
    longer_target: int
    not_compared: int
    repeated: int
    prompts: tuple[PromptMatch, ...]
    disagreements: tuple[Disagreement, ...] = ()
    unreadable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class TokenComparison(TokenMatch, frozen=True, kw_only=True):
    """Two files of outputs; with `before`, the same at an earlier commit, and everything of TokenMatch is of the later one.

    table: prompts that pass at "both", "only_before", "only_after", "neither"; those that one commit lacks are in `notes`.
    newly_failing, newly_passing: numbers of prompts. p_value: two-sided exact sign test on these two counts.
    status is also "fail" where significantly more (p < 0.05) fail newly than pass newly.
    """

    before: TokenMatch | None = None
    table: dict[str, int] | None = None
    newly_failing: tuple[int, ...] = ()
    newly_passing: tuple[int, ...] = ()
    p_value: float | None = None


class Reproduction(msgspec.Struct, frozen=True):
    """A script that shows the fault of one finding.

    path: of the script. operators: what it runs, in order. how: "compiled", "kernel", "semantic", "parameter" or "recorded" (only what
    was recorded shows the fault here). default: the side that it judges unasked. holds: it fails so, and passes as the reference ran;
    None where it was not run. seen: what each side said. sentence: all that in words. seconds: from the start to the end.
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


class Rung(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of the ladder: the program compiled as far as `name` goes, against the eager run.

    verdict: "bit-equal", "noise", "outside", "undecided" (could not be told), or "failed" (did not compile or run: `why`).
    evidence: what it rests on. rel_l2: of the outputs of all root calls, against eager; None where not defined. previous_identical,
    previous_rel_l2: the same against the rung before that ran; None for the first. sentence: of what differs most, where something does.
    backends: that the program named itself; graphs, breaks: that dynamo compiled, and reasons for which it broke off. seconds: of the run.
    run, comparison: folders, "" where they were not kept.
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
    seconds: float = 0.0
    run: str = ""
    comparison: str = ""


class Pass(msgspec.Struct, frozen=True, omit_defaults=True):
    """What torch's compiler bisector named: the backend, a subsystem of it, its number in there and what that is ("" for none).

    runs: of the program. broken: runs that failed or could not be decided, which count as bad. why: it named nothing, and why.
    """

    backend: str
    subsystem: str = ""
    number: int | None = None
    info: str = ""
    runs: int = 0
    broken: int = 0
    why: str = ""


class Ladder(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rungs of one program, and the stage of compilation that makes the difference.

    status: "same" (none is outside the noise), "different" (a stage is named) or "undecided". stage: "dynamo", "aot_autograd",
    "decomposition", "inductor", or another backend's name; several in order where a rung between could not be judged.
    sentence: why. repeats: two eager runs were bit-equal.
    """

    subject: str
    status: str
    sentence: str
    stages: tuple[str, ...] = ()
    rungs: tuple[Rung, ...] = ()
    repeats: bool = True
    compiler_pass: Pass | None = None
    notes: tuple[str, ...] = ()
