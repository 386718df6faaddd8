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
from whence.records.region import renumbered
from whence.records.slots import is_input, is_output, is_param
from whence.records.training import GRADIENTS, LOSS

_GIVEN, _MADE = "input.grad.", "output.grad."


class StillWrapped(LossNotMoved):
    """Why the model inside of a wrapper cannot be compared without it, in words."""


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
        """The same of a further run. Raises StillWrapped."""
        return without_wrapper(run, self.root)


def own_outputs(wrapper: Call, inner: Call) -> frozenset[str]:
    """What a wrapper returns that the model inside does not."""
    returned = {ref.record for ref in inner.refs if is_output(ref.slot)}
    return frozenset(
        ref.slot for ref in wrapper.refs if is_output(ref.slot) and ref.record not in returned
    )


def without_wrapper(run: Run, root: str) -> Unwrapped:
    """The run with the model inside of a root's wrapper as the root. Raises StillWrapped where the
    wrapper does more than hand on.
    """
    training = TrainingCalls(run)
    gone, models = set[int](), dict[int, Call]()
    scope = models_of(run)[root][0].scope
    for wrapper in run.calls:
        is_wrapper = (wrapper.parent, wrapper.kind, wrapper.op) == (-1, "module", "")
        if not is_wrapper or (wrapper.root, wrapper.scope) != (root, scope):
            continue
        chain = nested(training, wrapper)
        if len(chain) < 2:
            raise StillWrapped(f"{wrapper.name} does not always call one model")
        inner = chain[1]
        _check(training, wrapper, inner)
        gone |= {wrapper.id, *(part.id for part in training.parts(wrapper))}
        models[inner.id] = _as_root(inner, wrapper)
    remaining = [models.get(call.id, call) for call in run.calls if call.id not in gone]
    return Unwrapped(run, renumbered(remaining), root)


def _check(training: TrainingCalls, wrapper: Call, inner: Call) -> None:
    """Raises StillWrapped where more than a model stands below a wrapper, or where it changes what
    that returned or the gradient of that.
    """
    if len(training.modules(wrapper)) > 1:
        raise StillWrapped(f"{wrapper.name} calls more than one module")
    returned = {ref.slot: ref.record for ref in inner.refs}
    for ref in wrapper.refs:
        if is_output(ref.slot) and returned.get(ref.slot, ref.record) != ref.record:
            raise StillWrapped(f"{wrapper.name} returns another {ref.slot} than its model")
    for part in training.parts(wrapper):
        incoming = {ref.record for ref in part.refs if ref.slot.startswith(_GIVEN)}
        for ref in part.refs:
            if ref.slot.startswith(_MADE) and ref.record not in incoming:
                raise StillWrapped(f"{wrapper.name} changes the gradient of its model")


def _as_root(inner: Call, wrapper: Call) -> Call:
    """The model inside in the place of its wrapper. What both were given was seen there first; what
    the wrapper returns beside is an output that is compared where both runs have it.
    """
    edges = {ref.record: ref.edge for ref in reversed(wrapper.refs) if is_input(ref.slot)}
    refs = tuple(
        Ref(ref.slot, ref.record, edges.get(ref.record, ref.edge)) if is_input(ref.slot) else ref
        for ref in inner.refs
    )
    own = own_outputs(wrapper, inner)
    beside = tuple(ref for ref in wrapper.refs if ref.slot in own)
    return msgspec.structs.replace(inner, parent=-1, number=wrapper.number, refs=(*refs, *beside))


@dataclass(frozen=True)
class Names:
    """How a model and its modules are called: the root, the scope of the model itself, and what the
    scopes of its modules begin with.
    """

    root: str
    model: str
    prefix: str


def is_beside(call: Call) -> bool:
    """Is a call of a root a part of its training that is of no module: a loss, what becomes of all
    gradients, the code around these?
    """
    return call.kind != "module" or call.op in (LOSS, GRADIENTS)


class Renamed(Over):
    """A run of which one root, and the modules of its model, are called as another run's are."""

    def __init__(self, base: Run, own: Names, others: Names) -> None:
        self._names = own, others

        def scope(path: str) -> str:
            if path == own.model:
                return others.model
            if not own.prefix or path == own.prefix or path.startswith(f"{own.prefix}."):
                rest = path[len(own.prefix) :].lstrip(".")
                return ".".join(filter(None, (others.prefix, rest)))
            return path

        def renamed(call: Call) -> Call:
            path = call.scope
            if path or not is_beside(call):
                path = scope(path)
            return msgspec.structs.replace(call, root=others.root, scope=path)

        calls = [renamed(call) if call.root == own.root else call for call in base.calls]
        super().__init__(base, calls)
        self.steps = tuple(
            msgspec.structs.replace(step, root=others.root) if step.root == own.root else step
            for step in base.steps
        )
        self.notes = tuple(
            msgspec.structs.replace(note, scope=others.root) if note.scope == own.root else note
            for note in base.notes
        )
        self.collectives = [
            msgspec.structs.replace(each, root=others.root, scope=scope(each.scope))
            if each.root == own.root
            else each
            for each in self.collectives
        ]

    def redone(self, run: Run) -> Run:
        """The same of a further run."""
        return Renamed(run, *self._names)
