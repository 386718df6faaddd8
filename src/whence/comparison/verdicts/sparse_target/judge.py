"""Judges a target that shows only some of its tensors: the reference is replayed between them, from
one shown tensor to the next, on the target's values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence import align, judge
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.replays.call_tree import TreeWalk
from whence.comparison.replays.replayer import Replayer
from whence.comparison.replays.self_check import Threads
from whence.comparison.replays.side import ReplaySource
from whence.comparison.verdicts.declared.tolerances import allows
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameters import Parameters
from whence.comparison.verdicts.sparse_target.labels import LabelJudge, is_label, size_in_words
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.judge import block_quantisation
from whence.judge.limits import CODES_EXPLAINED, CODES_MOSTLY
from whence.judge.policy import Entry
from whence.records import Call, Program, Region, in_order
from whence.records.program import Operand
from whence.records.region import outwards
from whence.records.slots import is_inside, is_param, split_slot
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

Figures = Mapping[int, judge.ReplayError]
"""Of tensors, by record of the reference."""


class SparseTargetJudge:
    """Judges the pairs that `align` made of single tensors (rule "tensor") and of labels.

    calls: the reference's calls of these pairs. covered: records between compared tensors, which
    were replayed. notes: tensors that the target does not show, and what replaced them.
    """

    def __init__(
        self, errors: PairErrors, regions: Sequence[Region], replayer: Replayer | None
    ) -> None:
        self.paired, self.errors = errors.paired, errors
        pairs = {p.reference: i for i, p in enumerate(self.paired.plan.pairs)}
        self.labels = {c: i for c, i in pairs.items() if is_label(self.paired.calls[c])}
        self.pairs = {
            call: index
            for call, index in pairs.items()
            if self.paired.plan.pairs[index].rule == TENSOR_RULE and call not in self.labels
        }
        self.calls = frozenset((*self.pairs, *self.labels))
        self.covered: set[int] = set()
        self.not_replayed: set[int] = set()
        self.notes: list[str] = []
        self._ran: set[int] = set()
        source = replayer.reference if replayer is not None else None
        self._tensors = ShownTensors(self.paired, self.pairs, regions, source)
        self._replay = TensorReplay(self._tensors, replayer) if replayer is not None else None

    def verdicts(self) -> dict[RegionKey, Verdict]:
        """A verdict for every region that made a tensor the target shows."""
        verdicts = LabelJudge(self.errors, self.labels).verdicts()
        self.not_replayed.update(self.labels)
        if not self.pairs:
            return verdicts
        tensors = self._tensors
        figures: Figures = {}
        why = "replay is switched off"
        if self._replay is not None:
            figures, why = self._replay.figures()
        upstream = {record: tensors.upstream(record) for record in tensors.in_order()}
        beyond = {record for record in upstream if record in figures and figures[record].score > 1}
        declared = self._declared(beyond)
        beyond -= declared.keys()
        coarse = self._coarse(beyond)
        flagged = beyond - coarse.keys()
        spoilt = self._parameters()
        # A right tensor proves that the leaves it depends on are right. It proves nothing about a
        # container's own code, of which it may depend on a part only.
        right = {
            key
            for record, up in upstream.items()
            if record in figures and record not in {*flagged, *declared}
            for key in up.places
            if key[1] < 0
        }
        places = FaultPlaces(tensors, upstream, flagged, right, spoilt.keys())
        for record, up in upstream.items():
            key = tensors.maker[record]
            verdict = self._verdict(record, up, figures, why)
            if record not in figures and verdict.verdict != VerdictKind.IDENTICAL:
                self.not_replayed.add(key[0])
            if record in declared:
                call = self.paired.pair(tensors.slots[record][0]).call
                verdict = self.errors.declared.tolerances.declared(
                    verdict, declared[record], call, figures[record].error_rel
                )
            if record in coarse:
                verdict = coarse[record].verdict(verdict)
            if record in flagged:
                verdict = places.placed(verdict, record)
            old = verdicts.get(key)
            if old is None or severity(verdict.verdict) > severity(old.verdict):
                verdicts[key] = verdict
        verdicts |= spoilt
        self._take_note({key for r in upstream if r in figures for key in upstream[r].regions})
        self._note_missing(figures)
        return verdicts

    def _parameters(self) -> dict[RegionKey, Verdict]:
        """Verdicts of calls, paired or not, whose parameters differ in the target."""
        verdicts: dict[RegionKey, Verdict] = {}
        for call, differences in Parameters(self.paired).by_path():
            path = reversed(self._tensors.path(call.id))
            around = next((c for c in path if c in self.pairs), None)
            if around is None or all(p.equal or not p.comparable for _, p in differences):
                continue
            evidence = judge.LeafEvidence(self.pairs[around], [], [], 0.0, differences)
            verdict = judge.judge_leaf(evidence)
            if around != call.id:
                verdict = verdict.replace(where=call.scope, named=call.id)
            verdicts[call.id, -1 if call.leaf else 0] = verdict
        return verdicts

    def _declared(self, beyond: Set[int]) -> dict[int, Entry]:
        """The policy's entry for each tensor beyond rounding that it allows, by record."""
        declared: dict[int, Entry] = {}
        for record in beyond:
            index, slot = self._tensors.slots[record]
            call, tolerances = self.paired.pair(index).call, self.errors.declared.tolerances
            entry = tolerances.entry(slot, call, self._tensors.label(slot))
            if entry is not None and self._replay is not None:
                target = self.paired.target.array(slot.target_record)
                if allows(entry, target, self._replay.wide[record]):
                    declared[record] = entry
        return declared

    def _coarse(self, beyond: Set[int]) -> dict[int, CoarseActivations]:
        coarse = self._replay.coarse(beyond) if self._replay is not None else {}
        if coarse:
            words = next(iter(coarse.values())).words
            self.notes.append(
                f"{len(coarse)} tensors are off as from {words}; "
                "a fault of a fifth of that is not seen in them (--strict counts them)"
            )
        return coarse

    def _take_note(self, replayed: Set[RegionKey]) -> None:
        """Note the records and calls on the way to tensors that were compared."""
        self.covered = {r for key in replayed for r in self._tensors.regions[key].outputs}
        # The next step reads what a call leaves in a cache, and is replayed with it.
        self.covered |= {
            r.record for call, _ in replayed for r in self.paired.calls[call].slots("mutated")
        }
        # Calls of which every region that computes something was replayed, at least one.
        whole: dict[int, list[bool]] = defaultdict(list)
        for key, region in self._tensors.regions.items():
            if region.outputs:
                # a region that only passes tensors on computes nothing
                is_replayed = key in replayed or set(region.outputs) <= set(region.inputs)
                for call in self._tensors.path(key[0]):
                    whole[call].append(is_replayed)
        self._ran = {call for call, parts in whole.items() if all(parts)}

    def inside(self) -> dict[int, int]:
        """By paired call, the number of unpaired calls inside it that were replayed on the way to a
        compared tensor.
        """
        calls, hands_on = self.paired.calls, self.paired.hands_on
        counts = {
            call: sum(
                1 for k in self.paired.alone(call) if k in self._ran and not hands_on(calls[k])
            )
            for call in self.pairs
        }
        return {call: count for call, count in counts.items() if count}

    def _verdict(self, record: int, up: Upstream, figures: Figures, why: str) -> Verdict:
        """The verdict of one tensor by itself."""
        index, slot = self._tensors.slots[record]
        error = self.errors.of(slot)
        errors_before = [self.errors.of(self._tensors.slots[r][1]) for r in sorted(up.tensors)]
        segment = self._tensors.maker[record][1]
        if error.exact:
            verdict = Verdict(
                index, VerdictKind.IDENTICAL, evidence=Evidence.TWO_DUMPS, sentence="bitwise equal"
            )
        elif record in figures:
            local = [(slot.reference_slot, figures[record])]
            verdict = judge.judge_leaf(
                judge.LeafEvidence(index, errors_before, [error], error.u, local=local)
            )
        elif errors_before:
            growth = judge.grow(errors_before, [error], error.u)
            verdict = judge.judge_region(index, -1, growth, note=why)
            if len(up.regions) > 1 or segment >= 0:
                verdict = judge.judge_unseen(
                    verdict, growth, error.u, errors_before, lambda: self.errors.sight([slot])
                )
        else:
            verdict = Verdict(
                index,
                VerdictKind.UNDETERMINED,
                evidence=Evidence.TWO_DUMPS,
                numbers={"e_out": error.value},
                sentence=f"differs by rel_l2 {size_in_words(error.value)}; nothing that it is "
                "computed from was captured, so the error may start here or before"
                f"{f'; no replay: {why}' if why else ''}",
            )
        label = self._tensors.label(slot)
        return verdict.replace(
            stretch=segment,
            slot=slot.reference_slot,
            operator=self._operator(index, slot),
            sentence=f"{verdict.sentence} (the target's {label.module_name})",
        )

    def _operator(self, index: int, slot: SlotPair) -> str:
        """The operator that computed a tensor inside a call, "" for a tensor at its boundary."""
        if not is_inside(slot.reference_slot):
            return ""
        program = self.paired.reference.programs.get(self.paired.pair(index).call.program)
        if program is None:
            return ""
        return program.operations[int(split_slot(slot.reference_slot)[1])].name

    def _note_missing(self, figures: Figures) -> None:
        """Note which tensors of the reference replaced those that the target does not show."""
        if not figures:
            return
        if not any(is_param(r.slot) for c in self.paired.target.calls for r in c.refs):
            self.notes.append("the target shows no parameters: the reference's were used")
        unseen = (
            r
            for c in sorted(self._tensors.roots(), key=lambda c: c.id)
            for r in c.slots("input")
            if r.record not in self._tensors.slots and r.record not in self.paired.written
        )
        hidden = dict.fromkeys(
            align.starred(r.slot) if r.slot.count(".") > 1 else r.slot for r in unseen
        )
        if hidden:
            self.notes.append(
                f"the target shows no {', '.join(hidden)}: the reference's stood for them, and "
                "what goes wrong before them is not seen"
            )


# Locates an error between the tensors that a target shows.


class FaultPlaces:
    """Locates the fault before each wrong tensor, and recognises tensors that only follow from it.

    flagged: records of wrong tensors. right: regions that right tensors depend on. spoilt: regions
    whose parameters differ.
    """

    def __init__(
        self,
        tensors: ShownTensors,
        upstream: Mapping[int, Upstream],
        flagged: Set[int],
        right: Set[RegionKey],
        spoilt: Set[RegionKey],
    ) -> None:
        self.tensors, self._upstream, self._flagged = tensors, upstream, flagged
        self._calls = tensors.paired.calls
        self._right, self._spoilt = right, spoilt
        # Wrong tensors that depend on the same tensors, in order of execution.
        self._units: dict[frozenset[int], list[int]] = defaultdict(list)
        for record in sorted(flagged, key=tensors.place):
            self._units[upstream[record].tensors].append(record)
        self._shared = _shared(upstream)

    def placed(self, verdict: Verdict, record: int) -> Verdict:
        """The verdict of a wrong tensor, with the place where the error starts."""
        up = self._upstream[record]
        first, *others = self._units[up.tensors]
        if spoilt := next((key for key in up.places if key in self._spoilt), None):
            return _follows(verdict, f"the parameters of {self._calls[spoilt[0]].scope}")
        inner = self._wrong_inside(record)
        if inner is not None:
            return _follows(verdict, self._name(inner))
        if record == first:
            suspects = up.places - self._right
            # The fault lies in a region that all these wrong tensors depend on, if there is one.
            for follower in others:
                suspects = suspects & (self._upstream[follower].places - self._right) or suspects
            return self._located(verdict, self.tensors.maker[record], suspects, up.places)
        if self._upstream[first].places & up.places:
            return _follows(verdict, self._name(first))
        return verdict

    def _name(self, record: int) -> str:
        """The target's name of a tensor."""
        return self.tensors.label(self.tensors.slots[record][1]).scope

    def _wrong_inside(self, record: int) -> int | None:
        """A wrong tensor inside a call that this tensor depends on; None if there is none. The
        replay computes it but does not continue from the target's value.
        """
        inner = (
            r
            for tensors in self.tensors.inner.values()
            for r, _ in tensors
            if r in self._flagged and r != record
        )
        regions = self._upstream[record].regions
        return next(
            (
                r
                for r in inner
                if self.tensors.maker[r] in regions
                and self.tensors.place(r) < self.tensors.place(record)
            ),
            None,
        )

    def _located(
        self, verdict: Verdict, maker: RegionKey, suspects: Set[RegionKey], regions: Set[RegionKey]
    ) -> Verdict:
        """The verdict with the place of the fault: one call, or the first and last of several."""
        calls, order = self._calls, self.tensors.order
        # if every region led to a right tensor as well, all of them stay suspects
        suspects = suspects or regions
        unshared = {key for key in suspects if key not in self._shared} or suspects
        also = sorted(suspects - unshared, key=order.__getitem__)
        sentence = verdict.sentence
        if also:
            names = dict.fromkeys(calls[call].module_name for call, _ in also)
            sentence += f"; or in {', '.join(list(names)[:3])}, which other layers use too"
        parts = dict.fromkeys(
            self._topmost(call, regions) for call, _ in sorted(unshared, key=order.__getitem__)
        )
        common = self._common({call for call, _ in unshared})
        if common is not None and (
            len(parts) < 2
            or common in parts
            or (
                all(self.tensors.is_within(call, common) for call in parts)
                and calls[common].parent != -1
            )
        ):
            if common == maker[0]:
                return verdict.replace(where="", sentence=sentence)
            if not calls[common].scope:
                return verdict.replace(where=calls[common].root, named=common, sentence=sentence)
            return verdict.replace(where=calls[common].scope, sentence=sentence)
        # These calls are only a part of their container.
        scopes = [calls[call].module_name for call in parts]
        return verdict.replace(
            where=f"{scopes[0]}..{scopes[-1]}",
            sentence=f"{sentence}; in between lie {', '.join(scopes[:6])}",
        )

    def _common(self, calls: Set[int]) -> int | None:
        """The innermost call that contains, or is, all of these calls; None for different roots."""
        levels = zip(*(self.tensors.path(call) for call in calls))
        common = [level[0] for level in levels if len(set(level)) == 1]
        return common[-1] if common else None

    def _topmost(self, call: int, regions: Set[RegionKey]) -> int:
        """The outermost ancestor of this call, or itself, that lies entirely in these regions."""
        for around in outwards(self._calls, self._calls[call].parent):
            inside = (
                key
                for key, region in self.tensors.regions.items()
                if region.outputs and self.tensors.is_within(key[0], around.id)
            )
            if any((inner, min(segment, 0)) not in regions for inner, segment in inside):
                break
            call = around.id
        return call


def _shared(upstream: Mapping[int, Upstream]) -> set[RegionKey]:
    """Regions that tensors of several units depend on, such as positions and masks, which all
    layers use. (A unit is the set of tensors that depend on the same shown tensors.)
    """
    units: dict[RegionKey, set[frozenset[int]]] = defaultdict(set)
    for up in upstream.values():
        for key in up.places:
            units[key].add(up.tensors)
    return {key for key, tensors in units.items() if len(tensors) > 1}


def _follows(verdict: Verdict, name: str) -> Verdict:
    words = f"follows from {name}, which is wrong on the way to it: {verdict.sentence}"
    return verdict.withdrawn(VerdictKind.INHERITED, words)


# Replays the reference from its roots. Each computed tensor that the target shows is compared with
# the target's, and the replay continues from the target's.

_REPLICAS = 3
_NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class CoarseActivations:
    """How well activations quantised to fewer bits explain a difference. All errors are relative
    2-norms by row, root mean square over rows.

    words: the kind of activations. size: the error without them; remaining: the error with them;
    gain: the factor between the two. expected: the error that they alone cause. is_sure: whether
    the target computes with them.
    """

    words: str
    gain: float
    size: float
    remaining: float
    expected: float
    is_sure: bool = False

    def verdict(self, old: Verdict) -> Verdict:
        run = (
            f"{self.words} ahead of matrix products: run so, rel_l2 by row falls from "
            f"{self.size:.2g} to {self.remaining:.2g}"
        )
        sentence = (
            f"{old.sentence}; as from {run}"
            if self.is_sure
            else f"of the size that comes from {run}; codes diverge over many products, or there "
            "is another fault"
        )
        return old.replace(
            verdict=VerdictKind.PRECISION if self.is_sure else VerdictKind.UNDETERMINED,
            confidence=Confidence.NONE,
            cause=CauseKind.UNKNOWN,
            sentence=sentence,
        )


class TensorReplay:
    """Compares each shown tensor with its replay from the tensors shown before it.

    wide: by record, the replay in float64 of tensors whose error is beyond rounding.
    """

    def __init__(self, tensors: ShownTensors, replayer: Replayer) -> None:
        self.tensors, self._replayer = tensors, replayer
        self.wide: dict[int, Array] = {}

    def figures(self) -> tuple[dict[int, judge.ReplayError], str]:
        """(figures by record of every shown tensor that the replay computed, why it did not compute
        others).
        """
        figures: dict[int, judge.ReplayError] = {}
        why = ""
        exact = self._walk("float64", None)
        replicas = [self._walk("recorded", seed) for seed in (None, *range(_REPLICAS))]
        with Threads(1):
            for root in self.tensors.roots():
                arrays = exact.through(root)
                working = [walk.through(root) for walk in replicas]
                why = why or exact.why
                for record, wide in arrays.items():
                    # A tensor of an earlier root appears again, with the target's value, where a
                    # later root reads it.
                    if record in figures or not all(record in w for w in working):
                        continue
                    with contextlib.suppress(ElementsMissing):
                        error = self._error(record, wide, [w[record] for w in working])
                        if error is not None:
                            figures[record] = error
                            if error.score > 1:
                                self.wide[record] = wide
        return figures, why

    def _error(self, record: int, wide: Array, copies: Sequence[Array]) -> judge.ReplayError | None:
        target = self.tensors.array(record)
        if wide.shape != target.shape:
            return None
        error = judge.whole(target, wide, copies)
        reference = self.tensors.paired.reference.array(record).astype(np.float64)
        size = float(np.linalg.norm(reference))
        difference = float(np.linalg.norm(wide.astype(np.float64) - reference))
        inherited = difference / size if size and np.isfinite(difference) else None
        return dataclasses.replace(error, inherited_rel=inherited)

    def coarse(self, beyond: Set[int]) -> dict[int, CoarseActivations]:
        """By record, the tensors beyond rounding (`beyond`) that quantised activations explain.

        The replay is repeated with the operands of matrix products rounded to 8 bits. If its result
        is several times closer to the target than exact arithmetic, the target computes this way. A
        fault smaller than the remaining error cannot be recognised.
        """
        if not beyond:
            return {}
        forms = [
            self._in_blocks(beyond, words, width)
            for words, width in block_quantisation.BLOCKS.items()
        ]
        best = max(
            forms, key=lambda by_record: sum(c.gain > CODES_MOSTLY for c in by_record.values())
        )
        # If it explains nearly all tensors, the kernel works this way: each needs less evidence.
        agreed = sum(c.gain > CODES_MOSTLY for c in best.values()) >= _NEARLY_ALL * len(beyond)
        enough = CODES_EXPLAINED / 2 if agreed else CODES_EXPLAINED
        return {
            record: dataclasses.replace(c, is_sure=c.gain > enough)
            for record, c in best.items()
            if c.gain > CODES_MOSTLY or (agreed and c.size < 2 * c.expected)
        }

    def _in_blocks(self, beyond: Set[int], words: str, width: int) -> dict[int, CoarseActivations]:
        by_row, typical = block_quantisation.by_row, block_quantisation.typical
        coarse: dict[int, CoarseActivations] = {}
        walk = self._walk(
            "float64", None, functools.partial(block_quantisation.in_blocks, width=width)
        )
        with Threads(1):
            for root in self.tensors.roots():
                arrays = walk.through(root)
                for record in (beyond & arrays.keys()) - coarse.keys():
                    target, exact, rounded = (
                        self.tensors.array(record),
                        self.wide[record],
                        arrays[record],
                    )
                    plain, coded = by_row(target, exact), by_row(target, rounded)
                    coarse[record] = CoarseActivations(
                        words,
                        block_quantisation.gain(plain, coded),
                        typical(plain),
                        typical(coded),
                        typical(by_row(rounded, exact)),
                    )
        return coarse

    def _walk(
        self, working: str, seed: int | None, coarser: Callable[[Array], Array] | None = None
    ) -> TreeWalk:
        """A replay of the reference. working: dtype to compute in; seed: of the noise on every
        call's outputs, None without noise; coarser: applied to the operands of matrix products.
        """
        walk = TreeWalk(
            self._replayer.reference,
            working,
            self._parameters,
            lambda record: self.tensors.array(record) if record in self.tensors.slots else None,
            noise=np.random.default_rng(seed) if seed is not None else None,
            coarser=coarser,
        )
        walk.inner = {
            (call, operation): record
            for call, tensors in self.tensors.inner.items()
            for record, operation in tensors
        }
        return walk

    def _parameters(self, loaded: Any, call: Call, working: str) -> Any:
        source = self._replayer.reference
        records = source.records(call, loaded.program.params)
        key = (
            loaded.program.id,
            "tapped",
            tuple(records.get(s) for s in loaded.program.params),
            working,
        )
        return self._replayer.sides.parameters.hold(
            key, lambda: loaded.hold(source.arrays(records)[0], working=working)
        )


# The tensors that a target shows, in terms of a fully captured reference, and what each depends on.

RegionKey = tuple[int, int]
"""Call of the reference, and segment of it (-1 for a leaf)."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """What a shown tensor depends on. tensors: the nearest shown tensors before it; regions: the
    regions in between.

    places: the regions with all segments of a container merged into (call, 0), since they are one
    piece of code.
    """

    regions: frozenset[RegionKey]
    tensors: frozenset[int]

    @property
    def places(self) -> frozenset[RegionKey]:
        return frozenset((call, min(segment, 0)) for call, segment in self.regions)


class ShownTensors:
    """The tensors that the target shows, by record of the reference.

    pairs: by call, the index of its pair. slots: by record, the index of the pair and its slots.
    maker: by record, the region that computed it. inner: by call, (record, operation) of tensors
    inside its program. regions: all regions of the reference, in execution order; order: their
    numbers in it.
    """

    def __init__(
        self,
        paired: PairedRuns,
        pairs: Mapping[int, int],
        regions: Sequence[Region],
        source: ReplaySource | None,
    ) -> None:
        self.paired, self.pairs, self._source = paired, pairs, source
        self.slots: dict[int, tuple[int, SlotPair]] = {}
        self.inner: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.maker: dict[int, RegionKey] = {}
        self.regions = {(r.call, r.stretch): r for r in regions if pairs}
        self.order = {key: place for place, key in enumerate(self.regions)}
        self._needed: dict[int, dict[int, set[int]]] = {}
        for key, region in self.regions.items():
            for record in region.outputs:
                self.maker.setdefault(record, key)
        for call, index in pairs.items():
            for slot in paired.plan.pairs[index].slots:
                record = slot.reference_record
                if is_inside(slot.reference_slot):
                    operation = int(split_slot(slot.reference_slot)[1])
                    self.inner[call].append((record, operation))
                    self.maker[record] = self._region_of(call, operation)
                if record not in self.slots or self.maker.get(record, (-1, 0))[0] == call:
                    self.slots[record] = index, slot

    def _region_of(self, call: int, operation: int) -> RegionKey:
        """The region of a call to which this operation of its program belongs."""
        container = self.paired.calls[call]
        program = self.paired.reference.programs.get(container.program)
        if container.leaf or program is None:
            return call, -1
        return call, sum(
            1 for _, operation_before in program.calls if operation_before <= operation
        )

    def in_order(self) -> list[int]:
        """The shown records that some region computed, in execution order."""
        records = (record for record in self.slots if record in self.maker)
        return sorted(records, key=self.place)

    def place(self, record: int) -> int:
        """The number, in execution order, of the region that computed a tensor."""
        return self.order[self.maker[record]]

    def array(self, record: int) -> Array:
        """The target's tensor for a record of the reference. Raises ElementsMissing."""
        return self.paired.target.array(self.slots[record][1].target_record)

    def path(self, call: int) -> list[int]:
        """The ids of a call's ancestors, outermost first, and of the call itself."""
        return [around.id for around in outwards(self.paired.calls, call)][::-1]

    def roots(self) -> list[Call]:
        """The root calls that contain shown tensors, in execution order."""
        roots = dict.fromkeys(self.path(call)[0] for call in self.pairs)
        return in_order(self.paired.calls[root] for root in roots)

    def is_within(self, call: int, above: int) -> bool:
        """Whether a call is `above` or lies inside it."""
        return above in self.path(call)

    def label(self, slot: SlotPair) -> Call:
        """The call of the target that shows a tensor."""
        calls, pairs = self.paired.target.calls, self.paired.plan.pairs
        if slot.target_record < 0:
            return calls[pairs[self.slots[slot.reference_record][0]].target]
        return self.paired.maker(slot) or calls[pairs[0].target]

    def upstream(self, record: int) -> Upstream:
        """The shown tensors and the regions that a shown tensor depends on."""
        regions: set[RegionKey] = set()
        tensors: set[int] = set()
        visited: set[int] = set()
        todo = [record]
        while todo:
            current = todo.pop()
            regions.add(self.maker[current])
            for source in self._sources(current) - visited:
                visited.add(source)
                if source in self.slots:
                    tensors.add(source)
                elif source in self.maker and self.place(source) <= self.place(current):
                    todo.append(source)
        return Upstream(frozenset(regions), frozenset(tensors - {record}))

    def _sources(self, record: int) -> Set[int]:
        """The records that a tensor directly depends on, according to the program that computed it;
        without a program, all records that its region could read.
        """
        call, segment = self.maker[record]
        if call not in self._needed:
            self._needed[call] = self._needs(self.paired.calls[call])
        if record in self._needed[call]:
            return self._needed[call][record]
        return {
            r
            for k in range(min(segment, 0), segment + 1)
            if (call, k) in self.regions
            for r in self.regions[call, k].inputs
        }

    def _needs(self, call: Call) -> dict[int, set[int]]:
        """By record of each tensor that a call's own operators computed, the records that it
        depends on; empty without a program.
        """
        source = self._source
        if source is None:
            return {}
        try:
            loaded = source.load(call)
        except (ReplayRefused, ElementsMissing):
            return {}
        needs: dict[int, set[int]] = defaultdict(set)
        for slot, _ in loaded.program.outputs:
            record = source.record(call, slot)
            if record is not None:
                needs[record] |= set(source.records(call, loaded.needs(slot)).values())
        for record, operation in self.inner.get(call.id, ()):
            read = _inputs_of(loaded.program, operation)
            needs[record] = set(source.records(call, read).values())
        return needs


def _inputs_of(program: Program, operation: int) -> list[str]:
    """The inputs and parameters (slots) that the result of an operation depends on."""
    slots: dict[str, None] = {}
    visited: set[int] = set()
    todo = [Operand("op", (operation, 0))]
    while todo:
        kind, value = todo.pop()
        if kind == "in":
            slots[program.inputs[value]] = None
        elif kind == "param":
            slots[value] = None
        elif kind == "op" and value[0] not in visited:
            visited.add(value[0])
            todo += program.operations[value[0]].operands()
    return list(slots)
