"""The parameters and buffers of the ranks, and which ranks must hold replicas of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from whence.comparison.ranks.rank_calls import Moment, Print, RankCalls, clusters, replicated
from whence.records import Call, Placement
from whence.records.slots import is_param, param_name
from whence.records.training import OPTIMIZER, TAKEN_GRADIENT

_DDP = "DistributedDataParallel"


class Parameter:
    """A parameter or buffer of a module. read: moments of forward passes that read it; stepped:
    moments of optimiser steps that update it.
    """

    def __init__(self, root: str, scope: str, name: str) -> None:
        self.root, self.scope, self.name = root, scope, name
        self.read: list[Moment] = []
        self.stepped: list[Moment] = []

    @property
    def full_name(self) -> str:
        """The name as in `named_parameters`."""
        return f"{self.scope}.{self.name}" if self.scope else self.name

    @property
    def slot(self) -> str:
        """The slot of the calls that read it."""
        return f"param.{self.name}"


class Parameters:
    """All parameters of a run, and which ranks hold replicas of each."""

    def __init__(self, calls: RankCalls) -> None:
        self.calls = calls
        table: dict[tuple[str, str, str], Parameter] = {}
        self._roots: dict[str, str] = {}
        for moment, group in calls.at.items():
            if moment.phase == "forward" and not moment.op:
                self._forward(moment, group, table)
            elif moment.phase == OPTIMIZER and moment.op and "input.param" in _slots(group):
                key = moment.root, moment.scope, moment.op
                table.setdefault(key, Parameter(*key)).stepped.append(moment)
        self.all = list(table.values())

    def _forward(
        self,
        moment: Moment,
        group: dict[int, Call],
        table: dict[tuple[str, str, str], Parameter],
    ) -> None:
        for call in group.values():
            if not moment.scope:
                self._roots[moment.root] = call.op_type
            for ref in call.refs:
                if is_param(ref.slot):
                    key = moment.root, moment.scope, param_name(ref.slot)
                    parameter = table.setdefault(key, Parameter(*key))
                    if parameter.read[-1:] != [moment]:
                        parameter.read.append(moment)

    @cached_property
    def first(self) -> dict[int, dict[int, Print]]:
        """By `id()` of a parameter, each rank's fingerprint of its first recorded value."""
        return {id(p): self._first(p) for p in self.all}

    def _first(self, parameter: Parameter) -> dict[int, Print]:
        first: dict[int, Print] = {}
        for moments, slot in ((parameter.read, parameter.slot), (parameter.stepped, "input.param")):
            for moment in moments[:1]:
                for rank, known in self.calls.prints(moment, slot).items():
                    first.setdefault(rank, known)
        return first

    def placement(self, parameter: Parameter) -> dict[int, Placement]:
        """By rank, the placement of a parameter in the optimiser, or in the module if no optimiser
        updates it.
        """
        moments, slot = (
            (parameter.stepped, "input.param")
            if parameter.stepped
            else (parameter.read, parameter.slot)
        )
        group = self.calls.at[moments[0]] if moments else {}
        return {r: c.placements[slot] for r, c in group.items() if slot in c.placements}

    def replicas(self, parameter: Parameter) -> list[tuple[int, ...]]:
        """Groups of ranks that must hold replicas of a parameter: according to its placement, or by
        equal first values, equal reduced gradients, or DDP.
        """
        groups: set[tuple[int, ...]] = set()
        placements = self.placement(parameter)
        for placement in placements.values():
            groups.update(replicated(placement))
        if not placements:
            groups.update(self._seen(parameter))
        present = set(self.first[id(parameter)])
        kept = (tuple(rank for rank in group if rank in present) for group in groups)
        return sorted({group for group in kept if len(group) > 1})

    def _seen(self, parameter: Parameter) -> Iterator[tuple[int, ...]]:
        prints = self.first[id(parameter)]
        if self._roots.get(parameter.root) == _DDP:
            yield from _of_one_shape(prints)
            return
        for group in clusters(prints):
            if len(group) > 1 and (
                not prints[group[0]].constant or self._belongs_together(parameter, group)
            ):
                yield group
        yield from self._reduced_alike(parameter)

    def _reduced_alike(self, parameter: Parameter) -> Iterator[tuple[int, ...]]:
        """Groups of ranks with bitwise equal gradients in the first step, which were reduced over
        the group.
        """
        if parameter.stepped:
            taken = self.calls.prints(parameter.stepped[0], TAKEN_GRADIENT)
            for group in clusters(taken):
                if len(group) > 1 and not taken[group[0]].constant:
                    yield group

    def _belongs_together(self, parameter: Parameter, group: tuple[int, ...]) -> bool:
        """Whether ranks that hold the same constant hold replicas of one parameter. They do if all
        random parameters near it are equal, or if it scales or shifts a tensor that they all have.
        """
        parts = parameter.scope.split(".") if parameter.scope else []
        for depth in range(len(parts), -1, -1):
            above = ".".join(parts[:depth])
            near = [p for p in self.all if p.root == parameter.root and _is_below(p.scope, above)]
            prints = [self.first[id(p)] for p in near if not self.placement(p)]
            varied = [p for p in prints if any(p[r].constant is False for r in group if r in p)]
            if varied:
                if all(len({p[r].text for r in group if r in p}) == 1 for p in varied):
                    return True
                if depth == len(parts):  # a module in pieces
                    return False
                break
        return self._scales_what_all_have(parameter, group)

    def _scales_what_all_have(self, parameter: Parameter, group: tuple[int, ...]) -> bool:
        if not parameter.read:
            return False
        moment = parameter.read[0]
        given = self.calls.prints(moment, "input.0")
        made = self.calls.prints(moment, "output.0")
        shape = self.first[id(parameter)][group[0]].shape
        return (
            all(rank in given and rank in made for rank in group)
            and len({given[rank].text for rank in group}) == 1
            and all(known[group[0]].shape[-len(shape) :] == shape for known in (given, made))
            and bool(shape)
        )

    def are_copies(self, one: int, other: int) -> bool:
        """Whether two ranks hold the same model: all parameters, except constant ones, have equal
        first values or equal reduced gradients.
        """
        has_compared = False
        for parameter in self.all:
            prints = self.first[id(parameter)]
            if one not in prints or other not in prints:
                return False
            if prints[one].constant and prints[other].constant:
                continue
            has_compared = True
            if prints[one].text != prints[other].text and not any(
                {one, other} <= set(group) for group in self._reduced_alike(parameter)
            ):
                return False
        return has_compared


def _of_one_shape(prints: dict[int, Print]) -> Iterator[tuple[int, ...]]:
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for rank, known in prints.items():
        by_shape.setdefault(known.shape, []).append(rank)
    yield from (tuple(ranks) for ranks in by_shape.values() if len(ranks) > 1)


def _is_below(scope: str, above: str) -> bool:
    return not above or scope == above or scope.startswith(f"{above}.")


def _slots(group: dict[int, Call]) -> set[str]:
    return {ref.slot for call in group.values() for ref in call.refs}
