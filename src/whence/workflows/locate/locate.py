"""Counterfactuals: run the target again with outputs of the reference put in, and see how much of
the final error goes away.

Finds by bisection the call at which half of the squared error at the output has arisen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from whence.errors import UsageError
from whence.instrument.patch_points import check_points, outputs_of
from whence.readers.opening import open_run
from whence.records import Call, Run
from whence.results import Comparison, Confidence, Explained, Finding, Location
from whence.workflows.locate.output_error import (
    Errors,
    output_errors,
    relative_error,
    squared_error,
)
from whence.workflows.locate.patched_runs import PatchedRuns, explained
from whence.workflows.notebook_progress import Tell
from whence.workflows.rerun import Subject
from whence.workflows.saved import AnyComparison, AnyPath


def locate(
    reference: AnyComparison,
    target: AnyPath | None = None,
    *,
    command: Sequence[str] | None = None,
    model: Any = None,
    use: Callable[[Any], Any] | None = None,
    patch: Sequence[str] = (),
    search: bool = False,
    most: int = 8,
    seed: int | None = None,
    keep: AnyPath | None = None,
    tell: Tell | None = None,
) -> Location:
    """Run the target again with outputs of the reference patched in: how much of the error at the
    output does each explain?

    reference: a run, or a comparison or its folder (then both runs are known from it). target: a
    captured run; None captures it. What is run again: `command`; or `use(model)` in this process;
    or the command that `target` was made with. patch: these calls, one after the other
    (`capture.points`); search: the call at which, in execution order, half of the squared error has
    arisen, by bisection; neither: every finding in turn, until none is left or `most` were patched.
    seed: seeds every run (the reference's own seed if it had one). keep: a new folder that keeps
    the runs. tell: progress. Raises UsageError, UnreadableRun, CaptureError (the command failed),
    OutputExists.
    """
    from whence.workflows.notebook_progress import telling
    from whence.workflows.rerun import workplace

    if search and patch:
        raise UsageError("search finds the call by itself; patch names it: give one of them")
    if most < 1:
        raise UsageError(f"most {most}: at least one")
    reference_path, target_path, subject = _sides(reference, target, command, model, use)
    with workplace(keep, "locate") as place, telling(tell) as say:
        runs = PatchedRuns(
            reference_path,
            subject,
            place,
            keep=keep is not None,
            seed=seed,
            tell=say,
        )
        return _location(runs, target_path, tuple(patch), search, most)


def _location(
    runs: PatchedRuns, target_path: str | None, patch: tuple[str, ...], by_search: bool, limit: int
) -> Location:
    check_points(patch, runs.reference.calls, runs.path)
    path, kept_path = target_path, target_path or ""
    if path is None:
        runs.tell("running the target")
        path = str(runs.capture("target"))
        kept_path = path if runs.keep else ""
    base = runs.compare(path)
    target = open_run(path)
    unpatched = output_errors(runs.reference, target)
    if base.inputs_differ:
        raise UsageError(
            f"the target is not asked what the reference was: {base.inputs_differ[0]}; "
            "give both the same input (--seed N when it is drawn at random)"
        )
    chain = _Rounds(runs, target, base, [unpatched])
    if by_search:
        chain.rounds, chain.errors = _half_error_call(runs, unpatched)
    elif patch:
        for point in patch:
            chain.patch(point, (point,), None)
    else:
        _check_patchable(base)
        chain.patch_findings(limit)
    rounds = chain.with_shares()
    total = rounds[0].before if rounds else relative_error(unpatched.values())
    return Location(
        base.status,
        runs.path,
        kept_path,
        tuple(getattr(runs.subject, "command", ())),
        total,
        rounds[-1].after if rounds else total,
        tuple(rounds),
        rounds[-1].remaining if rounds else _names(base),
        runs.count,
        chain.notes(rounds),
    )


def _sides(
    reference: AnyComparison,
    target: AnyPath | None,
    command: Sequence[str] | None,
    model: Any,
    use: Callable[[Any], Any] | None,
) -> tuple[str, str | None, Subject]:
    from whence.workflows.rerun import Command, Program, recorded
    from whence.workflows.saved import is_comparison, load_comparison

    compared = reference if isinstance(reference, Comparison) else None
    path = "the last comparison" if isinstance(reference, Comparison) else os.fspath(reference)
    target_path = None if target is None else os.fspath(target)
    if compared is None and is_comparison(path):
        compared = load_comparison(path)
    if compared is not None:
        if target_path is not None:
            raise UsageError(
                f"{path} is a comparison and holds both runs; {target_path} is one too many"
            )
        path, target_path = compared.reference, compared.target
    if (model is None) != (use is None) or (model is not None and command is not None):
        raise UsageError(
            "what is run again is a command, or model with use: the function that runs it"
        )
    if model is not None:
        return path, target_path, Program(model, use or (lambda m: None))
    if command is not None:
        exit_codes = [_exit_code(side) for side in (path, target_path) if side is not None]
        return path, target_path, Command(command, exit_codes=exit_codes)
    if target_path is None:
        if compared is None:
            open_run(path)  # a mistake in the path is told first
        raise UsageError(
            f"which program is the target? Give its run, to run its command again (whence locate "
            f"{path} TGT), or the command (whence locate {path} -- CMD)"
        )
    return path, target_path, recorded(open_run(target_path).info, target_path)


def _exit_code(path: str) -> int:
    """The exit code of the command of a run; 0 where that is not recorded."""
    code = open_run(path).info.settings.get("exit_code", 0)
    return code if isinstance(code, int) else 0


@dataclass
class _Rounds:
    """Patches in turn, each on top of those before it. target: a run without any. result: the
    comparison of the last run. errors: at the output, before the first and after every one.
    """

    runs: PatchedRuns
    target: Run
    result: Comparison
    errors: list[Errors]
    rounds: list[Explained] = field(default_factory=list)

    def patch(self, name: str, points: tuple[str, ...], finding: Finding | None) -> None:
        """Patch these points as well; nothing is run where that can replace nothing."""
        runs, number = self.runs, len(self.rounds) + 1
        if why := runs.why_not(points, self.target):
            self.errors.append(self.errors[-1])
            nothing = Explained(name, points, 0, None, None, None, refused=(why,))
            self.rounds.append(
                msgspec.structs.replace(nothing, finding=finding, remaining=_names(self.result))
            )
            return
        runs.tell(f"patching {name} (run {number})")
        points_so_far = tuple(point for r in self.rounds for point in r.points)
        path = runs.capture(f"patched-{number}", (*points_so_far, *points))
        self.result = runs.compare(path)
        run = open_run(str(path))
        self.errors.append(output_errors(runs.reference, run))
        round_ = explained(name, points, run)
        whole = runs.returns_whole_output(points) if round_.calls else ""
        notes = (whole, *round_.notes) if whole else round_.notes
        self.rounds.append(
            msgspec.structs.replace(
                round_, finding=finding, remaining=_names(self.result), notes=notes
            )
        )
        runs.drop(path)

    def patch_findings(self, limit: int) -> None:
        """Patch the first finding, compare, patch the first one left as well, and so on."""
        tried: set[tuple[str, ...]] = set()
        while len(self.rounds) < limit:
            untried = (f for f in self.result.findings if self.runs.points_of(f) not in tried)
            finding = next((f for f in untried if _is_clear(f) and f.is_of_module), None)
            if finding is None:
                break
            points = self.runs.points_of(finding)
            tried.add(points)
            also = f" and {len(finding.also)} like it" if finding.also else ""
            self.patch(finding.name + also, points, finding)

    def with_shares(self) -> list[Explained]:
        """The rounds with their errors, over the steps at which every run was given the reference's
        inputs.
        """
        keys = [k for k in self.errors[0] if self._is_comparable(k)]
        errors = [{k: e[k] for k in keys} for e in self.errors]
        whole = squared_error(errors[0].values())
        rounds = []
        for errors_before, errors_after, round_ in zip(
            errors[:-1], errors[1:], self.rounds, strict=True
        ):
            squares = squared_error(errors_before.values()), squared_error(errors_after.values())
            share = None
            if round_.calls and whole and squares[0] is not None and squares[1] is not None:
                share = (squares[0] - squares[1]) / whole
            steps = tuple(
                (k[0], k[2], relative_error([errors_before[k]]), relative_error([errors_after[k]]))
                for k in keys
            )
            rounds.append(
                msgspec.structs.replace(
                    round_,
                    before=relative_error(errors_before.values()),
                    after=relative_error(errors_after.values()),
                    share=share,
                    steps=steps,
                )
            )
        return rounds

    def _is_comparable(self, key: tuple[str, int, int, int]) -> bool:
        return all(key in e and e[key].same_question for e in self.errors)

    def notes(self, rounds: Sequence[Explained]) -> tuple[str, ...]:
        """Remarks on these rounds, with shares."""
        out = []
        if lost := sum(not self._is_comparable(k) for k in self.errors[0]):
            out.append(
                f"{lost} of {len(self.errors[0])} steps are left out: their tokens differ from the "
                "reference's, or their outputs are missing"
            )
        nothing = [r for r in rounds if not r.calls]
        if nothing:
            moved = (
                ", although the error is another one in that run: the program does not repeat "
                "itself"
                if any(r.before != r.after for r in nothing)
                else ""
            )
            names = ", ".join(r.name for r in nothing[:3])
            out.append(
                f"{names}: the patch was applied to nothing, so nothing is credited to it{moved}"
            )
        if any(r.share is None and r.calls for r in rounds):
            out.append(
                "a share is not defined where an output is NaN or infinite, or where there is no "
                "error"
            )
        return tuple(out)


def _check_patchable(result: Comparison) -> None:
    """Raise UsageError where there are findings, and none is about what a module returns."""
    findings = [finding for finding in result.findings if _is_clear(finding)]
    if findings and not any(finding.is_of_module for finding in findings):
        first = findings[0]
        raise UsageError(
            f"{first.name} ({first.op_type}) is a part of a training step: the reference's outputs "
            "of modules are put into the target's forward pass, and none of them can take its "
            "place; whence repro runs it alone, whence report shows what follows from it"
        )


def _is_clear(finding: Finding) -> bool:
    return finding.confidence in (Confidence.CERTAIN, Confidence.LIKELY)


def _names(result: Comparison) -> tuple[str, ...]:
    return tuple(f.name for f in result.findings if _is_clear(f))


def _half_error_call(runs: PatchedRuns, unpatched: Errors) -> tuple[list[Explained], list[Errors]]:
    """The shortest run of calls, in the order in which they end, whose patching takes away half of
    the squared error; (rounds, errors before them and after each).

    What a call returns depends on calls that ended before it and on its own code, so with
    everything before it right, the error that goes away with it arose in it. A call that lies in
    another one of the run needs no patch of its own.
    """
    sites = _sites(runs)
    whole = squared_error(unpatched.values())
    if whole is None or whole == 0:
        return [], [unpatched]
    probes = _Probes(runs, sites)
    low, high = -1, len(sites) - 1
    if probes.squared_error(high) > whole / 2:
        note = (
            "the error arises after every module has returned: in the root's own code, or "
            "where a call could not be patched"
        )
        last = msgspec.structs.replace(
            probes.rounds[high], name=f"all {len(sites)} modules", notes=(note,)
        )
        return [last], [unpatched, probes.errors[high]]
    while high - low > 1:
        middle = (low + high) // 2
        if probes.squared_error(middle) <= whole / 2:
            high = middle
        else:
            low = middle
    if low < 0:
        return [probes.rounds[high]], [unpatched, probes.errors[high]]
    probes.squared_error(low)
    earlier = msgspec.structs.replace(
        probes.rounds[low], name=f"the {low + 1} modules that return before it", points=(), notes=()
    )
    errors = [unpatched, probes.errors[low], probes.errors[high]]
    return [earlier, probes.rounds[high]], errors


def _sites(runs: PatchedRuns) -> list[Call]:
    """The first forward call of every module below a root, in the order in which they end."""
    first: dict[tuple[str, str], Call] = {}
    for call in runs.reference.calls:
        if call.parent != -1 and call.phase == "forward" and outputs_of(call):
            first.setdefault((call.root, call.scope), call)
    if not first:
        raise UsageError(f"{runs.path} holds no call below its root, so there is nothing to search")
    return list(first.values())


class _Probes:
    """Runs in which the first sites are patched, each run once. rounds, errors: by the index of the
    last site that is patched.
    """

    def __init__(self, runs: PatchedRuns, sites: Sequence[Call]) -> None:
        self._runs, self._sites = runs, sites
        self.rounds: dict[int, Explained] = {}
        self.errors: dict[int, Errors] = {}

    def squared_error(self, last: int) -> float:
        if last not in self.errors:
            self._run(last)
        square = squared_error(self.errors[last].values())
        return math.inf if square is None else square

    def _run(self, last: int) -> None:
        runs, sites = self._runs, self._sites
        runs.tell(f"bisecting {len(sites)} modules (run {runs.count + 1})")
        points = tuple(runs.point(c.root, c.scope) for c in _outermost(sites[: last + 1]))
        path = runs.capture(f"search-{last}", points, max_depth=0, programs=False)
        run = open_run(str(path))
        self.errors[last] = output_errors(runs.reference, run)
        scope = sites[last].scope
        self.rounds[last] = explained(scope, (runs.point(sites[last].root, scope),), run)
        runs.drop(path)


def _outermost(calls: Sequence[Call]) -> list[Call]:
    ids = {c.id for c in calls}
    return [c for c in calls if c.parent not in ids]
