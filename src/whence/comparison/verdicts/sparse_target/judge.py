"""Judges a target of which only some tensors are seen: the reference runs again between them, on
what the target had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from whence import align, judge
from whence.comparison.replays.replayer import Replayer
from whence.comparison.verdicts.declared.tolerances import allows
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameters import Parameters
from whence.comparison.verdicts.sparse_target.fault_places import FaultPlaces
from whence.comparison.verdicts.sparse_target.labels import LabelJudge, is_label, size_in_words
from whence.comparison.verdicts.sparse_target.shown_tensors import RegionKey, ShownTensors, Upstream
from whence.comparison.verdicts.sparse_target.tensor_replay import CoarseActivations, TensorReplay
from whence.judge.policy import Entry
from whence.records import Region
from whence.records.slots import is_inside, is_param, split_slot
from whence.results import TENSOR_RULE, Evidence, SlotPair, Verdict, VerdictKind, severity

Figures = Mapping[int, judge.ReplayError]
"""Of tensors, by record of the reference."""


class SparseTargetJudge:
    """The pairs of a comparison that `align` made of tensors (rule "tensor").

    calls: the reference's calls of these pairs. covered: records that lie between tensors that were
    compared, and so were replayed. notes: what the target did not show, and what stood for it.
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
        # A right tensor proves the calls behind it right; a container's own code not, of which it
        # may depend on a part.
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
        """Verdicts of calls, with a partner or without, whose parameters the target holds
        otherwise.
        """
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
        """Of tensors that are further off than rounding explains, those that the policy allows to
        be.
        """
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
        """Note what was made on the way to tensors that were compared."""
        self.covered = {r for key in replayed for r in self._tensors.regions[key].outputs}
        # What a call leaves in a cache is state: read by the next step, and replayed there.
        self.covered |= {
            r.record for call, _ in replayed for r in self.paired.calls[call].slots("mutated")
        }
        # The calls of which everything that made something was replayed, and something was.
        whole: dict[int, list[bool]] = defaultdict(list)
        for key, region in self._tensors.regions.items():
            if region.outputs:
                # what hands on makes nothing
                is_replayed = key in replayed or set(region.outputs) <= set(region.inputs)
                for call in self._tensors.path(key[0]):
                    whole[call].append(is_replayed)
        self._ran = {call for call, parts in whole.items() if all(parts)}

    def inside(self) -> dict[int, int]:
        """By paired call, how many calls without a partner ran as part of it, on the way to a
        tensor that was compared.
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
            sentence=f"{verdict.sentence} (the target's {label.scope or label.root})",
        )

    def _operator(self, index: int, slot: SlotPair) -> str:
        """The operator that gave a tensor inside a call, "" for one at its boundary."""
        if not is_inside(slot.reference_slot):
            return ""
        program = self.paired.reference.programs.get(self.paired.pair(index).call.program)
        if program is None:
            return ""
        return program.operations[int(split_slot(slot.reference_slot)[1])].name

    def _note_missing(self, figures: Figures) -> None:
        """Note what of the target stood in by the reference's."""
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
