"""Folders of whence's own, for what is kept between two commands: in the user's cache folder, and
writable by nobody else.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def private(folder: Path) -> bool:
    """Make a folder that nobody else can write to. False where there is none, or where others may
    write into it, or exchange it or one above it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and not _is_ours_alone(folder):
            return False
        return os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_ours_alone(folder: Path) -> bool:
    """Whether a folder is this user's and only this user writes into it; and whether none of the
    folders above it is one in which others may put another in its place.
    """
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & _OTHERS:
        return False
    # as it is named, links unfollowed, and where they lead
    above = {*folder.absolute().parents, *folder.resolve().parents}
    return not any(map(_is_anybodys, above))


def _is_anybodys(folder: Path) -> bool:
    """Whether others than this user and root may exchange what lies in a folder, or made it. In one
    with the sticky bit everybody exchanges only their own.
    """
    about = folder.lstat()
    if about.st_uid not in (0, os.getuid()):
        return True
    if stat.S_ISLNK(about.st_mode):
        return False
    return bool(about.st_mode & stat.S_IWOTH) and not about.st_mode & stat.S_ISVTX


def homes() -> list[Path]:
    """Where such folders may lie, the best first: $XDG_CACHE_HOME or what the system has, then the
    temporary folder.
    """
    found = []
    if os.environ.get("XDG_CACHE_HOME"):
        found.append(Path(os.environ["XDG_CACHE_HOME"]) / "whence")
    elif os.environ.get("LOCALAPPDATA"):
        found.append(Path(os.environ["LOCALAPPDATA"]) / "whence" / "cache")
    else:
        try:
            home = Path.home()
            found.append(
                home / "Library" / "Caches" / "whence"
                if sys.platform == "darwin"
                else home / ".cache" / "whence"
            )
        except RuntimeError:
            pass  # no home at all
    found.append(
        Path(tempfile.gettempdir()) / f"whence-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
    )
    return found


def folder(name: str) -> Path | None:
    """The folder `name`, made where it is not there; None when nothing is writable."""
    return next((home / name for home in homes() if private(home / name)), None)
