"""The same call in another process: what it was given there, and what it gave."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from whence.results.probe import Held, OperatorPlace, Variant
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import Judge, compared_outputs, traced, verdict
from whence.workflows.probe.torch.outputs import Outputs, same_bits
from whence.workflows.probe.torch.regions import Everything
from whence.workflows.probe.torch.subject import Subject

NAME = "in another process"
_ALL = Everything()


def write(path: Path, judge: Judge, inputs: CallInputs, returned: Outputs) -> None:
    """Leave what another process compares its own call with. Raises whatever the model raises."""
    torch.save(_kept(judge, inputs, returned), path)


def _kept(judge: Judge, inputs: CallInputs, returned: Outputs) -> dict[str, Any]:
    wide = judge.wide()
    try:
        in_float64 = wide.run(inputs) if wide is not None else None
    except Exception:  # noqa: BLE001 - a model that does not run in float64 is judged without
        in_float64 = None
    return {
        "inputs": {n: v for n, v in inputs.values.items() if isinstance(v, torch.Tensor)},
        "weights": _digest([*judge.subject.model.parameters(), *judge.subject.model.buffers()]),
        "generator": judge.subject.surroundings.torch_state,
        "returned": returned,
        "in_float64": in_float64,
        "operators": _operators(judge.subject, inputs),
    }


def _digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return sha.hexdigest()


def _operators(subject: Subject, inputs: CallInputs) -> list[tuple[str, str]]:
    """(operator and its place, digest of its results) of one run; [] where it cannot be traced."""
    try:
        trace = traced(subject, inputs)
    except Exception:  # noqa: BLE001 - what cannot be traced has no named operator
        return []
    return [
        ("\t".join((op.key[2], op.key[0], op.op_type, op.line)), _digest(op.results or []))
        for op in trace.operators
        if not op.key[2].startswith("aten.empty")
    ]


def compare(path: Path, judge: Judge, inputs: CallInputs, returned: Outputs) -> Variant:
    """What this process's call gave, against that of the process that wrote `path`."""
    other = torch.load(path, weights_only=True)
    mine = _kept(judge, inputs, returned)
    if why := _not_the_same(mine, other):
        return Variant(NAME, Held.UNKNOWN, why=why)
    far, _, compared = compared_outputs(other["returned"], returned, _ALL, None)
    if not compared:
        return Variant(NAME, Held.UNKNOWN, why="it gave outputs of other names or shapes")
    if not far.differing:
        return Variant(NAME, Held.EXACT, count=far.elements)
    in_float64, held = None, Held.UNKNOWN
    if not torch.equal(mine["generator"], other["generator"]):
        why = "random numbers begin elsewhere in each process: seed the program"
    elif mine["in_float64"] is None or other["in_float64"] is None:
        why = "the model does not run in float64"
    else:
        in_float64 = compared_outputs(other["in_float64"], mine["in_float64"], _ALL, None)[0].moved
        held, why = verdict(far.moved, in_float64, judge.unit)
    return Variant(
        NAME,
        held,
        moved=far.moved,
        ulp=far.ulp,
        in_float64=in_float64,
        differing=far.differing,
        count=far.elements,
        first=_first(mine["operators"], other["operators"]),
        why=why,
    )


def _not_the_same(mine: dict[str, Any], other: dict[str, Any]) -> str:
    names = mine["inputs"].keys() | other["inputs"].keys()
    for name in sorted(names):
        first, second = mine["inputs"].get(name), other["inputs"].get(name)
        if first is None or second is None or not same_bits(first, second):
            return f"{name} is another one in each process: seed the program, or fix its input"
    if mine["weights"] != other["weights"]:
        return "the weights are other ones in each process: seed the program, or load them"
    return ""


def _first(mine: list[Any], other: list[Any]) -> OperatorPlace | None:
    """The first operator that gives something else, where both processes run the same ones."""
    for first, second in zip(mine, other):
        if first[0] != second[0]:
            return None
        if first[1] != second[1]:
            operator, scope, op_type, line = first[0].split("\t")
            return OperatorPlace(operator.removesuffix(".default"), scope, op_type, line)
    return None
