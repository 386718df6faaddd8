"""Withdraws faults caused by a different loss scale that is divided out before the optimiser
step. What the optimiser takes is the same, so nothing computes something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.gradient_scales import fit, gradients_of_steps
from whence.records import Call, Run
from whence.records.slots import is_of_child, is_of_loss_scaler, is_output, split_child
from whence.records.training import BACKWARD, GRADIENTS, LOSS, OPTIMIZER
from whence.results import GUILTY, Evidence, SlotPair, Verdict, VerdictKind

Verdicts = dict[tuple[int, int], Verdict]

_UNDONE = "undone_scale"
"""By how much a loss was off, among the numbers of a verdict that is withdrawn."""
_FACTOR = 0.01
"""What 16 bits leave where tensors differ by a factor alone, over their 2-norm."""
_SHOWN = 8  # steps that are listed
_ALIKE = 5e-4
"""By how much gradients that are taken alike may be off, in size and direction."""


def undone(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, without those of losses whose other scale does not reach the optimiser.

    Gradients before they are clipped count: clipping takes any scale out.
    """
    suspects = {
        key: verdict
        for key, verdict in verdicts.items()
        if verdict.verdict in (*GUILTY, VerdictKind.UNDETERMINED)
    }
    differing = {
        key: slots for key, v in suspects.items() if (slots := list(_of_loss(paired, key, v)))
    }
    taken = [key for key in suspects if paired.calls[key[0]].op == GRADIENTS]
    skipped = {*skipped_steps(paired.reference), *skipped_steps(paired.target)}
    if not differing and not taken and not skipped:
        return verdicts
    out, steps = dict(verdicts), dict(gradients_of_steps(paired))
    factors = {key: _factor(paired, slots) for key, slots in differing.items()}
    # A number alone may be off by any factor: what it is a sum of shows in its gradients.
    otherwise = {
        _micro_batch(call)
        for call, factor in ((paired.calls[key[0]], factor) for key, factor in factors.items())
        if factor is None and call.op == LOSS and _step(call) not in skipped
    }
    for key, factor in factors.items():
        call, verdict = paired.calls[key[0]], verdicts[key]
        if call.op == LOSS and _micro_batch(call) in otherwise:
            continue
        place = _step(call)
        step = steps.get(place)
        if factor is not None and (place in skipped or (step is not None and step.agree(factor))):
            words = f"{factor:.6g} times the reference's, which does not reach the optimiser"
            out[key] = verdict.withdrawn(
                VerdictKind.NOISE,
                f"{words}; {verdict.sentence}",
                numbers={**verdict.numbers, _UNDONE: factor},
            )
    for key, verdict in out.items():
        if words := _of_skipped(paired, paired.calls[key[0]], verdict, skipped):
            out[key] = verdict.withdrawn(VerdictKind.UNDETERMINED, f"{words}; {verdict.sentence}")
    for key in taken:
        call, verdict = paired.calls[key[0]], verdicts[key]
        step = steps.get(_step(call))
        if step is not None and step.is_moved and _are_taken_alike(paired, verdict.pair):
            words = "gradients are scaled here, and a loss in the other run: they leave alike"
            out[key] = verdict.withdrawn(VerdictKind.NOISE, f"{words}; {verdict.sentence}")
    return out


def _step(call: Call) -> tuple[int, str, int]:
    return call.rank, call.root, call.step


def _micro_batch(call: Call) -> tuple[int, str, int, int]:
    return call.rank, call.root, call.step, call.micro


def _is_scaled_otherwise(paired: PairedRuns, call: Call, verdict: Verdict) -> bool:
    """Has one run alone a loss scaler whose scale it takes out of these gradients?"""
    partner = paired.pair(verdict.pair).partner
    scalers = [
        {ref.slot for ref in side.refs if is_of_loss_scaler(ref.slot)} for side in (call, partner)
    ]
    return call.op == GRADIENTS and scalers[0] != scalers[1]


def _of_skipped(
    paired: PairedRuns, call: Call, verdict: Verdict, skipped: set[tuple[int, str, int]]
) -> str:
    """Why a guilty verdict proves nothing where one run left steps out, "" where it proves
    something.
    """
    if verdict.verdict not in GUILTY:
        return ""
    if call.phase == BACKWARD and _step(call) in skipped:
        return "a loss scaler left this step out, whose gradients are not finite at its scale"
    before = any(
        (rank, root) == (call.rank, call.root) and step < call.step for rank, root, step in skipped
    )
    is_known = verdict.evidence == Evidence.REPLAY
    is_known = is_known and not _is_scaled_otherwise(paired, call, verdict)
    if before and call.phase == OPTIMIZER and not is_known:
        return "a loss scaler left an earlier step out of one run, so that its optimiser is behind"
    return ""


def _are_taken_alike(paired: PairedRuns, index: int) -> bool:
    """Does the optimiser take the same gradients in both runs, each but for a little?"""
    slots = [s for name, s in paired.slots[index].items() if is_output(name)]
    pairs = [paired.arrays(s) for s in slots]
    lone = [*paired.plan.pairs[index].only_reference, *paired.plan.pairs[index].only_target]
    return not any(map(is_output, lone)) and all(
        pair is not None
        and (known := fit([pair], [(1.0, 1.0)])) is not None
        and abs(known.scale - 1) <= _ALIKE
        and known.residual <= _ALIKE
        for pair in pairs
    )


def notes(verdicts: Iterable[Verdict], paired: PairedRuns) -> Iterator[str]:
    """What is said of losses whose other scale is taken out again."""
    factors = [
        factor
        for verdict in verdicts
        if (factor := verdict.numbers.get(_UNDONE)) is not None
        and paired.calls[paired.plan.pairs[verdict.pair].reference].phase == "forward"
    ]
    for side, run in (("reference", paired.reference), ("target", paired.target)):
        if steps := sorted({step for _, _, step in skipped_steps(run)}):
            listed = ", ".join(map(str, steps[:_SHOWN])) + (" ..." if len(steps) > _SHOWN else "")
            named = f"step{'s' if len(steps) > 1 else ''} {listed}"
            yield (
                f"the loss scaler of the {side} left out {named}, whose gradients are not finite "
                "at its scale: parameters part from there. Begin with a smaller scale "
                "(GradScaler's init_scale) to compare these steps"
            )
    if factors:
        yield (
            f"the loss is {factors[0]:.6g} times the reference's; the scale does not reach the "
            "optimiser: gradients before clipping are of one scale"
        )


def skipped_steps(run: Run) -> Iterator[tuple[int, str, int]]:
    """(rank, root, step) of the steps that a loss scaler left out."""
    for call in run.calls:
        if call.op == GRADIENTS and call.arguments.get("step.skipped"):
            yield call.rank, call.root, call.step


def _of_loss(paired: PairedRuns, key: tuple[int, int], verdict: Verdict) -> Iterator[SlotPair]:
    """The tensors that a verdict is about where it is one about a loss, its backward pass, or a
    number that it is given, as a loss scaler's scale.
    """
    call, stretch = key
    if paired.calls[call].op == LOSS:
        yield from (s for n, s in paired.slots[verdict.pair].items() if is_output(n))
    elif is_of_child(verdict.slot) and 0 <= stretch < len(paired.kids.get(call, ())):
        child = paired.kids[call][stretch]
        index = paired.pair_of.get(child)
        slots = paired.slots[index] if index is not None else {}
        slot = slots.get(split_child(verdict.slot)[1])
        is_of_loss = paired.calls[child].op == LOSS
        if is_of_loss and slot and paired.reference.records[slot.reference_record].count == 1:
            yield slot


def _factor(paired: PairedRuns, slots: Sequence[SlotPair]) -> float | None:
    """How many times the reference's these tensors are; None where they are off by more than one
    factor.
    """
    known = []
    for slot in slots:
        arrays = paired.arrays(slot)
        if arrays is None:
            return None
        if not any(array.any() for array in arrays):  # what is zero is so at any scale
            continue
        fitted = fit([arrays], [(1.0, 1.0)])
        if fitted is None or fitted.residual > _FACTOR * abs(fitted.scale):
            return None
        known.append(fitted.scale)
    if not known or not known[0] or max(known) - min(known) > _FACTOR * abs(known[0]):
        return None
    return known[0]
