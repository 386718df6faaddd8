"""Orders the inputs and parameters of a joined call like those of its partner: a joined call reads
them in the order in which its members ran, a fused one in the order of its kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from msgspec.structs import replace

from whence.records import Call, Record, Ref, Run
from whence.records.marks import Mark, has_mark
from whence.records.slots import slot_kind

MOVES = frozenset((
    "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
    "flatten", "reshape", "squeeze", "transpose", "unsqueeze", "onednn_to_paddle_layout", "assign",
    "fused_transpose", "reshape2", "transpose2", "squeeze2", "unsqueeze2",
    "com.microsoft.nchwc.ReorderInput", "com.microsoft.nchwc.ReorderOutput",
))  # fmt: skip
"""Operators whose output holds the elements of their first input, whatever the order."""
_CLOSE = 1e-3
"""How far sums over the elements of one tensor may lie apart in two runs that round: figures of two
tensors that are not the same lie further apart, or nothing is changed.
"""


def origins(
    run: Run, placed: Mapping[int, Hashable], roots: Mapping[str, str]
) -> dict[int, Hashable]:
    """By record, a label of its origin that both runs share: the pair of calls that computed it, or
    the input of the model. A tensor whose elements were only moved has the origin of its source.

    placed: by call that was joined, or paired with a joined one, a key of the pair. roots: names of
    root calls in the other run.
    """
    labels: dict[int, Hashable] = {}
    sources = {
        call.slots("output")[0].record: call.slots("input")[0].record
        for call in run.calls
        if call.op_type in MOVES and call.slots("input") and call.slots("output")
    }
    for call in run.calls:
        at = (call.rank, roots.get(call.root, call.root), call.step, call.micro, call.phase)
        # A root that was put together has its inputs in the order in which its calls read them.
        is_model = call.parent == -1 and not call.leaf and not has_mark(call, Mark.PUT_TOGETHER)
        is_model &= call.id not in placed
        for ref in call.slots("input") if is_model else ():
            labels.setdefault(ref.record, (*at, "", ref.slot))
        for number, ref in enumerate(call.slots("output") if call.leaf else ()):
            if ref.record not in sources and call.id in placed:  # their results face each other
                labels.setdefault(ref.record, (*at, placed[call.id], number))
            elif ref.record not in sources:
                place = call.scope, call.op, call.occurrence
                labels.setdefault(ref.record, (*at, place, ref.slot))
    for record in sources:
        if (label := labels.get(_source(record, sources))) is not None:
            labels[record] = label
    return labels


def _source(record: int, sources: Mapping[int, int]) -> int:
    for _ in sources:
        if record not in sources:
            break
        record = sources[record]
    return record


def ordered_like(
    run: Run,
    call: Call,
    other_run: Run,
    other: Call,
    labels: Mapping[int, Hashable],
    other_labels: Mapping[int, Hashable],
) -> Call:
    """The call with its inputs in the order of another's, if each corresponds to exactly one input
    of that: by origin, else by content or similar figures regardless of shape. Otherwise the call
    as it is.

    labels, other_labels: origins of records (`origins`).
    """
    inputs, across = call.slots("input"), other.slots("input")
    if len(inputs) < 2 or len(inputs) != len(across):
        return call
    places: list[int] = []
    own = [run.records[ref.record] for ref in inputs]
    for ref in across:
        alike = _of_one_origin(ref, inputs, labels, other_labels)
        record = other_run.records[ref.record]
        if len(alike) != 1 and record.hash:
            alike = [k for k, o in enumerate(own) if _key(o) == _key(record)]
        if len(alike) != 1:
            alike = [k for k, o in enumerate(own) if _alike(o, record)]
        if len(alike) != 1:
            return call
        places += alike
    return _reordered(call, "input", places)


def _reordered(call: Call, kind: str, places: Sequence[int]) -> Call:
    """The call with its tensors of one kind (inputs, outputs) permuted; `places` are their current
    positions in the new order.
    """
    own = call.slots(kind)
    if sorted(places) != list(range(len(own))) or list(places) == sorted(places):
        return call
    ordered = iter([own[k] for k in places])
    refs = tuple(next(ordered) if slot_kind(r.slot) == kind else r for r in call.refs)
    return replace(call, refs=refs)


def _of_one_origin(
    ref: Ref,
    inputs: Sequence[Ref],
    labels: Mapping[int, Hashable],
    other_labels: Mapping[int, Hashable],
) -> list[int]:
    label = other_labels.get(ref.record)
    if label is None:
        return []
    return [k for k, own in enumerate(inputs) if labels.get(own.record) == label]


def results_like(
    call: Call, other: Call, names: Mapping[int, str], other_names: Mapping[int, str]
) -> Call:
    """The call with its outputs in the order of another's, if all of them have known names.

    names, other_names: `results_of` each run.
    """
    own = [names.get(r.record, "") for r in call.slots("output")]
    across = [other_names.get(r.record, "") for r in other.slots("output")]
    if len(own) < 2 or not all(own) or sorted(own) != sorted(across) or len(set(own)) < len(own):
        return call
    return _reordered(call, "output", [own.index(name) for name in across])


def results_of(run: Run) -> dict[int, str]:
    """By record, the name of a result: the output slot of a model, else the name of a call with
    only one output.

    An engine that rewrites a graph keeps the names of tensors that other calls read.
    """
    names = {
        r.record: r.slot for call in run.calls if call.parent == -1 for r in call.slots("output")
    }
    for call in run.calls:
        made = call.slots("output")
        if call.leaf and call.scope and len(made) == 1:
            names.setdefault(made[0].record, call.scope)
    return names


def parameters_like(run: Run, call: Call, other_run: Run, other: Call) -> Call:
    """The call with its numbered parameters in the order of another's. Parameters with equal
    content get the same position; the others fill the remaining positions in their own order.
    """
    own, across = call.slots("param"), other.slots("param")
    if len(own) < 2 or len(own) != len(across):
        return call
    left = list(range(len(own)))
    placed: list[int] = []
    for ref in across:
        sought = other_run.records[ref.record]
        same = (k for k in left if sought.hash and _key(run.records[own[k].record]) == _key(sought))
        place = next(same, -1)
        placed.append(place)
        if place >= 0:
            left.remove(place)
    waiting = iter(left)
    return _reordered(call, "param", [k if k >= 0 else next(waiting) for k in placed])


def _key(record: Record) -> tuple[str, str, tuple[int, ...]]:
    return record.hash, record.dtype, record.shape


def _alike(a: Record, b: Record) -> bool:
    """Whether two tensors may hold the same elements, up to rounding and order."""
    if a.count != b.count or a.sketch is None or b.sketch is None:
        return False
    if a.sketch.checksum == b.sketch.checksum:
        return True
    sums = (
        (a.sketch.abs_sum, b.sketch.abs_sum),
        (a.sketch.fourth_sum, b.sketch.fourth_sum),
    )
    return all(
        x is not None and y is not None and abs(x - y) <= _CLOSE * max(abs(x), abs(y))
        for x, y in sums
    )
