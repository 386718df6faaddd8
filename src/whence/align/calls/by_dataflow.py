"""The rule of data flow: which site a site's tensors come from and go to, by the records they
share.
"""

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
        self._made: dict[int, int] = {}
        self._read: dict[int, list[int]] = {}
        self._sites = sites

        def innermost(site: int) -> tuple[bool, int]:
            order = sites.first[site].order
            return (True, -order) if site in sites.kids else (False, order)

        # A leaf made it, not the calls around it that hand it on.
        for site in sorted(range(len(sites)), key=innermost):
            for ref in sites.first[site].refs:
                if is_written(ref.slot):
                    self._made.setdefault(ref.record, site)
                elif is_input(ref.slot) and site not in sites.kids:
                    self._read.setdefault(ref.record, []).append(site)

    def producers(self, site: int) -> tuple[int | None, ...]:
        """By input in order: the site it comes from; None for what nobody made (an input of the
        model, code between modules).
        """
        found = (self._made.get(r.record) for r in self._sites.first[site].slots("input"))
        return tuple(None if p == site else p for p in found)

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
        before = ", ".join(
            dict.fromkeys(sites.name(p) for p in self.producers(site) if p is not None)
        )
        after = ", ".join(dict.fromkeys(sites.name(c) for c in self.consumers(site)))
        return f"between partners: after {before}, before {after}"


def between_partners(at: SitePairing) -> None:
    """A site between paired sites: what it reads comes from partners, what it makes goes to
    partners.
    """
    mine, theirs = at.free()
    if not mine or not theirs:
        return
    ours, others = Flow(at.left), Flow(at.right)
    for _ in range(_ROUNDS):
        mine, theirs = at.free()
        partner, itself = {s: f.other for s, f in at.face.items()}, {o: o for o in at.back}
        a = grouped((_place(at, at.left, ours, s, partner), s) for s in mine)
        b = grouped((_place(at, at.right, others, o, itself), o) for o in theirs)
        new = 0
        for place, sites in a.items():
            if len(sites) == 1 and len(b.get(place, ())) == 1:
                site, other = sites[0], b[place][0]
                if (
                    call_sequences.scores([at.ours[site]], [at.theirs[other]], at.word)[0, 0]
                    >= call_sequences.OUT
                ):
                    at.pair(site, other, FLOW, ours.words(site, at.left))
                    new += 1
        if not new:
            return


def _place(
    at: SitePairing, sites: Sites, flow: Flow, site: int, partner: dict[int, int]
) -> Hashable:
    producers = tuple(partner.get(p, -1) if p is not None else None for p in flow.producers(site))
    consumers = frozenset(partner[c] for c in flow.consumers(site) if c in partner)
    known = any(p is not None and p >= 0 for p in producers)
    if not known or -1 in producers or not consumers:
        return None
    return at.lane(sites, site), producers, consumers
