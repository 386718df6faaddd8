"""What the recorded programs of a call tell about the reason why its output does not repeat."""

from __future__ import annotations

from typing import Any, NamedTuple

from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Program, Run
from whence.records.program import GRADIENTS, TENSOR_OPERANDS, Operation, operands

_TIMES = 8
_LONGEST = 60
_NOT_DETERMINISTIC = frozenset({
    "index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce",
    "put_", "cumsum", "histc", "bincount", "kthvalue", "median", "nanmedian",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool3d",
    "max_pool3d_with_indices", "fractional_max_pool2d", "fractional_max_pool3d",
    "max_unpool2d", "max_unpool3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "nll_loss2d", "nll_loss2d_forward", "_ctc_loss", "_embedding_bag", "grid_sampler_2d",
    "grid_sampler_3d", "repeat_interleave", "convolution", "cudnn_convolution", "bmm",
    "resize_",
})  # fmt: skip
"""Operators that torch documents, at `torch.use_deterministic_algorithms`, as nondeterministic on a
CUDA device, forward or backward.
"""
_ONLY_BACKWARD = frozenset(("gather", "index_select", "embedding", "index"))


class ChangedOperation(NamedTuple):
    """An operation that differs between two recordings of one call.

    line: where the program calls it, "" when unknown.
    """

    operator: str
    line: str
    words: str


def changed_operation(
    programs: tuple[Program, Program], runs: tuple[Run, Run]
) -> ChangedOperation | None:
    """The first operation that differs between two recordings; None when both run the same."""
    first, second = programs
    for place, (a, b) in enumerate(zip(first.operations, second.operations, strict=False)):
        words = _difference(a, b) or _other_constant(a, programs, runs)
        if words:
            return ChangedOperation(a.name, _line(first, place), words)
    lengths = len(first.operations), len(second.operations)
    if lengths[0] != lengths[1]:
        longer = first if lengths[0] > lengths[1] else second
        operation = longer.operations[min(lengths)]
        words = f"{operation.name} runs in one of the runs only"
        return ChangedOperation(operation.name, _line(longer, min(lengths)), words)
    return None


def _difference(a: Operation, b: Operation) -> str:
    if a.name != b.name:
        return f"runs {a.name} in one run and {b.name} in the other"
    pairs = [("", *pair) for pair in zip(a.args, b.args, strict=False)]
    keys = {**a.kwargs, **b.kwargs}
    pairs += [(f"{key} ", a.kwargs.get(key), b.kwargs.get(key)) for key in keys]
    for name, x, y in pairs:
        if repr(x) != repr(y):
            tensors = any(o.kind in TENSOR_OPERANDS for value in (x, y) for o in operands(value))
            if tensors:
                return f"{a.name} is given another of the tensors at hand"
            return f"{a.name} is given {name}{_short(x)} in one run and {_short(y)} in the other"
    return ""


def _other_constant(
    operation: Operation, programs: tuple[Program, Program], runs: tuple[Run, Run]
) -> str:
    for operand in operation.operands():
        if operand.kind != "const":
            continue
        a, b = (
            run.records[program.constants[operand.value]]
            for program, run in zip(programs, runs, strict=True)
        )
        if (a.dtype, a.shape, a.hash) != (b.dtype, b.shape, b.hash):
            return f"{operation.name} is given another tensor that was made outside torch"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _line(program: Program, place: int) -> str:
    return program.lines[place] if place < len(program.lines) else ""


def unrepeatable(run: Run, call: Call, slot: str) -> ChangedOperation | None:
    """The operation of a call's program that does not repeat when it runs several times on the
    recorded tensors.

    None when all operations repeat, or the program cannot be run.
    """
    from whence.comparison.replays.side import ReplaySource

    source = ReplaySource(run)
    try:
        loaded = source.load(call)
        program = loaded.program
        records = source.records(call, (*program.inputs, *program.params))
        arrays, strides = source.arrays(records)
        base = _traced(loaded, arrays, strides, slot)
        for _ in range(_TIMES - 1):
            again = _traced(loaded, arrays, strides, slot)
            for place, digest in base.items():
                if again.get(place) != digest:
                    name = program.operations[place].name
                    words = "gives other bits when it runs again on the same tensors"
                    return ChangedOperation(name, _line(program, place), words)
    except (ReplayRefused, ElementsMissing, KeyError):
        return None
    return None


def _traced(
    loaded: Any, arrays: dict[str, Array], strides: dict[str, tuple[int, ...]], slot: str
) -> dict[int, bytes]:
    results: dict[int, bytes] = {}

    def trace(place: int, array: Array) -> None:
        results[place] = array.tobytes()

    loaded.run(arrays, arrays, strides=strides, outputs=(slot,), trace=trace)
    return results


def is_own_backward(run: Run, call: Call) -> bool:
    """Whether this is a backward pass whose gradients are not the derivative of the recorded
    forward pass, as with a custom autograd function.
    """
    from whence.comparison.replays.side import ReplaySource

    if call.phase != "backward" or not call.program:
        return False
    try:
        return ReplaySource(run).confirm(call)[1] > 1
    except (ReplayRefused, ElementsMissing):
        return False


def documented(program: Program | None) -> tuple[str, ...]:
    """Operators of a program that torch documents as nondeterministic on a CUDA device."""
    if program is None:
        return ()
    has_backward = any(operation.name == GRADIENTS for operation in program.operations)
    names = _NOT_DETERMINISTIC | (_ONLY_BACKWARD if has_backward else frozenset())
    return tuple(
        dict.fromkeys(
            operation.name
            for operation in program.operations
            if operation.name.split(".")[1:2] and operation.name.split(".")[1].rstrip("_") in names
        )
    )
