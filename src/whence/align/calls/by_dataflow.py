"""The rule of data flow: the sites that a site's tensors come from and go to, by records."""

from __future__ import annotations

from collections.abc import Hashable

from whence.align.call_sites import Sites
from whence.align.calls import call_sequences
from whence.align.calls.site_pairing import FLOW, SitePairing, grouped
from whence.records.slots import is_input, is_written

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
