"""Gradients between the stages of a pipeline.

A stage is given the gradient of its output by the next one, not by code of the model. In the joined
run this gradient is what the calls of the next stage made, as it is on one rank: a gradient that
was not sent, or is another one, then does not follow from them.
"""

from __future__ import annotations

from collections.abc import Hashable

from msgspec.structs import replace

from whence.align.derived_run import DerivedTensors
from whence.records import Call, Ref, Run
from whence.records.slots import is_input, is_output
from whence.records.training import BACKWARD

_GIVEN = "input.grad."


def handed_back(whole: Run, staged: Run) -> Run:
    """The staged run, whose backward calls of the root read what the same calls made as in `whole`.

    Of a call of `whole` without a partner, or a gradient that no call made, nothing is changed.
    """
    partners = {_key(call): call for call in staged.calls if call.phase == BACKWARD}
    made = {
        ref.record: (_key(call), ref.slot)
        for call in whole.calls
        if call.phase == BACKWARD
        for ref in call.refs
        if is_output(ref.slot)
    }
    calls = list(staged.calls)
    for call in whole.calls:
        partner = partners.get(_key(call))
        if call.phase != BACKWARD or call.scope or partner is None:
            continue
        given = {
            ref.slot: record
            for ref in call.refs
            if ref.slot.startswith(_GIVEN)
            and (record := _made(partners, made.get(ref.record))) is not None
        }
        if given and not all(ref.slot in given for ref in partner.refs if _is_given(ref)):
            calls[partner.id] = _reading(partner, call, given)
    return DerivedTensors(staged).done(calls)


def _is_given(ref: Ref) -> bool:
    return ref.slot.startswith(_GIVEN)


def _made(partners: dict[Hashable, Call], source: tuple[Hashable, str] | None) -> int | None:
    """The record that the same call of the staged run made."""
    maker = partners.get(source[0]) if source is not None else None
    if maker is None or source is None:
        return None
    return next((ref.record for ref in maker.refs if ref.slot == source[1]), None)


def _reading(call: Call, like: Call, given: dict[str, int]) -> Call:
    """The call, given these gradients in the place of its own."""
    kept = [ref for ref in call.refs if not _is_given(ref)]
    refs = [Ref(slot, record, "content") for slot, record in given.items()]
    outputs = [ref for ref in kept if not is_input(ref.slot)]
    inputs = [ref for ref in kept if is_input(ref.slot)]
    return replace(call, refs=(*inputs, *refs, *outputs), program="", no_program=_OTHER)


_OTHER = "its stage was given the gradient of its output by another rank"


def _key(call: Call) -> Hashable:
    """A call, whatever its root is called."""
    return call.step, call.micro, call.phase, call.scope, call.op, call.occurrence
