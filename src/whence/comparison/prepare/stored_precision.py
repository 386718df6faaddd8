"""Infers the dtype that recorded arrays were computed in: float64 text that holds float32 numbers
is judged as float32.

Lists, text and numpy return float64 for numbers computed in float32, and float32 for bfloat16; some
users store bfloat16 in float16. Judged by their stored dtype, such tensors would have to be more
exact than the program that computed them can be.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Dumped, Over, Run
from whence.records.marks import Mark, has_mark, mark_value

# elements sampled to find the bits in use; the candidate dtype is then checked on all elements
_SAMPLE = 1 << 12
_HEAD = 64  # first elements, which mostly suffice to recognise float32
# bits of the significand; the coarsest first
_SIGNIFICANT = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
_LEAST = 8  # fewest elements below the top binade from which a dtype is inferred
_SHARE = 0.25  # least share of them that uses the last bit; rounding to nearest leaves half
_MANY = 16  # significant bits that constants and steps of a grid do not exceed


class ReadAs(Over):
    """A run in which some records have another dtype. kinds: their dtypes, by record; read: brings
    the elements of such a record to its dtype.
    """

    def __init__(
        self, base: Run, kinds: Mapping[int, str], read: Callable[[Array, str], Array]
    ) -> None:
        records = list(base.records)
        for number, kind in kinds.items():
            old = records[number]
            elements = (
                Dumped(old.file, old.dtype) if isinstance(old.elements, Dumped) else old.elements
            )
            records[number] = msgspec.structs.replace(
                old, dtype=kind, hash="", sketch=None, elements=elements
            )
        super().__init__(base, None, records)
        self._kinds, self._read = kinds, read

    def array(self, record: int) -> Array:
        """Elements of a record. Raises ElementsMissing."""
        array, kind = super().array(record), self._kinds.get(record)
        if kind is None:
            return array
        view = self._read(array, kind).view()
        view.flags.writeable = False
        return view

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        return (self.base, record) if record not in self._kinds else None


class StoredPrecisionRun(ReadAs):
    """A run in which some records have the dtype that they were computed in; the values of their
    elements are unchanged. sentences: which records.
    """

    def __init__(self, base: Run, kinds: dict[int, str]) -> None:
        pairs = Counter((base.records[number].dtype, kind) for number, kind in kinds.items())
        self.sentences = [
            f"{base.path}: {count} {'tensor' if count == 1 else 'tensors'} stored in {stored} "
            f"hold numbers of {kind}, and are judged so"
            for (stored, kind), count in pairs.items()
        ]
        super().__init__(base, kinds, _cast)


def as_computed(run: Run) -> Run:
    """The run, in which labels and tensors that a dump stores wider have the dtype they were
    computed in; the run itself if nothing changes.

    If an engine states the dtype in which it executed a call, outputs have that dtype if it holds
    them exactly. Otherwise a tensor gets the narrowest of bfloat16, float16 and float32 that holds
    all elements exactly and whose bits they use (`held`). A tensor that does not tell (few
    elements, zeros, powers of two) gets the widest dtype found for other tensors of its stored
    dtype, if that holds it exactly. Whole numbers stay as they are.
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
    """The 16-bit dtype in which an engine states that it executed a call; "" for any other dtype or
    no statement.
    """
    kind = mark_value(call, Mark.EXECUTED_IN)
    return kind if kind in _SIGNIFICANT and dtypes.is_half(kind) else ""


def _executed_kinds(run: Run) -> dict[int, str]:
    """By record, the dtype that a call was executed in, of outputs that are stored wider, if it
    holds them exactly.
    """
    kinds: dict[int, str] = {}
    for call in run.calls:
        kind = mark_value(call, Mark.EXECUTED_IN)
        if kind not in _SIGNIFICANT:
            continue
        for ref in call.slots("output"):
            stored = run.records[ref.record].dtype
            if stored not in ("float32", "float64") or _SIGNIFICANT[stored] <= _SIGNIFICANT[kind]:
                continue
            try:
                if _fits(run.array(ref.record), kind):
                    kinds[ref.record] = kind
            except ElementsMissing:
                continue
    return kinds


def _weights_of_16_bits(run: Run) -> dict[int, str]:
    """By record, the 16-bit dtype of float32 parameters of a graph whose weights were 16-bit.

    A runtime without 16-bit kernels widens weights when it loads the file, and some tools round
    weights and store them in float32 again. More than half of the parameters that tell must hold
    16-bit numbers; a single rounded weight is a difference.
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
    """The dtype that an array's elements were rounded to: its own if no narrower dtype holds all of
    them; None if the elements do not tell.

    array: float64, float32 or float16. The elements must use the last bits of a narrower dtype:
    half of the numbers rounded to it need its last bit, at every magnitude. Steps of a grid
    (pixels / 256) need it at the largest magnitude only and prove nothing; nor do whole numbers.
    For float32 one number that is not whole and needs more than 16 bits is enough: a random float64
    fits into float32 with probability 2^-29.
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
    """Whether some of these float32 values fit into no 16-bit dtype: a normal number that is not
    whole and needs more than eleven significant bits.
    """
    low = np.ascontiguousarray(array).view(np.uint32) & 0x1FFF
    fine = array[(low != 0) & np.isfinite(array) & (np.abs(array) >= np.finfo(np.float32).tiny)]
    return fine.size > 0 and not _is_whole(fine)


def _bits(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(significant bits that each value needs, exponent of each). values: finite, not zero."""
    fraction, exponent = np.frexp(values)
    whole = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    _, last = np.frexp((whole & -whole).astype(np.float64))
    return 54 - last.astype(np.int64), exponent.astype(np.int64)


def _is_whole(array: Array) -> bool:
    """Whether all finite elements are whole numbers."""
    finite = array[np.isfinite(array)]
    return bool((finite == np.rint(finite)).all())


def _fits(array: Array, kind: str) -> bool:
    """Whether a dtype holds every element exactly, NaN and infinities included."""
    return bool(np.array_equal(_cast(array, kind).astype(array.dtype), array, equal_nan=True))


def _cast(array: Array, kind: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return array.astype(dtypes.named(kind).numpy)
