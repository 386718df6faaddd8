"""Compares two programs operator by operator, without running them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whence.comparison.programs.operator_pairing import (
    FusedChains,
    constant_records,
    operators,
    pair_operators,
    plain,
    running_operators,
)
from whence.errors import ElementsMissing, UnreadableRun
from whence.frameworks import host
from whence.readers.opening import open_run
from whence.records import Call, Run, in_order
from whence.records.marks import Mark, has_mark
from whence.records.slots import param_name

_LONGEST = 60  # characters of an attribute
_SHOWN = 8  # differences that are spelt out
_ABSENT = "absent"
_ONLY_SHAPE = ("reshape", "transpose", "scale", "squeeze", "unsqueeze")
EQUAL = "the programs are equal"


class Difference(NamedTuple):
    """A difference of two programs. name: of the operator, in the reference if it has one there.
    call: its id in the reference, -1 if there is none.

    kind: "attributes", "wiring" (types, inputs, shapes), "removed", "inserted", "fused" or
    "weights". attributes: number of differing attributes. words: a clause.
    """

    name: str
    op_type: str
    call: int
    kind: str
    attributes: int
    words: str


class ProgramDiff(NamedTuple):
    """The diff of two programs: pairs of operators and differences, in the reference's order.

    compared: number of attributes compared; weights: number of parameters compared by hash, out of
    `of_weights`. onednn: number of operators that run in oneDNN in the reference only, and in the
    target only. fused: by operator of the reference (with `turned`: of the target), the chain of
    operators that its partner runs as one. forms: clauses about other forms of the same function.
    """

    pairs: tuple[tuple[int, int], ...]
    differences: tuple[Difference, ...]
    compared: int
    weights: int = 0
    of_weights: int = 0
    onednn: tuple[int, int] = (0, 0)
    fused: Mapping[int, tuple[int, ...]] = {}
    turned: bool = False
    forms: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The diff in one clause."""
        differences = self.differences
        if self.forms and not differences:
            return f"the programs are equal in another form: {'; '.join(self.forms)}"
        if not differences:
            return (
                f"{EQUAL}: {len(self.pairs)} operators with {self.compared} "
                f"attributes{self._weighed}"
            )
        first = (
            f"{differences[0].words} ({differences[0].name})"
            if differences[0].kind != "attributes"
            else f"{differences[0].words}"
        )
        if sum(d.attributes for d in differences) == 1 and len(differences) == 1:
            return f"exactly one attribute differs: {first}"
        if len(differences) == 1 and differences[0].kind == "weights":
            return f"exactly one weight differs: {first}"
        places = f"{len(differences)} operator{'s' if len(differences) > 1 else ''}"
        return f"the programs differ at {places}; the first: {first}"

    @property
    def _weighed(self) -> str:
        return f", {self.weights} of {self.of_weights} weights by hash" if self.weights else ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The diff as lines: the sentence, then each difference, equal ones merged."""
        out = [self.sentence, *(f"another form: {f}" for f in self.forms if self.differences)]
        forms = Counter(
            d.words for d in self.differences if d.kind in ("fused", "removed", "inserted")
        )
        listed: set[str] = set()
        texts = []
        for d in self.differences:
            if forms[d.words] > 1:
                if d.words not in listed:
                    texts.append(f"{d.words} ({forms[d.words]} times, first at {d.name})")
                listed.add(d.words)
            else:
                texts.append(d.words if d.kind == "attributes" else f"{d.name}: {d.words}")
        if len(self.differences) > 1:
            out += texts[:_SHOWN]
            out += [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
        for side, count in zip(("reference", "target"), self.onednn):
            out += [f"{count} operators run in oneDNN in the {side} only"] if count else []
        if (
            self.differences
            and self.weights
            and not any(d.kind == "weights" for d in self.differences)
        ):
            out.append(f"weights: {self.weights} of {self.of_weights} compared, all equal by hash")
        return tuple(out)


def diff_programs(
    reference: Run, target: Run, weights: tuple[Mapping[str, str], Mapping[str, str]] | None = None
) -> ProgramDiff:
    """Compare two programs. weights: by parameter a hash, of both; None takes the
    .pdiparams beside the programs.
    """
    calls = operators(reference), operators(target)
    # passes fuse, so the longer one has what the other does at once
    turned = running_operators(calls[1]) > running_operators(calls[0])
    if turned:
        reversed_pairs, fused = pair_operators((target, calls[1]), (reference, calls[0]))
        pairs = [(a, b) for b, a in reversed_pairs]
    else:
        pairs, fused = pair_operators((reference, calls[0]), (target, calls[1]))
    pairs.sort(key=lambda pair: pair[0].order)
    ordered = _without_equal_partner(pairs, calls, fused, turned)
    across = across_pairs(pairs)
    compared = 0
    for a, b in pairs:
        if (b if turned else a).id in fused.pairs:
            continue
        compared += len(a.arguments)
        words, count, attributes_only = _differs(reference, target, a, b, across)
        if words:
            kind = "attributes" if attributes_only else "wiring"
            ordered.append((a.order, _difference(a, kind, words, count)))
    hashes = weights if weights is not None else (weights_beside(reference), weights_beside(target))
    weighed, of, other_weights = compare_weights(pairs, *hashes)
    ordered += [
        (call.order, _difference(call, "weights", f"its weight {name} is another one, by hash"))
        for call, name in other_weights
    ]
    ordered.sort(key=lambda item: item[0])
    in_onednn = [(has_mark(a, Mark.ONEDNN), has_mark(b, Mark.ONEDNN)) for a, b in pairs]
    joined = {end: tuple(c.id for c in chain if c.id != end) for end, chain in fused.pairs.items()}
    differences = tuple(d for _, d in ordered)
    return ProgramDiff(
        tuple((a.id, b.id) for a, b in pairs),
        differences,
        compared,
        weighed,
        of,
        (in_onednn.count((True, False)), in_onednn.count((False, True))),
        joined,
        turned,
    )


def _difference(call: Call, kind: str, words: str, attributes: int = 0) -> Difference:
    return Difference(call.scope, call.op_type, call.id, kind, attributes, words)


def _without_equal_partner(
    pairs: Sequence[tuple[Call, Call]],
    calls: tuple[Sequence[Call], Sequence[Call]],
    fused: FusedChains,
    turned: bool,
) -> list[tuple[int, Difference]]:
    """(order, difference) of operators without a partner, and of chains that the other side runs as
    one operator. calls: of the reference, of the target. turned: whether the reference fuses.
    """
    partner = {(b if turned else a).id: (a if turned else b) for a, b in pairs}
    longer = {c.id: c for c in calls[turned]}
    chains = {
        i: [longer[i]]
        for i, other in partner.items()
        if other.op_type.startswith("fused_") and not longer[i].op_type.startswith("fused_")
    } | fused.pairs
    folded = _folded(
        calls[not turned], [partner[end] for end in chains], {c.id for c in partner.values()}
    )
    maker = {r.record: c for c in calls[turned] for r in c.slots("output")}
    absorbed, out = set(fused.inside), []
    for end, chain in chains.items():
        members = _with_changes_of_shape(chain, maker, partner)
        absorbed |= {c.id for c in members} - {end}
        if len(members) > 1:
            fused.pairs[end] = members
            sides = ([partner[end]], members) if turned else (members, [partner[end]])
            out.append((sides[0][-1].order, _as_one(*sides)))
    last_order = -1
    order_of = {b.id: a.order for a, b in pairs}
    for call in calls[1]:
        last_order = order_of.get(call.id, last_order)
        if call.id not in order_of and call.id not in (absorbed if turned else folded):
            words = f"only the target runs {call.op_type}"
            out.append((last_order, _difference(call, "inserted", words)._replace(call=-1)))
    paired = {a.id for a, _ in pairs}
    out += [
        (call.order, _difference(call, "removed", f"only the reference runs {call.op_type}"))
        for call in calls[0]
        if call.id not in paired and call.id not in (folded if turned else absorbed)
    ]
    return out


def _with_changes_of_shape(
    chain: Sequence[Call], maker: Mapping[int, Call], paired: Container[int]
) -> list[Call]:
    """A fused chain, in order, with the unpaired operators that only change the shape of its
    inputs: the fused operator does their work too. maker: by record, the operator that writes it.
    """
    members, todo = {c.id: c for c in chain}, list(chain)
    while todo:
        for ref in todo.pop().slots("input"):
            producer = maker.get(ref.record)
            if (
                producer is not None
                and plain(producer.op_type) in _ONLY_SHAPE
                and producer.id not in paired
                and producer.id not in members
            ):
                members[producer.id] = producer
                todo.append(producer)
    return in_order(members.values())


def _folded(calls: Sequence[Call], ends: Sequence[Call], paired: Set[int]) -> set[int]:
    """Unpaired operators that compute weights of fused ones; a pass inserted them."""
    maker = {r.record: c for c in calls for r in c.slots("output")}
    folded: set[int] = set()
    todo = [r.record for end in ends for r in end.slots("input")]
    constant = constant_records(calls)
    while todo:
        producer = maker.get(record := todo.pop())
        if (
            producer is not None
            and record in constant
            and producer.id not in paired
            and producer.id not in folded
        ):
            folded.add(producer.id)
            todo += [r.record for r in producer.slots("input")]
    return folded


def _as_one(reference_calls: Sequence[Call], target_calls: Sequence[Call]) -> Difference:
    """The difference of a chain of operators that the other side runs as one."""
    reference_types, target_types = (
        " + ".join(c.op_type for c in side[:6]) + (" + ..." if len(side) > 6 else "")
        for side in (reference_calls, target_calls)
    )
    verb = "are one" if len(target_calls) == 1 else "is"
    words = f"{reference_types} of the reference {verb} {target_types} in the target"
    return _difference(reference_calls[-1], "fused", words)


def across_pairs(pairs: Sequence[tuple[Call, Call]]) -> dict[int, int]:
    """By record of the reference, the target's in the same output or parameter of partners."""
    out: dict[int, int] = {}
    for a, b in pairs:
        for kind in ("output", "param"):
            out.update(
                (x.record, y.record)
                for x, y in zip(a.slots(kind), b.slots(kind))
                if x.record not in out
            )
    return out


# ---- what they differ in


def _differs(
    reference: Run, target: Run, a: Call, b: Call, across: Mapping[int, int]
) -> tuple[str, int, bool]:
    """(differences in words, number of differing attributes, whether only attributes differ)."""
    attributes = _attributes_that_differ(a, b)
    words: list[str] = []
    if plain(a.op_type) != plain(b.op_type):
        words.append(f"the reference runs {a.op_type} where the target runs {b.op_type}")
    words += attributes
    sentence = "it {} {} in the reference and {} in the target".format
    for x, y in list(zip(a.slots("output"), b.slots("output")))[:1]:
        record, target_record = reference.records[x.record], target.records[y.record]
        shapes = record.shape, target_record.shape
        if record.dtype != target_record.dtype:
            words.append(sentence("writes", record.dtype, target_record.dtype))
        elif len(shapes[0]) != len(shapes[1]) or any(
            m != n and -1 not in (m, n) for m, n in zip(*shapes)
        ):
            words.append(sentence("writes", *map(_extents, shapes)))
    inputs = a.slots("input"), b.slots("input")
    if len(inputs[0]) != len(inputs[1]):
        words.append(sentence("reads", *(_tensors(len(refs)) for refs in inputs)))
    words += [
        f"its {x.slot} comes from another operator in the target"
        for x, y in zip(*inputs)
        if x.record in across and across[x.record] != y.record
    ]
    for x, y in zip(a.slots("param"), b.slots("param")):
        forms = [
            (record.dtype, record.shape)
            for record in (reference.records[x.record], target.records[y.record])
        ]
        if forms[0] != forms[1]:
            described = " against ".join(f"{dtype} {_extents(shape)}" for dtype, shape in forms)
            words.append(f"its parameter {param_name(x.slot)} is {described}")
    return "; ".join(words), len(attributes), len(words) == len(attributes)


def _attributes_that_differ(a: Call, b: Call) -> list[str]:
    """A clause for each attribute in which two operators of one type differ."""
    if a.op_type != b.op_type:
        return []
    clauses = []
    # A pass adds attributes for its kernel.
    moved = has_mark(a, Mark.ONEDNN) != has_mark(b, Mark.ONEDNN)
    for key in dict.fromkeys((*a.arguments, *b.arguments)):
        x, y = a.arguments.get(key, _ABSENT), b.arguments.get(key, _ABSENT)
        if (moved or None in (x, y)) and _ABSENT in (x, y):
            continue
        if x != y:
            clauses.append(f"{key} of {a.scope}: {_shown(x)} against {_shown(y)}")
    return clauses


def _tensors(count: int) -> str:
    return f"{count} tensor{'' if count == 1 else 's'}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _extents(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('?' if n < 0 else str(n) for n in shape)}]"


# Weights of two programs, compared by hash.


def weights_beside(program: Run) -> dict[str, str]:
    """Hashes of a program's parameters by name, from the .pdiparams file beside it; {} if there is
    no readable file.
    """
    file = Path(program.path).with_suffix(".pdiparams")
    if not file.is_file():
        return {}
    try:
        run = open_run(str(file))
    except UnreadableRun:
        return {}
    out = {}
    for call in run.calls:
        for ref in call.slots("param"):
            name = ".".join(part for part in (call.scope, param_name(ref.slot)) if part)
            try:
                array = np.ascontiguousarray(run.array(ref.record))
                out[name] = host.digest(array.reshape(-1).view(np.uint8)).hex()
            except ElementsMissing:
                continue
    return out


def weights_seen(run: Run, root: str = "") -> dict[str, str]:
    """Hashes of the parameters that a run captured, by name. root: "" for all roots."""
    calls = (c for c in run.calls if root in ("", c.root))
    return {
        param_name(r.slot): run.records[r.record].hash
        for c in calls
        for r in c.slots("param")
        if run.records[r.record].hash
    }


def compare_weights(
    pairs: Sequence[tuple[Call, Call]],
    reference_hashes: Mapping[str, str],
    target_hashes: Mapping[str, str],
) -> tuple[int, int, list[tuple[Call, str]]]:
    """(number of compared parameters, number of all, (call of the reference, name) of differing
    ones), for parameters at the same position of paired operators.
    """
    compared: dict[str, bool] = {}
    differences: list[tuple[Call, str]] = []

    def compare(call: Call, name: str, target_name: str) -> None:
        compared[name] = name in reference_hashes and target_name in target_hashes
        if compared[name] and reference_hashes[name] != target_hashes[target_name]:
            differences.append((call, name))

    for a, b in pairs:
        for ref, target_ref in zip(a.slots("param"), b.slots("param")):
            name, target_name = param_name(ref.slot), param_name(target_ref.slot)
            if name not in compared and (a.op_type == b.op_type or name == target_name):
                compare(a, name, target_name)
    for a, _ in pairs:  # a fused operator has its parameters at other positions, by name
        for name in (param_name(r.slot) for r in a.slots("param")):
            if not compared.get(name, False) and name in reference_hashes and name in target_hashes:
                compare(a, name, name)
    return sum(compared.values()), len(compared), differences
