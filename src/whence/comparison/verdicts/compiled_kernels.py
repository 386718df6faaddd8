"""Adds to findings in compiled graphs the kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from whence import align
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.replays.fault_cause import own_score
from whence.comparison.replays.self_check import Threads
from whence.comparison.replays.side import ReplaySource
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call
from whence.records.views import CachedRun
from whence.results import GUILTY, CauseKind, Verdict, VerdictKind


def named(
    verdicts: Mapping[tuple[int, int], Verdict], errors: PairErrors
) -> dict[tuple[int, int], Verdict]:
    """The verdicts, where a node of a graph is at fault with what its result is multiplied by, its
    name and its kernel in the sentence.
    """
    paired = errors.paired
    out, graphs = dict(verdicts), _OwnGraphs(paired)
    first: dict[Any, list[Call]] = defaultdict(list)
    for key, verdict in sorted(verdicts.items(), key=lambda item: paired.calls[item[0][0]].order):
        if verdict.verdict not in GUILTY or not verdict.confidence:
            continue
        pair = paired.plan.pairs[verdict.pair]
        call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
        slot = paired.slots[verdict.pair].get(verdict.slot) if "whole" in verdict.numbers else None
        maker = paired.maker(slot) if slot is not None else None
        if maker is not None and align.kernel(maker):
            partner = maker
        words = align.kernel(partner) or align.kernel(call)
        if not words:
            continue
        node = partner if align.is_compiled(partner) else call
        kernel = node.parent, words.partition(", ")[2], verdict.side
        earlier = next(
            (
                c
                for c in first[kernel]
                if kernel[1]
                and align.is_piece(call)
                and _computed(c, paired) & _computed(call, paired)
            ),
            None,
        )
        first[kernel].append(call)
        if earlier is None:
            cause, because = verdict.cause, ""
            if not cause and "whole" in verdict.numbers:
                cause, because = graphs.cause(partner)
            shown = paired.slots[verdict.pair].get(verdict.slot)
            sight = errors.sight([shown]) if shown is not None else None
            pattern = sight.pattern if sight is not None else ""
            sentence = "; ".join(filter(None, (pattern, verdict.sentence, because, words)))
            out[key] = verdict.replace(cause=cause, sentence=sentence)
        else:
            inherited = f"one kernel computes it with {earlier.op}: {verdict.sentence}"
            out[key] = verdict.withdrawn(VerdictKind.INHERITED, inherited)
    return out


class _OwnGraphs:
    """The target's graphs cut at what they show, so that what each kernel was to compute can be run
    on what it was given.
    """

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._side: ReplaySource | None = None
        self._calls: dict[int, Call] = {}

    def cause(self, node: Call) -> tuple[CauseKind, str]:
        """The cause of an error at a node and why, unknown where the target's own graph does not
        tell.
        """
        if not align.is_compiled(node):
            return CauseKind.UNKNOWN, ""
        if self._side is None:
            run = self._paired.target
            cut = CachedRun(align.cut_alike(run, run).reference)
            self._side = ReplaySource(cut)
            self._calls = {
                r.record: c for c in cut.calls if align.is_piece(c) for r in c.slots("output")
            }
        call = next(
            (self._calls[r.record] for r in node.slots("output") if r.record in self._calls), None
        )
        if call is None or not call.program:
            return CauseKind.UNKNOWN, ""
        try:
            with Threads(1):
                score, _, _ = own_score(self._side, call, ["output.0"])
        except (ReplayRefused, ElementsMissing, KeyError, ValueError):
            return CauseKind.UNKNOWN, ""
        if score > 1:
            why = ", run again on what the kernel was given, does not give what it left"
            return CauseKind.KERNEL, f"the target's own graph{why}"
        why = "gives what the kernel left, so the graph computes something else"
        return CauseKind.SEMANTIC, f"the target's own graph {why}"


def _computed(call: Call, paired: PairedRuns) -> set[str]:
    """The nodes that are computed on the way to one, views left out."""
    program = paired.reference.programs.get(call.program)
    return (
        {n for n, op in zip(program.names, program.operations) if not align.is_move(op.name)}
        if program is not None
        else set()
    )
