"""Calls whose tensors are all equal in both runs, and which a comparison does not look at one by
one: what an answer says of all calls counts them in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from whence.dtypes import Array
from whence.records import Call, Record
from whence.records.slots import slot_kind


def _no_elements(_call: Call, _step: int, _slot: str) -> Array | None:
    return None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """How many calls of the reference, each with an equal partner, are not among those compared.

    programs: of these, how many have a program. identical: how many have a tensor, or made one
    between their children. roots: how many each root has. repeats: how many innermost ones of each
    form (`operator_form`) gave results. target_elements: what a call of the target holds in a slot
    in another step, None where that step's call is not left out; raises ElementsMissing.
    """

    calls: int = 0
    programs: int = 0
    identical: int = 0
    roots: Mapping[str, int] = field(default_factory=dict)
    repeats: Callable[[], Counter[Hashable]] = Counter
    target_elements: Callable[[Call, int, str], Array | None] = _no_elements


NONE_LEFT_OUT = LeftOut()


def operator_form(call: Call, partner: Call, records: Sequence[Record]) -> Hashable:
    """What calls that one kernel computes have in common: operators, and kinds of all that they
    read and leave. records: of the run of `call`.
    """
    described = [(slot_kind(r.slot), records[r.record]) for r in call.refs]
    return (
        call.op_type,
        partner.op_type,
        tuple((kind, r.dtype, r.shape) for kind, r in described),
    )
