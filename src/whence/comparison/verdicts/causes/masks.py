"""Says which positions the target's attention mask exposes that the reference's mask hides."""

from __future__ import annotations

import re

from whence.comparison.inputs.differing_masks import differing_mask
from whence.comparison.paired_runs import PairedRuns
from whence.results import SlotPair, Verdict

# An argument of an attention operator, as the sentence of a verdict says it.
_CAUSAL = re.compile(r"is_causal is (True|False) in the reference, (True|False) in the target")


def mask_cause(verdict: Verdict, paired: PairedRuns) -> str:
    """How the target's mask differs, in words; "" where the verdict is about no mask."""
    if (said := _CAUSAL.search(verdict.sentence)) is not None:
        return (
            "the target lets each position see later ones"
            if said[1] == "True"
            else "the target hides later positions"
        )
    slot = _slot(verdict, paired)
    return differing_mask(slot.reference_slot, paired.arrays(slot)) if slot is not None else ""


def _slot(verdict: Verdict, paired: PairedRuns) -> SlotPair | None:
    """The pair of tensors that a verdict is about: of the call, or of one that it calls."""
    index = verdict.pair
    return paired.slot(index, verdict.slot) or paired.slot(index, f"input.{verdict.slot}")
