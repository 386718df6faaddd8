"""The self-check: a program is used only after it reproduced its own recorded outputs from its own
recorded inputs.

Bitwise, or within 1 ulp with the reason noted. A value the recording baked in survives this on the
call it was recorded from; it is found by checking the same program on further recorded calls, with
other activations.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import align, dtypes, judge
from whence.comparison.replays import optimizer_steps
from whence.comparison.replays.tied_choices import settled
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Call, Program, Run, marks
from whence.records.marks import Mark
from whence.records.program import GRADIENTS, OPTIMIZER_STEP

_ORDERED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded inputs and outputs of a call's program, by slot. records: of the outputs."""

    call: Call
    arrays: Mapping[str, Array]
    strides: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, Array]
    records: Mapping[str, int]


def reproduces(loaded: Any, recording: Recording, run: Run) -> str:
    """Why the program must not be used for the call, "" if it reproduces the recording.

    It is tried as it is, then with as many threads as the capture had, then on torch's own kernels.
    A recording from another machine, or of a call that ran in several pieces, may differ by
    rounding.
    """
    arrays, strides, outputs = recording.arrays, recording.strides, recording.outputs
    why = check(loaded, arrays, arrays, outputs, strides)
    if not why:
        return ""
    threads = _recorded_threads(run)
    if threads > 1:
        # Sums that are split over threads round differently.
        with Threads(threads):
            why = check(loaded, arrays, arrays, outputs, strides)
    if why:
        from whence.replay.stepwise import without_onednn

        with without_onednn():
            why = check(loaded, arrays, arrays, outputs, strides) and why
    elsewhere = (
        "recorded on another machine or device"
        if _is_from_elsewhere(run, recording)
        else _other_pieces(recording.call, loaded.program)
    )
    if why and elsewhere and rounding_score(loaded, recording) <= 1:
        loaded.check_note = f"replay: {elsewhere}, reproduced within its own rounding"
        return ""
    return why


def rounding_score(loaded: Any, recording: Recording) -> float:
    """The error of the recording against its program, as a multiple of what rounding explains; inf
    if it is not known.
    """
    arrays, outputs = recording.arrays, recording.outputs
    run = functools.partial(
        loaded.run, arrays, arrays, strides=recording.strides, outputs=list(outputs)
    )
    try:
        wide, working = run(working="float64"), run(working="recorded")
    except ReplayRefused:
        return np.inf
    if any(wide[slot].shape != output.shape for slot, output in outputs.items()):
        return np.inf
    errors: Mapping[str, judge.ReplayError] = {
        slot: judge.local(output, wide[slot], working[slot]) for slot, output in outputs.items()
    }
    with contextlib.suppress(ReplayRefused):
        errors = settled(loaded, outputs, run, "float64", errors)
    score = max((error.score for error in errors.values()), default=np.inf)
    if score <= 1:
        return score
    # Each output by the replay that explains it: moments by betas in float32, steps by either; what
    # other kernels write out, as a logistic function to a rounding of 1, by that.
    with contextlib.suppress(ReplayRefused):
        replays = optimizer_steps.in_float32(loaded.program, arrays, "float64", "recorded")
        wide, working = replays or (wide, run(working="recorded", stepwise=True))
        score = max(
            min(errors[slot].score, judge.local(output, wide[slot], working[slot]).score)
            for slot, output in outputs.items()
        )
    return score


def check(
    loaded: Any,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array],
    outputs: Mapping[str, Array],
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Why the program must not be used, "" when it reproduces `outputs` from `inputs` and `params`
    (all as recorded, by slot).

    Outputs that were not kept (missing from the mapping) are not compared; with none at all the
    program is refused. Within 1 ulp but not bitwise: "" and `loaded.check_note` says where.
    """
    loaded.check_note = ""
    compared = [slot for slot, _ in loaded.program.outputs if slot in outputs]
    if not compared:
        return "none of its recorded outputs were kept"
    try:
        replayed = loaded.run(inputs, params, working="recorded", strides=strides, outputs=compared)
    except ReplayRefused as refused:
        return str(refused)
    for slot in compared:
        expected, actual = outputs[slot], replayed[slot]
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            return (
                f"{slot}: replay gives {actual.dtype} {actual.shape}, the recording has "
                f"{expected.dtype} {expected.shape}"
            )
        distance = ulps(expected, actual)
        if distance > 1:
            far = "a NaN or an exact value differs" if distance == np.inf else f"{distance:.0f} ulp"
            return f"{slot}: replay does not reproduce the recording ({far})"
        if distance:
            loaded.check_note = f"{slot}: replay reproduces the recording within 1 ulp, not bitwise"
    return ""


def ulps(a: Array, b: Array) -> float:
    """The largest distance in units in the last place; 0 when bitwise equal, inf where one is NaN
    or an exact dtype differs.

    a, b: same shape and dtype. NaNs are equal whatever their bits; +0 and -0 are 1 apart at most.
    """
    kind = dtypes.of(a)
    if a.size == 0:
        return 0.0
    x, y = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if np.array_equal(x.view(np.uint8), y.view(np.uint8)):
        return 0.0
    if kind.kind == "complex":
        part = np.float32 if kind.bits == 64 else np.float64
        return ulps(x.view(part), y.view(part))
    if kind.kind != "float":
        return float("inf")
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    if not np.array_equal(nan_x, nan_y):
        return float("inf")
    keep = ~nan_x
    i, j = (_order(v[keep], kind.itemsize) for v in (x, y))
    if i.size == 0:
        return 0.0
    # Unsigned, since the distance from -max to max does not fit into int64; wrapping around gives
    # the right magnitude.
    return float(np.max(np.maximum(i, j).view(np.uint64) - np.minimum(i, j).view(np.uint64)))


def _order(values: Array, itemsize: int) -> npt.NDArray[np.int64]:
    """Floating-point values as integers in the same order, neighbours one apart."""
    bits = values.view(_ORDERED[itemsize]).astype(np.int64)
    low = np.int64(-(1 << (8 * itemsize - 1)))
    return np.where(bits < 0, low - bits, bits).astype(np.int64)


def _recorded_threads(run: Run) -> int:
    counts = [s.get("threads") for s in align.settings_of(run).values()]
    return max((n for n in counts if isinstance(n, int)), default=1)


def _is_from_elsewhere(run: Run, recording: Recording) -> bool:
    """Whether it was recorded with another version of torch, or on another device."""
    import torch

    settings = align.settings_of(run).values()
    versions = {str(s.get("torch", torch.__version__)) for s in settings}
    return bool(versions - {str(torch.__version__)}) or any(
        run.records[record].device not in ("", "cpu") for record in recording.records.values()
    )


def _other_pieces(call: Call, program: Program) -> str:
    """Why a call may round differently from its program, "" if it may not: it was compiled (which
    fuses), joined from several calls, ran on other kernels, or is a backward pass or an optimiser's
    step.
    """
    if marks.has_mark(program, Mark.TRANSLATED):
        return marks.mark(Mark.TRANSLATED, marks.mark_value(program, Mark.TRANSLATED))
    if marks.is_gathered(call):
        return marks.mark(Mark.JOINED, "several calls")
    if program.operations and program.operations[-1].name == GRADIENTS:
        return "a backward pass, which may add its gradients in another order"
    if program.operations and program.operations[-1].name == OPTIMIZER_STEP:
        return "a step of an optimizer, whose fused kernels round in other places"
    return "recorded from compiled code" if marks.is_hidden_by_compiler(call) else ""


class Threads:
    """A context with this number of torch's intra-op threads. One is fastest for many small
    operators, since several threads spin while they wait for each other.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._torch = sys.modules.get("torch") or _torch()
        self._outside = self._torch.get_num_threads() if self._torch is not None else 0
        if self._torch is not None and self._outside != self._count:
            self._torch.set_num_threads(self._count)

    def __exit__(self, *exc: object) -> None:
        if self._torch is not None and self._outside != self._count:
            self._torch.set_num_threads(self._outside)


def _torch() -> Any:
    """torch, or None if it is not installed: then every replay is refused with that reason."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None
