"""Compile the comparison kernels ahead of their first use.

For a container image or a cluster. They are compiled once per kind of CPU and kept in a cache;
without this command, the first large comparison compiles them.
"""

from __future__ import annotations

from whence.cli._options import verb


@verb()
def command() -> None:
    """Words -> `api.warmup`."""
    from whence import api

    api.warmup()
