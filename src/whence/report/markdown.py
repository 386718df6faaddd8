"""A Comparison as Markdown, for a job summary, a ticket or a comment: the answer, its findings, the
counts.

`drift` says in one line how far a run moved from the previous one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from whence.records.slots import is_output
from whence.report import effect
from whence.report.answer import answer, cause_words, headline
from whence.report.evidence import part_of_call
from whence.report.tables import AT_LINE, clean, count
from whence.results import Comparison, Finding, Row, Status, VerdictKind

_MOST = 20
_MEANT = re.compile(r"([\\`*_\[\]<>#|~])")
_RUNS = re.compile(r"`+")


def markdown(result: Comparison) -> str:
    """The whole text. Names from a run are set as code and sentences are escaped, so that neither
    becomes a link, a mention or HTML.
    """
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Comparison) -> Iterator[str]:
    yield f"### whence: {result.status.upper()}"
    yield ""
    yield words(headline(result))
    yield ""
    yield f"**Drift:** {words(drift(result))}."
    yield ""
    yield f"Reference {code(result.reference)}, target {code(result.target)}."
    if result.inputs_differ:
        yield ""
        yield from (
            f"- **inputs differ**: {words(sentence)}" for sentence in result.inputs_differ[:_MOST]
        )
    if result.findings:
        yield ""
        head = ("", "operator", "type", "where", "cause", "why")
        yield from table(head, (_finding(i, f) for i, f in enumerate(result.findings[:_MOST], 1)))
        if len(result.findings) > _MOST:
            yield ""
            yield f"{count(len(result.findings) - _MOST, 'more finding')}."
    if result.counts:
        yield ""
        yield from table(
            ("verdict", "calls"),
            ((code(verdict), count(n)) for verdict, n in result.counts.items()),
        )
    yield ""
    yield from (
        "<details><summary>All that was said</summary>",
        "",
        fenced(answer(result).rstrip("\n")),
        "",
        "</details>",
    )


def _finding(number: int, finding: Finding) -> tuple[str, ...]:
    where = f"step {finding.step}, rank {finding.rank}"
    if AT_LINE.search(finding.source):
        where += f", {code(finding.source)}"
    part = part_of_call(finding)
    name = code(finding.name) + (f" {code(part)}" if part else "")
    also = f"; also in {', '.join(code(n) for n in finding.also[:4])}" if finding.also else ""
    return (
        str(number),
        name,
        code(finding.op_type),
        where,
        f"{words(cause_words(finding))} ({finding.confidence})",
        words(finding.sentence) + also,
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table. Cells are Markdown already and contain no unescaped bar."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def fenced(text: str) -> str:
    """Lines in a code block, whatever they contain."""
    fence = "`" * max(3, 1 + max((len(run) for run in _RUNS.findall(text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def code(text: object) -> str:
    """Text as inline code, whatever it contains, also inside a table."""
    plain = clean(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in _RUNS.findall(plain)), default=0))
    blank = " " if plain[:1] in ("`", " ", "") or plain[-1:] in ("`", " ") else ""
    return f"{fence}{blank}{plain}{blank}{fence}"


def words(text: str) -> str:
    """Prose shown literally: no mark-up, no HTML, no mention."""
    return _MEANT.sub(r"\\\1", clean(text).replace("&", "&amp;")).replace("@", "&#64;")


_WHOLE_CALL = -1
"""The value of `Verdict.stretch` for a leaf."""


def drift(result: Comparison) -> str:
    """Says how the numbers moved: not at all, by rounding and from where on, by a fault, or that it
    is unknown.
    """
    if result.status == Status.UNDECIDED:
        return "not known, whence cannot tell"
    if result.status == Status.DIFFERENT:
        if not result.findings:
            return "more than rounding"
        return f"a fault in {clean(result.findings[0].name) or 'the model'}"
    first = _first_moved(result)
    if first is None:
        return "none, bitwise identical"
    what = "as declared" if first.verdict == VerdictKind.DECLARED else "rounding"
    begins = f"{what}, from {clean(first.name) or 'the model'}{_ulps(first)} on"
    return f"{begins}; {effect.words(result.effect)}" if result.effect is not None else begins


def _first_moved(result: Comparison) -> Row | None:
    """The first output that differs, in execution order; that of a leaf, if a leaf differs."""
    if set(result.counts) <= {VerdictKind.IDENTICAL}:
        return None
    leaves = {verdict.pair for verdict in result.verdicts if verdict.stretch == _WHOLE_CALL}
    differing = [
        row for row in result.rows if not row.measured.identical and is_output(row.reference_slot)
    ]
    of_leaves = (row for row in differing if row.pair in leaves)
    return next(of_leaves, differing[0] if differing else None)


def _ulps(row: Row) -> str:
    """Error of the worst element in units in the last place, where it was measured."""
    ulps = row.measured.values.get("ulp_max")
    return f" ({ulps:.0f} ulp)" if ulps else ""
