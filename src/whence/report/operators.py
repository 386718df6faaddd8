"""The operators of a run as a table, CSV or JSON. Computes nothing but sums."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from whence.report import tables
from whence.report.tables import HEAD, TAIL, shortened

WHERE = 3
CAP = 60  # characters of tensors, arguments and places in a table that are shown
_CAPPED = (4, 5, 7, 8)
_HEAD = ("operator", "count", "time", "share", "in", "out", "range out", "arguments", "where")


def operators(groups: Sequence[Any], form: str, width: int | None = None) -> Iterator[str]:
    """Lines of a listing. groups: of `api.signatures`, grouped by operator. form: "table", "json"
    or "csv".

    width: of the terminal. Tables of any width cut tensors and places; JSON and CSV hold
    everything.
    """
    total = sum(g.seconds for g in groups)
    if form == "json":
        yield json.dumps([_plain(g, total) for g in groups], indent=1, ensure_ascii=False)
    elif form == "csv":
        yield _csv(groups, total)
    else:
        yield from _table(groups, total, width)


def _table(groups: Sequence[Any], total: float, width: int | None) -> Iterator[str]:
    by_name: dict[str, list[Any]] = {}
    for group in groups:
        by_name.setdefault(group.op, []).append(group)
    if not by_name:
        yield "no operator: a run holds them when it was captured with --level op"
        return
    rows: list[Sequence[str]] = [_HEAD]
    for name, members in by_name.items():
        count, seconds = sum(g.count for g in members), sum(g.seconds for g in members)
        scopes: dict[str, int] = {}
        for group in members:
            for scope, n in group.scopes.items():
                scopes[scope] = scopes.get(scope, 0) + n
        several = tables.count(len(members), "signature")
        rows.append(
            (
                name,
                tables.count(count),
                _time(seconds),
                _share(seconds, total),
                several,
                "",
                "",
                "",
                _where(scopes),
            )
        )
        rows += [
            (
                "",
                tables.count(g.count),
                _time(g.seconds),
                _share(g.seconds, total),
                _tensors(g.inputs),
                _tensors(g.outputs),
                _range([g.ranges[t.slot] for t in g.outputs if t.slot in g.ranges]),
                _arguments(g.arguments),
                _where(g.scopes),
            )
            for g in members
        ]
    capped = [
        [shortened(cell, CAP) if column in _CAPPED else cell for column, cell in enumerate(row)]
        for row in rows
    ]
    give = {0: TAIL, 4: HEAD, 5: HEAD, 7: HEAD, 8: TAIL}
    yield from tables.columns(capped, right=(1, 2, 3), width=width, give=give, drop=(7, 3, 6, 5))
    calls = tables.count(sum(g.count for g in groups), "call")
    yield (
        f"{tables.count(len(by_name), 'operator')}, {tables.count(len(groups), 'signature')}, "
        f"{calls}, {_time(total)}"
    )


def _csv(groups: Sequence[Any], total: float) -> str:
    head = ("op", "count", "seconds", "share", "inputs", "outputs", "min", "max", "nan", "inf")
    rows: list[tuple[object, ...]] = [(*head, "arguments", "phases", "where", "source")]
    for g in groups:
        low, high, nan, inf = _merged([g.ranges[t.slot] for t in g.outputs if t.slot in g.ranges])
        texts = (_arguments(g.arguments), _counted(g.phases), _counted(g.scopes), g.source)
        rows.append(
            (
                tables.cell(g.op),
                g.count,
                f"{g.seconds:.9f}",
                f"{g.seconds / total:.6f}" if total else "",
                _tensors(g.inputs),
                _tensors(g.outputs),
                "" if low is None else repr(low),
                "" if high is None else repr(high),
                nan,
                inf,
                *map(tables.cell, texts),
            )
        )
    return tables.csv_text(rows)[:-1]


def _plain(g: Any, total: float) -> dict[str, Any]:
    tensors = [
        {
            "slot": t.slot,
            "dtype": t.dtype,
            "shape": list(t.shape),
            "stride": list(t.stride),
            **(
                {"min": r.min, "max": r.max, "nan": r.nan, "inf": r.inf}
                if (r := g.ranges.get(t.slot)) is not None
                else {}
            ),
        }
        for t in g.tensors
    ]
    return {
        "op": g.op,
        "count": g.count,
        "seconds": g.seconds,
        "share": g.seconds / total if total else None,
        "tensors": tensors,
        "arguments": g.arguments,
        "where": g.scopes,
        "phases": g.phases,
        "source": g.source,
        "calls": g.calls,
        "with_elements": g.with_elements,
    }


def _tensors(tensors: Sequence[Any]) -> str:
    return (
        " ".join(
            f"{t.dtype}{_extents(t.shape)}" + (f":{_extents(t.stride)}" if t.stride else "")
            for t in tensors
        )
        or "-"
    )


def _extents(numbers: Sequence[int]) -> str:
    return tables.shape(numbers).replace(", ", ",")


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in arguments.items())


def _value(value: Any) -> str:
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value.values())))
    return json.dumps(value)


def _merged(ranges: Sequence[Any]) -> tuple[float | None, float | None, int, int]:
    lows, highs = (
        [r.min for r in ranges if r.min is not None],
        [r.max for r in ranges if r.max is not None],
    )
    return (
        min(lows, default=None),
        max(highs, default=None),
        sum(r.nan for r in ranges),
        sum(r.inf for r in ranges),
    )


def _range(ranges: Sequence[Any]) -> str:
    low, high, nan, inf = _merged(ranges)
    text = "-" if low is None else f"{low:.3g} .. {high:.3g}"
    return text + (f" NaN {nan}" if nan else "") + (f" Inf {inf}" if inf else "")


def _where(scopes: dict[str, int]) -> str:
    names = sorted(scopes, key=lambda s: -scopes[s])
    text = ", ".join(n or "(root)" for n in names[:WHERE])
    return text + (f" and {len(names) - WHERE} more" if len(names) > WHERE else "")


def _counted(table: dict[str, int]) -> str:
    return " ".join(f"{name or '(root)'}:{n}" for name, n in table.items())


def _share(seconds: float, total: float) -> str:
    return f"{100 * seconds / total:.1f} %" if total else "-"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
