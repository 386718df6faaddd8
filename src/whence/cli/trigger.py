"""Have a program that is captured record now, or stop.

\b
    whence trigger runs/ref                record the next steps
    whence trigger runs/ref --steps 20     record the next 20
    whence trigger runs/ref --on           record every step from now on
    whence trigger runs/ref --off          record nothing any more, and keep no ring

RUN is being written by `whence run` or `whence.capture` with --steps, --every, --when
or --ring; --when asked waits for this command alone. Every process of the run looks between two
steps. What a ring keeps is written first.

Exit code: 0 when the processes were asked; 3 when RUN is not a run, has ended, or does not listen.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli._options import COUNT, HERE, argument, option, verb


@verb(
    argument("run", "RUN", HERE),
    option("--steps K", "How many steps.", COUNT),
    option("--on", "Every step from now on."),
    option("--off", "Nothing any more."),
)
def command(run: str, **options: Any) -> None:
    """Words -> `api.trigger`."""
    from whence import api

    click.echo(api.trigger(run, **options))
