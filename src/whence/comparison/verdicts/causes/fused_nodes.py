"""What a fused attention of a runtime takes for granted that the graph it was made of does not."""

from __future__ import annotations

from whence.comparison.paired_runs import PairedRuns
from whence.records import Call, Over, Run
from whence.results import Verdict

_WITH_LENGTHS = ("com.microsoft.Attention", "com.microsoft.MultiHeadAttention")


def assumption(verdict: Verdict, paired: PairedRuns) -> str:
    """The fused attention that takes a mask as lengths in what a verdict speaks of, in words; ""
    where there is none.

    A mask of one number for each row says how many of its tokens are looked at, from the first on.
    """
    target, partner = paired.target, paired.target.calls[paired.plan.pairs[verdict.pair].target]
    names = {partner.scope, *partner.origins}
    run: Run = target
    while isinstance(run, Over):
        run = run.base
    for call in run.calls:
        is_inside = call.step == partner.step and call.scope in names
        if is_inside and call.op_type in _WITH_LENGTHS and _takes_lengths(run, call):
            return (
                f"in the target {call.op_type} ({call.scope}) does it, and takes the mask as the "
                "length of each row: that holds for padding on the right alone"
            )
    return ""


def _takes_lengths(run: Run, call: Call) -> bool:
    shapes = [run.records[ref.record].shape for ref in call.slots("input")]
    lengths = [
        run.records[ref.record].shape
        for ref in call.slots("input")
        if run.records[ref.record].dtype == "int32"
    ]
    return bool(shapes and shapes[0]) and (shapes[0][0],) in lengths
