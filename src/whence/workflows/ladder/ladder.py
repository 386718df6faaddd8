"""The ladder: runs a program with more compilation or optimisation on each rung, or with the next
release, until its results differ from those of the lowest rung. That step is at fault.

The climber of a command or a model is chosen here (`_of_command`, `_of_model`).

Each comparison of a rung with the lowest gives an outcome; the outcomes of all rungs together give
the stage at fault.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from whence import disk, extras
from whence.errors import CaptureError, OutputExists, UsageError
from whence.instrument.rungs import RUNGS
from whence.readers.opening import open_run
from whence.records import Call, Record, Run
from whence.records.slots import SlotKind, is_mutated, is_output, slot_of_kind
from whence.results import Comparison, Evidence, Ladder, Rung, RungKind, Status, VerdictKind
from whence.workflows.compare import compare
from whence.workflows.ladder.climbers import FINE, Climber, Judgement, first_outside
from whence.workflows.notebook_progress import Tell
from whence.workflows.saved import AnyPath, storing

FILE = "ladder.json"


def ladder(
    model: Any,
    inputs: Any = (),
    *,
    output: AnyPath | None = None,
    force: bool = False,
    seed: int = 0,
    bisect_pass: bool = False,
    tell: Tell | None = None,
    **compile_options: Any,
) -> Ladder:
    """Run a model eagerly and compiled stage by stage, compare each with eager, and name the stage
    that is outside the noise. Of ONNX Runtime: run it with graph optimisations off and level by
    level, and name the level and its first optimiser that is.

    model: a torch.nn.Module (copied for each rung), a function of tensors, or a function without
    parameters that makes one of these anew for each rung; a model that is not compiled yet is given
    to torch.compile with `compile_options`. inputs: a tensor, a tuple of positional or a dict of
    named arguments (copied for every run, under no_grad); or a function that is called with the
    compiled model.

    Or model: a file for ONNX Runtime, its bytes or an InferenceSession; `compile_options` are then
    those of InferenceSession. inputs: a dict of arrays by name, or a list of them, one a step.

    output: a new folder that keeps runs and comparisons. seed: set before every run. bisect_pass:
    name torch's pass too, by its own bisector (20 runs and more); the optimiser of ONNX Runtime is
    always named. tell: called with what is done next. Raises UsageError, OutputExists, CaptureError
    when the lowest rung cannot be run.
    """

    climber = _of_model(model, inputs, compile_options, seed)
    return _climb(climber, output, force, bisect_pass, tell)


def ladder_command(
    command: Sequence[str],
    *,
    output: AnyPath | None = None,
    force: bool = False,
    bisect_pass: bool = False,
    of: str = "",
    releases: Sequence[str] = (),
    tell: Tell | None = None,
    **options: Any,
) -> Ladder:
    """`ladder` for a command: every rung is a run of the command in which torch.compile has another
    backend, or sessions of ONNX Runtime another level, or another release; nothing is edited.

    of: "torch" or "onnxruntime"; "" for torch where the program compiles something, else for ONNX
    Runtime where it makes sessions. releases: folders, each with a release of ONNX Runtime.
    options: of capture (seed, steps, deterministic ...). Without a seed nothing is seeded.
    """

    climber = _of_command(command, of, releases, options)
    return _climb(climber, output, force, bisect_pass, tell)


def _climb(
    climber: Climber,
    output: AnyPath | None,
    force: bool,
    bisect_pass: bool,
    tell: Tell | None,
) -> Ladder:
    from whence.workflows.notebook_progress import telling
    from whence.workflows.rerun import workplace

    if output is not None and force and (Path(output) / FILE).is_file():
        shutil.rmtree(output)
    elif output is not None and (Path(output) / FILE).is_file():
        raise OutputExists(
            f"{output} already holds a ladder; --force replaces it, or choose another -o"
        )
    with ExitStack() as stack:
        place = stack.enter_context(workplace(output, "ladder"))
        stack.enter_context(climber.ready(place))
        say = stack.enter_context(telling(tell))
        rungs = _Rungs(climber, place, output is not None, say)
        rungs.run_base()
        instead = climber.instead(rungs.base)
        if instead is not None:
            rungs.discard_base()
            stack.enter_context(instead.ready(place))
            rungs = _Rungs(instead, place, output is not None, say)
            rungs.run_base()
        result = rungs.climb(bisect_pass)
        if output is not None:
            with storing(f"write {place / FILE}"):
                disk.write_file(place / FILE, msgspec.json.format(msgspec.json.encode(result)))
    return result


class _Rungs:
    """Runs the program rung by rung and compares each run with that of the lowest.

    keep: leave runs and comparisons in `place`.
    """

    def __init__(self, climber: Climber, place: Path, keep: bool, tell: Tell) -> None:
        self.climber, self.place, self.keep, self.tell = climber, place, keep, tell
        self.stairs = climber.stairs
        self.runs: dict[str, Run] = {}
        self.seconds = 0.0  # of the lowest rung
        self.repeated: list[Run] = []  # further runs of the lowest rung
        self.repeats = True
        self.rounding: bool | None = None  # measured and in `repeated`; None: not tried yet
        self.notes: list[str] = []

    @property
    def base(self) -> Run:
        """The run of the lowest rung."""
        return self.runs[self.stairs.base]

    def run_base(self) -> None:
        """Run the lowest rung. Raises CaptureError where it fails."""
        self.seconds = self._capture(self.stairs.base)

    def discard_base(self) -> None:
        """Forget the run of the lowest rung, because another climber takes over."""
        shutil.rmtree(self.place / self.stairs.base)

    def climb(self, bisect_pass: bool) -> Ladder:
        """Run and compare all rungs above."""
        self.notes += self.climber.notes(self.base)
        base, why = self._twice()
        rungs = [base]
        if why:
            self.repeats = False
        why = why or self.climber.nothing(rungs)
        for name in () if why else self.climber.rungs(self.base):
            rungs.append(self._rung(name, rungs))
            if first_outside(rungs[:-1]) is None:
                rungs[-1:] = self._parted(self.climber.parted_by(rungs[-1]), rungs)
            why = why or self.climber.nothing(rungs)
            if why:
                break
        if why:
            return self._result(rungs, Status.UNDECIDED, (), why)
        status, stages, sentence = _judged_rungs(rungs, self.climber)
        result = self._result(rungs, status, stages, sentence)
        if status != Status.DIFFERENT:
            return result
        place = self.climber.place(rungs, self._judge, self.tell)
        named = None
        if bisect_pass or self.stairs.bisects:
            named = self.climber.bisect(rungs, self.base, self._judge, self.tell)
        return msgspec.structs.replace(result, compiler_pass=named, place=place)

    def _result(
        self,
        rungs: Sequence[Rung],
        status: str,
        stages: tuple[str, ...],
        sentence: str,
    ) -> Ladder:
        return Ladder(
            self.climber.words,
            status,
            sentence,
            stages,
            tuple(rungs),
            self.repeats,
            notes=tuple(self.notes),
            kind=self.stairs.kind,
        )

    # ---- runs

    def _twice(self) -> tuple[Rung, str]:
        """Run the lowest rung a second time.

        Returns (the rung, the reason why nothing can be compared with it or "").
        """

        base = self.stairs.base
        again = f"{base}-again"
        self._capture(base, again)
        second = open_run(str(self.place / again))
        rung = Rung(
            base,
            RungKind.BIT_EQUAL,
            seconds=self.seconds,
            run=self._path(base),
            **self.climber.facts(self.place / base, self.base),
        )
        result = self._compared(second, f"cmp-{again}")
        if all(row.measured.identical for row in result.rows) and not result.unmatched:
            return rung, ""
        words = _words_of_worst(result)
        advice = "give --seed N (seed=N) if it draws its weights or inputs at random"
        rung = msgspec.structs.replace(
            rung,
            verdict=RungKind.NOISE,
            sentence=words,
            rel_l2=_distance_at_outputs(result, self.base)[1],
        )
        if (
            result.inputs_differ
            or result.unmatched
            or any(
                v.verdict in (VerdictKind.PARAM_DIFF, VerdictKind.STRUCTURAL)
                for v in result.verdicts
            )
        ):
            return rung, f"the {base} program does not do the same twice: {words}; {advice}"
        try:
            self._compared(second, further=[second])
        except UsageError as error:
            return rung, f"the {base} program does not do the same twice: {error}; {advice}"
        self.repeated, self.repeats = [second], False
        self.notes.append(
            f"{base} does not repeat itself ({words}): what two {base} runs differ by counts as "
            "noise"
        )
        return rung, ""

    def _rung(self, name: str, previous: Sequence[Rung]) -> Rung:

        try:
            seconds = self._capture(name)
        except CaptureError as error:
            return Rung(name, RungKind.FAILED, why=str(error))
        run = open_run(str(self.place / name))
        self.runs[name] = run
        rung = Rung(
            name,
            RungKind.UNDECIDED,
            seconds=seconds,
            run=self._path(name),
            **self.climber.facts(self.place / name, run),
        )
        result = self._compared(run, f"cmp-{name}")
        if self.stairs.rounded and _is_unproven(result) and self._know_rounding():
            result = self._compared(run, f"cmp-{name}")
        below = next((r.name for r in reversed(previous) if r.name in self.runs), "")
        from_base = _distance_at_outputs(result, self.base)
        identical, rel_l2 = self._distance(below, run) if below != self.stairs.base else from_base
        outcome = self._outcome(result, run)
        return msgspec.structs.replace(
            rung,
            verdict=outcome.verdict,
            why=outcome.why,
            evidence=result.evidence,
            sentence=outcome.sentence,
            node=outcome.node,
            rel_l2=from_base[1],
            previous_identical=identical,
            previous_rel_l2=rel_l2,
            comparison=self._path(f"cmp-{name}"),
        )

    def _know_rounding(self) -> bool:
        """Run eager with the result of every module rounded once more.

        This measures rounding when calls cannot be replayed. Returns whether this call added that
        measure: False when the run fails or was made before.
        """

        if self.rounding is None:
            self.rounding = False
            try:
                name = f"{self.stairs.base}-rounded"
                self._capture(self.stairs.rounded, name)
                rounded = open_run(str(self.place / name))
                self._compared(rounded, further=[*self.repeated, rounded])
            except (CaptureError, UsageError) as error:
                self.notes.append(
                    "how far rounding takes this program could not be measured: "
                    f"{_short_reason(str(error))}"
                )
                return False
            self.repeated.append(rounded)
            self.rounding = True
            self.notes.append(
                "where nothing can be replayed, the noise is what an eager run changes by when "
                "every module's result is rounded once more"
            )
            return True
        return False

    def _parted(self, names: Sequence[str], rungs: list[Rung]) -> list[Rung]:
        """Run extra rungs before the last one, until one is outside the noise.

        Returns the extra rungs and the last one, with its distance from the rung below it.
        """
        *before, last = rungs
        first = len(before)
        for name in names:
            before.append(self._rung(name, before))
            if before[-1].verdict == RungKind.OUTSIDE:
                break
        below = next((r.name for r in reversed(before[first:]) if r.name in self.runs), "")
        if below and last.name in self.runs:
            identical, rel_l2 = self._distance(below, self.runs[last.name])
            last = msgspec.structs.replace(
                last, previous_identical=identical, previous_rel_l2=rel_l2
            )
        return [*before[first:], last]

    def _capture(self, rung: str, name: str = "") -> float:

        self.tell(f"running {name or rung}")
        path = self.place / (name or rung)
        seconds = self.climber.capture(path, rung)
        if rung == self.stairs.base and not name:
            self.runs[rung] = open_run(str(path))
        return seconds

    def _compared(
        self, target: Run, name: str = "", further: Sequence[Run] | None = None
    ) -> Comparison:
        """Compare a run with that of the lowest rung.

        name: of the folder that keeps the comparison, "" for none. further: repeated runs of the
        lowest rung; None for those made so far.
        """

        self.tell(f"comparing {Path(target.path).name}")
        output = self.place / name if self.keep and name else None
        again = self.repeated if further is None else further
        if self.stairs.sees_inside:
            return compare(self.base, target, output=output, force=True, again=again)
        # Calls inside compiled code have no partner, so only its boundary is compared.
        return compare(self.base, target, output=output, force=True, again=again, min_coverage=0.0)

    def _outcome(self, result: Comparison, target: Run) -> Outcome:
        if self.stairs.sees_inside:
            return _outcome_of(result, self.base, target)
        outcome = _boundary_of(result)
        words = "" if result.inputs_differ else _left_otherwise(result, self.base, target)
        return Outcome(RungKind.OUTSIDE, "", words) if words else outcome

    def _distance(self, reference: str, target: Run) -> tuple[bool, float | None]:

        result = compare(self.runs[reference], target, replay=False, min_coverage=0.0)
        return _distance_at_outputs(result, self.runs[reference])

    def _path(self, name: str) -> str:
        return str(self.place / name) if self.keep else ""

    def _judge(self, capture: Callable[[Path], object]) -> Judgement:

        path = self.place / "bisect"
        try:
            capture(path)
            run = open_run(str(path))
            outcome = self._outcome(self._compared(run), run)
            return Judgement(outcome.verdict, outcome.node, run)
        except CaptureError:
            return Judgement(RungKind.FAILED)
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _of_model(model: Any, inputs: Any, options: Mapping[str, Any], seed: int) -> Climber:
    """The climber of a torch model, or of an ONNX file, bytes or an InferenceSession.

    options: of torch.compile or InferenceSession. Raises UsageError.
    """
    from whence.instrument import onnxruntime
    from whence.workflows.ladder.of_levels import LevelsModel
    from whence.workflows.ladder.of_torch import TorchModel

    if not isinstance(model, (str, os.PathLike, bytes)) and not onnxruntime.owns(model):
        return TorchModel(model, inputs, options, seed)
    extras.needed("onnxruntime", "a ladder")
    steps = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not steps or not all(isinstance(feeds, Mapping) for feeds in steps):
        raise UsageError(
            "a model of ONNX Runtime is given its inputs by name: a dict of arrays, or a list of "
            "them for several steps"
        )
    return LevelsModel(model, steps, options, seed)


def _of_command(
    command: Sequence[str], of: str, releases: Sequence[str], options: Mapping[str, Any]
) -> Climber:
    """The climber of a command.

    of: "torch", "onnxruntime", or "" to choose by its first run. releases: folders of ONNX Runtime.
    options: of capture. Raises UsageError.
    """
    from whence.workflows.ladder.of_levels import LevelsCommand
    from whence.workflows.ladder.of_releases import ReleasesCommand
    from whence.workflows.ladder.of_torch import TorchCommand

    if of not in ("", *RUNGS):
        raise UsageError(f"of: {of!r} is not one of {', '.join(RUNGS)}")
    if releases and of == "torch":
        raise UsageError("releases are of ONNX Runtime: leave of='torch' (--of torch) out")
    if releases:
        return ReleasesCommand(command, releases, options)
    if of == "onnxruntime":
        return LevelsCommand(command, options)
    return TorchCommand(command, options, chooses=not of)


def _judged_rungs(rungs: Sequence[Rung], climber: Climber) -> tuple[str, tuple[str, ...], str]:
    """Judge a whole ladder: (status, what is at fault, that in a sentence)."""
    top, base = rungs[-1], rungs[0].name
    outside = next((i for i, r in enumerate(rungs) if r.verdict == RungKind.OUTSIDE), -1)
    if outside > 0:
        fine = max(i for i, r in enumerate(rungs[:outside]) if r.verdict in FINE)
        named = tuple(climber.stage(r.name, top) for r in rungs[fine + 1 : outside + 1])
        start = f"{rungs[fine].name} is {_words_of(rungs[fine], base)}, " if fine else ""
        first = rungs[outside]
        sentence = f"{start}{first.name} is outside the noise: {first.sentence}"
        if len(named) > 1:
            sentence += "".join(f"; {_with_reason(r, base)}" for r in rungs[fine + 1 : outside])
        if top.verdict in FINE:
            sentence += (
                f"; the program as it is ({top.name}) is {_words_of(top, base)} all the same"
            )
        return Status.DIFFERENT, named, sentence
    bad = [r for r in rungs if r.verdict not in FINE]
    if top.verdict in FINE:
        equal = all(r.verdict == RungKind.BIT_EQUAL for r in rungs)
        start = f"every rung is bit-equal to {base}" if equal else "no rung is outside the noise"
        return Status.SAME, (), "; ".join((start, *(_with_reason(r, base) for r in bad)))
    return Status.UNDECIDED, (), "; ".join(_with_reason(r, base) for r in bad)


class Outcome(NamedTuple):
    """The result of comparing a run with the lowest rung.

    why: the reason when undecided. sentence: about the largest difference, "" for none. node: name
    and type of the first that differs, when the run is outside the noise.
    """

    verdict: str
    why: str = ""
    sentence: str = ""
    node: str = ""


def _boundary_of(result: Comparison) -> Outcome:
    """The outcome of a comparison taken at face value."""
    words = _words_of_worst(result)
    if result.status == Status.DIFFERENT:
        return Outcome(RungKind.OUTSIDE, "", words, _first_node(result))
    if result.status == Status.UNDECIDED:
        why = result.headline or "; ".join(result.inputs_differ[:1]) or words
        return Outcome(RungKind.UNDECIDED, why, words)
    if all(row.measured.identical for row in result.rows):
        return Outcome(RungKind.BIT_EQUAL)
    return Outcome(RungKind.NOISE, "", words)


def _outcome_of(result: Comparison, reference: Run, target: Run) -> Outcome:
    """The outcome of a comparison that sees nodes.

    An optimiser may replace nodes by equivalent ones, so the outputs of the model must differ too.
    """
    outcome = _boundary_of(result)
    if result.inputs_differ:
        return outcome
    before, after = _returned(reference), _returned(target)
    for key in before.keys() & after.keys():
        one, other = before[key], after[key]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            name = f"{key.root} {key.slot}"
            lowest = _form_of_record(one)
            words = f"{name}: returned as {_form_of_record(other)}, on the lowest rung as {lowest}"
            return Outcome(RungKind.OUTSIDE, "", words, name)
    if outcome.verdict in FINE:
        return outcome
    if before and {k: r.hash for k, r in before.items()} == {k: r.hash for k, r in after.items()}:
        words = f"what is returned is bit-equal, though inside not all is: {outcome.sentence}"
        return Outcome(RungKind.NOISE, "", words)
    if result.findings and all(f.verdict == VerdictKind.PARAM_DIFF for f in result.findings):
        # for example int8 codes stored as uint8: each differs by 128 and has the same meaning
        why = (
            "only parameters differ, which an optimiser may write otherwise, and so does what is "
            f"returned; whether by more than rounding is not known: {outcome.sentence}"
        )
        return Outcome(RungKind.UNDECIDED, why, outcome.sentence)
    return outcome


def _left_otherwise(result: Comparison, reference: Run, target: Run) -> str:
    """The first root call that returns another form, or changes another input in place, in words.

    "" for none. Two programs may do so and compute the same; stages of one program may not.
    """
    for pair in result.plan.pairs:
        before, after = reference.calls[pair.reference], target.calls[pair.target]
        if before.parent != -1:
            continue
        name, returned = after.scope or after.op_type, _forms(target, after)
        for slot, form in _forms(reference, before).items():
            if returned.get(slot, form) != form:
                return f"{name}: its {slot} is {returned[slot]}, on the lowest rung {form}"
        for slot in sorted(_changed(reference, before) ^ _changed(target, after)):
            has = "does not change" if slot in _changed(reference, before) else "changes"
            return f"{name}: it {has} its {slot} in place"
    return ""


def _forms(run: Run, call: Call) -> dict[str, str]:
    """The form of each output."""
    slots = {ref.slot: run.records[ref.record] for ref in call.refs if is_output(ref.slot)}
    return {slot: _form_of_record(record) for slot, record in slots.items()}


def _changed(run: Run, call: Call) -> set[str]:
    """The inputs that hold other values after the call."""
    records = {ref.slot: run.records[ref.record] for ref in call.refs}
    pairs = ((slot, slot_of_kind(slot, SlotKind.INPUT)) for slot in records if is_mutated(slot))
    return {
        before
        for after, before in pairs
        if before in records
        and (records[after].hash or records[after].id)
        != (records[before].hash or records[before].id)
    }


class _Place(NamedTuple):
    """The place of an output of a root call."""

    root: str
    rank: int
    step: int
    occurrence: int
    slot: str


def _returned(run: Run) -> dict[_Place, Record]:
    """Records of the outputs of root calls, by place."""
    return {
        _Place(call.root, call.rank, call.step, call.occurrence, ref.slot): run.records[ref.record]
        for call in run.calls
        if call.parent == -1
        for ref in call.refs
        if is_output(ref.slot)
    }


def _form_of_record(record: Record) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _first_node(result: Comparison) -> str:
    """Name and type of the first finding that is not only about parameters, which an optimiser may
    rewrite.

    The first finding when there is no other, "" without findings.
    """
    computed = [f for f in result.findings if f.verdict != VerdictKind.PARAM_DIFF]
    found = next(iter(computed or result.findings), None)
    return "" if found is None else f"{found.name} ({found.op_type})"


def _distance_at_outputs(result: Comparison, reference: Run) -> tuple[bool, float | None]:
    """(whether everything compared is bit-equal, largest rel_l2 over the outputs of root calls or
    None).
    """
    roots = {
        i
        for i, pair in enumerate(result.plan.pairs)
        if reference.calls[pair.reference].parent == -1
    }
    outputs = [
        row.measured for row in result.rows if row.pair in roots and is_output(row.reference_slot)
    ]
    sizes = [0.0 if m.identical else m.values.get("rel_l2") for m in outputs]
    errors = [s for s in sizes if s is not None]
    largest = max(errors) if errors and len(errors) == len(sizes) else None
    return all(row.measured.identical for row in result.rows), largest


def _is_unproven(result: Comparison) -> bool:
    """Whether the difference is known only from two dumps, without a replay."""
    return (
        result.status != Status.SAME
        and not result.inputs_differ
        and all(f.evidence != Evidence.REPLAY for f in result.findings)
    )


def _words_of_worst(result: Comparison) -> str:
    """Describe the largest difference."""
    if result.inputs_differ:
        return result.inputs_differ[0]
    if result.findings:
        first = result.findings[0]
        return f"{first.name}: {first.sentence}"
    scored = [v for v in result.verdicts if v.verdict != VerdictKind.IDENTICAL]
    worst = max(scored, key=lambda v: (v.score or 0.0, v.numbers.get("e_out") or 0.0), default=None)
    return result.headline if worst is None else worst.sentence


def _short_reason(why: str) -> str:
    """The last line of an output when it names an exception, else the first line."""
    from whence.workflows.rerun import RAISED

    lines = [line.removeprefix("  | ") for line in why.splitlines()]
    return next((line for line in lines if RAISED.match(line)), lines[0] if lines else "")


def _with_reason(rung: Rung, base: str) -> str:
    return f"{rung.name} {_words_of(rung, base)}: {_short_reason(rung.why)}"


def _words_of(rung: Rung, base: str) -> str:
    words: dict[str, str] = {
        RungKind.BIT_EQUAL: f"bit-equal to {base}",
        RungKind.NOISE: "within the noise",
        RungKind.FAILED: "does not compile or run",
    }
    return words.get(rung.verdict, rung.verdict)
