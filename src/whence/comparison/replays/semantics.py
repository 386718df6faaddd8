"""Describes one replay: the recorded program, or the program with the declared changes; and its
output.
"""

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

_MOST_TIES = 3  # in one row; more are met where codes are computed in 16 bits, and not all tried

Quantise = Callable[[Array, tuple[int, ...]], tuple[Array, int]]


@dataclass(frozen=True, slots=True)
class Semantics:
    """What one replay does otherwise than the reference's program says. name: "" for nothing but
    the stand-ins of `params`.

    params: by slot, values used instead of the reference's, float64. quantise: (x, flips) -> the
    activation's values with these ties rounded the other way, and how many ties a row has. program:
    the program to run. size_only: rounding may happen elsewhere, so the pattern of the error says
    nothing. keep: (slot, shape) -> elements that count, None for all. tolerance: (slot) -> the
    entry that bounds the error there.
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
        """The outputs of `run` on these inputs, the first floating one quantised if activations
        are.

        A code that lies on a tie may be rounded either way, and one step of it moves a whole row of
        the output: of the possible rows, the one nearest to the target's counts.
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
        """The stand-in of a parameter in the dtype of this replay. recorded: the dtype the
        reference has it in.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self.params[slot].astype(
                dtypes.named(recorded if working == "recorded" else working).numpy
            )

    def shown(self, slot: str, shape: tuple[int, ...]) -> Callable[[Array], Array]:
        """Takes a tensor of this slot and shape, and gives it with zeros where nothing counts."""
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
    """The error in units of what is declared: relative 2-norm, or the worst |y - r| / (atol + rtol
    |r|).
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
    """Every choice of ties to round the other way, but none."""
    return (c for n in range(1, ties + 1) for c in itertools.combinations(range(ties), n))


def _nearer(first: Array, second: Array, produced: Array) -> Array:
    """Row by row (vectors along the last axis), whichever is nearer to the target's output."""
    if first.shape != produced.shape or first.ndim == 0 or not dtypes.of(first).is_floating:
        return first
    y = produced.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (np.square(x.astype(np.float64) - y).sum(-1, keepdims=True) for x in (first, second))
        return np.where(b < a, second, first)


@dataclass(slots=True)
class ReplayResult:
    """What a replay of one call found. local: figures by output slot. refused: reasons by output
    slot ("" for the whole call).

    inside: how many calls without a partner ran as part of it; ran: which. broken: the target
    agrees with the reference's program and what the reference recorded does not, by so many times
    what rounding explains. assumed: output slot -> an input of it that the target does not show,
    where it shows none of them. misrouted: of calls inside that are given other rows than the
    reference's operators give them, what these are and which choice that rounding does not explain
    gives them.
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
        """The first reason why something could not be replayed, "" when all was."""
        return next(iter(self.refused.values()), "")


@dataclass(frozen=True, slots=True)
class FaultCause:
    """Why an operator is at fault: kernel, semantic or "" (not known), in words, which operator
    inside it, and where it is called. reason: what the target's code does otherwise, in words that
    hold of every call with the same change; "" where only its results tell.
    """

    cause: str = CauseKind.UNKNOWN
    words: str = ""
    operator: str = ""
    source: str = ""
    reason: str = ""
