"""Where an error came in between tensors that a target shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set

from whence.comparison.verdicts.sparse_target.shown_tensors import RegionKey, ShownTensors, Upstream
from whence.results import Verdict, VerdictKind


class FaultPlaces:
    """Names what lies before tensors that are wrong, and tells those that only follow from others.

    flagged: the wrong tensors. right: regions that tensors which are right depend on. spoilt:
    regions whose parameters differ.
    """

    def __init__(
        self,
        tensors: ShownTensors,
        upstream: Mapping[int, Upstream],
        flagged: Set[int],
        right: Set[RegionKey],
        spoilt: Set[RegionKey],
    ) -> None:
        self.tensors, self._upstream, self._flagged = tensors, upstream, flagged
        self._calls = tensors.paired.calls
        self._right, self._spoilt = right, spoilt
        # Wrong tensors that depend on the same tensors, in order of execution.
        self._units: dict[frozenset[int], list[int]] = defaultdict(list)
        for record in sorted(flagged, key=tensors.place):
            self._units[upstream[record].tensors].append(record)
        self._shared = _shared(upstream)

    def placed(self, verdict: Verdict, record: int) -> Verdict:
        """The verdict of a wrong tensor, with where the error came in."""
        up = self._upstream[record]
        first, *others = self._units[up.tensors]
        if spoilt := next((key for key in up.places if key in self._spoilt), None):
            return _follows(verdict, f"the parameters of {self._calls[spoilt[0]].scope}")
        inner = self._wrong_inside(record)
        if inner is not None:
            return _follows(verdict, self._name(inner))
        if record == first:
            suspects = up.places - self._right
            # What is wrong in all of them is where they have one thing in common.
            for follower in others:
                suspects = suspects & (self._upstream[follower].places - self._right) or suspects
            return self._located(verdict, self.tensors.maker[record], suspects, up.places)
        if self._upstream[first].places & up.places:
            return _follows(verdict, self._name(first))
        return verdict

    def _name(self, record: int) -> str:
        """What the target calls a tensor."""
        return self.tensors.label(self.tensors.slots[record][1]).scope

    def _wrong_inside(self, record: int) -> int | None:
        """A tensor inside one of the calls that this one depends on, which is wrong: the replay did
        not go on with it.
        """
        inner = (
            r
            for tensors in self.tensors.inner.values()
            for r, _ in tensors
            if r in self._flagged and r != record
        )
        regions = self._upstream[record].regions
        return next(
            (
                r
                for r in inner
                if self.tensors.maker[r] in regions
                and self.tensors.place(r) < self.tensors.place(record)
            ),
            None,
        )

    def _located(
        self, verdict: Verdict, maker: RegionKey, suspects: Set[RegionKey], regions: Set[RegionKey]
    ) -> Verdict:
        """With the name of what lies between: the call it happened in, or the first and last of
        several.
        """
        calls, order = self._calls, self.tensors.order
        # each was on the way to a tensor that is right, and together they are wrong
        suspects = suspects or regions
        unshared = {key for key in suspects if key not in self._shared} or suspects
        also = sorted(suspects - unshared, key=order.__getitem__)
        sentence = verdict.sentence
        if also:
            names = dict.fromkeys(calls[call].scope or calls[call].root for call, _ in also)
            sentence += f"; or in {', '.join(list(names)[:3])}, which other layers use too"
        parts = dict.fromkeys(
            self._topmost(call, regions) for call, _ in sorted(unshared, key=order.__getitem__)
        )
        common = self._common({call for call, _ in unshared})
        if common is not None and (
            len(parts) < 2
            or common in parts
            or (
                all(self.tensors.is_within(call, common) for call in parts)
                and calls[common].parent != -1
            )
        ):
            if common == maker[0]:
                return verdict.replace(where="", sentence=sentence)
            if not calls[common].scope:
                return verdict.replace(where=calls[common].root, named=common, sentence=sentence)
            return verdict.replace(where=calls[common].scope, sentence=sentence)
        # Several calls of a container that is more than they are.
        scopes = [calls[call].scope or calls[call].root for call in parts]
        return verdict.replace(
            where=f"{scopes[0]}..{scopes[-1]}",
            sentence=f"{sentence}; in between lie {', '.join(scopes[:6])}",
        )

    def _common(self, calls: Set[int]) -> int | None:
        """The innermost call that all of these are part of, or are; None where they have different
        roots.
        """
        levels = zip(*(self.tensors.path(call) for call in calls))
        common = [level[0] for level in levels if len(set(level)) == 1]
        return common[-1] if common else None

    def _topmost(self, call: int, regions: Set[RegionKey]) -> int:
        """The largest call around this one of which everything lies between the tensors shown."""
        while (parent := self._calls[call].parent) != -1:
            inside = (
                key
                for key, region in self.tensors.regions.items()
                if region.outputs and self.tensors.is_within(key[0], parent)
            )
            if any((inner, min(segment, 0)) not in regions for inner, segment in inside):
                break
            call = parent
        return call


def _shared(upstream: Mapping[int, Upstream]) -> set[RegionKey]:
    """Regions that tensors depend on which have not the same before them: positions, masks, what
    all layers use.
    """
    units: dict[RegionKey, set[frozenset[int]]] = defaultdict(set)
    for up in upstream.values():
        for key in up.places:
            units[key].add(up.tensors)
    return {key for key, tensors in units.items() if len(tensors) > 1}


def _follows(verdict: Verdict, name: str) -> Verdict:
    words = f"follows from {name}, which is wrong on the way to it: {verdict.sentence}"
    return verdict.withdrawn(VerdictKind.INHERITED, words)
