"""The path of a run: a folder of this machine, or a URL of an object store."""

from __future__ import annotations

import os

from whence.errors import UsageError

WRITTEN = "written_processes"
"""The setting of a run that states how many processes had a folder in it when its command ended."""


def as_text(name: str | os.PathLike[str]) -> str:
    """Returns a file name as text that any file can hold: bytes that are not UTF-8
    become escapes.
    """
    return os.fspath(name).encode("utf-8", "backslashreplace").decode()


def is_url(path: object) -> bool:
    """Whether a path is a URL of an object store: "s3://bucket/run", and not "C:\run"."""
    scheme, marked, _ = str(path).partition("://")
    return bool(marked) and len(scheme) > 1 and scheme.replace("+", "").isalnum()


def refuse_url(path: object, what: str) -> None:
    """Raises UsageError when a URL is given where a path of this machine is required, also a URL
    that was converted to a Path ("s3:/bucket/run").
    """
    if is_url(str(path).replace(":/", "://", 1).replace(":///", "://")):
        raise UsageError(f"{path} is a URL; {what}")


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path, with links not resolved; a URL is unchanged."""
    return str(path) if is_url(path) else os.path.abspath(path)  # noqa: PTH100
