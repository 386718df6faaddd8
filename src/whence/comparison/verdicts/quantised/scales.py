"""Finds which recorded tensor is the scale of which codes: by name, or as another output of the
same call.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from whence import dtypes, judge
from whence.comparison.paired_runs import PairedRuns
from whence.records.slots import is_written
from whence.results import SlotPair

_SCALE = re.compile(r"(.*?)[._/-]*(?:scales?(?:_inv)?|inv_scales?|absmax)", re.IGNORECASE)
_REST = re.compile(r"[._/-]?\w*")


class Scales:
    """Codes that were recorded together with their scales.

    of: pair of records of codes -> pair of records of their scales. codes: the inverse.
    """

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        pairs = [*self._within_calls(), *self._by_name()]
        self.of = {_key(codes): scales for codes, scales in pairs}
        self.codes = {_key(scales): codes for codes, scales in pairs}

    def _within_calls(self) -> Iterator[tuple[SlotPair, SlotPair]]:
        for index, slots in enumerate(self._paired.slots):
            if self._paired.pair(index).call.kind == "label":
                continue
            written = [slot for slot in slots.values() if is_written(slot.reference_slot)]
            codes = [slot for slot in written if self._are_codes(slot)]
            scales = [slot for slot in written if self._may_scale(slot)]
            if len(codes) == len(scales) == 1:
                yield codes[0], scales[0]

    def _by_name(self) -> Iterator[tuple[SlotPair, SlotPair]]:
        """For labels: `x_scale` belongs to `x`, `x_q` or `x.codes`."""
        named: dict[tuple[int, int, str], list[tuple[str, SlotPair]]] = defaultdict(list)
        for index, slots in enumerate(self._paired.slots):
            call = self._paired.pair(index).call
            if call.kind == "label":
                place = call.rank, call.step, call.root
                named[place] += [(call.scope, slot) for slot in slots.values()]
        for labels in named.values():
            stems = {
                match[1]: slot
                for name, slot in labels
                if (match := _SCALE.fullmatch(name)) and self._may_scale(slot)
            }
            for name, slot in labels if stems else ():
                ends = range(len(name), -1, -1) if self._are_codes(slot) else ()
                fitting = (name[:n] for n in ends if _REST.fullmatch(name, n))
                stem = next((stem for stem in fitting if stem in stems), None)
                if stem is not None:
                    yield slot, stems[stem]

    def _are_codes(self, slot: SlotPair) -> bool:
        return judge.may_be_codes(self._dtype(slot))

    def _may_scale(self, slot: SlotPair) -> bool:
        return dtypes.is_floating(self._dtype(slot)) and not self._are_codes(slot)

    def _dtype(self, slot: SlotPair) -> str:
        return self._paired.reference.records[slot.reference_record].dtype


def _key(slot: SlotPair) -> tuple[int, int]:
    return slot.reference_record, slot.target_record
