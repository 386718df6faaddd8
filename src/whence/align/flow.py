"""Which site a site's tensors come from and go to, by the records they share."""

from __future__ import annotations

from whence.align.sites import Sites


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
                if ref.slot.startswith(("output", "mutated")):
                    self._made.setdefault(ref.record, site)
                elif ref.slot.startswith("input") and site not in sites.kids:
                    self._read.setdefault(ref.record, []).append(site)

    def producers(self, site: int) -> tuple[int | None, ...]:
        """By input in order: the site it comes from; None for what nobody made (an input of the model, code between modules)."""
        found = (self._made.get(r.record) for r in self._sites.first[site].slots("input"))
        return tuple(None if p == site else p for p in found)

    def consumers(self, site: int) -> list[int]:
        """The leaves that read what it makes."""
        return [c for r in self._sites.first[site].slots("output") for c in self._read.get(r.record, ()) if c != site]

    def words(self, site: int, sites: Sites) -> str:
        """Where it stands, in words."""
        before = ", ".join(dict.fromkeys(sites.name(p) for p in self.producers(site) if p is not None))
        after = ", ".join(dict.fromkeys(sites.name(c) for c in self.consumers(site)))
        return f"between partners: after {before}, before {after}"
