"""Reports on a terminal whether a program repeats its own results."""

from __future__ import annotations

from whence.report.document import Document, answering, few
from whence.report.tables import called_at, count, spaced, where
from whence.results import Repeated, Source, SourceKind, Status

_MOST_ALSO = 6
_KINDS: dict[str, str] = {
    SourceKind.INPUT: "data from outside",
    SourceKind.ARGUMENT: "a value from outside",
    SourceKind.STATE: "a parameter or buffer",
    SourceKind.RANDOM: "random numbers",
    SourceKind.CODE: "the code that runs",
    SourceKind.OPERATOR: "the operator itself",
    SourceKind.CALLS: "the calls that are made",
}
_FROM_INSIDE = (SourceKind.RANDOM, SourceKind.CODE, SourceKind.OPERATOR)


@answering
def repeated_text(result: Repeated) -> Document:
    """The answer as text."""
    first = result.first
    compared = f"{count(result.tensors, 'tensor')} of {count(result.calls, 'call')}"
    if result.status == Status.SAME:
        steps = f", of the steps {result.steps} alone" if result.steps else ""
        yield "REPEATS", f"{result.times} runs are equal bit for bit: {compared}{steps}"
    elif first is None:
        yield "CANNOT TELL", f"nothing differs of what was compared: {compared}"
        yield from (("  because", why) for why in result.why)
    else:
        yield "DOES NOT REPEAT", _place(first)
        yield from _first(first)
        yield (
            "  also",
            few(result.sources[1:], _MOST_ALSO, lambda s: f"{_place(s)}: {_KINDS[s.kind]}"),
        )
        yield from _reach(result)
        yield "  runs", _groups(result)
        yield "  to repeat", first.repeats_with
        yield "  next", result.next
    yield "  kept in", ", ".join(result.runs)


def _first(first: Source) -> Document:
    yield "  called at", called_at(first.line)
    yield "  differs", f"{_KINDS[first.kind]}: {first.words}"
    if first.kind in _FROM_INSIDE:
        yield "  inputs", "bitwise equal in both runs"
    if first.count:
        size = f"rel_l2 {first.error:.3g}, " if first.error is not None else ""
        yield "  by", f"{size}{first.differing:,} of {count(first.count, 'element')}"


def _place(source: Source) -> str:
    return spaced(source.scope or source.root, source.op_type, source.slot, where(source))


def _reach(result: Repeated) -> Document:
    if (gradient := result.gradient) is not None:
        share = "all" if gradient.share > 0.9995 else f"{100 * gradient.share:.3g} %"
        size = f", rel_l2 {gradient.error:.3g}" if gradient.error is not None else ""
        yield (
            "  gradient",
            f"{share} of its squared norm differs at step {gradient.step}: "
            f"{gradient.differing} of {count(gradient.count, 'parameter')}{size}",
        )
    losses = (
        f"{_number(loss.first)} and {_number(loss.second)} at step {loss.step}"
        for loss in result.losses
    )
    yield "  loss", losses
    name, error = result.end
    if name:
        size = f"rel_l2 {error:.3g}" if error is not None else "not measured"
        yield "  at the end", f"{name}: {size}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def _groups(result: Repeated) -> str:
    groups, times = result.groups, result.times
    if times == 2:
        return "2 runs differ; --times 3 tells whether only the first does"
    if len(groups) == times:
        return f"all {times} runs differ from each other"
    if groups[0] == (1,) and len(groups) == 2:
        return f"only the first differs: the {times - 1} others are equal to each other"
    return "; ".join(f"{' = '.join(map(str, group))}" for group in groups) + " (equal runs)"
