"""Adds the data flow of a run's program to its log, which does not show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from msgspec.structs import replace

from whence.align.calls.sequence_alignment import blocks
from whence.comparison.programs.operator_pairing import operators, plain
from whence.comparison.programs.paddle_attributes import like, with_programs
from whence.errors import UsageError
from whence.frameworks.paddle_programs import DRAWS, FOLDED
from whence.readers import UNTOLD
from whence.records import Call, Note, Over, Ref, Run
from whence.records.marks import Mark, mark_values, taken_parameters
from whence.records.slots import is_input, param_name

PROGRAM = "program"
PLACED = "its operator is known by its place in the program, not by a name"
"""The note of a call whose inputs a program tells that may be another operator's: they are right
where replay reproduces the recording.
"""
RUNS = "operator of the program: "
"""Before the operator, in the note of a call."""
_LOG = "paddle log"
_LEAST = 0.5  # of a log's tensors that a program must write to be its program


def operators_of_calls(run: Run, program: Run, root: str | None = None) -> dict[int, int]:
    """By call of a run, the operator of its program. root: only calls of this root."""
    program_operators = _unfolded(run, operators(program))
    writers: defaultdict[str, list[int]] = defaultdict(list)
    for call in program_operators:
        for name in _written(call):
            writers[name].append(call.id)
    ran = [c for c in operators(run) if c.kind == "operator" and root in (None, c.root)]
    named = sum(c.scope in writers for c in ran)
    out: dict[int, int] = {}
    for calls in _by_step(ran).values():
        if named >= _LEAST * len(ran):
            out |= {c.id: w[c.occurrence % len(w)] for c in calls if (w := writers.get(c.scope))}
        else:
            out |= in_order(calls, program_operators)
    return out


def _written(operator: Call) -> tuple[str, ...]:
    """The names of the variables that an operator of a program writes."""
    return (operator.scope, *mark_values(operator, Mark.WRITES))


def _unfolded(run: Run, program_operators: list[Call]) -> list[Call]:
    """The operators of a program. If the run shows that Paddle folded constants, operators that
    depend on constants and parameters alone are left out.
    """
    if not any(param_name(ref.slot).startswith(FOLDED) for call in run.calls for ref in call.refs):
        return program_operators
    ran = {taking(call) for call in run.calls}
    constant: set[int] = set()
    out = []
    for call in program_operators:
        is_kept = call.op_type in DRAWS or (bool(taking(call)[1]) and taking(call) in ran)
        if call.leaf and not is_kept and all(ref.record in constant for ref in call.slots("input")):
            constant.update(ref.record for ref in call.slots("output"))
        else:
            out.append(call)
    return out


def folded_weights(run: Run, program: Run, root: str | None) -> dict[str, str]:
    """By parameter that no operator of a run reads itself, since Paddle folded it into constants
    before the program ran, the hashes of these constants and its place among what they are made of.
    """
    every_operator = operators(program)
    running = {c.id for c in _unfolded(run, every_operator)}
    behind: dict[int, list[str]] = {}  # by record of the program, the parameters it is made of
    for operator in every_operator:
        if operator.id not in running:
            names = [param_name(r.slot) for r in operator.slots("param")]
            names += (n for r in operator.slots("input") for n in behind.get(r.record, ()))
            behind.update((r.record, names) for r in operator.slots("output"))
    hashes: defaultdict[str, set[str]] = defaultdict(set)
    for call_id, operator_id in operators_of_calls(run, program, root).items():
        constants = {
            run.records[r.record].hash
            for r in run.calls[call_id].slots("param")
            if param_name(r.slot).startswith(FOLDED)
        }
        for ref in program.calls[operator_id].slots("input"):
            for place, name in enumerate(behind.get(ref.record, ())):
                hashes[name].update(f"{constant} {place}" for constant in constants if constant)
    return {name: ", ".join(sorted(parts)) for name, parts in hashes.items() if parts}


def _by_step(calls: Iterable[Call]) -> dict[tuple[int, str, int, int], list[Call]]:
    out: dict[tuple[int, str, int, int], list[Call]] = {}
    for call in calls:
        out.setdefault((call.rank, call.root, call.step, call.micro), []).append(call)
    return out


def with_data_flow(run: Run, program: Run, *, direct: bool = False) -> Run:
    """The log with the data flow of its program: each call gets the operator's attributes and, as
    far as they were printed, its inputs.

    A call is matched by name (the n-th writer of a name is its n-th print in a step), or by the
    order of operators if names are numbers of the executor. If an input was not printed, the inputs
    of its operator take its place, unless `direct`. Raises UsageError if less than half matches.
    """
    program_operators = operators(program)
    maker = {ref.record: call.id for call in program_operators for ref in call.slots("output")}
    logged = [c for c in operators(run) if c.kind == "operator" and c.leaf]
    where = operators_of_calls(run, program)
    changed: dict[int, Call] = {}
    for calls in _by_step(logged).values():
        matches = {c.id: where[c.id] for c in calls if c.id in where}
        seen_only = run.info.kind == _LOG
        changed |= _linked(calls, matches, program, maker, seen_only=seen_only, direct=direct)
    linked = len(changed)
    if linked < _LEAST * len(logged):
        raise UsageError(
            f"{program.path} is not the program of {run.path}: it writes {linked} of its "
            f"{len(logged)} tensors; "
            "give the program that was run (after its passes: Config.enable_save_optim_model)"
        )
    for call in logged:
        if call.id not in changed and not call.slots("input"):
            changed[call.id] = replace(call, notes=(*call.notes, UNTOLD))
    note = Note("program", f"data flow from {program.path}: {linked} of {len(logged)} tensors")
    out = Over(run, [changed.get(c.id, c) for c in run.calls])
    out.notes = [*run.notes, note]
    return with_programs(like(run, out), program, where)


def _linked(
    calls: Sequence[Call],
    operator_of: Mapping[int, int],
    program: Run,
    maker: Mapping[int, int],
    *,
    seen_only: bool,
    direct: bool,
) -> dict[int, Call]:
    """The calls with the outputs of others as inputs. operator_of: the operator of each call;
    maker: by record of the program, the operator that writes it.

    seen_only: the run saw what operators wrote, not what they read (a log).
    """
    printed: dict[int, int] = {}  # operator -> the record of the log, as the step goes on
    out: dict[int, Call] = {}
    for call in calls:
        if call.id not in operator_of:
            continue
        operator = program.calls[operator_of[call.id]]
        sources = _sources(operator, program, maker, printed, direct)
        is_inner = operator.parent != -1 and program.calls[operator.parent].parent != -1
        is_known = sources is not None and not is_inner
        refs = call.refs
        if seen_only and is_known and sources:  # a capture saw what was read
            inputs = [Ref(f"input.{name}", n, PROGRAM) for name, n in sources.items()]
            refs = (*inputs, *(r for r in call.refs if not is_input(r.slot)))
        notes = [*call.notes, f"{RUNS}{operator.scope}"]
        if seen_only and call.scope not in _written(operator):
            notes.append(PLACED)
        if not is_known and not call.slots("input"):
            notes.append(UNTOLD)
        out[call.id] = replace(
            call,
            refs=refs,
            arguments=operator.arguments,
            source=operator.source or call.source,
            notes=tuple(notes),
        )
        outputs = call.slots("output")
        if outputs:
            printed[operator.id] = outputs[0].record
    return out


def _sources(
    operator: Call,
    program: Run,
    maker: Mapping[int, int],
    printed: Mapping[int, int],
    direct: bool,
) -> dict[str, int] | None:
    """By name, the records of the log from which an operator reads, directly or through operators
    that were not printed. None if it reads from a loop or branch (the values are computed inside)
    or, with `direct`, from an operator that was not printed.
    """
    sources: dict[str, int] = {}
    visited, todo = {operator.id}, [r.record for r in reversed(operator.slots("input"))]
    while todo:
        number = maker.get(todo.pop())
        if number is None or number in visited:
            continue
        visited.add(number)
        producer = program.calls[number]
        if number in printed:
            sources[producer.scope] = printed[number]
        elif producer.leaf and not direct:
            todo += [r.record for r in reversed(producer.slots("input"))]
        else:
            return None
    return sources


def with_agreeing_inputs(reference: Run, target: Run) -> tuple[Run, Run]:
    """Both logs, without the inputs of paired calls that read different tensors, since one log
    skips (fused) operators that the other shows.

    Inputs of such a call cannot be compared; it counts as depending on everything before it.
    """
    if {reference.info.kind, target.info.kind} != {_LOG}:
        return reference, target
    reference_calls, target_calls = _by_operator(reference), _by_operator(target)
    out = []
    for run, own_calls, partner_calls in (
        (reference, reference_calls, target_calls),
        (target, target_calls, reference_calls),
    ):
        cut = {
            call.id: replace(
                call,
                refs=tuple(r for r in call.refs if not is_input(r.slot)),
                notes=(*call.notes, UNTOLD),
            )
            for key, call in own_calls.items()
            if key in partner_calls
            and {r.slot for r in call.slots("input")}
            != {r.slot for r in partner_calls[key].slots("input")}
        }
        out.append(like(run, Over(run, [cut.get(c.id, c) for c in run.calls])) if cut else run)
    return out[0], out[1]


def _by_operator(run: Run) -> dict[Any, Call]:
    """The calls of a log by a key without names of variables: the program's operator (else the
    name) and the number of its execution.
    """
    out: dict[Any, Call] = {}
    for call in operators(run):
        name = next((note for note in call.notes if note.startswith(RUNS)), call.scope)
        key, time = (call.rank, call.root, call.step, call.micro, name), 0
        while (*key, time) in out:
            time += 1
        out[*key, time] = call
    return out


# Matches calls of a run with operators of its program if names do not tell: by types and
# parameters, block by block, in order.


def taking(call: Call) -> tuple[str, frozenset[str]]:
    """(type, names of parameters) of an operator."""
    names = {name for name, _ in taken_parameters(call)}
    return call.op_type, frozenset(names | {param_name(r.slot) for r in call.slots("param")})


def in_order(calls: Sequence[Call], operators: Sequence[Call]) -> dict[int, int]:
    """By call of one step of a run, the operator of its program. Both are in execution order.

    Outside of blocks, they are matched along a longest common subsequence of types. Inside a loop,
    the operators are repeated cyclically; of a branch, the block with the recorded attributes
    counts.
    """
    call_blocks, operator_blocks = _by_block(calls), _by_block(operators)
    if len(call_blocks) == 1:  # a log has no blocks
        operator_blocks = defaultdict(list, {None: list(operators)})
    out: dict[int, int] = {}
    todo = [(call_blocks[None], operator_blocks[None], False)]
    while todo:
        ran, block, inside = todo.pop()
        pairs = _round(ran, block) if inside else _along(ran, block)
        out.update((a.id, b.id) for a, b in pairs)
        todo += [
            (call_blocks[a.id], operator_blocks[b.id], True)
            for a, b in pairs
            if a.id in call_blocks and b.id in operator_blocks
        ]
    return out


def _by_block(calls: Sequence[Call]) -> defaultdict[int | None, list[Call]]:
    ids = {call.id for call in calls}
    out: defaultdict[int | None, list[Call]] = defaultdict(list)
    for call in calls:
        out[call.parent if call.parent in ids else None].append(call)
    return out


def _along(calls: Sequence[Call], operators: Sequence[Call]) -> list[tuple[Call, Call]]:
    out: list[tuple[Call, Call]] = []
    types = [c.op_type for c in calls]
    ran = set(types)
    # a legacy program that the executor of PIR runs: types have its names
    declared = [t if (t := c.op_type) in ran else plain(t) for c in operators]
    for a0, a1, b0, b1, equal in blocks(types, declared):
        if equal:
            out += zip(calls[a0:a1], operators[b0:b1], strict=True)
    return out


def _round(calls: Sequence[Call], operators: Sequence[Call]) -> list[tuple[Call, Call]]:
    """(call, operator) with the next matching operator for each call, cyclically; calls without a
    match are left out.
    """
    named = {name for op in operators for name in taking(op)[1]}
    out: list[tuple[Call, Call]] = []
    start = 0
    for call in calls:
        around = [*range(start, len(operators)), *range(start)]
        position = next((i for i in around if _alike(call, operators[i], named)), None)
        if position is not None:
            out.append((call, operators[position]))
            start = position + 1
    return out


def _alike(call: Call, operator: Call, named: Set[str]) -> bool:
    (kind, params), (operator_kind, operator_params) = taking(call), taking(operator)
    read = {name for name in params if name in named and not name.startswith(FOLDED)}
    return (
        kind == operator_kind
        and read == operator_params
        and (not call.arguments or call.arguments == operator.arguments)
    )
