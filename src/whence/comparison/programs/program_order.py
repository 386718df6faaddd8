"""Which operator of a program each call of a run is, where names do not tell: by types and
parameters, block by block, in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from whence.align.calls.sequence_alignment import blocks
from whence.frameworks.paddle_programs import FOLDED
from whence.records import Call
from whence.records.marks import taken_parameters
from whence.records.slots import param_name


def taking(call: Call) -> tuple[str, frozenset[str]]:
    """An operator by its type and the parameters it takes."""
    names = {name for name, _ in taken_parameters(call)}
    return call.op_type, frozenset(names | {param_name(r.slot) for r in call.slots("param")})


def in_order(calls: Sequence[Call], operators: Sequence[Call]) -> dict[int, int]:
    """Calls of one step of a run -> operators of its program, both in order of execution.

    Outside of blocks along a longest common subsequence of types; in the block of a loop round and
    round; of a branch, the block whose operators have the attributes that the run saw.
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
    for a0, a1, b0, b1, equal in blocks([c.op_type for c in calls], [c.op_type for c in operators]):
        if equal:
            out += zip(calls[a0:a1], operators[b0:b1], strict=True)
    return out


def _round(calls: Sequence[Call], operators: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Each call and the next operator like it, starting over behind the last; a call without an
    operator like it is left out.
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
