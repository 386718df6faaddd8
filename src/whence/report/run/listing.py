"""The calls of a run with their records: as lines, as a tree, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from whence.records import Call, Record, Ref, Run
from whence.records.columns import columns_of, has_elements
from whence.report import tables
from whence.report.run.choice import Choice, name_of, none_chosen, references, step_ranges
from whence.report.run.elements import kind_of_record
from whence.report.run.heading import heading
from whence.report.tables import HEAD, TAIL


def text(
    run: Run, choice: Choice, limit: int | None = None, width: int | None = None
) -> Iterator[str]:
    """The whole run: heading, then calls with their records. limit: at most so many records, then a
    line saying how many more.

    width: of the terminal, for which figures are left out (norm, deviation, mean); None leaves
    nothing out.
    """
    yield from heading(run)
    yield ""
    refs = columns_of(run).refs
    count = omitted = 0
    for place in choice.places(run):
        if limit is not None and count >= limit:
            omitted += int(refs[place])
            continue
        call = run.calls[place]
        yield _call_line(call)
        count += len(call.refs)
        yield from tables.columns(
            [_record_row(run.records[ref.record], ref) for ref in call.refs],
            right=(4, 5, 6, 7, 8, 9, 10),
            width=width,
            give={11: HEAD},
            drop=(8, 7, 6, 11),
        )
    if omitted:
        yield (
            f"... {tables.count(omitted, 'more record')}: show them with --all, or select some "
            "with --name PATTERN, --ids or --step"
        )
    elif not count and run.calls:
        yield none_chosen(run, choice)


def tree(run: Run, choice: Choice, width: int | None = None) -> Iterator[str]:
    """Every module call with its number, once for steps with the same tree. width: of the
    terminal.
    """
    trees: dict[tuple[int, str, int, int], list[Call]] = {}
    for call in choice.calls(run):
        trees.setdefault((call.rank, call.root, call.step, call.micro), []).append(call)
    places_of: dict[tuple[int, str, tuple[tuple[str, str, str], ...]], list[tuple[int, int]]] = {}
    for (rank, root, step, micro), calls in trees.items():
        signature = tuple((c.number, name_of(c), c.op_type) for c in calls)
        places_of.setdefault((rank, root, signature), []).append((step, micro))
    if not places_of:
        yield none_chosen(run, choice)
    for (rank, root, _), places in places_of.items():
        calls = trees[(rank, root, *places[0])]
        yield f"{tables.clean(root)}   rank {rank}   {step_ranges([step for step, _ in places])}"
        rows = []
        for call in calls:
            depth = 0 if call.number == "0" else call.number.count("_") + 1
            outputs = ", ".join(
                kind_of_record(run.records[ref.record]) for ref in call.slots("output")
            )
            rows.append(
                (
                    tables.clean(call.number),
                    "  " * depth + tables.clean(name_of(call)),
                    tables.clean(call.op_type),
                    outputs,
                )
            )
        yield from tables.columns(rows, width=width, give={1: TAIL, 2: HEAD, 3: HEAD})
        yield ""


def table(run: Run, choice: Choice, width: int | None = None) -> Iterator[str]:
    """Index, Step, Rank, Module, Min, Max, Mean, Std; one line a tensor. width: of the terminal;
    None leaves names whole.
    """
    rows: list[tuple[str, ...]] = [("Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std")]
    for index, (call, ref) in enumerate(references(run, choice)):
        s = run.records[ref.record].statistics
        figures = (
            ("-",) * 4
            if s is None
            else tuple(tables.number(v) for v in (s.min, s.max, s.mean, s.std))
        )
        rows.append(
            (
                str(index),
                str(call.step),
                str(call.rank),
                tables.clean(f"{name_of(call)}:{ref.slot}"),
                *figures,
            )
        )
    yield from tables.columns(
        rows, right=(0, 1, 2, 4, 5, 6, 7), width=width, give={3: TAIL}, drop=(7, 6)
    )


def _call_line(call: Call) -> str:
    extra = [f"occurrence {call.occurrence}"] if call.occurrence else []
    extra += [f"micro {call.micro}"] if call.micro else []
    extra += [call.phase] if call.phase != "forward" else []
    extra += ["train"] if call.training else []
    extra += [f"RAISED {call.error}"] if call.error else []
    extra += list(call.notes)
    return tables.clean(
        "   ".join(
            [
                call.number,
                name_of(call),
                call.op_type,
                f"step {call.step}, rank {call.rank}",
                *extra,
            ]
        )
    )


def _record_row(record: Record, ref: Ref) -> tuple[str, ...]:
    s = record.statistics
    figures = (
        ("-",) * 5
        if s is None
        else tuple(tables.number(v) for v in (s.min, s.max, s.mean, s.std, s.norm))
    )
    labelled = tuple(
        f"{label} {figure}" for label, figure in zip(("min", "max", "mean", "std", "norm"), figures)
    )
    strange = ("", "") if s is None else (f"nan {s.nan}", f"inf {s.inf}")
    tail = [f"#{record.id}", *([f"({ref.edge})"] if ref.edge else [])]
    tail += [f"{key} {tables.number(value)}" for key, value in record.columns.items()]
    tail += [f"[{record.why}]"] if record.why and not has_elements(record) else []
    return (
        "",
        tables.clean(ref.slot),
        tables.clean(record.dtype),
        tables.shape(record.shape) + (f" of {tables.shape(record.whole)}" if record.whole else ""),
        *labelled,
        *strange,
        tables.clean(" ".join(tail)),
    )
