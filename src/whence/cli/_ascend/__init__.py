"""`ait` and `msit`, one tool of two ages: their commands, as words of ours."""

from __future__ import annotations

import click

from whence.cli._ascend.compare import aclcmp_command, compare_command
from whence.cli._ascend.dump import dump_command
from whence.cli._ascend.words import CONTEXT


def group(tool: str, words: str | None, *, debug: bool) -> click.Group:
    """All commands of `ait` (which had `debug compare aclcmp`) or `msit`. words: for its help."""
    whole = click.Group(tool, help=words, context_settings=CONTEXT)
    llm = click.Group("llm", help="Dump what a model computes, and compare two dumps.")
    llm.add_command(dump_command(tool))
    llm.add_command(compare_command(tool))
    whole.add_command(llm)
    if debug:
        outer, compare = (
            click.Group("debug", help="Compare labels of two programs."),
            click.Group("compare", help="Compare the two sides."),
        )
        compare.add_command(aclcmp_command())
        outer.add_command(compare)
        whole.add_command(outer)
    return whole
