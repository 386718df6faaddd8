"""Print the folder of whence_label.h, for a compiler.

\b
    g++ -std=c++11 -I "$(whence include)" program.cpp

The header has no dependencies, so a project may also keep a copy of it (docs/labels.md).
"""

from __future__ import annotations

import sys

from whence.cli._options import verb


@verb()
def command() -> None:
    """Words -> `api.include`."""
    from whence import api

    sys.stdout.write(f"{api.include()}\n")
