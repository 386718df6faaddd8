"""Names of the roots of an engine's models, and how a model that is made anew continues one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whence.instrument.call_frames import Root

ROOT = "model"
"""The root of the first model."""


class ModelRoot(Root):
    """A root that is a model of an engine. model: its file, by which a new model of the same file
    is recognised.
    """

    def __init__(self, name: str, ref: Callable[[], Any], model: str) -> None:
        super().__init__(name, ref)
        self.model, self.steps = model, 0


class Roots:
    """The roots of one capture."""

    def __init__(self) -> None:
        self._roots: list[ModelRoot] = []

    def of(self, owner: Any, model: str) -> ModelRoot:
        """The root for a model; the root of an earlier model of the same file that is gone is
        continued, with its step count.
        """
        for root in self._roots:
            current = root.ref()
            if current is owner or (current is None and root.model == model):
                return root
        name = ROOT if not self._roots else f"{ROOT}#{len(self._roots)}"
        root = ModelRoot(name, lambda: None, model)
        self._roots.append(root)
        return root
