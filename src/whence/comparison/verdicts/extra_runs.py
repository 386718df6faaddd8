"""Checks that a run besides the two compared ones had the reference's inputs and parameters; only
then can it serve as a yardstick.
"""

from __future__ import annotations

from collections.abc import Callable

from whence import judge
from whence.errors import UsageError
from whence.records import Run
from whence.records.slots import is_written, split_slot
from whence.results import Plan, SlotPair


def asked_the_same(
    reference: Run, run: Run, plan: Plan, option: str, equal: Callable[[SlotPair], bool]
) -> tuple[dict[str, int], list[str]]:
    """(by root, the step from which its inputs differ; notes). option: the option that named the
    run, for messages.

    equal: whether a pair of inputs or parameters is equal. Raises UsageError if the runs have no
    call in common, or if inputs or parameters differ before any output does, which the program
    cannot have caused. If integers differ later (another token was chosen), the root's further
    steps are not used; floating-point inputs may differ later, as the runs do.
    """
    if not plan.pairs:
        raise UsageError(
            f"{option} {run.path}: none of its calls could be paired with a call of "
            f"{reference.path}; give a run of the same program"
        )
    written = {r.record for c in reference.calls for r in c.refs if is_written(r.slot)}
    started: dict[str, int] = {}
    until: dict[str, int] = {}
    notes: list[str] = []
    outputs_differ = False
    for pair in plan.pairs:
        call = reference.calls[pair.reference]
        first_step = started.setdefault(call.root, call.step)
        for slot in pair.slots:
            kind, short = split_slot(slot.reference_slot)
            is_given = (kind == "input" and call.parent == -1) or (
                kind == "param" and call.step == first_step
            )
            if not is_given or slot.reference_record in written or equal(slot):
                continue
            where = f"{'.'.join(x for x in (call.root, call.scope) if x)} step {call.step}: {short}"
            if kind == "param":
                raise UsageError(
                    f"{option} {run.path}: it has other parameters than {reference.path} "
                    f"({where}); give a run of the same "
                    "program with the same weights (--seed fixes those that are drawn)"
                )
            if not outputs_differ:
                raise UsageError(
                    f"the run given with {option} did not get the same inputs: {where} of "
                    f"{run.path} is not that of "
                    f"{reference.path}; give a run of the same program with the same inputs and "
                    "seed"
                )
            if (
                judge.unit_roundoff(reference.records[slot.reference_record].dtype) == 0.0
                and call.root not in until
            ):
                until[call.root] = call.step
                notes.append(
                    f"{option} {run.path} goes another way from step {call.step} on ({where}): "
                    "not used from there"
                )
        outputs_differ = outputs_differ or not all(
            equal(s) for s in pair.slots if is_written(s.reference_slot)
        )
    return until, notes + _unpaired(reference, run, plan, option)


def _unpaired(reference: Run, run: Run, plan: Plan, option: str) -> list[str]:
    """A note if calls have no partner."""
    missing = [reference.calls[i] for i in plan.unmatched_reference] + [
        run.calls[i] for i in plan.unmatched_target
    ]
    if not missing and not plan.ambiguous:
        return []
    first = f"; the first: {missing[0].module_name}" if missing else ""
    count = len(missing) + len(plan.ambiguous)
    return [
        f"{option} {run.path}: {count} calls have no partner between it and the reference: "
        f"not the same program?{first}"
    ]


def partner_records(reference: Run, plan: Plan, until: dict[str, int]) -> dict[int, int]:
    """By record of the reference, the first record paired with it, before the step from which the
    inputs of its root differ (`until`).
    """
    out: dict[int, int] = {}
    for pair in plan.pairs:
        call = reference.calls[pair.reference]
        if call.step < until.get(call.root, call.step + 1):
            for slot in pair.slots:
                out.setdefault(slot.reference_record, slot.target_record)
    return out
