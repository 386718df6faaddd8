"""Keeps a page of any number of calls small: which stand on it, and what it says of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from whence.results import VerdictKind
from whence.results.page import Page, PageCall, PageUnpaired

MOST_CALLS = 20_000
_QUIET = (VerdictKind.IDENTICAL, VerdictKind.NOISE, VerdictKind.INHERITED)


def limited(page: Page, most: int = MOST_CALLS) -> Page:
    """The page with at most about so many calls: those around what differs, the worst first, and
    those that are looked at closely, then the others in the order of execution, each with the calls
    around it. `missing` says how many are left out, and which command shows them.
    """
    calls = page.calls
    if len(calls) <= most:
        return page
    kept: set[int] = set()
    for place in _ranked(page):
        if len(kept) >= most:
            break
        while place >= 0 and place not in kept:
            kept.add(place)
            place = calls[place].parent
    order = sorted(kept)
    new = {old: number for number, old in enumerate(order)}
    loud = sum(call.verdict not in _QUIET for k, call in enumerate(calls) if k not in kept)
    return msgspec.structs.replace(
        page,
        calls=tuple(_moved(calls[old], new) for old in order),
        details=tuple(
            msgspec.structs.replace(detail, call=new[detail.call])
            for detail in page.details
            if detail.call in new
        ),
        unpaired=tuple(_moved_unpaired(call, new) for call in page.unpaired),
        missing=(*page.missing, _sentence(page, len(calls) - len(order), loud)),
    )


def _sentence(page: Page, left_out: int, loud: int) -> str:
    what = "all of them equal, noise or inherited" if not loud else f"{loud} of them beyond noise"
    return (
        f"{left_out} of {len(page.calls)} calls are not on this page, {what}; all of them: whence "
        f'query {page.folder or "CMP"} "select * from calls", and tensors: "select * from pairs"'
    )


def _ranked(page: Page) -> Iterable[int]:
    """Places of calls, the most telling first."""
    calls = page.calls
    loud = [k for k, call in enumerate(calls) if call.verdict not in _QUIET]
    loud.sort(key=lambda k: (-VerdictKind(calls[k].verdict).severity, -(calls[k].score or 0.0), k))
    findings = {finding.pair for finding in page.comparison.findings}
    first = [k for k, call in enumerate(calls) if call.pair in findings]
    return [*first, *(detail.call for detail in page.details), *loud, *range(len(calls))]


def _moved(call: PageCall, new: Mapping[int, int]) -> PageCall:
    return msgspec.structs.replace(
        call,
        parent=new.get(call.parent, -1),
        reads=tuple(new[place] for place in call.reads if place in new),
    )


def _moved_unpaired(call: PageUnpaired, new: Mapping[int, int]) -> PageUnpaired:
    def places(old: Iterable[int]) -> tuple[int, ...]:
        return tuple(new.get(place, place) for place in old if place < 0 or place in new)

    return msgspec.structs.replace(
        call,
        parent=new.get(call.parent, -1),
        after=new.get(call.after, -1),
        reads=places(call.reads),
        readers=places(call.readers),
    )
