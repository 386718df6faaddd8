"""Weights of two programs, compared by hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from whence.errors import ElementsMissing, UnreadableRun
from whence.frameworks import host
from whence.readers.opening import open_run
from whence.records import Call, Run
from whence.records.slots import param_name


def weights_beside(program: Run) -> dict[str, str]:
    """Hashes of the parameters of a program, from the .pdiparams beside it; {} where there is none
    that can be read.
    """
    file = Path(program.path).with_suffix(".pdiparams")
    if not file.is_file():
        return {}
    try:
        run = open_run(str(file))
    except UnreadableRun:
        return {}
    out = {}
    for call in run.calls:
        for ref in call.slots("param"):
            name = ".".join(part for part in (call.scope, param_name(ref.slot)) if part)
            try:
                array = np.ascontiguousarray(run.array(ref.record))
                out[name] = host.digest(array.reshape(-1).view(np.uint8)).hex()
            except ElementsMissing:
                continue
    return out


def weights_seen(run: Run, root: str = "") -> dict[str, str]:
    """Hashes of the parameters that a run saw, of one root or of all, by name."""
    calls = (c for c in run.calls if root in ("", c.root))
    return {
        param_name(r.slot): run.records[r.record].hash
        for c in calls
        for r in c.slots("param")
        if run.records[r.record].hash
    }


def compare_weights(
    pairs: Sequence[tuple[Call, Call]],
    reference_hashes: Mapping[str, str],
    target_hashes: Mapping[str, str],
) -> tuple[int, int, list[tuple[Call, str]]]:
    """(how many were compared, of how many, (call of the reference, name) of those that differ):
    parameters that partners take in one place.
    """
    compared: dict[str, bool] = {}
    differences: list[tuple[Call, str]] = []

    def compare(call: Call, name: str, target_name: str) -> None:
        compared[name] = name in reference_hashes and target_name in target_hashes
        if compared[name] and reference_hashes[name] != target_hashes[target_name]:
            differences.append((call, name))

    for a, b in pairs:
        for ref, target_ref in zip(a.slots("param"), b.slots("param")):
            name, target_name = param_name(ref.slot), param_name(target_ref.slot)
            if name not in compared and (a.op_type == b.op_type or name == target_name):
                compare(a, name, target_name)
    for a, _ in pairs:  # of a fused operator the parameters stand elsewhere, under their names
        for name in (param_name(r.slot) for r in a.slots("param")):
            if not compared.get(name, False) and name in reference_hashes and name in target_hashes:
                compare(a, name, name)
    return sum(compared.values()), len(compared), differences
