"""The effect of all differences at the outputs of the models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from whence import align, dtypes
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.records import Call
from whence.records.slots import is_output
from whence.results import Effect, Generation, SlotPair

_MODELS = ("module", "graph")
"""Kinds of calls that are models where no other call made them."""
_MAP_AXES = 4
_SCORES = "logits"


class _Output(NamedTuple):
    """An output of a model with its partner. is_lone: the call has no other output."""

    call: Call
    slot: SlotPair
    is_lone: bool

    @property
    def are_scores(self) -> bool:
        """Whether the output may hold scores of classes or tokens: it is named logits, or is the
        only output.
        """
        return self.is_lone or _SCORES in self.slot.reference_slot


def effect(
    paired: PairedRuns, errors: PairErrors, generation: Generation | None = None
) -> Effect | None:
    """The largest error of the models' outputs, and how many rows of scores have their largest
    element at another place. None if nothing differs or no output of a model is known.

    Caches do not count as outputs. If some outputs are named logits, only these count.
    """
    outputs, unmeasured = _outputs(paired)
    scores = [o for o in outputs if _SCORES in o.slot.reference_slot]
    chosen = scores or outputs
    differing = [o for o in chosen if not paired.is_equal(o.slot)]
    known = [o for o in differing if errors.of(o.slot).value is not None]
    unmeasured += len(differing) - len(known)
    if not differing and not unmeasured and (generation is None or not generation.compared):
        return None
    rows, moved = _moved(paired, [o for o in chosen if o.are_scores])
    tokens, changed = _tokens(generation)
    result = Effect(
        outputs=len(chosen) - (len(differing) - len(known)),
        differing=sum(errors.of(o.slot).value != 0.0 for o in known),
        unmeasured=unmeasured,
        rows=rows,
        moved=moved,
        tokens=tokens,
        tokens_changed=changed,
        models=_models(paired, outputs),
    )
    return _with_worst(result, known, paired, errors)


def _models(paired: PairedRuns, outputs: Sequence[_Output]) -> tuple[str, ...]:
    """Names of the roots with these outputs, the one with the most calls inside first."""
    names = {output.call.root for output in outputs}
    calls = Counter(call.root for call in paired.calls if call.root in names)
    calls.update({name: paired.left_out.roots.get(name, 0) for name in calls})
    return tuple(name for name, _ in calls.most_common())


def of_tokens(generation: Generation) -> Effect:
    """The effect on tokens, for runs of which only logits were captured."""
    tokens, changed = _tokens(generation)
    return Effect(tokens=tokens, tokens_changed=changed)


def _tokens(generation: Generation | None) -> tuple[int, int]:
    """(tokens that both runs chose after the same text, how many of them differ)."""
    if generation is None:
        return 0, 0
    changed = sum(token.reference != token.target for token in generation.tokens)
    return len(generation.tokens), changed


def _outputs(paired: PairedRuns) -> tuple[list[_Output], int]:
    """(paired outputs of models, number of outputs without a partner)."""
    outputs: list[_Output] = []
    alone = 0
    for pair in paired.plan.pairs:
        call = paired.calls[pair.reference]
        if call.parent != -1 or call.kind not in _MODELS:
            continue
        returned = [s for s in pair.slots if _is_result(s.reference_slot)]
        outputs += [_Output(call, slot, len(returned) == 1) for slot in returned]
        alone += sum(map(_is_result, pair.only_reference))
    return outputs, alone


def _is_result(slot: str) -> bool:
    return is_output(slot) and not align.is_cache(slot)


def _with_worst(
    result: Effect, known: Sequence[_Output], paired: PairedRuns, errors: PairErrors
) -> Effect:
    """The effect, completed by the output with the largest error."""
    if not known:
        return msgspec.structs.replace(result, error=0.0) if result.outputs else result
    worst = max(known, key=lambda o: errors.of(o.slot).value or 0.0)
    size = errors.of(worst.slot).value or 0.0
    measured = paired.measured[worst.slot.reference_record, worst.slot.target_record]
    return msgspec.structs.replace(
        result,
        error=size if math.isfinite(size) else None,
        from_statistics=measured.values.get("rel_l2") is None,
        name=worst.call.module_name,
        slot=worst.slot.reference_slot,
        step=worst.call.step,
        rank=worst.call.rank,
    )


def _moved(paired: PairedRuns, scores: Sequence[_Output]) -> tuple[int, int]:
    """(rows of scores that were compared, rows whose largest element is at another place)."""
    rows = moved = 0
    for in_output, is_moved in _by_output(paired, scores):
        rows += in_output
        moved += is_moved
    return rows, moved


def _by_output(paired: PairedRuns, scores: Sequence[_Output]) -> Iterator[tuple[int, int]]:
    for output in scores:
        record = paired.records(output.slot)[0]
        is_real = dtypes.is_floating(record.dtype) and "complex" not in record.dtype
        # The last axis of a feature map is its width, not a set of classes.
        if not is_real or not 0 < len(record.shape) < _MAP_AXES or record.shape[-1] < 2:
            continue
        rows = record.count // record.shape[-1]
        if paired.is_equal(output.slot):
            yield rows, 0
            continue
        arrays = None if paired.partly(output.slot) else paired.arrays_of_one_shape(output.slot)
        if arrays is None:
            continue
        # numpy cannot compare values of the narrow dtypes; float32 holds them exactly.
        a, b = ((x if x.dtype.kind == "f" else x.astype(np.float32)).argmax(-1) for x in arrays)
        yield rows, int(np.count_nonzero(a != b))
