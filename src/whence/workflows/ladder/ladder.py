"""The ladder: a program compiled or optimised a little further each time, or with the next release,
until it no longer computes what the lowest rung does. That step is at fault.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whence import disk
from whence.errors import CaptureError, OutputExists, StoreFailed, UsageError
from whence.results import Ladder, Pass, Rung, RungKind, Status, VerdictKind
from whence.workflows.ladder.climbers import Judgement, first_outside
from whence.workflows.ladder.verdict import (
    Outcome,
    boundary_of,
    distance,
    is_unproven,
    judged,
    outcome_of,
    short_reason,
    words_of_worst,
)

if TYPE_CHECKING:
    from whence.records import Run
    from whence.results import Comparison
    from whence.workflows.ladder.climbers import Climber

Tell = Callable[[str], None]

FILE = "ladder.json"


def ladder(
    model: Any,
    inputs: Any = (),
    *,
    output: str | os.PathLike[str] | None = None,
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
    from whence.workflows.ladder.choosing import of_model

    climber = of_model(model, inputs, compile_options, seed)
    return _climb(climber, output, force, bisect_pass, tell)


def ladder_command(
    command: Sequence[str],
    *,
    output: str | os.PathLike[str] | None = None,
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
    from whence.workflows.ladder.choosing import of_command

    climber = of_command(command, of, releases, options)
    return _climb(climber, output, force, bisect_pass, tell)


def _climb(
    climber: Climber,
    output: str | os.PathLike[str] | None,
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
            try:
                disk.write_file(place / FILE, msgspec.json.format(msgspec.json.encode(result)))
            except OSError as error:
                raise StoreFailed(
                    f"cannot write {place / FILE}: {error.strerror or error}"
                ) from error
    return result


class _Rungs:
    """Runs the program rung by rung and compares each run with that of the lowest. keep: leave runs
    and comparisons in `place`.
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
        """The program is climbed otherwise: forget the run of the lowest rung."""
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
        status, stages, sentence = judged(rungs, self.climber)
        named = None
        if status == Status.DIFFERENT and (bisect_pass or self.stairs.bisects):
            named = self.climber.bisect(rungs, self.base, self._judge, self.tell)
        return self._result(rungs, status, stages, sentence, named)

    def _result(
        self,
        rungs: Sequence[Rung],
        status: str,
        stages: tuple[str, ...],
        sentence: str,
        compiler_pass: Pass | None = None,
    ) -> Ladder:
        return Ladder(
            self.climber.words,
            status,
            sentence,
            stages,
            tuple(rungs),
            self.repeats,
            compiler_pass,
            tuple(self.notes),
            self.stairs.kind,
        )

    # ---- runs

    def _twice(self) -> tuple[Rung, str]:
        """Run the lowest rung again; (the rung, why nothing can be compared with it or "")."""
        from whence.readers.opening import open_run

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
        words = words_of_worst(result)
        advice = "give --seed N (seed=N) if it draws its weights or inputs at random"
        rung = msgspec.structs.replace(
            rung,
            verdict=RungKind.NOISE,
            sentence=words,
            rel_l2=distance(result, self.base)[1],
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
        from whence.readers.opening import open_run

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
        if self.stairs.rounded and is_unproven(result) and self._know_rounding():
            result = self._compared(run, f"cmp-{name}")
        below = next((r.name for r in reversed(previous) if r.name in self.runs), "")
        from_base = distance(result, self.base)
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
        """Run eager with every module's result rounded once more: a measure where nothing can be
        replayed. False where it is no use.
        """
        from whence.readers.opening import open_run

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
                    f"{short_reason(str(error))}"
                )
                return False
            self.repeated.append(rounded)
            self.rounding = True
            self.notes.append(
                "where nothing can be replayed, the noise is what an eager run differs by whose "
                "modules' results are rounded once more"
            )
            return True
        return False

    def _parted(self, names: Sequence[str], rungs: list[Rung]) -> list[Rung]:
        """The last rung with others before it."""
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
        from whence.readers.opening import open_run

        self.tell(f"running {name or rung}")
        path = self.place / (name or rung)
        seconds = self.climber.capture(path, rung)
        if rung == self.stairs.base and not name:
            self.runs[rung] = open_run(str(path))
        return seconds

    def _compared(
        self, target: Run, name: str = "", further: Sequence[Run] | None = None
    ) -> Comparison:
        """Compare with the lowest rung. name: of the folder that keeps it, "" for none. further:
        runs of the lowest rung, None for those there are.
        """
        from whence.workflows.compare import compare

        self.tell(f"comparing {Path(target.path).name}")
        output = self.place / name if self.keep and name else None
        again = self.repeated if further is None else further
        if self.stairs.sees_inside:
            return compare(self.base, target, output=output, force=True, again=again)
        # What lies inside compiled code has no partner; the question here is asked at its boundary.
        return compare(self.base, target, output=output, force=True, again=again, min_coverage=0.0)

    def _outcome(self, result: Comparison, target: Run) -> Outcome:
        if self.stairs.sees_inside:
            return outcome_of(result, self.base, target)
        return boundary_of(result)

    def _distance(self, reference: str, target: Run) -> tuple[bool, float | None]:
        from whence.workflows.compare import compare

        result = compare(self.runs[reference], target, replay=False, min_coverage=0.0)
        return distance(result, self.runs[reference])

    def _path(self, name: str) -> str:
        return str(self.place / name) if self.keep else ""

    def _judge(self, capture: Callable[[Path], object]) -> Judgement:
        from whence.readers.opening import open_run

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
