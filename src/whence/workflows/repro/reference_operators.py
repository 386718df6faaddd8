"""Runs the reference's operators of a finding on the target's tensors and keeps a trace."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whence import judge
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Call, Program
from whence.records.program import OPTIMIZER_STEP
from whence.records.slots import is_of_child, is_param, split_child, split_slot
from whence.results import SlotPair
from whence.workflows.repro.operator_calls import gathered_program, tensor_number
from whence.workflows.repro.subject import NothingToRun, Subject

if TYPE_CHECKING:
    from whence.replay.export.trace import Trace
    from whence.replay.flatten import Flat, Node


@dataclass(frozen=True)
class ReferenceTrace:
    """The results of the reference's operators.

    slots: the judged outputs. results: their numbers in the trace. recorded: by these numbers, the
    tensors that the side at fault recorded.
    """

    trace: Trace
    slots: Sequence[str]
    results: Sequence[int]
    recorded: Mapping[int, Any]


def reference_trace(subject: Subject) -> ReferenceTrace:
    """Run the operators. Raises ReplayRefused, ElementsMissing."""
    from whence.frameworks.torch_arrays import from_host
    from whence.replay.export.trace import Trace

    flat, loaded, judged = _program(subject)
    inputs = _inputs(subject, flat.origins, flat.program)
    _check_state(flat.program, inputs)
    loaded = _loaded(subject, flat) if loaded is None else loaded
    pairs = {
        slot: pair
        for slot in judged
        if slot in dict(flat.program.outputs)
        and (pair := subject.paired.slot(subject.pair, slot)) is not None
    }
    recorded = {slot: subject.recorded(pair) for slot, pair in pairs.items()}
    if not recorded:
        raise ReplayRefused("the target has no tensor for what the reference's program makes")
    working = (
        "recorded"
        if subject.is_of_reference
        else subject.replayer.sides.working_dtypes(inputs.pairs, pairs, recorded)[1]
    )
    trace = Trace(copies=loaded.writes)
    loaded.run(
        inputs.arrays,
        inputs.arrays,
        working=working,
        strides=inputs.strides,
        outputs=list(recorded),
        convert=False,
        watch=trace,
    )
    numbers = {
        slot: n
        for slot in recorded
        if (n := tensor_number(trace, loaded.program, slot)) is not None
    }
    if not trace.steps or not numbers:
        raise NothingToRun(
            "the reference only hands on what it is given there, so a script has nothing to run; "
            "look for what changes it in the target: a hook on the tensor, or code that writes it"
        )
    return ReferenceTrace(
        trace,
        list(recorded),
        list(dict.fromkeys(numbers.values())),
        {n: from_host(recorded[slot]) for slot, n in numbers.items()},
    )


# ---- the program


def _program(subject: Subject) -> tuple[Flat, Any, list[str]]:
    """(program with the origins of its tensors, the loaded program or None, judged slots)."""
    from whence.replay.flatten import Flat, flatten

    call = subject.reference_call
    flat = gathered_program(
        subject.reference_source, call, lambda inner: _trusted_program(subject, inner)
    )
    if flat is not None:
        return flat, None, subject.judged_slots(flat.program)
    if (loaded := _recorded_from_model(subject)) is not None:
        program: Program = loaded.program
        origins = {slot: (call.id, slot) for slot in (*program.inputs, *program.params)}
        flat = Flat(program, origins, (call.id,) * len(program.operations))
        return flat, loaded, subject.judged_slots(program)
    if call.kind == "region" and not call.program:
        raise NothingToRun(
            f"it lies between calls ({subject.finding.sentence.partition(':')[0]}), where no "
            "operator was recorded; look at the code between them, or record both runs again with "
            "whence run --level op"
        )
    judged = subject.judged_slots(_trusted_program(subject, call))
    return flatten(call.id, lambda number: _node(subject, number, judged)), None, judged


def _loaded(subject: Subject, flat: Flat) -> Any:
    from whence.replay.validation import load

    if flat.program.id == subject.reference_call.program:
        return subject.reference_source.load(subject.reference_call)
    constants = [subject.paired.reference.array(c) for c in flat.program.constants]
    return load(flat.program, constants, allow=subject.reference_source.allow)


def _trusted_program(subject: Subject, call: Call) -> Program:
    """The program of a call of the reference.

    A program that does not reproduce its own recording is accepted only when the fault is in the
    reference.
    """
    source = subject.reference_source
    try:
        loaded = source.trusted(call)
    except ReplayRefused:
        if not subject.is_of_reference:
            raise
        loaded = source.load(call)
    program: Program = loaded.program
    if not program.operations and source.borrows(call):
        raise ReplayRefused(
            f"the model is used for {call.module_name}, and its operators are not known"
        )
    return program


def _recorded_from_model(subject: Subject) -> Any:
    """The program that the user's model runs in place of the call, recorded now; None when the call
    has its own program.
    """
    from whence.readers.opening import open_run
    from whence.replay.validation import load
    from whence.workflows.capture.capture import capture

    source, call = subject.reference_source, subject.reference_call
    if source.model is None:
        return None
    borrowed = source.trusted(call)
    if not source.borrows(call):
        return None
    if source.children(call.id):
        raise ReplayRefused(
            f"the model is used for {call.module_name}, which calls others; only a "
            "module without is recorded again"
        )
    arrays, strides = source.arrays(
        source.records(call, (*borrowed.program.inputs, *borrowed.program.params))
    )
    with tempfile.TemporaryDirectory(prefix="whence-repro-") as place:
        with (
            contextlib.redirect_stderr(io.StringIO()),
            capture(borrowed.module, place, force=True),
        ):
            borrowed.run(arrays, arrays, strides=strides)
        run = open_run(place)
        root = next((c for c in run.calls if c.parent < 0), None)
        program = run.programs.get(root.program) if root is not None else None
        if program is None:
            raise ReplayRefused(
                f"the model's {borrowed.kind} has no program either: "
                f"{root.no_program if root else 'it was not called'}"
            )
        return load(program, [run.array(c).copy() for c in program.constants], allow=source.allow)


def _node(subject: Subject, number: int, judged: Sequence[str]) -> Node:
    """A node for `flatten`; unpaired children that its outputs need are inlined."""
    from whence.replay.flatten import Node

    source, call = subject.reference_source, subject.paired.calls[number]
    program = _trusted_program(subject, call)
    children = source.children(number)
    unpaired = {k for k, kid in enumerate(children) if kid not in subject.paired.pair_of}
    hidden: set[int] = set()
    loaded = source.load(call)
    outputs = [slot for slot, _ in program.outputs]
    todo = (
        [s for s in judged if s in outputs]
        if call is subject.reference_call
        else [s for s in outputs if not is_of_child(s)]
    )
    while todo:
        for need in loaded.needs(todo.pop()):
            k = split_child(need)[0] if is_of_child(need) else -1
            if k in unpaired and k not in hidden:
                hidden.add(k)
                todo += [s for s in outputs if s.startswith(f"{k}:")]
    run = subject.paired.reference
    shapes = {r.slot: run.records[r.record].shape for r in call.refs}
    for k, kid in enumerate(children):
        shapes |= {f"{k}:{r.slot}": run.records[r.record].shape for r in run.calls[kid].refs}
    return Node(number, program, children, frozenset(hidden), shapes)


# ---- its tensors


def _check_state(program: Program, inputs: _Inputs) -> None:
    """Raise NothingToRun for an optimiser step that lacks its starting values."""
    missing = [slot for slot in program.inputs if slot not in inputs.arrays]
    if missing and any(operation.name == OPTIMIZER_STEP for operation in program.operations):
        names = ", ".join(split_slot(slot)[1] for slot in missing)
        raise NothingToRun(
            f"the reference's optimiser keeps {names} of the parameter and the target's does not, "
            "so there is no state to step from; look at how both optimisers are made"
        )


@dataclass(frozen=True)
class _Inputs:
    """For each slot: elements, strides when recorded, and the pair that they come from."""

    arrays: dict[str, Array]
    strides: dict[str, tuple[int, ...]]
    pairs: dict[str, SlotPair]


def _inputs(subject: Subject, origins: Mapping[str, tuple[int, str]], program: Program) -> _Inputs:
    """The program's inputs: the target's tensors, or reference tensors that a correct target has
    too.
    """
    from whence.comparison.verdicts.parameters import Parameters

    paired, swapped = subject.paired, subject.is_of_reference
    inputs = _Inputs({}, {}, {})
    run = paired.reference if swapped else paired.target
    equal = Parameters(paired).given(subject.reference_call, paired.slots[subject.pair])
    slots = (*program.inputs, *program.params)
    pairs = {slot: subject.pair_of(*origins[slot], slot) for slot in slots}
    for slot in slots:
        number, own_slot = origins[slot]
        pair = pairs[slot]
        if pair is None:
            beside = [p for s, p in pairs.items() if p and origins[s][0] == number]
            likely = [*beside, *(p for p in pairs.values() if p)]
            array = _unpaired(subject, paired.calls[number], own_slot, likely)
            if array is not None:
                inputs.arrays[slot] = array
            continue
        record = pair.reference_record if swapped else pair.target_record
        if is_param(own_slot) and not swapped:
            inputs.arrays[slot] = subject.replayer.sides.parameters.expected(
                pair, equal.get(own_slot, True)
            )
        else:
            inputs.arrays[slot] = run.array(record)
            inputs.pairs[slot] = pair
        if run.records[record].stride and run.records[record].shape == inputs.arrays[slot].shape:
            inputs.strides[slot] = run.records[record].stride
    return inputs


def _unpaired(subject: Subject, call: Call, slot: str, likely: Sequence[SlotPair]) -> Array | None:
    """The reference's tensor of an unpaired slot, if it is valid for the target, in the dtype that
    a correct target would use.

    likely: pairs that indicate that dtype, the nearest first.
    """
    source = subject.reference_source
    record = source.record(call, slot)
    if record is None:
        return None
    dtype = source.run.records[record].dtype
    if not subject.is_of_reference:
        likely = [*likely, *subject.paired.slots[subject.pair].values()]
        dtype = _targets_dtype(subject, dtype, likely)
    array = source.run.array(record) if is_param(slot) else source.lent(record, dtype)
    return None if array is None else judge.rounded(array, dtype)


def _targets_dtype(subject: Subject, dtype: str, likely: Sequence[SlotPair]) -> str:
    """The target's dtype for what has `dtype` in the reference; `dtype` itself when no
    pair tells.
    """
    reference, target = subject.paired.reference.records, subject.paired.target.records
    for pair in likely:
        if reference[pair.reference_record].dtype == dtype:
            return target[pair.target_record].dtype
    return dtype
