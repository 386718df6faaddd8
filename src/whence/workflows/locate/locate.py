"""Counterfactuals: runs the target again with outputs of the reference patched in, and measures how
much of the final error disappears.

A bisection finds the call at which half of the squared error at the output has arisen.
"""

from __future__ import annotations

import glob
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from whence.display import listed
from whence.errors import ElementsMissing, UsageError
from whence.instrument.patch_points import check_points, outputs_of, parse_point, results_of
from whence.readers.opening import open_run
from whence.records import Call, Run
from whence.records.marks import Mark, has_mark, mark_values
from whence.results import Comparison, Confidence, Explained, Finding, Location, OutputError
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
    """The recorded exit code of a run's command; 0 when none is recorded."""
    code = open_run(path).info.settings.get("exit_code", 0)
    return code if isinstance(code, int) else 0


@dataclass
class _Rounds:
    """A series of patches, each added to the previous ones.

    target: a run without patches. result: the comparison of the last run. errors: at the output,
    before the first round and after every round.
    """

    runs: PatchedRuns
    target: Run
    result: Comparison
    errors: list[Errors]
    rounds: list[Explained] = field(default_factory=list)

    def patch(self, name: str, points: tuple[str, ...], finding: Finding | None) -> None:
        """Add a patch at these points; the program is not run when the patch can replace
        nothing.
        """
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
        """Patch the first finding, compare, patch the first remaining finding, and so on."""
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
        """The rounds with their shares of the error, over the steps whose inputs are the
        reference's in every run.
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
        """Remarks on these rounds, which have their shares."""
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
    """Raise UsageError when there are findings but none concerns the output of a module."""
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
    """The shortest prefix of calls, in the order in which they end, whose patching removes half of
    the squared error.

    Returns (rounds, errors before them and after each). The output of a call depends on calls that
    ended before it and on its own code; with everything before it right, the error that a patch
    removes arose in the call. A call inside another patched call needs no patch of its own.
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
    """Runs with the first n sites patched, each run made once.

    rounds, errors: by the index of the last patched site.
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


# The error at the output of a run: that of the outputs of its root calls.

Errors = dict[tuple[str, int, int, int], OutputError]
"""By (root, rank, step, micro)."""


def output_errors(reference: Run, target: Run) -> Errors:
    """Errors of the root's outputs by (root, rank, step, micro), computed in float64.

    Outputs that are state (caches) and steps that were not to be captured are left out.
    """
    from whence.align import selected

    roots = {c.key(): c for c in selected(target.calls) if c.parent == -1}
    out: Errors = {}
    for call in selected(reference.calls):
        partner = roots.get(call.key())
        if call.parent != -1 or call.phase != "forward" or partner is None:
            continue
        error, norm = _error(reference, target, call, partner)
        key = (call.root, call.rank, call.step, call.micro)
        out[key] = OutputError(*key, error, norm, _same_question(reference, target, call, partner))
    return out


def _error(reference: Run, target: Run, call: Call, partner: Call) -> tuple[float | None, float]:
    """(2-norm of the difference or None, 2-norm of the reference) over all floating-point outputs
    of a root's call except caches.
    """
    from whence import dtypes, metrics
    from whence.instrument.patch_points import results_of

    records = {r.slot: r.record for r in partner.refs}
    results = results_of(call)
    slots = [
        r
        for r in call.slots("output")
        if r.slot in results and dtypes.is_floating(reference.records[r.record].dtype)
    ]
    error = norm = 0.0
    for ref in slots:
        if ref.slot not in records:
            return None, norm
        try:
            measured = metrics.measure(
                reference.array(ref.record), target.array(records[ref.slot]), tier="core"
            )
        except ElementsMissing:
            return None, norm
        if measured.identical:
            statistics = reference.records[ref.record].statistics
            norm += ((statistics.norm if statistics is not None else None) or 0.0) ** 2
            continue
        values = measured.values
        rmse, rel, size = values.get("rmse"), values.get("rel_l2"), values.get("reference_norm")
        if rmse is None or size is None or values.get("nan_mismatch") or values.get("inf_mismatch"):
            return None, norm
        # rel_l2 is over the finite pairs only, as the norm is; of an all-zero reference it is
        # infinite.
        error += (
            (rel * size) ** 2
            if rel is not None and size
            else rmse**2 * reference.records[ref.record].count
        )
        norm += size**2
    return (math.sqrt(error), math.sqrt(norm)) if slots else (None, 0.0)


def _same_question(reference: Run, target: Run, call: Call, partner: Call) -> bool:
    """Whether all integer inputs, such as tokens, are equal in both runs."""
    inputs = {r.slot: reference.records[r.record] for r in call.slots("input")}
    partners = {r.slot: target.records[r.record] for r in partner.slots("input")}
    return all(
        record.hash == partners[slot].hash
        for slot, record in inputs.items()
        if record.dtype.startswith(("int", "uint")) and slot in partners
    )


def squared_error(errors: Iterable[OutputError]) -> float | None:
    """Sum of squared errors over sum of squared norms of the reference.

    None when one of them is not defined, or there is nothing to sum.
    """
    every = list(errors)
    norm = sum(e.norm**2 for e in every)
    if not every or not norm or any(e.error is None for e in every):
        return None
    return sum((e.error or 0.0) ** 2 for e in every) / norm


def relative_error(errors: Iterable[OutputError]) -> float | None:
    """Root of `squared_error`."""
    square = squared_error(errors)
    return None if square is None else math.sqrt(square)


# Runs of the target in which outputs of the reference replace its own.


class PatchedRuns:
    """Captures the program again and compares it with the reference.

    keep: leave the runs in `place`. seed: None for the seed of the reference.
    """

    def __init__(
        self,
        path: str,
        subject: Subject,
        place: Path,
        *,
        keep: bool,
        seed: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self.path, self.subject, self.place = path, subject, place
        self.keep, self.tell = keep, tell
        self.reference: Run = open_run(path)
        self.count = 0
        info = self.reference.info
        seed = info.seed if seed is None else seed
        self._options: dict[str, Any] = {"deterministic": info.deterministic} | (
            {} if seed is None else {"seed": seed}
        )
        self._several_roots = len({c.root for c in self.reference.calls}) > 1

    def capture(self, name: str, points: tuple[str, ...] = (), **options: Any) -> Path:
        """Run the program, patched at these points."""
        path = self.place / name
        self.count += 1
        if points:
            options |= {"patch": points, "patch_from": self.path}
        self.subject.capture(path, **self._options, **options)
        return path

    def compare(self, target: str | Path) -> Comparison:
        from whence.workflows.compare import compare

        self.tell("comparing")
        return compare(self.reference, str(target))

    def drop(self, path: Path) -> None:
        """Remove a run that is not kept."""
        if not self.keep:
            shutil.rmtree(path, ignore_errors=True)

    def point(self, root: str, name: str) -> str:
        """The patch point of the calls of a module."""
        return (f"{root}/" if self._several_roots else "") + glob.escape(name)

    def points_of(self, finding: Finding) -> tuple[str, ...]:
        """The patch points of a finding."""
        return tuple(self.point(finding.root, name) for name in (finding.name, *finding.also))

    def why_not(self, points: tuple[str, ...], target: Run) -> str:
        """The reason why a patch at these points can replace nothing, judged by a run of the
        target; "" when it may replace something.
        """
        parsed = [parse_point(p) for p in points]
        partners = {c.key(): c for c in target.calls}
        reason = ""
        for call in self.reference.calls:
            fitting = [p for p in parsed if p.fits_call(call)]
            if not fitting:
                continue
            partner = partners.get(call.key())
            if partner is None or has_mark(partner, Mark.NOT_SELECTED):
                return ""  # it may be called elsewhere
            chosen = {p.slot for p in fitting}
            slots = [s for s in results_of(call) if "" in chosen or s in chosen]
            returned = results_of(partner)
            if any(slot in returned for slot in slots):
                return ""
            name = call.module_name
            reason = reason or (
                f"{name} returns {listed(slots, 3) or 'nothing'} in the reference and "
                f"{listed(returned, 3) or 'nothing'} in the target, so no run was made for it"
            )
        return reason

    def returns_whole_output(self, points: tuple[str, ...]) -> str:
        """A warning when a patched call returns what the model returns: such a patch removes all
        error at the output and proves nothing.
        """
        parsed = [parse_point(p) for p in points]
        calls = self.reference.calls
        roots = {
            (c.root, c.rank, c.step, c.micro): c
            for c in calls
            if c.parent == -1 and c.phase == "forward"
        }
        for call in calls:
            root = roots.get((call.root, call.rank, call.step, call.micro))
            if root is None or not any(p.fits_call(call) for p in parsed):
                continue
            returned = {r.record for r in root.refs if r.slot in results_of(root)}
            if returned and returned <= {r.record for r in call.slots("output")}:
                if call.leaf:
                    return (
                        "it returns what the model returns, so patching it takes away all "
                        "error, wherever that arises"
                    )
                return (
                    "it is the whole model: it returns what the model returns, so patching it "
                    "explains everything and locates nothing"
                )
        return ""


def explained(name: str, points: tuple[str, ...], run: Run) -> Explained:
    """The calls that a patch at these points replaced in a run, and why others were not; without
    errors.
    """
    parsed = [parse_point(p) for p in points]
    patched_as = {
        c.id: mark_values(c, Mark.PATCHED_AS)[-1] for c in run.calls if has_mark(c, Mark.PATCHED_AS)
    }
    calls = [
        c
        for c in run.calls
        if any(p.fits(c.root, patched_as.get(c.id, c.scope), c.step, c.occurrence) for p in parsed)
    ]
    notes_of_patch = [n for n in run.notes if n.kind == "patch"]
    noted = {n.scope for n in notes_of_patch}
    # Calls that were not selected carry no note of their own.
    patched = [
        c
        for c in calls
        if has_mark(c, Mark.PATCHED) or (has_mark(c, Mark.NOT_SELECTED) and c.module_name in noted)
    ]
    scopes = {c.module_name for c in calls}
    notes = list(
        dict.fromkeys(n.text for n in notes_of_patch if "replaced" in n.text and n.scope in scopes)
    )
    if any(not c.leaf for c in patched):
        notes.append("its whole output was replaced: what its modules and its own code computed")
    refused = tuple(
        n.text
        for n in run.notes
        if n.kind == "patch-refused"
        and any(p.fits(p.root, n.scope, n.step, p.occurrence or 0) for p in parsed)
    )
    if not patched and not refused:
        refused = (
            f"the target made no call {', '.join(points)}"
            if not calls
            else "none of its calls was given the reference's outputs",
        )
    return Explained(
        name, points, len(patched), None, None, None, refused=refused, notes=tuple(notes)
    )
