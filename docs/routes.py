"""Prints which files of whence one tensor passes on its way to disk, and one replayed call on its
way to a verdict.

    python docs/routes.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import whence

SOURCE = os.path.dirname(whence.__file__) + os.sep  # noqa: PTH120 - compared as text, for every call


class Route:
    """The files of whence that are entered between the first call of a function and its return."""

    def __init__(self, file: str, function: str, holds: Callable[[FrameType], bool]) -> None:
        self._file, self._function, self._holds = SOURCE + file, function, holds
        self._start: FrameType | None = None
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """What `sys.setprofile` calls."""
        code = frame.f_code
        if event == "return" and frame is self._start:
            sys.setprofile(None)
        if event != "call" or not code.co_filename.startswith(SOURCE):
            return
        if self._start is None:
            if (code.co_filename, code.co_name) != (self._file, self._function):
                return
            if not self._holds(frame):
                return
            self._start = frame
        self.calls[code.co_filename.removeprefix(SOURCE)] += 1

    def follow(self, action: Callable[[], Any]) -> Any:
        """What `action()` returns."""
        sys.setprofile(self)
        try:
            return action()
        finally:
            sys.setprofile(None)

    def show(self, title: str) -> None:
        """Print the files in the order they are entered."""
        if not self.calls:
            raise SystemExit(
                f"{title}: {self._function} was not called: is it still in {self._file}?"
            )
        print(f"{title}: {len(self.calls)} files, {sum(self.calls.values())} calls")
        for name, calls in self.calls.items():
            print(f"  {calls:5}  {name}")


def main() -> None:
    """Trace the output of a module, and one replayed call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    value = torch.randn(2, 8)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("reference", "target")]
        tensor = Route(
            "instrument/torch/tensor_identity.py",
            "record_of",
            lambda frame: frame.f_locals["slot"] == "output.0",
        )
        with whence.capture(model, paths[0]), torch.no_grad():
            model(value)
            tensor.follow(lambda: model(value + 1))
        with whence.capture(model, paths[1]), torch.no_grad():
            model(value)
            with torch.no_grad():
                model[0].weight[0] += 1e-3
            model(value + 1)
        replay = Route(
            "comparison/replays/replayer.py",
            "figures",
            lambda _: True,
        )
        # Once before: a module that is imported on the way runs its top level, which is no hop.
        whence.compare(*paths)
        replay.follow(lambda: whence.compare(*paths))
    tensor.show("a tensor, from the return of its module to its shard")
    replay.show("a replayed call, from its pair to its figures")


if __name__ == "__main__":
    main()
