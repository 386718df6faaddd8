"""Names of a run, which are untrusted, in files and tables."""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]+")


def plain(name: str) -> str:
    """A name within an HDF5 group: without what would end it or lead into another group."""
    return text(name).replace("/", "%2F")


def text(name: str) -> str:
    """A name as UTF-8 holds it, and without what ends a text in C."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\0", "%00")


def file_name(name: str, chars: int = 120) -> str:
    """A part of a file's name that is safe anywhere, for people: its last letters, digits and dots. Not unique, may be empty."""
    return _UNSAFE.sub("_", name)[-chars:].strip("._-")


def cell(text: str) -> str:
    """A name in a table: what a spreadsheet would take for a formula is quoted."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
