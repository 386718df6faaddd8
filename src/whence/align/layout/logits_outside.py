"""Pairs logits that the model returns in one run with logits that a separate call computes in the
other.

Serving engines let the model return hidden states and score the last of them in a call of its own;
elsewhere the model's head does both. What either root returns is paired as it is elsewhere.
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


def heads(editor: PlanEditor) -> None:
    """Pair a root's logits with a call beside the other root, then pair what the roots return."""
    roots = {
        c.id: editor.pairs[c.id]
        for c in editor.reference.calls
        if c.parent == -1 and c.id in editor.pairs
    }
    for pair in roots.values():
        call, target_call = editor.calls(pair)
        calls, target_calls = editor.reference.calls, editor.target.calls
        returned = _returned(call, pair.only_reference, editor.reference)
        target_returned = _returned(target_call, pair.only_target, editor.target)
        if not returned and not target_returned:
            continue
        free = (
            [target_calls[i] for i in sorted(editor.free_target)],
            [calls[i] for i in sorted(editor.free_reference)],
        )
        for ref in returned:
            _pair_calls(
                editor,
                _maker(calls, call, ref.record),
                _only_scorer(free[0], target_call, editor.target, editor.reference, ref.record),
            )
        for ref in target_returned:
            _pair_calls(
                editor,
                _only_scorer(free[1], call, editor.reference, editor.target, ref.record),
                _maker(target_calls, target_call, ref.record),
            )
    partners = editor.partners()
    for number, pair in editor.pairs.copy().items():
        if pair.evidence != _WORDS and pair != roots.get(number):
            continue
        call = editor.reference.calls[pair.reference]
        # tied to the embedding, perhaps
        unpaired = [r for r in call.slots("param") if r.slot in pair.only_reference]
        unpaired += _returned(call, pair.only_reference, editor.reference)
        slots = [
            SlotPair(r.slot, partners[r.record][1], r.record, partners[r.record][0])
            for r in unpaired
            if r.record in partners
        ]
        if slots:
            editor.set_slots(pair.reference, [*pair.slots, *slots])


def _returned(call: Call, slots: Iterable[str], run: Run) -> list[Ref]:
    """The references of a root's outputs in these slots that may be logits: floating, 2-D or more,
    not empty, and no caches.
    """
    names = set(slots)
    refs = [r for r in call.slots("output") if r.slot in names]
    return [r for r in refs if _is_scores(run, r.record) and not r.slot.startswith("output.past")]


def _is_scores(run: Run, record: int) -> bool:
    tensor = run.records[record]
    return len(tensor.shape) > 1 and tensor.count > 0 and dtypes.is_floating(tensor.dtype)


def _maker(calls: Iterable[Call], root: Call, record: int) -> Call | None:
    """The innermost call below this root that made this tensor."""
    makers = [
        c
        for c in calls
        if c.parent != -1
        and same_step(c, root)
        and any(r.record == record for r in c.slots("output"))
    ]
    return max(makers, key=lambda c: c.order, default=None)


def _only_scorer(
    calls: Iterable[Call], root: Call, run: Run, across: Run, record: int
) -> Call | None:
    """The only call beside the root or right below it whose single output has the element count and
    last extent of `record`, a record of the run `across`; None without one or with several.
    """
    scores = across.records[record]

    def fits(call: Call) -> bool:
        outputs = [run.records[r.record] for r in call.slots("output")]
        return (
            len(outputs) == 1
            and outputs[0].count == scores.count
            and outputs[0].shape[-1:] == scores.shape[-1:]
        )

    scorers = [
        c
        for c in calls
        if c.parent in (-1, root.id) and c.id != root.id and same_step(c, root) and fits(c)
    ]
    return scorers[0] if len(scorers) == 1 else None


def _pair_calls(editor: PlanEditor, call: Call | None, target_call: Call | None) -> None:
    if (
        call is None
        or target_call is None
        or call.id not in editor.free_reference
        or target_call.id not in editor.free_target
    ):
        return
    editor.release("reference", call)
    editor.release("target", target_call)
    editor.pairs[call.id] = pair_of(
        call, target_call, RULE, editor.reference, editor.target, _WORDS
    )
    editor.paired_with[target_call.id].add(call.id)
