"""Capture a compiled model: `torch.compile` whose graphs are taken into a run.

What a compiled graph computed, laid out as torchair lays its dumps out: npy files beside the
run.

    data_dump/1/gm_20251017071211190258_dump/mm-aten.mm.default.INPUT.0.20251017071211190258.npy       FX, tokens from 1
    dump_20251010_083826/20251010083826/0/graph_1/1/0/Mm.mm.0.0.1706596912161951.output.0.npy          GE, tokens from 0

On an Ascend device the second kind is binary; here it has the form to which its own tool converts
it.
"""  # noqa: E501

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Unpack

from whence import disk, extras
from whence.dtypes import Array
from whence.errors import UsageError
from whence.instrument.arguments import ForceArgument
from whence.instrument.options import make
from whence.records import Call, Run
from whence.records.slots import split_slot
from whence.workflows.saved import AnyPath

_TORCH = ("fullgraph", "dynamic", "options", "torch_mode")


def compile(  # noqa: A001 - the name that users know from torch
    model: Any, path: AnyPath, mode: str = "exact", **compile_options: Any
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
    path: AnyPath,
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
    """Write the tool's own files. A failure is reported; the run itself is complete in any case."""
    from whence.instrument.labels.labels import complain
    from whence.store.folder import process_folders

    if not process_folders(Path(folder)):
        complain(f"nothing was dumped into {destination}: no compiled graph ran")
        return
    try:
        (_lay_out_fx if mode == "fx" else _lay_out_ge)(folder, destination)
    except Exception as error:  # noqa: BLE001 - the process ends, and the run is whole
        complain(f"{destination} has the run but not the tool's own files: {error}")


_UNSAFE = re.compile(r"[^\w]")
_TARGET = re.compile(r"[^\w.]")


def _lay_out_fx(run_path: str | Path, folder: Path) -> None:
    """Write the nodes of graphs that ran node by node into `folder` (`data_dump`).

    Raises UnreadableRun, OSError.
    """
    now = time.time()
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))

    def place(call: Call, graph: int, kind: str, slot: str) -> Path:
        when = f"{stamp}{call.order % 1_000_000:06d}"  # in the order in which they ran
        node, target = (
            _UNSAFE.sub("_", call.op),
            _TARGET.sub("_", str(call.arguments.get("overload", call.op_type))),
        )
        return (
            folder
            / str(call.step + 1)
            / f"gm_{stamp}{graph:06d}_dump"
            / f"{node}-{target}.{kind.upper()}.{slot}.{when}.npy"
        )

    _write_values(run_path, place)


def _lay_out_ge(run_path: str | Path, folder: Path) -> None:
    """Write what the kernels of compiled graphs returned into `folder` (`dump_<time>`). Raises
    UnreadableRun, OSError.
    """
    now = time.time()
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))
    first = int(now * 1e6) // 1_000_000 * 1_000_000

    def place(call: Call, graph: int, kind: str, slot: str) -> Path:
        node, target = (_UNSAFE.sub("_", text) for text in (call.op, call.op_type))
        name = f"{target[:1].upper()}{target[1:]}.{node}.{call.order}.0.{first + call.order}.{kind}.{slot}.npy"  # noqa: E501
        return folder / stamp / str(call.rank) / f"graph_{graph + 1}" / "1" / str(call.step) / name

    _write_values(run_path, place)


def _write_values(run_path: str | Path, place: Callable[[Call, int, str, str], Path]) -> None:
    from whence import store
    from whence.errors import ElementsMissing
    from whence.writers.support import encodings

    run = store.open_run(run_path)
    for call, graph in _nodes_of_graphs(run):
        for ref in call.refs:
            kind, slot = split_slot(ref.slot)
            if kind not in ("input", "output") or not re.fullmatch(r"\d+(\.\d+)*", slot):
                continue
            try:
                array = run.array(ref.record)
            except ElementsMissing:
                continue
            file = place(call, graph, kind, slot)
            file.parent.mkdir(parents=True, exist_ok=True)
            with disk.whole_file(file) as out:
                encodings.write_numpy(out, _widened(array))


def _nodes_of_graphs(run: Run) -> Iterator[tuple[Call, int]]:
    """The operators of graphs, each with the number of its graph.

    When a graph runs several times in a step, each of these executions has a number of its own.
    """
    numbers: dict[tuple[object, ...], int] = {}
    graphs: dict[int, int] = {}
    executions: dict[tuple[object, ...], int] = {}
    for call in sorted(run.calls, key=lambda c: c.order):
        if call.kind == "graph":
            key = call.root, call.step, call.op
            executions[key] = executions.get(key, -1) + 1
            graphs[call.id] = numbers.setdefault(
                (call.root, call.op, executions[key]), len(numbers)
            )
    for call in run.calls:
        if call.kind == "operator" and call.parent in graphs:
            yield call, graphs[call.parent]


def _widened(array: Array) -> Array:
    """Convert dtypes that npy cannot name to float32, as torchair does for bfloat16."""
    import numpy as np

    return np.asarray(array) if array.dtype.isbuiltin else array.astype(np.float32)
