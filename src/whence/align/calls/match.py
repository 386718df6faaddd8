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

from whence.align.call_sites import MATCHES, selected
from whence.align.calls.by_arguments import by_arguments
from whence.align.calls.by_content import same_content
from whence.align.calls.by_dataflow import between_partners
from whence.align.calls.by_index import shifted
from whence.align.calls.by_name import exact, normalised, spelt_alike
from whence.align.calls.by_order import Pairs, counted, line_by_line, realign
from whence.align.calls.by_structure import containers, learn, leaves, structure
from whence.align.calls.fused_operators import RULE, VALUES, Fused
from whence.align.calls.site_pairing import SitePairing
from whence.align.calls.tensor_slots import pair_in_order, pair_slots
from whence.errors import UsageError
from whence.records import Call, Run
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
