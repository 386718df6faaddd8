"""Calls of a Paddle run as what its program says of them: attributes, and a program of aten
operators that can be replayed.

Made of the operator's attributes and operands (`replay/paddle_translation.py`), not recorded; like
every program it is believed only where it reproduces what the run holds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from whence.errors import ReplayRefused
from whence.frameworks.paddle_programs import DRAWS
from whence.readers import TAKES, ForeignRun
from whence.records import Call, Over, Program, Ref, Run
from whence.replay.paddle_translation import Operand, program

_Maker = tuple[int, int]  # (operator of the program, which of its outputs)


def with_programs(run: Run, written: Run, found: Mapping[int, int]) -> Run:
    """A run whose calls have programs, as far as their operators are known and what they read was
    captured.

    written: the program that ran. found: calls of the run -> calls of the program.
    """
    makers = {
        ref.record: (call.id, i)
        for call in written.calls
        if call.leaf
        for i, ref in enumerate(call.slots("output"))
    }
    names, twins = _names(written), _twins(written, makers)
    programs: dict[str, Program] = dict(run.programs)
    changed: dict[int, Call] = {}
    steps: defaultdict[tuple[int, str, int, int], list[Call]] = defaultdict(list)
    for call in sorted((c for c in run.calls if c.id in found), key=lambda c: c.order):
        steps[call.rank, call.root, call.step, call.micro].append(call)
    for calls in steps.values():
        made: dict[_Maker, int] = {}
        computed: dict[_Maker, int] = {}
        unseen: dict[int, Call] = {}
        for call in calls:
            operator = written.calls[found[call.id]]
            lists = [
                makers[r.record][0]
                for r in operator.slots("input")
                if r.record in makers and makers[r.record][0] in unseen
            ]
            if lists:  # no hook shows a list of tensors: what it was made of counts as read
                more = [
                    r.record for maker in dict.fromkeys(lists) for r in unseen[maker].slots("input")
                ]
                refs = (
                    *(Ref(f"input.of_{i}", record, "identity") for i, record in enumerate(more)),
                    *call.refs,
                )
                changed[call.id] = call = msgspec.structs.replace(call, refs=refs)
            if not call.slots("output"):
                unseen[operator.id] = call
            if not call.program and operator.leaf:
                try:
                    one = _program(
                        run,
                        call,
                        written,
                        operator,
                        partial(_seen, makers, twins, made, computed),
                        names,
                    )
                    programs[one.id] = one
                    # A number of the program that a hook shows as a tensor is an attribute.
                    refs = tuple(
                        r
                        for r in call.refs
                        if not r.slot.startswith("param.constant_folding@") or r.slot in one.params
                    )
                    changed[call.id] = msgspec.structs.replace(
                        call, program=one.id, no_program="", refs=refs
                    )
                except ReplayRefused as refused:
                    changed[call.id] = msgspec.structs.replace(call, no_program=str(refused))
            slots = [i for i, ref in enumerate(operator.slots("output")) if ref.record in names]
            left = call.slots("output")
            at = _which(call, operator, written, names) if len(left) == 1 else None
            for i, ref in zip(slots if at is None else [at], left):
                made[operator.id, i] = ref.record
                computed.setdefault(twins.get((operator.id, i), (operator.id, i)), ref.record)
    out = Over(run, [changed.get(c.id, c) for c in run.calls])
    out.programs = programs
    return ForeignRun(out, run.reader) if isinstance(run, ForeignRun) else out


def _seen(
    makers: Mapping[int, _Maker],
    twins: Mapping[_Maker, _Maker],
    made: Mapping[_Maker, int],
    computed: Mapping[_Maker, int],
    variable: int,
) -> int | None:
    """The record that a variable of the program is; made: by maker; computed: by the first of those
    that compute the same.
    """
    maker = makers.get(variable)
    return made.get(maker, computed.get(twins[maker])) if maker is not None else None


def _twins(written: Run, makers: Mapping[int, _Maker]) -> dict[_Maker, _Maker]:
    """For each result of a program the first that is the same of the same operands: Paddle computes
    it once.
    """
    twins: dict[_Maker, _Maker] = {}
    first: dict[tuple[Any, ...], int] = {}
    for call in written.calls:
        if not call.leaf:
            continue
        reads = [(r.slot, r.record) for kind in ("input", "param") for r in call.slots(kind)]
        told = tuple((slot, twins.get(makers[v]) if v in makers else v) for slot, v in reads)
        outputs = len(call.slots("output"))
        key = (call.op_type, msgspec.json.encode(call.arguments, order="sorted"), told, outputs)
        found = call.id if call.op_type in DRAWS else first.setdefault(key, call.id)
        twins.update(((call.id, i), (found, i)) for i in range(outputs))
    return twins


def _names(written: Run) -> dict[int, str]:
    """Records of a program -> the names of their variables, "" where they have none (PIR)."""
    out: dict[int, str] = {}
    for call in written.calls:
        outputs = call.slots("output")
        told = [
            call.scope,
            *(note.removeprefix("writes ") for note in call.notes if note.startswith("writes ")),
        ]
        named = len(told) == len(outputs)
        for i, ref in enumerate(outputs):
            out[ref.record] = told[i] if named else ""
    return out


def _which(call: Call, operator: Call, written: Run, names: Mapping[int, str]) -> int:
    """Which output of the operator a call with one tensor holds: that of its name, else the
    first.
    """
    outputs = operator.slots("output")
    return next((i for i, ref in enumerate(outputs) if names.get(ref.record) == call.scope), 0)


def _program(
    run: Run,
    call: Call,
    written: Run,
    operator: Call,
    seen: Callable[[int], int | None],
    names: Mapping[int, str],
) -> Program:
    """The program of one call. seen: a variable -> its record of this step. Raises ReplayRefused
    with the reason.
    """
    reads = {r.slot: r.record for kind in ("input", "param") for r in call.slots(kind)}
    operands: dict[str, Operand] = {}
    inputs = operator.slots("input")
    in_order = [slot for slot in reads if slot.startswith("input.")]
    numbered = all(slot[6:].isdigit() for slot in in_order) and len(in_order) == len(inputs)
    for place, ref in enumerate(inputs):
        record = seen(ref.record)
        slot = next((s for s, r in reads.items() if r == record), "") if record is not None else ""
        slot = slot or next((s for s in (f"input.{names.get(ref.record, '')}",) if s in reads), "")
        if not slot and numbered:
            slot = in_order[place]
        if slot:
            operands[ref.slot[6:]] = _operand(run, slot, reads[slot])
    for name, own in _parameters(operator):
        slot = next((s for s in (f"param.{name}", f"input.{name}") if s in reads), "")
        if slot:
            operands[own] = _operand(run, slot, reads[slot])
    wanted = {ref.slot[6:]: ref.record for ref in inputs} | {
        own: -1 for _, own in _parameters(operator)
    }
    lost = [own for own in wanted if own not in operands]
    if len(lost) == 1:
        # Folded constants, what the model was given, what a change of layout lies before: the one
        # that is left over.
        used = {operand.slot for operand in operands.values()}
        left = [
            s for s in reads if s not in used and _could_be(run, reads[s], written, wanted[lost[0]])
        ]
        if len(left) == 1:
            operands[lost.pop()] = _operand(run, left[0], reads[left[0]])
    missing = lost[0] if lost else ""
    if missing:
        raise ReplayRefused(f"what {operator.op_type} reads as {missing} was not captured")
    left_, outputs, shapes = call.slots("output"), {}, {}
    for i, ref in enumerate(operator.slots("output")):
        at = _which(call, operator, written, names) if len(left_) == 1 else i
        mine = (
            left_[0]
            if len(left_) == 1 and i == at
            else left_[i]
            if len(left_) == len(operator.slots("output"))
            else None
        )
        if mine is not None:
            outputs[ref.slot[7:]], shapes[ref.slot[7:]] = mine.slot, run.records[mine.record].shape
    if not outputs:
        raise ReplayRefused(
            "none of its outputs was captured"
            if not left_
            else f"which of its {len(left_)} tensors is which is not known"
        )
    return program(operator.op_type, operator.arguments, operands, outputs, shapes)


def _could_be(run: Run, record: int, written: Run, variable: int) -> bool:
    """Can a tensor of a run be this variable of its program, as far as dtype and extents say?"""
    one = run.records[record]
    if variable < 0:
        return True
    two = written.records[variable]
    same = len(one.shape) == len(two.shape) and all(
        n in (-1, m) for m, n in zip(one.shape, two.shape)
    )
    return same and two.dtype in ("", one.dtype)


def _operand(run: Run, slot: str, record: int) -> Operand:
    found = run.records[record]
    return Operand(slot, found.dtype, found.shape)


def _parameters(operator: Call) -> Sequence[tuple[str, str]]:
    """(name, slot of the operator) of the parameters that an operator takes."""
    told = [
        note.removeprefix(TAKES).rpartition(" as ")
        for note in operator.notes
        if note.startswith(TAKES)
    ]
    return [(name, slot) for name, _, slot in told]


def refusals(run: Run) -> str:
    """How many calls have no program and the most frequent reasons, in words; "" when all have
    one.
    """
    leaves = [c for c in run.calls if c.leaf and c.kind == "operator"]
    why = Counter(c.no_program for c in leaves if not c.program)
    if not why:
        return ""
    said = "; ".join(f"{text} ({count})" for text, count in why.most_common(3))
    return f"{sum(why.values())} of {len(leaves)} operators cannot be replayed: {said}"
