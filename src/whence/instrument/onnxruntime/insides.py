"""Opens the graph that a session runs: saved after the passes of the runtime, read, and made into a
plan of calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from whence.instrument.engines.tensors import FindExternal
from whence.instrument.engines.wanted import wanted_values
from whence.instrument.engines.watched import only_boundary
from whence.instrument.onnxruntime import native_sessions
from whence.instrument.onnxruntime import settings as session_facts
from whence.instrument.onnxruntime.graph_plan import GraphPlan, planned
from whence.instrument.onnxruntime.native_sessions import SavedGraph
from whence.instrument.onnxruntime.observer import SessionObserver
from whence.instrument.onnxruntime.watched import Inside
from whence.instrument.session import Session
from whence.instrument.wording import counted, raised


class Reading(NamedTuple):
    """Access to the readers of ONNX files. model(path or bytes): reads a model
    (`readers/encodings/onnx_model.py`). elements(tensor, folder): the elements of a tensor, or a
    text with the reason why there are none. weights(model, path): finds initialisers in the user's
    file.
    """

    model: Callable[[Any], Any]
    elements: Callable[[Any, str], Any]
    weights: Callable[[Any, str], FindExternal]


def open_inside(
    session: Session,
    reading: Reading,
    python_session: Any,
    original: Any,
    run_folder: str,
    disabled: set[str],
    root: str,
) -> Inside | None:
    """The graph that a session runs; None, with a note that says why, where it cannot be read."""
    path = session_facts.model_path(python_session)
    saved = SavedGraph(run_folder)
    try:
        source = path or python_session._model_bytes
        size = _size(source, original)
        native_sessions.save_optimized(python_session, source, size, saved.folder, disabled)
        model = reading.model(str(saved.graph))
        plan = planned(model, original, lambda tensor: _array(reading, tensor, saved.folder))
    except Exception as error:  # noqa: BLE001 - what the runtime raises has many types
        saved.close()
        only_boundary(session, f"the optimised graph cannot be had ({raised(error)})", root)
        return None
    if plan.draws:
        saved.close()
        drawn = ", ".join(plan.draws)
        why = f"{drawn} draws random numbers, and a session beside draws others"
        only_boundary(session, why, root)
        return None
    _note_limits(session, plan, root)
    wanted = wanted_values(session, plan.nodes, plan.outputs, plan.constants)
    observer = SessionObserver(python_session, saved, plan, wanted)
    find = reading.weights(original, path) if path and original is not None else None

    def initializer(name: str) -> Any:
        tensor = model.graph.initializers.get(name)
        return (
            "a sparse initialiser"
            if tensor is None
            else reading.elements(tensor, str(saved.folder))
        )

    return Inside(plan, observer, initializer, find)


def _note_limits(session: Session, plan: GraphPlan, root: str) -> None:
    """Note what of a graph is not shown as calls."""
    unknown = [value for value, channels in plan.blocked.items() if not channels]
    if unknown:
        session.note(
            "inside-not-seen",
            f"{counted(len(unknown), 'value')} in blocks of channels, of which nothing says how "
            f"many channels there are: {', '.join(unknown[:5])}",
            root,
        )
    if plan.folded:
        session.note(
            "constants",
            f"{counted(plan.folded, 'node')} of the graph compute constants, which are recorded as "
            "parameters of the nodes that read them",
            root,
        )


def _size(source: Any, original: Any) -> int:
    """Bytes of a model, including initialisers in files beside it."""
    own = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
    tensors = original.graph.initializers.values() if original is not None else ()
    return own + sum(int(t.external.get("length") or 0) for t in tensors if t.external)


def _array(reading: Reading, tensor: Any, folder: os.PathLike[str]) -> Any:
    elements = reading.elements(tensor, str(folder))
    return None if isinstance(elements, str) else elements
