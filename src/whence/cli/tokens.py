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

from whence.cli import _help, _options
from whence.cli._answers import width

CODES = {"pass": 0, "fail": 1, "undecided": 2}
_PAIR = "REF TGT"


_GROUPS = {
    "Pass or fail": "--full --half --thresholds --model",
    "Two commits": "--before --after",
    "Records": "--prompt-key --output-key --match",
    "Answer": "--format --rows",
}


@click.command("tokens", cls=_help.Grouped, help=__doc__, groups=_GROUPS)
@click.argument("reference", metavar="REF", required=False, type=_options.HERE)
@click.argument("target", metavar="TGT", required=False, type=_options.HERE)
@click.option(
    "--full",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Share of prompts that must match completely.  [default: 0.75]",
)
@click.option(
    "--half",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Share of prompts that must match in their first half.  [default: 0.4]",
)
@click.option(
    "--thresholds",
    metavar="FILE",
    type=click.Path(),
    help="File with both shares per model (TOML or YAML; docs/tokens.md).",
)
@click.option(
    "--model",
    default="",
    metavar="NAME",
    help='Which model of --thresholds.  [default: "model" of the records]',
)
@click.option("--before", nargs=2, metavar=_PAIR, help="Two files of an earlier commit.")
@click.option("--after", nargs=2, metavar=_PAIR, help="Two files of a later commit.")
@click.option(
    "--prompt-key",
    default="src",
    show_default=True,
    metavar="KEY",
    help="Key of the prompt in a record; a.0.b is nested.",
)
@click.option(
    "--output-key",
    default="output",
    show_default=True,
    metavar="KEY",
    help="Key of the output in a record.",
)
@click.option(
    "--match",
    type=click.Choice(["auto", "prompt", "position"]),
    default="auto",
    show_default=True,
    help="How prompts are paired: by text and else by position (auto), or by only one of these.",
)
@click.option(
    "--rows",
    type=click.IntRange(0),
    metavar="N",
    default=40,
    show_default=True,
    help="Show at most so many prompts; 0 shows all.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "csv"]),
    default="text",
    show_default=True,
    help="What goes to stdout.",
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
