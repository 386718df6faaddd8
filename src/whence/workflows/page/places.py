"""Where each finding stands: in the user's code, and in the programs of both runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from whence import align
from whence.comparison.replays.program_difference import source_line
from whence.comparison.verdicts import source_lines
from whence.records import Call, Run, children
from whence.results import Comparison, Finding
from whence.results.page import PageExcerpt, PageOperators, PagePlace
from whence.workflows.page import operators
from whence.workflows.page.excerpts import excerpt
from whence.workflows.page.operators import Listed

_MOST = 30  # findings


def page_places(compared: Comparison, aligned: align.Aligned) -> tuple[PagePlace, ...]:
    """Of the first findings, in their order."""
    return _Places(compared, aligned).listed()


class _Places:
    """Looks up code and programs of findings."""

    def __init__(self, compared: Comparison, aligned: align.Aligned) -> None:
        self.compared, self.aligned = compared, aligned
        self.below = children(aligned.reference.calls)
        self.target_below = children(aligned.target.calls)

    def listed(self) -> tuple[PagePlace, ...]:
        return tuple(self._place(finding) for finding in self.compared.findings[:_MOST])

    def _place(self, finding: Finding) -> PagePlace:
        if not 0 <= finding.pair < len(self.aligned.plan.pairs):
            return PagePlace()
        pair = self.aligned.plan.pairs[finding.pair]
        reference = _call(self.aligned.reference, pair.reference)
        target = _call(self.aligned.target, pair.target)
        program = _program(self.aligned.reference, reference, self.below)
        of_target = _program(self.aligned.target, target, self.target_below)
        rows: tuple[PageOperators, ...] = ()
        if program is not None and of_target is not None:
            with contextlib.suppress(LookupError, TypeError, ValueError):  # of a run by hand
                rows = operators.side_by_side(program, of_target)
        return PagePlace(
            tuple(self._excerpts(finding, reference, target, (program, of_target))),
            rows,
            bool(rows) and not any(row.mark not in ("", "left out") for row in rows),
        )

    def _excerpts(
        self,
        finding: Finding,
        reference: Call | None,
        target: Call | None,
        programs: tuple[Listed | None, Listed | None],
    ) -> Iterator[PageExcerpt]:
        """Of the target where it is known; of the reference where its lines are others."""
        sources = {"reference": "", "target": "", finding.side: finding.source}
        if reference is not None and not sources["reference"]:
            sources["reference"] = self._line_of_reference(reference, programs)
        if target is not None and not sources["target"]:
            sources["target"] = source_lines.of_call(self.aligned.target, self.target_below, target)
        of_target = excerpt(sources["target"], self.aligned.target, "target")
        of_reference = excerpt(sources["reference"], self.aligned.reference, "reference")
        if of_target is not None:
            yield of_target
        if of_reference is not None and (of_target is None or not _alike(of_reference, of_target)):
            yield of_reference

    def _line_of_reference(self, call: Call, programs: tuple[Listed | None, Listed | None]) -> str:
        program, other = programs
        if program is not None and other is not None:
            with contextlib.suppress(LookupError, TypeError, ValueError):
                place = operators.first_differing(program, other)
                if line := source_line(call, program.program, place):
                    return line
        return source_lines.of_call(self.aligned.reference, self.below, call)


def _alike(a: PageExcerpt, b: PageExcerpt) -> bool:
    return (a.file, a.lines) == (b.file, b.lines) and abs(a.line - b.line) <= 1


def _call(run: Run, number: int) -> Call | None:
    return run.calls[number] if 0 <= number < len(run.calls) else None


def _program(run: Run, call: Call | None, below: Mapping[int, list[int]]) -> Listed | None:
    """The program of a call, with names of the calls inside."""
    program = run.programs.get(call.program) if call is not None and call.program else None
    if call is None or program is None:
        return None
    inside = [run.calls[number] for number in below.get(call.id, ())]
    return Listed(program, [c.scope.rpartition(".")[2] or c.op or c.op_type for c in inside])
