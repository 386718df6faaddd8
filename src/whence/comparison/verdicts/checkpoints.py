"""When two checkpoints are compared, a weight that only one has makes the answer `UNDECIDED`."""

from __future__ import annotations

from collections.abc import Mapping

from whence.comparison.paired_runs import PairedRuns
from whence.records import Run
from whence.records.slots import is_param, param_name
from whence.results import GUILTY, Evidence, Verdict, VerdictKind

_NAMED = 3  # of the weights without a partner


def complete(
    verdicts: Mapping[tuple[int, int], Verdict], paired: PairedRuns
) -> dict[tuple[int, int], Verdict]:
    """The verdicts, with what is missing on one side where both runs hold parameters only.

    Of a module that ran, its outputs tell what a missing weight did; of a checkpoint nothing does:
    `undetermined`.
    """
    out, plan = dict(verdicts), paired.plan
    if not (_is_checkpoint(paired.reference) and _is_checkpoint(paired.target)):
        return out
    roots = {c.id for c in paired.calls if c.parent == -1}
    for index, pair in enumerate(plan.pairs):
        lone = [
            (side, slot)
            for side, slots in (("reference", pair.only_reference), ("target", pair.only_target))
            for slot in slots
        ]
        scope = paired.calls[pair.reference].scope
        lacking = [
            (side, ".".join(filter(None, (scope, param_name(slot)))))
            for side, slot in lone
            if is_param(slot)
        ]
        if pair.reference in roots:
            lacking += [
                ("reference", paired.calls[call].scope) for call in plan.unmatched_reference
            ]
            lacking += [
                ("target", paired.target.calls[call].scope) for call in plan.unmatched_target
            ]
        region = (pair.reference, 0 if paired.kids.get(pair.reference) else -1)
        if lacking and (region not in out or out[region].verdict not in GUILTY):
            words = "; ".join(
                f"only the {side} has {', '.join(names[:_NAMED])}{' ...' if names[_NAMED:] else ''}"
                for side in ("reference", "target")
                if (names := [name for s, name in lacking if s == side])
            )
            out[region] = Verdict(
                index,
                VerdictKind.UNDETERMINED,
                region[1],
                Evidence.TWO_DUMPS,
                numbers={"e_out": 1.0},
                sentence=words,
            )
    return out


def _is_checkpoint(run: Run) -> bool:
    """Are there parameters and nothing else?"""
    return any(call.refs for call in run.calls) and all(
        is_param(ref.slot) for call in run.calls for ref in call.refs
    )
