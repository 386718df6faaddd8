"""Labels of two sides face to face: the reference's against the target's, of one run or of two."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from whence.dtypes import Array
from whence.errors import CaptureError, ElementsMissing, UnreadableRun
from whence.records import Call, Note, Program, Record, Ref, Run, RunInfo, Step
from whence.results import Comparison, Finding, Shown, ViewRow

RULE = "label"


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a run. occurrence: of its name, side and task, through all processes of a rank. step: of its task, from 0."""

    run: Run
    call: Call
    side: str
    task: str
    given: str
    at: int
    occurrence: int
    step: int

    @property
    def record(self) -> Record:
        return self.run.records[self.call.refs[0].record]

    @property
    def words(self) -> str:
        """name#occurrence, and the task."""
        return f"{self.call.scope}#{self.occurrence}" + (f" in {self.task}" if self.task else "")


@dataclass(frozen=True, slots=True)
class Facing:
    """A row: two labels, or one and the reason why it is alone."""

    reference: Label | None
    target: Label | None
    why: str = ""


def labels_of(runs: Sequence[Run]) -> list[Label]:
    """All labels, in the order in which they were set. Of two runs the first is the reference where its labels name no side."""
    found: list[tuple[int, int, Run, Call, str]] = []
    for place, run in enumerate(runs):
        assumed = ("reference", "target")[place] if len(runs) == 2 else ""
        labels = (call for call in run.calls if call.kind == "label")
        found += [(int(call.arguments.get("at", call.order)), place, run, call, call.root or assumed) for call in labels]
    # Processes number for themselves; clocks of one machine put them in order.
    found.sort(key=lambda item: (item[1], item[0]) if len(runs) == 2 else (0, item[0]))
    steps: dict[str, int] = {}
    seen: Counter[tuple[int, str, str, str]] = Counter()
    out = []
    for at, _, run, call, side in found:
        task = str(call.arguments.get("task", ""))
        key = call.rank, task, side, call.scope
        step = steps.setdefault(task, len(steps))
        out.append(Label(run, call, side, task, str(call.arguments.get("id", "")), at, seen[key], step))
        seen[key] += 1
    return out


def faced(labels: Iterable[Label]) -> list[Facing]:
    """Who faces whom: equal ids, else equal names and occurrences, of one rank and one task. Whoever is left is alone."""
    labels = list(labels)
    sides: dict[str, list[Label]] = {"reference": [], "target": []}
    out: list[Facing] = []
    for label in labels:
        if label.side in sides:
            sides[label.side].append(label)
        else:
            out.append(Facing(label, None, 'names no side: whence.label(..., side="reference") or side="target"'))
    partner: dict[int, Label] = {}
    for key in (_by_id, _by_name):
        open_: dict[Any, list[Label]] = defaultdict(list)
        for label in sides["target"]:
            if id(label) not in partner and (k := key(label)) is not None:
                open_[k].append(label)
        for label in sides["reference"]:
            k = key(label)
            if id(label) not in partner and k is not None and open_.get(k):
                found = open_[k].pop(0)
                partner[id(label)], partner[id(found)] = found, label
    out += [Facing(label, partner[id(label)]) for label in sides["reference"] if id(label) in partner]
    for name, other in (("reference", "target"), ("target", "reference")):
        places: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
        for label in sides[other]:
            places[label.call.scope][label.task, label.call.rank] += 1
        for label in sides[name]:
            if id(label) not in partner:
                why = _alone(label, other, places[label.call.scope])
                out.append(Facing(label, None, why) if name == "reference" else Facing(None, label, why))
    return sorted(out, key=lambda row: (row.reference or row.target).at)  # type: ignore[union-attr]


def _by_id(label: Label) -> Any:
    return (label.call.rank, label.task, label.given) if label.given else None


def _by_name(label: Label) -> Any:
    return label.call.rank, label.task, label.call.scope, label.occurrence


def _alone(label: Label, other: str, places: Counter[tuple[str, int]]) -> str:
    """Why nothing faces a label. places: (task, rank) at which the other side has that name, and how often."""
    what = f"id {label.given}" if label.given else label.words
    here = places[label.task, label.call.rank]
    if here:
        return f"the {other} has no label {what}, only {here} of that name"
    where = sorted((f"task {task}" if task else "no task") + f", rank {rank}" for (task, rank), n in places.items() if n)
    return f"the {other} has no label {what}" + (f"; it has that name in {'; '.join(where[:3])}" if where else "")


class Side:
    """The labels of one side as a Run: call k faces call k of the other side, under one name."""

    def __init__(self, labels: Sequence[Label], names: Sequence[tuple[str, int]], words: str) -> None:
        runs = list({id(label.run): label.run for label in labels}.values())
        self.path = f"{', '.join(run.path for run in runs)} ({words})"
        self.info: RunInfo = runs[0].info if runs else RunInfo()
        self.ended = "; ".join(dict.fromkeys(run.ended for run in runs if run.ended))
        self.programs: dict[str, Program] = {}
        self.notes: Sequence[Note] = [n for run in runs for n in run.notes if n.kind in ("error", "budget", "label-error")]
        self.labels = list(labels)
        self.records = [msgspec.structs.replace(label.record, id=i) for i, label in enumerate(labels)]
        # The root is the task: what is wrong in one is not blamed for what follows in another.
        self.calls = [
            Call(
                i, name, label.task, label.step, i, rank=label.call.rank, occurrence=occurrence, kind="label", source=label.call.source,
                number=str(i), leaf=True, no_program="a label has no program", refs=(Ref("output.0", i),),
            )
            for i, (label, (name, occurrence)) in enumerate(zip(labels, names))
        ]  # fmt: skip
        ends = {(label.task, label.step, label.call.rank) for label in labels}
        self.steps = [Step(task, step, 0, True, rank) for task, step, rank in sorted(ends, key=lambda end: end[1:])]

    def array(self, record: int) -> Array:
        label = self.labels[record]
        return label.run.array(label.call.refs[0].record)


def sides(rows: Sequence[Facing]) -> tuple[Run, Run, list[str]]:
    """Both sides of the rows that face each other, the target's tensors in the reference's shapes; and what was done for that."""
    pairs = [(row.reference, row.target) for row in rows if row.reference is not None and row.target is not None]
    seen: Counter[tuple[int, int, str]] = Counter()
    names = []
    for own, _ in pairs:
        key = own.call.rank, own.step, own.call.scope
        names.append((own.call.scope, seen[key]))
        seen[key] += 1
    reference = Side([a for a, _ in pairs], names, "reference labels")
    target = Side([b for _, b in pairs], names, "target labels")
    # One task has one number on both sides.
    target.calls = [msgspec.structs.replace(c, step=own.step) for c, own in zip(target.calls, reference.calls)]
    laid, said = _laid_out(reference, target)
    return reference, laid, said


def _laid_out(reference: Side, target: Side) -> tuple[Run, list[str]]:
    """The target with tensors of another shape brought to the reference's axes, where their elements say how."""
    from whence import align

    making = align.Making(target)
    calls, said = list(target.calls), []
    for i, (own, other) in enumerate(zip(reference.records, target.records)):
        if own.shape == other.shape or not own.count or own.count != other.count:
            continue
        try:
            found = align.fit(target.array(i), reference.array(i))
        except ElementsMissing:
            continue
        if found is None:
            continue
        made = making.add(found.node, {"x": [i]}, "its elements")
        calls[i] = msgspec.structs.replace(calls[i], refs=(Ref("output.0", made),))
        said.append(f"{calls[i].scope}#{calls[i].occurrence}: the target's {list(other.shape)} is read as {found.node}")
    run = making.done()
    if said:
        from whence.records import Over

        run = Over(run, calls)
    return run, said


def compare_labels(
    reference: str | os.PathLike[str] | Run,
    target: str | os.PathLike[str] | Run | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    strict: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Compare the labels of one run, its reference side against its target side; or those of two runs.

    reference, target: folders or opened runs. Of two runs, labels of the first that name no side are the reference's, of the second the
    target's. output: a folder for summary.json, report.csv, report.json and `cmp_report.csv`, whose columns are those of the aclcmp
    report and which has a row for every label, also for those that face nothing. strict: as `compare` takes it.
    A label without a partner, or whose tensor is not there, makes `same` `undecided`.
    Raises CaptureError when there is no label at all, UnreadableRun, UsageError, OutputExists.
    """
    from whence.workflows.compare import check_output

    if output is not None:
        check_output(Path(output), force)
    result, rows = labels_compared(reference, target, strict=strict, progress=progress)
    if output is not None:
        write_labels(result, rows, Path(output))
    return result


def write_labels(result: Comparison, rows: Sequence[Facing], folder: Path) -> None:
    """Write the files of a comparison of labels. Raises StoreFailed."""
    from whence.workflows.compare import write

    write(result, folder)
    write_table(rows, folder)


def labels_compared(
    reference: str | os.PathLike[str] | Run,
    target: str | os.PathLike[str] | Run | None = None,
    *,
    strict: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Comparison, list[Facing]]:
    """As `compare_labels`, which writes; (the comparison, a row for every label)."""
    from whence.comparison.pipeline import CompareOptions, compare_runs
    from whence.workflows.capture.command import open_run

    given = [reference] if target is None else [reference, target]
    if len(given) == 2 and all(isinstance(g, (str, os.PathLike)) for g in given) and Path(given[0]).resolve() == Path(given[1]).resolve():  # type: ignore[arg-type]
        given = given[:1]
    for path in given:
        _settle(path)
    runs = [open_run(os.fspath(run)) if isinstance(run, (str, os.PathLike)) else run for run in given]
    labels = labels_of(runs)
    if not labels:
        raise CaptureError(
            f"no label was recorded in {' or '.join(run.path for run in runs)}: call whence.label(name, tensor, side=...) in the program, "
            "or WHENCE_LABEL in C++"
        )
    rows = faced(labels)
    left, right, said = sides(rows)
    result = compare_runs(left, right, CompareOptions(replay=False, strict=strict, match="exact", stated=True, progress=progress))
    return _with_alone(result, rows, said), rows


def run_labels(
    command: Sequence[str], output: str | os.PathLike[str], *, force: bool = False, **options: Any
) -> tuple[int, Comparison | None]:
    """Run a command, take its labels and compare their sides, as `whence run --compare`; (exit code of the command, the comparison).

    output: folder of the comparison; the run is kept below it, in `run`. options: as `run_command` takes them, library ones too.
    No comparison is made where the command failed and left no label. Raises CaptureError where it ended well and left none.
    """
    from whence.instrument.labels.labels import complain
    from whence.store.folder import load_info
    from whence.workflows.capture.command import run_command
    from whence.workflows.compare import check_output

    folder = Path(output)
    check_output(folder, force)
    said: list[str] = []
    code = run_command(command, str(folder / "run"), force=force, labels_only=True, tell=said.append, **options)
    own = int(load_info(folder / "run").settings.get("exit_code", code))  # `code` is 3 too when nothing was captured
    try:
        result = compare_labels(folder / "run", output=folder, force=True)
    except (CaptureError, UnreadableRun):
        lines = "\n  ".join(line.removeprefix("whence: ") for line in said)
        if own == 0:
            raise CaptureError(
                f"no label was recorded; call whence.label(name, tensor, side=...) or WHENCE_LABEL in C++\n  {lines}"
            ) from None
        complain(f"no label was recorded; {lines}")
        return own, None
    for line in said:
        complain(line.removeprefix("whence: "))
    return own, result


def _with_alone(result: Comparison, rows: Sequence[Facing], said: Sequence[str]) -> Comparison:
    """With the labels that face nothing, and the tensors that are not there: neither is a pass."""
    alone = [row for row in rows if row.reference is None or row.target is None]
    names: dict[str, list[str]] = defaultdict(list)
    for row in alone:
        one = row.reference or row.target
        assert one is not None
        names[one.side or "without a side"].append(one.words)
    missing = [
        f"{words} label {label.words}: {why}"
        for row in rows if row.reference is not None and row.target is not None
        for words, label in (("reference", row.reference), ("target", row.target)) if (why := lost(label))
    ]  # fmt: skip
    status, headline = result.status, result.headline
    pairs = len(rows) - len(alone)
    if not pairs:
        status, headline = "undecided", f"no two labels face each other: {alone[0].why}"
    elif status == "same" and (alone or missing):
        words = [f"{n} {what}" for n, what in ((len(alone), "labels face nothing"), (len(missing), "tensors are not there")) if n]
        status, headline = "undecided", " and ".join(words)

    def in_task(finding: Finding) -> Finding:
        return msgspec.structs.replace(finding, sentence=f"in task {finding.root}: {finding.sentence}") if finding.root else finding

    reasons = [f"{(row.reference or row.target).words}: {row.why}" for row in alone]  # type: ignore[union-attr]
    return msgspec.structs.replace(
        result, status=status, headline=headline, findings=tuple(map(in_task, result.findings)), unmatched=result.unmatched + len(alone),
        without_partner={**result.without_partner, **{side: tuple(dict.fromkeys(found)) for side, found in names.items()}},
        notes=(*_few(missing), *_few(reasons), *_few(said), *(n for n in result.notes)),
    )  # fmt: skip


def _few(sentences: Sequence[str], most: int = 3) -> list[str]:
    more = len(sentences) - most
    return [*sentences[:most], *([f"and {more} more, see cmp_report.csv"] if more > 0 else [])]


def lost(label: Label) -> str:
    """Why a label has no elements; "" where it has."""
    record = label.record
    return record.why if record.elements is None and record.count else ""


def write_table(rows: Sequence[Facing], folder: Path) -> None:
    """Write cmp_report.csv. Raises StoreFailed."""
    from whence import report
    from whence.errors import StoreFailed

    try:
        (folder / "cmp_report.csv").write_text(report.labels_csv(map(_row, rows)), encoding="utf-8")
    except OSError as error:
        raise StoreFailed(f"cannot write {folder / 'cmp_report.csv'}: {error.strerror or error}") from error


def _row(row: Facing) -> ViewRow:
    """What the table says of one row."""
    from whence.comparison.views import figures as figures_module

    why, arrays = row.why, []
    for side, label in (("reference", row.reference), ("target", row.target)):
        try:
            if label is not None:
                arrays.append(label.run.array(label.call.refs[0].record))
        except ElementsMissing as error:
            why = why or f"{side}: {label.record.why or error}" if label is not None else why
    figures: figures_module.Figures = {}
    if len(arrays) == 2:
        figures, why = figures_module.FORMULAS["aclcmp"](*arrays)
    sides = (row.reference, row.target)
    # A file that never appeared has nothing to show; a row needs one side that names it.
    some = any(label is not None and label.record.dtype for label in sides)
    shown = [_shown(label) if label is not None and (label.record.dtype or not some) else None for label in sides]
    return ViewRow((-1, -1), "output.0", shown[0], shown[1], figures=figures, why=why)


def _shown(label: Label) -> Shown:
    record, call = label.record, label.call
    data_id = label.given or "/".join(x for x in (label.task, f"{call.scope}#{label.occurrence}") if x)
    return Shown(
        name=data_id, kind=call.kind, op_type="", occurrence=label.occurrence, phase=call.phase, slot="output.0", step=label.step,
        rank=call.rank, dtype=record.dtype, shape=record.shape, path=_path(label), source=call.source,
    )  # fmt: skip


def _path(label: Label) -> str:
    """Where the tensor lies: the library's file, else the shard of the run and the tensor's name in it."""
    file = label.call.arguments.get("file")
    if file:
        return str(file)
    location = getattr(label.run, "location", None)
    place = location(label.call.refs[0].record) if location is not None else None
    return f"{place[0]}#{label.record.id}" if place is not None else label.run.path


def _settle(run: object) -> None:
    """Add labels to a run that still lie beside it, because its launcher was killed."""
    if isinstance(run, (str, os.PathLike)):
        from whence import store
        from whence.workflows.capture.collect_labels import gather

        if store.is_run(os.fspath(run)):
            gather(os.fspath(run), wait_s=0.0, ended_only=True)
