"""The roots of an engine's models: how they are called, and how one that is made anew goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whence.instrument.call_frames import Root

ROOT = "model"
"""The root of the first model."""


class ModelRoot(Root):
    """A root that is a model of an engine. model: its file, by which one that is made anew is
    known.
    """

    def __init__(self, name: str, ref: Callable[[], Any], model: str) -> None:
        super().__init__(name, ref)
        self.model, self.steps = model, 0


class Roots:
    """The roots of one capture."""

    def __init__(self) -> None:
        self._roots: list[ModelRoot] = []

    def of(self, owner: Any, model: str) -> ModelRoot:
        """The root of what runs a model: of one that is gone it goes on counting the steps."""
        for root in self._roots:
            current = root.ref()
            if current is owner or (current is None and root.model == model):
                return root
        name = ROOT if not self._roots else f"{ROOT}#{len(self._roots)}"
        root = ModelRoot(name, lambda: None, model)
        self._roots.append(root)
        return root
