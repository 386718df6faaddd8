"""Listens to OpenVINO: every model that its Python API compiles and infers, without an edit of the
program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whence.instrument.framework import Listening, Surroundings
    from whence.instrument.options import CaptureOptions
    from whence.instrument.session import Session

MODELS = ("a CompiledModel of OpenVINO", "a Model of OpenVINO that the block compiles")
LEVELS = ("modules", "op", "graph", "logits", "io")
VARIABLES: Mapping[str, str] = {}


def owns(model: Any) -> bool:
    """Whether the model is one of OpenVINO, compiled or not. Imports nothing."""
    is_known = any(kind.__module__.partition(".")[0] == "openvino" for kind in type(model).__mro__)
    return is_known and (
        hasattr(model, "create_infer_request") or hasattr(model, "get_ordered_ops")
    )


def check(options: CaptureOptions) -> None:
    """Raise UsageError for what the capture of OpenVINO cannot do."""
    from whence.instrument.engines.limits import check_listening

    check_listening(options, "a model of OpenVINO")


def determinism(seed: int | None, deterministic: bool) -> None:
    """OpenVINO has no generator of its process, and properties of a model are the program's own."""


def listener(session: Session, model: Any, around: Surroundings) -> Listening:
    """Listens to `model`; None: to every model of this process.

    around.reading: reads a model of ONNX from its path or its bytes.
    """
    from whence.instrument.openvino.models import Listener

    check(session.options)
    return Listener(session, model, read_onnx=around.reading)
