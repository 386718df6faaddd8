"""What `whence` says when it is given no command."""

from __future__ import annotations

from pathlib import Path

import click

from whence.cli._answers import width


def overview(ctx: click.Context) -> str:
    """What lies in the working folder and what one could do with it; the help where there is
    nothing.
    """
    from whence import api
    from whence.report.contents import folder_contents

    contents = api.contents()
    if not (contents.runs or contents.comparisons or contents.last):
        return ctx.get_help()
    return folder_contents(contents, lambda name: not Path(name).exists(), width()).rstrip("\n")
