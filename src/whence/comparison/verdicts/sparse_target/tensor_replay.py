"""The reference run through from its roots: wherever a tensor comes up that the target shows, it is
compared with the target's, which then goes on in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence import judge
from whence.comparison.replays.call_tree import TreeWalk
from whence.comparison.replays.replayer import Replayer
from whence.comparison.replays.self_check import Threads
from whence.comparison.verdicts.sparse_target.shown_tensors import ShownTensors
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.judge import block_quantisation
from whence.judge.limits import CODES_EXPLAINED, CODES_MOSTLY
from whence.records import Call
from whence.results import CauseKind, Confidence, Verdict, VerdictKind

_REPLICAS = 3
_NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class CoarseActivations:
    """How far activations of fewer bits explain a difference: errors by row, root mean square,
    without them (`size`) and with them (`remaining`).

    gain: by how much they fall. expected: what such activations make by themselves. is_sure: that
    is what the target did.
    """

    words: str
    gain: float
    size: float
    remaining: float
    expected: float
    is_sure: bool = False

    def verdict(self, old: Verdict) -> Verdict:
        run = (
            f"{self.words} ahead of matrix products: run so, rel_l2 by row falls from "
            f"{self.size:.2g} to {self.remaining:.2g}"
        )
        sentence = (
            f"{old.sentence}; as from {run}"
            if self.is_sure
            else f"of the size that comes from {run}; codes diverge over many products, or there "
            "is another fault"
        )
        return old.replace(
            verdict=VerdictKind.PRECISION if self.is_sure else VerdictKind.UNDETERMINED,
            confidence=Confidence.NONE,
            cause=CauseKind.UNKNOWN,
            sentence=sentence,
        )


class TensorReplay:
    """Figures of shown tensors: each against what is right for the tensors shown before it.

    wide: by record, the exact values of tensors that are beyond rounding.
    """

    def __init__(self, tensors: ShownTensors, replayer: Replayer) -> None:
        self.tensors, self._replayer = tensors, replayer
        self.wide: dict[int, Array] = {}

    def figures(self) -> tuple[dict[int, judge.ReplayError], str]:
        """Figures of every tensor that came up, by record, and why others did not."""
        figures: dict[int, judge.ReplayError] = {}
        why = ""
        exact = self._walk("float64", None)
        replicas = [self._walk("recorded", seed) for seed in (None, *range(_REPLICAS))]
        with Threads(1):
            for root in self.tensors.roots():
                arrays = exact.through(root)
                working = [walk.through(root) for walk in replicas]
                why = why or exact.why
                for record, wide in arrays.items():
                    # What an earlier root made comes up again where a later one is given it, as the
                    # target's.
                    if record in figures or not all(record in w for w in working):
                        continue
                    with contextlib.suppress(ElementsMissing):
                        error = self._error(record, wide, [w[record] for w in working])
                        if error is not None:
                            figures[record] = error
                            if error.score > 1:
                                self.wide[record] = wide
        return figures, why

    def _error(self, record: int, wide: Array, copies: Sequence[Array]) -> judge.ReplayError | None:
        target = self.tensors.array(record)
        if wide.shape != target.shape:
            return None
        error = judge.whole(target, wide, copies)
        reference = self.tensors.paired.reference.array(record).astype(np.float64)
        size = float(np.linalg.norm(reference))
        difference = float(np.linalg.norm(wide.astype(np.float64) - reference))
        inherited = difference / size if size and np.isfinite(difference) else None
        return dataclasses.replace(error, inherited_rel=inherited)

    def coarse(self, beyond: Set[int]) -> dict[int, CoarseActivations]:
        """Of tensors that are further off than rounding explains, those that activations of fewer
        bits explain.

        A kernel that rounds what it multiplies to 8 bits is run: where that comes several times
        closer to the target than exact arithmetic does, it is what the target did. What remains is
        bounded by that; a smaller fault cannot be told from it.
        """
        if not beyond:
            return {}
        forms = [
            self._in_blocks(beyond, words, width)
            for words, width in block_quantisation.BLOCKS.items()
        ]
        best = max(
            forms, key=lambda by_record: sum(c.gain > CODES_MOSTLY for c in by_record.values())
        )
        # What holds for nearly all of them is what the kernel does, and needs less evidence in
        # each.
        agreed = sum(c.gain > CODES_MOSTLY for c in best.values()) >= _NEARLY_ALL * len(beyond)
        enough = CODES_EXPLAINED / 2 if agreed else CODES_EXPLAINED
        return {
            record: dataclasses.replace(c, is_sure=c.gain > enough)
            for record, c in best.items()
            if c.gain > CODES_MOSTLY or (agreed and c.size < 2 * c.expected)
        }

    def _in_blocks(self, beyond: Set[int], words: str, width: int) -> dict[int, CoarseActivations]:
        by_row, typical = block_quantisation.by_row, block_quantisation.typical
        coarse: dict[int, CoarseActivations] = {}
        walk = self._walk(
            "float64", None, functools.partial(block_quantisation.in_blocks, width=width)
        )
        with Threads(1):
            for root in self.tensors.roots():
                arrays = walk.through(root)
                for record in (beyond & arrays.keys()) - coarse.keys():
                    target, exact, rounded = (
                        self.tensors.array(record),
                        self.wide[record],
                        arrays[record],
                    )
                    plain, coded = by_row(target, exact), by_row(target, rounded)
                    coarse[record] = CoarseActivations(
                        words,
                        block_quantisation.gain(plain, coded),
                        typical(plain),
                        typical(coded),
                        typical(by_row(rounded, exact)),
                    )
        return coarse

    def _walk(
        self, working: str, seed: int | None, coarser: Callable[[Array], Array] | None = None
    ) -> TreeWalk:
        """The reference, ready to be run through. seed: of noise on every call's outputs; coarser:
        done to what matrix products take.
        """
        walk = TreeWalk(
            self._replayer.reference,
            working,
            self._parameters,
            lambda record: self.tensors.array(record) if record in self.tensors.slots else None,
            noise=np.random.default_rng(seed) if seed is not None else None,
            coarser=coarser,
        )
        walk.inner = {
            (call, operation): record
            for call, tensors in self.tensors.inner.items()
            for record, operation in tensors
        }
        return walk

    def _parameters(self, loaded: Any, call: Call, working: str) -> Any:
        source = self._replayer.reference
        records = source.records(call, loaded.program.params)
        key = (
            loaded.program.id,
            "tapped",
            tuple(records.get(s) for s in loaded.program.params),
            working,
        )
        return self._replayer.sides.parameters.hold(
            key, lambda: loaded.hold(source.arrays(records)[0], working=working)
        )
