"""The ladder: a program compiled a little further each time, until it no longer computes what eager
does. That stage is at fault.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whence.errors import CaptureError, OutputExists, StoreFailed, UsageError
from whence.results import Ladder, Pass, Rung, RungKind, Status, VerdictKind
from whence.workflows.ladder.verdict import (
    FINE,
    distance,
    is_unproven,
    judged,
    short_reason,
    verdict_of,
    words_of_worst,
)

if TYPE_CHECKING:
    from whence.records import Run
    from whence.results import Comparison
    from whence.workflows.ladder.climbers import Climber

Tell = Callable[[str], None]

RUNGS = ("aot_eager", "aot_eager_decomp_partition", "inductor")
"""What runs after eager. A rung more, "dynamo", runs when the first of these is outside: it parts
dynamo from AOTAutograd.
"""

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
    that is outside the noise.

    model: a torch.nn.Module (copied for each rung), a function of tensors, or a function without
    parameters that makes one of these anew for each rung; a model that is not compiled yet is given
    to torch.compile with `compile_options`. inputs: a tensor, a tuple of positional or a dict of
    named arguments (copied for every run, under no_grad); or a function that is called with the
    compiled model. output: a new folder that keeps runs and comparisons. seed: set before every
    run. bisect_pass: name the pass too, by torch's own bisector (20 runs and more). tell: called
    with what is done next. Raises UsageError, OutputExists, CaptureError when the eager model
    cannot be run.
    """
    from whence.workflows.ladder.climbers import InProcess

    return _climb(InProcess(model, inputs, compile_options, seed), output, force, bisect_pass, tell)


def ladder_command(
    command: Sequence[str],
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    bisect_pass: bool = False,
    tell: Tell | None = None,
    **options: Any,
) -> Ladder:
    """`ladder` for a command: every rung is a run of the command in which torch.compile has another
    backend; nothing is edited.

    options: of capture (seed, steps, deterministic ...). Without a seed nothing is seeded.
    """
    from whence.workflows.ladder.climbers import OfCommand

    return _climb(OfCommand(command, options), output, force, bisect_pass, tell)


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
    with workplace(output, "ladder") as place, climber.ready(place), telling(tell) as say:
        rungs = _Rungs(climber, place, output is not None, say)
        result = rungs.climb(bisect_pass)
        if output is not None:
            try:
                (place / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(result)))
            except OSError as error:
                raise StoreFailed(
                    f"cannot write {place / FILE}: {error.strerror or error}"
                ) from error
    return result


class _Rungs:
    """Runs the program rung by rung and compares each run with the eager one. keep: leave runs and
    comparisons in `place`.
    """

    def __init__(self, climber: Climber, place: Path, keep: bool, tell: Tell) -> None:
        self.climber, self.place, self.keep, self.tell = climber, place, keep, tell
        self.runs: dict[str, Run] = {}
        self.repeated: list[Run] = []  # further eager runs
        self.repeats = True
        self.rounding: bool | None = None  # measured and in `repeated`; None: not tried yet
        self.notes: list[str] = []

    def climb(self, bisect_pass: bool) -> Ladder:
        eager, why = self._eager()
        if why:
            self.repeats = False
            return self._result([eager], Status.UNDECIDED, (), why)
        rungs = [eager]
        for name in RUNGS:
            rungs.append(self._rung(name, rungs))
            if name == RUNGS[0] and rungs[-1].verdict not in FINE:
                rungs[-1:] = self._with_dynamo(rungs)
            elif name == RUNGS[0] and not rungs[-1].graphs:
                none = "compiled no graph" if rungs[-1].backends else "is never asked for anything"
                sentence = (
                    f"the program never compiles (torch.compile {none}), so there is no "
                    "stage to try"
                )
                return self._result(rungs, Status.UNDECIDED, (), sentence)
        status, stages, sentence = judged(rungs)
        compiler_pass = None
        if bisect_pass and status == Status.DIFFERENT:
            compiler_pass = self._pass(rungs)
        return self._result(rungs, status, stages, sentence, compiler_pass)

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
        )

    # ---- runs

    def _eager(self) -> tuple[Rung, str]:
        """Run eager twice; (its rung, why nothing can be compared with it or "")."""
        from whence.readers.opening import open_run

        seconds = self._capture("eager")
        self._capture("eager", "eager-again")
        second = open_run(str(self.place / "eager-again"))
        rung = Rung("eager", RungKind.BIT_EQUAL, seconds=seconds, run=self._path("eager"))
        result = self._compared(second, "cmp-eager-again")
        if all(row.measured.identical for row in result.rows) and not result.unmatched:
            return rung, ""
        words = words_of_worst(result)
        advice = "give --seed N (seed=N) if it draws its weights or inputs at random"
        rung = msgspec.structs.replace(
            rung,
            verdict=RungKind.NOISE,
            sentence=words,
            rel_l2=distance(result, self.runs["eager"])[1],
        )
        if (
            result.inputs_differ
            or result.unmatched
            or any(
                v.verdict in (VerdictKind.PARAM_DIFF, VerdictKind.STRUCTURAL)
                for v in result.verdicts
            )
        ):
            return rung, f"the eager program does not do the same twice: {words}; {advice}"
        try:
            self._compared(second, further=[second])
        except UsageError as error:
            return rung, f"the eager program does not do the same twice: {error}; {advice}"
        self.repeated, self.repeats = [second], False
        self.notes.append(
            f"eager does not repeat itself ({words}): what two eager runs differ by counts as noise"
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
            **self._compiled(name, run),
        )
        result = self._compared(run, f"cmp-{name}")
        if is_unproven(result) and self._know_rounding():
            result = self._compared(run, f"cmp-{name}")
        below = next((r.name for r in reversed(previous) if r.name in self.runs), "")
        from_eager = distance(result, self.runs["eager"])
        identical, rel_l2 = self._distance(below, run) if below != "eager" else from_eager
        verdict, why = verdict_of(result)
        return msgspec.structs.replace(
            rung,
            verdict=verdict,
            why=why,
            evidence=result.evidence,
            sentence="" if verdict == RungKind.BIT_EQUAL else words_of_worst(result),
            rel_l2=from_eager[1],
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
                self._capture("rounded", "eager-rounded")
                rounded = open_run(str(self.place / "eager-rounded"))
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

    def _compiled(self, name: str, run: Run) -> dict[str, Any]:
        compiled = self.climber.compiled(self.place / name, run)
        return {
            "backends": tuple(dict.fromkeys(b for c in compiled for b in c.backends)),
            "graphs": sum(c.graphs for c in compiled),
            "breaks": sum(c.breaks for c in compiled),
        }

    def _with_dynamo(self, rungs: list[Rung]) -> list[Rung]:
        """The last rung, which is not fine, with dynamo alone before it."""
        last = rungs[-1]
        dynamo = self._rung("dynamo", rungs[:-1])
        if "dynamo" in self.runs and last.name in self.runs:
            identical, rel_l2 = self._distance("dynamo", self.runs[last.name])
            last = msgspec.structs.replace(
                last, previous_identical=identical, previous_rel_l2=rel_l2
            )
        return [dynamo, last]

    def _capture(self, rung: str, name: str = "") -> float:
        from whence.readers.opening import open_run

        self.tell(f"running {name or rung}")
        path = self.place / (name or rung)
        seconds = self.climber.capture(path, rung)
        if rung == "eager" and not name:
            self.runs["eager"] = open_run(str(path))
        return seconds

    def _compared(
        self, target: Run, name: str = "", further: Sequence[Run] | None = None
    ) -> Comparison:
        """Compare with eager. name: of the folder that keeps it, "" for none. again: further eager
        runs, None for those there are.
        """
        from whence.workflows.compare import compare

        self.tell(f"comparing {Path(target.path).name}")
        output = self.place / name if self.keep and name else None
        # What lies inside compiled code has no partner; the question here is asked at its boundary.
        return compare(
            self.runs["eager"],
            target,
            output=output,
            force=True,
            again=self.repeated if further is None else further,
            min_coverage=0.0,
        )

    def _distance(self, reference: str, target: Run) -> tuple[bool, float | None]:
        from whence.workflows.compare import compare

        result = compare(self.runs[reference], target, replay=False, min_coverage=0.0)
        return distance(result, self.runs[reference])

    def _path(self, name: str) -> str:
        return str(self.place / name) if self.keep else ""

    def _pass(self, rungs: Sequence[Rung]) -> Pass:
        from whence.readers.opening import open_run
        from whence.workflows.ladder.bisect import bisect

        def good(environment: Mapping[str, str]) -> bool | None:
            path = self.place / "bisect"
            try:
                self.climber.capture(path, "inductor", environment)
                verdict, _ = verdict_of(self._compared(open_run(str(path))))
            except CaptureError:
                return None
            finally:
                shutil.rmtree(path, ignore_errors=True)
            return None if verdict == RungKind.UNDECIDED else verdict in FINE

        # Its backend "eager" is our rung dynamo, which is fine whenever the rung behind it is. What
        # could not be judged is passed over.
        answers = {r.name: r.verdict != RungKind.OUTSIDE for r in rungs[1:]}
        answers["eager"] = answers.pop("dynamo", answers["aot_eager"])
        return bisect(good, answers, self.climber.bisecting(self.runs["eager"]), self.tell)
