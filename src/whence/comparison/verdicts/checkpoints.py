"""When two checkpoints are compared, a weight that only one has makes the answer `UNDECIDED`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whence.comparison.paired_runs import PairedRuns
from whence.records import Run
from whence.records.slots import is_param, param_name
from whence.results import GUILTY, CallPair, Evidence, Verdict, VerdictKind

_NAMED = 3  # of the weights without a partner


def complete(
    verdicts: Mapping[tuple[int, int], Verdict], paired: PairedRuns
) -> dict[tuple[int, int], Verdict]:
    """The verdicts, with what is missing on one side where both runs hold parameters only.

    Of a module that ran, its outputs tell what a missing weight did; of a checkpoint nothing does:
    `undetermined`.
    """
    out = dict(verdicts)
    if not all(map(_is_checkpoint, (paired.reference, paired.target))):
        return out
    for index, pair in enumerate(paired.plan.pairs):
        words = "; ".join(
            f"only the {side} has {', '.join(names[:_NAMED])}{' ...' if names[_NAMED:] else ''}"
            for side, names in _lacking(paired, pair)
            if names
        )
        region = (pair.reference, 0 if paired.kids.get(pair.reference) else -1)
        if words and (region not in out or out[region].verdict not in GUILTY):
            out[region] = Verdict(
                index,
                VerdictKind.UNDETERMINED,
                region[1],
                Evidence.TWO_DUMPS,
                numbers={"e_out": 1.0},
                sentence=words,
            )
    return out


def _lacking(paired: PairedRuns, pair: CallPair) -> Iterator[tuple[str, list[str]]]:
    """(side, weights that only this side's call has); of a root also the calls without a
    partner.
    """
    call, plan = paired.calls[pair.reference], paired.plan
    for side, slots, calls, alone in (
        ("reference", pair.only_reference, paired.calls, plan.unmatched_reference),
        ("target", pair.only_target, paired.target.calls, plan.unmatched_target),
    ):
        names = [".".join(filter(None, (call.scope, param_name(s)))) for s in slots if is_param(s)]
        yield side, names + [calls[number].scope for number in alone if call.parent == -1]


def _is_checkpoint(run: Run) -> bool:
    """Are there parameters and nothing else?"""
    return any(call.refs for call in run.calls) and all(
        is_param(ref.slot) for call in run.calls for ref in call.refs
    )
