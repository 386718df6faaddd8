"""Judges a target of which only some tensors are seen: the reference runs again between them, on
what the target had.

The reference's programs are run through from the root. Wherever a tensor comes up that the target
shows, it is compared with the target's, which then goes on in its place: so each tensor is judged
against what is right for the tensors seen before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence import align, judge
from whence.align import Inner
from whence.comparison.replays.call_tree import TreeWalk
from whence.comparison.replays.replayer import Replayer
from whence.comparison.replays.side import ReplaySource
from whence.comparison.replays.threads import Threads
from whence.comparison.verdicts.declared.tolerances import allows
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameters import Parameters
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.judge import block_quantisation
from whence.judge.limits import CODES_EXPLAINED, CODES_MOSTLY
from whence.judge.policy import Entry
from whence.records import Call, Program, Region, Run
from whence.records.marks import Mark, has_mark
from whence.records.program import Operand
from whence.records.slots import is_inside, is_param, is_written, split_slot
from whence.results import (
    TENSOR_RULE,
    CauseKind,
    Confidence,
    Evidence,
    SlotPair,
    Verdict,
    VerdictKind,
    severity,
)

_REPLICAS = 3
_NEARLY_ALL = 0.9
_INNER_BYTES = 1 << 30
_INNER_CALLS = 2_000

Tile = tuple[int, int]


def _worst(errors: Sequence[judge.PairError]) -> list[judge.PairError]:
    """Of errors the few that say all about their size: the largest of each kind of evidence, and
    one that is not known.
    """
    known = sorted((e for e in errors if e.value is not None), key=lambda e: e.value or 0.0)
    unknown = [e for e in errors if e.value is None]
    return [*{e.evidence: e for e in known}.values(), *unknown[:1]]


def inside(run: Run, allow: Sequence[str] = ()) -> Callable[[int, frozenset[int]], Iterator[Inner]]:
    """What the programs of a run give inside its calls, on its own inputs: for `align.align`.
    Bounded to 1 GiB and 2 000 calls.
    """
    side = ReplaySource(run, allow)

    def found(step: int, counts: frozenset[int]) -> Iterator[Inner]:
        held = calls = 0
        for call in run.calls:
            if call.step != step or not call.program or held > _INNER_BYTES or calls > _INNER_CALLS:
                continue
            made: dict[int, Array] = {}

            def keep(at: int, array: Array, made: dict[int, Array] = made) -> None:
                if array.size in counts:
                    made[at] = array

            calls += 1
            try:
                loaded = side.trusted(call)
                slots = side.records(call, (*loaded.program.inputs, *loaded.program.params))
                arrays, strides = side.arrays(slots)
                loaded.run(
                    arrays,
                    arrays,
                    working="recorded",
                    strides=strides,
                    outputs=loaded.determined(slots),
                    trace=keep,
                )
            except (ReplayRefused, ElementsMissing):
                continue
            for at, array in made.items():
                held += array.nbytes
                yield Inner(call.id, at, loaded.program.operations[at].name, array)

    return found


@dataclass(frozen=True, slots=True)
class _Upstream:
    """What a tensor rests on. behind: regions between it and the tensors seen before it; seen:
    those tensors.

    places: the same with all stretches of a container as one, (call, 0), since one piece of code
    made them.
    """

    behind: frozenset[Tile]
    seen: frozenset[int]

    @property
    def places(self) -> frozenset[Tile]:
        return frozenset((call, min(stretch, 0)) for call, stretch in self.behind)


@dataclass(frozen=True, slots=True)
class _Coarse:
    """How far activations of fewer bits explain a difference: errors by row, root mean square,
    without and with them.

    gain: by how much they fall. expected: what such activations make by themselves. sure: that is
    what the target did.
    """

    words: str
    gain: float
    size: float
    left: float
    expected: float
    sure: bool = False

    def verdict(self, old: Verdict) -> Verdict:
        run = (
            f"{self.words} ahead of matrix products: run so, rel_l2 by row falls from "
            f"{self.size:.2g} to {self.left:.2g}"
        )
        if self.sure:
            return old.replace(
                verdict=VerdictKind.PRECISION,
                confidence=Confidence.NONE,
                cause=CauseKind.UNKNOWN,
                sentence=f"{old.sentence}; as from {run}",
            )
        why = "codes part along many products, or there is a fault beside them"
        return old.replace(
            verdict=VerdictKind.UNDETERMINED,
            confidence=Confidence.NONE,
            cause=CauseKind.UNKNOWN,
            sentence=f"of the size that comes from {run}; {why}",
        )


class _Around:
    """What was made around labels by calls that are no labels, in one process, root and step."""

    def __init__(self, errors: PairErrors, labels: Mapping[int, int]) -> None:
        paired = errors.paired
        self._paired, self.errors = paired, errors
        self._calls: dict[tuple[int, str, int], list[Call]] = defaultdict(list)
        self._looked: dict[tuple[int, str, int], int] = defaultdict(int)
        self._worst: dict[tuple[int, str, int], list[judge.PairError]] = defaultdict(list)
        for call in sorted(paired.calls, key=lambda c: c.order) if labels else ():
            if (
                call.leaf
                and call.id in paired.pair_of
                and call.id not in labels
                and call.phase == "forward"
            ):
                self._calls[call.rank, call.root, call.step].append(call)

    def before(self, label: Call) -> list[judge.PairError]:
        """The largest errors of what was made before a label. Labels are asked for in their
        order.
        """
        key = label.rank, label.root, label.step
        calls, errors = self._calls[key], list(self._worst[key])
        while self._looked[key] < len(calls) and calls[self._looked[key]].order < label.order:
            slots = self._paired.slots[self._paired.pair_of[calls[self._looked[key]].id]].values()
            made = (self.errors.of(s) for s in slots if is_written(s.reference_slot))
            errors += [dataclasses.replace(error, drift=None, lone=0.0) for error in made]
            self._looked[key] += 1
        self._worst[key] = _worst(errors)
        return self._worst[key]

    def kernel(self, label: Call) -> str:
        """The operator whose kernel logged a label, in words; "" for a label that no kernel logged,
        or where no operator is seen.
        """
        if not has_mark(label, Mark.LOGGED):
            return ""
        calls = self._calls[label.rank, label.root, label.step]
        behind = next((c for c in calls if c.order > label.order), None)
        if behind is not None:
            return f"the kernel of {behind.scope or behind.root} ({behind.op_type})"
        return "a kernel behind the last printed tensor" if calls else ""


class SparseTargetJudge:
    """The pairs of a comparison that `align` made of tensors (rule "tensor").

    calls: the reference's calls of these pairs. covered: records that lie between tensors that were
    compared, and so were replayed. notes: what the target did not show, and what stood for it.
    """

    def __init__(
        self, errors: PairErrors, tiles: Sequence[Region], replayer: Replayer | None
    ) -> None:
        paired = errors.paired
        self.paired, self.errors, self._replayer = paired, errors, replayer
        self.labels = {
            p.reference: i
            for i, p in enumerate(paired.plan.pairs)
            if _is_label(paired.calls[p.reference])
        }
        self.pairs = {
            p.reference: i
            for i, p in enumerate(paired.plan.pairs)
            if p.rule == TENSOR_RULE and p.reference not in self.labels
        }
        self.calls = frozenset((*self.pairs, *self.labels))
        self.covered: set[int] = set()
        self.ran: set[int] = set()
        self._tolerated = errors.declared.tolerances
        self.not_replayed: set[int] = set()
        self.notes: list[str] = []
        self._slots: dict[int, tuple[int, SlotPair]] = {}
        self._wide: dict[int, Array] = {}
        self._inner: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._needed: dict[int, dict[int, set[int]]] = {}
        self._maker: dict[int, Tile] = {}
        if not self.pairs:
            return
        self._tiles = {(t.call, t.stretch): t for t in tiles}
        self._order = {(t.call, t.stretch): i for i, t in enumerate(tiles)}
        for tile in tiles:
            for record in tile.outputs:
                self._maker.setdefault(record, (tile.call, tile.stretch))
        for call, index in self.pairs.items():
            for slot in paired.plan.pairs[index].slots:
                old = self._slots.get(slot.reference_record)
                inner = is_inside(slot.reference_slot)
                if inner:
                    self._inner[call].append(
                        (slot.reference_record, int(split_slot(slot.reference_slot)[1]))
                    )
                    self._maker[slot.reference_record] = self._inner_tile(
                        call, int(split_slot(slot.reference_slot)[1])
                    )
                if old is None or self._maker.get(slot.reference_record, (-1, 0))[0] == call:
                    self._slots[slot.reference_record] = index, slot

    def _inner_tile(self, call: int, operation: int) -> Tile:
        """The stretch of a call's own operators that this one is in."""
        found = self.paired.calls[call]
        program = self.paired.reference.programs.get(found.program)
        if found.leaf or program is None:
            return call, -1
        return call, sum(1 for _, at in program.calls if at <= operation)

    # ---- verdicts

    def verdicts(self) -> dict[Tile, Verdict]:
        """A verdict for every region that made a tensor the target shows."""
        out = self._of_labels()
        if not self.pairs:
            return out
        figures, why = (
            self._figures() if self._replayer is not None else ({}, "replay is switched off")
        )
        made = sorted(
            (r for r in self._slots if r in self._maker), key=lambda r: self._order[self._maker[r]]
        )
        upstream = {record: self._upstream(record) for record in made}
        beyond = {record for record in upstream if record in figures and figures[record].score > 1}
        declared = self._declared(beyond)
        beyond -= declared.keys()
        coarse = self._coarse(beyond) if beyond else {}
        flagged = beyond - set(coarse)
        # A right tensor proves the calls behind it right; a container's own code not, of which it
        # may rest on a part.
        fine = {
            t
            for r in upstream
            if r in figures and r not in {*flagged, *declared}
            for t in upstream[r].places
            if t[1] < 0
        }
        units: dict[frozenset[int], list[int]] = defaultdict(list)
        for record in sorted(flagged, key=lambda r: self._order[self._maker[r]]):
            units[upstream[record].seen].append(record)
        shared = self._shared(upstream.values())
        replayed: set[Tile] = set()
        spoilt = self._parameters()
        for record, up in upstream.items():
            tile = self._maker[record]
            index, slot = self._slots[record]
            if record in figures:
                replayed |= up.behind
            verdict = self._verdict(index, slot, record, up, figures, why)
            if record not in figures and verdict.verdict != VerdictKind.IDENTICAL:
                self.not_replayed.add(tile[0])
            if record in declared:
                call = self.paired.calls[self.paired.plan.pairs[index].reference]
                verdict = self._tolerated.declared(
                    verdict, declared[record], call, figures[record].error_rel
                )
            if record in coarse:
                verdict = coarse[record].verdict(verdict)
            if record in flagged:
                first, *rest = units[up.seen]
                through = self._wrong_inside(record, up, flagged)
                if other_weights := next((t for t in up.places if t in spoilt), None):
                    verdict = _follows(
                        verdict, f"the parameters of {self.paired.calls[other_weights[0]].scope}"
                    )
                elif through is not None:
                    verdict = self._consequence(verdict, through)
                elif record == first:
                    suspects = up.places - fine
                    # what is wrong in all of them is where they have one thing in common
                    for other in rest:
                        suspects = suspects & (upstream[other].places - fine) or suspects
                    verdict = self._located(verdict, tile, suspects, up.places, shared)
                elif upstream[first].places & up.places:
                    verdict = self._consequence(verdict, first)
            old = out.get(tile)
            if old is None or severity(verdict.verdict) > severity(old.verdict):
                out[tile] = verdict
        out |= spoilt
        self.covered = {r for t in replayed for r in self._tiles[t].outputs}
        # What a call leaves in a cache is state: read by the next step, and replayed there.
        self.covered |= {
            r.record for call, _ in replayed for r in self.paired.calls[call].slots("mutated")
        }
        self.ran = self._whole(replayed)
        self._note(figures)
        return out

    def _wrong_inside(self, record: int, up: _Upstream, flagged: Set[int]) -> int | None:
        """A tensor inside one of the calls that this one rests on, which is wrong: the replay did
        not go on with it.
        """
        inner = (
            r for found in self._inner.values() for r, _ in found if r in flagged and r != record
        )
        return next(
            (
                r
                for r in inner
                if self._maker[r] in up.behind
                and self._order[self._maker[r]] < self._order[self._maker[record]]
            ),
            None,
        )

    def _parameters(self) -> dict[Tile, Verdict]:
        """Verdicts of calls, with a partner or without, whose parameters the target holds
        otherwise.
        """
        out: dict[Tile, Verdict] = {}
        for call, found in Parameters(self.paired).by_path():
            around = next((c for c in reversed(self._path(call.id)) if c in self.pairs), None)
            if around is None or all(p.equal or not p.comparable for _, p in found):
                continue
            verdict = judge.judge_leaf(judge.LeafEvidence(self.pairs[around], [], [], 0.0, found))
            if around != call.id:
                verdict = verdict.replace(where=call.scope, named=call.id)
            out[call.id, -1 if call.leaf else 0] = verdict
        return out

    def _declared(self, beyond: Set[int]) -> dict[int, Entry]:
        """Of tensors that are further off than rounding explains, those that the policy allows to
        be.
        """
        out: dict[int, Entry] = {}
        for record in beyond:
            index, slot = self._slots[record]
            call = self.paired.calls[self.paired.plan.pairs[index].reference]
            entry = self._tolerated.entry(slot, call, self.paired.target.calls[self._label(slot)])
            if entry is not None and allows(
                entry, self.paired.target.array(slot.target_record), self._wide[record]
            ):
                out[record] = entry
        return out

    def _of_labels(self) -> dict[Tile, Verdict]:
        """Verdicts of labels of the reference: of these only the order is known, so each may rest
        on all before it in its step.
        """
        out: dict[Tile, Verdict] = {}
        before: dict[tuple[int, str, int], list[judge.PairError]] = defaultdict(list)
        around = _Around(self.errors, self.labels)
        note = (
            "labels have no programs"
            if self.paired.stated
            else "the reference is made of named arrays, which have no programs"
        )
        for call, index in sorted(
            self.labels.items(), key=lambda item: self.paired.calls[item[0]].order
        ):
            step = (
                self.paired.calls[call].rank,
                self.paired.calls[call].root,
                self.paired.calls[call].step,
            )
            slots = self.paired.plan.pairs[index].slots
            # Statistics and lone elements of tensors that need not be computed from each other say
            # nothing.
            errors = [dataclasses.replace(self.errors.of(s), drift=None, lone=0.0) for s in slots]
            u = max((e.u for e in errors), default=0.0)
            # and what they were rounded from was computed as what is seen before it
            if any(e.codes for e in errors):
                u = max([u, *(e.u for e in before[step])])
            has_order = not has_mark(self.paired.calls[call], Mark.UNORDERED)
            came = [*before[step], *around.before(self.paired.calls[call])]
            growth = judge.grow(came if has_order else [judge.PairError(None)], errors, u)
            verdict = judge.judge_region(index, -1, growth, note=note)
            if self.paired.stated:
                verdict = judge.judge_stated(verdict, growth, u, not before[step])
            elif verdict.verdict == VerdictKind.INTRODUCED and (
                kernel := around.kernel(self.paired.calls[call])
            ):
                said = (
                    f"logged by {kernel}: differs by rel_l2 {_said(growth.e_out)}, which "
                    "nothing printed before it explains"
                )
                said += (
                    "; a log of some elements inside a kernel is no result of it, and no "
                    "fault is read from it alone"
                )
                verdict = verdict.replace(
                    verdict=VerdictKind.UNDETERMINED,
                    confidence=Confidence.NONE,
                    score=None,
                    sentence=said,
                )
            else:
                verdict = judge.judge_unseen(
                    verdict,
                    growth,
                    u,
                    came if has_order and came else None,
                    functools.partial(self.errors.sight, slots),
                )
            if not has_order and verdict.verdict == VerdictKind.UNDETERMINED:
                verdict = verdict.replace(
                    sentence=f"differs by rel_l2 {_said(growth.e_out)}; {Mark.UNORDERED}, "
                    "so what it inherits is not known",
                )
            for slot in (
                slots
                if verdict.verdict in (VerdictKind.INTRODUCED, VerdictKind.UNDETERMINED)
                else ()
            ):
                own = self.paired.calls[call]
                entry = self._tolerated.entry(
                    slot, own, self.paired.target.calls[self.paired.plan.pairs[index].target]
                )
                arrays = self.paired.arrays(slot)
                if entry is not None and arrays is not None and allows(entry, arrays[1], arrays[0]):
                    verdict = self._tolerated.declared(verdict, entry, own, growth.e_out)
            out[call, -1] = verdict
            self.not_replayed.add(call)
            before[step] = _worst([*before[step], *errors])
        return out

    def _whole(self, replayed: set[Tile]) -> set[int]:
        """The calls of which everything that made something was replayed, and something was."""
        made: dict[int, list[bool]] = defaultdict(list)
        for tile, region in self._tiles.items():
            if region.outputs:
                # what hands on makes nothing
                through = tile in replayed or set(region.outputs) <= set(region.inputs)
                for call in self._path(tile[0]):
                    made[call].append(through)
        return {call for call, found in made.items() if all(found)}

    def inside(self) -> dict[int, int]:
        """By paired call, how many calls without a partner ran as part of it, on the way to a
        tensor that was compared.
        """
        calls, hands_on = self.paired.calls, self.paired.hands_on
        counts = {
            call: sum(
                1 for k in self.paired.alone(call) if k in self.ran and not hands_on(calls[k])
            )
            for call in self.pairs
        }
        return {call: count for call, count in counts.items() if count}

    def _verdict(
        self,
        index: int,
        slot: SlotPair,
        record: int,
        up: _Upstream,
        figures: Mapping[int, judge.ReplayError],
        why: str,
    ) -> Verdict:
        error = self.errors.of(slot)
        given = [self.errors.of(self._slots[r][1]) for r in sorted(up.seen)]
        local = figures.get(record)
        if error.exact:
            verdict = Verdict(
                index, VerdictKind.IDENTICAL, evidence=Evidence.TWO_DUMPS, sentence="bitwise equal"
            )
        elif local is not None:
            verdict = judge.judge_leaf(
                judge.LeafEvidence(
                    index, given, [error], error.u, local=[(slot.reference_slot, local)]
                )
            )
        elif given:
            growth = judge.grow(given, [error], error.u)
            verdict = judge.judge_region(index, -1, growth, note=why)
            if len(up.behind) > 1 or self._maker[record][1] >= 0:
                verdict = judge.judge_unseen(
                    verdict, growth, error.u, given, lambda: self.errors.sight([slot])
                )
        else:
            verdict = Verdict(
                index,
                VerdictKind.UNDETERMINED,
                evidence=Evidence.TWO_DUMPS,
                numbers={"e_out": error.value},
                sentence=f"differs by rel_l2 {_said(error.value)}, and nothing it rests on is "
                f"seen{f'; no replay: {why}' if why else ''}",
            )
        tile = self._maker[record]
        label = self.paired.target.calls[self._label(slot)]
        shown = label.scope or label.root
        sentence = f"{verdict.sentence} (the target's {shown})"
        return verdict.replace(
            stretch=tile[1],
            slot=slot.reference_slot,
            operator=self._operator(index, slot),
            sentence=sentence,
        )

    def _operator(self, index: int, slot: SlotPair) -> str:
        """The operator that gave a tensor inside a call, "" for one at its boundary."""
        if not is_inside(slot.reference_slot):
            return ""
        program = self.paired.reference.programs.get(
            self.paired.calls[self.paired.plan.pairs[index].reference].program
        )
        return (
            program.operations[int(split_slot(slot.reference_slot)[1])].name
            if program is not None
            else ""
        )

    def _consequence(self, verdict: Verdict, first: int) -> Verdict:
        return _follows(verdict, self.paired.target.calls[self._label(self._slots[first][1])].scope)

    def _shared(self, all_: Iterable[_Upstream]) -> set[Tile]:
        """Regions that tensors rest on which have not the same before them: positions, masks, what
        all layers use.
        """
        units: dict[Tile, set[frozenset[int]]] = defaultdict(set)
        for up in all_:
            for tile in up.places:
                units[tile].add(up.seen)
        return {tile for tile, found in units.items() if len(found) > 1}

    def _located(
        self,
        verdict: Verdict,
        tile: Tile,
        suspects: Set[Tile],
        behind: Set[Tile],
        shared: Set[Tile],
    ) -> Verdict:
        """With the name of what lies between: the call it happened in, or the first and last of
        several.
        """
        calls = self.paired.calls
        # each was on the way to a tensor that is right, and together they are wrong
        suspects = suspects or behind
        own = {t for t in suspects if t not in shared} or suspects
        also = sorted(suspects - own, key=self._order.__getitem__)
        sentence = verdict.sentence
        if also:
            names = dict.fromkeys(calls[t[0]].scope or calls[t[0]].root for t in also)
            sentence += f"; or in {', '.join(list(names)[:3])}, which other layers use too"
        parts = dict.fromkeys(
            self._topmost(t[0], behind) for t in sorted(own, key=self._order.__getitem__)
        )
        common = self._around({call for call, _ in own})
        if common is not None and (
            len(parts) < 2
            or common in parts
            or (all(self._within(call, common) for call in parts) and calls[common].parent != -1)
        ):
            if common != tile[0] and not calls[common].scope:
                return verdict.replace(where=calls[common].root, named=common, sentence=sentence)
            return verdict.replace(
                where="" if common == tile[0] else calls[common].scope, sentence=sentence
            )
        # Several calls of a container that is more than they are.
        scopes = [calls[call].scope or calls[call].root for call in parts]
        return verdict.replace(
            where=f"{scopes[0]}..{scopes[-1]}",
            sentence=f"{sentence}; in between lie {', '.join(scopes[:6])}",
        )

    def _around(self, inner: Set[int]) -> int | None:
        """The innermost call that all of these are part of, or are; None where they have different
        roots.
        """
        common = [
            group[0] for group in zip(*(self._path(call) for call in inner)) if len(set(group)) == 1
        ]
        return common[-1] if common else None

    def _topmost(self, call: int, behind: Set[Tile]) -> int:
        """The largest call around this one of which everything lies between the tensors seen."""
        found = call
        while (parent := self.paired.calls[found].parent) != -1:
            tiles = [
                t
                for t, region in self._tiles.items()
                if region.outputs and self._within(t[0], parent)
            ]
            if any((c, min(k, 0)) not in behind for c, k in tiles):
                break
            found = parent
        return found

    def _within(self, call: int, above: int) -> bool:
        while call != -1 and call != above:
            call = self.paired.calls[call].parent
        return call == above

    def _path(self, call: int) -> list[int]:
        path = [call]
        while (parent := self.paired.calls[path[-1]].parent) != -1:
            path.append(parent)
        return path[::-1]

    def _label(self, slot: SlotPair) -> int:
        """The call of the target that shows a tensor."""
        found = self.paired.maker(slot) if slot.target_record >= 0 else None
        pair = self.paired.plan.pairs[
            0 if slot.target_record >= 0 else self._slots[slot.reference_record][0]
        ]
        return found.id if found is not None else pair.target

    def _upstream(self, record: int) -> _Upstream:
        behind: set[Tile] = set()
        seen: set[int] = set()
        known: set[int] = set()
        todo = [record]
        while todo:
            made = todo.pop()
            behind.add(self._maker[made])
            for source in self._sources(made) - known:
                known.add(source)
                if source in self._slots:
                    seen.add(source)
                elif (
                    source in self._maker
                    and self._order[self._maker[source]] <= self._order[self._maker[made]]
                ):
                    todo.append(source)
        return _Upstream(frozenset(behind), frozenset(seen - {record}))

    def _sources(self, record: int) -> set[int]:
        """What a tensor rests on, as the program that made it tells; without one, all that its
        region could see.
        """
        tile = self._maker[record]
        known = self._needed.get(tile[0])
        if known is None:
            known = self._needed[tile[0]] = self._needs(self.paired.calls[tile[0]])
        if record in known:
            return known[record]
        return {
            r
            for k in range(min(tile[1], 0), tile[1] + 1)
            if (tile[0], k) in self._tiles
            for r in self._tiles[tile[0], k].inputs
        }

    def _needs(self, call: Call) -> dict[int, set[int]]:
        """What each tensor that a call's own operators made rests on, by record; nothing without a
        program.
        """
        if self._replayer is None:
            return {}
        side = self._replayer.reference
        try:
            loaded = side.load(call)
        except (ReplayRefused, ElementsMissing):
            return {}
        out: dict[int, set[int]] = defaultdict(set)
        for slot, _ in loaded.program.outputs:
            record = side.record(call, slot)
            if record is not None:
                out[record] |= set(side.records(call, loaded.needs(slot)).values())
        for record, at in self._inner.get(call.id, ()):
            out[record] = set(side.records(call, _inputs_of(loaded.program, at)).values())
        return out

    def _note(self, figures: Mapping[int, judge.ReplayError]) -> None:
        target = self.paired.target
        if figures and not any(is_param(r.slot) for c in target.calls for r in c.refs):
            self.notes.append("the target shows no parameters: the reference's were used")
        roots = [
            c
            for c in self.paired.calls
            if c.parent == -1 and c.id in {self._path(call)[0] for call in self.pairs}
        ]
        unseen = (
            r
            for c in roots
            for r in c.slots("input")
            if r.record not in self._slots and r.record not in self.paired.made
        )
        hidden = dict.fromkeys(
            align.starred(r.slot) if r.slot.count(".") > 1 else r.slot for r in unseen
        )
        if figures and hidden:
            self.notes.append(
                f"the target shows no {', '.join(hidden)}: the reference's stood for them, and "
                "what goes wrong before them is not seen"
            )

    # ---- replay

    def _figures(self) -> tuple[dict[int, judge.ReplayError], str]:
        """Figures of every tensor that came up, by record, and why others did not."""
        out: dict[int, judge.ReplayError] = {}
        why = ""
        walks = [
            self._walk("float64", None),
            *(self._walk("recorded", seed) for seed in (None, *range(_REPLICAS))),
        ]
        with Threads(1):
            for root in self._roots():
                came = [walk.through(root) for walk in walks]
                why = why or walks[0].why
                for record, wide in came[0].items():
                    # What an earlier root made comes up again where a later one is given it, as the
                    # target's.
                    if record not in out and all(record in other for other in came[1:]):
                        with contextlib.suppress(ElementsMissing):
                            local = self._local(record, wide, [other[record] for other in came[1:]])
                            if local is not None:
                                out[record] = local
                                if local.score > 1:
                                    self._wide[record] = wide
        return out, why

    def _roots(self) -> list[Call]:
        """The outermost calls with tensors that the target shows, in order of execution."""
        roots = dict.fromkeys(self._path(call)[0] for call in self.pairs)
        return sorted((self.paired.calls[root] for root in roots), key=lambda c: c.order)

    def _coarse(self, beyond: Set[int]) -> dict[int, _Coarse]:
        """Of tensors that are further off than rounding explains, those that activations of fewer
        bits explain.

        A kernel that rounds what it multiplies to 8 bits is run: where that comes several times
        closer to the target than exact arithmetic does, it is what the target did. What remains is
        bounded by that; a smaller fault cannot be told from it.
        """
        tried = [
            self._in_blocks(beyond, words, width)
            for words, width in block_quantisation.BLOCKS.items()
        ]
        found = max(
            tried,
            key=lambda by_record: sum(c.gain > CODES_MOSTLY for c in by_record.values()),
        )
        mostly = [c for c in found.values() if c.gain > CODES_MOSTLY]
        # What holds for nearly all of them is what the kernel does, and needs less evidence in
        # each.
        agreed = len(mostly) >= _NEARLY_ALL * len(beyond)
        decided = {
            record: dataclasses.replace(
                c,
                sure=c.gain > (CODES_EXPLAINED / 2 if agreed else CODES_EXPLAINED),
            )
            for record, c in found.items()
            if c.gain > CODES_MOSTLY or (agreed and c.size < 2 * c.expected)
        }
        if decided:
            self.notes.append(
                f"{len(decided)} tensors are off as from {mostly[0].words}; "
                "a fault of a fifth of that is not seen in them (--strict counts them)"
            )
        return decided

    def _in_blocks(self, beyond: Set[int], words: str, width: int) -> dict[int, _Coarse]:
        out: dict[int, _Coarse] = {}
        walk = self._walk(
            "float64", None, functools.partial(block_quantisation.in_blocks, width=width)
        )
        with Threads(1):
            for root in self._roots():
                came = walk.through(root)
                for record in (beyond & came.keys()) - out.keys():
                    y, exact = (
                        self.paired.target.array(self._slots[record][1].target_record),
                        self._wide[record],
                    )
                    before, after = (
                        block_quantisation.by_row(y, exact),
                        block_quantisation.by_row(y, came[record]),
                    )
                    size, left, expected = (
                        block_quantisation.typical(e)
                        for e in (before, after, block_quantisation.by_row(came[record], exact))
                    )
                    out[record] = _Coarse(
                        words, block_quantisation.gain(before, after), size, left, expected
                    )
        return out

    def _local(self, record: int, wide: Array, copies: Sequence[Array]) -> judge.ReplayError | None:
        y = self.paired.target.array(self._slots[record][1].target_record)
        if wide.shape != y.shape:
            return None
        local = judge.whole(y, wide, copies)
        made = self.paired.reference.array(record).astype(np.float64)
        size = float(np.linalg.norm(made))
        apart = float(np.linalg.norm(wide.astype(np.float64) - made))
        inherited = apart / size if size and np.isfinite(apart) else None
        return dataclasses.replace(local, inherited_rel=inherited)

    def _walk(
        self, working: str, seed: int | None, coarser: Callable[[Array], Array] | None = None
    ) -> TreeWalk:
        """The reference, ready to be run through. seed: of noise on every call's outputs; coarser:
        done to what matrix products take.
        """
        assert self._replayer is not None
        noise = np.random.default_rng(seed) if seed is not None else None
        walk = TreeWalk(
            self._replayer.reference,
            working,
            self._held,
            self._target,
            noise=noise,
            coarser=coarser,
        )
        walk.inner = {
            (call, at): record for call, found in self._inner.items() for record, at in found
        }
        return walk

    def _target(self, record: int) -> Array | None:
        found = self._slots.get(record)
        if found is None:
            return None
        return self.paired.target.array(found[1].target_record)

    def _held(self, loaded: Any, call: Call, working: str) -> Any:
        assert self._replayer is not None
        side = self._replayer.reference
        records = side.records(call, loaded.program.params)
        key = (
            loaded.program.id,
            "tapped",
            tuple(records.get(s) for s in loaded.program.params),
            working,
        )
        return self._replayer.sides.parameters.hold(
            key, lambda: loaded.hold(side.arrays(records)[0], working=working)
        )


def _inputs_of(program: Program, operation: int) -> list[str]:
    """The slots that the result of one operator of a program rests on."""
    slots: dict[str, None] = {}
    done: set[int] = set()
    todo = [Operand("op", (operation, 0))]
    while todo:
        kind, at = todo.pop()
        if kind == "in":
            slots[program.inputs[at]] = None
        elif kind == "param":
            slots[at] = None
        elif kind == "op" and at[0] not in done:
            done.add(at[0])
            todo += program.operations[at[0]].operands()
    return list(slots)


def _follows(verdict: Verdict, name: str) -> Verdict:
    sentence = f"follows from {name}, which is wrong on the way to it: {verdict.sentence}"
    return verdict.replace(
        verdict=VerdictKind.INHERITED,
        confidence=Confidence.NONE,
        cause=CauseKind.UNKNOWN,
        sentence=sentence,
    )


def _is_label(call: Call) -> bool:
    """A tensor under a name, of which nothing says what it was made of."""
    return call.kind == "label" and not call.slots("input")


def _said(value: float | None) -> str:
    return "of unknown size" if value is None else f"{value:.2g}"
