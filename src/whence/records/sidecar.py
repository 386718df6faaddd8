"""Cards: the description of a call, without its tensors, as text that whence writes beside tensors
in formats that cannot express all of it.

A name in such a format may be shortened, escaped or renumbered; the card tells which call it was.
Other tools ignore it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from whence.records.run import Call

# of its own run
_OWN = {
    "refs": (), "program": "", "no_program": "", "files": {}, "aliases": (), "seconds": 0.0,
    "forward": -1,
}  # fmt: skip
_decode = msgspec.json.Decoder(Call).decode


def write(call: Call, parent: int) -> dict[str, Any]:
    """Returns a call as plain JSON values, without its tensors and its program. parent: id of the
    nearest call above it that has a card, -1.
    """
    card: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(call, parent=parent, **_OWN))
    return card


def read(card: Any) -> Call | None:
    """Returns the call that a card describes; None for any other value. card: text, or its values.
    Cards are untrusted: they only give names, never paths.
    """
    try:
        return _decode(card) if isinstance(card, (str, bytes)) else msgspec.convert(card, Call)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
