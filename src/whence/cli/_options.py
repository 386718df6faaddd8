"""Options that several commands have."""

from __future__ import annotations

import click

TEXT_OR_JSON = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What goes to stdout.",
)
KEEP_RUNS = click.option(
    "--keep", metavar="DIR", type=click.Path(), help="Keep the runs in this new folder."
)
OUTPUT_FILE = click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
    help="Write to this file instead of the terminal.",
)
REPLACE_FILE = click.option("--force", is_flag=True, help="Replace FILE if it exists.")
REPLACE_COMPARISON = click.option("--force", is_flag=True, help="Replace the comparison in CMP.")
WHILE_WRITTEN = click.option(
    "--force", is_flag=True, help="Go on even while a process still writes to the run."
)
FIRST_MAP = click.option(
    "--map", "chart", metavar="FILE", type=click.Path(), help="Start from this map."
)
STRICT = click.option(
    "--strict", is_flag=True, help="Count precision losses and suspects as different, too."
)
