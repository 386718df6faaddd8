"""The verdict of a segment: a container's own operators between two of its children."""

from __future__ import annotations

from collections.abc import Sequence

from whence import align, judge
from whence.comparison.replays.semantics import ReplayResult
from whence.comparison.verdicts.call_replays import CallReplays
from whence.comparison.verdicts.indices import Indices
from whence.comparison.verdicts.region_evidence import RegionEvidence, RegionOutput
from whence.records import Call, Region
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_of_child, split_child
from whence.results import CauseKind, Confidence, Evidence, Verdict, VerdictKind, severity


class SegmentJudge:
    """Judges segments by what is known of them, replaying the container where that tells more."""

    def __init__(self, replays: CallReplays, indices: Indices) -> None:
        self._replays, self._indices = replays, indices
        self.paired, self.errors = replays.paired, replays.errors
        # By call, the first segment that another choice gave other rows.
        self._misrouted: dict[int, int] = {}

    def verdict(self, region: Region, evidence: RegionEvidence) -> Verdict:
        """The verdict of one segment. Segments of a call are judged in their order."""
        leaf = evidence.leaf
        if any(p.differs for _, p in leaf.parameters):
            verdict = judge.judge_leaf(leaf)
            return verdict.replace(
                stretch=evidence.segment, where=evidence.scopes.get(verdict.slot, "")
            )
        outputs, replayer = evidence.outputs, self._replays.replayer
        if replayer is None or all(o.error.exact for o in outputs):
            return self._by_growth(evidence, outputs)
        if reason := self._replays.reason_to_postpone(evidence):
            return self._by_growth(evidence, outputs, reason)
        replayed = self._replays.own_operators(evidence.pair)
        misrouted = next((o.name for o in outputs if o.name in replayed.misrouted), "")
        if misrouted and not replayer.reference.confirm(evidence.pair.call)[0]:
            return self._of_other_rows(evidence, misrouted, replayed.misrouted[misrouted])
        return self._by_replay(region, evidence, replayed)

    def _by_replay(
        self, region: Region, evidence: RegionEvidence, replayed: ReplayResult
    ) -> Verdict:
        """The worse of two verdicts: that of the outputs that were replayed, and that of the
        others by growth.
        """
        outputs = evidence.outputs
        figures = [(o.name, replayed.local[o.name]) for o in outputs if o.name in replayed.local]
        others = [o for o in outputs if o.name not in replayed.local and not o.is_equal]
        verdicts = []
        if figures:
            verdict = self._replays.verdict(evidence, figures, replayed.broken)
            verdict = verdict.replace(stretch=evidence.segment)
            if "whole" in verdict.numbers and (scope := self._replayed_alone(region)):
                verdict = verdict.replace(where=scope)
            verdicts.append(verdict)
        if others:
            self._replays.not_replayed.add(evidence.pair.call.id)
            refused = (replayed.refused[o.name] for o in outputs if o.name in replayed.refused)
            verdict = self._by_growth(evidence, others, next(refused, replayed.why))
            if verdict.verdict == VerdictKind.INTRODUCED:
                worst = max(others, key=lambda output: output.error.value or 0.0)
                verdict = verdict.replace(slot=worst.name)
            verdicts.append(verdict)
        if not verdicts:
            return self._by_growth(evidence, outputs)
        return max(verdicts, key=lambda v: severity(v.verdict))

    def _by_growth(
        self, evidence: RegionEvidence, outputs: Sequence[RegionOutput], why: str = ""
    ) -> Verdict:
        """The verdict of some outputs by how much the error grew. why: there is no replay."""
        leaf, pair = evidence.leaf, evidence.pair
        growth = leaf.growth
        if outputs is not evidence.outputs:
            growth = judge.grow(leaf.inputs, [o.error for o in outputs], leaf.u)
        if growth.verdict == VerdictKind.INTRODUCED:
            growth = self._replays.growth_where_read(evidence, outputs) or growth
        slots = [(o.name, o.slot) for o in outputs]
        verdict = self._indices.judged(
            judge.judge_region(pair.index, evidence.segment, growth, note=why),
            pair.call,
            evidence.inputs,
            slots,
        )
        if not evidence.is_deep:
            return verdict
        return judge.judge_unseen(
            verdict, growth, leaf.u, leaf.inputs, lambda: self.errors.sight(s for _, s in slots)
        )

    def _of_other_rows(self, evidence: RegionEvidence, slot: str, words: str) -> Verdict:
        """A call inside that is given other rows than the reference's operators give it. One choice
        moves them all: the first says so.
        """
        index, segment = evidence.pair.index, evidence.segment
        if self._misrouted.setdefault(evidence.pair.call.id, segment) != segment:
            return Verdict(
                index,
                VerdictKind.INHERITED,
                segment,
                Evidence.REPLAY,
                Confidence.CERTAIN,
                slot=slot,
                sentence=f"inherited: {slot} has {words}",
            )
        return Verdict(
            index,
            VerdictKind.STRUCTURAL,
            segment,
            Evidence.REPLAY,
            Confidence.CERTAIN,
            cause=CauseKind.STRUCTURAL,
            slot=slot,
            sentence=f"introduced here: {slot} has {words}",
        )

    def _replayed_alone(self, region: Region) -> str:
        """The first of the leaves without a partner right before a segment that alone were replayed
        with it, "" when there are none.
        """
        children = self.paired.kids.get(region.call, [])
        first = ""
        for child in reversed(children[: region.stretch]):
            if child in self.paired.pair_of or not self.paired.calls[child].leaf:
                break
            first = self.paired.calls[child].scope
        return first if any(child in self.paired.pair_of for child in children) else ""

    def located(self, verdict: Verdict, region: Region) -> Verdict:
        """The verdict, naming a call instead of code between calls: the one without a partner that
        made what went wrong; else the one that reads it, of what a cache holds, or below a root
        that no dump held, which has no code of its own.
        """
        children = self.paired.kids.get(region.call, [])
        if (
            verdict.where
            or verdict.verdict != VerdictKind.INTRODUCED
            or verdict.evidence == Evidence.REPLAY
            or region.stretch >= len(children)
        ):
            return verdict
        wrong = self.paired.slot(verdict.pair, verdict.slot) if verdict.slot else None
        for child in reversed(children[: region.stretch]):
            call = self.paired.calls[child]
            if (
                wrong
                and call.leaf
                and child not in self.paired.pair_of
                and wrong.reference_record in _written(call)
            ):
                return verdict.replace(
                    where=call.scope,
                    named=child,
                    sentence=f"the target has no such call: {verdict.sentence}",
                )
        is_held = is_of_child(verdict.slot) and align.is_cache(split_child(verdict.slot)[1])
        if not is_held and not has_mark(self.paired.calls[region.call], Mark.PUT_TOGETHER):
            return verdict
        reader = self.paired.calls[children[region.stretch]]
        words = "held by its cache" if is_held else "comes in here, and no call of the dump made it"
        sentence = f"{words}: {verdict.sentence}"
        return verdict.replace(where=reader.scope, named=reader.id, sentence=sentence)


def _written(call: Call) -> set[int]:
    return {r.record for kind in ("output", "mutated") for r in call.slots(kind)}
