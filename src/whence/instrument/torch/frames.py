"""What torch listeners keep of one call in progress: of a module, or of operators outside any
module.
"""

from __future__ import annotations

from typing import Any

from whence.frameworks.torch_trees import ObjectSnapshot
from whence.instrument.call_frames import Frame
from whence.instrument.torch.module_info import ModuleInfo, ModuleRoot
from whence.instrument.torch.program_recorder import Recorder
from whence.instrument.torch.random_draws import DrawListener
from whence.records import Call, Placement


class ModuleFrame(Frame):
    """One call of a module.

    inputs: (slot, tensor, version, record) of its arguments. forms: (slot, (dtype, shape, stride))
    of those. objects: (slot, object) of the arguments that hold tensors. results: (slot, tensor) of
    what it returned and changed. operators: number of calls directly below it that are not modules.
    signature, family, code, recorder, reads, started, ended, held: see `program_cache`. draws:
    number of tensors of random numbers and of pool rows so far. first_node, input_edges, called:
    see `training.listener`.
    """

    __slots__ = (
        "arguments", "called", "code", "draws", "ended", "family", "first_node", "forms", "held",
        "info", "input_edges", "inputs", "micro", "module", "note", "objects", "op_type",
        "operators", "phase", "placements", "reads", "recorder", "results", "signature", "started",
        "training",
    )  # fmt: skip
    micro: int
    held: dict[tuple[Any, ...], tuple[str, Any]] | None
    parent: ModuleFrame | None
    phase: str
    op = ""
    reads: list[str]
    root: ModuleRoot
    started: float

    def __init__(
        self, module: Any, info: ModuleInfo, order: int, parent: ModuleFrame | None
    ) -> None:
        Frame.__init__(self, info.scope, order, parent)
        self.module, self.info, self.op_type = module, info, info.op_type
        self.training: bool = module.training
        if parent is not None:
            self.micro, self.phase = parent.micro, parent.phase
        self.note, self.operators = "", 0
        self.arguments: dict[str, Any] = {}
        self.inputs: list[tuple[str, Any, int | None, Any]] = []
        self.forms: list[tuple[str, Any]] = []
        self.objects: list[tuple[str, ObjectSnapshot]] = []
        self.results: list[tuple[str, Any]] = []
        self.placements: dict[str, Placement] = {}
        self.signature: tuple[Any, ...] | None = None
        self.family: tuple[Any, ...] | None = None
        self.code: tuple[Any, ...] | None = None
        self.recorder: Recorder | DrawListener | None = None
        self.draws = 0
        self.ended, self.held = False, None
        self.first_node = -1
        self.input_edges: list[tuple[str, Any]] = []
        self.called: list[Any] = []


def call_of(frame: ModuleFrame, rank: int, program: str, no_program: str, error: str) -> Call:
    """The `Call` of a module call that has ended."""
    return Call(
        frame.order,  # id
        frame.scope,
        frame.root.name,
        frame.step,
        frame.order,
        rank,
        frame.micro,
        frame.phase,
        "",  # op
        frame.occurrence,
        "module",
        frame.info.op_type,
        frame.info.source,
        frame.parent.order if frame.parent is not None else -1,
        frame.number,
        frame.children == 0 and not frame.operators,  # leaf
        frame.training,
        tuple(frame.refs),
        frame.arguments,
        program,
        no_program,
        (frame.note,) if frame.note else (),
        error,
    )  # by position: names would take longer than all the rest of it
