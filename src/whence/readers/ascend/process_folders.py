"""Folders that Ascend's dumps name after a device and a process: `npu0_1234`, `cpu_77`,
`1234_5678`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

PROCESS = re.compile(r"([a-z]*)(\d{0,9})_(\d{1,10})$")


def ranks(processes: Iterable[str]) -> dict[str, int]:
    """Returns folder -> rank: the device number where every process has its own device, else the
    position of the process.
    """
    names = sorted(set(processes))
    devices = {p: int(m[2]) for p in names if (m := PROCESS.match(p)) and m[1] and m[2]}
    if len(names) > 1 and len(set(devices.values())) == len(names):
        return devices
    return {p: k for k, p in enumerate(names)}
