"""Make a packed run again as it was, byte for byte.

\b
    whence unpack runs/tgt.packed -o runs/tgt
    whence unpack small --against /elsewhere/ref -o runs/tgt

The reference is looked for where it was when the run was packed, and where it lies as seen from the
packed run; it is recognised by the hashes of its journals.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _answers
from whence.cli._options import HERE, PATH, argument, option, verb


@verb(
    argument("packed", "PACKED", HERE),
    option("--against REF", "Where the run lies that it is packed against, if it was moved.", PATH),
    option("-o, --output DIR", "New folder.  [default: PACKED without .packed]", HERE),
)
def command(packed: str, **options: Any) -> None:
    """Words -> `api.unpack`."""
    from whence import api
    from whence.report.pack import unpacked

    _answers.say(unpacked(api.unpack(packed, **options)))
