"""Groups the calls of a training: a model's call with its loss and its backward pass."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from whence.comparison.prepare.loss_program import LossNotMoved, TrainedCall
from whence.records import Call, Run, children
from whence.records.slots import is_input
from whence.records.training import BACKWARD, LOSS


def models_of(run: Run) -> dict[str, list[Call]]:
    """Calls of models in training, by root. If the root itself is never called (its `training_step`
    calls a module in it instead), the calls of that one module count.
    """
    scopes = defaultdict[str, dict[str, list[Call]]](dict)
    for call in run.calls:
        is_model = call.parent == -1 and call.kind == "module" and not call.op
        if is_model and call.training and call.phase != BACKWARD:
            scopes[call.root].setdefault(call.scope, []).append(call)
    return {
        root: calls[""] if "" in calls else next(iter(calls.values()))
        for root, calls in scopes.items()
        if "" in calls or len(calls) == 1
    }


class _Place(NamedTuple):
    """The key of a micro-batch of one model on one process."""

    rank: int
    root: str
    step: int
    micro: int


def _place(call: Call) -> _Place:
    return _Place(call.rank, call.root, call.step, call.micro)


class TrainingCalls:
    """Looks up which loss, backward pass and children belong to a model's call."""

    def __init__(self, run: Run) -> None:
        self.run, self._below = run, children(run.calls)
        self._losses = defaultdict[_Place, list[Call]](list)
        self._losses_backward = defaultdict[_Place, list[Call]](list)
        self._parts = defaultdict[tuple[int, int], list[Call]](list)  # by rank and forward call
        for call in run.calls:
            if call.op == LOSS and call.kind == "module":
                is_back = call.phase == BACKWARD
                (self._losses_backward if is_back else self._losses)[_place(call)].append(call)
            elif call.phase == BACKWARD and call.forward >= 0:
                self._parts[call.rank, call.forward].append(call)

    def children(self, call: Call) -> list[Call]:
        """The calls right below a call, in order."""
        return [self.run.calls[k] for k in self._below.get(call.id, ())]

    def modules(self, call: Call) -> list[Call]:
        """The modules that a call's code calls, in order."""
        return [kid for kid in self.children(call) if kid.kind == "module"]

    def parts(self, call: Call) -> list[Call]:
        """The calls of the backward pass of a call's own operators."""
        return self._parts[call.rank, call.order]

    def last_order(self, call: Call) -> int:
        """The execution order of the last call that started inside a call."""
        below = self._below.get(call.id)
        return self.last_order(self.run.calls[below[-1]]) if below else call.order

    def trained(self, model: Call, losses: frozenset[str], lone: frozenset[str]) -> TrainedCall:
        """A call of a model with all that belongs to its loss. losses: its outputs that are losses;
        lone: scopes of children that belong to the loss. Raises LossNotMoved.
        """
        kids, place = self.children(model), _place(model)
        behind, back = self._losses[place], self._losses_backward[place]
        if len(behind) > 1 or len(back) > 1:
            raise LossNotMoved(f"step {place.step} has several losses")
        lone_places = frozenset(k for k, kid in enumerate(kids) if kid.scope in lone)
        return TrainedCall(
            self.run,
            model,
            kids,
            lone_places,
            losses,
            behind[0] if behind else None,
            back[0] if back else None,
            self.parts(model),
            [part for k in lone_places for part in self.parts(kids[k])],
        )

    def is_loss(self, model: Call, slot: str) -> bool:
        """Whether the backward pass starts at this output, or at a loss that reads it."""
        record = model.by_slot.get(slot, -1)
        if any(
            ref.record == record and is_input(ref.slot)
            for loss in self._losses[_place(model)]
            for ref in loss.refs
        ):
            return True
        gradient = f"input.grad.{slot}"
        return any(ref.slot == gradient for part in self.parts(model) for ref in part.refs)
