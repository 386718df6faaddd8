"""16-bit integers that hold the bits of bfloat16, as written by tools without a bfloat16 type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.comparison.prepare.stored_precision import ReadAs
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.frameworks import host
from whence.records import Run

_STORED = ("int16", "uint16")
_SAMPLE = 1 << 14
_FEWEST = 64  # numbers that are not zero, of which a distribution can be told
_BINADES, _WITHIN = 16, 0.95  # that real numbers share, but for a few
_MAGNITUDES = (87, 167)  # exponents of 2^-40 and 2^40, between which the largest of them lie
_LEAST_OF_A_SIGN = 0.05
_MEDIANS_APART = 3
_MANTISSAS, _ODD = 32, 0.25  # in use, of 128; of them that use the last bit
_ZEROS = 0.1  # of what an activation cut off at zero made


class _Place(NamedTuple):
    """The key of a tensor that is the same in both runs."""

    rank: int
    step: int
    scope: str
    occurrence: int
    slot: str


class BitsRun(ReadAs):
    """A run of which some records are read as the bfloat16 numbers whose bits they hold."""

    def __init__(self, base: Run, numbers: frozenset[int]) -> None:
        super().__init__(base, dict.fromkeys(numbers, "bfloat16"), _bits_as)
        records = list(self.records)
        for number in numbers:
            widened = np.ascontiguousarray(self.array(number), np.float32)
            statistics, _ = host.statistics(widened.reshape(-1).view(np.uint8), "float32")
            records[number] = msgspec.structs.replace(records[number], statistics=statistics)
        self.records = records


def _bits_as(array: Array, kind: str) -> Array:
    """The numbers of a dtype whose bits an array holds."""
    numbers: Array = np.ascontiguousarray(array).view(dtypes.named(kind).numpy)
    return numbers


def with_numbers(reference: Run, target: Run) -> tuple[Run, Run, tuple[str, ...]]:
    """(reference, target, sentences): both runs, with 16-bit integers that hold the bits of
    bfloat16 read as bfloat16.

    A tensor is read this way if it looks like bfloat16 and its namesake in the other run does too,
    or is floating-point. If the namesake holds other integers, both tensors stay integers, and a
    sentence says how to have them compared as bfloat16.
    """
    if not any(record.dtype in _STORED for run in (reference, target) for record in run.records):
        return reference, target, ()
    sides = [_Side(run) for run in (reference, target)]
    if not any(side.looking for side in sides):
        return reference, target, ()
    read: list[frozenset[int]] = []
    sentences: list[str] = []
    for side, other in (sides, sides[::-1]):
        numbers = frozenset(number for number in side.looking if side.is_met(number, other))
        read.append(numbers)
        sentences += side.sentences(numbers, other)
    first, second = (
        BitsRun(run, numbers) if numbers else run
        for run, numbers in zip((reference, target), read, strict=True)
    )
    return first, second, tuple(sentences)


class _Side:
    """One run. looking: records that look like bits of bfloat16."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._places: dict[int, list[_Place]] = defaultdict(list)
        self._records: dict[_Place, int] = {}
        for call in run.calls:
            for ref in call.refs:
                place = _Place(call.rank, call.step, call.scope, call.occurrence, ref.slot)
                self._places[ref.record].append(place)
                self._records[place] = ref.record
        self.looking = self._looking()

    def _looking(self) -> frozenset[int]:
        sure, cut_off, sized, many = set[int](), set[int](), set[int](), 0
        for number, array in self._candidates():
            many += 1
            if is_signed_numbers(array):
                sure.add(number)
            elif is_cut_off_numbers(array):
                cut_off.add(number)
            elif _are_of_usual_size(_sampled(array)):
                sized.add(number)
        # Without a signed tensor in the run, zeros and values of one sign may be padded indices.
        if 2 * len(sure) > many:  # what is too small to look like something is what the others are
            cut_off |= sized
        return frozenset(sure | cut_off if sure else ())

    def _candidates(self) -> Iterator[tuple[int, Array]]:
        for number in self._places:
            if self.run.records[number].dtype in _STORED:
                try:
                    yield number, self.run.array(number)
                except ElementsMissing:
                    continue

    def is_met(self, number: int, other: _Side) -> bool:
        """Whether the other run's tensor of the same name looks like bfloat16 too or is
        floating-point. Without a namesake, tensors of the same shape count.
        """
        records = other.run.records
        named = {other._records[p] for p in self._places[number] if p in other._records}
        shape = self.run.records[number].shape
        partners = named or {r for r in other._places if records[r].shape == shape}
        return any(
            partner in other.looking or dtypes.is_floating(records[partner].dtype)
            for partner in partners
        )

    def sentences(self, read: frozenset[int], other: _Side) -> Iterator[str]:
        """Sentences about tensors that were read as bfloat16, and about those that look like it but
        stay integers.
        """
        if read:
            yield (
                f"{self.run.path}: {_tensors(read)} stored as integers of 16 bits hold bits of "
                "bfloat16, and are compared so"
            )
        left = self.looking - read
        if left:
            names = sorted(self._places[number][0].scope for number in left)
            yield (
                f"{self.run.path}: what looks like bits of bfloat16 in {_tensors(left)} "
                f"({names[0]} first) is compared as integers, since {other.run.path} holds other "
                "integers there; to compare them as bfloat16, save both sides so (numpy: "
                "x.view(ml_dtypes.bfloat16), torch: x.view(torch.bfloat16))"
            )


def _tensors(numbers: frozenset[int]) -> str:
    return f"{len(numbers)} {'tensor' if len(numbers) == 1 else 'tensors'}"


def _sampled(array: Array) -> npt.NDArray[np.uint16]:
    flat = array.reshape(-1)
    return np.ascontiguousarray(flat[:: max(flat.size // _SAMPLE, 1)]).view(np.uint16)


def is_signed_numbers(array: Array) -> bool:
    """Whether 16-bit integers, read as bfloat16, look like real numbers of both signs.

    Real numbers of either sign lie in the same few binades and use their last bits. Integers do
    not: small ones of both signs have the lowest and the highest exponents, indices are spread over
    all exponents or have one sign, and codes and sound samples lie around zero.
    """
    bits = _sampled(array)
    exponents = (bits >> 7) & 0xFF
    used, negative = exponents > 0, bits >> 15 == 1
    signs = exponents[used & ~negative], exponents[used & negative]
    if min(map(len, signs)) < _LEAST_OF_A_SIGN * np.count_nonzero(used):
        return False
    if not all(map(len, signs)) or not _are_spread_as_numbers(bits[used]):
        return False
    return bool(abs(np.median(signs[0]) - np.median(signs[1])) <= _MEDIANS_APART)


def is_cut_off_numbers(array: Array) -> bool:
    """Whether 16-bit integers, read as bfloat16, look like zeros and real numbers of one sign, as
    an activation that cuts off at zero (ReLU) leaves them.
    """
    bits = _sampled(array)
    used = bits & 0x7FFF > 0
    zeros = bits.size - np.count_nonzero(used)
    return bool(zeros >= _ZEROS * bits.size) and _are_spread_as_numbers(bits[used])


def _are_of_usual_size(bits: npt.NDArray[np.uint16]) -> bool:
    exponents = ((bits >> 7) & 0xFF)[bits & 0x7FFF > 0]
    return bool(exponents.size and _MAGNITUDES[0] <= np.median(exponents) <= _MAGNITUDES[1])


def _are_spread_as_numbers(bits: npt.NDArray[np.uint16]) -> bool:
    if bits.size < _FEWEST:
        return False
    exponents = np.sort((bits >> 7) & 0xFF).astype(np.int64)
    finite = exponents[exponents < 0xFF]
    if finite.size < _WITHIN * exponents.size:
        return False
    top = int(np.quantile(finite, _WITHIN))
    within = np.count_nonzero((finite > top - _BINADES) & (finite <= top + _BINADES // 2))
    mantissas = bits & 0x7F
    return bool(
        _MAGNITUDES[0] <= top <= _MAGNITUDES[1]
        and within >= _WITHIN * exponents.size
        and np.unique(mantissas).size >= _MANTISSAS
        and np.count_nonzero(mantissas & 1) >= _ODD * bits.size
    )
