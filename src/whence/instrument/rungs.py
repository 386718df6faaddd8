"""The rungs of each ladder: the stages to which a program is compiled, or its graph optimised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whence.errors import UsageError

RUNGS: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "eager",
        "dynamo",
        "aot_eager",
        "aot_eager_decomp_partition",
        "inductor_dynamic_off",
        "inductor_caches_off",
        "inductor",
        "rounded",
    ),
    "onnxruntime": ("off", "basic", "extended", "layout", "all"),
}
"""Framework -> its rungs. No name belongs to two frameworks."""


def every_rung() -> tuple[str, ...]:
    """The rungs of all frameworks."""
    return tuple(rung for rungs in RUNGS.values() for rung in rungs)


def framework_of(rung: str, disabled_optimizers: Sequence[str]) -> str:
    """The framework whose programs these options change, "" for none. Raises UsageError for options
    of two frameworks.
    """
    if not disabled_optimizers:
        return next((name for name, rungs in RUNGS.items() if rung in rungs), "")
    if rung in RUNGS["torch"]:
        raise UsageError(
            f"disabled_optimizers are of ONNX Runtime, and rung {rung} is of torch: leave one out"
        )
    return "onnxruntime"
