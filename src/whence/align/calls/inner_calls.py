"""Adds unnamed helper calls between the members of a fused call to that call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from whence.records import Call, Run
from whence.records.slots import is_input, is_written


class InnerCalls:
    """The calls of one step by who reads what they make. across: names that the other run has."""

    def __init__(self, run: Run, calls: Sequence[Call], across: Collection[str]) -> None:
        self._makers: dict[int, Call] = {}
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        self._across = across
        calls_there = {call.id for call in calls}
        for call in run.calls:
            for ref in call.refs:
                # What a call around these reads or returns is seen outside.
                if is_input(ref.slot) or (is_written(ref.slot) and call.id not in calls_there):
                    self._readers[ref.record].add(call.id)
                elif is_written(ref.slot):
                    self._makers[ref.record] = call

    def with_inner(self, members: Sequence[Call]) -> list[Call]:
        """The members with the calls that only they read, in the order in which all of them ran.
        Only calls that can be replayed are taken in: in the others a fault could hide.
        """
        within = {call.id: call for call in members}
        waiting = list(members)
        while waiting:
            for ref in waiting.pop().slots("input"):
                maker = self._makers.get(ref.record)
                if maker is not None and maker.id not in within and self._is_inner(maker, within):
                    within[maker.id] = maker
                    waiting.append(maker)
        return sorted(within.values(), key=lambda call: call.order)

    def _is_inner(self, call: Call, within: Collection[int]) -> bool:
        if call.kind != "operator" or not call.program:
            return False
        if any(n in self._across for n in call.origins or (call.scope,)):
            return False
        made = [ref.record for ref in call.refs if is_written(ref.slot)]
        return all(self._readers[record] <= set(within) for record in made)
