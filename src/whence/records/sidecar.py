"""Cards: what a call is beyond its tensors, as text that whence puts beside them in formats that
cannot say it all themselves.

A name in such a format may be shortened, escaped or numbered otherwise; the card says which call it
was. Readers of others pass it over.
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
    """A call as plain JSON values, without its tensors and its program. parent: id of the nearest
    call above it that has a card, -1.
    """
    card: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(call, parent=parent, **_OWN))
    return card


def read(card: Any) -> Call | None:
    """The call that a card tells of; None for what is not a card. card: text, or its values. Never
    trusted: it names, and leads nowhere.
    """
    try:
        return _decode(card) if isinstance(card, (str, bytes)) else msgspec.convert(card, Call)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
