"""Which operator of a program each call of a run is, where names do not tell: by types and
parameters, block by block, in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from whence.comparison.programs.program_diff import blocks
from whence.frameworks.paddle_programs import FOLDED
from whence.readers import TAKES
from whence.records import Call


def taking(call: Call) -> tuple[str, frozenset[str]]:
    """An operator by its type and the parameters it takes."""
    told = {
        note.removeprefix(TAKES).rpartition(" as ")[0]
        for note in call.notes
        if note.startswith(TAKES)
    }
    return call.op_type, frozenset(told | {ref.slot[6:] for ref in call.slots("param")})


def in_order(calls: Sequence[Call], made: Sequence[Call]) -> dict[int, int]:
    """Calls of one step of a run -> operators of its program, both in order of execution.

    Outside of blocks along a longest common subsequence of types; in the block of a loop round and
    round; of a branch, the block whose operators have the attributes that the run saw.
    """
    mine, others = _by_block(calls), _by_block(made)
    if len(mine) == 1:  # a log has no blocks
        others = defaultdict(list, {None: list(made)})
    out: dict[int, int] = {}
    todo = [(mine[None], others[None], False)]
    while todo:
        ran, held, inside = todo.pop()
        pairs = _round(ran, held) if inside else _along(ran, held)
        out.update((a.id, b.id) for a, b in pairs)
        todo += [
            (mine[a.id], others[b.id], True) for a, b in pairs if a.id in mine and b.id in others
        ]
    return out


def _by_block(calls: Sequence[Call]) -> defaultdict[int | None, list[Call]]:
    ids = {call.id for call in calls}
    out: defaultdict[int | None, list[Call]] = defaultdict(list)
    for call in calls:
        out[call.parent if call.parent in ids else None].append(call)
    return out


def _along(calls: Sequence[Call], made: Sequence[Call]) -> list[tuple[Call, Call]]:
    out: list[tuple[Call, Call]] = []
    for a0, a1, b0, b1, equal in blocks([c.op_type for c in calls], [c.op_type for c in made]):
        if equal:
            out += zip(calls[a0:a1], made[b0:b1], strict=True)
    return out


def _round(calls: Sequence[Call], made: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Each call and the next operator like it, beginning again behind the last. Of several alike,
    when nothing tells them apart, none.
    """
    named = {name for op in made for name in taking(op)[1]}
    out: list[tuple[Call, Call]] = []
    at = 0
    for call in calls:
        around = [*range(at, len(made)), *range(at)]
        found = next((i for i in around if _alike(call, made[i], named)), None)
        if found is not None:
            out.append((call, made[found]))
            at = found + 1
    return out


def _alike(call: Call, operator: Call, named: Set[str]) -> bool:
    (kind, taken), (other, wanted) = taking(call), taking(operator)
    read = {name for name in taken if name in named and not name.startswith(FOLDED)}
    return (
        kind == other
        and read == wanted
        and (not call.arguments or call.arguments == operator.arguments)
    )
