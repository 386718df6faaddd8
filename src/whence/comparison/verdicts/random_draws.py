"""Random numbers that calls draw, which replays take as they are: so they are judged themselves.

Drawn by other settings is another function; numbers that are not spread as their operator draws
them, and the same numbers twice, come from a generator that is wrong. What was drawn and not
recorded cannot be told from a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from whence import dtypes, judge
from whence.comparison.paired_runs import PairedRuns
from whence.judge.limits import DRAWN_AGAIN_BITS
from whence.records import Call, Program, Run
from whence.records.marks import NoProgram, is_without_program
from whence.records.program import ProgramDraw
from whence.records.slots import is_drawn
from whence.results import (
    GUILTY,
    CauseKind,
    Confidence,
    Evidence,
    RandomNumbers,
    SlotPair,
    Verdict,
    VerdictKind,
)

Verdicts = dict[tuple[int, int], Verdict]


def judged(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, with calls guilty that draw random numbers differently from the reference.
    Verdicts from two dumps become `undetermined` if a call draws numbers that were not recorded.
    """
    out = dict(verdicts)
    for key, verdict in verdicts.items():
        if verdict.verdict == VerdictKind.INTRODUCED and verdict.evidence == Evidence.TWO_DUMPS:
            pair = paired.plan.pairs[verdict.pair]
            sides = (
                (paired.reference, paired.calls[pair.reference]),
                (paired.target, paired.target.calls[pair.target]),
            )
            unseen = [_drawn_unseen(run, call, verdict.slot) for run, call in sides]
            drawn = [any(is_drawn(ref.slot) for ref in call.refs) for _, call in sides]
            if any(unseen) and all(words or is_seen for words, is_seen in zip(unseen, drawn)):
                words = f"it {unseen[0] or unseen[1]}, which were not recorded"
                out[key] = verdict.withdrawn(
                    VerdictKind.UNDETERMINED, f"{words}: seed both runs alike; {verdict.sentence}"
                )
    earlier: dict[str, _Drawn] = {}
    recomputed = _Recomputed(paired)
    for index in _in_order(paired):
        for segment, words in _drawn_otherwise(index, paired, earlier, recomputed):
            call_id = paired.plan.pairs[index].reference
            if (passed := out.get((call_id, segment))) is None or passed.verdict not in GUILTY:
                out[call_id, segment] = Verdict(
                    index,
                    VerdictKind.INTRODUCED,
                    stretch=segment,
                    evidence=Evidence.PROGRAM,
                    confidence=Confidence.CERTAIN,
                    cause=CauseKind.SEMANTIC,
                    sentence=words,
                    reason=words,
                )
    return out


def _drawn_unseen(run: Run, call: Call, slot: str) -> str:
    """The reason, if random numbers are why an output of a call could not be followed; else ""."""
    if is_without_program(call, NoProgram.RANDOM):
        return call.no_program
    program = run.programs.get(call.program)
    lost = dict(program.lost).get(slot, "") if program is not None else ""
    return lost if lost.startswith(NoProgram.RANDOM) else ""


def random_numbers(paired: PairedRuns) -> RandomNumbers | None:
    """The first call with different random numbers in the two runs, and the number of such calls;
    None if all are equal or there are none.
    """
    first: Call | None = None
    calls = 0
    for pair, slots in zip(paired.plan.pairs, paired.slots, strict=True):
        call = paired.calls[pair.reference]
        if call.phase == "backward":  # reads what its forward pass drew
            continue
        if any(is_drawn(s.reference_slot) and not paired.is_equal(s) for s in slots.values()):
            calls += 1
            first = call if first is None or call.order < first.order else first
    if first is None:
        return None
    return RandomNumbers(first.module_name, first.op_type, first.step, first.rank, calls)


class _Drawn(NamedTuple):
    """A draw of the target: the call, and the hash of the numbers that the reference drew there."""

    call: Call
    reference_hash: str


class _Recomputed:
    """The random numbers that both runs drew when a backward pass repeated forward calls."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._drawn = [self._of(run) for run in (paired.reference, paired.target)]

    @staticmethod
    def _of(run: Run) -> dict[tuple[object, ...], set[str]]:
        drawn: dict[tuple[object, ...], set[str]] = {}
        for call in run.calls:
            for ref in call.refs if call.phase == "recompute" else ():
                if is_drawn(ref.slot):
                    hashes = drawn.setdefault((*_place(call), ref.slot), set())
                    hashes.add(run.records[ref.record].hash)
        return drawn

    def otherwise(self, slot: SlotPair, call: Call, partner: Call) -> str:
        """A sentence if only the target drew other numbers when it repeated a call; else ""."""
        parted = []
        for drawn, side, own, record in zip(
            self._drawn,
            (call, partner),
            (slot.reference_slot, slot.target_slot),
            self._paired.records(slot),
            strict=True,
        ):
            again = drawn.get((*_place(side), own), set())
            parted.append(bool(again) and record.hash not in again)
        if parted != [False, True]:
            return ""
        return (
            "the backward pass runs it again, and then it draws other random numbers: gradients "
            "are those of another function"
        )


def _place(call: Call) -> tuple[object, ...]:
    return call.rank, call.root, call.scope, call.op, call.step, call.micro


def _in_order(paired: PairedRuns) -> list[int]:
    """Indices of pairs of forward calls that draw, in execution order. A backward pass reads the
    numbers of its forward pass, and a recomputation must repeat them, so neither counts.
    """
    calls = [(paired.calls[p.reference], k) for k, p in enumerate(paired.plan.pairs)]
    forward = [(call.order, k) for call, k in calls if call.phase == "forward"]
    return [k for _, k in sorted(forward) if any(map(is_drawn, paired.slots[k]))]


def _drawn_otherwise(
    index: int, paired: PairedRuns, earlier: dict[str, _Drawn], recomputed: _Recomputed
) -> Iterator[tuple[int, str]]:
    """(segment, fault in words) of each wrong draw in a call of the target. earlier: earlier draws
    by hash; the call's own are added.
    """
    pair = paired.pair(index)
    call, partner = pair.call, pair.partner
    programs = (
        paired.reference.programs.get(call.program),
        paired.target.programs.get(partner.program),
    )
    if programs[0] is None or programs[1] is None:
        return
    drawn_in_target = {draw.slot: draw for draw in programs[1].draws}
    for draw in programs[0].draws:
        slot = paired.slots[index].get(draw.slot)
        target = drawn_in_target.get(slot.target_slot) if slot is not None else None
        if slot is None or target is None:
            continue
        words = (
            _other_settings(draw, target)
            or _misdrawn(paired, slot, draw, target)
            or _drawn_again(paired, slot, call, earlier)
            or recomputed.otherwise(slot, call, partner)
        )
        if words:
            is_leaf = not paired.kids.get(call.id)
            yield (-1 if is_leaf else _segment(programs[0], draw)), words


def _other_settings(draw: ProgramDraw, target: ProgramDraw) -> str:
    # Another operator may draw the same by other settings: what to drop, what to keep.
    differing = [
        f"{name} is {value!r} in the reference, {target.settings[name]!r} in the target"
        for name, value in draw.settings.items()
        if target.operator == draw.operator and target.settings.get(name, value) != value
    ]
    operator = draw.operator.removeprefix("aten.").removesuffix(".default")
    return f"{operator}: {', '.join(differing)}" if differing else ""


def _misdrawn(paired: PairedRuns, slot: SlotPair, draw: ProgramDraw, target: ProgramDraw) -> str:
    drawn, drawn_in_target = paired.records(slot)
    if judge.misdrawn(drawn.statistics, draw.operator, draw.settings):
        return ""
    return judge.misdrawn(drawn_in_target.statistics, target.operator, target.settings)


def _drawn_again(paired: PairedRuns, slot: SlotPair, call: Call, earlier: dict[str, _Drawn]) -> str:
    """A sentence if the target repeats numbers that it drew earlier while the reference draws new
    ones; else "".
    """
    drawn, drawn_in_target = paired.records(slot)
    is_floating = dtypes.is_floating(drawn_in_target.dtype)
    bits = judge.chance_bits(drawn_in_target.statistics, is_floating=is_floating)
    if not drawn_in_target.hash or not drawn.hash or bits < DRAWN_AGAIN_BITS:
        return ""
    before = earlier.setdefault(drawn_in_target.hash, _Drawn(call, drawn.hash))
    if before.call is call or before.reference_hash == drawn.hash:
        return ""
    place = f"{before.call.module_name} in step {before.call.step}"
    return f"draws the same {drawn_in_target.count} random numbers as {place}; the reference others"


def _segment(program: Program, draw: ProgramDraw) -> int:
    """The stretch of a container that first reads the drawn numbers."""
    place = program.inputs.index(draw.slot)
    reader = next(
        (
            k
            for k, operation in enumerate(program.operations)
            if any(operand == ("in", place) for operand in operation.operands())
        ),
        0,
    )
    return sum(before <= reader for _, before in program.calls)
