"""Reports on a terminal how a kernel behaved under fuzzing."""

from __future__ import annotations

from whence.report.document import Document, answering
from whence.report.tables import count
from whence.results import Fuzzed, KernelFault, Status

_HEADS = {
    Status.SAME: ("SOUND", "no case is off by more than rounding"),
    Status.UNDECIDED: ("CANNOT TELL", "no case was judged: the reference takes none of them"),
}


@answering
def fuzzed_text(result: Fuzzed) -> Document:
    """The answer as text."""
    if result.status in _HEADS:
        yield _HEADS[result.status]
    for fault in result.faults:
        yield from _fault(fault)
    skipped = f", {result.skipped} that the reference does not take" if result.skipped else ""
    yield "  cases", f"{count(result.cases, 'case')} judged{skipped}"
    if result.refused:
        yield "  refused", f"{count(result.refused, 'case')}, the first {result.refusal}"
    if result.not_repeated:
        words = f"{count(result.not_repeated, 'case')} gave other bits in a second call"
        yield "  repeats", f"{words}, within rounding"
    yield from (f"note: {note}" for note in result.notes)


def _fault(fault: KernelFault) -> Document:
    yield "FAULT", f"{fault.kind}: {fault.words}"
    yield "  smallest", fault.case
    yield "  first", f"{fault.first}; so in {count(fault.cases, 'case')}"
    if fault.got is not None and fault.exact is not None:
        at = f"[{', '.join(map(str, fault.index))}]" if fault.index else ""
        name = " ".join(part for part in (fault.output, at) if part) or "the result"
        yield "  there", f"{name} is {fault.got:.9g}, exactly {fault.exact:.9g}"
    yield "  test", fault.test
