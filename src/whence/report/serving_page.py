"""A check of an engine as one HTML page: the funnel from prompts to the layer, stage by stage."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from pathlib import Path

from whence.report.serving import STAGES, WORDS, dependence, prompt_rows, ratio_lines
from whence.report.tables import clean, count, number
from whence.results import ServingCheck, ServingFault, ServingStage

_STYLE = """
.funnel li { display: grid; grid-template-columns: 11em 1fr; gap: 4px 16px; margin: 6px 0;
  padding: 8px 14px; background: var(--panel); border: 1px solid var(--line);
  border-left: 5px solid var(--line); border-radius: 6px; }
.funnel .right { border-left-color: var(--good); }
.funnel .wrong { border-left-color: var(--bad); }
.funnel .open { color: var(--soft); }
table { border-collapse: collapse; }
td, th { padding: 2px 12px; text-align: right; border-bottom: 1px solid var(--line); }
.cells rect { fill: var(--grid); }
.cells .off { fill: var(--bad); }
.cells text { fill: var(--soft); font-size: 10px; }
"""
_WRONG_LOGITS = (ServingStage.CACHE, ServingStage.LAYER, ServingStage.LOGITS)
_CELL, _MOST_CELLS = 11, 100


def serving_html(result: ServingCheck) -> str:
    """The page: it loads nothing and runs nothing."""
    style = (Path(__file__).parent / "html" / "style.css").read_text(encoding="utf-8") + _STYLE
    title = f"{result.target} against {result.reference}"
    fault = result.fault
    words = fault.sentence if fault else "no fault: every difference is rounding"
    if fault is None and result.status != "same":
        words = "no fault, as far as was seen"
    body = [
        f'<p class="status {result.status}">{WORDS[result.status]}</p><h1>{_text(words)}</h1>',
        f'<p class="soft">{_text(title)}</p></section><section><h2>Where it narrows</h2>',
        f'<ul class="funnel">{"".join(_stages(result))}</ul></section>',
        _cells(fault) if fault and fault.positions else "",
        _table(prompt_rows(result.requests)),
        _lines("Log-ratios", (f"{name.strip()}: {text}" for name, text in ratio_lines(result))),
        _lines("In a batch", map(dependence, result.batch)),
        _lines("Notes", result.notes),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(title)}</title><style>{style}</style></head>"
        f'<body><main><section class="answer">{"".join(body)}</main></body></html>\n'
    )


def _text(text: object) -> str:
    return html.escape(clean(str(text)))


def _stages(result: ServingCheck) -> Iterator[str]:
    """The stages in their order: what each shows, and whether it is right, wrong or not needed."""
    fault, checks = result.fault, result.requests
    wrong = [check for check in checks if check.first >= 0]
    judged = sum(check.judged for check in checks)
    errors = [check.error for check in checks if check.error is not None]
    yield _stage("prompts", f"{len(wrong)} of {count(len(checks), 'prompt')} go wrong", bool(wrong))
    yield _stage(
        "logits",
        f"{count(judged, 'token')} compared; they differ by {number(max(errors))} at most"
        if errors
        else "not seen",
        fault is not None and fault.stage in _WRONG_LOGITS,
        is_open=not errors,
    )
    first = min(wrong, key=lambda check: check.first, default=None)
    yield _stage(
        "first token",
        f"token {first.first} of prompt {first.number}; {_gap(first.gap, first.noise)}"
        if first
        else "none goes wrong",
        first is not None,
    )
    yield from _inside(fault)
    yield _operator(result)


def _operator(result: ServingCheck) -> str:
    """The operators that depend on other prompts, where prompts were asked alone too."""
    operators = dict.fromkeys(each.operator for each in result.batch if each.operator)
    words = f"{', '.join(operators)} first depends on others in the batch"
    if not operators:
        words = "none depends on others in the batch" if result.batch else "not asked for (--alone)"
    is_wrong = any(each.operator and not each.is_rounding for each in result.batch)
    return _stage("operator", words, is_wrong, is_open=not result.batch)


def _gap(gap: float, noise: float) -> str:
    return f"{number(gap)} below the best logit, rounding adds {number(noise)}"


def _inside(fault: ServingFault | None) -> Iterator[str]:
    """The stages that look into the engine; they are not needed where nothing was wrong before."""
    is_inside = fault is not None and fault.stage in (ServingStage.CACHE, ServingStage.LAYER)
    if fault is None or not is_inside:
        for name in ("prefill or decode", "cache", "layer"):
            yield _stage(name, "not needed", is_open=True)
        if fault is not None:
            yield _stage("what is wrong", STAGES[fault.stage], is_wrong=True)
        return
    step = "the prefill" if fault.step == 0 else f"decode step {fault.step}; the prefill is right"
    yield _stage("prefill or decode", step, is_wrong=True)
    is_of_cache = fault.stage is ServingStage.CACHE
    numbers = ", ".join(map(str, fault.heads))
    heads = f", head{'s' * (len(fault.heads) > 1)} {numbers}" if numbers else ""
    held = f"layer {fault.layer}, {fault.tensor}{heads}"
    yield _stage("cache", held if is_of_cache else "hands out what it was given", is_of_cache)
    place = f"layer {fault.layer}" if fault.layer >= 0 else "outside of layers"
    name = f"{place}: {fault.name or fault.tensor}"
    yield _stage("layer", "computes what it should" if is_of_cache else name, not is_of_cache)


def _stage(name: str, words: str, is_wrong: bool = False, *, is_open: bool = False) -> str:
    kind = "open" if is_open else "wrong" if is_wrong else "right"
    return f'<li class="{kind}"><b>{name}</b><span>{_text(words)}</span></li>'


def _cells(fault: ServingFault) -> str:
    """Heads and positions that are wrong, as squares: the first positions, of heads up to the last
    wrong one.
    """
    heads = range(max(fault.heads, default=0) + 1)
    places = range(min(max(fault.positions) + 1, _MOST_CELLS))
    left = 50
    squares = [
        f'<rect x="{left + place * _CELL}" y="{head * _CELL}" width="{_CELL - 1}" '
        f'height="{_CELL - 1}"'
        f"{_off(place in fault.positions and (not fault.heads or head in fault.heads))}/>"
        for head in heads
        for place in places
    ]
    names = [f'<text x="0" y="{head * _CELL + 8}">head {head}</text>' for head in heads]
    low = len(heads) * _CELL + 12
    ends = f'<text x="{left}" y="{low}">positions 0 to {places[-1]}</text>'
    width, height = left + len(places) * _CELL + 90, low + 4
    return (
        "<section><h2>Heads and positions</h2>"
        f'<svg class="cells" role="img" aria-label="{_text(fault.sentence)}" width="{width}" '
        f'height="{height}">{"".join(squares + names)}{ends}</svg></section>'
    )


def _off(is_off: bool) -> str:
    return ' class="off"' if is_off else ""


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    head, *others = rows
    cells = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in others)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<section><h2>Prompts</h2><table><tr>{cells}</tr>{body}</table></section>"


def _lines(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<section><h2>{title}</h2><ul>{items}</ul></section>" if items else ""
