"""Which layers of a quantised model to leave in float: each proposal is measured in a run of the
program with that layer in float, and the choice is written in the words of the quantiser.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from whence.errors import ElementsMissing, StoreFailed, UsageError, WhenceError
from whence.readers.opening import open_run
from whence.records import Call, Run
from whence.records.marks import EngineModel
from whence.results import Comparison, InFloat, LayerCost, QuantisationRecipe
from whence.workflows.locate.locate import PatchedRuns, output_errors, squared_error
from whence.workflows.notebook_progress import Tell
from whence.workflows.saved import AnyComparison, AnyPath, as_comparison, write

_WORTH = 0.02
"""A layer is worth leaving in float from this share of the outputs' squared error on."""
_ENOUGH = 0.9
"""No further layer is left in float when this share of the outputs' squared error is gone."""
_MOST = 8
"""At most so many layers are left in float."""
_NAMES_NODES = ("onnxruntime", "nncf")
"""The quantisers that are given names of an ONNX graph's nodes."""


def recipe(
    comparison: AnyComparison,
    *,
    tool: str = "",
    seconds: float = 120.0,
    command: Sequence[str] | None = None,
    model: AnyPath | None = None,
    keep: AnyPath | None = None,
    tell: Tell | None = None,
) -> QuantisationRecipe:
    """Measure which quantised layers to leave in float, and write the choice for a quantiser.

    comparison: of the float model (reference) with the quantised one. The target's command, or
    `command`, runs again with layers in float, first each one alone, in order of what it may bring,
    then the best ones together, until 90 % of the squared error at the outputs is gone, eight
    layers are left in float or `seconds` are over; 0 seconds: nothing is run. tool: one of `TOOLS`,
    "" for that of the target. model: the float ONNX file, whose node names ONNX Runtime's quantiser
    is given; found by itself where the reference's command names it. keep: a new folder that keeps
    the runs. What was measured is also written into the folder of the comparison, for the page and
    the tables of layers. Raises UsageError where no layer of the target is quantised, CaptureError,
    UnreadableRun, OutputExists.
    """
    from whence.workflows.notebook_progress import telling
    from whence.workflows.rerun import Command, recorded, workplace

    result = as_comparison(comparison)
    reference, target = open_run(result.reference), open_run(result.target)
    tool = tool or _tool_of(target)
    if tool not in TOOLS:
        raise UsageError(f"tool {tool!r} is not one of {', '.join(TOOLS)}")
    candidates = _candidates(result, reference)
    with workplace(keep, "recipe") as place, telling(tell) as say:
        subject = None
        notes = []
        if seconds > 0:
            try:
                subject = Command(command) if command else recorded(target.info, target.path)
            except WhenceError as why:
                notes.append(f"nothing was measured: {why}")
        trials = _Trials(reference, target, candidates, time.monotonic() + seconds)
        if subject is not None:
            trials.runs = PatchedRuns(
                reference.path, subject, place, keep=keep is not None, seed=None, tell=say
            )
            trials.measure()
        leave = trials.chosen()
    nodes = _nodes_of(reference, model) if tool in _NAMES_NODES else {}
    names = _named_as([layer.name for layer in leave], nodes, tool, notes)
    chosen = {layer.name for layer in leave}
    if trials.runs is not None and not isinstance(comparison, Comparison):
        costs = tuple(_with_measured(c, trials, chosen, nodes or {}) for c in result.layer_costs)
        try:
            folder = os.fspath(comparison).removesuffix("report.json") or "."
            write(msgspec.structs.replace(result, layer_costs=costs), folder)
        except StoreFailed as why:
            notes.append(f"what was measured is not in the comparison: {why}")
    others = [layer for layer in trials.layers.values() if layer.name not in chosen]
    seen = [layer for layer in others if layer.measured is not None or layer.why_not]
    whole = trials.whole
    left = leave[-1].together if leave else None
    return QuantisationRecipe(
        result.reference,
        result.target,
        tool,
        TOOLS[tool](names) if names else "",
        None if whole is None else whole**0.5,
        None if whole is None or left is None else (max(1 - left, 0.0) * whole) ** 0.5,
        tuple(
            msgspec.structs.replace(each, cure=_cure(each.name, result, trials)) for each in leave
        ),
        tuple(seen),
        len(others) - len(seen),
        trials.runs.count if trials.runs is not None else 0,
        tuple(dict.fromkeys(notes)),
    )


def _candidates(result: Comparison, reference: Run) -> list[LayerCost]:
    """The quantised layers with parameters, what may bring most first."""
    if not result.layer_costs:
        raise UsageError(
            f"no layer of {result.target} is quantised against {result.reference}: compare a run "
            "of the float model with a run of the quantised one"
        )
    with_parameters = {call.scope for call in reference.calls if any(call.slots("param"))}
    costs = [c for c in result.layer_costs if with_parameters & set(c.name.split("+"))]
    return sorted(costs, key=lambda c: (-(_estimated(c) or 0.0), c.sqnr_db))


def _estimated(cost: LayerCost) -> float | None:
    return cost.explains if cost.weights_explain is None else cost.weights_explain


@dataclass
class _Trials:
    """Runs of the target with layers in float. whole: the squared error of the outputs as
    quantised, relative to the reference; until: when no further run begins.
    """

    reference: Run
    target: Run
    candidates: Sequence[LayerCost]
    until: float
    runs: PatchedRuns | None = None
    layers: dict[str, InFloat] = field(default_factory=dict)
    together: list[InFloat] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole = squared_error(output_errors(self.reference, self.target).values())
        self.layers = {
            cost.name: InFloat(cost.name, cost.op_type, cost.sqnr_db, _estimated(cost))
            for cost in self.candidates
        }
        self._longest = 0.0

    def measure(self) -> None:
        """Measure the layers alone, then the best ones together."""
        if not self.whole:
            return
        half = time.monotonic() + (self.until - time.monotonic()) / 2
        for name in list(self.layers):
            if time.monotonic() + self._longest > half:
                break
            self._alone(name)
        best = [layer for layer in self._ranked() if (layer.measured or 0.0) >= _WORTH]
        for count in range(1, min(_MOST, len(best)) + 1):
            try:
                together = best[0].measured if count == 1 else self._share(best[:count])
            except _NotRun:
                break  # each of them ran alone: what they are together stays unknown
            if together is None:
                break
            self.together.append(msgspec.structs.replace(best[count - 1], together=together))
            if together >= _ENOUGH:
                break

    def chosen(self) -> list[InFloat]:
        """The layers to leave in float: those that were measured together, up to the last that
        brought something; without a measurement those whose estimates add up to enough.
        """
        if self.runs is not None:
            gains = [layer.together or 0.0 for layer in self.together]
            best = max(range(len(gains)), key=gains.__getitem__, default=-1)
            return self.together[: best + 1]
        chosen: list[InFloat] = []
        for layer in self._ranked():
            if (layer.estimated or 0.0) < _WORTH or len(chosen) == _MOST:
                break
            chosen.append(layer)
            if sum(each.estimated or 0.0 for each in chosen) >= _ENOUGH:
                break
        return chosen

    def _ranked(self) -> list[InFloat]:
        def share(layer: InFloat) -> float:
            return (layer.estimated if layer.measured is None else layer.measured) or 0.0

        return sorted(self.layers.values(), key=share, reverse=True)

    def _alone(self, name: str) -> None:
        layer = self.layers[name]
        try:
            share = self._share([layer])
            self.layers[name] = msgspec.structs.replace(layer, measured=share)
        except _NotRun as why:
            self.layers[name] = msgspec.structs.replace(layer, why_not=str(why))

    def _share(self, layers: Sequence[InFloat]) -> float | None:
        """The share of the squared error that is gone with these layers in float; None where no
        time is left. Raises _NotRun.
        """
        runs = self.runs
        began = time.monotonic()
        if runs is None or not self.whole or began + self._longest > self.until:
            return None
        names = ", ".join(layer.name for layer in layers)
        runs.tell(f"{names} in float (run {runs.count + 1})")
        points = tuple(glob.escape(n) for layer in layers for n in layer.name.split("+"))
        options = {"recompute": True, "programs": False, "max_depth": 0}
        path = runs.capture(f"in-float-{runs.count}", points, **options)
        run = open_run(str(path))
        refused = [note.text for note in run.notes if note.kind == "patch-refused"]
        square = squared_error(output_errors(self.reference, run).values())
        runs.drop(path)
        self._longest = max(self._longest, time.monotonic() - began)
        done = {note.scope for note in run.notes if note.kind == "patch"}
        if not all(done & set(layer.name.split("+")) for layer in layers):
            raise _NotRun(refused[0] if refused else "no call of it was brought to float")
        if square is None:
            raise _NotRun("the outputs of that run cannot be compared with the reference's")
        return 1 - square / self.whole


class _NotRun(Exception):
    """Why a layer was not measured in float."""


# What a layer's numbers say about how it could be quantised better.

_CLIPPED = 1e-3
_UNUSED = 0.5
_ROWS = 8.0
_OUTLIER = 20.0


def _cure(name: str, result: Comparison, trials: _Trials) -> str:
    """What may quantise a layer better, with the figure that says so; "" where nothing shows."""
    cost = next(c for c in result.layer_costs if c.name == name)
    names = {name, *name.split("+")}
    schemes = " ".join(d.what for d in result.declared if names & set(d.names))
    if cost.saturated >= _CLIPPED:
        return (
            f"calibrate on more data, or clip less: {100 * cost.saturated:.2g} % of its results "
            "lie beyond the largest code"
        )
    if cost.range_used is not None and cost.range_used < _UNUSED:
        return (
            f"calibrate on data like this: its results use {100 * cost.range_used:.2g} % of the "
            "range of the codes"
        )
    run = trials.reference
    for call in run.calls:
        if call.scope in names and any(call.slots("param")):
            return _cure_of_numbers(run, call, schemes)
    return ""


def _cure_of_numbers(run: Run, call: Call, schemes: str) -> str:
    """What the elements of the float layer say."""
    try:
        weights = (run.array(ref.record) for ref in call.slots("param"))
        weight = next((w for w in weights if w.ndim >= 2), None)
        data = [run.array(ref.record) for ref in call.slots("input")][:1]
    except ElementsMissing:
        return ""
    if data and "activations" in schemes and data[0].ndim >= 2:
        axis = 1 if data[0].ndim == 4 else data[0].ndim - 1
        channels = _largest(data[0], axis)
        ratio, place = _above_median(channels)
        if ratio > _OUTLIER:
            return (
                f"smooth its input (SmoothQuant, AWQ): channel {place} reaches {ratio:.3g} times "
                "the median channel"
            )
    if weight is None:
        return ""
    rows = _largest(weight, 0)
    ratio, place = _above_median(rows)
    if "per tensor" in schemes.partition("activations")[0] and ratio > _ROWS:
        return f"one scale a channel: row {place} reaches {ratio:.3g} times the median row"
    ratios = [_above_median(np.abs(row.astype(np.float64)).ravel())[0] for row in weight]
    place = int(np.argmax(ratios))
    if ratios[place] > _OUTLIER:
        return (
            f"one scale for groups of a row: a weight of row {place} is {ratios[place]:.3g} times "
            "the row's median weight"
        )
    return ""


def _largest(array: Any, axis: int) -> Any:
    rest = tuple(k for k in range(array.ndim) if k != axis)
    return np.abs(array.astype(np.float64)).max(axis=rest, initial=0.0)


def _above_median(sizes: Any) -> tuple[float, int]:
    """(the largest over the median, its place); (0, 0) without a median."""
    median = float(np.median(sizes)) if sizes.size else 0.0
    place = int(sizes.argmax()) if sizes.size else 0
    return (float(sizes[place]) / median, place) if median > 0 else (0.0, 0)


# The choice in the words of quantisers.


def _tool_of(target: Run) -> str:
    """The quantiser of most models that run as the target does."""
    kinds = {call.op_type for call in target.calls if call.parent == -1}
    if EngineModel.ONNX_RUNTIME in kinds:
        return "onnxruntime"
    return "nncf" if EngineModel.OPENVINO in kinds else "torchao"


def _named_as(
    layers: Sequence[str], nodes: Mapping[str, Any] | None, tool: str, notes: list[str]
) -> list[str]:
    """The names of layers as a quantiser is given them: of an ONNX graph those of nodes."""
    if tool not in _NAMES_NODES:
        return list(layers)
    if nodes is None:
        notes.append(
            "names are those of values, since the float model's file is not known: give it with "
            "--model FILE.onnx"
        )
        return list(layers)
    names: list[str] = []
    for layer in layers:
        node = _node_of(layer, nodes)
        if node is None:
            notes.append(f"the float model's file has no node {layer}")
            continue
        names.append(node.name)
        if tool == "onnxruntime" and node.op_type == "Gemm":
            names.append(f"{node.name}_MatMul")  # what quantize_dynamic makes of it first
    return names


def _file_of(run: Run) -> Path | None:
    """The model file of a run, where its command names it and its bytes are those that ran."""
    from whence.instrument.engines.files import facts_of_file

    for note in run.notes:
        if note.kind != "settings":
            continue
        facts = json.loads(note.text)
        places = [w for w in run.info.command if Path(w).name == facts.get("model")]
        for word in (*places, str(facts.get("model"))):
            file = Path(run.info.cwd or ".") / word
            if file.is_file() and facts_of_file(str(file)).get("model_hash") == facts["model_hash"]:
                return file
    return None


def _node_of(layer: str, nodes: Mapping[str, Any]) -> Any | None:
    return next((nodes[scope] for scope in layer.split("+") if scope in nodes), None)


def _with_measured(
    cost: LayerCost, trials: _Trials, chosen: Collection[str], nodes: Mapping[str, Any]
) -> LayerCost:
    layer, node = trials.layers.get(cost.name), _node_of(cost.name, nodes)
    return msgspec.structs.replace(
        cost,
        measured=cost.measured if layer is None or layer.measured is None else layer.measured,
        left_in_float=cost.name in chosen,
        node=cost.node if node is None else node.name,
    )


def _nodes_of(reference: Run, model: AnyPath | None) -> dict[str, Any] | None:
    """The nodes of the float model's file by scope, as captures name them; None where the file is
    not known.
    """
    file = Path(os.fspath(model)) if model is not None else _file_of(reference)
    if file is None:
        return None
    from whence.frameworks.onnx_names import scope_of
    from whence.readers.encodings import onnx_model
    from whence.store.shards import map_file

    graph = onnx_model.parse(map_file(str(file)).data).graph
    return {scope_of(node.outputs[0]): node for node in graph.nodes if node.outputs}


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(json.dumps(name, ensure_ascii=False) for name in names)


def _torchao(names: Sequence[str]) -> str:
    return (
        f"left_in_float = {{{_quoted(names)}}}\n"
        "quantize_(\n"
        "    model,\n"
        "    config,\n"
        "    filter_fn=lambda module, name: isinstance(module, torch.nn.Linear)\n"
        "    and name not in left_in_float,\n"
        ")"
    )


TOOLS: dict[str, Callable[[Sequence[str]], str]] = {
    "onnxruntime": lambda names: f"nodes_to_exclude=[{_quoted(names)}]",
    "nncf": lambda names: f"ignored_scope=nncf.IgnoredScope(names=[{_quoted(names)}])",
    "torchao": _torchao,
    "compressed-tensors": lambda names: f"ignore: [{_quoted(names)}]",
    "modelopt": lambda names: "\n".join(
        f'config["quant_cfg"].append({{"quantizer_name": {json.dumps(f"{name}.*")}, '
        '"enable": False})'
        for name in names
    ),
    "msmodelslim": lambda names: f"exclude: [{_quoted(names)}]",
}
"""Quantisers -> the lines that leave layers, by name, in float."""
