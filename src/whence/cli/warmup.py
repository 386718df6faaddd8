"""Compile the compare kernels now, for an image or a cluster.

They are compiled once for a kind of CPU and kept in a cache; without this the first big comparison
does it.
"""

from __future__ import annotations

import click


@click.command("warmup", help=__doc__)
def command() -> int:
    """Words -> `api.warmup`."""
    from whence import api

    api.warmup()
    return 0
