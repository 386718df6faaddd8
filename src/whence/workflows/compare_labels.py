"""Compares labelled tensors of two sides of one program."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from whence.dtypes import Array
from whence.errors import CaptureError, ElementsMissing, UnreadableRun
from whence.records import Run
from whence.results import Comparison, Finding, Shown, Status, Verdict, ViewRow, severity
from whence.workflows.notebook_progress import Count
from whence.workflows.saved import AnyPath, AnyRun, as_run, check_output, storing

if TYPE_CHECKING:
    from whence.comparison.prepare.label_sides import Label, TensorMatcher

_SHOWN = 3  # sentences of a kind
_MOMENTS = ("before", "after")  # folders in which libraries keep what an operation takes and gives


def compare_labels(
    reference: AnyRun,
    target: AnyRun | None = None,
    *,
    output: AnyPath | None = None,
    force: bool = False,
    strict: bool = False,
    progress: Count | None = None,
) -> Comparison:
    """Compare the labels of one run, its reference side against its target side; or those of two
    runs.

    reference, target: folders or opened runs. Labels without a side count as the
    reference's in the first of two runs, and as the target's in the second. output: a folder for
    summary.json, report.csv, report.json and `cmp_report.csv`, whose columns are those of the
    aclcmp report and which has a row for every label, also for those that have no partner. strict:
    as `compare` takes it. A label without a partner or without its tensor turns `same` into
    `undecided`. Raises CaptureError when there is no label at all, UnreadableRun, UsageError,
    OutputExists.
    """

    if output is not None:
        check_output(Path(output), force)
    result, rows = labels_compared(reference, target, strict=strict, progress=progress)
    if output is not None:
        write_labels(result, rows, Path(output))
    return result


def write_labels(result: Comparison, rows: Sequence[TensorMatcher], folder: Path) -> None:
    """Write the files of a comparison of labels. Raises StoreFailed."""
    from whence.workflows.saved import write

    write(result, folder)
    write_table(rows, folder)


def labels_compared(
    reference: AnyRun,
    target: AnyRun | None = None,
    *,
    strict: bool = False,
    progress: Count | None = None,
) -> tuple[Comparison, list[TensorMatcher]]:
    """As `compare_labels`, which writes; (the comparison, a row for every label)."""
    from whence.comparison.options import CompareOptions
    from whence.comparison.pipeline import compare_runs
    from whence.comparison.prepare.label_sides import faced, labels_of, sides

    sources = [reference] if target is None else [reference, target]
    paths = [Path(g).resolve() for g in sources if isinstance(g, (str, os.PathLike))]
    if len(paths) == 2 and paths[0] == paths[1]:
        sources = sources[:1]
    for path in sources:
        _settle(path)
    runs = [as_run(run) for run in sources]
    labels = labels_of(runs)
    if not labels:
        raise CaptureError(
            f"no label was recorded in {' or '.join(run.path for run in runs)}: call "
            "whence.label(name, tensor, side=...) in the program, "
            "or WHENCE_LABEL in C++"
        )
    rows = faced(labels)
    compared = [row for row in rows if not _without_tensor(row)]
    reference_run, target_run, notes = sides(compared)
    result = compare_runs(
        reference_run,
        target_run,
        CompareOptions(replay=False, strict=strict, match="exact", stated=True, progress=progress),
    )
    pairs = result.plan.pairs
    findings = [_with_pattern(f, compared[pairs[f.pair].reference]) for f in result.findings]
    levels = tuple(_levels(result, compared))
    result = msgspec.structs.replace(result, findings=tuple(findings), levels=levels)
    return _with_alone(result, rows, notes, _not_reached(runs)), rows


def _with_pattern(finding: Finding, row: TensorMatcher) -> Finding:
    """The finding with what all its elements show ("everything is multiplied by 1.05")."""
    arrays = _arrays(row)[0]
    is_whole = len(arrays) == 2 and arrays[0].shape == arrays[1].shape
    pattern = _pattern(*arrays) if is_whole else ""
    if not pattern or pattern in finding.sentence:
        return finding
    return msgspec.structs.replace(finding, sentence=f"{pattern}; {finding.sentence}")


def _pattern(reference: Array, target: Array) -> str:
    """What an error looks like in all elements, in words; "" for none."""
    from whence import dtypes, judge

    u = dtypes.coarser(dtypes.of(reference).name, dtypes.of(target).name)
    sight = judge.sight(reference, target, u, judge.LIMITS.within(u))
    return sight.pattern if sight is not None else ""


def _arrays(row: TensorMatcher) -> tuple[list[Array], str]:
    """The tensors of a pair that have elements, and why one has none."""
    arrays, why = [], ""
    for side, label in (("reference", row.reference), ("target", row.target)):
        try:
            if label is not None:
                arrays.append(label.run.array(label.call.refs[0].record))
        except ElementsMissing as error:
            why = why or (f"{side}: {label.record.why or error}" if label is not None else "")
    return arrays, why


def _levels(result: Comparison, rows: Sequence[TensorMatcher]) -> Iterator[str]:
    """The operations whose files labels name, as a tree: model, layer, operation, each with its
    worst verdict.
    """
    from whence.readers.assembly.named_tensors import natural

    worst: dict[tuple[str, ...], Verdict | None] = {}
    for verdict in result.verdicts:
        row = rows[result.plan.pairs[verdict.pair].reference]
        for label in filter(None, (row.reference, row.target)):
            folders = PurePath(str(label.call.arguments.get("named", ""))).parent.parts
            place = tuple(itertools.takewhile(lambda folder: folder not in _MOMENTS, folders))
            for depth in range(1, len(place)):
                worst.setdefault(place[:depth])
            known = worst.get(place)
            if known is None or severity(verdict.verdict) > severity(known.verdict):
                worst[place] = verdict
    for place in sorted(filter(None, worst), key=lambda place: list(map(natural, place))):
        line = "  " * len(place[1:]) + place[-1]
        if (known := worst[place]) is not None:
            size = known.numbers.get("e_out")
            line += f"   {known.verdict}" + (f" rel_l2 {size:.2g}" if size is not None else "")
        yield line


def run_labels(
    command: Sequence[str], output: AnyPath, *, force: bool = False, **options: Any
) -> tuple[int, Comparison | None]:
    """Run a command, take its labels and compare their sides, as `whence run --compare`; (exit code
    of the command, the comparison).

    output: folder of the comparison; the run is kept below it, in `run`. options: as `run_command`
    takes them, library ones too. No comparison is made where the command failed and left no label.
    Raises CaptureError where it ended well and left none.
    """
    from whence.instrument.labels.labels import complain
    from whence.store.folder import load_info
    from whence.workflows.capture.command import run_command

    folder = Path(output)
    check_output(folder, force)
    messages: list[str] = []
    code = run_command(
        command, str(folder / "run"), force=force, labels_only=True, tell=messages.append, **options
    )
    try:
        # `code` is 3 too when nothing was captured
        exit_code = int(load_info(folder / "run").settings.get("exit_code", code))
    except UnreadableRun:  # nothing was captured, so there is no run
        exit_code = 0 if code == 3 else code
    try:
        result = compare_labels(folder / "run", output=folder, force=True)
    except (CaptureError, UnreadableRun):
        lines = "\n  ".join(line.removeprefix("whence: ") for line in messages)
        if exit_code == 0:
            raise CaptureError(
                "no label was recorded; call whence.label(name, tensor, side=...) in Python, or "
                f"WHENCE_LABEL in C++\n  {lines}"
            ) from None
        complain(f"no label was recorded; {lines}")
        return exit_code, None
    for line in messages:
        complain(line.removeprefix("whence: "))
    return exit_code, result


def _not_reached(runs: Sequence[Run]) -> str:
    """Why labels may be missing on both sides, in a sentence; "" where all commands ended alike."""
    codes = [run.info.settings.get("exit_code", 0) for run in runs]
    if not any(codes) or (len(runs) > 1 and all(codes)):
        return ""
    return f"the command ended with exit code {max(codes)}: what it did not reach was not compared"


def _with_alone(
    result: Comparison, rows: Sequence[TensorMatcher], sentences: Sequence[str], not_reached: str
) -> Comparison:
    """Add to the comparison the labels without a partner and the tensors that are missing: neither
    passes, nor does a program that stopped before its end.
    """
    unpaired = [row for row in rows if row.reference is None or row.target is None]
    names: dict[str, list[str]] = defaultdict(list)
    for row in unpaired:
        label = row.reference or row.target
        assert label is not None
        names[label.side or "without a side"].append(label.words)
    missing = [
        f"{words} label {label.words}: {why}"
        for row in rows
        if row.reference is not None and row.target is not None
        for words, label in (("reference", row.reference), ("target", row.target))
        if (why := lost(label))
    ]
    status, headline = result.status, result.headline
    pairs = len(rows) - len(unpaired)
    if not pairs:
        status, headline = "undecided", f"no two labels could be paired: {unpaired[0].why}"
    elif status == Status.UNDECIDED and missing:
        compared = pairs - sum(map(_without_tensor, rows))
        headline = f"{compared} of {pairs} pairs of labels could be compared; {missing[0]}"
    elif status == Status.SAME and (unpaired or missing):
        words = [
            f"{n} {predicate}"
            for n, predicate in (
                (len(unpaired), "labels have no partner"),
                (len(missing), "tensors are missing"),
            )
            if n
        ]
        status, headline = "undecided", " and ".join(words)
        if missing:
            headline += f"; {missing[0]}"
    elif status == Status.SAME and not_reached:
        status, headline = "undecided", not_reached

    def in_task(finding: Finding) -> Finding:
        return (
            msgspec.structs.replace(finding, sentence=f"in task {finding.root}: {finding.sentence}")
            if finding.root
            else finding
        )

    reasons = [f"{(row.reference or row.target).words}: {row.why}" for row in unpaired]  # type: ignore[union-attr]
    return msgspec.structs.replace(
        result,
        status=status,
        headline=headline,
        findings=tuple(map(in_task, result.findings)),
        unmatched=result.unmatched + len(unpaired),
        incomparable=result.incomparable + sum(map(_without_tensor, rows)),
        without_partner={
            **result.without_partner,
            **{side: tuple(dict.fromkeys(labels)) for side, labels in names.items()},
        },
        notes=(*_few(missing), *_few(reasons), *_few(sentences), *(n for n in result.notes)),
    )


def _few(sentences: Sequence[str]) -> list[str]:
    omitted = len(sentences) - _SHOWN
    more = [f"and {omitted} more, see cmp_report.csv"] if omitted > 0 else []
    return [*sentences[:_SHOWN], *more]


def lost(label: Label) -> str:
    """The reason why a label has no elements; "" when it has elements."""
    record = label.record
    return record.why if record.elements is None and record.count else ""


def _without_tensor(row: TensorMatcher) -> bool:
    """Whether a tensor of a pair is missing entirely, with its dtype and shape."""
    return any(
        label is not None and not label.record.dtype and bool(label.record.why)
        for label in (row.reference, row.target)
    )


def write_table(rows: Sequence[TensorMatcher], folder: Path) -> None:
    """Write cmp_report.csv. Raises StoreFailed."""
    from whence import disk
    from whence.report.labels import labels_csv

    with storing(f"write {folder / 'cmp_report.csv'}"):
        disk.write_file(folder / "cmp_report.csv", labels_csv(map(_row, rows)))


def _row(row: TensorMatcher) -> ViewRow:
    """The row of the table for one pair."""
    from whence.comparison.views import aclcmp
    from whence.comparison.views.formulas import Figures

    arrays, missing = _arrays(row)
    why = row.why or missing
    figures: Figures = {}
    if len(arrays) == 2:
        figures, why = aclcmp.figures(*arrays)
        if not why and (pattern := _pattern(*arrays)):
            why = f"target: {pattern}"
    sides = (row.reference, row.target)
    # A file that never appeared has nothing to show; a row needs one side that names it.
    some = any(label is not None and label.record.dtype for label in sides)
    cells = [
        _shown(label) if label is not None and (label.record.dtype or not some) else None
        for label in sides
    ]
    return ViewRow((-1, -1), "output.0", cells[0], cells[1], figures=figures, why=why)


def _shown(label: Label) -> Shown:
    record, call = label.record, label.call
    data_id = label.id or "/".join(x for x in (label.task, f"{call.scope}#{label.occurrence}") if x)
    return Shown(
        name=data_id,
        kind=call.kind,
        op_type="",
        occurrence=label.occurrence,
        phase=call.phase,
        slot="output.0",
        step=label.step,
        rank=call.rank,
        dtype=record.dtype,
        shape=record.shape,
        path=_path(label),
        source=call.source,
    )


def _path(label: Label) -> str:
    """The path of the tensor: the library's file, else the run's shard and the tensor's
    name in it.
    """
    file = label.call.arguments.get("file")
    if file:
        return str(file)
    location = getattr(label.run, "location", None)
    place = location(label.call.refs[0].record) if location is not None else None
    return f"{place[0]}#{label.record.id}" if place is not None else label.run.path


def _settle(run: object) -> None:
    """Add to a run the labels that still lie beside it because its launcher was killed."""
    if isinstance(run, (str, os.PathLike)):
        from whence import store
        from whence.workflows.capture.collect_labels import gather

        if store.is_run(os.fspath(run)):
            gather(os.fspath(run), wait_s=0.0, ended_only=True)
