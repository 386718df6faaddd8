"""What a result, a run or a part of one shows at a Python prompt, in one to ten lines.

Names from runs are cleaned. Items with a text on the command line show the first lines of that
text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from whence import records, results
from whence.records.slots import is_read, is_written
from whence.report import effect, evidence
from whence.report.accept import accepted_text
from whence.report.answer import cause_words, headline
from whence.report.diverge import diverged_text
from whence.report.doctor import checkup
from whence.report.fuzz import fuzzed_text
from whence.report.ladder import rungs
from whence.report.locate import location
from whence.report.module import module_lines, size
from whence.report.nans import nans_text
from whence.report.origin import origin_text
from whence.report.probe import probed_text
from whence.report.ranges import ranges_text
from whence.report.ranks import ranks_text
from whence.report.repeat import repeated_text
from whence.report.repro import reproduction
from whence.report.run.elements import kind_of_record
from whence.report.serving import serving_text
from whence.report.tables import called_at, clean, count, listed, shortened
from whence.report.tokens import tokens_text
from whence.report.upgrade import upgrade_text
from whence.report.weights import weights_map

_LINES = 10
_FEW = 4
_WIDE = 160


def text(item: Any) -> str:
    """The text for `item`; for a run, a summary of its contents."""
    words = next((words for kind, words in _WORDS.items() if isinstance(item, kind)), _run)
    lines = words(item)
    return "\n".join(map(clean, [lines] if isinstance(lines, str) else lines))


def _run(run: Any) -> str:
    held = f"{count(len(run.calls), 'call')}, {count(len(run.records), 'record')}"
    return f"<{type(run).__name__} {run.path}: {held}>"


def line(result: results.Comparison) -> str:
    """A comparison in one line."""
    return (
        f"<Comparison {result.status}: {clean(headline(result))}; {clean(result.reference)} "
        f"against {clean(result.target)}>"
    )


def cause(finding: results.Finding) -> str:
    """The cause of a finding, and its certainty."""
    return f"{cause_words(finding)} ({finding.confidence})"


def _comparison(result: results.Comparison) -> Iterator[str]:
    rows = []
    if result.findings and result.status == results.Status.DIFFERENT:
        first = result.findings[0]
        rows.append(("why", first.sentence))
        if line_ := called_at(first.source):
            rows.append(("called at", line_))
    if result.undecided is not None:
        rows.append(("where", _place(result.undecided)))
    if result.inputs_differ:
        rows.append(("inputs differ", result.inputs_differ[0]))
    if basis := evidence.basis(result):
        rows.append(("how sure", basis))
    if result.effect is not None:
        rows.append(("at the outputs", effect.words(result.effect)))
    if result.next:
        rows.append(("next", result.next[0].command))
    yield line(result)
    yield from (f"  {title:<16}{words}" for title, words in rows)


def _finding(finding: results.Finding) -> str:
    why = f": {finding.sentence}" if finding.sentence else ""
    return f"<Finding {finding.name} ({finding.op_type}), {_where(finding)}: {cause(finding)}{why}>"


def _where(item: Any) -> str:
    return f"step {item.step}, rank {item.rank}"


def _module_call(call: results.ModuleCall) -> str:
    tensors = ", ".join(
        f"{row.reference_slot} {size(row)}" for row in call.tensors if not row.measured.identical
    )
    return (
        f"<ModuleCall {call.name} ({call.op_type}), {_where(call)}: {call.verdict}; "
        f"{tensors or 'every tensor bitwise equal'}>"
    )


def _row(row: results.Row) -> str:
    return f"<Row {row.name} {row.reference_slot}, {_where(row)}: {row.verdict}, {size(row)}>"


def _verdict(verdict: results.Verdict) -> str:
    sure = f" ({verdict.confidence})" if verdict.confidence else ""
    basis = f" by {verdict.evidence}" if verdict.evidence else ""
    why = f": {verdict.sentence}" if verdict.sentence else ""
    return f"<Verdict {verdict.verdict}{sure}{basis}{why}>"


def _next_step(step: results.NextStep) -> str:
    return f"<NextStep {step.command}: {step.decides}>"


def _effect(item: results.Effect) -> str:
    return f"<Effect at the outputs: {effect.words(item) or 'no output was compared'}>"


def _undecided(item: results.Undecided) -> str:
    why = f": {item.why}" if item.why else ""
    return f"<Undecided {_place(item)}{why}>"


def _place(item: results.Undecided) -> str:
    kind = f" ({item.op_type})" if item.op_type else ""
    return f"{item.place}{kind}, {_where(item)}"


def _coverage(coverage: results.Coverage) -> str:
    return (
        f"<Coverage {coverage.share:.0%} of {count(coverage.calls, 'call')} measured, "
        f"{count(coverage.replayed)} replayed, {count(coverage.paired)} paired>"
    )


def _remark(remark: results.Remark) -> str:
    return (
        f"<Remark {remark.name} ({remark.op_type}), {_where(remark)}: {remark.kind}: "
        f"{remark.sentence}>"
    )


def _plan(plan: results.Plan) -> str:
    alone = len(plan.unmatched_reference), len(plan.unmatched_target)
    return (
        f"<Plan {count(len(plan.pairs), 'pair')} of calls; without a partner {alone[0]} of the "
        f"reference, {alone[1]} of the target>"
    )


def _explained(patch: results.Explained) -> str:
    share = f", {patch.share:.0%} of the error" if patch.share is not None else ""
    return f"<Explained {patch.name}: {count(patch.calls, 'call')} patched{share}>"


def _rung(rung: results.Rung) -> str:
    why = rung.why or rung.sentence
    return f"<Rung {rung.name}: {rung.verdict}{f': {why}' if why else ''}>"


def _call(call: records.Call) -> str:
    name = call.module_name + (f"/{call.op}" if call.op else "")
    read = [ref.slot for ref in call.refs if is_read(ref.slot)]
    wrote = [ref.slot for ref in call.refs if is_written(ref.slot)]
    kind = "" if call.kind == "module" else f"{call.kind}, "
    error = f"; raised {call.error[:100]}" if call.error else ""
    return (
        f"<Call {name} ({call.op_type}), {kind}{_where(call)}: "
        f"{listed(read, _FEW) or 'nothing'} -> {listed(wrote, _FEW) or 'nothing'}{error}>"
    )


def _record(record: records.Record) -> str:
    statistics = record.statistics
    figures = ""
    if statistics is not None and statistics.mean is not None:
        figures = f", mean {statistics.mean:.4g}"
        if statistics.min is not None and statistics.max is not None:
            figures += f", from {statistics.min:.4g} to {statistics.max:.4g}"
    why = f", {shortened(record.why, _WIDE)}" if record.why else ""
    return f"<Record #{record.id} {kind_of_record(record)}{figures}{why}>"


def _run_info(info: records.RunInfo) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in list(info.versions.items())[:_FEW])
    command = " ".join(info.command)[:100] or "no command"
    started = f", started {info.started}" if info.started else ""
    return f"<RunInfo {info.kind} run of {command}{started}; {versions}>"


def _note(note: records.Note) -> str:
    where = f" at {note.scope}" if note.scope else ""
    return f"<Note {note.kind}{where}: {shortened(note.text, _WIDE)}>"


def _program(program: records.Program) -> str:
    names = Counter(operation.name for operation in program.operations)
    return (
        f"<Program {program.id[:8]}: {count(len(program.operations), 'operation')}: "
        f"{listed(list(names), _FEW) or 'none'}>"
    )


def _first_lines(words: Callable[..., str]) -> Callable[[Any], list[str]]:
    """The first lines of the command line's text."""

    def cut(item: Any) -> list[str]:
        lines = words(item).rstrip("\n").split("\n")
        more = len(lines) - _LINES
        return [*lines[: _LINES - 1], f"... {count(more + 1, 'more line')}"] if more > 0 else lines

    return cut


_WORDS: dict[type, Callable[[Any], str | Iterable[str]]] = {
    results.Comparison: _comparison,
    results.ModuleResult: module_lines,
    results.Finding: _finding,
    results.ModuleCall: _module_call,
    results.Row: _row,
    results.Verdict: _verdict,
    results.NextStep: _next_step,
    results.Effect: _effect,
    results.Undecided: _undecided,
    results.Coverage: _coverage,
    results.Remark: _remark,
    results.Plan: _plan,
    results.Explained: _explained,
    results.Rung: _rung,
    results.Location: _first_lines(location),
    results.Nans: _first_lines(nans_text),
    results.Ranges: _first_lines(ranges_text),
    results.Probed: _first_lines(probed_text),
    results.Acceptance: _first_lines(accepted_text),
    results.Fuzzed: _first_lines(fuzzed_text),
    results.Diverged: _first_lines(diverged_text),
    results.RankReport: _first_lines(ranks_text),
    results.Repeated: _first_lines(repeated_text),
    results.Upgrade: _first_lines(upgrade_text),
    results.Ladder: _first_lines(rungs),
    results.Checkup: _first_lines(checkup),
    results.Reproduction: _first_lines(reproduction),
    results.Origin: _first_lines(origin_text),
    results.ServingCheck: _first_lines(serving_text),
    results.WeightMap: _first_lines(weights_map),
    results.TokenComparison: _first_lines(tokens_text),
    records.Call: _call,
    records.Record: _record,
    records.RunInfo: _run_info,
    records.Note: _note,
    records.Program: _program,
}
