"""How a notebook shows a comparison, one of its modules, a finding or a run. Styles are inline and
use the notebook's own colours, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Any

from whence.report import run as show
from whence.report.answer import answer, headline
from whence.report.markdown import code, fenced, table, words
from whence.report.markdown import markdown as whole
from whence.report.module import meaning, module_lines, module_rows, size
from whence.report.prompt import cause, text
from whence.report.tables import clean, count, shape
from whence.results import Comparison, Finding, ModuleResult

_FINDINGS = 10
_LINES = 60
_DESCRIBED = 100_000  # records that are shown; a heading counts all of them
_SIGNS = {"same": "✓", "different": "✗", "undecided": "?"}
_TINTS = {"same": "#1b7837", "different": "#b2182b", "undecided": "#a6611a"}
_CELL = "text-align:left;padding:2px 10px 2px 0;vertical-align:top"

_PRE = '<pre style="font-family:monospace">'  # notebooks set text columns in their own font


def html(item: Any) -> str:
    """HTML for a Comparison, one of its modules, a Finding or a Run."""
    if isinstance(item, Comparison):
        return _comparison(item)
    if isinstance(item, ModuleResult):
        return _module(item)
    if isinstance(item, Finding):
        return _table(("operator", "type", "where", "cause", "why"), [_finding(item)])
    heading, tree = _run(item)
    folded = (
        f"<details><summary>modules</summary>{_PRE}{_lines(tree)}</pre></details>" if tree else ""
    )
    return f"{_PRE}{_lines(heading)}</pre>{folded}"


def markdown(item: Any) -> str:
    """Markdown with the same content as `html`."""
    if isinstance(item, Comparison):
        return whole(item)
    if isinstance(item, Finding):
        head, row = ("operator", "type", "where", "cause", "why"), _finding(item)
        cells = (code(row[0]), code(row[1]), *map(words, row[2:]))
        return "\n".join(table(head, [cells])) + "\n"
    if isinstance(item, ModuleResult):
        return fenced("\n".join(module_lines(item))) + "\n"
    heading, tree = _run(item)
    return fenced("\n".join([*heading, "", *tree]).rstrip("\n")) + "\n"


def _comparison(result: Comparison) -> str:
    chip = (
        f'<span style="background:{_TINTS[result.status]};color:#fff;padding:1px '
        '8px;border-radius:3px;font-weight:600">'
        f"{_SIGNS[result.status]} {result.status.upper()}</span>"
    )
    parts = [f"<div>{chip} <b>{_safe(headline(result))}</b></div>"]
    parts.append(f"<div>{_code(result.reference)} against {_code(result.target)}</div>")
    parts += [
        f"<div><b>inputs differ</b> {_safe(sentence)}</div>"
        for sentence in result.inputs_differ[:3]
    ]
    if result.findings:
        parts.append(
            _table(
                ("operator", "type", "where", "cause", "why"),
                map(_finding, result.findings[:_FINDINGS]),
            )
        )
    if len(result.findings) > _FINDINGS:
        parts.append(f"<div>{count(len(result.findings) - _FINDINGS, 'more finding')}</div>")
    parts.append(
        f"<div>{_safe(', '.join(f'{count(n)} {verdict}' for verdict, n in result.counts.items()))}</div>"  # noqa: E501
    )
    parts.append(
        "<details><summary>the whole "
        f"answer</summary>{_PRE}{escape(answer(result))}</pre></details>"
    )
    return "".join(parts)


def _module(module: ModuleResult) -> str:
    parts = [f"<div><b>{_safe(module.name)}</b> ({_safe(module.op_type)})</div>"]
    parts.append(f"<div>{_safe(meaning(module))}</div>")
    parts += [
        f"<div><b>{_safe(title)}</b> {_safe(words)}</div>" for title, words in module_rows(module)
    ]
    rows = [
        (
            f"step {row.step}, rank {row.rank}",
            row.reference_slot,
            f"{row.reference_dtype} {shape(row.reference_shape)}",
            size(row),
            row.verdict,
        )
        for row in module.tensors[:_LINES]
    ]
    parts.append(_table(("call", "tensor", "reference", "difference", "verdict"), rows))
    if len(module.tensors) > _LINES:
        parts.append(f"<div>{count(len(module.tensors) - _LINES, 'more tensor')}</div>")
    return "".join(parts)


def _finding(finding: Finding) -> tuple[str, ...]:
    where = f"step {finding.step}, rank {finding.rank}" + (
        f", {finding.slot}" if finding.slot else ""
    )
    return finding.name, finding.op_type, where, cause(finding), finding.sentence


def _run(run: Any) -> tuple[list[str], list[str]]:
    """The command of a run, and its modules; one line for a very large run."""
    if len(run.records) > _DESCRIBED:
        return [text(run)], []
    tree = list(islice(show.tree(run, show.Choice()), _LINES + 1))
    omitted = ["... whence show has all"] if len(tree) > _LINES else []
    return list(show.heading(run)), [*tree[:_LINES], *omitted]


def _lines(lines: Iterable[str]) -> str:
    return escape("\n".join(lines))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th style="{_CELL}">{escape(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{_safe(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return (
        "<table "
        f'style="border-collapse:collapse;font-size:inherit"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    )


def _code(text: str) -> str:
    return f"<code>{_safe(text)}</code>"


def _safe(text: str) -> str:
    return escape(clean(text))
