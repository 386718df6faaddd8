"""One operator that a predictor runs: what hooks show of it, and what its calls have in common."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from whence.frameworks.paddle_programs import Matched, natural
from whence.instrument.call_frames import Frame
from whence.records import Ref

# operators that run others
_BLOCKS = ("while", "if", "conditional_block", "conditional_block_infer", "pylayer")


class OperatorFrame(Frame):
    """One operator in progress. inputs, params, outputs: (record, edge) by the hooks' name. listed:
    number of tensors in the list that it makes. branch: index of the block that runs, where known.
    """

    __slots__ = (
        "block", "branch", "inputs", "listed", "matched", "notes", "op", "op_type", "operator",
        "outputs", "params",
    )  # fmt: skip

    def __init__(self, op: str, op_type: str, order: int, parent: OperatorFrame | None) -> None:
        super().__init__("", order, parent)
        self.keep = True
        self.op, self.op_type, self.block = op, op_type, op_type in _BLOCKS
        self.branch: int | None = None
        self.inputs: dict[str, tuple[int, str]] = {}
        self.params: dict[str, tuple[int, str]] = {}
        self.outputs: dict[str, tuple[int, str]] = {}
        self.notes: list[str] = []
        self.listed = 0
        self.operator: Any = None
        self.matched: Matched | None = None


class CallForm(NamedTuple):
    """What calls share for which hooks showed the same names. Worked out once, since a program runs
    many times.

    operands: (hooks' name, maker of the operand where its name may be unknown) of the inputs that
    are not parameters, in order; params, outputs: (slot, hooks' name); the slot of an output is ""
    if outputs are numbered in order.
    """

    scope: str
    layer: str
    source: str
    operands: tuple[tuple[str, Any], ...]
    params: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    arguments: dict[str, Any]
    notes: tuple[str, ...]


def form_of(
    frame: OperatorFrame, fetches: Collection[str], plain: Callable[[str], str]
) -> CallForm:
    """The form of a call. Operands are in the order of the program where that is known; parameters
    are sorted by it, then by name.

    fetches: names of the predictor's outputs. plain: strips from a name what changes between
    processes.
    """
    op, matched = frame.operator, frame.matched
    makers = dict(matched.makers) if matched is not None else {}
    operands = (
        [(name, makers.get(k)) for k, name in enumerate(matched.inputs)]
        if matched is not None
        else []
    )
    placed = {name for name, _ in operands}
    operands += [
        (name, None) for name in sorted((n for n in frame.inputs if n not in placed), key=natural)
    ]
    outputs = sorted(
        frame.outputs, key=lambda name: (name in frame.params, name in fetches, natural(name))
    )
    names = [plain(name) for name in outputs]
    ordered = [v.name for _, v in op.inputs] if op is not None else []
    used: Counter[str] = Counter()
    params = []
    for name in sorted(
        frame.params, key=lambda n: (ordered.index(n) if n in ordered else len(ordered), n)
    ):
        own_name = plain(name)
        if frame.block and own_name != name:
            continue  # constants have no name that lasts; they stand where they are read inside
        params.append((f"param.{own_name}{used[own_name] or ''}", name))
        used[own_name] += 1
    return CallForm(
        names[0] if names else frame.op_type,
        str(getattr(op, "scope", "") or ""),
        (op.source or op.scope) if op is not None else "",
        tuple(operands),
        tuple(params),
        tuple(
            (f"mutated.{own_name}" if name in frame.params else "", name)
            for name, own_name in zip(outputs, names)
        ),
        dict(op.attributes) if op is not None else {},
        tuple(f"writes {name}" for name in names[1:]),
    )


def refs_of(
    frame: OperatorFrame, form: CallForm, earlier: Callable[[str, Any], tuple[int, str] | None]
) -> list[Ref]:
    """Refs of the operands, parameters and results of a call. Tensors that were not recorded have
    none.

    earlier: returns (record, edge) of an operand that no hook showed for this call, by name and
    maker.
    """
    refs: list[Ref] = []
    place = 0
    inputs, outputs = frame.inputs, frame.outputs
    for name, maker in form.operands:
        record_and_edge = inputs.get(name) or earlier(name, maker)
        if record_and_edge is not None and record_and_edge[0] >= 0:
            refs.append(Ref(_slot("input", place), *record_and_edge))
            place += 1
    for slot, name in form.params:
        record_and_edge = frame.params[name]
        if record_and_edge[0] >= 0:
            refs.append(Ref(slot, *record_and_edge))
    place = 0
    for slot, name in form.outputs:
        record_and_edge = outputs[name]
        if slot:
            refs.append(Ref(slot, *record_and_edge))
        elif record_and_edge[0] >= 0:
            refs.append(Ref(_slot("output", place), *record_and_edge))
            place += 1
    return refs


@functools.cache
def _slot(kind: str, place: int) -> str:
    return f"{kind}.{place}"
