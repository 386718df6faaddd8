"""What the page's script is given: the answer in words, and tables by column with every string
once, so that 10,000 pairs are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from whence.report.html.headline import headline
from whence.report.html.steps import commands
from whence.report.summary import summary_data
from whence.report.tables import clean
from whence.results import Generation, Row, VerdictKind
from whence.results.page import Page, PageCall, PageDetail, PagePlace

_WORDY = 20_000  # calls; beyond, the sentence of a call that is like its neighbours is left out
_QUIET = (VerdictKind.IDENTICAL, VerdictKind.NOISE, VerdictKind.INHERITED)
_TENSOR_FIGURES = ("rel_l2", "max_abs_err", "cosine_similarity")
_FIGURES = (
    "rel_l2", "rmse", "max_abs_err", "mean_abs_err", "max_rel_err", "cosine_similarity",
    "scale_estimate", "ulp_max", "sign_mismatch", "nan_mismatch", "inf_mismatch",
    "worst_row_rel_l2", "worst_row", "worst_channel_rel_l2", "worst_channel",
)  # fmt: skip


def payload(page: Page) -> dict[str, Any]:
    """Everything that is drawn, as plain values; numbers with five significant digits."""
    result = page.comparison
    strings = _Strings()
    summary = summary_data(result)
    keep = (
        "status",
        "evidence",
        "reference",
        "target",
        "findings",
        "first_difference",
        "counts",
        "coverage",
        "unmatched",
        "incomparable",
        "inputs_differ",
        "without_partner",
        "nearest",
        "declared",
        "versions",
        "notes",
        "environment",
        "timing",
        "repetition",
        "third",
        "programs",
    )
    place = {call.pair: i for i, call in enumerate(page.calls)}
    head = headline(page)
    answer = {name: _short(summary[name]) for name in keep}
    for finding, plain in zip(result.findings, answer["findings"]):
        plain["call"] = place.get(finding.pair, -1)
    return {
        "title": clean(head["title"]),
        "head": head,
        "answer": answer,
        "aligned": list(result.plan.notes),
        "commands": commands(page),
        "sides": [msgspec.to_builtins(side) for side in (page.reference, page.target)],
        "missing": list(page.missing),
        "calls": _calls(page.calls, strings),
        "tensors": _tensors(result.rows, place, strings),
        "details": [_detail(detail) for detail in page.details],
        "figures": list(_FIGURES),
        "generation": _generation(result.generation),
        "texts": _short(msgspec.to_builtins(page.texts)) if page.texts is not None else None,
        "places": [_place(place) for place in page.places],
        "unpaired": [msgspec.structs.asdict(call) for call in page.unpaired],
        "vocabulary": {str(number): text for number, text in page.vocabulary},
        "strings": strings.all,
    }


class _Strings:
    """Strings by number, each once."""

    def __init__(self) -> None:
        self.all: list[str] = [""]
        self._numbers = {"": 0}

    def column(self, texts: Iterable[str]) -> list[int]:
        out = []
        for text in texts:
            number = self._numbers.get(text)
            if number is None:
                number = self._numbers[text] = len(self.all)
                self.all.append(text)
            out.append(number)
        return out


def _calls(calls: Sequence[PageCall], strings: _Strings) -> dict[str, Any]:
    texts = (
        "name",
        "op_type",
        "verdict",
        "root",
        "number",
        "phase",
        "evidence",
        "confidence",
        "cause",
        "slot",
        "operator",
        "source",
        "target_source",
        "target_name",
        "parameters",
        "program",
    )
    wordy = len(calls) <= _WORDY
    return {
        **{name: strings.column(getattr(call, name) for call in calls) for name in texts},
        "sentence": strings.column(
            c.sentence if wordy or c.verdict not in _QUIET else "" for c in calls
        ),
        **{
            name: [getattr(call, name) for call in calls]
            for name in ("step", "rank", "occurrence", "parent")
        },
        "leaf": [int(call.leaf) for call in calls],
        "reads": [list(call.reads) for call in calls],
        **{
            name: [_digits(getattr(call, name)) for call in calls]
            for name in ("error", "incoming", "added", "noise", "own", "score")
        },
        "shares": [
            [_digits(s) for s in call.shares] if call.shares[0] is not None else 0 for call in calls
        ],
        "visible": [[_digits(size) for size in call.visible] or 0 for call in calls],
    }


def _tensors(rows: Sequence[Row], place: dict[int, int], strings: _Strings) -> dict[str, Any]:
    visible = [row for row in rows if row.pair in place]
    return {
        "call": [place[row.pair] for row in visible],
        **{
            name: strings.column(getattr(row, name) for row in visible)
            for name in ("reference_slot", "target_slot", "reference_dtype", "target_dtype", "rule")
        },
        "reference_shape": strings.column(_extents(row.reference_shape) for row in visible),
        "target_shape": strings.column(_extents(row.target_shape) for row in visible),
        "identical": [int(row.measured.identical) for row in visible],
        "why": strings.column(
            row.measured.why or "; ".join(f"{k}: {v}" for k, v in row.measured.whys.items())
            for row in visible
        ),
        **{
            name: [_digits(row.measured.values.get(name)) for row in visible]
            for name in _TENSOR_FIGURES
        },
    }


def _detail(detail: PageDetail) -> dict[str, Any]:
    bare = msgspec.structs.replace(
        detail, reference=(), target=(), worst=(), magnitude=(), quantiles=()
    )
    plain: dict[str, Any] = _short(msgspec.to_builtins(bare))
    plain["magnitude"], plain["quantiles"] = (
        [[_log(x), _log(y)] for x, y in points] for points in (detail.magnitude, detail.quantiles)
    )
    if detail.heatmap is not None:
        plain["heatmap"]["values"] = [_log(value) for value in detail.heatmap.values]
    # What differs in the seventh digit must be seen to differ.
    plain["reference"], plain["target"] = (
        [_digits(v, 9) for v in side] for side in (detail.reference, detail.target)
    )
    plain["worst"] = [(index, _digits(a, 9), _digits(b, 9)) for index, a, b in detail.worst]
    plain["figures"] = [plain.get("figures", {}).get(name) for name in _FIGURES]
    plain["edges"] = [_digits(math.log10(edge)) for edge in detail.edges]
    return plain


def _place(place: PagePlace) -> dict[str, Any]:
    """Whole, with what a struct leaves out where it is usual."""
    return {
        "excerpts": [
            {**msgspec.to_builtins(e), "file": clean(e.file), "changed": e.changed}
            for e in place.excerpts
        ],
        "operators": [[row.reference, row.target, row.mark] for row in place.operators],
        "same": place.same,
    }


def _extents(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"


_ZERO = 9999  # stands for the logarithm of zero


def _log(value: float | None) -> int | None:
    """Hundredths of a decade: what a picture can show, in a few characters."""
    if value is None:
        return None
    return round(100 * math.log10(value)) if value > 0 else _ZERO


def _digits(value: float | None, digits: int = 5) -> float | int | None:
    """So many significant digits; an integer where it is one; None for what JSON has no word
    for.
    """
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{digits - 1}e}")


def _generation(result: Generation | None) -> dict[str, Any] | None:
    """Prompts, and tokens by column."""
    if result is None:
        return None
    plain: dict[str, Any] = _short(msgspec.to_builtins(msgspec.structs.replace(result, tokens=())))
    place = {prompt.number: k for k, prompt in enumerate(result.prompts)}
    names = ("index", "step", "row", "reference", "target", "verdict")
    plain["tokens"] = {
        "prompt": [place[token.prompt] for token in result.tokens],
        **{name: [getattr(token, name) for token in result.tokens] for name in names},
        **{
            name: [_digits(token.numbers.get(name)) for token in result.tokens]
            for name in ("margin", "gap", "logit_err", "noise")
        },
        "score": [_digits(token.score) for token in result.tokens],
    }
    plain["passes"] = [prompt.passes for prompt in result.prompts]
    return plain


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return _digits(value)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(item) for item in value]
    return value
