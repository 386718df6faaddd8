"""A comparison as JSON of bounded size for scripts and agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import orjson

from whence.results import Comparison
from whence.results.summary import CoverageSummary, GenerationSummary, Summary

T = TypeVar("T")
Few = Callable[[str, Sequence[Any]], tuple[Any, ...]]
"""Called with the name of a list and the list; returns the items to keep."""
MOST = 100
"""Items kept of one list; the rest is in report.json."""


def summary_of(result: Comparison) -> Summary:
    """The summary of a comparison, with lists of at most `MOST` items."""
    omitted: dict[str, int] = {}

    def few(name: str, items: Sequence[T]) -> tuple[T, ...]:
        if len(items) > MOST:
            omitted[name] = len(items) - MOST
        return tuple(items[:MOST])

    occurrences = result.occurrences
    if occurrences is not None:
        rows = few("occurrences", occurrences.rows)
        occurrences = msgspec.structs.replace(occurrences, rows=rows)
    return Summary(
        status=result.status,
        evidence=result.evidence,
        reference=result.reference,
        target=result.target,
        headline=result.headline,
        undecided=result.undecided,
        findings=few("findings", result.findings),
        effect=result.effect,
        next=result.next,
        first_difference=result.first_difference,
        counts=result.counts,
        coverage=CoverageSummary(
            **msgspec.structs.asdict(result.coverage), share=result.coverage.share
        ),
        unmatched=result.unmatched,
        incomparable=result.incomparable,
        inputs_differ=few("inputs_differ", result.inputs_differ),
        remarks=few("remarks", result.remarks),
        without_partner={
            side: few(f"without_partner.{side}", names)
            for side, names in result.without_partner.items()
        },
        nearest=few("nearest", result.nearest),
        declared=few("declared", result.declared),
        layer_costs=few("layer_costs", result.layer_costs),
        alike=few("alike", result.alike),
        random_numbers=result.random_numbers,
        missing=few("missing", result.missing),
        notes=few("notes", result.notes),
        environment=few("environment", result.environment),
        repetition=result.repetition,
        third=result.third,
        generation=_generation(result, few),
        programs=few("programs", result.programs),
        occurrences=occurrences,
        visible=result.visible,
        timing=result.timing,
        versions=result.versions,
        omitted=omitted,
    )


def _generation(result: Comparison, few: Few) -> GenerationSummary | None:
    generation = result.generation
    if generation is None:
        return None
    fields = msgspec.structs.asdict(generation)
    tokens = fields.pop("tokens")
    fields["prompts"] = few("generation.prompts", fields["prompts"])
    suspect = tokens[generation.suspect] if generation.suspect >= 0 else None
    return GenerationSummary(**fields, first_unexplained=suspect)


def summary_data(result: Comparison) -> dict[str, Any]:
    """The summary as plain values; names of many siblings of a finding are cut to `MOST` too."""
    out: dict[str, Any] = msgspec.to_builtins(summary_of(result))
    for place, finding in enumerate(out["findings"]):
        for key in ("cause", "sentence", "numbers", "also"):
            finding.setdefault(key, [] if key == "also" else {} if key == "numbers" else "")
        if len(finding["also"]) > MOST:
            out["omitted"][f"findings.{place}.also"] = len(finding["also"]) - MOST
            finding["also"] = finding["also"][:MOST]
    return out


def summary(result: Comparison) -> str:
    """`summary.json`, indented."""
    return orjson.dumps(summary_data(result), option=orjson.OPT_INDENT_2).decode() + "\n"
