"""What a comparison produces: pairs, measurements, verdicts, findings. Frozen, with a JSON round
trip.

The order in which they arise: `align` makes a Plan of CallPairs, `metrics` fills a Measured per
pair of records, `judge` gives each call a Verdict, `locate` turns verdicts into Findings, `api`
puts all into a Comparison, `report` writes it.

`Framed` lets it offer its modules by name, and its tables as data frames.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from whence.display import Described, Displayed
from whence.records.lookup import unknown
from whence.records.missing import Lack
from whence.results.generation import Generation
from whence.results.module import ModuleResult, module_result
from whence.results.origin import Occurrences, Origin
from whence.results.plan import Plan
from whence.results.ranks import RankFinding
from whence.results.rows import Row
from whence.results.verdict import Evidence, Finding, Verdict
from whence.results.views import ViewRow


class Framed(Displayed):
    """Mix-in of a comparison: its tables as data frames, its modules by name."""

    __slots__ = ()

    def to_pandas(self, table: str = "pairs") -> Any:
        """A `pandas.DataFrame`. table: "pairs" (a row per pair of tensors), "findings", or "tokens"
        (of what was generated).

        Figures are float64, NaN where there is none. Raises UsageError for another table,
        MissingDependency without pandas.
        """
        from whence.report import frames

        return frames.to_pandas(self, table)

    def to_polars(self, table: str = "pairs") -> Any:
        """As `to_pandas`, a `polars.DataFrame`; null where there is no figure."""
        from whence.report import frames

        return frames.to_polars(self, table)

    def to_arrow(self, table: str = "pairs") -> Any:
        """A `pyarrow.Table`. table: one of those that `whence query CMP --tables` lists. Raises
        UsageError for another table, MissingDependency without pyarrow.
        """
        from whence.report import arrow

        return arrow.to_arrow(self, table)

    def to_parquet(self, path: str, table: str = "pairs") -> int:
        """Write a table as a Parquet file, batch by batch, and return how many rows it has. Raises
        as `to_arrow` does, and StoreFailed.
        """
        from whence.report import arrow

        return arrow.write_parquet(self, path, table)

    def __getitem__(self, name: str) -> ModuleResult:
        """What it says of a module of the reference, by its name: verdict, evidence, calls and
        tensors. Raises KeyError with names that are near.
        """
        whole: Any = self
        module = module_result(name, whole.rows, whole.verdicts, whole.findings)
        if module is None:
            raise KeyError(_absent(whole, name))
        return module

    def _ipython_key_completions_(self) -> list[str]:
        """Names of calls, those of findings first."""
        return _names_of(self)


class Remark(Described, msgspec.Struct, frozen=True, omit_defaults=True):
    """What passes and is worth a look; with --strict most of it makes the answer. Siblings are one
    remark; `also` names the others.

    kind: "precision" (more than rounding, as an intermediate of low precision leaves it),
    "other-form" (something behind it takes it back, which --strict does not count),
    "suspect" (close to its limit) or "semantic" (its code has other constants, which change less
    than a hundredth of a rounding here).
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


class Coverage(Described, msgspec.Struct, frozen=True):
    """How much of the run the answer rests on. Counts are of calls of the reference.

    paired: with a call of the target. measured: all their outputs were. replayed: judged by replay
    as far as anything differed. replayable: have a program, or were replayed by the user's model.
    inside: have no partner and ran again as part of one that has (the target shows no inside).
    covered: were not measured themselves; what comes of them was, and is right.
    """

    calls: int
    paired: int
    measured: int
    replayed: int
    replayable: int
    root_outputs_measured: bool
    inside: int = 0
    covered: int = 0

    @property
    def share(self) -> float:
        """Share of the reference's calls that were measured, replayed inside one that was, or seen
        in what comes of them, 0..1; 0 when there are none.
        """
        return self.seen / self.calls if self.calls else 0.0

    @property
    def seen(self) -> int:
        """How many calls these are."""
        return self.measured + self.inside + self.covered


class Visible(msgspec.Struct, frozen=True):
    """How large a fault of a kind would have been named at the calls that passed.

    kind: "scale" (everything times a constant; a share), "channel" (one channel shifted), "element"
    (one element off) or "noise" (an error without a pattern); the last three relative to the root
    mean square of the tensor. median, largest: over these calls; name: where it is largest. calls:
    how many. evidence: "replay", or "two dumps" for those that were not replayed.
    """

    kind: str
    median: float
    largest: float
    name: str
    calls: int
    evidence: Evidence = Evidence.REPLAY


class Effect(Described, msgspec.Struct, frozen=True):
    """What the differences come to at the outputs of the models: of the calls that no other call
    made.

    outputs: how many of their tensors were compared; differing: of these; unmeasured: how many more
    could not be. error: the largest error, as relative 2-norm, None where it is not finite or
    nothing could be measured; `from_statistics`: of norms and means alone. name, slot, step, rank:
    where that is. rows: vectors of scores that were compared, along the last axis; moved: of these,
    those whose largest element lies elsewhere in the target. tokens: that both runs generated
    behind the same text; tokens_changed: of these. models: their names, the largest first.
    """

    outputs: int = 0
    differing: int = 0
    unmeasured: int = 0
    error: float | None = None
    from_statistics: bool = False
    name: str = ""
    slot: str = ""
    step: int = 0
    rank: int = 0
    rows: int = 0
    moved: int = 0
    tokens: int = 0
    tokens_changed: int = 0
    models: tuple[str, ...] = ()


class Undecided(Described, msgspec.Struct, frozen=True, omit_defaults=True):
    """What an undecided answer is about: the first call, or the first of its tensors, that could
    not be judged.

    slot: of the tensor, "" where it is the whole call. source: the line of code that calls it, or
    what it is ("module.Class"). why: what is missing to judge it, or what was seen. others: further
    calls or tensors of which the same holds. pair: index into Plan.pairs, -1 where it has none.
    """

    name: str
    op_type: str
    slot: str = ""
    step: int = 0
    rank: int = 0
    root: str = ""
    source: str = ""
    why: str = ""
    others: int = 0
    pair: int = -1

    @property
    def place(self) -> str:
        """The call or tensor, as a sentence names it."""
        return f"{self.name or self.root or 'the model'} {self.slot}".rstrip()


class NextStep(Described, msgspec.Struct, frozen=True):
    """An experiment that takes the answer further.

    command: of a shell, to be typed as it stands; with `fill_in`, words in capitals are the user's
    to fill in. decides: what its result tells. takes_comparison: it takes the last comparison made
    in the working folder; `about` names one.
    """

    command: str
    decides: str
    fill_in: bool = False
    takes_comparison: bool = False

    def about(self, folder: str) -> NextStep:
        """The same of a comparison that lies in `folder`."""
        if not self.takes_comparison:
            return self
        program, verb, *arguments = shlex.split(self.command)
        command = shlex.join([program, verb, folder, *arguments])
        return msgspec.structs.replace(self, command=command, takes_comparison=False)


class Repetition(msgspec.Struct, frozen=True):
    """What further runs of the reference said about it (A/A).

    runs: their paths. calls: how many calls of the reference do not repeat themselves although
    their inputs are equal. names, op_types: of these, in execution order, at most twenty. own:
    largest relative 2-norm by which such a call parts; largest: by which any tensor does.
    """

    runs: tuple[str, ...]
    calls: int
    names: tuple[str, ...]
    op_types: tuple[str, ...]
    own: float
    largest: float


class ThirdRun(msgspec.Struct, frozen=True):
    """How far both runs are from a third one in higher precision.

    run: its path. calls: regions where all three could be measured; closer: how many of these the
    target is closer in. median, worst: ratio of the target's root-mean-square error to the
    reference's over these, and `name`, where the largest is. reference_err, target_err: relative
    2-norm of the errors of all root outputs together; overlap: the least of theirs.
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
    """A loss that was declared beforehand, or one of quantised layers that was not (`declared`
    False).

    what: in words. calls: how many. names, op_types: of these calls, each once. sqnr_db: the worst
    signal-to-quantisation-noise ratio, 10 log10(sum r^2 / sum (r - y)^2), of any, with `worst` its
    name; None where it is not defined. snippet: a policy that would declare it. reason: the
    policy's own `why`. ignored: nothing was asked of these calls.
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


class Alike(msgspec.Struct, frozen=True):
    """A tensor that counts as equal, or as rounded, with bits that rounding does not make.

    elements: how many differ so. words: what the first of them is on both sides, or what makes the
    whole alike.
    """

    name: str
    slot: str
    step: int
    elements: int
    words: str


class RandomNumbers(msgspec.Struct, frozen=True):
    """Random numbers that differ between the runs: what follows was judged on the target's own.

    name, op_type, step, rank: of the first call that drew others. calls: how many did.
    """

    name: str
    op_type: str
    step: int
    rank: int
    calls: int


class LayerCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """What computing one layer with codes costs.

    sqnr_db: 10 log10(sum r^2 / sum (r - y)^2) of its results y, r being what the float layer makes
    of the same inputs: the lowest of any call. explains: the share of the squared error at the
    model's outputs that goes away where this layer alone is left in float and its results are not
    rounded, below 0 where it hides a part of another's; weights_explain: where a quantiser leaves
    it out, so that its weights are in float, and what other quantised layers make or read stays
    codes; None where that was not tried, or it has no weights. steps: over how many of the first
    steps these shares are. saturated: share of its results beyond the largest code. range_used: its
    largest result over the largest code's; None without codes. measured: the share that goes away
    in a run of the program with this layer in float, as `whence recipe` measured it; None where it
    did not. left_in_float: whether `whence recipe` chose it. node: its node in the float ONNX file,
    "" where that is not known.
    """

    name: str
    op_type: str
    calls: int
    sqnr_db: float
    explains: float | None = None
    weights_explain: float | None = None
    saturated: float = 0.0
    range_used: float | None = None
    steps: int = 0
    measured: float | None = None
    left_in_float: bool = False
    node: str = ""


class Nearest(msgspec.Struct, frozen=True):
    """A call without a partner, and the call of the other run that comes nearest. side: whose call
    `name` is. why: in words.
    """

    side: str
    name: str
    candidate: str
    why: str


class NotThere(msgspec.Struct, frozen=True):
    """What one of the runs lacks (`records.Missing`).

    side: "reference" or "target". accepted: the caller said to do without (`partial`, `ignore`).
    """

    side: str
    kind: Lack
    where: str
    text: str
    accepted: bool = False


class Comparison(Framed, msgspec.Struct, frozen=True):
    """The whole answer. Every output format is written from this and computes nothing.

    counts: calls by verdict. unmatched, incomparable: how many calls have no partner, and how many
    pairs of tensors could not be measured. without_partner: names of the former, by "reference",
    "target" and "ambiguous", each once; nearest: what comes nearest to some of them. environment:
    conditions in which the runs differ. headline: why the status is what it is, where findings do
    not say it; undecided: the call or tensor that this is about, None where it is about the
    whole or the answer is another. repetition: what further runs of the reference showed,
    third: how far both are from the run in higher precision; None when none was given. remarks:
    what passes and is worth a look,
    which counts with --strict. declared: losses that a policy allows, and those of quantised layers
    without one. alike: where the status is same, tensors that pass although rounding does not make
    their bits. random_numbers: where the runs drew other random numbers, None where they drew the
    same or none. generation: what both runs generated. views: the rows of each view that was asked
    for. asked: arguments of `compare` that decide which calls are paired and what may be run, where
    they are not the defaults and can be written down. programs: what the programs of both runs
    differ in, in lines; () when they are not known. occurrences: when operators first differ; None
    where it was not asked for and the runs are of modules. origin: of runs of operators, where the
    first significant tensor comes from. program_files: programs that were given. visible: how large
    a fault would have been named. effect: what the differences come to at the outputs; None where
    nothing differs or no call is known to be a model's. next: experiments that take the answer
    further, the most telling first. ranks: what ranks of the target part in, and those of the
    reference do not.
    missing: what either run lacks; where some of it is not accepted, the status is not `same`.
    levels: the operations of a library whose files labels name, as a tree, in lines.
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
    rows: Sequence[Row]
    verdicts: Sequence[Verdict]
    headline: str = ""
    notes: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    without_partner: dict[str, tuple[str, ...]] = {}
    nearest: tuple[Nearest, ...] = ()
    declared: tuple[Declared, ...] = ()
    layer_costs: tuple[LayerCost, ...] = ()
    alike: tuple[Alike, ...] = ()
    random_numbers: RandomNumbers | None = None
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
    visible: tuple[Visible, ...] = ()
    effect: Effect | None = None
    next: tuple[NextStep, ...] = ()
    undecided: Undecided | None = None
    ranks: tuple[RankFinding, ...] = ()
    missing: tuple[NotThere, ...] = ()
    levels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rows", "verdicts"):
            if isinstance(items := getattr(self, name), list):
                msgspec.structs.force_setattr(self, name, tuple(items))

    def __str__(self) -> str:
        """One line, for a log; at a prompt it says more."""
        line: str = importlib.import_module("whence.report.prompt").line(self)
        return line

    def in_folder(self, folder: str) -> Comparison:
        """The same, with `folder`, where it is written to, in the commands that take it further."""
        return msgspec.structs.replace(self, next=tuple(step.about(folder) for step in self.next))

    def report(self, output: str, *, details: int = 40, force: bool = False) -> None:
        """Write it as one HTML page (`whence.report_html`). Raises OutputExists, StoreFailed."""
        importlib.import_module("whence.api").report_html(
            self, output, details=details, force=force
        )


def _names_of(result: Any) -> list[str]:
    """Names of the calls of a comparison, those of findings first."""
    names: Iterable[str] = (*(f.name for f in result.findings), *(row.name for row in result.rows))
    present = {row.name for row in result.rows}
    return [name for name in dict.fromkeys(names) if name in present]


def _absent(result: Any, name: str) -> str:
    """Why there is no such name, with names that are near."""
    for side, names in result.without_partner.items():
        if name in names:
            return (
                f"{name!r} has more than one possible partner, and was not compared"
                if side == "ambiguous"
                else f"{name!r} is in the {side} alone, and was not compared"
            )
    return unknown(name, _names_of(result))
