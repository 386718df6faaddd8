"""Infers the dtype that recorded arrays were computed in (float64 text that holds float32 numbers
is judged as float32).

Lists, text and numpy hand out float64 for what was computed in float32, and float32 for bfloat16;
people store bfloat16 in float16.
Judged as what they are stored in, such tensors would have to be more exact than the program that
made them can be.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import msgspec
import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Dumped, Over, Run
from whence.records.marks import Mark, has_mark, mark_value

# elements that show how many bits are in use; that the rest holds too is looked up in all
_SAMPLE = 1 << 12
_HEAD = 64  # the first elements, which mostly tell
# bits of the significand; the coarsest first
_SIGNIFICANT = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
_LEAST = 8  # elements below the top binade that tell
_SHARE = 0.25  # of them that use the last bit; rounding to nearest leaves half
_MANY = 16  # significant bits that constants and steps of a grid do without


class StoredPrecisionRun(Over):
    """A run of which some records are given in the dtype they were computed in; elements are the
    same numbers. sentences: which.
    """

    def __init__(self, base: Run, kinds: dict[int, str]) -> None:
        records = list(base.records)
        pairs = Counter((records[number].dtype, kind) for number, kind in kinds.items())
        self.sentences = [
            f"{base.path}: {count} {'tensor' if count == 1 else 'tensors'} stored in {stored} "
            f"hold numbers of {kind}, and are judged so"
            for (stored, kind), count in pairs.items()
        ]
        for number, kind in kinds.items():
            old = records[number]
            elements = (
                Dumped(old.file, old.dtype) if isinstance(old.elements, Dumped) else old.elements
            )
            records[number] = msgspec.structs.replace(
                old, dtype=kind, hash="", sketch=None, elements=elements
            )
        super().__init__(base, None, records)
        self._kinds = kinds

    def array(self, record: int) -> Array:
        """Elements of a record. Raises ElementsMissing."""
        array, kind = super().array(record), self._kinds.get(record)
        if kind is None:
            return array
        view: Array = _cast(array, kind).view()
        view.flags.writeable = False
        return view

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        return (self.base, record) if record not in self._kinds else None


def as_computed(run: Run) -> Run:
    """The run with its labels, and what a dump says no dtype of, in the dtype they were computed
    in; the run itself where nothing changes.

    Where an engine says in what a call was executed, its outputs are of that dtype if they hold
    nothing else. Otherwise it is the narrowest of bfloat16, float16 and float32 that holds all
    elements exactly and that they use up (`held`). Tensors that do not tell (few elements, zeros,
    powers of two) take what the other labels stored in their dtype were computed in, if it holds
    them; whole numbers stay as they are.
    """
    labels = dict.fromkeys(
        r.record
        for c in run.calls
        if c.kind == "label" or has_mark(c, Mark.STORED_WIDER)
        for r in c.refs
    )
    kinds = _executed_kinds(run) | _weights_of_16_bits(run)
    open_: list[int] = []
    for number in labels:
        stored = run.records[number].dtype
        if stored not in _SIGNIFICANT or stored == "bfloat16":
            continue
        try:
            kind = held(run.array(number))
        except ElementsMissing:
            continue
        if kind is None:
            open_.append(number)
        else:
            kinds[number] = kind
    widest: dict[str, str] = {}
    for number, kind in kinds.items():
        if number not in labels:
            continue
        stored = run.records[number].dtype
        widest[stored] = max(widest.get(stored, kind), kind, key=lambda k: dtypes.named(k).bits)
    for number in open_:
        kind, array = widest.get(run.records[number].dtype, ""), run.array(number)
        if kind in _SIGNIFICANT and not _is_whole(array) and _fits(array, kind):
            kinds[number] = kind
    kinds = {number: kind for number, kind in kinds.items() if kind != run.records[number].dtype}
    return StoredPrecisionRun(run, kinds) if kinds else run


def executed_in(call: Call) -> str:
    """The dtype of 16 bits that an engine says it computed a call in; "" where it says another one
    or nothing.
    """
    kind = mark_value(call, Mark.EXECUTED_IN)
    return kind if kind in _SIGNIFICANT and dtypes.is_half(kind) else ""


def _executed_kinds(run: Run) -> dict[int, str]:
    """Records that a call executed in 16 bits made and that hold such numbers, with their dtype."""
    kinds: dict[int, str] = {}
    for call in run.calls:
        kind = executed_in(call)
        if not kind:
            continue
        for ref in call.slots("output"):
            if run.records[ref.record].dtype != "float32":
                continue
            try:
                if _fits(run.array(ref.record), kind):
                    kinds[ref.record] = kind
            except ElementsMissing:
                continue
    return kinds


def _weights_of_16_bits(run: Run) -> dict[int, str]:
    """The parameters of a graph whose file has its weights in 16 bits, with that dtype.

    A runtime without kernels for 16 bits widens them when it loads the file, so that its nodes hold
    float32; and weights are rounded and stored in float32 again. Most of them have to hold such
    numbers: a single rounded weight is a difference.
    """
    records = {
        ref.record
        for call in run.calls
        if has_mark(call, Mark.OPSET)
        for ref in call.slots("param")
        if run.records[ref.record].dtype == "float32"
    }
    arrays: dict[int, Array] = {}
    for number in records:
        with contextlib.suppress(ElementsMissing):
            arrays[number] = run.array(number)
    told = Counter(kind for array in arrays.values() if (kind := held(array)) is not None)
    ((kind, count),) = told.most_common(1) or [("", 0)]
    if not dtypes.is_half(kind) or 2 * count <= told.total():
        return {}
    return {number: kind for number, array in arrays.items() if _fits(array, kind)}


def held(array: Array) -> str | None:
    """The dtype that an array's elements were rounded to: its own where no narrower one holds all
    of them; None where they do not tell.

    array: float64, float32 or float16. A narrower dtype must be in use: of numbers that were
    rounded to it half need its last bit, at every magnitude. Steps of a grid (pixels / 256) need it
    at the largest only, and prove nothing; nor do whole numbers. For float32 one number that is
    not whole and needs more than 16 bits is enough: chance makes such a float64 once in 2^29.
    """
    dtype = dtypes.of(array).name
    flat = array.reshape(-1)
    if dtype == "float32" and _needs_all(flat[:_HEAD]):
        return dtype
    sample = flat[:: max(flat.size // _SAMPLE, 1)]
    sample = sample[np.isfinite(sample) & (sample != 0)].astype(np.float64)
    if not sample.size or _is_whole(sample):
        return None
    needed, binade = _bits(sample)
    most = needed.max()
    open_ = False
    for kind, bits in _SIGNIFICANT.items():
        if bits >= _SIGNIFICANT[dtype] or most > bits or not _fits(flat, kind):
            continue
        open_ = True
        below = needed[binade < binade.max()]
        full = np.count_nonzero(below == bits)
        if (below.size >= _LEAST and full >= _SHARE * below.size) or (
            bits == 24 and (needed > _MANY).any()
        ):
            return kind
    return None if open_ else dtype


def _needs_all(array: Array) -> bool:
    """Do some of these float32 show that no 16 bits hold them all? A normal number that is not
    whole and has a bit behind the eleventh does.
    """
    low = np.ascontiguousarray(array).view(np.uint32) & 0x1FFF
    fine = array[(low != 0) & np.isfinite(array) & (np.abs(array) >= np.finfo(np.float32).tiny)]
    return fine.size > 0 and not _is_whole(fine)


def _bits(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(significant bits that each needs, its exponent). values: finite, not zero."""
    fraction, exponent = np.frexp(values)
    whole = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    _, last = np.frexp((whole & -whole).astype(np.float64))
    return 54 - last.astype(np.int64), exponent.astype(np.int64)


def _is_whole(array: Array) -> bool:
    """Are these whole numbers, NaN and infinities aside?"""
    finite = array[np.isfinite(array)]
    return bool((finite == np.rint(finite)).all())


def _fits(array: Array, kind: str) -> bool:
    """Does a dtype hold every element exactly? NaN and infinities too."""
    return bool(np.array_equal(_cast(array, kind).astype(array.dtype), array, equal_nan=True))


def _cast(array: Array, kind: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return array.astype(dtypes.named(kind).numpy)
