"""Withdraws faults by error growth in modules that the two runs compute by different operators,
since the number of operators there is not known.
"""

from __future__ import annotations

from collections.abc import Mapping

from whence.comparison.prepare.rewritten_modules import REWRITTEN
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.judge import LIMITS
from whence.records.slots import is_written
from whence.results import Evidence, Verdict, VerdictKind


def doubted(
    verdicts: Mapping[tuple[int, int], Verdict], errors: PairErrors
) -> dict[tuple[int, int], Verdict]:
    """The verdicts, without faults whose error may be rounding of several operators.

    The limit of growth holds for one operator, but these modules contain several, and the runs
    write them differently.
    """
    out, paired = dict(verdicts), errors.paired
    for key, verdict in verdicts.items():
        if (
            verdict.verdict != VerdictKind.INTRODUCED
            or verdict.evidence not in (Evidence.TWO_DUMPS, Evidence.STATISTICS)
            or verdict.cause
        ):
            continue
        call = paired.pair(verdict.pair).call
        e_out = verdict.numbers.get("e_out")
        if REWRITTEN not in call.notes or e_out is None:
            continue
        outputs = [s for s in paired.slots[verdict.pair].values() if is_written(s.reference_slot)]
        u = max((errors.of(slot).u for slot in outputs), default=0.0)
        if e_out <= LIMITS.within(u):
            sentence = (
                f"rel_l2 {e_out:.2g}, which the rounding of operators that are written "
                "differently makes"
            )
            out[key] = verdict.withdrawn(VerdictKind.AMPLIFIED, sentence)
        elif e_out <= LIMITS.root_output_room(u):
            sentence = (
                f"differs by rel_l2 {e_out:.2g}, more than the {LIMITS.within(u):.2g} that "
                "rounding usually grows to; its operators are "
                "written differently in the two runs and could not be replayed: capture both at "
                "--level modules, or give --model"
            )
            out[key] = verdict.withdrawn(VerdictKind.UNDETERMINED, sentence)
    return out
