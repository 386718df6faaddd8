"""A Paddle program, whatever file it was read from: one list of operators in order of execution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

CALL_STACK = "op_callstack"
BOOKKEEPING = frozenset({
    "op_role", "op_role_var", "op_namescope", "op_device", "with_quant_attr", CALL_STACK,
    "struct_name", "stop_gradient", "use_mkldnn", "mkldnn_data_type", "onednn_data_type",
})  # fmt: skip
MAX_DEPTH = 64  # of blocks in blocks
MAX_TEXT = 200  # characters of one attribute's text that are kept


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor of a program. shape: -1 where it is only known when the program runs."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    persistable: bool = False


@dataclass(slots=True)
class Operator:
    """One operator. inputs, outputs: (slot, variable). attributes: without bookkeeping. inside:
    operators of its blocks.

    scope: of PIR the layer it was written in. onednn: whether a pass gives it to a kernel of
    oneDNN.
    """

    op_type: str
    inputs: list[tuple[str, Variable]] = field(default_factory=list)
    outputs: list[tuple[str, Variable]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    scope: str = ""
    inside: list[Operator] = field(default_factory=list)
    onednn: bool = False


@dataclass(slots=True)
class ProgramDescription:
    """A program: its operators without feeds and fetches, and its parameters by name. fetched: of
    PIR, variable by fetch name.
    """

    operators: list[Operator]
    parameters: dict[str, Variable]
    fetched: dict[str, str] = field(default_factory=dict)


def shortest(value: float) -> float:
    """Returns a float32 as its shortest decimal."""
    return float(str(np.float32(value)))
