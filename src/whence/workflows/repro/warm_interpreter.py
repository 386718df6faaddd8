"""A written script run in an interpreter of its own, which may load what it needs before the script
is there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_LIMIT_S = 300.0  # one run of the script
_LAST_LINES = 5
# Reads the script and its arguments as lines, once the modules are loaded: what follows is as
# `python SCRIPT ARGUMENTS`.
_WAIT = """
import importlib, runpy, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
path, *arguments = sys.stdin.readline().rstrip("\\n").split("\\t")
sys.argv = [path, *arguments]
runpy.run_path(path, run_name="__main__")
"""


class Waiting:
    """An interpreter that loads `modules` now and runs a script later. To be ended by `run` or
    `leave`.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WAIT, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def run(self, path: Path, side: str) -> tuple[bool | None, str]:
        """(did `path --side SIDE` pass, what it said); None where it neither passed nor failed."""
        try:
            said, wrong = self._process.communicate(
                f"{path.absolute()}\t--side\t{side}\n", timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            self.leave()
            return None, f"still running after {_LIMIT_S:.0f} s"
        lines = [line for line in said.splitlines() if line.strip()]
        if (
            self._process.returncode in (0, 1)
            and lines
            and re.fullmatch(r"(PASS|FAIL) \(\w+\)", lines[-1])
        ):
            return lines[-1].startswith("PASS"), "\n".join(lines[:-1])
        return None, "\n".join(wrong.splitlines()[-_LAST_LINES:])

    def leave(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
