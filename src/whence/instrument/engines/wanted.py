"""Finds the values of a graph that the selection of a capture may include."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from whence.instrument.engines.watched import NodeForm
from whence.instrument.session import Session
from whence.instrument.step_choice.windows import first_step


def wanted_values(
    session: Session,
    nodes: Sequence[NodeForm],
    outputs: Collection[str],
    constants: Collection[str] = (),
) -> list[str]:
    """Results of nodes that the selection may include, in graph order.

    outputs: of the model, which are seen anyway. constants: values through which parameters are
    shown.
    """
    values: dict[str, None] = {}
    for place, form in enumerate(nodes, 1):
        if session.takes_all or _may_want(session, form.scope, form.op_type, place):
            reads = form.inputs if session.selector.slots("input") else ()
            makes = form.outputs if session.selector.slots("output") else ()
            held = [(slot, v) for slot, v in form.params if v in constants]
            values.update(dict.fromkeys(value for _, value in (*reads, *makes, *held)))
    made = {value for form in nodes for _, value in form.outputs} | set(constants)
    return [value for value in values if value in made and value not in outputs]


def _may_want(session: Session, scope: str, op_type: str, place: int) -> bool:
    """Whether a node may be selected in a selected step."""
    first = first_step(session.options.ranges)
    only, session.selector.only = session.selector.only, None
    try:
        return session.selector.wants(scope, op_type, 1, str(place), first)
    finally:
        session.selector.only = only
