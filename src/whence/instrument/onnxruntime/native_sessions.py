"""Creates further sessions of the program's model with the same options and providers. The
program's session and option objects are only read.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

GRAPH, WEIGHTS = "graph.onnx", "graph.weights"
_LEAST = "1024"  # bytes of an initialiser that is written beside the graph
_ROOM = 2  # times the size of a model must be free where its optimised form is written
_FATAL = 4
_libraries: dict[str, None] = {}  # of custom operators, as programs registered them


def registered(path: Any) -> None:
    """Note a library of custom operators that the program registered: further sessions need it
    too.
    """
    _libraries[str(path)] = None


def save_optimized(
    python_session: Any, model: str | bytes, size: int, folder: Path, disabled: set[str]
) -> None:
    """Write the graph that a session runs after its passes into a folder as `GRAPH`, with its
    initialisers beside it. Raises what the runtime raises.

    size: of the model with its initialisers, in bytes.
    """
    if shutil.disk_usage(folder).free < _ROOM * size:
        raise OSError(f"no room: the graph takes up to {_ROOM * size} bytes in {folder}")
    options = _options(python_session)
    # as it runs: passes that need the machine's own kernels too
    options.optimized_model_filepath = str(folder / GRAPH)
    entries = {
        "session.optimized_model_external_initializers_file_name": WEIGHTS,
        "session.optimized_model_external_initializers_min_size_in_bytes": _LEAST,
    }
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    _made(python_session, options, model, disabled)
    if not (folder / GRAPH).is_file():
        raise OSError("ONNX Runtime wrote no graph")


def observing(python_session: Any, graph: Path) -> Any:
    """A session that runs a saved graph without further passes."""
    import onnxruntime

    options = _options(python_session)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = ""
    return _made(python_session, options, str(graph), set())


def logging_alike(
    python_session: Any, disabled: set[str], around: AbstractContextManager[None], severity: int
) -> None:
    """Create, then drop, a session like the program's that logs from this severity on. around:
    context in which it is created.
    """
    options = _options(python_session)
    options.log_severity_level = severity
    options.optimized_model_filepath = ""
    source = os.fspath(python_session._model_path or "") or python_session._model_bytes
    with around:
        _made(python_session, options, source, disabled)


def _options(python_session: Any) -> Any:
    """A copy of the options of a session, which the runtime hands out."""
    options = python_session._sess.session_options
    options.enable_profiling = False
    options.log_severity_level = _FATAL
    # threads that wait for work would take the processor from the program's
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    for path in _libraries:
        options.register_custom_ops_library(path)
    return options


def _made(python_session: Any, options: Any, model: str | bytes, disabled: set[str]) -> Any:
    from onnxruntime.capi import _pybind_state

    providers = list(python_session.get_providers())
    stated = python_session.get_provider_options()
    made = _pybind_state.InferenceSession(options, model, isinstance(model, str), False)
    made.initialize_session(providers, [stated.get(name) or {} for name in providers], disabled)
    return made


class SavedGraph:
    """A folder for the graph of one session, inside of the run; gone when it is closed."""

    _count = 0
    _lock = threading.Lock()

    def __init__(self, run_folder: str) -> None:
        with SavedGraph._lock:
            SavedGraph._count += 1
            number = SavedGraph._count
        self.folder = Path(run_folder).absolute() / f".onnxruntime-{os.getpid()}-{number}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._variants = 0

    @property
    def graph(self) -> Path:
        """The file of the graph, without its large initialisers."""
        return self.folder / GRAPH

    def variant(self, behind: bytes) -> Path:
        """A file of the graph with this behind it."""
        self._variants += 1
        path = self.folder / f"{self._variants}.onnx"
        path.write_bytes(self.graph.read_bytes() + behind)
        return path

    def close(self) -> None:
        """Delete the folder; sessions keep what they have mapped. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
