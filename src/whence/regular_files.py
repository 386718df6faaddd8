"""Which paths are regular files on a disk. What the kernel makes up while it is read (`/proc`,
`/sys`) says that it is a regular file too, and may hang or never end.
"""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

_MADE_UP = frozenset((
    "proc", "sysfs", "debugfs", "tracefs", "securityfs", "configfs", "cgroup", "cgroup2", "bpf",
    "pstore", "efivarfs", "fusectl", "binfmt_misc", "devpts", "mqueue", "rpc_pipefs", "selinuxfs",
    "nsfs",
))  # fmt: skip
_MOUNTS = Path("/proc/self/mountinfo")


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Is this a regular file on a disk, or a link to one?"""
    try:
        return regular(Path(path).stat())
    except (OSError, ValueError):
        return False


def regular(about: os.stat_result) -> bool:
    """As `is_regular`, of what is known of a path or of an open file."""
    return stat.S_ISREG(about.st_mode) and about.st_dev not in _made_up_devices()


@functools.cache
def _made_up_devices() -> frozenset[int]:
    """Devices of what the kernel makes up; none where it does not say (not Linux)."""
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    devices = set()
    for line in lines:
        mount, _, kind = line.partition(" - ")
        major, _, minor = mount.split(" ")[2].partition(":")
        if kind.split(" ")[0] in _MADE_UP:
            devices.add(os.makedev(int(major), int(minor)))
    return frozenset(devices)
