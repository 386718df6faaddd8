"""Listens to ONNX Runtime: every `InferenceSession` of its Python API, without an edit of the
program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whence.instrument.framework import Listening, Stage, Surroundings
    from whence.instrument.options import CaptureOptions
    from whence.instrument.session import Session

MODELS = ("an InferenceSession of ONNX Runtime",)
LEVELS = ("modules", "op", "graph", "logits", "io")
VARIABLES: Mapping[str, str] = {}


def owns(model: Any) -> bool:
    """Whether the model is a session of ONNX Runtime. Imports nothing."""
    kinds = type(model).__mro__
    return hasattr(model, "run_with_iobinding") and any(
        kind.__module__.partition(".")[0] == "onnxruntime" for kind in kinds
    )


def check(options: CaptureOptions) -> None:
    """Raise UsageError for what the capture of ONNX Runtime cannot do."""
    from whence.instrument.engines.limits import check_listening

    allowed = ("patch",) if options.recompute else ()
    check_listening(options, "a session of ONNX Runtime", allowed=allowed)


def determinism(seed: int | None, deterministic: bool) -> None:
    """Seed the generators of sessions that are made from now on.

    Deterministic kernels are an option of each session, which is the program's own.
    """
    if seed is not None:
        import onnxruntime

        onnxruntime.set_seed(seed)


def stage(options: CaptureOptions) -> Stage:
    """The stage that creates sessions with the rung's level of graph optimisation and without the
    disabled optimisers.
    """
    from whence.instrument.onnxruntime.levels import Levels
    from whence.instrument.rungs import RUNGS

    rung = options.rung if options.rung in RUNGS["onnxruntime"] else ""
    return Levels(rung, options.disabled_optimizers)


def listener(session: Session, model: Any, around: Surroundings) -> Listening:
    """Listens to `model`, a session; None: to every session of this process.

    around.reading: what the readers know of ONNX files (`described_models.Reading`).
    """
    from whence.instrument.onnxruntime.in_float import LayersInFloat
    from whence.instrument.onnxruntime.sessions import Listener

    options = session.options
    check(options)
    layers = None
    if options.patch:
        layers = LayersInFloat(session, around.open_run(options.patch_from), options.patch)
    return Listener(session, model, reading=around.reading, folder=around.folder, layers=layers)
