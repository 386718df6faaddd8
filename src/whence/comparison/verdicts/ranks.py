"""What went wrong between ranks, in words: which rank's part a sum lacks, which pieces were
swapped, whose copy differs.

A hypothesis over the ranks' parts is put forward only where it gives what the target has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.align import derived_run, dims
from whence.comparison.replays.self_check import Threads
from whence.comparison.verdicts.call_replays import CallReplays
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, marks
from whence.records.slots import is_param, is_read
from whence.results import CauseKind, Made, SlotPair, Verdict, VerdictKind

F64 = npt.NDArray[np.float64]
# a factor this close to a whole number, or to a fraction of the number of ranks, is meant to be it
_NICE = 0.02


class RankFaults:
    """Explains findings of joined calls."""

    def __init__(self, replays: CallReplays) -> None:
        self._replayer, self.paired = replays.replayer, replays.paired
        self.derived = {m.record: m for m in self.paired.plan.made_target}

    def explained(self, verdicts: dict[tuple[int, int], Verdict]) -> dict[tuple[int, int], Verdict]:
        """The verdicts, with what the ranks did wrong where that can be shown."""
        for key, verdict in verdicts.items():
            if (
                verdict.verdict not in (VerdictKind.INTRODUCED, VerdictKind.PARAM_DIFF)
                or verdict.side != "target"
            ):
                continue
            pair = self.paired.plan.pairs[verdict.pair]
            call, partner = self.paired.calls[pair.reference], self.paired.target.calls[pair.target]
            try:
                words = (
                    self._parameter(verdict)
                    if verdict.verdict == VerdictKind.PARAM_DIFF
                    else self._output(call, verdict)
                )
            except (ElementsMissing, ReplayRefused):
                words = ""
            cause = (
                verdict.cause or CauseKind.SEMANTIC
                if verdict.verdict == VerdictKind.PARAM_DIFF
                else CauseKind.SEMANTIC
                if words
                else verdict.cause
            )
            rank = marks.shown_rank(partner)
            words = "; ".join(
                w
                for w in (words, f"the ranks differ here, this is rank {rank}'s" if rank else "")
                if w
            )
            if words:
                first = "introduced here: "
                sentence = (
                    verdict.sentence.replace(first, f"{first}{words}; ", 1)
                    if first in verdict.sentence
                    else f"{verdict.sentence}; {words}"
                )
                verdicts[key] = verdict.replace(sentence=sentence, cause=cause)
        return verdicts

    # ---- pieces

    def _parameter(self, verdict: Verdict) -> str:
        """Whose piece of a parameter is not the reference's, and whose it is instead."""
        slot = self.paired.slot(verdict.pair, verdict.slot)
        arrays = self.paired.arrays(slot) if slot is not None else None
        if (
            slot is None
            or not self._ranks(slot.target_record)
            or arrays is None
            or arrays[0].shape != arrays[1].shape
        ):
            return ""
        reference, target = arrays[0].astype(arrays[1].dtype), arrays[1]
        owner = self._filled(
            slot.target_record,
            lambda record, place: np.full(
                self.paired.target.records[record].shape, place, np.int32
            ),
        )
        ranks = [int(r) for r in np.unique(owner)]
        wrong = [r for r in ranks if not np.array_equal(reference[owner == r], target[owner == r])]
        for r in wrong:
            for s in ranks:
                if (
                    s != r
                    and reference[owner == s].size == target[owner == r].size
                    and np.array_equal(reference[owner == s], target[owner == r])
                ):
                    return f"rank {r} holds the piece of rank {s}"
        return (
            f"only the {'piece' if len(wrong) == 1 else 'pieces'} of {_listed(wrong)}"
            if 0 < len(wrong) < len(ranks)
            else ""
        )

    def _ranks(self, record: int) -> int:
        """Of how many ranks' pieces a tensor is made; 0 when it is not."""
        derived = self.derived.get(record)
        if derived is None:
            return 0
        if derived_run.is_on_ranks(derived):
            return 1 + max(_places(derived))
        return max((self._ranks(r) for _, ids in derived.operands for r in ids), default=0)

    def _filled(self, record: int, piece: Callable[[int, int], Array]) -> Array:
        """A tensor made of the ranks' pieces, with others in their place. piece: of a record and
        the place of its rank.
        """
        derived = self.derived[record]
        ids = [r for _, records in derived.operands for r in records]
        if derived_run.is_on_ranks(derived):
            return _applied(
                derived, [piece(r, place) for r, place in zip(ids, _places(derived), strict=True)]
            )
        return _applied(
            derived,
            [
                self._filled(r, piece) if self._ranks(r) else self.paired.target.array(r)
                for r in ids
            ],
        )

    def _swapped(self, reference: Array, target: Array, n: int) -> str:
        """Are the n pieces of a tensor along one of its axes those of the reference in another
        order?
        """
        for axis in reversed(range(reference.ndim)):
            if reference.shape[axis] % n or reference.shape[axis] < n:
                continue
            a, b = (np.split(x.astype(np.float64), n, axis) for x in (reference, target))
            near = [[_norm(y - x) for x in a] for y in b]
            order = [int(np.argmin(row)) for row in near]
            remaining = math.sqrt(sum(near[j][i] ** 2 for j, i in enumerate(order)))
            if order != list(range(n)) and remaining < 0.1 * _norm(
                target.astype(np.float64) - reference.astype(np.float64)
            ):
                if sorted(order) == list(range(n)):
                    return (
                        f"the ranks' pieces lie in the order {', '.join(map(str, order))} "
                        f"along axis {axis}"
                    )
                j = next(j for j, i in enumerate(order) if i != j)
                return (
                    f"in the place of rank {j}'s piece along axis {axis} lies that of rank "
                    f"{order[j]}"
                )
        return ""

    # ---- sums

    def _output(self, call: Call, verdict: Verdict) -> str:
        slot = self.paired.slot(verdict.pair, verdict.slot or "output.0")
        if slot is None:
            return ""
        arrays = self.paired.arrays(slot)
        if (
            arrays is None
            or arrays[0].shape != arrays[1].shape
            or not dtypes.of(arrays[1]).is_floating
        ):
            return ""
        pieces = self._cut(verdict.pair, call)
        n = max((self._ranks(p.target_record) for p in pieces.values()), default=0)
        if n < 2:
            return ""
        name = verdict.slot or "output.0"
        words = self._sums(verdict.pair, call, name, pieces, n, arrays[1])
        return words or self._swapped(*arrays, n)

    def _cut(self, index: int, call: Call) -> dict[str, SlotPair]:
        """The slots a call reads of which the target's ranks hold pieces: inputs, or parameters
        when no input is.
        """
        slots = [r.slot for r in call.refs if is_read(r.slot)]
        if call.program:
            program = self.paired.reference.programs.get(call.program)
            slots += (
                [s for s in (*program.inputs, *program.params) if s not in slots]
                if program is not None
                else []
            )
        pairs = {
            s: p
            for s in slots
            if (p := self.paired.slot(index, s)) is not None and self._ranks(p.target_record)
        }
        inputs = {s: p for s, p in pairs.items() if not is_param(s)}
        return inputs or pairs

    def _sums(
        self,
        index: int,
        call: Call,
        name: str,
        pieces: Mapping[str, SlotPair],
        n: int,
        output: Array,
    ) -> str:
        """What multiples of the ranks' parts the output is made of, where it is."""
        parts = self._parts(index, call, name, pieces, n)
        if not parts or any(p.shape != output.shape for p in parts):
            return ""
        *of_ranks, bias = (p.reshape(-1) for p in parts)
        y = output.astype(np.float64).reshape(-1)
        columns = [*of_ranks, bias] if _norm(bias) > 0 else of_ranks
        norms = [_norm(c) for c in columns]
        if not all(norms) or not np.isfinite(y).all() or not np.isfinite(norms).all():
            return ""
        table = np.stack([c / size for c, size in zip(columns, norms, strict=True)], 1)
        factors, *_ = np.linalg.lstsq(table, y, rcond=None)
        wrong = _norm(y - sum(columns))
        remaining = _norm(y - table @ factors)
        if remaining > 0.1 * wrong:
            return ""
        near = [_nice(float(f) / size, n) for f, size in zip(factors, norms, strict=True)]
        if any(f is None for f in near):
            return ""
        return sum_in_words(
            [f for f in near[:n] if f is not None], near[n] if len(near) > n else None
        )

    def _parts(
        self, index: int, call: Call, name: str, pieces: Mapping[str, SlotPair], n: int
    ) -> list[F64]:
        """What each rank's pieces alone give, and what is left without any (a bias); [] where the
        operator is not linear in them.
        """
        whole = {slot: self.paired.target.array(p.target_record) for slot, p in pieces.items()}
        single = [
            {slot: self._only(p.target_record, r) for slot, p in pieces.items()}
            for r in (*range(n), None)
        ]
        try:
            total, *outputs = (
                self._run(index, call, name, replaced) for replaced in (whole, *single)
            )
        except ReplayRefused:
            return []
        bias = outputs.pop()
        parts = [g - bias for g in outputs]
        error = _norm(total - bias - sum(parts))
        return [*parts, bias] if error <= 1e-4 * _norm(total) else []

    def _only(self, record: int, rank: int | None) -> Array:
        """A joined tensor with zeros in the place of all pieces but one rank's."""

        def piece(piece_record: int, place: int) -> Array:
            array = self.paired.target.array(piece_record)
            return array if place == rank else np.zeros_like(array)

        return self._filled(record, piece)

    def _run(self, index: int, call: Call, name: str, replaced: Mapping[str, Array]) -> F64:
        """The reference's program on the target's inputs, some of them or of its parameters
        replaced; a linear layer without one too.
        """
        replayer = self._replayer
        if replayer is not None and call.program:
            loaded = replayer.reference.load(call)
            program = loaded.program
            pairs = {
                s: p
                for s in (*program.inputs, *program.params)
                if (p := self.paired.slot(index, s)) is not None
            }
            arrays, strides = replayer.target.arrays(
                {s: pairs[s].target_record for s in program.inputs if s in pairs}
            )
            params = {
                s: replayer.sides.parameters.expected(pairs[s], is_initial=True)
                for s in program.params
                if s in pairs
            }
            arrays |= {s: a for s, a in replaced.items() if s in arrays}
            params |= {s: a for s, a in replaced.items() if s in params}
            with Threads(1):
                outputs = loaded.run(
                    arrays, params, working="float64", strides=strides, outputs=[name]
                )
            return np.asarray(outputs[name], np.float64)
        tensors = {
            s: replaced[s] if s in replaced else self.paired.target.array(p.target_record)
            for s, p in self.paired.slots[index].items()
        }
        x, weight = tensors.get("input.0"), tensors.get("param.weight")
        if (
            x is None
            or weight is None
            or weight.ndim != 2
            or x.shape[-1:] != weight.shape[1:]
            or set(tensors) - _LINEAR
        ):
            raise ReplayRefused("not a linear layer")
        out = x.astype(np.float64) @ weight.astype(np.float64).T
        return np.asarray(
            out + tensors["param.bias"].astype(np.float64) if "param.bias" in tensors else out,
            np.float64,
        )


_LINEAR = {"input.0", "param.weight", "param.bias", "output.0"}


def sum_in_words(factors: Sequence[float], bias: float | None) -> str:
    """What an output is that should be the sum of the ranks' parts. factors: of each part; bias: of
    what no rank holds, or None.
    """
    n = len(factors)
    missing = [r for r, f in enumerate(factors) if f == 0]
    present = [r for r, f in enumerate(factors) if f != 0]
    parts = []
    if missing and len(present) <= 1:
        parts.append(
            f"the sum over ranks is missing: {_listed(missing, possessive=True)} not in it"
        )
        if present and factors[present[0]] != 1:
            parts.append(f"output equals {factors[present[0]]:g} x the part of rank {present[0]}")
    elif missing:
        parts.append(
            f"the sum over ranks is not whole: {_listed(missing, possessive=True)} not in it"
        )
    elif len(set(factors)) == 1 and factors[0] != 1:
        by = factors[0]
        parts.append(
            f"summed over ranks twice: output equals {by:g} x the sum"
            if by == n
            else "the mean over ranks in the place of the sum"
            if abs(by * n - 1) < 1e-9
            else f"output equals {by:g} x the sum over ranks"
        )
    if not missing or len(present) > 1:
        parts += [
            f"{f:g} x the part of rank {r}"
            for r, f in enumerate(factors)
            if f not in (0, 1) and len(set(factors)) > 1
        ]
    if bias is not None and bias == n != factors[0]:
        parts.append(f"the bias is added on every rank ({n} times)")
    elif bias is not None and bias not in (1, factors[0]):
        parts.append("the bias is missing" if bias == 0 else f"the bias is added {bias:g} times")
    return "; ".join(parts)


def _nice(factor: float, n: int) -> float | None:
    """The whole number, or the fraction of n, that a factor is meant to be; None when it is
    neither.
    """
    for meant in (round(factor), round(factor * n) / n):
        if abs(factor - meant) <= _NICE * max(abs(meant), 1 / n):
            return float(meant)
    return None


def _norm(x: F64) -> float:
    return float(np.linalg.norm(x.reshape(-1)))


def _places(derived: Made) -> list[int]:
    """Of each operand of a tensor joined from ranks, the place of its rank."""
    return [
        int(name[1:]) if name[1:].isdigit() else i
        for name, ids in derived.operands
        for i in range(len(ids))
    ]


def _applied(derived: Made, arrays: Sequence[Array]) -> Array:
    unused = list(arrays)
    bound = {name: [unused.pop(0) for _ in ids] for name, ids in derived.operands}
    return dims.parse(derived.dims).apply(bound)


def _listed(ranks: Sequence[int], *, possessive: bool = False) -> str:
    names = ", ".join(map(str, ranks))
    if possessive:
        return f"rank {names}'s part is" if len(ranks) == 1 else f"the parts of ranks {names} are"
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
