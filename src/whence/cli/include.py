"""Print the folder of whence_label.h, for a compiler.

\b
    g++ -std=c++11 -I "$(whence include)" program.cpp

The header has no dependencies, so a project may also keep a copy of it (docs/labels.md).
"""

from __future__ import annotations

import sys

import click


@click.command("include", help=__doc__)
def command() -> int:
    """Words -> `api.include`."""
    from whence import api

    sys.stdout.write(f"{api.include()}\n")
    return 0
