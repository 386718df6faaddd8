"""Calls of a Paddle run as what its program says of them: attributes, and a program of aten
operators that can be replayed.

Made of the operator's attributes and operands (`replay/paddle_translation.py`), not recorded; like
every program it is believed only where it reproduces what the run holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from whence.errors import ReplayRefused
from whence.frameworks.paddle_programs import DRAWS, FOLDED
from whence.readers import ForeignRun
from whence.records import Call, Over, Program, Ref, Run, in_order
from whence.records.marks import Mark, mark_values, taken_parameters
from whence.records.slots import input_name, is_input, param_name, split_slot
from whence.replay.paddle_translation import Operand, program

_Maker = tuple[int, int]  # (operator of the program, which of its outputs)


def with_programs(run: Run, saved: Run, operator_of: Mapping[int, int]) -> Run:
    """A run whose calls have programs, as far as their operators are known and what they read was
    captured.

    saved: the program that ran. operator_of: calls of the run -> calls of the program.
    """
    programs: dict[str, Program] = dict(run.programs)
    changed: dict[int, Call] = {}
    variables = _Variables(saved)
    steps: defaultdict[tuple[int, str, int, int], list[Call]] = defaultdict(list)
    for call in in_order(c for c in run.calls if c.id in operator_of):
        steps[call.rank, call.root, call.step, call.micro].append(call)
    for calls in steps.values():
        variables.begin_step()
        unseen: dict[int, Call] = {}
        for call in calls:
            operator = saved.calls[operator_of[call.id]]
            lists = dict.fromkeys(
                maker[0]
                for r in operator.slots("input")
                if (maker := variables.makers.get(r.record)) is not None and maker[0] in unseen
            )
            if lists:  # no hook shows a list of tensors: what it was made of counts as read
                records = [r.record for maker in lists for r in unseen[maker].slots("input")]
                members = [Ref(f"input.of_{i}", n, "identity") for i, n in enumerate(records)]
                changed[call.id] = call = replace(call, refs=(*members, *call.refs))
            if not call.slots("output"):
                unseen[operator.id] = call
            if not call.program and operator.leaf:
                try:
                    program = _program(run, call, operator, variables)
                    programs[program.id] = program
                    changed[call.id] = _with_program(call, program)
                except ReplayRefused as refused:
                    changed[call.id] = replace(call, no_program=str(refused))
            variables.add(call, operator)
    out = Over(run, [changed.get(c.id, c) for c in run.calls])
    out.programs = programs
    return like(run, out)


def like(run: Run, changed: Over) -> Run:
    """A changed form of a run, from the same reader where that is a foreign one."""
    return ForeignRun(changed, run.reader) if isinstance(run, ForeignRun) else changed


def _with_program(call: Call, program: Program) -> Call:
    """The call with its program. A number of the program that a hook shows as a tensor is an
    attribute, and no parameter of it.
    """
    refs = tuple(
        r
        for r in call.refs
        if not param_name(r.slot).startswith(FOLDED) or r.slot in program.params
    )
    return replace(call, program=program.id, no_program="", refs=refs)


class _Variables:
    """Variables of a program, and the records of a run that they are in one step. names: by record
    of the program. makers: by record of the program, (operator, which of its outputs).
    """

    def __init__(self, saved: Run) -> None:
        self.saved, self.names = saved, _names(saved)
        self.makers = {
            ref.record: (call.id, i)
            for call in saved.calls
            if call.leaf
            for i, ref in enumerate(call.slots("output"))
        }
        self._twins = _twins(saved, self.makers)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the records of the step before."""
        self._produced: dict[_Maker, int] = {}
        self._computed: dict[_Maker, int] = {}

    def add(self, call: Call, operator: Call) -> None:
        """Take in the outputs of a call of the run."""
        slots = [i for i, r in enumerate(operator.slots("output")) if r.record in self.names]
        outputs = call.slots("output")
        if len(outputs) == 1:
            slots = [self.position(call, operator)]
        for i, ref in zip(slots, outputs):
            maker = operator.id, i
            self._produced[maker] = ref.record
            self._computed.setdefault(self._twins.get(maker, maker), ref.record)

    def record(self, variable: int) -> int | None:
        """The record that a variable is in this step: of its own maker, else of the first operator
        that computes the same.
        """
        maker = self.makers.get(variable)
        if maker is None:
            return None
        return self._produced.get(maker, self._computed.get(self._twins[maker]))

    def position(self, call: Call, operator: Call) -> int:
        """Which output of the operator a call with one tensor holds: that of its name, else the
        first.
        """
        outputs = enumerate(operator.slots("output"))
        return next((i for i, ref in outputs if self.names.get(ref.record) == call.scope), 0)


def _twins(saved: Run, makers: Mapping[int, _Maker]) -> dict[_Maker, _Maker]:
    """For each result of a program the first that is the same of the same operands: Paddle computes
    it once.
    """
    twins: dict[_Maker, _Maker] = {}
    first: dict[tuple[Any, ...], int] = {}
    for call in saved.calls:
        if not call.leaf:
            continue
        reads = [(r.slot, r.record) for kind in ("input", "param") for r in call.slots(kind)]
        operands = tuple((slot, twins.get(makers[v]) if v in makers else v) for slot, v in reads)
        outputs = len(call.slots("output"))
        key = (call.op_type, msgspec.json.encode(call.arguments, order="sorted"), operands, outputs)
        first_call = call.id if call.op_type in DRAWS else first.setdefault(key, call.id)
        twins.update(((call.id, i), (first_call, i)) for i in range(outputs))
    return twins


def _names(saved: Run) -> dict[int, str]:
    """Records of a program -> the names of their variables, "" where they have none (PIR)."""
    out: dict[int, str] = {}
    for call in saved.calls:
        outputs = call.slots("output")
        variables = [call.scope, *mark_values(call, Mark.WRITES)]
        named = len(variables) == len(outputs)
        for i, ref in enumerate(outputs):
            out[ref.record] = variables[i] if named else ""
    return out


def _program(run: Run, call: Call, operator: Call, variables: _Variables) -> Program:
    """The program of one call. Raises ReplayRefused with the reason."""
    reads = {r.slot: r.record for kind in ("input", "param") for r in call.slots(kind)}
    operands = _operands(run, operator, reads, variables)
    wanted = [split_slot(ref.slot)[1] for ref in operator.slots("input")]
    wanted += [slot for _, slot in taken_parameters(operator)]
    lost = [slot for slot in dict.fromkeys(wanted) if slot not in operands]
    if len(lost) == 1:
        # Folded constants, what the model was given, what a change of layout lies before: the one
        # that is left over.
        used = {operand.slot for operand in operands.values()}
        candidates = [slot for slot in reads if slot not in used]
        if len(candidates) == 1:
            operands[lost.pop()] = _operand(run, candidates[0], reads[candidates[0]])
    if lost:
        raise ReplayRefused(f"what {operator.op_type} reads as {lost[0]} was not captured")
    refs, declared = call.slots("output"), operator.slots("output")
    pairs = list(zip(declared, refs)) if len(refs) == len(declared) else []
    if len(refs) == 1 and declared:
        pairs = [(declared[variables.position(call, operator)], refs[0])]
    if not pairs:
        raise ReplayRefused(
            "none of its outputs was captured"
            if not refs
            else f"which of its {len(refs)} tensors is which is not known"
        )
    outputs = {split_slot(a.slot)[1]: b.slot for a, b in pairs}
    shapes = {split_slot(a.slot)[1]: run.records[b.record].shape for a, b in pairs}
    return program(operator.op_type, operator.arguments, operands, outputs, shapes)


def _operands(
    run: Run, operator: Call, reads: Mapping[str, int], variables: _Variables
) -> dict[str, Operand]:
    """By slot of the operator the tensor that the call read there, as far as that can be told."""
    operands: dict[str, Operand] = {}
    inputs = operator.slots("input")
    in_order = [slot for slot in reads if is_input(slot)]
    numbered = all(input_name(s).isdigit() for s in in_order) and len(in_order) == len(inputs)
    for place, ref in enumerate(inputs):
        record = variables.record(ref.record)
        slot = next((s for s, r in reads.items() if r == record), "") if record is not None else ""
        named = f"input.{variables.names.get(ref.record, '')}"
        slot = slot or (named if named in reads else in_order[place] if numbered else "")
        # oneDNN hands on what it laid out anew as a tensor of its own, in another's place
        if slot and _could_be(run, reads[slot], variables.saved, ref.record):
            operands[split_slot(ref.slot)[1]] = _operand(run, slot, reads[slot])
    for name, operator_slot in taken_parameters(operator):
        slot = next((s for s in (f"param.{name}", f"input.{name}") if s in reads), "")
        if slot:
            operands[operator_slot] = _operand(run, slot, reads[slot])
    return operands


def _could_be(run: Run, record: int, saved: Run, variable: int) -> bool:
    """Can a tensor of a run be this variable of its program, as far as dtype and extents say?"""
    actual, declared = run.records[record], saved.records[variable]
    same_shape = len(actual.shape) == len(declared.shape) and all(
        n in (-1, m) for m, n in zip(actual.shape, declared.shape)
    )
    return same_shape and declared.dtype in ("", actual.dtype)


def _operand(run: Run, slot: str, record: int) -> Operand:
    tensor = run.records[record]
    return Operand(slot, tensor.dtype, tensor.shape)
