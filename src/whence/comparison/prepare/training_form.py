"""Brings two trainings to one form: the same module counts as the model, and the loss is computed
in the same place.

Only one of the runs may call its model through wrappers, or compute the loss inside the model. Both
are then reduced to the innermost models whose layers are the same. All code that runs behind these,
in a wrapper or in the code that calls it, belongs to the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from whence.align.call_sites import match_roots
from whence.comparison.prepare.loss_place import (
    LossPlace,
    loss_places,
    moved,
    outputs_of,
    spaced,
)
from whence.comparison.prepare.loss_program import LossNotMoved
from whence.comparison.prepare.training_calls import TrainingCalls, models_of
from whence.records import Call, Over, Ref, Run
from whence.records.region import renumbered
from whence.records.slots import is_input, is_output, is_param
from whence.records.training import GRADIENTS, LOSS

SIDES = ("reference", "target")


@runtime_checkable
class Reformed(Protocol):
    """A run that was brought to another form than it was captured in."""

    base: Run

    def redone(self, run: Run) -> Run:
        """A further run of the same program in this form. Raises LossNotMoved."""
        ...


def in_one_form(
    reference: Run, target: Run, *, unwrapped: bool = True
) -> tuple[Run, Run, tuple[str, ...]]:
    """(reference, target, sentences): both runs in one form. They stay as they are if they already
    have one form or cannot be brought to one. unwrapped: whether wrappers may be left out; they may
    not if the user says which calls are partners.
    """
    models = models_of(reference), models_of(target)
    roots = match_roots(*(itertools.chain.from_iterable(each.values()) for each in models))
    sentences: list[str] = []
    for root, target_root in roots.items():
        one_root = _OneRoot((reference, target), (root, target_root), unwrapped=unwrapped)
        reference, target = one_root.in_one_form()
        sentences += one_root.sentences
    return reference, target, tuple(sentences)


def in_form_of(reference: Run, run: Run) -> Run:
    """A further run of the reference, brought to the form of the reference; as it is if that is not
    possible.
    """
    forms: list[Reformed] = []
    while isinstance(reference, Over):
        if isinstance(reference, Reformed):
            forms.append(reference)
        reference = reference.base
    again = run
    for form in reversed(forms):
        try:
            again = form.redone(again)
        except LossNotMoved:
            return run
    return again


class _OneRoot:
    """Brings one model to the same form in both runs. sentences: what was changed."""

    def __init__(self, runs: tuple[Run, Run], roots: tuple[str, str], *, unwrapped: bool) -> None:
        self._runs, self._roots, self._unwrapped = runs, roots, unwrapped
        self._models = [models_of(run)[root] for run, root in zip(runs, roots, strict=True)]
        trainings = [TrainingCalls(run) for run in runs]
        firsts = [calls[0] for calls in self._models]
        self._chains = [
            nested(training, first) if unwrapped else [first]
            for training, first in zip(trainings, firsts, strict=True)
        ]
        self._layers = [
            [layers_of(training, model) for model in chain]
            for training, chain in zip(trainings, self._chains, strict=True)
        ]
        self.sentences: list[str] = []

    def in_one_form(self) -> tuple[Run, Run]:
        """Both runs with this model in one form; as they are if that is not possible."""
        refusals = []
        for depths in self._depths():
            try:
                runs = self._at(depths)
            except LossNotMoved as refused:
                refusals.append(refused)
                continue
            if runs is not None:
                return runs
        self.sentences = [self._refused(refused) for refused in refusals[-1:]]
        return self._runs

    def _depths(self) -> Iterator[tuple[int, int]]:
        """Pairs (wrappers to leave out of the reference, of the target) after which the layers are
        the same, the fewest first. Equal numbers are tried only if the outputs of the models
        differ.
        """
        layers, others = self._layers
        places = sorted(itertools.product(range(len(layers)), range(len(others))), key=sum)
        alike = [(a, b) for a, b in places if layers[a].is_same(others[b])]
        more = alike[0][1] - alike[0][0] if alike else 0
        if not alike or (self._roots[0] == self._roots[1] and alike[0] != (0, 0)):
            alike = [(0, 0), *alike]
        differs = False
        for depth, other in alike:
            if depth == other:
                differs = differs or self._returns_differ(depth)
            is_of_these = other - depth == more or not (depth or other)
            if is_of_these and (depth != other or differs):
                yield depth, other

    def _returns_differ(self, depth: int) -> bool:
        """Whether the output names of the models at this depth differ between the runs."""
        if not depth:
            return outputs_of(self._models[0]) != outputs_of(self._models[1])
        return outputs_of([self._chains[0][depth]]) != outputs_of([self._chains[1][depth]])

    def _at(self, depths: tuple[int, int]) -> tuple[Run, Run] | None:
        """Both runs without this many wrappers each and with the loss in one place; None if that
        changes nothing. Raises LossNotMoved.
        """
        runs, roots, sentences = list(self._runs), list(self._roots), list[str]()
        is_changed = depths[0] != depths[1]
        for side, depth in enumerate(depths):
            computes = False
            for _ in range(depth):
                runs[side], is_part = _without_outermost(runs[side], roots[side])
                computes = computes or is_part
            is_changed = is_changed or computes
            if depth:
                sentences.append(self._left_out(side, depth, computes=computes))
        if self._unwrapped:
            self._name_alike(runs, roots, depths)
        trainings = TrainingCalls(spaced(runs[0])), TrainingCalls(spaced(runs[1]))
        models = [models_of(t.run)[root] for t, root in zip(trainings, roots, strict=True)]
        places = loss_places(trainings, (models[0], models[1]))
        if places is not None:
            for side, place in enumerate(places):
                runs[side] = moved(trainings[side], {roots[side]: place})
            sentences.append(self._one_call(depths, places))
            is_changed = True
        if not is_changed:
            return None
        self.sentences = sentences
        return runs[0], runs[1]

    def _name_alike(self, runs: list[Run], roots: list[str], depths: Sequence[int]) -> None:
        """Rename, in place, the target's model like the reference's, if the layers are the same."""
        layers = [self._layers[side][depth] for side, depth in enumerate(depths)]
        names = [
            Names(roots[side], self._chains[side][depth].scope, layers[side].prefix)
            for side, depth in enumerate(depths)
        ]
        if names[0] != names[1] and layers[0].is_same(layers[1]):
            runs[1] = Renamed(runs[1], names[1], names[0])
            roots[1] = roots[0]

    # ---- in words

    def _name(self, side: int, depth: int) -> str:
        return self._chains[side][depth].op_type if depth else self._roots[side]

    def _left_out(self, side: int, depth: int, *, computes: bool) -> str:
        wrappers = ", ".join(call.op_type for call in self._chains[side][:depth])
        words = f"{wrappers} around {self._name(side, depth)} in the {SIDES[side]} is left out"
        return f"{words}; what it computes belongs to the loss" if computes else words

    def _one_call(self, depths: Sequence[int], places: Sequence[LossPlace]) -> str:
        inside = 0 if places[0].losses else 1
        return (
            f"the loss is computed inside {self._name(0, depths[0])} in the {SIDES[inside]}, "
            f"behind it in the {SIDES[1 - inside]}: compared as one call, from what the layers "
            "return on"
        )

    def _refused(self, refused: LossNotMoved) -> str:
        root, other = self._roots
        if isinstance(refused, StillWrapped):
            both = root if root == other else f"{root} and {other}"
            return f"{both} are compared with what is around the model: {refused}"
        return (
            f"the loss is computed inside {root} in one run and behind it in the other, and is not "
            f"compared as one: {refused}"
        )


def _without_outermost(run: Run, root: str) -> tuple[Run, bool]:
    """(the run without the outermost wrapper of a root, whether that wrapper computes a part of the
    loss). Raises LossNotMoved.
    """
    training = TrainingCalls(spaced(run))
    models = models_of(training.run)[root]
    losses, lone = set[str](), set[str]()
    for wrapper in models:
        chain = nested(training, wrapper)
        if len(chain) < 2:
            raise StillWrapped(f"{wrapper.name} does not always call one model")
        losses |= own_outputs(wrapper, chain[1])
        lone |= {kid.scope for kid in training.modules(wrapper) if kid is not chain[1]}
    losses = {slot for slot in losses if any(training.is_loss(each, slot) for each in models)}
    if losses:
        nothing = frozenset[str]()
        place = LossPlace(frozenset(losses), frozenset(lone), nothing, {}, nothing)
        run = moved(training, {root: place})
    return without_wrapper(run, root), bool(losses)


# Models that one run calls through wrappers: modules that pass their inputs on to one model and
# return its outputs (DistributedDataParallel, PEFT, a class of the user's).

_GIVEN, _MADE = "input.grad.", "output.grad."


class StillWrapped(LossNotMoved):
    """Why the model inside of a wrapper cannot be compared without it, in words."""


def nested(training: TrainingCalls, model: Call) -> list[Call]:
    """A model, the one model inside it, and so on, outermost first. Modules beside an inner model
    must have no parameters; such a module may be a loss.
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
    """The modules right below a model. prefix: common prefix of their scopes; kinds: (rest of the
    scope, class) of each.
    """

    prefix: str
    kinds: frozenset[tuple[str, str]]

    def is_same(self, other: Layers) -> bool:
        """Whether both may belong to the same model. One may have further modules (a loss)."""
        return bool(self.kinds and other.kinds) and (
            self.kinds <= other.kinds or other.kinds <= self.kinds
        )


def layers_of(training: TrainingCalls, model: Call) -> Layers:
    """The modules right below a model; the model itself if it calls no modules."""
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
    """A run in which the model inside a wrapper takes the wrapper's place as root."""

    def __init__(self, base: Run, calls: Sequence[Call], root: str) -> None:
        super().__init__(base, calls)
        self.root = root

    def redone(self, run: Run) -> Run:
        """A further run of the same program in this form. Raises StillWrapped."""
        return without_wrapper(run, self.root)


def own_outputs(wrapper: Call, inner: Call) -> frozenset[str]:
    """The output slots of a wrapper whose tensors the model inside does not return."""
    returned = {ref.record for ref in inner.refs if is_output(ref.slot)}
    return frozenset(
        ref.slot for ref in wrapper.refs if is_output(ref.slot) and ref.record not in returned
    )


def without_wrapper(run: Run, root: str) -> Unwrapped:
    """The run in which the model inside a root's wrapper becomes the root. Raises StillWrapped if
    the wrapper does more than pass tensors on.
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
    """Raises StillWrapped if a wrapper calls more than one module, or changes an output of its
    model or a gradient.
    """
    if len(training.modules(wrapper)) > 1:
        raise StillWrapped(f"{wrapper.name} calls more than one module")
    returned = inner.by_slot
    for ref in wrapper.refs:
        if is_output(ref.slot) and returned.get(ref.slot, ref.record) != ref.record:
            raise StillWrapped(f"{wrapper.name} returns another {ref.slot} than its model")
    for part in training.parts(wrapper):
        incoming = {ref.record for ref in part.refs if ref.slot.startswith(_GIVEN)}
        for ref in part.refs:
            if ref.slot.startswith(_MADE) and ref.record not in incoming:
                raise StillWrapped(f"{wrapper.name} changes the gradient of its model")


def _as_root(inner: Call, wrapper: Call) -> Call:
    """The inner model's call in the place of its wrapper's. Inputs keep the edges of the wrapper,
    which received them first; further outputs of the wrapper become outputs of the model.
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
    """The names of a model: its root, its scope and the common prefix of its modules' scopes."""

    root: str
    model: str
    prefix: str


def is_beside(call: Call) -> bool:
    """Whether a call of a root belongs to the training but to no module: a loss, the gradients of
    a step, or the code around these.
    """
    return call.kind != "module" or call.op in (LOSS, GRADIENTS)


class Renamed(Over):
    """A run in which one root and the modules of its model have the names of another run's."""

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
        """A further run of the same program in this form."""
        return Renamed(run, *self._names)
