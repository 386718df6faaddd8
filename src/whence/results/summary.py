"""What scripts and agents read of a comparison: `summary.json` and `--format json`."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from whence.results.comparison import (
    Alike,
    Declared,
    Effect,
    LayerCost,
    Nearest,
    NextStep,
    NotThere,
    RandomNumbers,
    Remark,
    Repetition,
    ThirdRun,
    Undecided,
    Visible,
)
from whence.results.generation import Prompted, Token
from whence.results.origin import Occurrences
from whence.results.verdict import Finding

SCHEMA = 1
"""Version of the schema. Fields are added without another number; one that is removed, renamed or
means something else makes a new one."""


class CoverageSummary(msgspec.Struct, frozen=True):
    """`Coverage`, with its share as a number of its own."""

    calls: int
    paired: int
    measured: int
    replayed: int
    replayable: int
    root_outputs_measured: bool
    inside: int
    covered: int
    share: float


class GenerationSummary(msgspec.Struct, frozen=True):
    """`Generation` without its tokens, of which the first that is not explained is given; all are
    in generation.csv.
    """

    logits_only: bool
    prompts: tuple[Prompted, ...]
    compared: int
    of: int
    noise: float | None = None
    alone_reference: int = 0
    alone_target: int = 0
    forced: bool = False
    suspect: int = -1
    sentence: str = ""
    led_to: str = ""
    first_unexplained: Token | None = None


class Summary(msgspec.Struct, frozen=True):
    """A comparison without its rows, its pairs and its verdicts, which are in report.json.

    schema: version of this form. omitted: by field, how many items are left out here because there
    are many; all are in report.json. The other fields are those of `Comparison`.
    """

    status: str
    evidence: str
    reference: str
    target: str
    headline: str
    findings: tuple[Finding, ...]
    effect: Effect | None
    next: tuple[NextStep, ...]
    first_difference: dict[str, Any] | None
    counts: dict[str, int]
    coverage: CoverageSummary
    unmatched: int
    incomparable: int
    inputs_differ: tuple[str, ...]
    remarks: tuple[Remark, ...]
    without_partner: dict[str, tuple[str, ...]]
    nearest: tuple[Nearest, ...]
    declared: tuple[Declared, ...]
    layer_costs: tuple[LayerCost, ...]
    notes: tuple[str, ...]
    environment: tuple[str, ...]
    repetition: Repetition | None
    third: ThirdRun | None
    generation: GenerationSummary | None
    programs: tuple[str, ...]
    occurrences: Occurrences | None
    visible: tuple[Visible, ...]
    timing: dict[str, float]
    versions: dict[str, str]
    schema: int = SCHEMA
    undecided: Undecided | None = None
    alike: tuple[Alike, ...] = ()
    random_numbers: RandomNumbers | None = None
    missing: tuple[NotThere, ...] = ()
    omitted: dict[str, int] = {}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a summary.

    Docstrings lose their indent here, which some releases of msgspec keep and others remove.
    """
    schema = msgspec.json.schema(Summary)
    for entry in schema["$defs"].values():
        if "description" in entry:
            entry["description"] = inspect.cleandoc(entry["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "whence comparison summary",
        **schema,
    }


if __name__ == "__main__":
    import json

    print(json.dumps(json_schema(), indent=1))
