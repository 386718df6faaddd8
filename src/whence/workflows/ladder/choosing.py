"""Which climber a command or a model gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whence import extras
from whence.errors import UsageError
from whence.instrument.rungs import RUNGS

if TYPE_CHECKING:
    from whence.workflows.ladder.climbers import Climber


def of_model(model: Any, inputs: Any, options: Mapping[str, Any], seed: int) -> Climber:
    """The climber of a model of torch, or of a file, bytes or session of ONNX Runtime. options: of
    torch.compile or InferenceSession. Raises UsageError.
    """
    from whence.instrument import onnxruntime
    from whence.workflows.ladder.of_levels import LevelsModel
    from whence.workflows.ladder.of_torch import TorchModel

    if not isinstance(model, (str, os.PathLike, bytes)) and not onnxruntime.owns(model):
        return TorchModel(model, inputs, options, seed)
    extras.needed("onnxruntime", "a ladder")
    steps = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not steps or not all(isinstance(feeds, Mapping) for feeds in steps):
        raise UsageError(
            "a model of ONNX Runtime is given its inputs by name: a dict of arrays, or a list of "
            "them for several steps"
        )
    return LevelsModel(model, steps, options, seed)


def of_command(
    command: Sequence[str], of: str, releases: Sequence[str], options: Mapping[str, Any]
) -> Climber:
    """The climber of a command. of: "torch", "onnxruntime", or "" for what its first run shows.
    releases: folders of ONNX Runtime. options: of capture. Raises UsageError.
    """
    from whence.workflows.ladder.of_levels import LevelsCommand
    from whence.workflows.ladder.of_releases import ReleasesCommand
    from whence.workflows.ladder.of_torch import TorchCommand

    if of not in ("", *RUNGS):
        raise UsageError(f"of: {of!r} is not one of {', '.join(RUNGS)}")
    if releases and of == "torch":
        raise UsageError("releases are of ONNX Runtime: leave of='torch' (--of torch) out")
    if releases:
        return ReleasesCommand(command, releases, options)
    if of == "onnxruntime":
        return LevelsCommand(command, options)
    return TorchCommand(command, options, chooses=not of)
