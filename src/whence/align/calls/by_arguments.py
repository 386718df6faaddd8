"""One module called several times in a step with other arguments, in another order in the other
run: its calls are paired by their arguments.

A program may loop over a set (of layer types, of names), whose order changes from process to
process. Such calls are paired by occurrence first, which sets calls with different arguments
against each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from whence.align.call_sites import SiteKey, Sites
from whence.align.calls.by_order import Pairs
from whence.align.calls.site_pairing import ORDER, SitePairing
from whence.records import Call, children
from whence.records.marks import Mark, has_mark

EVIDENCE = "same arguments, called in another order"


class _Group(NamedTuple):
    """What the calls have in common that one call makes of one module."""

    name: SiteKey
    moment: tuple[int, int]
    parent: int


def by_arguments(pairing: SitePairing, pairs: Pairs) -> None:
    """Correct pairs (call of the reference -> call of the target, rule, evidence) in place.

    Calls are paired anew only where both sides pass the same arguments the same number of times,
    and where the order of the calls cannot matter: all of them get the same tensors, or every call
    gets the tensors of its new partner, bitwise. Otherwise the order stands, and an argument that
    differs remains a difference.
    """
    reference, target = pairing.reference, pairing.target
    groups = _groups(reference)
    if not groups:
        return
    target_groups = _groups(target)
    group_of = {call: group for group, calls in target_groups.items() for call in calls}
    below = _Below(pairing)
    # callers come before what they call, which they may move
    for calls in sorted(groups.values(), key=lambda calls: reference.calls[calls[0]].order):
        across = {group_of.get(pairs[c][0]) if c in pairs else None for c in calls}
        group = across.pop()
        if across or group is None or len(target_groups[group]) != len(calls):
            continue
        partners = [pairs[c][0] for c in calls]
        moved = _moved(pairing, calls, partners)
        for call, _ in moved:
            below.part(call, pairs)
        for call, partner in moved:
            pairs[call] = (partner, ORDER, EVIDENCE)
            below.pair(call, partner, pairs)


def _groups(sites: Sites) -> dict[_Group, list[int]]:
    """Selected calls of modules that one call makes several times."""
    repeated = {_name(key) for key in sites.keys if key.occurrence and not key.op}
    out: dict[_Group, list[int]] = defaultdict(list)
    for site, key in enumerate(sites.keys):
        if _name(key) not in repeated or sites.first[site].kind != "module":
            continue
        for moment, calls in sites.moments[site].items():
            for call in calls:
                out[_Group(_name(key), moment, sites.calls[call].parent)].append(call)
    for calls in out.values():
        calls.sort(key=lambda c: sites.calls[c].order)
    return {group: calls for group, calls in out.items() if len(calls) > 1}


def _name(key: SiteKey) -> SiteKey:
    return key._replace(occurrence=0)


def _moved(
    pairing: SitePairing, calls: Sequence[int], partners: Sequence[int]
) -> list[tuple[int, int]]:
    """The pairs that arguments give and that order does not."""
    a = [pairing.reference.calls[c] for c in calls]
    b = [pairing.target.calls[c] for c in partners]
    names = _distinguishing(a, b)
    if not names:
        return []
    by_call = [_values(call, names) for call in a], [_values(call, names) for call in b]
    if by_call[0] == by_call[1] or Counter(by_call[0]) != Counter(by_call[1]):
        return []
    free: dict[Hashable, list[int]] = defaultdict(list)
    for partner, values in sorted(
        zip(partners, by_call[1]), key=lambda p: pairing.target.calls[p[0]].order
    ):
        free[values].append(partner)
    found = [(call, free[values].pop(0)) for call, values in zip(calls, by_call[0])]
    if not _order_is_free(pairing, found):
        return []
    return [pair for pair, partner in zip(found, partners) if pair[1] != partner]


def _distinguishing(calls: Sequence[Call], others: Sequence[Call]) -> list[str]:
    """Arguments that tell calls apart and have the same values on both sides, in any order."""
    out = []
    for name in dict.fromkeys(name for call in calls for name in call.arguments):
        values, values_across = (
            Counter(_values(c, [name]) for c in side) for side in (calls, others)
        )
        if len(values) > 1 and values == values_across:
            out.append(name)
    return out


def _values(call: Call, names: Iterable[str]) -> tuple[str, ...]:
    """The values as text, which tells 1 from True; "" for what is a tensor or not passed."""
    return tuple(repr(call.arguments[n]) if n in call.arguments else "" for n in names)


def _order_is_free(pairing: SitePairing, found: Sequence[tuple[int, int]]) -> bool:
    """Does no call of a group read what another one made?"""
    read = [_inputs(pairing.reference, a) for a, _ in found]
    read_across = [_inputs(pairing.target, b) for _, b in found]
    if len(set(read)) == 1 and len(set(read_across)) == 1:
        return True
    return read == read_across and all(digest for call in read for _, digest, *_ in call)


def _inputs(sites: Sites, call: int) -> tuple[tuple[Hashable, ...], ...]:
    """Slot and content of the tensors that a call gets; a record's id where it has no hash."""
    out = []
    for ref in sites.calls[call].slots("input"):
        record = sites.run.records[ref.record]
        content = (record.dtype, record.shape) if record.hash else (record.id,)
        out.append((ref.slot, record.hash, *content))
    return tuple(out)


class _Below:
    """The calls below calls that are paired anew: they follow these."""

    def __init__(self, pairing: SitePairing) -> None:
        self._pairing = pairing

    @cached_property
    def _kids(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        return children(self._pairing.reference.calls), children(self._pairing.target.calls)

    @cached_property
    def _name_across(self) -> dict[SiteKey, SiteKey]:
        """Names of the reference, whatever the occurrence -> the names that most of their sites are
        paired with.
        """
        reference, target = self._pairing.reference, self._pairing.target
        counts: dict[SiteKey, Counter[SiteKey]] = defaultdict(Counter)
        for site, partner in self._pairing.partners.items():
            counts[_name(reference.keys[site])][_name(target.keys[partner.site])] += 1
        return {name: across.most_common(1)[0][0] for name, across in counts.items()}

    def part(self, call: int, pairs: Pairs) -> None:
        """Undo the pairs below a call."""
        todo = list(self._kids[0].get(call, ()))
        while todo:
            current = todo.pop()
            pairs.pop(current, None)
            todo += self._kids[0].get(current, ())

    def pair(self, call: int, partner: int, pairs: Pairs) -> None:
        """Pair what two calls make: the k-th call of a name with the k-th of its name across."""
        todo = [(call, partner)]
        while todo:
            for a, b in self._made(*todo.pop()):
                todo.append((a, b))
                if not any(has_mark(c, Mark.NOT_SELECTED) for c in self._calls(a, b)):
                    pairs[a] = (b, ORDER, EVIDENCE)

    def _calls(self, call: int, partner: int) -> tuple[Call, Call]:
        return self._pairing.reference.calls[call], self._pairing.target.calls[partner]

    def _made(self, call: int, partner: int) -> Iterator[tuple[int, int]]:
        reference, target = self._pairing.reference, self._pairing.target
        across: dict[SiteKey, list[int]] = defaultdict(list)
        for kid in self._kids[1].get(partner, ()):
            across[_name(target.keys[target.site_of[kid]])].append(kid)
        for kid in self._kids[0].get(call, ()):
            name = _name(reference.keys[reference.site_of[kid]])
            same_name = across.get(self._name_across.get(name, name))
            if same_name:
                yield kid, same_name.pop(0)
