"""The path by which a run is known: a folder of this machine, or a URL of an object store."""

from __future__ import annotations

import os

from whence.errors import UsageError

WRITTEN = "written_processes"
"""The setting of a run that says how many processes had a folder in it as its command ended."""


def as_text(name: str | os.PathLike[str]) -> str:
    """A name of the file system as text that any file can hold: bytes of it that are not UTF-8 as
    escapes.
    """
    return os.fspath(name).encode("utf-8", "backslashreplace").decode()


def is_url(path: object) -> bool:
    """Whether a path is a URL of an object store: "s3://bucket/run", and not "C:\\run"."""
    scheme, marked, _ = str(path).partition("://")
    return bool(marked) and len(scheme) > 1 and scheme.replace("+", "").isalnum()


def refuse_url(path: object, what: str) -> None:
    """Raise UsageError where a path of this machine is wanted and a URL is given, also one that was
    made a Path of ("s3:/bucket/run").
    """
    if is_url(str(path).replace(":/", "://", 1).replace(":///", "://")):
        raise UsageError(f"{path} is a URL; {what}")


def absolute(path: str | os.PathLike[str]) -> str:
    """The path as it holds from every folder, links and all; a URL as it is."""
    return str(path) if is_url(path) else os.path.abspath(path)  # noqa: PTH100
