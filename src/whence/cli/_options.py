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
KEEP_RUNS = click.option("--keep", metavar="DIR", help="Keep the runs in this new folder.")
OUTPUT_FILE = click.option(
    "-o", "--output", metavar="FILE", help="Write to this file instead of the terminal."
)
REPLACE_FILE = click.option("--force", is_flag=True, help="Replace FILE when it exists.")
REPLACE_COMPARISON = click.option(
    "--force", is_flag=True, help="Replace an existing comparison in CMP."
)
WHILE_WRITTEN = click.option(
    "--force", is_flag=True, help="Also while a process still writes to the run."
)
FIRST_MAP = click.option("--map", "chart", metavar="FILE", help="Start from this map.")
STRICT = click.option(
    "--strict", is_flag=True, help="Precision losses and suspects count as different."
)
