"""A Page -> one HTML file that needs nothing else: no network, no other file. Everything is text in
it; computes nothing.

`payload` says what the page is given, `js/*.js` draw it in the order of `_SCRIPTS`, one idea a
file.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import orjson

from whence.report.html.payload import payload
from whence.results.page import Page

_HERE = Path(__file__).parent
_SCRIPTS = (
    "dom", "verdicts", "data", "theme", "scale", "link", "table", "chart", "run", "plots", "place",
    "call", "answer", "graph", "tree", "tokens", "maps", "lists", "keys", "main",
)  # fmt: skip


def page_html(page: Page) -> str:
    """The page as HTML, in UTF-8 without a character that ends its data early."""
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    script = (
        '"use strict";\n(() => {\n' + "\n".join(_script(name) for name in _SCRIPTS) + "\n})();\n"
    )
    content = payload(page)
    allowed = f"script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": _text(content["title"]),
        "STYLE": style,
        "DATA": _embedded(content),
        "SCRIPT": script,
    }
    pieces = (_HERE / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _script(name: str) -> str:
    return (_HERE / "js" / f"{name}.js").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: object) -> str:
    """JSON that no parser of HTML ends or takes for a comment, whatever the strings in it."""
    text = orjson.dumps(data).decode()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _text(words: str) -> str:
    for sign, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        words = words.replace(sign, name)
    return words
