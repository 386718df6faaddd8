"""Replays an optimiser's step with its hyper-parameters in float32, as a fused kernel holds them.

A fused kernel takes betas as float32 (torch 2.11 on CUDA). Then 1 - 0.999 has a relative error of
1.3e-5, and so have the moments that it multiplies; the bias correction uses rounded powers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from whence import dtypes, judge
from whence.dtypes import Array
from whence.records import Operation, Program
from whence.records.program import OPTIMIZER_STEP

_PARAMETER = "output.param"
_BETAS = "betas"
_HALF_ULP = 2.0**-25  # of a power just below 1, in float32


def in_float32(
    program: Program, inputs: Mapping[str, Array], wide: str, working: str
) -> tuple[dict[str, Array], dict[str, Array]] | None:
    """(wide outputs, outputs with rounding) of a step with betas in float32, by slot; None if the
    program is not a step with betas. inputs: of the step, by slot. wide, working: dtypes of the two
    replays, as for `Loaded.run`. Raises ReplayRefused.
    """
    from whence.replay.validation import load

    single = _with_single_betas(program)
    if single is None:
        return None
    loaded = load(single)
    exact, rounded = (loaded.run(inputs, {}, working=dtype) for dtype in (wide, working))
    updated = exact.get(_PARAMETER)
    if updated is not None:
        update = np.subtract(updated, inputs["input.param"], dtype=np.float64)
        strayed = updated + np.multiply(update, _bias_rounding(single, inputs))
        rounded[_PARAMETER] = judge.rounded(strayed, dtypes.of(rounded[_PARAMETER]).name)
    return exact, rounded


def _with_single_betas(program: Program) -> Program | None:
    if not any(map(_takes_betas, program.operations)):
        return None
    operations = tuple(
        msgspec.structs.replace(operation, kwargs=_rounded(operation.kwargs))
        if _takes_betas(operation)
        else operation
        for operation in program.operations
    )
    return msgspec.structs.replace(program, id=f"{program.id}+float32", operations=operations)


def _bias_rounding(program: Program, inputs: Mapping[str, Array]) -> float:
    """The relative error of an update that rounding powers of betas to float32 may cause:
    1 - beta ** step divides the first moment, and its square root the second.
    """
    step = float(inputs["input.step"].reshape(-1)[0]) + 1 if "input.step" in inputs else 1.0
    operation = next(filter(_takes_betas, program.operations))
    corrections = [1 - float(beta) ** step for beta in operation.kwargs[_BETAS]]
    return _HALF_ULP * float(sum(w / c for w, c in zip((1.0, 0.5), corrections) if c > 0))


def _takes_betas(operation: Operation) -> bool:
    betas = operation.kwargs.get(_BETAS)
    return operation.name == OPTIMIZER_STEP and isinstance(betas, (list, tuple))


def _rounded(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**kwargs, _BETAS: [float(np.float32(beta)) for beta in kwargs[_BETAS]]}
