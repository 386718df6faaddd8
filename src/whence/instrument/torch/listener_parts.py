"""What a listener of modules can be given: a way to change the program, and a way to record the
tensors of a call.
"""

from __future__ import annotations

from typing import Any, Protocol

from whence.instrument.torch.frames import ModuleFrame


class Interventions(Protocol):
    """What a capture changes in the program on purpose: planted faults, patched tensors, forced
    tokens.
    """

    def met(self, root: str, module: Any) -> None:
        """A root is about to be called for the first time."""

    def left(self, frame: Any, out: Any) -> Any:
        """What a call returns instead of `out`. frame: the call that ends."""

    def taken(self, frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """What the program gets instead of `out`, which is recorded."""

    def undo(self) -> None:
        """Take everything out of the program again. Idempotent."""

    def finish(self) -> None:
        """Take everything out again, and note what was done."""


class TakesTensors(Protocol):
    """Records the tensors of module calls."""

    def take_inputs(
        self, frame: ModuleFrame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """(slot, tensor) of everything a call was handed, recorded where inputs are wanted."""

    def take_results(self, frame: ModuleFrame, out: Any, error: str) -> None:
        """Record mutations and outputs of a call that ends."""

    def prune(self) -> None:
        """Forget objects that are gone."""

    def clear(self) -> None:
        """Forget everything."""
