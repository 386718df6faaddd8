"""Whether a program repeats itself, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import AT_LINE, clean, count, from_here, headed
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


def repeated_text(result: Repeated) -> str:
    """The answer as text."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Repeated) -> Iterator[str]:
    first = result.first
    compared = f"{count(result.tensors, 'tensor')} of {count(result.calls, 'call')}"
    if result.status == Status.SAME:
        steps = f", of the steps {clean(result.steps)} alone" if result.steps else ""
        yield headed("REPEATS", f"{result.times} runs are equal bit for bit: {compared}{steps}")
    elif first is None:
        yield headed("CANNOT TELL", f"nothing differs of what was compared: {compared}")
        yield from (headed("  because", clean(why)) for why in result.why)
    else:
        yield headed("DOES NOT REPEAT", _place(first))
        if AT_LINE.search(first.line):
            yield headed("  called at", clean(from_here(first.line)))
        yield headed("  differs", f"{_KINDS.get(first.kind, first.kind)}: {clean(first.words)}")
        if first.kind in _FROM_INSIDE:
            yield headed("  inputs", "bitwise equal in both runs")
        if first.count:
            yield headed("  by", _size(first))
        yield from _also(result)
        yield from _reach(result)
        yield headed("  runs", _groups(result))
        for number, advice in enumerate(first.repeats_with):
            yield headed("" if number else "  to repeat", clean(advice))
        if result.next:
            yield headed("  next", clean(result.next))
    if result.runs:
        yield headed("  kept in", ", ".join(map(clean, result.runs)))


def _place(source: Source) -> str:
    where = f"step {source.step}, rank {source.rank}"
    if source.phase != "forward":
        where += f", {clean(source.phase)}"
    name = clean(source.scope or source.root)
    slot = clean(source.slot)
    return "   ".join(filter(None, (name, clean(source.op_type), slot, where)))


def _size(source: Source) -> str:
    size = f"rel_l2 {source.error:.3g}, " if source.error is not None else ""
    return f"{size}{source.differing:,} of {count(source.count, 'element')}"


def _also(result: Repeated) -> Iterator[str]:
    others = result.sources[1:]
    for number, source in enumerate(others[:_MOST_ALSO]):
        words = f"{_place(source)}: {_KINDS.get(source.kind, source.kind)}"
        yield headed("" if number else "  also", words)
    if len(others) > _MOST_ALSO:
        yield headed("", f"and {len(others) - _MOST_ALSO} more")


def _reach(result: Repeated) -> Iterator[str]:
    gradient = result.gradient
    if gradient is not None:
        size = f", rel_l2 {gradient.error:.3g}" if gradient.error is not None else ""
        yield headed(
            "  gradient",
            f"{_share(gradient.share)} of its squared norm differs at step {gradient.step}: "
            f"{gradient.differing} of {count(gradient.count, 'parameter')}{size}",
        )
    for number, loss in enumerate(result.losses):
        words = f"{_number(loss.first)} and {_number(loss.second)} at step {loss.step}"
        yield headed("" if number else "  loss", words)
    name, error = result.end
    if name:
        size = f"rel_l2 {error:.3g}" if error is not None else "not measured"
        yield headed("  at the end", f"{name}: {size}")


def _share(share: float) -> str:
    return "all" if share > 0.9995 else f"{100 * share:.3g} %"


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
