"""Write a run or a dump in the format of another tool.

\b
    whence convert runs/ref ref_h5 --to torch_xray
    whence convert dump_of_another_tool as_npy --to npy

Every tensor keeps its dtype and its bits. What the format cannot hold is counted and reported.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _answers, _progress
from whence.cli._options import HERE, argument, option, verb


@verb(
    argument("source", "SRC"),
    argument("destination", "DST", HERE),
    option("--to FORMAT", "npy, safetensors, torch_xray, msprobe or polygraphy.", required=True),
    option("--force", "Replace DST if it holds nothing but the files of a dump."),
)
def command(destination: str, to: str, **options: Any) -> None:
    """Words -> `api.convert`."""
    from whence import api
    from whence.report.convert import converted

    with _progress.shown() as line:
        result = api.convert(destination=destination, to=to, progress=line.count, **options)
    _answers.say(converted(result, destination, to))
