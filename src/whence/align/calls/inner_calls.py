"""Adds unnamed helper calls between the members of a fused call to that call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from whence.records import Call, Run
from whence.records.slots import is_input, is_written


class InnerCalls:
    """The calls of a run by who reads what they make."""

    def __init__(self, run: Run) -> None:
        self._writers: defaultdict[int, list[Call]] = defaultdict(list)
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        for call in run.calls:
            for ref in call.refs:
                if is_input(ref.slot):
                    self._readers[ref.record].add(call.id)
                elif is_written(ref.slot):
                    self._writers[ref.record].append(call)

    def with_inner(
        self, members: Sequence[Call], step: Collection[int], across: Collection[str]
    ) -> list[Call]:
        """The members with the calls of their step that only they read, in the order in which all
        of them ran. Only calls that can be replayed are taken in: in the others a fault could
        hide. across: names that the other run has.
        """
        within = {call.id: call for call in members}
        waiting = list(members)
        while waiting:
            for ref in waiting.pop().slots("input"):
                makers = (c for c in reversed(self._writers[ref.record]) if c.id in step)
                maker = next(makers, None)
                if maker is None or maker.id in within or self._is_seen(maker, within, step):
                    continue
                if not any(n in across for n in maker.origins or (maker.scope,)):
                    within[maker.id] = maker
                    waiting.append(maker)
        return sorted(within.values(), key=lambda call: call.order)

    def _is_seen(self, call: Call, within: Collection[int], step: Collection[int]) -> bool:
        """Do others read what a call makes, or may it hide a fault? What a call around these
        returns is seen outside.
        """
        if call.kind != "operator" or not call.program:
            return True
        written = [ref.record for ref in call.refs if is_written(ref.slot)]
        return any(
            not self._readers[record] <= set(within)
            or any(c.id not in step and c.id not in within for c in self._writers[record])
            for record in written
        )
