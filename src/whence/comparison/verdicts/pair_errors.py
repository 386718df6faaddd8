"""How far apart each pair of tensors is, as far as rounding counts: masks, codes and run-to-run
spread are taken into account.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from whence import dtypes, judge, metrics
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.declared.differences import DeclaredDifferences
from whence.comparison.verdicts.quantised.scales import Scales
from whence.comparison.verdicts.repeated_runs import RepeatedRuns
from whence.judge.policy import Policy
from whence.records import Call
from whence.results import Measured, SlotPair

_CANCELLED, _OF_ALL = 0.3, 1e-3
"""Shares of a module's largest gradient and of the largest gradient of all. A smaller gradient may
be the remainder of larger terms that cancel.
"""


class PairErrors:
    """The errors of all pairs of tensors of two runs. declared: the declared differences, which may
    restrict the elements that are compared.
    """

    def __init__(self, paired: PairedRuns, policy: Policy | None, repeated: RepeatedRuns) -> None:
        self.paired, self._repeated = paired, repeated
        self.declared = DeclaredDifferences(policy, paired.reference, paired.target, paired.plan)
        self._errors: dict[tuple[int, int], judge.PairError] = {}
        self._scales = Scales(paired)

    def of(self, slot: SlotPair) -> judge.PairError:
        """The error of a pair of tensors, with its unit roundoff and statistics; cached."""
        key = slot.reference_record, slot.target_record
        error = self._errors.get(key)
        if error is None:
            error = self._errors[key] = self._worked_out(slot)
        return error

    def _worked_out(self, slot: SlotPair) -> judge.PairError:
        a, b = self.paired.records(slot)
        u = judge.roundoff(a, b)
        unmasked = self.declared.masked.error(slot, metrics.measure, u)
        if unmasked is not None:
            return unmasked
        measured = self.paired.measured[slot.reference_record, slot.target_record]
        error = judge.error_of(measured, a, b, u)
        if error.value and a.dtype == b.dtype:
            error = self._of_codes(slot, error, measured)
        # statistics of the few elements that are shown say little of the whole tensor
        if self.paired.partly(slot):
            error = dataclasses.replace(error, exact=False, drift=None)
        if error.value is None and error.u and measured.tier != "none":
            error = self._between_sentinels(slot, error)
        if largest := self._gradients.get(slot.reference_record, 0.0):
            error = self.of_terms(slot, error, largest, self._gradients[-1])
        elif error.u and not error.codes and (place := judge.lone_element(measured)) is not None:
            error = dataclasses.replace(error, lone=self._lone(slot, place, measured))
        spread = self._repeated.spread(slot.reference_record, measured)
        return dataclasses.replace(error, spread=spread) if spread else error

    @functools.cached_property
    def _gradients(self) -> dict[int, float]:
        """The largest norm of a gradient of its module by record, and of all modules by -1, where a
        dump has the gradients of the parameters of a module as one call.
        """
        largest = {-1: 0.0}
        for call in self.paired.calls:
            if call.op_type == "parameters_grad" and call.id in self.paired.pair_of:
                slots = self.paired.slots_of(call.id).values()
                norm = max(map(self.norm, slots), default=0.0)
                largest |= dict.fromkeys((s.reference_record for s in slots), norm)
                largest[-1] = max(largest[-1], norm)
        return largest

    def of_terms(
        self, slot: SlotPair, error: judge.PairError, largest: float, of_all: float
    ) -> judge.PairError:
        """The error of a gradient; that of a small one, whose terms cancel, in units of these
        terms. largest, of_all: norms of the largest gradient of its module and of all modules.
        """
        if not error.value or not largest or not math.isfinite(error.value):
            return error
        terms = max(_CANCELLED * largest, _OF_ALL * of_all)
        value = error.value * min(1.0, self.norm(slot) / terms)
        if value > judge.LIMITS.within(error.u):
            return error
        return dataclasses.replace(error, value=value, drift=None, lone=0.0)

    def norm(self, slot: SlotPair) -> float:
        """The 2-norm of the reference's tensor, 0 where it is not known."""
        measured = self.paired.measured[slot.reference_record, slot.target_record]
        norm = measured.values.get("reference_norm")
        if norm is None and (arrays := self.paired.arrays(slot)) is not None:
            norm = float(np.linalg.norm(arrays[0].astype(np.float64).ravel()))
        return norm if norm is not None and math.isfinite(norm) else 0.0

    def _of_codes(
        self, slot: SlotPair, error: judge.PairError, measured: Measured
    ) -> judge.PairError:
        """The error of a pair that holds quantised codes (in steps) or that goes with scales (of
        codes x scale); `error` itself for any other pair.
        """
        key = slot.reference_record, slot.target_record
        dtype = self.paired.reference.records[slot.reference_record].dtype
        if math.isfinite(error.value or 0.0) and judge.are_codes(dtype, measured):
            error = judge.error_of_codes(dtype, measured) or error
        codes = slot if key in self._scales.of else self._scales.codes.get(key)
        if codes is None:
            return error
        scales = self._scales.of[codes.reference_record, codes.target_record]
        if self.paired.is_equal(scales) or self.paired.is_equal(codes):
            return error
        arrays = self.paired.arrays(codes), self.paired.arrays(scales)
        if arrays[0] is None or arrays[1] is None:
            return error
        scaled = judge.error_of_scaled(arrays[0], arrays[1])
        if scaled is None or (scaled.value or 0.0) >= (error.value or 0.0):
            return error
        return scaled if codes is slot else judge.PairError(scaled.value, u=error.u)

    def roundoff(
        self, slots: Sequence[SlotPair], errors: Sequence[judge.PairError], others: Iterable[float]
    ) -> float:
        """The unit roundoff of the arithmetic that computed these results.

        The values behind quantised codes were computed in the precision of neighbouring tensors
        (`others`: their unit roundoffs). For 8-bit floats without neighbours, bfloat16 is assumed.
        """
        u = max((e.u for e in errors), default=0.0)
        if not any(e.codes for e in errors):
            return u
        seen = [other for other in others if 0 < other <= judge.unit_roundoff("bfloat16")]
        if not seen and any(
            e.codes and dtypes.is_floating(self.paired.records(slot)[0].dtype)
            for slot, e in zip(slots, errors, strict=True)
        ):
            seen = [judge.unit_roundoff("bfloat16")]
        return max([u, *seen])

    def accumulated(self, slot: SlotPair, error: judge.PairError) -> judge.PairError:
        """The error of a result that was computed from codes. int16 and int32 hold sums of codes,
        so their relative error (2-norm) counts, as for real numbers.
        """
        a, b = self.paired.records(slot)
        size = self.paired.measured[slot.reference_record, slot.target_record].values.get("rel_l2")
        if not error.value or size is None or {a.dtype, b.dtype} - {"int16", "int32"}:
            return error
        return judge.PairError(size, codes=True)

    def rounded(
        self, slot: SlotPair, inputs: Iterable[SlotPair], error: judge.PairError
    ) -> judge.PairError:
        """The error of codes; 0 if they differ only for input values at the boundary between two
        codes.
        """
        codes = self.paired.arrays(slot) if error.codes and error.value and not error.lone else None
        if codes is None:
            return error
        for read in inputs:
            record = self.paired.reference.records[read.reference_record]
            arrays = (
                self.paired.arrays(read)
                if record.shape == self.paired.reference.records[slot.reference_record].shape
                else None
            )
            is_equal = self.paired.is_equal(read)
            if (
                arrays is not None
                and is_equal
                and judge.at_boundaries(arrays[0], *codes, judge.unit_roundoff(record.dtype))
            ):
                return dataclasses.replace(error, value=0.0)
        return error

    def below_masks(self, slot: SlotPair, call: Call) -> judge.PairError:
        """The error of a call's input without the elements that masks hide (`judge.below_masks`).
        If elements are missing, the error of a softmax input that may be masked is unknown.
        """
        error = self.of(slot)
        if not error.value or not error.u or not math.isfinite(error.value):
            return error
        arrays = self.paired.arrays(slot)
        if arrays is not None:
            return (
                judge.below_masks(*arrays, error) if arrays[0].shape == arrays[1].shape else error
            )
        masked = "softmax" in call.op_type.lower() and judge.may_be_masked(
            self.paired.reference.records[slot.reference_record]
        )
        return (
            judge.PairError(None, u=error.u, why="a mask hides it from statistics")
            if masked
            else error
        )

    def _between_sentinels(self, slot: SlotPair, unknown: judge.PairError) -> judge.PairError:
        """The error of a mask, whose hidden elements hold a sentinel such as -inf."""
        arrays = self.paired.arrays(slot)
        return judge.between(*arrays, unknown.u) if arrays is not None else unknown

    def _lone(self, slot: SlotPair, place: tuple[int, ...], measured: Measured) -> float:
        """The error of one element, relative to the larger of its value and its tensor's root mean
        square; 0 if the elements were not kept.
        """
        arrays = self.paired.arrays(slot)
        a, b = (complex(x[place]) for x in arrays) if arrays is not None else (0j, 0j)
        size = max(
            abs(a),
            (measured.values.get("reference_norm") or 0.0)
            / np.sqrt(self.paired.reference.records[slot.reference_record].count),
        )
        return float(abs(b - a) / size) if size else 0.0

    def sight(self, slots: Iterable[SlotPair]) -> judge.Sight | None:
        """What the elements of the most different pair show; None if they were not kept."""
        errors = [(self.of(slot), slot) for slot in slots]
        error, slot = max(errors, key=lambda item: item[0].value or 0.0)
        arrays = self.paired.arrays(slot)
        return (
            judge.sight(*arrays, error.u, judge.LIMITS.within(error.u))
            if arrays is not None
            else None
        )
