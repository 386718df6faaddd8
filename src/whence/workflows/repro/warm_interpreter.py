"""A written script run in an interpreter of its own, which may load what it needs before the script
is there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
            printed, errors = self._process.communicate(
                f"{path.absolute()}\t--side\t{side}\n", timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            self.leave()
            return None, f"still running after {_LIMIT_S:.0f} s"
        lines = [line for line in printed.splitlines() if line.strip()]
        if (
            self._process.returncode in (0, 1)
            and lines
            and re.fullmatch(r"(PASS|FAIL) \(\w+\)", lines[-1])
        ):
            return lines[-1].startswith("PASS"), "\n".join(lines[:-1])
        return None, "\n".join(errors.splitlines()[-_LAST_LINES:])

    def leave(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class BothWays:
    """Runs a script as either side does. heavy: modules that the target's side will load; they are
    loaded while the script is made.
    """

    def __init__(self, heavy: Sequence[str]) -> None:
        self._waiting = {"reference": Waiting("torch"), "target": Waiting("torch", *heavy)}

    def leave(self) -> None:
        """End the interpreters, whatever they do."""
        for interpreter in self._waiting.values():
            interpreter.leave()

    def outcome(self, path: Path, default: str, missing: str) -> tuple[dict[str, str], bool, str]:
        """(what each side printed, does the reproduction hold, that in words)."""
        if default == "recorded":
            self._waiting["recorded"] = Waiting("torch")
            if missing:
                self._waiting.pop("target").leave()
        with ThreadPoolExecutor(len(self._waiting)) as pool:
            results = pool.map(lambda item: item[1].run(path, item[0]), self._waiting.items())
            ended = dict(zip(self._waiting, results))
        words = {
            side: "fails" if passes is False else "passes" if passes else "could not be run"
            for side, (passes, _) in ended.items()
        }
        if default == "recorded":
            rerun = missing or f"run on this machine as the target was it {words['target']}"
            sentence = f"what was recorded {words['recorded']}; {rerun}"
        else:
            sentence = f"{words['target']} as the target runs it"
        holds = ended[default][0] is False and ended["reference"][0] is True
        printed = {side: text for side, (_, text) in ended.items()}
        return printed, holds, f"{sentence}; {words['reference']} as the reference does"
