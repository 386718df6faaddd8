"""Describes one replay (the recorded program, or one with declared changes) and its result."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import dtypes, judge
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.judge.policy import Entry
from whence.records import Call, Program
from whence.results import CauseKind

F64 = npt.NDArray[np.float64]

_MOST_TIES = 3  # most ties of a row that are tried; codes computed in 16 bits may have more

Quantise = Callable[[Array, tuple[int, ...]], tuple[Array, int]]


@dataclass(frozen=True, slots=True)
class Semantics:
    """How one replay deviates from the reference's program. name: "" if nothing but `params`
    differs.

    params: by slot, float64 values used in place of the reference's. quantise: (x, flips) -> (the
    quantised activation with these ties rounded the other way, number of ties in a row). program:
    the program to run instead. size_only: whether only the size of the error counts, since rounding
    may happen elsewhere. keep: (slot, shape) -> the elements that count, None for all. tolerance:
    slot -> the policy's entry that bounds the error there.
    """

    name: str = ""
    params: Mapping[str, Array] = field(default_factory=dict)
    quantise: Quantise | None = None
    program: Program | None = None
    size_only: bool = False
    keep: Callable[[str, tuple[int, ...]], Array | None] | None = None
    tolerance: Callable[[str], Entry | None] | None = None

    def run(
        self,
        run: Callable[[Mapping[str, Array]], dict[str, Array]],
        arrays: Mapping[str, Array],
        working: str,
        produced: Mapping[str, Array],
    ) -> dict[str, Array]:
        """The outputs of `run` on these inputs, with the first floating input quantised if
        `quantise` is set.

        A value on a tie between two codes may be rounded either way, which changes a whole row of
        the output. Of the possible rows, the one nearest to the target's counts.
        """
        if self.quantise is None:
            return run(arrays)
        first = next((s for s, a in arrays.items() if dtypes.of(a).is_floating), None)
        if first is None:
            raise ReplayRefused("it has no floating input whose activations could be quantised")
        kind = _numpy(working, arrays[first])
        values, ties = self.quantise(arrays[first], ())
        results = run({**arrays, first: values.astype(kind)})
        for flips in _subsets(min(ties, _MOST_TIES)):
            flipped = run({**arrays, first: self.quantise(arrays[first], flips)[0].astype(kind)})
            results = {
                slot: _nearer(results[slot], flipped[slot], produced[slot])
                if slot in produced
                else results[slot]
                for slot in results
            }
        return results

    def param(self, slot: str, working: str, recorded: str) -> Array:
        """The stand-in value of a parameter in the dtype of this replay. recorded: the dtype of the
        reference's parameter.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self.params[slot].astype(
                dtypes.named(recorded if working == "recorded" else working).numpy
            )

    def shown(self, slot: str, shape: tuple[int, ...]) -> Callable[[Array], Array]:
        """A function that sets the elements of a tensor that do not count to zero."""
        keep = self.keep(slot, shape) if self.keep is not None else None
        if keep is None:
            return lambda array: array
        return lambda array: (
            np.where(keep, array, array.dtype.type(0)) if array.shape == keep.shape else array
        )

    def measure(
        self,
        slot: str,
        produced: Array,
        wide: Array,
        working: Array,
        *,
        terms: int,
        reference: Array | None,
        reference_wide: Array | None,
        spread: Array | None,
        written_out: bool = False,
        outputs: int = 1,
    ) -> judge.ReplayError:
        """`judge.local`, with masked elements left out and a declared tolerance in the place of the
        noise floor.
        """
        shown = self.shown(slot, produced.shape)
        if self.keep is not None and (reference is None or reference.shape != produced.shape):
            reference = reference_wide = None
        produced, wide, working = shown(produced), shown(wide), shown(working)
        reference = shown(reference) if reference is not None else None
        reference_wide = shown(reference_wide) if reference_wide is not None else None
        local = judge.local(
            produced,
            wide,
            working,
            reduction_length=terms,
            reference=reference,
            reference_wide=reference_wide,
            spread=spread,
            written_out=written_out,
            outputs=outputs,
        )
        entry = self.tolerance(slot) if self.tolerance is not None else None
        if entry is None and self.size_only and math.isfinite(local.score):
            parts = local.parts()
            return dataclasses.replace(local, score=max(parts["rho"], parts["z"]))
        if entry is None:
            return local
        return dataclasses.replace(local, score=_tolerance_score(entry, produced, wide, local))


PLAIN = Semantics()


def _numpy(working: str, like: Array) -> Any:
    return like.dtype if working == "recorded" else dtypes.named(working).numpy


def _tolerance_score(entry: Entry, produced: Array, wide: Array, local: judge.ReplayError) -> float:
    """The error as a multiple of the declared tolerance: the relative 2-norm, or the largest
    |y - r| / (atol + rtol |r|).
    """
    if local.mismatch or local.integer_mismatch:
        return math.inf
    if entry.rel_l2 is not None:
        return (
            local.error_rel / entry.rel_l2
            if entry.rel_l2 > 0
            else (0.0 if local.error_rel == 0 else math.inf)
        )
    y, r = produced.astype(np.float64), wide.astype(np.float64)
    return _worst_share(np.abs(y - r), np.abs(r), entry)


def _worst_share(error: F64, size: F64, entry: Entry) -> float:
    allowed = entry.atol + entry.rtol * size
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / allowed)
    return float(np.nanmax(share, initial=0.0))


def _subsets(ties: int) -> Iterable[tuple[int, ...]]:
    """All non-empty subsets of the ties, to be rounded the other way."""
    return (c for n in range(1, ties + 1) for c in itertools.combinations(range(ties), n))


def _nearer(first: Array, second: Array, produced: Array) -> Array:
    """For each row (along the last axis), the row of the array that is nearer to the target's."""
    if first.shape != produced.shape or first.ndim == 0 or not dtypes.of(first).is_floating:
        return first
    y = produced.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (np.square(x.astype(np.float64) - y).sum(-1, keepdims=True) for x in (first, second))
        return np.where(b < a, second, first)


@dataclass(slots=True)
class ReplayResult:
    """The result of replaying one call. local: figures by output slot. refused: reasons by output
    slot ("" for the whole call).

    inside: number of unpaired calls that ran as part of it; ran: these calls. broken: not 0 if the
    target agrees with the reference's program and the reference's recording does not; then the
    recording's error as a multiple of the limit. assumed: by output slot, an input that the target
    does not show and that was assumed to be right. misrouted: by input slot of a child that gets
    other rows than the reference's operators give it, the difference and the choice that causes it.
    """

    local: dict[str, judge.ReplayError] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    inside: int = 0
    ran: list[Call] = field(default_factory=list)
    broken: float = 0.0
    assumed: dict[str, str] = field(default_factory=dict)
    misrouted: dict[str, str] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The first reason why something could not be replayed, "" if all was replayed."""
        return next(iter(self.refused.values()), "")


@dataclass(frozen=True, slots=True)
class FaultCause:
    """Why a call is at fault. cause: kernel, semantic or "" (not known); words: the cause as text;
    operator: the operator inside it; source: its line. reason: the change of the target's code, in
    words that are the same for every call with this change; "" if only results show it.
    """

    cause: str = CauseKind.UNKNOWN
    words: str = ""
    operator: str = ""
    source: str = ""
    reason: str = ""
