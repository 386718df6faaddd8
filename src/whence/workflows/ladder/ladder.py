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
from whence.records.slots import is_output
from whence.results import Evidence, Ladder, Pass, Rung, RungKind, Status, VerdictKind

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
_STAGES = {
    "dynamo": "dynamo",
    "aot_eager": "aot_autograd",
    "aot_eager_decomp_partition": "decomposition",
    "inductor": "inductor",
}
_FINE = (RungKind.BIT_EQUAL, RungKind.NOISE)


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
    parameters that makes one of these anew for each rung; what is not compiled yet is given to
    torch.compile with `compile_options`. inputs: a tensor, a tuple of positional or a dict of named
    arguments (copied for every run, under no_grad); or a function that is called with the compiled
    model. output: a new folder that keeps runs and comparisons. seed: set before every run.
    bisect_pass: name the pass too, by torch's own bisector (20 runs and more). tell: called with
    what is done next. Raises UsageError, OutputExists, CaptureError when the eager model cannot be
    run.
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
    from whence.workflows.rerun import workplace

    if output is not None and force and (Path(output) / FILE).is_file():
        shutil.rmtree(output)
    elif output is not None and (Path(output) / FILE).is_file():
        raise OutputExists(
            f"{output} already holds a ladder; --force replaces it, or choose another -o"
        )
    with workplace(output, "ladder") as place, climber.ready(place):
        found = _Ladder(climber, place, output is not None, tell or (lambda _: None)).result(
            bisect_pass
        )
        if output is not None:
            try:
                (place / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found)))
            except OSError as error:
                raise StoreFailed(
                    f"cannot write {place / FILE}: {error.strerror or error}"
                ) from error
    return found


class _Ladder:
    def __init__(self, climber: Climber, place: Path, kept: bool, tell: Tell) -> None:
        self.climber, self.place, self.kept, self.tell = climber, place, kept, tell
        self.runs: dict[str, Run] = {}
        self.again: list[Run] = []
        self.repeats = True
        self.rounding: bool | None = None  # known and in `again`; None: nobody asked yet
        self.notes: list[str] = []

    def result(self, bisect_pass: bool) -> Ladder:
        first, why = self._eager()
        if why:
            return Ladder(
                self.climber.words,
                Status.UNDECIDED,
                why,
                (),
                (first,),
                False,
                None,
                tuple(self.notes),
            )
        rungs = [first]
        for name in RUNGS:
            rungs.append(self._rung(name, rungs))
            if name == RUNGS[0] and rungs[-1].verdict not in _FINE:
                rungs[-1:] = self._parted(rungs)
            elif name == RUNGS[0] and not rungs[-1].graphs:
                none = "compiled no graph" if rungs[-1].backends else "is never asked for anything"
                sentence = (
                    f"the program never compiles (torch.compile {none}), so there is no "
                    "stage to try"
                )
                return Ladder(
                    self.climber.words,
                    Status.UNDECIDED,
                    sentence,
                    (),
                    tuple(rungs),
                    self.repeats,
                    None,
                    tuple(self.notes),
                )
        status, stages, sentence = self._judged(rungs)
        found = None
        if bisect_pass and status == Status.DIFFERENT:
            found = self._pass(rungs)
        return Ladder(
            self.climber.words,
            status,
            sentence,
            stages,
            tuple(rungs),
            self.repeats,
            found,
            tuple(self.notes),
        )

    # ---- runs

    def _eager(self) -> tuple[Rung, str]:
        """The eager run, and why nothing can be compared with it ("" where it can): it is run twice
        first.
        """
        from whence.readers.opening import open_run

        seconds = self._capture("eager")
        self._capture("eager", "eager-again")
        again = open_run(str(self.place / "eager-again"))
        rung = Rung("eager", RungKind.BIT_EQUAL, seconds=seconds, run=self._kept("eager"))
        result = self._compared(again, "cmp-eager-again")
        if all(row.measured.identical for row in result.rows) and not result.unmatched:
            return rung, ""
        words = _words(result)
        asked = "give --seed N (seed=N) if it draws its weights or inputs at random"
        rung = msgspec.structs.replace(
            rung,
            verdict=RungKind.NOISE,
            sentence=words,
            rel_l2=_apart(result, self.runs["eager"])[1],
        )
        if (
            result.inputs_differ
            or result.unmatched
            or any(
                v.verdict in (VerdictKind.PARAM_DIFF, VerdictKind.STRUCTURAL)
                for v in result.verdicts
            )
        ):
            return rung, f"the eager program does not do the same twice: {words}; {asked}"
        try:
            self._compared(again, again=[again])
        except UsageError as error:
            return rung, f"the eager program does not do the same twice: {error}; {asked}"
        self.again, self.repeats = [again], False
        self.notes.append(
            f"eager does not repeat itself ({words}): what two eager runs differ by counts as noise"
        )
        return rung, ""

    def _rung(self, name: str, before: Sequence[Rung]) -> Rung:
        from whence.readers.opening import open_run

        try:
            seconds = self._capture(name)
        except CaptureError as error:
            return Rung(name, RungKind.FAILED, why=str(error))
        run = open_run(str(self.place / name))
        self.runs[name] = run
        made = Rung(
            name,
            RungKind.UNDECIDED,
            seconds=seconds,
            run=self._kept(name),
            **self._compiled(name, run),
        )
        result = self._compared(run, f"cmp-{name}")
        if _unproven(result) and self._know_rounding():
            result = self._compared(run, f"cmp-{name}")
        previous = next((r.name for r in reversed(before) if r.name in self.runs), "")
        identical, apart = (
            self._apart(previous, run)
            if previous != "eager"
            else _apart(result, self.runs["eager"])
        )
        verdict, why = verdict_of(result)
        return msgspec.structs.replace(
            made,
            verdict=verdict,
            why=why,
            evidence=result.evidence,
            sentence="" if verdict == RungKind.BIT_EQUAL else _words(result),
            rel_l2=_apart(result, self.runs["eager"])[1],
            previous_identical=identical,
            previous_rel_l2=apart,
            comparison=self._kept(f"cmp-{name}"),
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
                self._compared(rounded, again=[*self.again, rounded])
            except (CaptureError, UsageError) as error:
                self.notes.append(
                    "how far rounding takes this program could not be measured: "
                    f"{_short(str(error))}"
                )
                return False
            self.again.append(rounded)
            self.rounding = True
            self.notes.append(
                "where nothing can be replayed, the noise is what an eager run differs by whose "
                "modules' results are rounded once more"
            )
            return True
        return False

    def _compiled(self, name: str, run: Run) -> dict[str, Any]:
        found = self.climber.compiled(self.place / name, run)
        backends = tuple(dict.fromkeys(b for f in found for b in f.backends))
        return {
            "backends": backends,
            "graphs": sum(f.graphs for f in found),
            "breaks": sum(f.breaks for f in found),
        }

    def _parted(self, rungs: list[Rung]) -> list[Rung]:
        """The first rung is not fine: dynamo alone before it."""
        last = rungs[-1]
        dynamo = self._rung("dynamo", rungs[:-1])
        if "dynamo" in self.runs and last.name in self.runs:
            identical, apart = self._apart("dynamo", self.runs[last.name])
            last = msgspec.structs.replace(
                last, previous_identical=identical, previous_rel_l2=apart
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
        self, target: Run, name: str = "", again: Sequence[Run] | None = None
    ) -> Comparison:
        """Against eager. name: of the folder that keeps it, "" for none. again: further eager runs,
        None for those that are known.
        """
        from whence.workflows.compare import compare

        self.tell(f"comparing {Path(target.path).name}")
        output = self.place / name if self.kept and name else None
        # What lies inside compiled code has no partner; the question here is asked at its boundary.
        return compare(
            self.runs["eager"],
            target,
            output=output,
            force=True,
            again=self.again if again is None else again,
            min_coverage=0.0,
        )

    def _apart(self, reference: str, target: Run) -> tuple[bool, float | None]:
        from whence.workflows.compare import compare

        result = compare(self.runs[reference], target, replay=False, min_coverage=0.0)
        return _apart(result, self.runs[reference])

    def _kept(self, name: str) -> str:
        return str(self.place / name) if self.kept else ""

    # ---- the answer

    def _judged(self, rungs: Sequence[Rung]) -> tuple[str, tuple[str, ...], str]:
        top = rungs[-1]
        own = next((b for b in top.backends if b != "inductor"), "")
        stages = {**_STAGES, "inductor": own or "inductor"}
        at = next((i for i, r in enumerate(rungs) if r.verdict == RungKind.OUTSIDE), -1)
        if at > 0:
            fine = max(i for i, r in enumerate(rungs[:at]) if r.verdict in _FINE)
            named = tuple(stages[r.name] for r in rungs[fine + 1 : at + 1])
            before = f"{rungs[fine].name} is {_said(rungs[fine])}, " if fine else ""
            sentence = f"{before}{rungs[at].name} is outside the noise: {rungs[at].sentence}"
            if len(named) > 1:
                sentence += "".join(
                    f"; {r.name} {_said(r)}: {_short(r.why)}" for r in rungs[fine + 1 : at]
                )
            if top.verdict in _FINE:
                sentence += f"; the program as it is ({top.name}) is {_said(top)} all the same"
            return Status.DIFFERENT, named, sentence
        bad = [r for r in rungs if r.verdict not in _FINE]
        if top.verdict in _FINE:
            equal = all(r.verdict == RungKind.BIT_EQUAL for r in rungs)
            rest = "".join(f"; {r.name} {_said(r)}: {_short(r.why)}" for r in bad)
            return (
                Status.SAME,
                (),
                ("every rung is bit-equal to eager" if equal else "no rung is outside the noise")
                + rest,
            )
        return Status.UNDECIDED, (), "; ".join(f"{r.name} {_said(r)}: {_short(r.why)}" for r in bad)

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
            return None if verdict == RungKind.UNDECIDED else verdict in _FINE

        # Its backend "eager" is our rung dynamo, which is fine whenever the rung behind it is. What
        # could not be judged is passed over.
        known = {r.name: r.verdict != RungKind.OUTSIDE for r in rungs[1:]}
        known["eager"] = known.pop("dynamo", known["aot_eager"])
        return bisect(good, known, self.climber.bisecting(self.runs["eager"]), self.tell)


def verdict_of(result: Comparison) -> tuple[str, str]:
    """(the verdict of a rung, why it is undecided or "")."""
    if result.status == Status.DIFFERENT:
        return RungKind.OUTSIDE, ""
    if result.status == Status.UNDECIDED:
        return RungKind.UNDECIDED, result.headline or "; ".join(result.inputs_differ[:1]) or _words(
            result
        )
    same = all(row.measured.identical for row in result.rows)
    return (RungKind.BIT_EQUAL if same else RungKind.NOISE), ""


def _apart(result: Comparison, reference: Run) -> tuple[bool, float | None]:
    """(is everything that was compared bit-equal, the largest rel_l2 of an output of a root call;
    None where one has none).
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
    known = [s for s in sizes if s is not None]
    return all(row.measured.identical for row in result.rows), max(known) if known and len(
        known
    ) == len(sizes) else None


def _unproven(result: Comparison) -> bool:
    """Is something beyond the noise, as far as two dumps can tell?"""
    return (
        result.status != Status.SAME
        and not result.inputs_differ
        and all(f.evidence != Evidence.REPLAY for f in result.findings)
    )


def _words(result: Comparison) -> str:
    """What differs most, in words."""
    if result.inputs_differ:
        return result.inputs_differ[0]
    if result.findings:
        first = result.findings[0]
        return f"{first.name}: {first.sentence}"
    scored = [v for v in result.verdicts if v.verdict != VerdictKind.IDENTICAL]
    worst = max(scored, key=lambda v: (v.score or 0.0, v.numbers.get("e_out") or 0.0), default=None)
    return result.headline if worst is None else worst.sentence


def _short(why: str) -> str:
    """The exception of an output that ends with one, else the first line."""
    from whence.workflows.rerun import RAISED

    lines = [line.removeprefix("  | ") for line in why.splitlines()]
    return next((line for line in lines if RAISED.match(line)), lines[0] if lines else "")


def _said(rung: Rung) -> str:
    words: dict[str, str] = {
        RungKind.BIT_EQUAL: "bit-equal to eager",
        RungKind.NOISE: "within the noise",
        RungKind.FAILED: "does not compile or run",
    }
    return words.get(rung.verdict, rung.verdict)
