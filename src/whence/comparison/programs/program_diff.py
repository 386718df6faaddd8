"""Two programs operator by operator: what they differ in before anything is computed.

Operators are paired along a longest common subsequence of (type, rank of what they make), so
that one inserted, removed or fused operator moves no other. Names and numbers of variables may
differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whence.align.calls.sequence_alignment import common_subsequence
from whence.errors import ElementsMissing, UnreadableRun, UsageError
from whence.frameworks import host
from whence.readers import GATHERED, ONEDNN, TAKES
from whence.readers.opening import open_run
from whence.records import Call, Ref, Run

_MAX_WORK = 40_000_000  # steps of the search for a common subsequence
_LONGEST = 60  # characters of an attribute
_SHOWN = 8  # differences that are spelt out
_ABSENT = "absent"
EQUAL = "the programs are equal"


class Difference(NamedTuple):
    """Something two programs do not share. name: of the operator, in the reference where it has it.
    call: there, -1 where it has none.

    kind: "attributes", "wiring" (types, inputs, shapes), "removed", "inserted", "fused", "replaced"
    or "weights". attributes: how many of its attributes differ. words: a clause.
    """

    name: str
    op_type: str
    call: int
    kind: str
    attributes: int
    words: str


class Faced(NamedTuple):
    """Two programs operator by operator: pairs of calls, and what they differ in, in the
    reference's order.

    compared: attributes; weights: parameters held against each other by hash, of `of_weights`.
    onednn: operators that only the reference and only the target give to oneDNN. fused: operators
    of the reference (turned: of the target) whose partner does what others before them do too, with
    these.
    """

    pairs: tuple[tuple[int, int], ...]
    differences: tuple[Difference, ...]
    compared: int
    weights: int = 0
    of_weights: int = 0
    onednn: tuple[int, int] = (0, 0)
    fused: Mapping[int, tuple[int, ...]] = {}
    turned: bool = False

    @property
    def sentence(self) -> str:
        """What is to be said of both, a clause."""
        found = self.differences
        if not found:
            return (
                f"{EQUAL}: {len(self.pairs)} operators with {self.compared} "
                f"attributes{self._weighed}"
            )
        first = (
            f"{found[0].words} ({found[0].name})"
            if found[0].kind != "attributes"
            else f"{found[0].words}"
        )
        if sum(d.attributes for d in found) == 1 and len(found) == 1:
            return f"exactly one attribute differs: {first}"
        if len(found) == 1 and found[0].kind == "weights":
            return f"exactly one weight differs: {first}"
        return (
            f"the programs differ at {len(found)} operator{'s' if len(found) > 1 else ''}; "
            f"the first: {first}"
        )

    @property
    def _weighed(self) -> str:
        return f", {self.weights} of {self.of_weights} weights by hash" if self.weights else ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The differences as lines: the sentence, then each, those of one form together."""
        out = [self.sentence]
        forms = Counter(
            d.words for d in self.differences if d.kind in ("fused", "removed", "inserted")
        )
        said: set[str] = set()
        rest = []
        for d in self.differences:
            if forms[d.words] > 1:
                if d.words not in said:
                    rest.append(f"{d.words} ({forms[d.words]} times, first at {d.name})")
                said.add(d.words)
            else:
                rest.append(d.words if d.kind == "attributes" else f"{d.name}: {d.words}")
        if len(self.differences) > 1:
            out += rest[:_SHOWN]
            out += [f"and {len(rest) - _SHOWN} more"] if len(rest) > _SHOWN else []
        for side, count in zip(("reference", "target"), self.onednn):
            out += [f"{count} operators run in oneDNN in the {side} only"] if count else []
        if (
            self.differences
            and self.weights
            and not any(d.kind == "weights" for d in self.differences)
        ):
            out.append(f"weights: {self.weights} of {self.of_weights} compared, all equal by hash")
        return tuple(out)


def operators(run: Run) -> list[Call]:
    """The operators of a program, or of a run of one, in order."""
    return sorted((c for c in run.calls if GATHERED not in c.notes), key=lambda c: c.order)


def face(
    reference: Run, target: Run, weights: tuple[Mapping[str, str], Mapping[str, str]] | None = None
) -> Faced:
    """Hold two programs against each other. weights: by parameter a hash, of both; None takes the
    .pdiparams beside the programs.
    """
    ours, theirs = operators(reference), operators(target)
    # passes fuse, so the longer one has what the other does at once
    turned = _running(theirs) > _running(ours)
    if turned:
        facing, fused = _met((target, theirs), (reference, ours))
        pairs = sorted(((a, b) for b, a in facing), key=lambda pair: pair[0].order)
    else:
        pairs, fused = _met((reference, ours), (target, theirs))
        pairs.sort(key=lambda pair: pair[0].order)
    found = _alone(pairs, ours, theirs, fused, turned)
    across = _across(pairs)
    compared = 0
    for a, b in pairs:
        if (b if turned else a).id in fused.pairs:
            continue
        compared += len(a.arguments)
        words, count, attributes_only = _differs(reference, target, a, b, across)
        if words:
            found.append(
                (
                    a.order,
                    Difference(
                        a.scope,
                        a.op_type,
                        a.id,
                        "attributes" if attributes_only else "wiring",
                        count,
                        words,
                    ),
                )
            )
    one, two = (
        weights if weights is not None else (weights_beside(reference), weights_beside(target))
    )
    weighed, of, apart = _weighed(pairs, one, two)
    found += apart
    found.sort(key=lambda item: item[0])
    moved = sum(ONEDNN in a.notes and ONEDNN not in b.notes for a, b in pairs)
    right = sum(ONEDNN in b.notes and ONEDNN not in a.notes for a, b in pairs)
    joined = {end: tuple(c.id for c in chain if c.id != end) for end, chain in fused.pairs.items()}
    differences = tuple(d for _, d in found)
    return Faced(
        tuple((a.id, b.id) for a, b in pairs),
        differences,
        compared,
        weighed,
        of,
        (moved, right),
        joined,
        turned,
    )


# ---- which calls are paired


def _running(calls: Sequence[Call]) -> int:
    """How many operators rest on what the model is given, not on parameters alone."""
    constant = _made_of(calls)
    return sum(
        not (outputs := c.slots("output")) or any(r.record not in constant for r in outputs)
        for c in calls
    )


def _met(
    one: tuple[Run, list[Call]], two: tuple[Run, list[Call]]
) -> tuple[list[tuple[Call, Call]], _Fused]:
    """(pairs, what the second does at once) of two programs with their operators."""
    ours, theirs = one[1], two[1]
    by_name = _one_naming(ours, theirs)
    mine_, others_ = (
        [_token(run, c, by_name, made_of) for c in calls]
        for run, calls in (one, two)
        for made_of in (_made_of(calls),)
    )
    pairs: list[tuple[Call, Call]] = []
    left: list[tuple[list[Call], list[Call]]] = []
    for a0, a1, b0, b1, equal in blocks(mine_, others_):
        if equal:
            pairs += zip(ours[a0:a1], theirs[b0:b1], strict=True)
        else:
            left += _pieces(ours[a0:a1], theirs[b0:b1])
    pairs += [
        (a, b)
        for mine, others in left
        for a in mine
        for b in others
        if a.scope == b.scope and plain(a.op_type) == plain(b.op_type) and _is_name(a)
    ]
    met, other = {a.id for a, _ in pairs}, {b.id for _, b in pairs}
    left = [
        ([c for c in mine if c.id not in met], [c for c in others if c.id not in other])
        for mine, others in left
    ]
    pairs += _crossing(
        left, {c.id: t for c, t in zip(ours, mine_)}, {c.id: t for c, t in zip(theirs, others_)}
    )
    met, other = {a.id for a, _ in pairs}, {b.id for _, b in pairs}
    for mine, others in left:
        mine, others = (
            [c for c in mine if c.id not in met],
            [c for c in others if c.id not in other],
        )
        if len(mine) == len(others):
            pairs += zip(mine, others, strict=True)
    pairs, fused = _advanced(pairs, ours)
    met, other = {a.id for a, _ in pairs}, {b.id for _, b in pairs}
    for mine, others in left:
        rest = [c for c in mine if c.id not in fused.inside and c.id not in met]
        free = bool(others) and others[-1].id not in other
        if (
            rest
            and free
            and len(mine) != len(others)
            and others[-1].scope == rest[-1].scope
            and _is_name(rest[-1])
        ):
            pairs.append((rest[-1], others[-1]))  # they end in one tensor
            fused.pairs[rest[-1].id] = list(mine)
    return pairs, fused


def blocks(ours: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[int, int, int, int, bool]]:
    """(from, to, from, to, equal) of runs of operators that are paired and of what lies
    between, in order.

    Along a longest common subsequence. Raises UsageError when the two have too little in common to
    be searched.
    """
    start, least = 0, min(len(ours), len(theirs))
    while start < least and ours[start] == theirs[start]:
        start += 1
    end = 0
    while end < least - start and ours[-1 - end] == theirs[-1 - end]:
        end += 1
    middle = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    common = common_subsequence(*middle, _MAX_WORK)
    if common is None:
        raise UsageError(
            f"the programs share {start + end} operators at their ends and then {len(middle[0])} "
            f"face {len(middle[1])}; that is not compared"
        )
    matched = (
        [(i, i) for i in range(start)]
        + [(start + i, start + j) for i, j in common]
        + [(len(ours) - end + i, len(theirs) - end + i) for i in range(end)]
    )
    out: list[tuple[int, int, int, int, bool]] = []
    a = b = 0
    for i, j in [*matched, (len(ours), len(theirs))]:
        if i > a or j > b:
            out.append((a, i, b, j, False))
        if i < len(ours) and j < len(theirs):
            if out and out[-1][4] and out[-1][1] == i and out[-1][3] == j:
                out[-1] = (out[-1][0], i + 1, out[-1][2], j + 1, True)
            else:
                out.append((i, i + 1, j, j + 1, True))
        a, b = i + 1, j + 1
    return out


_SAME = {
    "matmul_v2": "matmul",
    "mul": "matmul",
    "fc": "matmul",
    "fused_matmul": "matmul",
    "fused_gemm_epilogue": "matmul",
    "reduce_mean": "mean",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reshape2": "reshape",
    "transpose2": "transpose",
    "fused_transpose": "transpose",
    "squeeze2": "squeeze",
    "unsqueeze2": "unsqueeze",
    "lookup_table_v2": "embedding",
    "fused_conv2d": "conv2d",
    "fused_conv2d_add_act": "conv2d",
    "elementwise_sub": "subtract",
    "elementwise_mul": "multiply",
    "elementwise_div": "divide",
    "expand_v2": "expand",
    "flatten_contiguous_range": "flatten",
}
_BEHIND = (
    "matmul",
    "fc",
    "fused_matmul",
    "fused_gemm_epilogue",
    "fused_conv2d",
    "fused_conv2d_add_act",
    "conv2d",
)


def plain(op_type: str) -> str:
    """One name for operators that another format or a pass calls otherwise: elementwise_add and
    fused_elementwise_add are add.
    """
    name = op_type.removeprefix("fused_") if op_type.startswith("fused_elementwise_") else op_type
    return _SAME.get(name, name.removeprefix("elementwise_"))


def _crossing(
    left: Sequence[tuple[list[Call], list[Call]]],
    mine: Mapping[int, tuple[Any, ...]],
    others: Mapping[int, tuple[Any, ...]],
) -> list[tuple[Call, Call]]:
    """Of what a common subsequence leaves over, pairs that take a matrix which nobody else there
    takes: passes move operators too.
    """
    one, two = (
        [(table[c.id], c) for pair in left for c in pair[side] if table[c.id][1]]
        for side, table in enumerate((mine, others))
    )
    counts = Counter(t for t, _ in one), Counter(t for t, _ in two)
    there = {t: c for t, c in two if counts[1][t] == 1}
    return [(c, there[t]) for t, c in one if counts[0][t] == 1 and t in there]


def _behind(call: Call) -> list[str]:
    """What a pass may have fused behind the operator that a call is named after, in the order it is
    done.
    """
    given, out = call.arguments, []
    slots = {r.slot.partition(".")[2] for r in call.slots("input")} | {
        n.rpartition(" as ")[2] for n in call.notes if n.startswith(TAKES)
    }
    if call.op_type in _BEHIND:
        out += (
            ["scale"]
            if given.get("matmul_alpha", given.get("alpha", 1.0)) not in (1.0, None)
            else []
        )
        out += ["transpose"] if given.get("fused_transpose_out") else []
        out += (
            ["reshape"]
            if given.get("fused_reshape_out") or given.get("fused_reshape2_shape")
            else []
        )
        out += ["add"] if call.op_type != "fused_matmul" and slots & {"Bias", "2"} else []
        out += ["batch_norm"] if plain(call.op_type) == "conv2d" and slots & {"Bias", "2"} else []
        out += (
            ["add"]
            if "ResidualData" in slots
            or (call.op_type == "fused_matmul" and "2" in slots)
            or "3" in slots
            else []
        )
    for key in ("activation_type", "fuse_activation", "activation"):
        name = str(given.get(key) or "")
        if name not in ("", "identity", "none"):
            out.append(
                "gelu"
                if name.startswith("gelu")
                else {"swish": "silu", "hard_swish": "hardswish"}.get(name, name)
            )
            break
    out += ["scale"] if given.get("fused_output_scale", 1.0) not in (1.0, None) else []
    return out


class _Fused(NamedTuple):
    """pairs: operator of the reference that ends a chain -> the chain; inside: all in chains but
    their ends.
    """

    pairs: dict[int, list[Call]]
    inside: set[int]


def _advanced(
    pairs: list[tuple[Call, Call]], ours: Sequence[Call]
) -> tuple[list[tuple[Call, Call]], _Fused]:
    """Pairs, where the target's operator does what follows in the reference too moved on to the
    last of it.
    """
    readers: dict[int, list[Call]] = {}
    for call in ours:
        for ref in call.slots("input"):
            readers.setdefault(ref.record, []).append(call)
    fused, moved, met = _Fused({}, set()), [], {a.id for a, _ in pairs}
    for a, b in pairs:
        chain, own = [a], _behind(a)
        for wanted in (w for w in _behind(b) if w not in own):
            outputs = chain[-1].slots("output")
            following = readers.get(outputs[0].record, []) if outputs else []
            # it goes into the weights, and the sum behind
            free = wanted != "batch_norm" or (following and following[0].id not in met)
            if len(following) == 1 and plain(following[0].op_type) == wanted and free:
                chain.append(following[0])
        moved.append((chain, b))
    ends = {chain[-1].id for chain, _ in moved if len(chain) > 1}
    out = []
    for chain, b in moved:
        if len(chain) == 1 and chain[0].id in ends:
            continue  # another operator of the target does this already
        if len(chain) > 1:
            fused.pairs[chain[-1].id] = chain
            fused.inside.update(c.id for c in chain[:-1])
        out.append((chain[-1], b))
    return out, fused


def _alone(
    pairs: Sequence[tuple[Call, Call]],
    ours: Sequence[Call],
    theirs: Sequence[Call],
    fused: _Fused,
    turned: bool,
) -> list[tuple[int, Difference]]:
    """Differences of operators without a partner, and of those that the other side runs as one.
    turned: that is the reference.
    """
    out: list[tuple[int, Difference]] = []
    long = theirs if turned else ours
    partner = {(b if turned else a).id: (a if turned else b) for a, b in pairs}
    maker = {r.record: c for c in long for r in c.slots("output")}
    calls = {c.id: c for c in long}
    fuses = {
        i: [calls[i]]
        for i, b in partner.items()
        if b.op_type.startswith("fused_") and not calls[i].op_type.startswith("fused_")
    }
    gone = set(fused.inside)
    folded = _folded(
        ours if turned else theirs,
        [partner[end] for end in (fuses | fused.pairs)],
        {c.id for c in partner.values()},
    )
    for end, chain in (fuses | fused.pairs).items():
        # What only changes the shape of what it reads, and has no partner, is done inside as well.
        members, todo = {c.id: c for c in chain}, list(chain)
        while todo:
            for ref in todo.pop().slots("input"):
                before = maker.get(ref.record)
                moves = before is not None and plain(before.op_type) in (
                    "reshape",
                    "transpose",
                    "scale",
                    "squeeze",
                    "unsqueeze",
                )
                if (
                    before is not None
                    and moves
                    and before.id not in partner
                    and before.id not in members
                ):
                    members[before.id] = before
                    todo.append(before)
        gone |= members.keys() - {end}
        if len(members) > 1:
            fused.pairs[end] = listed = sorted(members.values(), key=lambda c: c.order)
            sides = ([partner[end]], listed) if turned else (listed, [partner[end]])
            out += [(sides[0][-1].order, d) for _, d in _unequal(*sides)]
    before_ = -1
    where = {b.id: a.order for a, b in pairs}
    for call in theirs:
        before_ = where.get(call.id, before_)
        if call.id not in where and call.id not in (gone if turned else folded):
            out += [(before_, d) for _, d in _unequal([], [call])]
    paired = {a.id for a, _ in pairs}
    for call in ours:
        if call.id not in paired and call.id not in (folded if turned else gone):
            out += [(call.order, d) for _, d in _unequal([call], [])]
    return out


def _folded(calls: Sequence[Call], ends: Sequence[Call], met: Set[int]) -> set[int]:
    """Operators without a partner that compute what fused ones take as weights: a pass put them
    there.
    """
    maker = {r.record: c for c in calls for r in c.slots("output")}
    found: set[int] = set()
    todo = [r.record for end in ends for r in end.slots("input")]
    constant = _made_of(calls)
    while todo:
        before = maker.get(record := todo.pop())
        if (
            before is not None
            and record in constant
            and before.id not in met
            and before.id not in found
        ):
            found.add(before.id)
            todo += [r.record for r in before.slots("input")]
    return found


def _one_naming(ours: Sequence[Call], theirs: Sequence[Call]) -> bool:
    """Do both programs call their parameters the same?"""
    a, b = ({r.slot for c in calls for r in c.slots("param")} for calls in (ours, theirs))
    return 2 * len(a & b) >= min(len(a), len(b))


def _made_of(calls: Sequence[Call]) -> dict[int, tuple[Ref, ...]]:
    """Records that rest on parameters and constants alone -> the parameters: passes compute weights
    of others.
    """
    out: dict[int, tuple[Ref, ...]] = {}
    for call in calls:
        inputs, params = call.slots("input"), call.slots("param")
        if call.leaf and (inputs or params) and all(r.record in out for r in inputs):
            held = {r.slot: r for r in (*params, *(p for r in inputs for p in out[r.record]))}
            out.update((r.record, tuple(held.values())) for r in call.slots("output"))
    return out


def _token(
    run: Run, call: Call, by_name: bool, made_of: Mapping[int, Sequence[Ref]]
) -> tuple[Any, ...]:
    """What operators that are paired have in common: their kind and the parameters they take,
    as they are or computed with.
    """
    kind, params = (
        plain(call.op_type),
        [
            *call.slots("param"),
            *(p for r in call.slots("input") for p in made_of.get(r.record, ())),
        ],
    )
    # Of products the matrix only: passes put the sum with a vector into them.
    told = [
        r
        for r in params
        if len(run.records[r.record].shape) > 1 or kind not in ("matmul", "conv2d")
    ]
    taken = tuple(sorted(r.slot if by_name else str(run.records[r.record].shape) for r in told))
    return kind, taken


def _pieces(
    ours: Sequence[Call], theirs: Sequence[Call]
) -> Iterator[tuple[list[Call], list[Call]]]:
    """A stretch that differs, cut where both write a tensor of one name: passes fuse operators and
    keep the last name.
    """
    names = {c.scope: j for j, c in enumerate(theirs)}
    a = b = 0
    for i, call in enumerate(ours):
        j = names.get(call.scope, -1)
        if j >= b and _is_name(call):
            yield list(ours[a : i + 1]), list(theirs[b : j + 1])
            a, b = i + 1, j + 1
    if a < len(ours) or b < len(theirs):
        yield list(ours[a:]), list(theirs[b:])


def _is_name(call: Call) -> bool:
    """Is a call named by a variable, not by a layer, an operator and a place (PIR)?"""
    head, _, place = call.scope.rpartition("_")
    return not (place.isdigit() and head.rpartition(".")[2] == call.op_type)


def _unequal(
    ours: Sequence[Call], theirs: Sequence[Call]
) -> Iterator[tuple[Call | None, Difference]]:
    """What is to be said of operators where the two have another number of them."""
    if not ours or not theirs:
        for side, call in [*(("reference", c) for c in ours), *(("target", c) for c in theirs)]:
            mine = side == "reference"
            kind, words = (
                ("removed" if mine else "inserted"),
                f"only the {side} runs {call.op_type}",
            )
            yield (
                (call if mine else None),
                Difference(call.scope, call.op_type, call.id if mine else -1, kind, 0, words),
            )
        return
    left, right = (
        " + ".join(c.op_type for c in side[:6]) + (" + ..." if len(side) > 6 else "")
        for side in (ours, theirs)
    )
    kind = "fused" if min(len(ours), len(theirs)) == 1 else "replaced"
    verb = (
        f"{left} of the reference "
        f"{'are one' if len(theirs) == 1 else 'is' if len(ours) == 1 else 'stand where the target has'} "  # noqa: E501
        f"{right}"
    )
    words = f"{verb} in the target" if kind == "fused" else verb
    yield ours[-1], Difference(ours[-1].scope, ours[-1].op_type, ours[-1].id, kind, 0, words)


def _across(pairs: Sequence[tuple[Call, Call]]) -> dict[int, int]:
    """Records of the reference -> records of the target that face them as outputs or parameters of
    partners.
    """
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
    """(what two operators differ in, how many attributes of it, is it nothing else)."""
    words: list[str] = []
    if plain(a.op_type) != plain(b.op_type):
        words.append(f"the reference runs {a.op_type} where the target runs {b.op_type}")
    count = 0
    keys = (
        [*a.arguments, *(k for k in b.arguments if k not in a.arguments)]
        if a.op_type == b.op_type
        else []
    )
    moved = (ONEDNN in a.notes) != (ONEDNN in b.notes)  # a pass adds attributes for its kernel
    for key in keys:
        x, y = a.arguments.get(key, _ABSENT), b.arguments.get(key, _ABSENT)
        if (moved or None in (x, y)) and _ABSENT in (x, y):
            continue
        if x != y:
            count += 1
            words.append(f"{key} of {a.scope}: {_shown(x)} against {_shown(y)}")
    only = len(words) == count
    made = [(r.record, s.record) for r, s in zip(a.slots("output"), b.slots("output"))]
    for x, y in made[:1]:
        one, two = reference.records[x], target.records[y]
        if one.dtype != two.dtype:
            words.append(f"it writes {one.dtype} in the reference and {two.dtype} in the target")
        elif len(one.shape) != len(two.shape) or any(
            m != n and -1 not in (m, n) for m, n in zip(one.shape, two.shape)
        ):
            words.append(
                f"it writes {_extents(one.shape)} in the reference and {_extents(two.shape)} in "
                "the target"
            )
    mine, others = a.slots("input"), b.slots("input")
    if len(mine) != len(others):
        words.append(
            f"it reads {_tensors(len(mine))} in the reference and {_tensors(len(others))} in the "
            "target"
        )
    for ref, other in zip(mine, others):
        if ref.record in across and across[ref.record] != other.record:
            words.append(f"its {ref.slot} comes from another operator in the target")
    for ref, other in zip(a.slots("param"), b.slots("param")):
        one, two = reference.records[ref.record], target.records[other.record]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            words.append(
                f"its parameter {ref.slot[6:]} is {one.dtype} {_extents(one.shape)} against "
                f"{two.dtype} {_extents(two.shape)}"
            )
    return "; ".join(words), count, only and len(words) == count


def _tensors(count: int) -> str:
    return f"{count} tensor{'' if count == 1 else 's'}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _extents(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('?' if n < 0 else str(n) for n in shape)}]"


# ---- weights


def weights_beside(program: Run) -> dict[str, str]:
    """Hashes of the parameters of a program, from the .pdiparams beside it; {} where there is none
    that can be read.
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
            name = ".".join(part for part in (call.scope, ref.slot[6:]) if part)
            try:
                array = np.ascontiguousarray(run.array(ref.record))
                out[name] = host.digest(array.reshape(-1).view(np.uint8)).hex()
            except ElementsMissing:
                continue
    return out


def weights_seen(run: Run, root: str = "") -> dict[str, str]:
    """Hashes of the parameters that a run saw, of one root or of all, by name."""
    calls = (c for c in run.calls if root in ("", c.root))
    return {
        r.slot[6:]: run.records[r.record].hash
        for c in calls
        for r in c.slots("param")
        if run.records[r.record].hash
    }


def _weighed(
    pairs: Sequence[tuple[Call, Call]], ours: Mapping[str, str], theirs: Mapping[str, str]
) -> tuple[int, int, list[tuple[int, Difference]]]:
    """(how many were compared, of how many, what differs): parameters that partners take in one
    place.
    """
    done: dict[str, bool] = {}
    out: list[tuple[int, Difference]] = []
    for a, b in pairs:
        for ref, other in zip(a.slots("param"), b.slots("param")):
            name, its = ref.slot[6:], other.slot[6:]
            if name in done or (a.op_type != b.op_type and name != its):
                continue
            done[name] = name in ours and its in theirs
            if done[name] and ours[name] != theirs[its]:
                out.append(
                    (
                        a.order,
                        Difference(
                            a.scope,
                            a.op_type,
                            a.id,
                            "weights",
                            0,
                            f"its weight {name} is another one, by hash",
                        ),
                    )
                )
    for a, _ in pairs:  # of a fused operator the parameters stand elsewhere, under their names
        for name in (r.slot[6:] for r in a.slots("param")):
            if not done.get(name, False) and name in ours and name in theirs:
                done[name] = True
                if ours[name] != theirs[name]:
                    out.append(
                        (
                            a.order,
                            Difference(
                                a.scope,
                                a.op_type,
                                a.id,
                                "weights",
                                0,
                                f"its weight {name} is another one, by hash",
                            ),
                        )
                    )
    return sum(done.values()), len(done), out
