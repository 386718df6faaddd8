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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from whence.align.call_sites import MATCHES, SiteKey, Sites, selected
from whence.align.calls import call_sequences
from whence.align.calls.by_name import exact, normalised, spelt_alike
from whence.align.calls.by_order import Pairs, counted, line_by_line, realign
from whence.align.calls.by_structure import containers, learn, leaves, structure
from whence.align.calls.fingerprints import distance, nearest_by_far
from whence.align.calls.fused_operators import RULE, VALUES, Fused
from whence.align.calls.sequence_alignment import align
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
from whence.align.module_names import normal_scope, starred
from whence.errors import UsageError
from whence.records import Call, Run, children
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_written
from whence.results import CallPair, Plan


def plan(reference: Run, target: Run, match: str = "auto", fused: Fused | None = None) -> Plan:
    """Pair two runs. Every selected call of either side ends up in exactly one of pairs, unmatched,
    ambiguous.

    fused: calls that carry out the same operators; their sites are paired before any rule is
    asked. match: "auto" all rules; "exact" equal keys only; "names" these, and
    names that differ in spelling; "order" the k-th call is paired with the k-th, which is refused
    unless both have as many and every line agrees in kind and output shapes. Raises UsageError:
    another word for `match`; a line that disagrees.
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
    """From sites back to calls: partners are paired step by step."""
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
    """Calls that carry out the same operators stay partners, whatever order says."""
    partner = {a: b for a, b, _ in fused.pairs}
    taken = set(partner.values())
    for a, (b, _, _) in list(pairs.items()):
        if partner.get(a, b) != b or (b in taken and a not in partner):
            del pairs[a]
    pairs.update((a, (b, fused.rule, evidence)) for a, b, evidence in fused.pairs)


def _still_open(
    ambiguous: dict[int, tuple[int, ...]], pairs: Pairs, back: set[int]
) -> dict[int, tuple[int, ...]]:
    """Ambiguous calls that have no partner by now, with the calls that no other one has."""
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
    """The data flow among the leaves of a run's sites, from the first call of each."""

    def __init__(self, sites: Sites) -> None:
        self._producer: dict[int, int] = {}
        self._read: dict[int, list[int]] = {}
        self._sites = sites

        def innermost(site: int) -> tuple[bool, int]:
            order = sites.first[site].order
            return (True, -order) if site in sites.kids else (False, order)

        # A leaf made it, not the calls around it that hand it on.
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
        """The leaves that read what it makes."""
        return [
            c
            for r in self._sites.first[site].slots("output")
            for c in self._read.get(r.record, ())
            if c != site
        ]

    def words(self, site: int, sites: Sites) -> str:
        """Where it stands, in words."""
        sources = ", ".join(
            dict.fromkeys(sites.name(p) for p in self.producers(site) if p is not None)
        )
        readers = ", ".join(dict.fromkeys(sites.name(c) for c in self.consumers(site)))
        return f"between partners: after {sources}, before {readers}"


def between_partners(pairing: SitePairing) -> None:
    """Pair sites that read what partners make and make what partners read."""
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
    """Pair again lists whose shared numbers contradict their content: one call more or less in a
    list changes the number of every later one.

    Only where the lists differ in length or classes (of operators: types) contradict each other,
    and an alignment in order fits far better: then the numbers of that list, and all names below,
    are given up. Lists of one length keep their numbers: there, exchanged parameters are a fault.
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
    """Pair two lists in order, whatever their numbers, where that fits far better. keyed: the pairs
    by number; is_clash: do some of them contradict each other?
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
    # Pairs that cannot be count against the numbers, but no more than this.
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
    """Are these two different operators, each of which the other's list has as well?"""
    a, b = pairing.reference.first[site].op_type, pairing.target.first[partner].op_type
    return a != b and a in shared and b in shared


def _below(pairing: SitePairing, site: int, partner: int) -> None:
    """Pair what two partners call by its name inside them."""
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
