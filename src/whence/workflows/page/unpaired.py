"""Calls that only one run has, placed between those that both have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from whence import align
from whence.records import Call, Run
from whence.records.slots import is_input, is_written
from whence.results import Comparison
from whence.results.page import PageCall, PageUnpaired

_MOST = 400  # of a side


def page_unpaired(
    compared: Comparison, aligned: align.Aligned, calls: Sequence[PageCall]
) -> tuple[PageUnpaired, ...]:
    """Of both sides, in the order in which they began."""
    place = {call.pair: i for i, call in enumerate(calls)}
    pairs = compared.plan.pairs
    reference = {pairs[pair].reference: i for pair, i in place.items()}
    target = {pairs[pair].target: i for pair, i in place.items()}
    for pair, i in place.items():
        target.update(dict.fromkeys(pairs[pair].also, i))
    out: list[PageUnpaired] = []
    for side, run, alone, places in (
        ("reference", aligned.reference, compared.plan.unmatched_reference, reference),
        ("target", aligned.target, compared.plan.unmatched_target, target),
    ):
        ids = [number for number in alone if 0 <= number < len(run.calls)]
        if 0 < len(ids) <= _MOST:
            out += _Side(side, run, ids, places, len(out)).listed()
    return tuple(out)


class _Side:
    """One run: its unpaired calls, numbered from `base`, among its paired ones."""

    def __init__(
        self, side: str, run: Run, alone: Sequence[int], places: Mapping[int, int], base: int
    ) -> None:
        self.side, self.run = side, run
        self.alone = sorted(alone, key=lambda number: run.calls[number].order)
        self.code = dict(places) | {n: -1 - base - k for k, n in enumerate(self.alone)}

    def listed(self) -> Iterator[PageUnpaired]:
        order = sorted(self.run.calls, key=lambda call: call.order)
        parents = {call.id: self._around(call) for call in order}
        last: dict[int | None, int] = {}
        after = {}
        makers: dict[int, int] = {}
        reads: dict[int, dict[int, None]] = {}
        for call in order:
            code = self.code.get(call.id)
            if code is None:
                continue
            around = parents[call.id]
            if code < 0:
                after[call.id] = last.get(around, -1)
            else:
                last[around] = code
            reads[code] = {
                makers[ref.record]: None
                for ref in call.refs
                if is_input(ref.slot) and ref.record in makers
            }
            # The innermost call that made a tensor begins last.
            makers.update((ref.record, code) for ref in call.refs if is_written(ref.slot))
        readers: dict[int, list[int]] = {}
        for code, read in reads.items():
            for maker in read:
                readers.setdefault(maker, []).append(code)
        for number in self.alone:
            call, code = self.run.calls[number], self.code[number]
            around = parents[number]
            yield PageUnpaired(
                self.side,
                call.scope or call.root,
                call.op_type or call.op,
                call.step,
                call.rank,
                parent=around if around is not None and around >= 0 else -1,
                inside=-1 - around if around is not None and around < 0 else -1,
                after=after[number],
                reads=tuple(reads[code]),
                readers=tuple(dict.fromkeys(readers.get(code, ()))),
            )

    def _around(self, call: Call) -> int | None:
        """Code of the nearest call around that the page has."""
        up = call.parent
        while up >= 0 and up not in self.code:
            up = self.run.calls[up].parent
        return self.code[up] if up >= 0 else None
