"""What went wrong between ranks, in words: which rank's part a sum lacks, which pieces were
swapped, whose copy differs.

A hypothesis over the ranks' parts is put forward only where it gives what the target has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.align import derived_run, dims
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.replays.self_check import Threads
from whence.comparison.verdicts.call_replays import CallReplays
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, marks
from whence.records.slots import SlotKind, is_of_child, is_param, is_read, slot_of_kind, split_child
from whence.records.training import is_sum
from whence.results import CauseKind, Made, SlotPair, Verdict, VerdictKind

F64 = npt.NDArray[np.float64]


class RankFaults:
    """Explains findings of calls whose tensors were joined from several ranks."""

    def __init__(self, replays: CallReplays) -> None:
        self._replayer, self.paired = replays.replayer, replays.paired
        self._stale = StaleTensors(self.paired)
        self.derived = {m.record: m for m in self.paired.plan.made_target}

    def explained(self, verdicts: dict[tuple[int, int], Verdict]) -> dict[tuple[int, int], Verdict]:
        """The verdicts, with the error between ranks in the sentence if it can be shown."""
        drifted = ""
        for key, verdict in sorted(verdicts.items(), key=self._when):
            if (
                verdict.verdict not in (VerdictKind.INTRODUCED, VerdictKind.PARAM_DIFF)
                or verdict.side != "target"
            ):
                continue
            pair = self.paired.pair(verdict.pair)
            call, rank = pair.call, marks.shown_rank(pair.partner)
            words = self._words(call, verdict)
            # A call may be wrong only because its ranks had drifted apart before.
            follows = rank and (call.step > 0 or call.phase != "forward")
            if not words and drifted and follows:
                words = f"its ranks differ since {drifted}: not judged again"
                verdicts[key] = verdict.replace(verdict=VerdictKind.INHERITED, sentence=words)
                continue
            if rank and not drifted:
                drifted = f"{call.name} at step {call.step}"
            verdicts[key] = _with_words(verdict, call, words, rank)
        return verdicts

    def _words(self, call: Call, verdict: Verdict) -> str:
        """The error between ranks behind a verdict, in words; "" if it cannot be shown."""
        try:
            if verdict.verdict == VerdictKind.PARAM_DIFF:
                return self._parameter(verdict)
            return self._output(call, verdict) or self._stale.words(verdict)
        except (ElementsMissing, ReplayRefused):
            return ""

    def _when(self, item: tuple[tuple[int, int], Verdict]) -> tuple[int, int]:
        (call, stretch), _ = item
        return self.paired.calls[call].order, stretch

    # ---- pieces

    def _parameter(self, verdict: Verdict) -> str:
        """The ranks whose shard of a parameter is wrong, and whose shard a rank holds instead, in
        words; "" if it cannot be shown.
        """
        slot = self.paired.slot(verdict.pair, verdict.slot)
        arrays = self.paired.arrays_of_one_shape(slot) if slot is not None else None
        if slot is None or not self._ranks(slot.target_record) or arrays is None:
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
            f"only the {'piece' if len(wrong) == 1 else 'pieces'} of {listed(wrong)}"
            if 0 < len(wrong) < len(ranks)
            else ""
        )

    def _ranks(self, record: int) -> int:
        """The number of ranks whose shards form a tensor; 0 if it was not joined from ranks."""
        derived = self.derived.get(record)
        if derived is None:
            return 0
        if derived_run.is_on_ranks(derived):
            return 1 + max(_places(derived))
        return max((self._ranks(r) for _, ids in derived.operands for r in ids), default=0)

    def _share(self, record: int) -> int:
        """The number of losses by which a tensor of the ranks was divided, 1 if it was not."""
        derived = self.derived.get(record)
        node = dims.parse(derived.dims) if derived is not None else None
        return node.parts if isinstance(node, dims.Share) else 1

    def _filled(self, record: int, piece: Callable[[int, int], Array]) -> Array:
        """A joined tensor with its shards replaced. piece: (record, number of the rank) -> the new
        shard.
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

    # ---- sums

    def _output(self, call: Call, verdict: Verdict) -> str:
        slot = self.paired.slot(verdict.pair, verdict.slot or "output.0")
        if slot is None:
            return ""
        arrays = self.paired.arrays_of_one_shape(slot)
        if arrays is None or not dtypes.of(arrays[1]).is_floating:
            return ""
        pieces = self._cut(verdict.pair, call)
        n = max((self._ranks(p.target_record) for p in pieces.values()), default=0)
        name = verdict.slot or "output.0"
        given = pieces.get(slot_of_kind(name, SlotKind.INPUT))
        if given is not None and self._ranks(given.target_record) == 1:
            share = self.paired.target.array(given.target_record)
            return undivided(share, arrays[1], self._share(given.target_record))
        if n < 2:
            return ""
        words = self._sums(verdict.pair, call, name, pieces, n, arrays[1])
        return words or swapped(*arrays, n)

    def _cut(self, index: int, call: Call) -> dict[str, SlotPair]:
        """The slots of a call that the target's ranks hold in shards: inputs, or parameters if no
        input is sharded.
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
        """The factors with which the ranks' partial sums enter the output, in words; "" if the
        output is no such combination.
        """
        parts = self._parts(index, call, name, pieces, n)
        if not parts or any(p.shape != output.shape for p in parts):
            return ""
        *of_ranks, bias = (p.reshape(-1) for p in parts)
        y = output.astype(np.float64).reshape(-1)
        columns = [*of_ranks, bias] if norm(bias) > 0 else of_ranks
        norms = [norm(c) for c in columns]
        if not all(norms) or not np.isfinite(y).all() or not np.isfinite(norms).all():
            return ""
        table = np.stack([c / size for c, size in zip(columns, norms, strict=True)], 1)
        factors, *_ = np.linalg.lstsq(table, y, rcond=None)
        wrong = norm(y - sum(columns))
        remaining = norm(y - table @ factors)
        if remaining > 0.1 * wrong:
            return ""
        near = [nice(float(f) / size, n) for f, size in zip(factors, norms, strict=True)]
        if any(f is None for f in near):
            return ""
        return sum_in_words(
            [f for f in near[:n] if f is not None],
            near[n] if len(near) > n else None,
            of_mean=any(self._share(p.target_record) > 1 for p in pieces.values()),
        )

    def _parts(
        self, index: int, call: Call, name: str, pieces: Mapping[str, SlotPair], n: int
    ) -> list[F64]:
        """The output of each rank's shards alone, then the output without any (a bias); [] if the
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
        error = norm(total - bias - sum(parts))
        return [*parts, bias] if error <= 1e-4 * norm(total) else []

    def _only(self, record: int, rank: int | None) -> Array:
        """A joined tensor with zeros in place of the shards of all other ranks."""

        def piece(piece_record: int, place: int) -> Array:
            array = self.paired.target.array(piece_record)
            return array if place == rank else np.zeros_like(array)

        return self._filled(record, piece)

    def _run(self, index: int, call: Call, name: str, replaced: Mapping[str, Array]) -> F64:
        """An output of the reference's program on the target's inputs, with some inputs or
        parameters replaced. A linear layer needs no program. Raises ReplayRefused.
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
        return _linear(
            {
                s: replaced[s] if s in replaced else self.paired.target.array(p.target_record)
                for s, p in self.paired.slots[index].items()
            }
        )


def _with_words(verdict: Verdict, call: Call, words: str, rank: str) -> Verdict:
    """The verdict with the error between ranks in its sentence. rank: whose tensor is shown, ""
    where all ranks hold the same.
    """
    cause = CauseKind.SEMANTIC if words else verdict.cause
    if verdict.verdict == VerdictKind.PARAM_DIFF:
        cause = verdict.cause or CauseKind.SEMANTIC
    own = f"the ranks differ here, this is rank {rank}'s" if rank else ""
    words = "; ".join(filter(None, (words, own)))
    if not words:
        return verdict
    first = "introduced here: "
    sentence = (
        verdict.sentence.replace(first, f"{first}{words}; ", 1)
        if first in verdict.sentence
        else f"{verdict.sentence}; {words}"
    )
    reason = verdict.reason or (words if is_sum(call.op) else "")
    return verdict.replace(sentence=sentence, cause=cause, reason=reason)


def _linear(tensors: Mapping[str, Array]) -> F64:
    """The output of a linear layer with these tensors, by slot. Raises ReplayRefused if it is
    none.
    """
    x, weight = tensors.get("input.0"), tensors.get("param.weight")
    if x is None or weight is None or set(tensors) - _LINEAR:
        raise ReplayRefused("not a linear layer")
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ReplayRefused("not a linear layer")
    out = x.astype(np.float64) @ weight.astype(np.float64).T
    bias = tensors.get("param.bias", np.zeros(1))
    return np.asarray(out + bias.astype(np.float64), np.float64)


_LINEAR = {"input.0", "param.weight", "param.bias", "output.0"}


def _places(derived: Made) -> list[int]:
    """For each operand of a tensor joined from ranks, the number of its rank."""
    return [
        int(name[1:]) if name[1:].isdigit() else i
        for name, ids in derived.operands
        for i in range(len(ids))
    ]


def _applied(derived: Made, arrays: Sequence[Array]) -> Array:
    unused = list(arrays)
    bound = {name: [unused.pop(0) for _ in ids] for name, ids in derived.operands}
    return dims.parse(derived.dims).apply(bound)


# Finds shards on the wrong rank, and sums that were not divided by the number of ranks.

_SAME = 1e-3  # relative distance below which a tensor is meant to be another


def norm(x: npt.NDArray[np.float64]) -> float:
    """The Euclidean norm of all elements."""
    return float(np.linalg.norm(x.reshape(-1)))


def undivided(share: Array, output: Array, ranks: int) -> str:
    """A sentence if the output is one rank's input before it was divided by the number of losses;
    else "". share: the divided input.
    """
    expected = share.astype(np.float64)
    if ranks == 1 or expected.shape != output.shape or not norm(expected):
        return ""
    if norm(output.astype(np.float64) - ranks * expected) > _SAME * norm(expected):
        return ""
    return f"not divided by the {ranks} ranks whose losses it is of: {ranks} x the mean"


def swapped(reference: Array, target: Array, n: int) -> str:
    """Are the n pieces of a tensor along one of its axes those of the reference in another
    order?
    """
    for axis in reversed(range(reference.ndim)):
        if reference.shape[axis] % n or reference.shape[axis] < n:
            continue
        a, b = (np.split(x.astype(np.float64), n, axis) for x in (reference, target))
        near = [[norm(y - x) for x in a] for y in b]
        order = [int(np.argmin(row)) for row in near]
        remaining = math.sqrt(sum(near[j][i] ** 2 for j, i in enumerate(order)))
        if order != list(range(n)) and remaining < 0.1 * norm(
            target.astype(np.float64) - reference.astype(np.float64)
        ):
            if sorted(order) == list(range(n)):
                return (
                    f"the ranks' pieces lie in the order {', '.join(map(str, order))} "
                    f"along axis {axis}"
                )
            j = next(j for j, i in enumerate(order) if i != j)
            return (
                f"in the place of rank {j}'s piece along axis {axis} lies that of rank {order[j]}"
            )
    return ""


# Tensors that should have been made anew and are those of an earlier step: a message that came
# late, a buffer that was sent before it was filled, a shard that nobody fetched again.

_STEPS_BACK = 2
_TELLING = 8  # a tensor of fewer elements may come again by chance


class StaleTensors:
    """Looks for the tensor of a finding in the steps before."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._calls = {_key(call, call.step): call for call in paired.target.calls}

    def words(self, verdict: Verdict) -> str:
        """Of which earlier step the target's tensor is, "" where it is none of them."""
        place = self._place(verdict)
        if place is None:
            return ""
        call, slot = place
        now = call.by_slot.get(slot)
        for step in range(call.step - 1, max(call.step - 1 - _STEPS_BACK, -1), -1):
            if now is not None and self._is_that_of(step, call, slot, now):
                return f"it is bitwise that of step {step}: stale"
        return ""

    def _place(self, verdict: Verdict) -> tuple[Call, str] | None:
        """The target's call and slot of a finding, of a child of it where it is one's."""
        index, slot = verdict.pair, verdict.slot
        if is_of_child(slot):
            child, slot = split_child(slot)
            kids = self._paired.kids.get(self._paired.plan.pairs[index].reference, [])
            below = self._paired.pair_of.get(kids[child]) if child < len(kids) else None
            if below is None:
                return None
            index = below
        pair = self._paired.slot(index, slot)
        if pair is None:
            return None
        return self._paired.pair(index).partner, pair.target_slot

    def _is_that_of(self, step: int, call: Call, slot: str, now: int) -> bool:
        """Is a tensor of a call bitwise what the call left in a slot in an earlier step?"""
        target, earlier = self._paired.target, self._calls.get(_key(call, step))
        before = earlier.by_slot.get(slot) if earlier is not None else None
        if before == now:
            return False
        try:
            a = target.array(now)
            b = (
                target.array(before)
                if before is not None
                else self._paired.left_out.target_elements(call, step, slot)
            )
        except ElementsMissing:
            return False
        if b is None or a.shape != b.shape or a.size < _TELLING or a.tobytes() != b.tobytes():
            return False
        return bool(np.any(a != a.reshape(-1)[0]))


def _key(call: Call, step: int) -> Hashable:
    return call.rank, call.root, step, call.micro, call.phase, call.scope, call.op, call.occurrence


# Says in words how a sum over ranks is wrong: missing, partial, doubled, or a mean.

# a factor this close to a whole number, or to a fraction of the number of ranks, is meant to be it
_NICE = 0.02


def sum_in_words(factors: Sequence[float], bias: float | None, *, of_mean: bool = False) -> str:
    """What an output is that should be the sum of the ranks' parts. factors: of each part; bias: of
    what no rank holds, or None. of_mean: the parts are shares of a mean.
    """
    if of_mean and (words := _mean_in_words(factors)):
        return words
    missing = [r for r, f in enumerate(factors) if f == 0]
    present = [r for r, f in enumerate(factors) if f != 0]
    parts = _whole_in_words(factors, missing, present)
    if not missing or len(present) > 1:
        parts += [
            f"{f:g} x the part of rank {r}"
            for r, f in enumerate(factors)
            if f not in (0, 1) and len(set(factors)) > 1
        ]
    if bias is not None and bias == len(factors) != factors[0]:
        parts.append(f"the bias is added on every rank ({len(factors)} times)")
    elif bias is not None and bias not in (1, factors[0]):
        parts.append("the bias is missing" if bias == 0 else f"the bias is added {bias:g} times")
    return "; ".join(parts)


def _whole_in_words(
    factors: Sequence[float], missing: Sequence[int], present: Sequence[int]
) -> list[str]:
    """What is wrong with a sum over ranks as a whole; [] for nothing."""
    by, n = factors[0], len(factors)
    if missing and len(present) > 1:
        return [f"the sum over ranks is not whole: {listed(missing, possessive=True)} not in it"]
    if missing:
        words = [f"the sum over ranks is missing: {listed(missing, possessive=True)} not in it"]
        alone = [(r, factors[r]) for r in present if factors[r] != 1]
        return words + [f"output equals {f:g} x the part of rank {r}" for r, f in alone]
    if len(set(factors)) > 1 or by == 1:
        return []
    if by == n:
        return [f"summed over ranks twice: output equals {by:g} x the sum"]
    if abs(by * n - 1) < 1e-9:
        return ["the mean over ranks in the place of the sum"]
    return [f"output equals {by:g} x the sum over ranks"]


def nice(factor: float, n: int) -> float | None:
    """The whole number, or the fraction of n, that a factor is meant to be; None when it is
    neither.
    """
    for meant in (round(factor), round(factor * n) / n):
        if abs(factor - meant) <= _NICE * max(abs(meant), 1 / n):
            return float(meant)
    return None


def _mean_in_words(factors: Sequence[float]) -> str:
    """What a gradient is that should be the mean of the ranks' own; "" where it is not a sum or
    mean of some of them.
    """
    n = len(factors)
    present = [rank for rank, factor in enumerate(factors) if factor != 0]
    by = {factors[rank] for rank in present}
    if len(by) != 1 or by == {1}:
        return ""
    factor = by.pop()
    if len(present) == n:
        return (
            "the sum over ranks in the place of the mean, or added up twice"
            if factor == n
            else "the mean over ranks is taken twice, or of a loss that is a share already"
            if abs(factor * n - 1) < 1e-9
            else f"{factor:g} x the mean over ranks"
        )
    if len(present) == 1 and factor == n:
        return f"not reduced over the ranks: it is that of {listed(present)} alone"
    if abs(factor * len(present) - n) < 1e-9:
        return f"reduced over another group: it is the mean of {listed(present)} alone"
    return ""


def listed(ranks: Sequence[int], *, possessive: bool = False) -> str:
    names = ", ".join(map(str, ranks))
    if possessive:
        return f"rank {names}'s part is" if len(ranks) == 1 else f"the parts of ranks {names} are"
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
