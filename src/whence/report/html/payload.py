"""Prepares the data of the page's script: the answer in words, and tables by column in which every
string occurs once, so that 10,000 pairs stay small.

The first screen says what differs, where, why, how sure that is, the effect at the outputs, and
what to do next.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from whence.records.slots import is_of_child
from whence.report import effect
from whence.report.answer import CAUSES, is_bitwise, same_words
from whence.report.evidence import basis, chance, visible
from whence.report.generation import UNSEEN_IN_LOGITS
from whence.report.summary import summary_data
from whence.report.tables import called_at, clean, count
from whence.results import (
    Comparison,
    Confidence,
    Evidence,
    Finding,
    Generation,
    Row,
    Status,
    VerdictKind,
)
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
    """All data that the page draws, as plain values; numbers with five significant digits."""
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
        "layer_costs",
        "versions",
        "notes",
        "environment",
        "timing",
        "repetition",
        "third",
        "programs",
    )
    place = {call.pair: i for i, call in enumerate(page.calls)}
    head = _first_screen(page)
    answer = {name: _short(summary[name]) for name in keep}
    for finding, plain in zip(result.findings, answer["findings"]):
        plain["call"] = place.get(finding.pair, -1)
    return {
        "title": clean(head["title"]),
        "head": head,
        "answer": answer,
        "omitted_layers": summary["omitted"].get("layer_costs", 0),
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
    """A table of strings in which each string occurs once; values refer to it by number."""

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
        "whole": [i for i, call in enumerate(calls) if call.whole],
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
    # Differences in the seventh digit must be visible.
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
    """The logarithm of a value in hundredths of a decade: as precise as a picture can show, in few
    characters.
    """
    if value is None:
        return None
    return round(100 * math.log10(value)) if value > 0 else _ZERO


def _digits(value: float | None, digits: int = 5) -> float | int | None:
    """The value rounded to this number of significant digits; an integer where it is one; None for
    what JSON cannot express.
    """
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{digits - 1}e}")


def _generation(result: Generation | None) -> dict[str, Any] | None:
    """The prompts, and the tokens by column."""
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


_WORDS = {"same": "Same", "different": "Different", "undecided": "Undecided"}

_STARTS: dict[str, str] = {
    VerdictKind.PARAM_DIFF: "A parameter differs in",
    VerdictKind.STRUCTURAL: "The structure differs at",
}
_SURE: dict[str, str] = {
    Confidence.CERTAIN: "Certain",
    Confidence.LIKELY: "Likely",
    Confidence.SUSPECT: "Suspect",
}
_CODE = re.compile(r"\w*[._]\w")
_BOTH_SIDES = re.compile(r": \S+ is .+ in the reference, ")
"""A clause of a finding that names an argument with its values on both sides."""


def _first_screen(page: Page) -> dict[str, Any]:
    """title of the page, kind of the answer in a word, its sentence, and the six answers: where
    (name, type, more), why (sentences, the most telling first), sure, effect, next.
    """
    result = page.comparison
    first = result.findings[0] if result.findings else None
    names = [
        PurePath(clean(path)).name or clean(path) for path in (result.reference, result.target)
    ]
    return {
        "title": f"{_WORDS[result.status]}: {names[1]} against {names[0]} - whence",
        "word": _WORDS[result.status],
        "kind": _answer_kind(result, first),
        "names": names,
        "sentence": _sentence(page, first),
        "where": _place_found(page, first),
        "why": _reasons(page, first),
        "sure": _certainty(page, first),
        "seen": visible(result) if result.status == Status.SAME else "",
        "effect": _effect(page),
        "next": next_steps(page),
        "coverage": _coverage(result),
    }


def _answer_kind(result: Comparison, first: Finding | None) -> str:
    """The kind of the answer in two words."""
    if result.status == Status.UNDECIDED:
        return "Cannot tell"
    if result.status == Status.SAME:
        return "No difference" if is_bitwise(result) else "No fault"
    if result.inputs_differ:
        return "Different inputs"
    return "Fault" if first is not None else "Different"


def _sentence(page: Page, first: Finding | None) -> str:
    result = page.comparison
    if result.inputs_differ:
        return (
            "The inputs differ, so nothing further down is proof: "
            f"{clean(result.inputs_differ[0])}."
        )
    if result.status == Status.SAME:
        where = ", in what is there" if result.missing else ""
        return (
            f"Bitwise identical{where}."
            if is_bitwise(result)
            else f"No fault: every difference is {same_words(result)}{where}."
        )
    if first is None:
        return _undecided(result)
    others = (
        f" and {count(len(result.findings) - 1, 'further finding')}"
        if len(result.findings) > 1
        else ""
    )
    start = _STARTS.get(first.verdict, "The error starts in")
    kind = f" ({clean(first.op_type)})" if first.op_type else ""
    return f"{start} {clean(first.name)}{kind}{others}."


def _undecided(result: Comparison) -> str:
    """What cannot be decided, without the reason where that is given below."""
    about, text = result.undecided, clean(result.headline)
    if not text:
        return "No operator is at fault beyond doubt."
    if about is None:
        return f"{_upper(text)}."
    reason = clean(about.why)
    if reason and text.endswith(f": {reason}"):
        text = text.removesuffix(f": {reason}")
    # A name of a call keeps its case.
    return f"{text if text.startswith(clean(about.place)) else _upper(text)}."


def _upper(text: str) -> str:
    """The text with a capital first letter, unless it begins with a name from code."""
    return text if _CODE.match(text) else text[:1].upper() + text[1:]


def _place_found(page: Page, first: Finding | None) -> dict[str, Any]:
    """name, type, source of the call that the answer is about, and more in words; empty where it is
    about none.
    """
    if first is not None:
        return {
            "name": clean(first.name),
            "type": clean(first.op_type),
            "source": clean(called_at(first.source)),
            "more": _finding_details(first),
        }
    if page.comparison.status == Status.SAME:
        return {"text": "No call differs" if is_bitwise(page.comparison) else "No call is at fault"}
    about = page.comparison.undecided
    if page.comparison.status != Status.UNDECIDED or about is None:
        return {}
    slot, place = clean(about.slot), f"step {about.step}, rank {about.rank}"
    others = f"and {count(about.others, 'other')}" if about.others else ""
    return {
        "name": clean(about.name or about.root),
        "type": clean(about.op_type),
        "source": clean(called_at(about.source)),
        "more": [part for part in (slot, place, others) if part],
    }


def _finding_details(finding: Finding) -> list[str]:
    operator = finding.operator.removeprefix("aten.").removesuffix(".default")
    parts = [
        f"operator {clean(operator)}" if operator else "",
        "in its own code" if is_of_child(finding.slot) else clean(finding.slot),
        f"step {finding.step}, rank {finding.rank}",
        clean(finding.phase),
        f"also in {count(len(finding.also), 'sibling')}" if finding.also else "",
        "in the reference" if finding.side == "reference" else "",
    ]
    return [part for part in parts if part]


def _reasons(page: Page, first: Finding | None) -> list[str]:
    result = page.comparison
    if first is not None:
        clauses = [clean(clause) for clause in first.sentence.split("; ") if clause]
        named = [clause for clause in clauses if _BOTH_SIDES.search(clause)]
        if not named and page.places and page.places[0].arguments:
            named = [clean(page.places[0].arguments)]
        cause = _upper(CAUSES.get(first.cause, ""))
        rest = [_upper(clause) for clause in clauses if clause not in named]
        return [text for text in (*named, cause, *rest) if text]
    if result.status == Status.SAME:
        worst = max(page.calls, key=lambda call: call.score or 0.0, default=None)
        if worst is None or not worst.score:
            return []
        return [
            f"The largest error is {worst.score:.2g} times what is allowed there: "
            f"{clean(worst.name)}" + (f" ({clean(worst.op_type)})" if worst.op_type else "")
        ]
    return [_upper(clean(result.undecided.why))] if result.undecided is not None else []


def _certainty(page: Page, first: Finding | None) -> list[str]:
    rests = _rests(page)
    if first is None or page.comparison.status != Status.DIFFERENT:
        return [_upper(rests)] if rests else []
    sure = _SURE.get(first.confidence, _upper(first.confidence))
    return [text for text in (sure, chance(first).removeprefix("; "), rests) if text]


def _rests(page: Page) -> str:
    generation = page.comparison.generation
    if generation is not None and generation.logits_only:
        return (
            "logits alone"
            if is_bitwise(page.comparison)
            else f"logits alone; could not have seen {UNSEEN_IN_LOGITS}"
        )
    return basis(page.comparison) if page.comparison.coverage.calls else "outputs alone"


def _effect(page: Page) -> list[str]:
    """The effect of the differences on the outputs of the model, in parts."""
    result = page.comparison
    if result.effect is not None:
        return effect.words(result.effect).split("; ")
    if not page.calls:
        return []
    if is_bitwise(result):
        return ["none: everything is bitwise equal"]
    return ["not known: no output of a model was compared"]


def _coverage(result: Comparison) -> list[tuple[str, str]]:
    c = result.coverage
    if result.generation is not None and result.generation.logits_only:
        return [
            (
                count(result.generation.compared),
                f"of {count(result.generation.of, 'token')} compared",
            )
        ]
    if not c.calls:
        return []
    return [
        (count(c.calls), "captured"),
        (count(c.paired), "paired"),
        (count(c.measured), "measured"),
        (count(c.replayed if result.evidence == Evidence.REPLAY else 0), "replayed"),
        (count(result.unmatched), "unmatched"),
        (count(result.incomparable), "incomparable"),
    ]


# Follow-up commands for a page, as typed into a POSIX shell.


def commands(page: Page) -> dict[str, list[str]]:
    """Follow-up commands by name: "repro" holds one command for each finding, in order, "compare"
    the command that compares again. None without a folder to name.
    """
    if not page.folder:
        return {"repro": [], "compare": []}
    folder = shlex.quote(page.folder)
    findings = range(1, len(page.comparison.findings) + 1)
    return {
        "repro": [
            f"whence repro {folder}{f' --finding {n}' if n > 1 else ''} -o "
            f"repro{n if n > 1 else ''}"
            for n in findings
        ],
        "compare": [
            f"whence compare {shlex.quote(page.comparison.reference)} "
            f"{shlex.quote(page.comparison.target)} -o {folder} --force"
        ],
    }


def next_steps(page: Page) -> list[dict[str, Any]]:
    """The commands of the first screen, each with what its result decides: those that the
    comparison proposes, otherwise one that reproduces the first finding.
    """
    steps = [step.about(page.folder) if page.folder else step for step in page.comparison.next]
    # Leave out commands on a comparison that is not on disk, and the one that writes the page being
    # read.
    steps = [
        step
        for step in steps
        if not step.takes_comparison and not step.command.startswith("whence report ")
    ]
    if steps:
        return [
            {
                "command": clean(step.command),
                "decides": clean(step.decides),
                "fill_in": step.fill_in,
            }
            for step in steps[:3]
        ]
    return [
        {
            "command": clean(command),
            "decides": "runs this operator alone, on the recorded inputs",
            "fill_in": False,
        }
        for command in commands(page)["repro"][:1]
    ]
