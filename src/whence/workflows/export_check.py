"""`whence export-check`: compares an exported model with its torch model on the same inputs."""

from __future__ import annotations

import inspect
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from whence import extras
from whence.dtypes import Array
from whence.errors import UnreadableRun, UsageError
from whence.workflows.saved import AnyPath

if TYPE_CHECKING:
    from torch.nn import Module

    from whence.readers.encodings.onnx_model import OnnxGraph
    from whence.results import Comparison

OPTIMISATION = {
    "off": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}  # fmt: skip
"""Optimisation level of ONNX Runtime -> the name that ONNX Runtime gives it."""
_WHAT = "whence export-check"
_GONE = "both runs are deleted: -o CMP keeps them, for whence report, trace and repro"
_SHOWN = 5  # weights that are named
_EXTENT = 2  # of an axis that the file leaves open
_TOKENS = 2  # integers are drawn below it: any table has as many rows


def export_check(
    onnx: AnyPath | None,
    model: str | Module | Callable[[], Module],
    inputs: Any = None,
    *,
    output: AnyPath | None = None,
    force: bool = False,
    opset: int | None = None,
    optimisation: str = "off",
    **how: Any,
) -> Comparison:
    """Run a torch model and its export on the same inputs, both captured with all that they
    compute inside, and compare them; the torch model is the reference.

    onnx: the exported file; None exports the model to a temporary folder (onnx and onnxscript are
    needed). model: a torch.nn.Module, a function that makes it, or "module:factory", which is
    imported. inputs: a tuple of positional or a mapping of named arguments, one tensor, a function
    that makes them, or "module:function"; None draws them, of the forms that the file
    states (open extents are 2, integers 0 or 1). output: folder for the comparison, with the runs
    in `reference` and `target` below it; None keeps nothing. opset: to export for. optimisation:
    how far ONNX Runtime may rewrite the graph: "off" runs the file as it was exported, "basic",
    "extended" or "all" as it is served. how: arguments of `whence.compare`. Raises UsageError,
    MissingDependency, UnreadableRun, OutputExists, CaptureError, and what the model raises.
    """
    from whence.comparison.replays import user_model
    from whence.workflows.compare import compare
    from whence.workflows.saved import check_output, write

    if optimisation not in OPTIMISATION:
        raise UsageError(f"optimisation {optimisation!r}: {', '.join(OPTIMISATION)}")
    if onnx is not None and opset is not None:
        raise UsageError("opset is for exporting; the file has its own: leave one of them out")
    if onnx is None and inputs is None:
        raise UsageError(
            "a model is exported by calling it: give its inputs (--inputs module:function), or the "
            "exported file"
        )
    if output is not None:
        check_output(Path(output), force)
    module, _ = user_model.made(model, _WHAT)
    extras.needed("onnxruntime", _WHAT)
    with tempfile.TemporaryDirectory(prefix="whence-export-") as scratch:
        place = Path(output) if output is not None else Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        values = _made(inputs)
        if onnx is None:
            file = place / "exported" / "model.onnx"
            file.parent.mkdir(exist_ok=True)
            _export(module, values, file, opset)
        else:
            file = Path(onnx)
        graph = _graph(file)
        if values is None:
            values = drawn(graph)
        runs = _captured(module, values, file, graph, place, optimisation, force)
        result = compare(*runs, **how)
        weights = _weights(runs[0], file)
        kept = ((), (_GONE,)) if output is None else (result.next, ())
        result = msgspec.structs.replace(
            result, next=kept[0], notes=(weights, *result.notes, *kept[1])
        )
        if output is not None:
            write(result, Path(output))
    return result


def _weights(run: Path, file: Path) -> str:
    """A sentence about the model's weights in the exported file."""
    from whence.comparison.onnx_files import facing
    from whence.workflows.saved import as_run

    faced = facing.map_weights(as_run(run), as_run(file))
    of = len({(w.reference, w.name) for w in faced.pairs}) + len(faced.only_reference)
    states = Counter(w.state for w in faced.pairs)
    words = [f"{states['equal']} of {of} weights of the model are in the file, bit for bit"]
    words += [
        f"{w.reference}.{w.name} differs (rel_l2 {w.rel_l2:.2g})"
        for w in faced.pairs
        if w.state == "differs"
    ][:_SHOWN]
    if states["scaled"]:
        words.append(f"{states['scaled']} with a norm folded in")
    if faced.only_reference:
        words.append(f"not found: {', '.join(faced.only_reference[:_SHOWN])}")
    return "; ".join(words)


def _made(inputs: Any) -> Any:
    """The inputs from what the user gave: values, a function, or the name of one."""
    from whence.comparison.replays import user_model

    if isinstance(inputs, str):
        made = user_model.imported(inputs)
        inputs = made() if callable(made) else made
    elif callable(inputs) and not hasattr(inputs, "shape"):
        inputs = inputs()
    if inputs is None or isinstance(inputs, (tuple, Mapping)):
        return inputs
    return tuple(inputs) if isinstance(inputs, list) else (inputs,)


def _graph(file: Path) -> OnnxGraph:
    from whence.readers.formats import onnx_model
    from whence.readers.source import Place

    try:
        return onnx_model.described(Place(file)).graph
    except ValueError as error:
        raise UnreadableRun(f"{file} is not an ONNX model: {error}") from error


def drawn(graph: OnnxGraph) -> tuple[Array, ...]:
    """A random array for each input of a graph, in order. Raises UsageError for an input that is
    not a tensor.
    """
    from whence import dtypes

    random = np.random.default_rng(0)
    arrays = []
    for name in _inputs(graph):
        kind, shape = graph.dtypes.get(name, ""), graph.shapes.get(name)
        if kind not in dtypes.DTYPES or shape is None:
            raise UsageError(
                f"the file does not say what its input {name} is: give the inputs (--inputs "
                "module:function)"
            )
        extents = [n if n >= 0 else _EXTENT for n in shape]
        if dtypes.is_floating(kind):
            arrays.append(random.standard_normal(extents).astype(dtypes.named(kind).numpy))
        else:
            arrays.append(random.integers(0, _TOKENS, extents).astype(dtypes.named(kind).numpy))
    return tuple(arrays)


def _inputs(graph: OnnxGraph) -> list[str]:
    return [name for name in graph.inputs if name not in graph.initializers]


def _export(module: Any, values: Any, file: Path, opset: int | None) -> None:
    """Export with torch's defaults. Raises UsageError with torch's message."""
    torch = extras.needed("torch", _WHAT)
    for name in ("onnx", "onnxscript"):
        extras.needed(name, f"{_WHAT} without a file")
    args = () if isinstance(values, Mapping) else values
    kwargs = dict(values) if isinstance(values, Mapping) else None
    how = {} if opset is None else {"opset_version": opset}
    try:
        with torch.no_grad():
            torch.onnx.export(
                module, args, str(file), kwargs=kwargs, dynamo=True, verbose=False, **how
            )
    except Exception as error:  # whatever an exporter raises on a user's model
        first = str(error).strip().splitlines() or [""]
        raise UsageError(
            f"torch could not export the model: {type(error).__name__}: {first[0][:300]}; export "
            "it yourself and give the file"
        ) from error


def _captured(
    module: Any,
    values: Any,
    file: Path,
    graph: OnnxGraph,
    place: Path,
    optimisation: str,
    force: bool,
) -> tuple[Path, Path]:
    """Capture a run of each; returns the folders of both runs."""
    import onnxruntime

    from whence.workflows.capture.capture import capture
    from whence.workflows.feeding import called

    feeds = _feeds(module, values, graph)
    options = onnxruntime.SessionOptions()
    level = getattr(onnxruntime.GraphOptimizationLevel, OPTIMISATION[optimisation])
    options.graph_optimization_level = level
    try:
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # of the runtime's own kinds, which derive from nothing else
        raise UsageError(f"ONNX Runtime does not load {file}: {str(error)[:300]}") from error
    runs = place / "reference", place / "target"
    with capture(module, runs[0], force=force):
        called(module, values)
    with capture(session, runs[1], force=force):
        session.run(None, feeds)
    return runs


def _feeds(module: Any, values: Any, graph: OnnxGraph) -> dict[str, Any]:
    """The session's inputs by name: the names of the model's arguments if the file has them,
    otherwise in order.

    Raises UsageError when the numbers of tensors differ.
    """
    names = _inputs(graph)
    if isinstance(values, Mapping):
        named = {str(k): v for k, v in values.items()}
    else:
        parameters = list(inspect.signature(module.forward).parameters)
        named = dict(zip(parameters, values))
    flat = [array for value in named.values() for array in _arrays(value)]
    by_name = {k: _arrays(v) for k, v in named.items()}
    if all(len(by_name.get(name, ())) == 1 for name in names):
        return {name: by_name[name][0] for name in names}
    if len(flat) != len(names):
        raise UsageError(
            f"the inputs hold {len(flat)} tensors, and the file takes {len(names)}: "
            f"{', '.join(names)[:300]}"
        )
    return dict(zip(names, flat))


def _arrays(value: Any) -> Sequence[Any]:
    """The tensors inside an argument as arrays, in order."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, Mapping):
        return [array for item in value.values() for array in _arrays(item)]
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in _arrays(item)]
    if hasattr(value, "detach"):
        return [value.detach().cpu().numpy()]
    return []
