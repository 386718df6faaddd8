"""Models that one run calls through wrappers: modules that hand on what they are given to one model
and return what it returns (DistributedDataParallel, PEFT, a class of the user's).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from whence.comparison.prepare.loss_program import LossNotMoved
from whence.comparison.prepare.training_calls import TrainingCalls, models_of
from whence.records import Call, Over, Ref, Run
from whence.records.slots import is_input, is_output, is_param

_GIVEN, _MADE = "input.grad.", "output.grad."


def nested(training: TrainingCalls, model: Call) -> list[Call]:
    """A model and the one model inside of it, and so on, outermost first. What stands beside a
    model inside has no parameters: it may be a loss.
    """
    chain = [model]
    while True:
        kids = training.modules(chain[-1])
        inner = kids if len(kids) == 1 else [kid for kid in kids if not kid.leaf]
        if len(inner) != 1 or any(kid is not inner[0] and _has_params(kid) for kid in kids):
            return chain
        chain += inner


def _has_params(call: Call) -> bool:
    return any(is_param(ref.slot) for ref in call.refs)


@dataclass(frozen=True)
class Layers:
    """What is right below a model. prefix: what the scopes of all its modules begin with. kinds:
    classes by the rest of their scopes.
    """

    prefix: str
    kinds: frozenset[tuple[str, str]]

    def is_same(self, other: Layers) -> bool:
        """May both be one model's? One may have a loss more, which is a module."""
        return bool(self.kinds and other.kinds) and (
            self.kinds <= other.kinds or other.kinds <= self.kinds
        )


def layers_of(training: TrainingCalls, model: Call) -> Layers:
    """What is right below a model; of one that calls no modules, itself."""
    kids = training.modules(model)
    if not kids:
        return Layers(model.scope, frozenset({("", model.op_type)}))
    paths = [kid.scope.split(".") for kid in kids]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    depth = min(sum(1 for _ in shared), *(len(path) - 1 for path in paths))
    return Layers(
        ".".join(paths[0][:depth]),
        frozenset(
            (".".join(path[depth:]), kid.op_type) for path, kid in zip(paths, kids, strict=True)
        ),
    )


class Unwrapped(Over):
    """A run of which one root is the model that its wrapper calls."""

    def __init__(self, base: Run, calls: Sequence[Call], root: str) -> None:
        super().__init__(base, calls)
        self.root = root

    def redone(self, run: Run) -> Run:
        """The same of a further run. Raises LossNotMoved."""
        return without_wrapper(run, self.root)


def own_outputs(training: TrainingCalls, wrapper: Call, inner: Call) -> frozenset[str]:
    """What a wrapper returns that the model inside does not."""
    returned = {ref.record for ref in inner.refs if is_output(ref.slot)}
    return frozenset(
        ref.slot for ref in wrapper.refs if is_output(ref.slot) and ref.record not in returned
    )


def without_wrapper(run: Run, root: str) -> Unwrapped:
    """The run with the model inside of a root's wrapper as the root. Raises LossNotMoved where the
    wrapper does more than hand on.
    """
    training = TrainingCalls(run)
    gone, models = set[int](), dict[int, Call]()
    scope = ""
    for wrapper in models_of(run)[root]:
        chain = nested(training, wrapper)
        if len(chain) < 2:
            raise LossNotMoved(f"{wrapper.name} calls no one model")
        inner = chain[1]
        _check(training, wrapper, inner)
        gone |= {wrapper.id, *(part.id for part in training.parts(wrapper))}
        scope = inner.scope
        models[inner.id] = _as_root(inner, wrapper)
    remaining = [models.get(call.id, call) for call in run.calls if call.id not in gone]
    number = {call.id: place for place, call in enumerate(remaining)}
    calls = [
        msgspec.structs.replace(
            call,
            id=place,
            parent=number.get(call.parent, -1),
            scope="" if (call.root, call.scope) == (root, scope) else call.scope,
        )
        for place, call in enumerate(remaining)
    ]
    return Unwrapped(run, calls, root)


def _check(training: TrainingCalls, wrapper: Call, inner: Call) -> None:
    """Raises LossNotMoved where more than a model stands below a wrapper, or where it computes
    anything of what that returned.
    """
    if len(training.modules(wrapper)) > 1:
        raise LossNotMoved(f"{wrapper.name} calls more than one model")
    if own := own_outputs(training, wrapper, inner):
        raise LossNotMoved(f"{wrapper.name} computes {min(own)} behind its model")
    for part in training.parts(wrapper):
        given = {ref.record for ref in part.refs if ref.slot.startswith(_GIVEN)}
        for ref in part.refs:
            if ref.slot.startswith(_MADE) and ref.record not in given:
                raise LossNotMoved(f"{wrapper.name} changes the gradient of its model")


def _as_root(inner: Call, wrapper: Call) -> Call:
    """The model inside in the place of its wrapper. What both were given was seen there first."""
    edges = {ref.record: ref.edge for ref in reversed(wrapper.refs) if is_input(ref.slot)}
    refs = tuple(
        Ref(ref.slot, ref.record, edges.get(ref.record, ref.edge)) if is_input(ref.slot) else ref
        for ref in inner.refs
    )
    return msgspec.structs.replace(inner, parent=-1, number=wrapper.number, refs=refs)


class Renamed(Over):
    """A run of which one root has another name, and its modules another path before theirs."""

    def __init__(self, base: Run, root: str, name: str, prefix: str, instead: str) -> None:
        self._names = root, name, prefix, instead

        def scope(path: str) -> str:
            if prefix and path != prefix and not path.startswith(f"{prefix}."):
                return path
            rest = path[len(prefix) :].lstrip(".")
            return f"{instead}.{rest}" if instead and rest else rest

        super().__init__(
            base,
            [
                msgspec.structs.replace(call, root=name, scope=scope(call.scope))
                if call.root == root
                else call
                for call in base.calls
            ],
        )
        self.steps = tuple(
            msgspec.structs.replace(step, root=name) if step.root == root else step
            for step in base.steps
        )
        self.notes = tuple(
            msgspec.structs.replace(note, scope=name) if note.scope == root else note
            for note in base.notes
        )
        self.collectives = [
            msgspec.structs.replace(each, root=name, scope=scope(each.scope))
            if each.root == root
            else each
            for each in self.collectives
        ]

    def redone(self, run: Run) -> Run:
        """The same of a further run."""
        return Renamed(run, *self._names)
