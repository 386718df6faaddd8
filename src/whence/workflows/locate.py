"""Counterfactuals: run the target again with outputs of the reference put in, and see how much of
the final error goes away.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import ElementsMissing, UsageError
from whence.results import Comparison, Confidence, Explained, Location, OutputError

if TYPE_CHECKING:
    from whence.records import Call, Run
    from whence.results import Comparison, Finding
    from whence.workflows.rerun import Subject

Tell = Callable[[str], None]
_Errors = dict[tuple[str, int, int, int], OutputError]


def locate(
    reference: str | os.PathLike[str] | Comparison,
    target: str | os.PathLike[str] | None = None,
    *,
    command: Sequence[str] | None = None,
    model: Any = None,
    use: Callable[[Any], Any] | None = None,
    patch: Sequence[str] = (),
    search: bool = False,
    most: int = 8,
    seed: int | None = None,
    keep: str | os.PathLike[str] | None = None,
    tell: Tell | None = None,
) -> Location:
    """Run the target again with outputs of the reference in the place of its own: how much of the
    error at the output does each explain?

    reference: a run, or a comparison or its folder (then both runs are known from it). target: a
    captured run; None captures it. What is run again: `command`; or `use(model)` in this process;
    or the command that `target` was made with. patch: these calls, one after the other
    (`capture.points`); search: the call at which, in execution order, half of the squared error has
    arisen, by bisection; neither: every finding in turn, until none is left or `most` were patched.
    seed: seeds every run (the reference's own seed if it had one). keep: a new folder that keeps
    the runs. tell: progress. Raises UsageError, UnreadableRun, CaptureError (the command failed),
    OutputExists.
    """
    from whence.workflows.rerun import workplace

    if search and patch:
        raise UsageError("search finds the call by itself; patch names it: give one of them")
    if most < 1:
        raise UsageError(f"most {most}: at least one")
    left, right, subject = _sides(reference, target, command, model, use)
    with workplace(keep, "locate") as place:
        return _Locating(
            left, right, subject, place, keep is not None, seed, tell or (lambda _: None)
        ).result(tuple(patch), search, most)


def _sides(
    reference: str | os.PathLike[str] | Comparison,
    target: str | os.PathLike[str] | None,
    command: Sequence[str] | None,
    model: Any,
    use: Callable[[Any], Any] | None,
) -> tuple[str, str | None, Subject]:
    from whence.readers.opening import open_run
    from whence.workflows.rerun import Command, Program, recorded
    from whence.workflows.saved import load_comparison

    compared = reference if isinstance(reference, Comparison) else None
    left = "the last comparison" if isinstance(reference, Comparison) else os.fspath(reference)
    right = None if target is None else os.fspath(target)
    if (
        compared is None
        and (Path(left) / "report.json").is_file()
        and not (Path(left) / "run.json").exists()
    ):
        compared = load_comparison(left)
    if compared is not None:
        if right is not None:
            raise UsageError(f"{left} is a comparison and holds both runs; {right} is one too many")
        left, right = compared.reference, compared.target
    if (model is None) != (use is None) or (model is not None and command is not None):
        raise UsageError(
            "what is run again is a command, or model with use: the function that runs it"
        )
    if model is not None:
        return left, right, Program(model, use or (lambda m: None))
    if command is not None:
        return (
            left,
            right,
            Command(
                command, exit_codes=[_exit_code(side) for side in (left, right) if side is not None]
            ),
        )
    if right is None:
        raise UsageError(
            f"what is to be run? whence locate {left} -- CMD, or whence locate {left} TGT to run "
            "the command of TGT again"
        )
    return left, right, recorded(open_run(right).info, right)


def _exit_code(path: str) -> int:
    """With which the command of a run ended; 0 where that is not recorded."""
    code = _open(path).info.settings.get("exit_code", 0)
    return code if isinstance(code, int) else 0


class _Locating:
    def __init__(
        self,
        reference: str,
        target: str | None,
        subject: Subject,
        place: Path,
        kept: bool,
        seed: int | None,
        tell: Tell,
    ) -> None:
        from whence.readers.opening import open_run

        self.reference, self.target, self.subject, self.place, self.tell = (
            reference,
            target,
            subject,
            place,
            tell,
        )
        self.kept, self.runs = kept, 0
        self.golden: Run = open_run(reference)
        info = self.golden.info
        seed = info.seed if seed is None else seed
        self.options: dict[str, Any] = {"deterministic": info.deterministic} | (
            {} if seed is None else {"seed": seed}
        )
        self.several_roots = len({c.root for c in self.golden.calls}) > 1
        self.errors: list[_Errors] = []

    def result(self, patch: tuple[str, ...], search: bool, most: int) -> Location:
        from whence.instrument.patch_points import check_points

        check_points(patch, self.golden.calls, self.reference)
        target = self.target
        if target is None:
            self.tell("running the target")
            target = str(self._run("target"))
        base = self._compare(target)
        self.errors = [output_errors(self.golden, _open(target))]
        if base.inputs_differ:
            raise UsageError(
                f"the target is not asked what the reference was: {base.inputs_differ[0]}; "
                "give both the same input (--seed N when it is drawn at random)"
            )
        if search:
            rounds = self._search()
        elif patch:
            rounds = [
                self._round(n + 1, text, (text,), patch[:n], None) for n, text in enumerate(patch)
            ]
        else:
            rounds = self._findings(base, most)
        rounds = self._with_shares(rounds)
        remaining = rounds[-1].remaining if rounds else _names(base)
        shown = (
            str(self.place / "target") if self.target is None and self.kept else self.target or ""
        )
        total = rounds[0].before if rounds else _rel(self.errors[0].values())
        return Location(
            base.status,
            self.reference,
            shown,
            tuple(getattr(self.subject, "command", ())),
            total,
            rounds[-1].after if rounds else total,
            tuple(rounds),
            remaining,
            self.runs,
            self._notes(rounds),
        )

    # ---- the three ways

    def _findings(self, base: Comparison, most: int) -> list[Explained]:
        """Patch the first finding, compare, patch the first one left as well, and so on."""
        rounds: list[Explained] = []
        points: tuple[str, ...] = ()
        tried: set[tuple[str, ...]] = set()
        current = base
        while len(rounds) < most:
            found = next(
                (f for f in current.findings if _clear(f) and self._points(f) not in tried), None
            )
            if found is None:
                break
            mine = self._points(found)
            tried.add(mine)
            more = f" and {len(found.also)} like it" if found.also else ""
            rounds.append(self._round(len(rounds) + 1, found.name + more, mine, points, found))
            points += mine
            current = self.last
        return rounds

    def _round(
        self,
        number: int,
        name: str,
        points: tuple[str, ...],
        before: tuple[str, ...],
        finding: Finding | None,
    ) -> Explained:
        self.tell(f"patching {name} (run {number})")
        path = self._run(f"patched-{number}", patch=(*before, *points), patch_from=self.reference)
        self.last = self._compare(str(path))
        run = _open(path)
        self.errors.append(output_errors(self.golden, run))
        made = self._explained(name, points, run, finding, _names(self.last))
        self._drop(path)
        whole = self._whole_model(points) if made.calls else ""
        return _but(made, notes=(whole, *made.notes)) if whole else made

    def _search(self) -> list[Explained]:
        """The shortest run of calls, in the order in which they end, whose patching takes away half
        of the squared error.

        What a call returns depends on calls that ended before it and on its own code, so with
        everything before it right, the error that goes away with it arose in it. A call that lies
        in another one of the run needs no patch of its own.
        """
        first: dict[tuple[str, str], Call] = {}
        for call in self.golden.calls:
            if call.parent != -1 and call.phase == "forward" and self._has_outputs(call):
                first.setdefault((call.root, call.scope), call)
        sites = list(first.values())
        if not sites:
            raise UsageError(
                f"{self.reference} holds no call below its root, so there is nothing to search"
            )
        whole = _square(self.errors[0].values())
        if whole is None or whole == 0:
            return []
        known: dict[int, tuple[_Errors, Explained | None]] = {-1: (self.errors[0], None)}

        def probe(k: int) -> float:
            if k not in known:
                self.tell(f"bisecting {len(sites)} modules (run {self.runs + 1})")
                points = tuple(self._point(c.root, c.scope) for c in _outermost(sites[: k + 1]))
                path = self._run(
                    f"search-{k}",
                    patch=points,
                    patch_from=self.reference,
                    max_depth=0,
                    programs=False,
                )
                run = _open(path)
                errors = output_errors(self.golden, run)
                known[k] = (
                    errors,
                    self._explained(
                        sites[k].scope, (self._point(sites[k].root, sites[k].scope),), run, None, ()
                    ),
                )
                self._drop(path)
            square = _square(known[k][0].values())
            return math.inf if square is None else square

        low, high = -1, len(sites) - 1
        if probe(high) > whole / 2:
            self.errors.append(known[high][0])
            found = known[high][1]
            assert found is not None
            note = (
                "the error arises after every module has returned: in the root's own code, or "
                "where a call could not be patched"
            )
            return [_but(found, name=f"all {len(sites)} modules", notes=(note,))]
        while high - low > 1:
            middle = (low + high) // 2
            if probe(middle) <= whole / 2:
                high = middle
            else:
                low = middle
        probe(low)
        self.errors += [known[low][0], known[high][0]] if low >= 0 else [known[high][0]]
        made: list[Explained] = []
        if low >= 0:
            earlier = known[low][1]
            assert earlier is not None
            made.append(
                _but(
                    earlier,
                    name=f"the {low + 1} modules that return before it",
                    points=(),
                    notes=(),
                )
            )
        last = known[high][1]
        assert last is not None
        return [*made, last]

    # ---- pieces

    def _run(self, name: str, **options: Any) -> Path:
        path = self.place / name
        self.runs += 1
        self.subject.capture(path, **self.options, **options)
        return path

    def _compare(self, target: str) -> Comparison:
        from whence.workflows.compare import compare

        self.tell("comparing")
        return compare(self.golden, target)

    def _drop(self, path: Path) -> None:
        if not self.kept:
            import shutil

            shutil.rmtree(path, ignore_errors=True)

    def _has_outputs(self, call: Call) -> bool:
        from whence.instrument.patch_points import outputs_of

        return bool(outputs_of(call))

    def _point(self, root: str, name: str) -> str:
        return (f"{root}/" if self.several_roots else "") + glob.escape(name)

    def _points(self, finding: Finding) -> tuple[str, ...]:
        return tuple(self._point(finding.root, name) for name in (finding.name, *finding.also))

    def _explained(
        self,
        name: str,
        points: tuple[str, ...],
        run: Run,
        finding: Finding | None,
        remaining: tuple[str, ...],
    ) -> Explained:
        from whence.instrument.patch_points import parse_point
        from whence.records.marks import Mark, has_mark, mark_values

        mine = [parse_point(p) for p in points]
        other = {
            c.id: mark_values(c, Mark.PATCHED_AS)[-1]
            for c in run.calls
            if has_mark(c, Mark.PATCHED_AS)
        }
        calls = [
            c
            for c in run.calls
            if any(p.fits(c.root, other.get(c.id, c.scope), c.step, c.occurrence) for p in mine)
        ]
        noted = {n.scope for n in run.notes if n.kind == "patch"}
        # Calls that were not selected carry no note of their own.
        patched = [
            c
            for c in calls
            if has_mark(c, Mark.PATCHED)
            or (has_mark(c, Mark.NOT_SELECTED) and (c.scope or c.root) in noted)
        ]
        here = {c.scope or c.root for c in calls}
        notes = dict.fromkeys(
            n.text
            for n in run.notes
            if n.kind == "patch" and "in place" in n.text and n.scope in here
        )
        if any(not c.leaf for c in patched):
            notes["its whole output was replaced: what its modules and its own code computed"] = (
                None
            )
        no = [n for n in run.notes if n.kind == "patch-refused"]
        refused = tuple(
            n.text
            for n in no
            if any(p.fits(p.root, n.scope, n.step, p.occurrence or 0) for p in mine)
        )
        if not patched and not refused:
            refused = (
                f"the target made no call {', '.join(points)}"
                if not calls
                else "none of its calls was given the reference's outputs",
            )
        return Explained(
            name,
            points,
            len(patched),
            None,
            None,
            None,
            (),
            refused,
            tuple(notes),
            finding,
            remaining,
        )

    def _whole_model(self, points: tuple[str, ...]) -> str:
        """What a patch at these points cannot tell, in words: a call that returns what the model
        returns leaves no error behind.
        """
        from whence.instrument.patch_points import outputs_of, parse_point

        mine = [parse_point(p) for p in points]
        roots = {
            (c.root, c.rank, c.step, c.micro): c
            for c in self.golden.calls
            if c.parent == -1 and c.phase == "forward"
        }
        for call in self.golden.calls:
            root = roots.get((call.root, call.rank, call.step, call.micro))
            if root is None or not any(
                p.fits(call.root, call.scope, call.step, call.occurrence) for p in mine
            ):
                continue
            returned = {r.record for r in root.refs if r.slot in outputs_of(root)}
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

    def _with_shares(self, rounds: list[Explained]) -> list[Explained]:
        """Fill in the errors, over the steps at which every run of the chain was asked what the
        reference was.
        """
        keys = [
            k for k in self.errors[0] if all(k in e and e[k].same_question for e in self.errors)
        ]
        kept = [{k: e[k] for k in keys} for e in self.errors]
        whole = _square(kept[0].values()) if kept else None
        made = []
        for before, after, one in zip(kept[:-1], kept[1:], rounds, strict=True):
            squares = _square(before.values()), _square(after.values())
            share = None
            if one.calls and whole and squares[0] is not None and squares[1] is not None:
                share = (squares[0] - squares[1]) / whole
            steps = tuple((k[0], k[2], _rel([before[k]]), _rel([after[k]])) for k in keys)
            made.append(
                _but(
                    one,
                    before=_rel(before.values()),
                    after=_rel(after.values()),
                    share=share,
                    steps=steps,
                )
            )
        return made

    def _notes(self, rounds: Sequence[Explained]) -> tuple[str, ...]:
        out = []
        lost = [
            k for k in self.errors[0] if not all(k in e and e[k].same_question for e in self.errors)
        ]
        if lost:
            of = f"{len(lost)} of {len(self.errors[0])} steps"
            out.append(
                f"{of} are left out: their tokens differ from the reference's, or their outputs "
                "are missing"
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


# ---- the error at the output


def output_errors(reference: Run, target: Run) -> _Errors:
    """Error of the root's outputs by (root, rank, step, micro), taken in float64. Outputs that are
    state (caches) are left out, and steps that a capture was not asked for."""
    from whence.align import selected

    theirs = {c.key(): c for c in selected(target.calls) if c.parent == -1}
    out: _Errors = {}
    for call in selected(reference.calls):
        other = theirs.get(call.key())
        if call.parent != -1 or call.phase != "forward" or other is None:
            continue
        error, norm = _error(reference, target, call, other)
        key = (call.root, call.rank, call.step, call.micro)
        out[key] = OutputError(*key, error, norm, _same_question(reference, target, call, other))
    return out


def _error(reference: Run, target: Run, call: Call, other: Call) -> tuple[float | None, float]:
    """(2-norm of the difference or None, 2-norm of the reference) over all floating outputs of a
    root's call.
    """
    from whence import dtypes, metrics
    from whence.instrument.patch_points import outputs_of

    records = {r.slot: r.record for r in other.refs}
    slots = [
        r
        for r in call.slots("output")
        if r.slot in outputs_of(call) and dtypes.is_floating(reference.records[r.record].dtype)
    ]
    error = norm = 0.0
    for ref in slots:
        if ref.slot not in records:
            return None, norm
        try:
            found = metrics.measure(
                reference.array(ref.record), target.array(records[ref.slot]), tier="core"
            )
        except ElementsMissing:
            return None, norm
        if found.identical:
            statistics = reference.records[ref.record].statistics
            norm += ((statistics.norm if statistics is not None else None) or 0.0) ** 2
            continue
        values = found.values
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


def _same_question(reference: Run, target: Run, call: Call, other: Call) -> bool:
    mine = {r.slot: reference.records[r.record] for r in call.slots("input")}
    theirs = {r.slot: target.records[r.record] for r in other.slots("input")}
    asked = [s for s, r in mine.items() if r.dtype.startswith(("int", "uint")) and s in theirs]
    return all(mine[s].hash == theirs[s].hash for s in asked)


def _square(errors: Iterable[OutputError]) -> float | None:
    """Squared error over the squared norm of the reference, over all of them; None when one is not
    defined, or nothing is there.
    """
    every = list(errors)
    norm = sum(e.norm**2 for e in every)
    if not every or not norm or any(e.error is None for e in every):
        return None
    return sum((e.error or 0.0) ** 2 for e in every) / norm


def _rel(errors: Iterable[OutputError]) -> float | None:
    square = _square(errors)
    return None if square is None else math.sqrt(square)


# ---- small things


def _outermost(calls: Sequence[Call]) -> list[Call]:
    ids = {c.id for c in calls}
    return [c for c in calls if c.parent not in ids]


def _clear(finding: Finding) -> bool:
    return finding.confidence in (Confidence.CERTAIN, Confidence.LIKELY)


def _names(result: Comparison) -> tuple[str, ...]:
    return tuple(f.name for f in result.findings if _clear(f))


def _open(path: str | Path) -> Run:
    from whence.readers.opening import open_run

    return open_run(str(path))


def _but(old: Explained, **changes: Any) -> Explained:
    import msgspec

    return msgspec.structs.replace(old, **changes)
