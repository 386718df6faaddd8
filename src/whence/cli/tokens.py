"""Compare the texts that two runs generated, prompt by prompt.

\b
    whence tokens ref.json tgt.json
    whence tokens ref.json tgt.json --full 0.75 --half 0.4 --format json
    whence tokens --before ref_a.json tgt_a.json --after ref_b.json tgt_b.json

The files hold JSON lines, or one JSON array, of objects with a prompt (src) and an output: text or
a list of token ids. A prompt passes when both outputs are equal up to the end of the shorter one.
--before and --after compare two commits.

Exit code: 0 the pass rates reach their thresholds; 1 they do not, or a commit breaks significantly
more prompts than it fixes; 2 no prompt could be compared; 3 a file cannot be read.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from whence.cli._answers import width
from whence.cli._options import HERE, PATH, SHARE, argument, option, verb

CODES = {"pass": 0, "fail": 1, "undecided": 2}


@verb(
    argument("reference", "REF", HERE, required=False),
    argument("target", "TGT", HERE, required=False),
    "Pass or fail",
    option("--full SHARE", "Share of prompts that must match completely.  [default: 0.75]", SHARE),
    option(
        "--half SHARE",
        "Share of prompts that must match in their first half.  [default: 0.4]",
        SHARE,
    ),
    option(
        "--thresholds FILE",
        "File with both shares per model (TOML or YAML; docs/generation.md).",
        PATH,
    ),
    option(
        "--model NAME",
        'Which model of --thresholds.  [default: "model" of the records]',
        default="",
    ),
    "Two commits",
    option("--before REF TGT", "Two files of an earlier commit.", nargs=2),
    option("--after REF TGT", "Two files of a later commit.", nargs=2),
    "Records",
    option("--prompt-key KEY", "Key of the prompt in a record; a.0.b is nested.", default="src"),
    option("--output-key KEY", "Key of the output in a record.", default="output"),
    option(
        "--match",
        "How prompts are paired: by text and else by position (auto), or by only one of these.",
        ("auto", "prompt", "position"),
        default="auto",
    ),
    "Answer",
    option("--rows N", "Show at most so many prompts; 0 shows all.", click.IntRange(0), default=40),
    option(
        "--format", "What goes to stdout.", ("text", "json", "csv"), name="form", default="text"
    ),
)
def command(reference: str | None, target: str | None, rows: int, form: str, **options: Any) -> int:
    """Words -> `api.tokens` -> report -> exit code."""
    from whence import api
    from whence.report.tokens import tokens_csv, tokens_json, tokens_text

    result = api.tokens(reference, target, **options)
    if form == "text":
        sys.stdout.write(tokens_text(result, rows=rows, width=width()))
    else:
        sys.stdout.write(tokens_json(result) if form == "json" else tokens_csv(result))
    return CODES[result.status]
