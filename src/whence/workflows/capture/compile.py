"""Capture a compiled model: `torch.compile` whose graphs are taken into a run."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence import extras
from whence.errors import UsageError

if TYPE_CHECKING:
    from typing import Unpack

    from whence.instrument.arguments import ForceArgument


_TORCH = ("fullgraph", "dynamic", "options", "torch_mode")


def compile(  # noqa: A001 - the name that users know from torch
    model: Any, path: str | os.PathLike[str], mode: str = "exact", **compile_options: Any
) -> Any:
    """`torch.compile(model)` whose calls are captured into the run `path`, until `close()`, the end
    of a `with` block or of the process.

        with whence.compile(model, "runs/tgt") as compiled:
            compiled(x)

    mode: "exact" captures the buffers that the kernels of inductor's code leave, with the same
    kernels; "deep" the value of every node of the graph; "fx" runs the same graph node by node
    without inductor's code, as the reference for the other two. If "deep" changes the result of a
    graph, that graph is captured with "exact" (unless graph_anyway=True). compile_options:
    fullgraph, dynamic and options of torch.compile, its mode as torch_mode ("max-autotune"); and
    options of `whence.capture` (keep, max_bytes, force, seed, ...; graph_buffers=True keeps buffers
    that no node names). Returns the compiled module. After `close()` it stays compiled, and nothing
    more is captured. Raises UsageError for an option that neither knows, CaptureError if `model` is
    no module or this torch cannot be captured, OutputExists, StoreFailed.
    """
    from whence import store
    from whence.errors import CaptureError
    from whence.instrument.framework import set_determinism
    from whence.instrument.options import make
    from whence.workflows.capture.setup import ExternalParameters, open_session, process_info

    capture_options = {name: value for name, value in compile_options.items() if name not in _TORCH}
    if "backend" in capture_options:
        raise UsageError("whence.compile captures inductor's graphs: it takes no other backend")
    if "level" in capture_options:
        raise UsageError("whence.compile captures graphs: it takes no level; whence.capture does")
    chosen = make(**capture_options, level="graph", graph_mode=mode)
    if not hasattr(model, "named_modules"):
        raise CaptureError(
            f"cannot capture a {type(model).__name__}: whence.compile takes a torch.nn.Module; a "
            "whole program is captured by "
            "`whence run --level graph`"
        )
    from whence.instrument.torch.compiled import inductor_taps
    from whence.instrument.torch.compiled.listener import GraphListener, compiled_by

    extras.check_imported("torch")
    inductor_taps.check(chosen.graph_mode)
    folder = os.fspath(path)
    session = open_session(folder, chosen, None)
    store.create(folder, process_info(chosen), force=chosen.force)
    set_determinism(chosen)
    torch_options = {name: value for name, value in compile_options.items() if name in _TORCH}

    def listen(compiled: Any) -> GraphListener:
        listener = GraphListener(
            session, compiled, folder=folder, find_external=ExternalParameters(model, session)
        )
        listener.install()
        return listener

    return compiled_by(model, listen, **torch_options)


def compile_backend(
    path: str | os.PathLike[str],
    mode: str = "exact",
    *,
    steps: Collection[int] | None = None,
    with_layout: bool = False,
    **options: Unpack[ForceArgument],
) -> Any:
    """A backend for `torch.compile` whose graphs are captured into the run `path`, until
    `backend.close()` or the end of the process.

    mode, options: as `compile` takes them. steps: calls of the outermost module that are taken,
    None for all. with_layout: write the tool's own files there too when it ends. The backend is
    inductor otherwise, and stays so when the capture has ended. A run at `path` is replaced; beside
    other files it lies below, in `whence-run`. Raises UsageError, CaptureError for a torch
    that cannot be captured so, StoreFailed.
    """
    from whence.instrument.framework import set_determinism
    from whence.instrument.options import make
    from whence.instrument.torch.compiled import inductor_taps
    from whence.instrument.torch.compiled.listener import GraphListener, backend_with
    from whence.workflows.capture.dump import created
    from whence.workflows.capture.setup import ExternalParameters, open_session

    chosen = make(**options, level="graph", graph_mode=mode)
    extras.check_imported("torch")
    inductor_taps.check(chosen.graph_mode)
    destination = Path(path).absolute()
    folder = str(created(destination, chosen))
    session = open_session(folder, chosen, None)
    if steps is not None:
        session.only_steps(steps)
    set_determinism(chosen)
    listener = GraphListener(
        session, None, folder=folder, find_external=ExternalParameters(None, session)
    )
    listener.install()
    return backend_with(
        listener,
        (lambda: _lay_out(folder, destination, chosen.graph_mode)) if with_layout else None,
    )


def _lay_out(folder: str, destination: Path, mode: str) -> None:
    """The tool's own files; what cannot be written is told, and the run is whole."""
    from whence.instrument.labels.labels import complain
    from whence.store.folder import process_folders
    from whence.workflows.capture import torchair_layout

    if not process_folders(Path(folder)):
        complain(f"nothing was dumped into {destination}: no compiled graph ran")
        return
    try:
        (torchair_layout.lay_out_fx if mode == "fx" else torchair_layout.lay_out_ge)(
            folder, destination
        )
    except Exception as error:  # noqa: BLE001 - the process ends, and the run is whole
        complain(f"{destination} has the run but not the tool's own files: {error}")
