"""A Page -> one HTML file that needs nothing else: no network, no other file. Everything is text in
it; computes nothing.

`payload` says what the page is given, `js/*.js` draw it in the order of `_SCRIPTS`, one idea a
file.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

import orjson

from whence.report.html.payload import payload
from whence.report.tables import clean
from whence.results.page import Page

_HERE = Path(__file__).parent
_SCRIPTS = (
    "dom", "verdicts", "data", "theme", "scale", "link", "table", "chart", "run", "plots", "place",
    "call", "answer", "graph", "tree", "tokens", "maps", "lists", "keys", "main",
)  # fmt: skip


_UNDRAWN = (
    "This page draws itself with the script it contains; allow scripts for this file. It loads "
    "nothing from anywhere."
)


def page_html(page: Page) -> str:
    """The page as HTML, in UTF-8 without a character that ends its data early."""
    content = payload(page)
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    script = (
        '"use strict";\n(() => {\n'
        + "\n".join((_HERE / "js" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
        + "\n})();\n"
    )
    allowed = f"script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(clean(content["title"]), quote=False),
        "STYLE": style,
        "DATA": _embedded(content),
        "SCRIPT": script,
        "NOSCRIPT": _UNDRAWN,
    }
    pieces = (_HERE / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: object) -> str:
    """JSON that no parser of HTML ends or takes for a comment, whatever the strings in it."""
    text = orjson.dumps(data).decode()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
