"""Adds to findings in compiled graphs the kernel, and the roundings it leaves out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from whence import align, dtypes, judge
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.replays.fault_cause import own_score
from whence.comparison.replays.replayer import Replayer
from whence.comparison.replays.self_check import Threads
from whence.comparison.replays.side import ReplaySource
from whence.comparison.verdicts.call_replays import CallReplays
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.display import listed
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Program
from whence.records.program import map_operands, operands
from whence.records.slots import is_output
from whence.records.views import CachedRun
from whence.results import GUILTY, CallPair, CauseKind, Verdict, VerdictKind

_MOST = 256  # kernels that are run twice more, to see which roundings they leave out
_HALVES = ("bfloat16", "float16")
# of the distance to the replay that rounds in between, which the one that does not must come below
_LEFT_OUT = 0.5


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


def notes(paired: PairedRuns, replays: CallReplays) -> list[str]:
    """Roundings that kernels left out."""
    if replays.replayer is None:
        return []
    pairs = [
        p
        for p in paired.plan.pairs
        if align.is_piece(paired.calls[p.reference])
        and align.is_piece(paired.target.calls[p.target])
    ]
    return list(_left_out(pairs, paired, replays.replayer))


def _left_out(pairs: list[CallPair], paired: PairedRuns, replayer: Replayer) -> Iterator[str]:
    """Kernels that keep in float32 what their graph rounds to 16 bits in between: run both ways,
    the latter comes closer.
    """
    names: list[str] = []
    tried = 0
    for pair in pairs:
        call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
        program = paired.reference.programs.get(call.program)
        if (
            program is None
            or not align.is_compiled(partner)
            or tried >= _MOST
            or not _rounds_between(program, paired, pair)
        ):
            continue
        slot = next((s for s in pair.slots if s.reference_slot == "output.0"), None)
        if slot is None or paired.is_equal(slot):
            continue
        tried += 1
        try:
            with Threads(1):
                rounded, unrounded = _both_ways(call, program, pair, paired, replayer)
            y = paired.target.array(slot.target_record).astype(np.float64)
        except (ReplayRefused, ElementsMissing, KeyError):
            continue
        far, near = (float(np.linalg.norm(np.subtract(y, r))) for r in (rounded, unrounded))
        if near < _LEFT_OUT * far:
            names.append(call.op)
    if names:
        yield (
            f"a rounding was left out in {len(names)} of {tried} tensors of fused kernels "
            f"({listed(names, 4)}): what the graph rounds to 16 bits in "
            "between they keep in float32, and run so the reference's operators come closer; no "
            "fault"
        )


def _both_ways(
    call: Call, program: Program, pair: CallPair, paired: PairedRuns, replayer: Replayer
) -> tuple[Array, Array]:
    """The reference's operators on the target's inputs, rounding as they say and not in between;
    both in the target's dtype at the end.
    """
    side = replayer.reference
    records = {
        s.reference_slot: s.target_record for s in pair.slots if not is_output(s.reference_slot)
    }
    arrays, strides = replayer.target.arrays(
        {s: records[s] for s in (*program.inputs, *program.params)}
    )
    kind = dtypes.of(
        paired.target.array(
            next(s.target_record for s in pair.slots if s.reference_slot == "output.0")
        )
    )
    as_said = side.load(call).run(
        arrays, arrays, working="recorded", strides=strides, outputs=["output.0"]
    )["output.0"]
    edited = side.edited(_without_casts(program))
    unrounded = edited.run(
        arrays, arrays, working="float32", strides=strides, outputs=["output.0"]
    )["output.0"]
    return judge.rounded(as_said, kind.name).astype(np.float64), judge.rounded(
        unrounded, kind.name
    ).astype(np.float64)


def _rounds_between(program: Program, paired: PairedRuns, pair: CallPair) -> bool:
    """May a value be rounded to 16 bits before the last operator?"""
    computing = [op for op in program.operations if not align.is_move(op.name)]
    if len(computing) < 2:
        return False
    narrow = any(_cast(op) in _HALVES for op in computing[:-1])
    return narrow or any(
        paired.target.records[s.target_record].dtype in _HALVES for s in pair.slots
    )


def _cast(op: Any) -> str:
    """The dtype that an operator brings a tensor to, "" when it is not a cast."""
    if op.name.split(".")[1] not in ("convert_element_type", "_to_copy"):
        return ""
    arguments = (*op.args[1:], *op.kwargs.values())
    return next((str(value) for kind, value in operands(arguments) if kind == "dtype"), "")


def _without_casts(program: Program) -> Program:
    """The program with casts to 16 bits handing on what they are given."""
    instead: dict[int, Any] = {}

    def replaced(kind: str, operand: Any) -> Any:
        return instead.get(operand[0], {kind: operand}) if kind == "op" else {kind: operand}

    operations = []
    for i, op in enumerate(program.operations):
        op = op.with_operands(replaced)
        if _cast(op) in _HALVES:
            instead[i] = op.args[0]
        operations.append(op)
    outputs = tuple((slot, map_operands(replaced, o)) for slot, o in program.outputs)
    return msgspec.structs.replace(
        program, id=f"{program.id} unrounded", operations=tuple(operations), outputs=outputs
    )
