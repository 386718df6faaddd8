"""What a root returns in one run and a call beside it makes in the other: the scores of a model
behind a logits processor.

Serving engines let the model return hidden states and score the last of them in a call of its own;
elsewhere the model's head does both. What either root returns faces what it faces elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from whence import dtypes
from whence.align.call_sites import same_step
from whence.align.calls.match import pair_of
from whence.align.plan_editor import PlanEditor
from whence.records import Call, Ref, Run
from whence.results import SlotPair

RULE = "data flow"
_WORDS = "makes what the root of the other run returns"


def heads(at: PlanEditor) -> None:
    """Pair the call that makes what one root returns with the one beside the other root that makes
    as much; then what roots return.
    """
    roots = [at.pairs[c.id] for c in at.reference.calls if c.parent == -1 and c.id in at.pairs]
    for pair in roots:
        call, other = at.reference.calls[pair.reference], at.target.calls[pair.target]
        mine, theirs = at.reference.calls, at.target.calls
        free = (
            [theirs[i] for i in sorted(at.free_target)],
            [mine[i] for i in sorted(at.free_reference)],
        )
        for ref in _returned(call, pair.only_reference, at.reference):
            _face(
                at,
                _maker(mine, call, ref.record),
                _alone(free[0], other, at.target, at.reference, ref.record),
            )
        for ref in _returned(other, pair.only_target, at.target):
            _face(
                at,
                _alone(free[1], call, at.reference, at.target, ref.record),
                _maker(theirs, other, ref.record),
            )
    known = at.faces()
    for pair in (p for p in at.pairs.copy().values() if p.evidence == _WORDS or p in roots):
        call = at.reference.calls[pair.reference]
        # tied to the embedding, perhaps
        left = [r for r in call.slots("param") if r.slot in pair.only_reference]
        left += _returned(call, pair.only_reference, at.reference)
        found = [
            SlotPair(r.slot, known[r.record][1], r.record, known[r.record][0])
            for r in left
            if r.record in known
        ]
        if found:
            at.put(pair.reference, [*pair.slots, *found])


def _returned(call: Call, slots: Iterable[str], run: Run) -> list[Ref]:
    """What a root returns in these slots: numbers with rows and channels, no caches."""
    wanted = set(slots)
    refs = [r for r in call.slots("output") if r.slot in wanted]
    return [r for r in refs if _is_scores(run, r.record) and not r.slot.startswith("output.past")]


def _is_scores(run: Run, record: int) -> bool:
    found = run.records[record]
    return len(found.shape) > 1 and found.count > 0 and dtypes.is_floating(found.dtype)


def _maker(calls: Iterable[Call], root: Call, record: int) -> Call | None:
    """The innermost call of a root that made this tensor."""
    found = [
        c
        for c in calls
        if c.parent != -1
        and same_step(c, root)
        and any(r.record == record for r in c.slots("output"))
    ]
    return max(found, key=lambda c: c.order, default=None)


def _alone(calls: Iterable[Call], root: Call, run: Run, across: Run, record: int) -> Call | None:
    """The only call without a partner, outside its parents or at the end of the root, that makes as
    many rows of as many channels.
    """
    wanted = across.records[record]

    def fits(call: Call) -> bool:
        outputs = [run.records[r.record] for r in call.slots("output")]
        return (
            len(outputs) == 1
            and outputs[0].count == wanted.count
            and outputs[0].shape[-1:] == wanted.shape[-1:]
        )

    found = [
        c
        for c in calls
        if c.parent in (-1, root.id) and c.id != root.id and same_step(c, root) and fits(c)
    ]
    return found[0] if len(found) == 1 else None


def _face(at: PlanEditor, call: Call | None, other: Call | None) -> None:
    if (
        call is None
        or other is None
        or call.id not in at.free_reference
        or other.id not in at.free_target
    ):
        return
    at.free("reference", call)
    at.free("target", other)
    at.pairs[call.id] = pair_of(call, other, RULE, at.reference, at.target, _WORDS)
    at.facing[other.id].add(call.id)
