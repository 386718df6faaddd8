"""Decides which calls of the two runs are paired, from names and metadata alone. Reads no tensors.

Rules by falling strictness: "original operators" (both say that they carry out the same ones),
"values" (what they read and make corresponds, `align/values`),
"exact key" (rank, root, step, micro, phase, scope, op, occurrence all equal), "normalised name"
(wrappers, index styles, class suffixes and a root's prefix taken out), "similar name" (a typo, a
word more), "order" (the calls that paired calls make, aligned in the order in which they ran, and
calls of one module in another order, paired by their arguments), "data flow" (what it reads and
who reads it are partners), "content" (parameters or outputs that no other call has). What no rule
pairs is listed as unmatched, what several candidates fit equally as ambiguous.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from whence.align.call_sites import MATCHES, SiteKey, Sites, match_roots, selected
from whence.align.calls import call_sequences
from whence.align.calls.by_order import Pairs, counted, line_by_line, realign
from whence.align.calls.fingerprints import Feature, distance, nearest_by_far
from whence.align.calls.fused_operators import RULE, VALUES, Fused
from whence.align.calls.sequence_alignment import align, longest_increasing
from whence.align.calls.site_pairing import (
    CLOSE_OUTPUT,
    CONTENT,
    EXACT,
    FLOW,
    NORMAL,
    ORDER,
    SIMILAR,
    SitePairing,
    grouped,
    unique_contents,
)
from whence.align.calls.tensor_slots import pair_in_order, pair_slots
from whence.align.module_names import (
    WRAPPER_CLASSES,
    any_separators,
    likeness,
    normal_scope,
    plain_scope,
    starred,
)
from whence.errors import UsageError
from whence.records import Call, Run, children
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_written
from whence.results import CallPair, Plan


def plan(reference: Run, target: Run, match: str = "auto", fused: Fused | None = None) -> Plan:
    """Pair two runs. Every selected call of either side ends up in exactly one of pairs, unmatched,
    ambiguous.

    fused: calls that carry out the same operators; their sites are paired before any rule is
    applied. match: "auto" applies all rules; "exact" pairs equal keys only; "names" also pairs
    names that differ in spelling; "order" pairs the k-th call with the k-th. Raises UsageError for
    any other `match`, and with "order" unless numbers, kinds and output shapes of calls agree.
    """
    if match not in MATCHES:
        raise UsageError(f"match {match!r}: {', '.join(MATCHES[:-1])} or {MATCHES[-1]}")
    if match == "order":
        pairs = [(a, b, "line by line", "") for a, b in line_by_line(reference, target)]
        return _plan(reference, target, pairs, {})
    pairing = SitePairing(reference, target)
    together = fused or Fused(reference, target)
    for call, partner, evidence in together.pairs:
        site, other = pairing.reference.site_of[call], pairing.target.site_of[partner]
        pairing.pair(site, other, together.rule, evidence)
    exact(pairing)
    if match != "exact":
        normalised(pairing)
        if match == "auto":
            shifted(pairing)
            counted(pairing)
        if not pairing.settled():
            spelt_alike(pairing)
            if match == "auto":
                shifted(pairing)
    if match == "auto" and not pairing.settled():
        nested = (structure, leaves, containers)
        for rule in (
            *nested,
            learn,
            *nested,
            between_partners,
            same_content,
            containers,
            structure,
        ):
            if not pairing.settled():
                rule(pairing)
    return _call_plan(pairing, match, together)


def _call_plan(
    pairing: SitePairing,
    match: str,
    fused: Fused,
) -> Plan:
    """The plan of calls from pairs of sites: calls of paired sites are paired step by step."""
    sites, target_sites = pairing.reference, pairing.target
    pairs: Pairs = {}
    for site, (partner, rule, evidence) in pairing.partners.items():
        moments = target_sites.moments[partner]
        for moment, calls in sites.moments[site].items():
            pairs.update((a, (b, rule, evidence)) for a, b in zip(calls, moments.get(moment, ())))
    ambiguous = realign(pairing, pairs) if match == "auto" else {}
    if match == "auto":
        by_arguments(pairing, pairs)
        if fused.rule == VALUES:
            _keep(pairs, fused)
    back = {b for b, _, _ in pairs.values()}
    ambiguous = _still_open(ambiguous, pairs, back)
    for site, others in pairing.doubtful.items():
        for moment, calls in sites.moments[site].items():
            fit = tuple(
                b for o in others for b in target_sites.moments[o].get(moment, ()) if b not in back
            )
            if fit:
                ambiguous.update((a, fit) for a in calls if a not in pairs)
    call_pairs = [
        (sites.calls[a], target_sites.calls[b], rule, evidence)
        for a, (b, rule, evidence) in pairs.items()
    ]
    return _plan(sites.run, target_sites.run, call_pairs, ambiguous)


def _keep(pairs: Pairs, fused: Fused) -> None:
    """Restore, in place, pairs of calls that carry out the same operators."""
    partner = {a: b for a, b, _ in fused.pairs}
    taken = set(partner.values())
    for a, (b, _, _) in list(pairs.items()):
        if partner.get(a, b) != b or (b in taken and a not in partner):
            del pairs[a]
    pairs.update((a, (b, fused.rule, evidence)) for a, b, evidence in fused.pairs)


def _still_open(
    ambiguous: dict[int, tuple[int, ...]], pairs: Pairs, back: set[int]
) -> dict[int, tuple[int, ...]]:
    """Ambiguous calls that are still unpaired, with those of their candidates that are too."""
    fits = {
        a: tuple(b for b in others if b not in back)
        for a, others in ambiguous.items()
        if a not in pairs
    }
    return {a: others for a, others in fits.items() if others}


def _plan(
    reference: Run,
    target: Run,
    pairs: list[tuple[Call, Call, str, str]],
    ambiguous: dict[int, tuple[int, ...]],
) -> Plan:
    pairs.sort(key=lambda p: p[0].order)
    taken = {a.id for a, *_ in pairs} | ambiguous.keys()
    target_taken = {b.id for _, b, *_ in pairs} | {
        b for others in ambiguous.values() for b in others
    }
    return Plan(
        tuple(pair_of(a, b, rule, reference, target, evidence) for a, b, rule, evidence in pairs),
        tuple(sorted(c.id for c in selected(reference.calls) if c.id not in taken)),
        tuple(sorted(c.id for c in selected(target.calls) if c.id not in target_taken)),
        tuple(sorted(ambiguous.items())),
    )


def pair_of(
    call: Call, partner: Call, rule: str, reference: Run, target: Run, evidence: str | None = None
) -> CallPair:
    """A pair of calls and their tensors. evidence: None for the classes where these differ."""
    slots, only, only_target = (pair_in_order if rule in (RULE, VALUES) else pair_slots)(
        call, partner, reference, target
    )
    if evidence is None:
        evidence = (
            "" if call.op_type == partner.op_type else f"{call.op_type} against {partner.op_type}"
        )
    return CallPair(
        call.id, partner.id, rule, evidence, tuple(slots), tuple(only), tuple(only_target)
    )


# The rule of content: parameters, or outputs, that no other call has.

_CLEARLY = 5.0  # times closer than the next candidate
_LEAST_COUNT = 16


def same_content(pairing: SitePairing) -> None:
    """Pair sites by parameters that no other site has, then by outputs that no other comes near in
    norm, sum of magnitudes and mean.
    """
    free, others = pairing.free()
    if not free or not others:
        return
    a, b = (
        unique_contents(free, pairing.features),
        unique_contents(others, pairing.target_features),
    )
    for content, site in a.items():
        partner = b.get(content)
        if (
            partner is not None
            and pairing.fits(site, partner)
            and pairing.same_parents(site, partner)
        ):
            pairing.pair(site, partner, CONTENT, pairing.why(site, partner))
    _outputs(pairing)


def _outputs(pairing: SitePairing) -> None:
    table: dict[float, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    features = pairing.features, pairing.target_features
    for side, free in enumerate(pairing.free()):
        for s in free:
            count = features[side][s].out_moments[0]
            if count >= _LEAST_COUNT:
                table[count][side].append(s)
    for a, b in table.values():
        if not a or not b or len(a) * len(b) > 1 << 22:
            continue
        moments, across = ([f.out_moments for f in fs.many(s)] for fs, s in zip(features, (a, b)))
        for i, j in nearest_by_far(distance(moments, across), CLOSE_OUTPUT, _CLEARLY):
            site, partner = a[i], b[j]
            if (
                pairing.fits(site, partner)
                and pairing.same_parents(site, partner)
                and pairing.score(site, partner) >= call_sequences.LEAST
            ):
                evidence = (
                    f"output norm {moments[i][1]:.6g} against {across[j][1]:.6g}, the next is "
                    f"{_CLEARLY:.0f} times further or more"
                )
                pairing.pair(site, partner, CONTENT, evidence)


# The rule of data flow: the sites that a site's tensors come from and go to, by records.

_ROUNDS = 8


class Flow:
    """The data flow between the leaf sites of a run, taken from the first call of each site."""

    def __init__(self, sites: Sites) -> None:
        self._producer: dict[int, int] = {}
        self._read: dict[int, list[int]] = {}
        self._sites = sites

        def innermost(site: int) -> tuple[bool, int]:
            order = sites.first[site].order
            return (True, -order) if site in sites.kids else (False, order)

        # The producer is the leaf that computes a tensor, not the calls around it.
        for site in sorted(range(len(sites)), key=innermost):
            for ref in sites.first[site].refs:
                if is_written(ref.slot):
                    self._producer.setdefault(ref.record, site)
                elif is_input(ref.slot) and site not in sites.kids:
                    self._read.setdefault(ref.record, []).append(site)

    def producers(self, site: int) -> tuple[int | None, ...]:
        """The site each input comes from; None for the model's inputs and code between modules."""
        sites = (self._producer.get(r.record) for r in self._sites.first[site].slots("input"))
        return tuple(None if p == site else p for p in sites)

    def consumers(self, site: int) -> list[int]:
        """The leaf sites that read a site's outputs."""
        return [
            c
            for r in self._sites.first[site].slots("output")
            for c in self._read.get(r.record, ())
            if c != site
        ]

    def words(self, site: int, sites: Sites) -> str:
        """The position of a site in the data flow, in words."""
        sources = ", ".join(
            dict.fromkeys(sites.name(p) for p in self.producers(site) if p is not None)
        )
        readers = ", ".join(dict.fromkeys(sites.name(c) for c in self.consumers(site)))
        return f"between partners: after {sources}, before {readers}"


def between_partners(pairing: SitePairing) -> None:
    """Pair sites whose producers and whose consumers are partners."""
    free, others = pairing.free()
    if not free or not others:
        return
    flow, target_flow = Flow(pairing.reference), Flow(pairing.target)
    for _ in range(_ROUNDS):
        free, others = pairing.free()
        partner = {s: p.site for s, p in pairing.partners.items()}
        itself = {o: o for o in pairing.back}
        a = grouped((_place(pairing, pairing.reference, flow, s, partner), s) for s in free)
        b = grouped((_place(pairing, pairing.target, target_flow, o, itself), o) for o in others)
        new = 0
        for place, sites in a.items():
            if len(sites) == 1 and len(b.get(place, ())) == 1:
                site, across = sites[0], b[place][0]
                if pairing.score(site, across) >= call_sequences.OUT:
                    pairing.pair(site, across, FLOW, flow.words(site, pairing.reference))
                    new += 1
        if not new:
            return


def _place(
    pairing: SitePairing, sites: Sites, flow: Flow, site: int, partner: dict[int, int]
) -> Hashable:
    producers = tuple(partner.get(p, -1) if p is not None else None for p in flow.producers(site))
    consumers = frozenset(partner[c] for c in flow.consumers(site) if c in partner)
    has_partner = any(p is not None and p >= 0 for p in producers)
    if not has_partner or -1 in producers or not consumers:
        return None
    return pairing.lane(sites, site), producers, consumers


# The rule of numbers: one call more or less in a list changes the number of every later one.

_MARGIN = 2.0  # by which an alignment must beat shared numbers, per pair it changes


def shifted(pairing: SitePairing) -> None:
    """Pair lists again whose shared numbers contradict their content: one call more or less in a
    list changes the number of every later one.

    This is done only if the lists differ in length, or classes (of operators: types) contradict
    each other, and an alignment in order fits far better. Then the numbers of that list and all
    names below it are ignored. Otherwise lists keep their numbers, since exchanged parameters are a
    fault there.
    """
    for members, others in _numbered(pairing):
        keyed = [
            (s, pairing.partners[s].site)
            for s in members
            if s in pairing.partners and pairing.partners[s].rule in (EXACT, NORMAL, SIMILAR)
        ]
        # not other names for the same, as `mul` is for `matmul`
        shared = _operators(pairing.reference, members) & _operators(pairing.target, others)
        clash = [
            (s, o)
            for s, o in keyed
            if pairing.contradict(s, o) or _other_operator(pairing, s, o, shared)
        ]
        if not keyed or (len(members) == len(others) and not clash):
            continue
        if len(members) * len(others) > 1 << 20:
            continue
        _realign(pairing, members, others, dict(keyed), is_clash=bool(clash))


def _realign(
    pairing: SitePairing,
    members: list[int],
    others: list[int],
    keyed: dict[int, int],
    *,
    is_clash: bool,
) -> None:
    """Pair two lists in order, regardless of their numbers, if that fits far better. keyed: the
    pairs by number; is_clash: whether some of these contradict each other.
    """
    a, b = pairing.features.many(members), pairing.target_features.many(others)
    blind = [f._replace(word=0) for f in a], [f._replace(word=0) for f in b]
    table = call_sequences.scores(*blind, pairing.word)
    aligned = align(table, call_sequences.LEAST)
    row, column = {s: i for i, s in enumerate(members)}, {o: j for j, o in enumerate(others)}
    numbered = {s: o for s, o in keyed.items() if o in column}
    in_order = [(members[i], others[j]) for i, j, _ in aligned.pairs]
    moved = [(s, o) for s, o in in_order if numbered.get(s, -1) != o]
    if not moved:
        return
    # Impossible pairs count against the numbers, but by no more than this.
    worth = sum(max(float(table[row[s], column[o]]), -4.0) for s, o in numbered.items())
    gain = sum(s for _, _, s in aligned.pairs) - worth
    telling = sum(pairing.tells(s, o) for s, o in moved)
    telling -= sum(pairing.tells(s, numbered[s]) for s, _ in moved if s in numbered)
    if gain < _MARGIN * max(len(moved) ** 0.5, 1.0) or (not is_clash and telling < len(moved) / 2):
        return
    stay = numbered.items() & set(in_order)
    for site in members:
        if (site, numbered.get(site)) not in stay:
            for inner in (site, *pairing.reference.below(site)):
                pairing.part(inner)
                pairing.renumbered.add(inner)
    for site, partner in moved:
        evidence = f"the numbers contradict the content: {pairing.why(site, partner)}"
        pairing.pair(site, partner, ORDER, evidence)
        _below(pairing, site, partner)


def _operators(sites: Sites, among: list[int]) -> set[str]:
    return {sites.first[s].op_type for s in among if sites.first[s].kind == "operator"}


def _other_operator(pairing: SitePairing, site: int, partner: int, shared: set[str]) -> bool:
    """Whether these are two different operators that both occur in both lists."""
    a, b = pairing.reference.first[site].op_type, pairing.target.first[partner].op_type
    return a != b and a in shared and b in shared


def _below(pairing: SitePairing, site: int, partner: int) -> None:
    """Pair the calls below two partners by their names relative to them."""
    todo = [(site, partner)]
    while todo:
        a, b = todo.pop()
        by_name = {
            _inside(pairing, pairing.reference, k, a): k
            for k in pairing.reference.kids.get(a, ())
            if k not in pairing.partners
        }
        for o in pairing.target.kids.get(b, ()):
            k = by_name.get(_inside(pairing, pairing.target, o, b))
            if k is not None and k not in pairing.partners and o not in pairing.back:
                evidence = (
                    f"the same name inside {pairing.reference.name(a)} and {pairing.target.name(b)}"
                )
                pairing.pair(
                    k, o, ORDER, "; ".join(filter(None, (evidence, pairing.classes(k, o))))
                )
                todo.append((k, o))


def _inside(pairing: SitePairing, sites: Sites, site: int, parent: int) -> Hashable:
    """A site's name inside its parent."""
    key, above = sites.keys[site], sites.keys[parent].scope
    scope = (
        key.scope[len(above) + 1 :] if above and key.scope.startswith(f"{above}.") else key.scope
    )
    return pairing.lane(sites, site), normal_scope(scope), key.op, key.occurrence


def _numbered(pairing: SitePairing) -> list[tuple[list[int], list[int]]]:
    """Lists of siblings that differ by a number, below paired parents: layers.0, layers.1, ..."""
    out = []
    for site, partner in pairing.parents():
        kids, others = pairing.reference.kids.get(site, ()), pairing.target.kids.get(partner, ())
        if not kids or not others or (len(kids) == 1 and len(others) == 1):
            continue
        lists, target_lists = (
            grouped((_list(pairing, sites, k), k) for k in members)
            for sites, members in ((pairing.reference, kids), (pairing.target, others))
        )
        for name, members in lists.items():
            across = Counter(
                _list(pairing, pairing.target, pairing.partners[k].site)
                for k in members
                if k in pairing.partners
            )
            target_members = target_lists.get(across.most_common(1)[0][0] if across else name, ())
            if target_members and len(members) + len(target_members) > 2:
                out.append((members, target_members))
    return out


def _list(pairing: SitePairing, sites: Sites, site: int) -> Hashable:
    """What the siblings in one numbered list have in common."""
    key = sites.keys[site]
    return pairing.lane(sites, site), starred(normal_scope(key.scope)), key.op, key.occurrence


# One module called several times in a step with other arguments, in another order in the other
# run: its calls are paired by their arguments.
#
# A program may loop over a set (of layer types, of names), whose order changes from process to
# process. Such calls are paired by occurrence first, which sets calls with different arguments
# against each other.

EVIDENCE = "same arguments, called in another order"


class _Group(NamedTuple):
    """The key of all calls of one module that one parent call makes."""

    name: SiteKey
    moment: tuple[int, int]
    parent: int


def by_arguments(pairing: SitePairing, pairs: Pairs) -> None:
    """Correct pairs (call of the reference -> call of the target, rule, evidence) in place.

    Calls are paired again by their arguments only if both sides pass the same arguments equally
    often and the order of the calls cannot matter: all calls read the same tensors, or each reads
    bitwise the tensors of its new partner. Otherwise the order decides, and an argument that
    differs remains a difference.
    """
    reference, target = pairing.reference, pairing.target
    groups = _groups(reference)
    if not groups:
        return
    target_groups = _groups(target)
    group_of = {call: group for group, calls in target_groups.items() for call in calls}
    below = _Below(pairing)
    # a call comes before the calls below it, whose pairs it may change
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
    """Groups of selected calls in which one parent calls one module several times."""
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
    """The pairs by argument that differ from the pairs by order."""
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
    by_argument = [(call, free[values].pop(0)) for call, values in zip(calls, by_call[0])]
    if not _order_is_free(pairing, by_argument):
        return []
    return [pair for pair, partner in zip(by_argument, partners) if pair[1] != partner]


def _distinguishing(calls: Sequence[Call], others: Sequence[Call]) -> list[str]:
    """Names of arguments that distinguish calls and whose values, in any order, are the same on
    both sides.
    """
    out = []
    for name in dict.fromkeys(name for call in calls for name in call.arguments):
        values, values_across = (
            Counter(_values(c, [name]) for c in side) for side in (calls, others)
        )
        if len(values) > 1 and values == values_across:
            out.append(name)
    return out


def _values(call: Call, names: Iterable[str]) -> tuple[str, ...]:
    """The values as text, which distinguishes 1 from True; "" for a tensor or no argument."""
    return tuple(repr(call.arguments[n]) if n in call.arguments else "" for n in names)


def _order_is_free(pairing: SitePairing, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether the order of a group's calls cannot matter: all read the same tensors, or each reads
    bitwise the same tensors as its new partner.
    """
    read = [_inputs(pairing.reference, a) for a, _ in pairs]
    read_across = [_inputs(pairing.target, b) for _, b in pairs]
    if len(set(read)) == 1 and len(set(read_across)) == 1:
        return True
    return read == read_across and all(digest for call in read for _, digest, *_ in call)


def _inputs(sites: Sites, call: int) -> tuple[tuple[Hashable, ...], ...]:
    """(slot, content) of a call's inputs; the content is the record's id if it has no hash."""
    out = []
    for ref in sites.calls[call].slots("input"):
        record = sites.run.records[ref.record]
        content = (record.dtype, record.shape) if record.hash else (record.id,)
        out.append((ref.slot, record.hash, *content))
    return tuple(out)


class _Below:
    """Pairs the calls below calls that were paired again, since they follow these."""

    def __init__(self, pairing: SitePairing) -> None:
        self._pairing = pairing

    @cached_property
    def _kids(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        return children(self._pairing.reference.calls), children(self._pairing.target.calls)

    @cached_property
    def _name_across(self) -> dict[SiteKey, SiteKey]:
        """By name in the reference (without occurrence), the name with which most of its sites are
        paired.
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
        """Pair the calls below two calls: the k-th of a name with the k-th of the target's name."""
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


# Rules of names: equal keys, other spellings, names that are alike at one place of the tree.

_ALIKE = 0.8  # of two components of a name


def exact(pairing: SitePairing) -> None:
    """Pair sites whose keys are equal in every part."""
    for site, key in enumerate(pairing.reference.keys):
        partner = pairing.target.number.get(key)
        if partner is not None and site not in pairing.partners and partner not in pairing.back:
            pairing.pair(site, partner, EXACT, pairing.classes(site, partner))


def normalised(pairing: SitePairing) -> None:
    """Names equal without wrappers and index styles, then with any separators; roots by class or as
    the only ones.
    """
    for spelt in (normal_scope, any_separators):
        free, others = pairing.free()
        if not free or not others:
            return
        roots = match_roots(pairing.reference.keys, pairing.target.keys)
        table: dict[Hashable, list[int]] = defaultdict(list)
        for partner in others:
            table[_normal(pairing, pairing.target, partner, {}, spelt)].append(partner)
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for site in free:
            groups[_normal(pairing, pairing.reference, site, roots, spelt)].append(site)
        for name, sites in groups.items():
            matched, doubtful = _pair_namesakes(pairing, sites, table.get(name, []))
            for site, partner in matched:
                pairing.pair(site, partner, NORMAL, pairing.classes(site, partner))
            if spelt is normal_scope:
                pairing.doubtful.update(doubtful)


def _normal(
    pairing: SitePairing,
    sites: Sites,
    site: int,
    roots: dict[str, str],
    spelt: Callable[[str], str],
) -> Hashable:
    key = sites.keys[site]
    return (
        pairing.lane(sites, site),
        roots.get(key.root, key.root),
        spelt(key.scope),
        key.op,
        key.occurrence,
    )


def _pair_namesakes(
    pairing: SitePairing, sites: Sequence[int], others: Sequence[int]
) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
    """Pair the sites that share one normalised name: (pairs, doubtful).

    A wrapper and what it wraps normalise to one name: wrappers are paired with wrappers, and only
    classes that agree decide between several.
    """
    if not others:
        return [], {}
    if len(sites) == 1 and len(others) == 1:
        return [(sites[0], others[0])], {}
    kinds = {s: pairing.reference.first[s].op_type for s in sites}
    target_kinds = {o: pairing.target.first[o].op_type for o in others}
    pairs: list[tuple[int, int]] = []
    free, unpaired = list(others), []
    for site in sites:
        of_kind = [o for o in free if target_kinds[o] == kinds[site]]
        if len(of_kind) == 1:
            pairs.append((site, of_kind[0]))
            free.remove(of_kind[0])
        else:
            unpaired.append(site)
    plain = [s for s in unpaired if kinds[s] not in WRAPPER_CLASSES]
    plain_free = [o for o in free if target_kinds[o] not in WRAPPER_CLASSES]
    if len(plain) == 1 and len(plain_free) == 1:
        pairs.append((plain[0], plain_free[0]))
        unpaired.remove(plain[0])
        free.remove(plain_free[0])
    return pairs, dict.fromkeys(unpaired, free) if free else {}


def spelt_alike(pairing: SitePairing) -> None:
    """Equal without classes inside the names and without a prefix; then a typo or a word more in
    one component.

    The names of either side form a tree; equal components are paired, then what is left at one
    place and is alike.
    """
    free, others = pairing.free()
    if not free or not others:
        return
    roots = match_roots(pairing.reference.keys, pairing.target.keys)
    trees = _tree(pairing, pairing.reference, roots)
    target_trees = _tree(pairing, pairing.target, {})
    for root in list(trees):
        if root in target_trees:
            cut, target_cut = _prefixes(trees[root], target_trees[root])
            if cut or target_cut:
                how = (
                    f"{'.'.join(cut) or 'no prefix'} against {'.'.join(target_cut) or 'no prefix'}"
                )
                _walk(
                    pairing, _under(trees[root], cut), _under(target_trees[root], target_cut), how
                )
            _walk(pairing, trees[root], target_trees[root])


def _tree(pairing: SitePairing, sites: Sites, roots: dict[str, str]) -> dict[Hashable, _Node]:
    out: dict[Hashable, _Node] = {}
    for site, key in enumerate(sites.keys):
        node = out.setdefault((pairing.lane(sites, site), roots.get(key.root, key.root)), _Node())
        for part in (
            *plain_scope(key.scope, sites.first[site].op_type),
            *((key.op,) if key.op else ()),
        ):
            node = node.below.setdefault(part, _Node())
        node.sites.setdefault(key.occurrence, []).append(site)
    return out


def _walk(pairing: SitePairing, tree: _Node, target_tree: _Node, how: str = "") -> None:
    todo = [(tree, target_tree, True, how)]
    while todo:
        a, b, plain, how = todo.pop()
        for occurrence in a.sites.keys() & b.sites.keys():
            sites = [
                s
                for s in a.sites[occurrence]
                if s not in pairing.partners and s not in pairing.renumbered
            ]
            others = [o for o in b.sites[occurrence] if o not in pairing.back]
            if len(sites) == 1 and len(others) == 1 and not pairing.contradict(sites[0], others[0]):
                classes = pairing.classes(sites[0], others[0])
                pairing.pair(
                    sites[0],
                    others[0],
                    NORMAL if plain else SIMILAR,
                    "; ".join(filter(None, (how, classes))),
                )
        todo += [(a.below[p], b.below[p], plain, how) for p in a.below.keys() & b.below.keys()]
        for part, spelling in _similar(
            [p for p in a.below if p not in b.below], [p for p in b.below if p not in a.below]
        ):
            words = f"{part} is spelt {spelling}"
            todo.append(
                (a.below[part], b.below[spelling], False, f"{how}, {words}" if how else words)
            )


class _Node:
    """A place in the tree of names: the sites of that name by occurrence, and what is below."""

    def __init__(self) -> None:
        self.sites: dict[int, list[int]] = {}
        self.below: dict[str, _Node] = {}


def _similar(names: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Components that are alike and have no other that is as much so."""
    if not names or not others or len(names) * len(others) > 10_000:
        return []
    table = np.array([[likeness(a, b) for b in others] for a in names])
    out = []
    for i, a in enumerate(names):
        j = int(table[i].argmax())
        best = table[i, j]
        if best >= _ALIKE and (table[i] == best).sum() == 1 and (table[:, j] >= best).sum() == 1:
            out.append((a, others[j]))
    return out


def _prefixes(tree: _Node, target_tree: _Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leading components of one side (`model.`): cut where more names below agree then."""
    ways = {
        (x, y): _agreeing(_under(tree, x), _under(target_tree, y))
        for x in _leading(tree)
        for y in _leading(target_tree)
    }
    best = max(ways, key=lambda w: (ways[w], -len(w[0]) - len(w[1])))
    return best if ways[best] > max(2 * ways[(), ()], 2) else ((), ())


def _leading(node: _Node) -> list[tuple[str, ...]]:
    single = [(part,) for part, n in node.below.items() if n.below and not part.isdigit()][:8]
    return [
        (),
        *single,
        *(
            (a, b)
            for (a,) in single
            for b, n in node.below[a].below.items()
            if n.below and not b.isdigit()
        ),
    ][:32]


def _under(node: _Node, path: Iterable[str]) -> _Node:
    for part in path:
        node = node.below[part]
    return node


def _agreeing(a: _Node, b: _Node) -> int:
    """How many names that are no numbers both have at the same place below."""
    n, todo = 0, [(a, b)]
    while todo:
        x, y = todo.pop()
        shared = x.below.keys() & y.below.keys()
        n += sum(bool(x.below[p].sites and y.below[p].sites) for p in shared if not p.isdigit())
        todo += [(x.below[p], y.below[p]) for p in shared]
    return n


# Rules of structure: what paired calls call, in the order in which it ran; calls that hold the
# same.

_NEAR_OUTPUT = 0.1
_NEAR_MOMENTS = 1e-3  # what rounding to 16 bits makes of norm and sum of magnitudes
_BY_FAR = 10.0
_CROSSINGS = 200


def structure(pairing: SitePairing) -> None:
    """Pair children of paired parents in the order in which they ran, from the roots down."""
    todo = pairing.parents()
    while todo:
        site, partner = todo.pop()
        new = _children(
            pairing, pairing.reference.kids.get(site, ()), pairing.target.kids.get(partner, ())
        )
        todo += [(s, pairing.partners[s].site) for s in new]


def _children(pairing: SitePairing, kids: Sequence[int], others: Sequence[int]) -> list[int]:
    if all(k in pairing.partners for k in kids) or all(o in pairing.back for o in others):
        return []
    new: list[int] = []
    for members, others_of_lane in pairing.by_lane(kids, others):
        new += _parallel(pairing, members, others_of_lane)
        new += _between(pairing, members, others_of_lane, ORDER)
    return new


def _parallel(pairing: SitePairing, kids: Sequence[int], others: Sequence[int]) -> list[int]:
    """Pair siblings that read the same tensors, and so run in any order, by their parameters."""
    free = [k for k in kids if k not in pairing.partners]
    free_across = [o for o in others if o not in pairing.back]
    if len(free) > _CROSSINGS or len(free_across) > _CROSSINGS:
        return []
    features, across = pairing.features, pairing.target_features
    a, b = unique_contents(free, features), unique_contents(free_across, across)
    row, column = {k: i for i, k in enumerate(free)}, {o: j for j, o in enumerate(free_across)}
    equal = [(row[s], column[b[c]]) for c, s in a.items() if c in b]
    nearest = _nearest(features.many(free), across.many(free_across), equal)
    matches = [(free[i], free_across[j]) for i, j in sorted({*equal, *nearest})]
    crossing = [
        (p, q)
        for k, p in enumerate(matches)
        for q in matches[k + 1 :]
        if column[q[1]] < column[p[1]]
    ]
    if not crossing or not all(
        features.inputs(p[0]) == features.inputs(q[0]) != ()
        and across.inputs(p[1]) == across.inputs(q[1])
        for p, q in crossing
    ):
        return []
    involved = dict.fromkeys(p for crossed in crossing for p in crossed)
    for site, partner in involved:
        evidence = f"{pairing.why(site, partner)}; run in another order"
        pairing.pair(site, partner, CONTENT, evidence)
    return [site for site, _ in involved]


def _nearest(
    features: Sequence[Feature], across: Sequence[Feature], equal: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Positions of parameters that are nearest by far: in another dtype no two are equal."""
    rows = [i for i in range(len(features)) if i not in {p for p, _ in equal}]
    columns = [j for j in range(len(across)) if j not in {p for _, p in equal}]
    if not rows or not columns:
        return []
    distances = distance([features[i].moments for i in rows], [across[j].moments for j in columns])
    shapes = [[features[i].shapes == across[j].shapes for j in columns] for i in rows]
    distances = np.where(shapes, distances, np.inf)
    pairs = nearest_by_far(distances, _NEAR_MOMENTS, _BY_FAR)
    return [(rows[x], columns[y]) for x, y in pairs]


def _between(
    pairing: SitePairing, sites: Sequence[int], others: Sequence[int], rule: str
) -> list[int]:
    """Align the sites between those that are already paired in order; returns new pairs' sites."""
    partners = pairing.partners
    to = {o: j for j, o in enumerate(others)}
    sites_across = ((i, partners[k].site) for i, k in enumerate(sites) if k in partners)
    paired = [(i, to[o]) for i, o in sites_across if o in to]
    new: list[int] = []
    named = pairing.shared_names is not None
    i0 = j0 = 0
    for i, j in [*longest_increasing(paired), (len(sites), len(others))]:
        a = [k for k in sites[i0:i] if k not in pairing.partners]
        b = [o for o in others[j0:j] if o not in pairing.back]
        if a and b:
            aligned = call_sequences.sequence(
                _translated(pairing, a), pairing.target_features.many(b), pairing.word, named=named
            )
            for x, y, _ in aligned.pairs:
                if not (named and _elsewhere(pairing, a[x], b[y])):
                    pairing.pair(a[x], b[y], rule, pairing.why(a[x], b[y]))
                    new.append(a[x])
            for x, ys in aligned.doubtful:
                pairing.doubtful[a[x]] = [b[y] for y in ys]
            nothing = not aligned.pairs and not aligned.doubtful
            if nothing and not named and _same_forms(pairing, a, b):
                for x, y in zip(a, b):
                    words = filter(None, (pairing.why(x, y), "nothing else between partners"))
                    pairing.pair(x, y, rule, ", ".join(words))
                new += a
        i0, j0 = i + 1, j + 1
    return new


def _elsewhere(pairing: SitePairing, site: int, partner: int) -> bool:
    """Whether other layers pair one of these names with itself, which means that this site has no
    counterpart.
    """
    reference, target = pairing.reference, pairing.target
    names = {starred(reference.keys[site].scope), starred(target.keys[partner].scope)}
    alike = likeness(reference.word(site), target.word(partner)) >= 0.5
    if len(names) == 1 or alike or pairing.tells(site, partner):
        return False
    return not names.isdisjoint(pairing.shared_names or ())


def _same_forms(pairing: SitePairing, sites: Sequence[int], others: Sequence[int]) -> bool:
    """Whether both lists have equally many calls with pairwise equal shapes and, if there are
    several, similar outputs.
    """
    if len(sites) != len(others):
        return False
    for x, y in zip(sites, others):
        a, b = pairing.features[x], pairing.target_features[y]
        if not (
            a.out == b.out != 0
            and a.shapes == b.shapes
            and a.container == b.container
            and pairing.fits(x, y)
        ):
            return False
        if len(sites) > 1 and distance([a.out_moments], [b.out_moments])[0, 0] > _NEAR_OUTPUT:
            return False
    return True


def _translated(pairing: SitePairing, sites: Sequence[int]) -> list[Feature]:
    """Features with the target's classes in place of the reference's."""
    classes = pairing.classes_across
    return [f._replace(kind=classes.get(f.kind, f.kind)) for f in pairing.features.many(sites)]


def learn(pairing: SitePairing) -> None:
    """Learn from the pairs so far which class of the target corresponds to which class of the
    reference.
    """
    across: dict[int, set[int]] = defaultdict(set)
    for site, partner in pairing.partners.items():
        a, b = pairing.features[site].kind, pairing.target_features[partner.site].kind
        if a and b:
            across[a].add(b)
    pairing.classes_across = {a: next(iter(b)) for a, b in across.items() if len(b) == 1}


def leaves(pairing: SitePairing) -> None:
    """Pair leaf calls in the order in which they ran, for modules that are nested differently."""
    free, others = pairing.free()
    if not free or not others:
        return
    for sites, across in pairing.by_lane(pairing.reference.leaves(), pairing.target.leaves()):
        _between(pairing, sites, across, ORDER)


def containers(pairing: SitePairing) -> None:
    """Pair modules with those that contain most partners of their leaves and few other leaves. A
    pair by order alone gives way to one that contains more: what holds a layer is not the layer.
    """

    def may_move(site: int) -> bool:
        partner = pairing.partners.get(site)
        return partner is None or partner.rule == ORDER

    weights, across = _weights(pairing.reference), _weights(pairing.target)
    common: dict[int, Counter[int]] = defaultdict(Counter)
    for site, partner in pairing.partners.items():
        if site in pairing.reference.kids:
            continue
        above = _above(pairing.target, partner.site)
        for ancestor in _above(pairing.reference, site):
            if may_move(ancestor):
                common[ancestor].update(above)
    for site in sorted(common, key=lambda s: weights[s]):
        by_order = pairing.partners.get(site)
        candidates = [
            (2 * n / (weights[site] + across[o]), o)
            for o, n in common[site].items()
            if pairing.back.get(o, site) == site
            and pairing.lane(pairing.reference, site) == pairing.lane(pairing.target, o)
            and not pairing.contradict(site, o)
        ]
        if not candidates or (best := max(candidates)[0]) < 0.5:
            continue
        top = [o for share, o in candidates if share == best]
        if by_order is not None and by_order.site in top:
            continue
        if len(top) > 1:  # a chain of modules with one child each
            scores = [pairing.score(site, o) for o in top]
            top = [o for o, s in zip(top, scores) if s == max(scores)]
        if len(top) == 1:
            pairing.part(site)
            pairing.pair(site, top[0], ORDER, f"{best:.0%} of the calls below them are paired")


def _above(sites: Sites, site: int) -> list[int]:
    out = []
    while (site := sites.parent[site]) >= 0:
        out.append(site)
    return out


def _weights(sites: Sites) -> list[int]:
    """The number of leaves below each site."""
    out = [0] * len(sites)
    for site in range(len(sites)):
        if site not in sites.kids:
            for ancestor in _above(sites, site):
                out[ancestor] += 1
    return out
