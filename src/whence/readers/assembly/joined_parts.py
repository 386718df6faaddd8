"""Joins what several readers read from one folder into one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.records import Call, Dumped, Run
from whence.records.known_order import Trace
from whence.records.marks import Mark, has_mark, mark

_BESIDE = "files"
"""The root of labels that accompany a dump with modules."""


@dataclass(frozen=True, slots=True)
class Part:
    """The run that one reader read. reader: its name. file: "" when it read the whole folder.

    prefix: of the names in it. step, rank: where folders state them.
    """

    run: Run
    reader: str
    file: str = ""
    prefix: str = ""
    step: int = 0
    rank: int = 0


def joined(path: object, parts: Sequence[Part]) -> Run:
    """Returns one run of all parts, in their order. Labels of a step and rank share one root, whose
    order is not known; in a dump that has modules they share a separate root.
    """
    building = Building(
        path,
        ", ".join(dict.fromkeys(part.run.info.kind for part in parts)),
        versions={k: v for part in reversed(parts) for k, v in part.run.info.versions.items()},
        settings={k: v for part in reversed(parts) for k, v in part.run.info.settings.items()},
    )
    joining = _Joining(building, [_has_modules(part.run) for part in parts])
    for part in parts:
        joining.add(part)
    building.ended = next((part.run.ended for part in parts if part.run.ended), "")
    return building.run()


class _Joining:
    """Adds parts to a run under construction."""

    def __init__(self, building: Building, have_modules: Sequence[bool]) -> None:
        self._building = building
        self._root = _BESIDE if any(have_modules) else "model"
        self._has_order = have_modules.count(False) < 2
        self._roots: dict[tuple[int, int], int] = {}
        self._occurrences: Counter[tuple[object, ...]] = Counter()

    def add(self, part: Part) -> None:
        is_labels = not _has_modules(part.run)
        first = self._building.take_over(part.run)
        handles: dict[int, int] = {}
        for call in sorted(part.run.calls, key=lambda call: call.order):
            if is_labels and _stands_around(call):
                continue
            card, parent = self._card(part, call), handles.get(call.parent, -1)
            if is_labels:
                card = msgspec.structs.replace(card, root=self._root, notes=self._notes(part, card))
                if parent == -1 and card.scope and not self._has_order:
                    parent = self._root_of(card)
            key = (card.rank, card.root, card.step, card.micro, card.phase, card.scope, card.op)
            card = msgspec.structs.replace(card, occurrence=self._occurrences[key])
            self._occurrences[key] += 1
            tensors = [(ref.slot, first + ref.record) for ref in call.refs]
            handles[call.id] = self._building.again(card, tensors, parent)

    def _card(self, part: Part, call: Call) -> Call:
        """Returns the call with the name, step and rank that its file states."""
        scope = named_tensors.below(part.prefix, call.scope)
        if not scope and call.kind == "label" and len(call.refs) == 1:
            elements = part.run.records[call.refs[0].record].elements
            file = elements.file if isinstance(elements, Dumped) else part.file
            scope = named_tensors.placed(file)[0]
        return msgspec.structs.replace(
            call, scope=scope, step=call.step or part.step, rank=call.rank or part.rank
        )

    def _notes(self, part: Part, card: Call) -> tuple[str, ...]:
        """Returns the notes of a label: next to other parts, only its position among the tensors of
        its own part is known.
        """
        if self._has_order or has_mark(card, Mark.UNORDERED):
            return card.notes
        trace = Trace(card.scope, entry=card.order, file=part.file or part.reader)
        return (*card.notes, trace.note())

    def _root_of(self, card: Call) -> int:
        """Returns the root call of the labels of a step and rank."""
        moment = card.step, card.rank
        if moment not in self._roots:
            self._roots[moment] = self._building.call(
                "", kind="module", root=self._root, step=card.step, rank=card.rank,
                notes=(mark(Mark.UNORDERED),),
            )  # fmt: skip
        return self._roots[moment]


def _has_modules(run: Run) -> bool:
    """Whether some call is more than a label."""
    return any(call.kind != "label" and not _stands_around(call) for call in run.calls)


def _stands_around(call: Call) -> bool:
    """Whether a call is only the root of the labels of its part."""
    return (
        not call.scope
        and call.parent == -1
        and (has_mark(call, Mark.PUT_TOGETHER) or has_mark(call, Mark.UNORDERED))
    )
