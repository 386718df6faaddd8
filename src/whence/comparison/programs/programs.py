"""Programs beside runs: which program belongs to a run, and what two programs differ in before
anything is computed.

A program is a run of calls without values (`readers/formats/paddle_program.py`): operators,
attributes, data flow.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import align
from whence._version import __version__
from whence.comparison.programs.onnx_attributes import with_node_programs
from whence.comparison.programs.operator_pairing import (
    FusedChains,
    constant_records,
    operators,
    pair_operators,
    plain,
    running_operators,
)
from whence.comparison.programs.paddle_attributes import like, with_programs
from whence.comparison.programs.program_flow import (
    PROGRAM,
    name_in_program,
    operators_of_calls,
    with_data_flow,
)
from whence.errors import ElementsMissing, UnreadableRun, UsageError
from whence.frameworks import host
from whence.frameworks.paddle_programs import DRAWS
from whence.readers import UNTOLD
from whence.readers.opening import open_run
from whence.records import Call, Note, Over, Run, region
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_read, param_name
from whence.results import (
    CallPair,
    CauseKind,
    Comparison,
    Confidence,
    Coverage,
    Evidence,
    Finding,
    Plan,
    Status,
    VerdictKind,
)

_MOST = 200  # differences that become findings


def is_program(run: Run) -> bool:
    """Does this run hold operators without values?"""
    return run.info.kind.endswith(PROGRAM)


# ---- two programs


def compare(reference: Run, target: Run) -> Comparison:
    """Two programs: `different` when they do other things, else `undecided`, since nothing was
    computed that could be the same.

    Raises UsageError when only one of the two is a program.
    """
    for program, counterpart in ((reference, target), (target, reference)):
        if not is_program(counterpart):
            raise UsageError(
                f"{program.path} is a program and has no values, {counterpart.path} has: compare "
                "two runs and give the program with --program"
            )
    diff = diff_programs(reference, target)
    findings = tuple(map(_finding, diff.differences[:_MOST]))
    calls = len(operators(reference))
    pairs = tuple(CallPair(a, b, "order", "") for a, b in diff.pairs)
    paired_a, paired_b = {a for a, _ in diff.pairs}, {b for _, b in diff.pairs}
    only_reference = tuple(c.id for c in operators(reference) if c.id not in paired_a)
    only_target = tuple(c.id for c in operators(target) if c.id not in paired_b)
    at_fault = len({d.call for d in diff.differences if d.call in paired_a})
    counts = {VerdictKind.STRUCTURAL: at_fault, VerdictKind.UNDETERMINED: len(pairs) - at_fault}
    note = "nothing was run, so nothing was measured" + (
        "" if not diff.differences else f"; {diff.sentence}"
    )
    without = {
        side: tuple(run.calls[i].scope for i in ids)
        for side, run, ids in (
            ("reference", reference, only_reference),
            ("target", target, only_target),
        )
        if ids
    }
    programs = diff.lines if len(diff.differences) > 1 else ()
    return Comparison(
        status=Status.DIFFERENT if findings else Status.UNDECIDED,
        evidence=PROGRAM,
        reference=reference.path,
        target=target.path,
        findings=findings,
        first_difference=_first(findings),
        counts={k: n for k, n in counts.items() if n},
        coverage=Coverage(calls, len(pairs), 0, 0, 0, False),
        unmatched=len(only_reference) + len(only_target),
        incomparable=0,
        inputs_differ=(),
        versions={"whence": __version__},
        plan=Plan(pairs, only_reference, only_target, ()),
        rows=(),
        verdicts=(),
        headline="" if findings else f"{diff.sentence}; nothing was run, so nothing was measured",
        notes=(note,) if findings else (),
        without_partner=without,
        programs=programs,
    )


def _finding(difference: Difference) -> Finding:
    is_weight = difference.kind == "weights"
    return Finding(
        name=difference.name,
        op_type=difference.op_type,
        cause=_cause(difference),
        verdict=VerdictKind.PARAM_DIFF if is_weight else VerdictKind.STRUCTURAL,
        confidence=Confidence.CERTAIN,
        step=0,
        rank=0,
        evidence=Evidence.PROGRAM,
        sentence=difference.words,
        root="model",
    )


def _cause(difference: Difference) -> CauseKind:
    if difference.kind == "weights":
        return CauseKind.PARAMETER
    return CauseKind.SEMANTIC if difference.attributes else CauseKind.STRUCTURAL


def _first(findings: Sequence[Finding]) -> dict[str, Any] | None:
    finding = next(iter(findings), None)
    return (
        None
        if finding is None
        else {
            "name": finding.name,
            "op_type": finding.op_type,
            "step": 0,
            "rank": 0,
            "verdict": finding.verdict,
        }
    )


# ---- a program beside a log


def open_programs(
    sources: str | os.PathLike[str] | Run | Sequence[Any] | None, opened: Callable[[Any], Run]
) -> tuple[Run, ...]:
    """The programs a user gave: of the reference, and of the target when it is another. Raises
    UsageError, UnreadableRun.
    """
    if sources is None:
        return ()
    listed = (
        [sources]
        if isinstance(sources, (str, os.PathLike)) or hasattr(sources, "calls")
        else list(sources)
    )
    if not 1 <= len(listed) <= 2:
        raise UsageError(
            "program takes one (of both runs) or two (of the reference, of the target), not "
            f"{len(listed)}"
        )
    runs = tuple(opened(source) for source in listed)
    for run in runs:
        if not is_program(run):
            raise UsageError(
                f"{run.path} is not a program; --program takes the file in which a framework "
                "saved a model without its weights (.pdmodel)"
            )
    return runs


class Programs(NamedTuple):
    """Programs of two runs. pairs: (root, the reference's, the target's), root "" for those that
    were given; files: those.
    """

    pairs: tuple[tuple[str, Run, Run], ...] = ()
    files: tuple[str, ...] = ()


def apply_programs(reference: Run, target: Run, chosen: Sequence[Run]) -> tuple[Run, Run, Programs]:
    """Both runs with what their programs say, and the programs: those given, else those that a
    capture saved with its run. Nodes of ONNX graphs say themselves what they compute.
    """
    reference, target = with_node_programs(reference), with_node_programs(target)
    if chosen:
        pair = (("", chosen[0], chosen[-1]),)
        files = tuple(run.path for run in chosen[:2])
        is_pair = len(chosen) == 2
        # What lies between two prints is then another operator in each program.
        direct = is_pair and _is_rewritten(diff_programs(chosen[0], chosen[1], ({}, {})))
        target = with_data_flow(target, chosen[-1], direct=direct)
        return (
            with_data_flow(reference, chosen[0], direct=direct),
            _marked(target) if direct else target,
            Programs(pair if is_pair else (), files),
        )
    programs_of = saved_programs(reference), saved_programs(target)
    sides = [
        _with_attributes(run, programs_) for run, programs_ in zip((reference, target), programs_of)
    ]
    pairs = tuple(
        (root, programs_of[0][root], programs_of[1][root])
        for root in programs_of[0]
        if root in programs_of[1]
    )
    reference_run, target_run = sides
    for root, reference_program, target_program in pairs:
        reference_run, target_run = renamed_as_partners(
            reference_run, target_run, (reference_program, target_program), root
        )
    return reference_run, target_run, Programs(pairs)


def saved_programs(run: Run) -> dict[str, Run]:
    """The programs that a capture of Paddle saved with its run, by root: what a predictor ran,
    after passes.
    """
    from whence.readers.opening import open_run

    named = {
        root: Path(run.path) / str(s["program"])
        for root, s in align.settings_of(run).items()
        if s.get("program")
    }
    return {root: open_run(str(file)) for root, file in named.items() if file.is_file()}


def _with_attributes(run: Run, programs_of: Mapping[str, Run]) -> Run:
    """A captured run with what its programs say of its calls."""
    for root, program in programs_of.items():
        run = with_programs(run, program, operators_of_calls(run, program, root))
    return run


def with_differences(
    result: Comparison, programs: Programs, reference: Run, target: Run
) -> Comparison:
    """The comparison with what the programs of both runs differ in, first of all and at the
    findings it concerns.

    reference, target: the runs, whose captured weights are compared by hash where there are none
    beside the programs.
    """
    ran = {c.scope: name_in_program(c) for c in operators(reference)} if programs.pairs else {}
    differing: list[str] = []
    equal: list[str] = []
    findings = list(result.findings)
    for root, reference_program, target_program in programs.pairs:
        weights = tuple(
            weights_beside(program) or weights_seen(run, root)
            for program, run in ((reference_program, reference), (target_program, target))
        )
        diff = diff_programs(reference_program, target_program, (weights[0], weights[1]))
        named = f"{root}: " if len(programs.pairs) > 1 else ""
        (differing if diff.differences else equal).extend(f"{named}{line}" for line in diff.lines)
        by_name = {d.name: d for d in diff.differences}
        names = {reference_program.calls[a].scope for a, _ in diff.pairs}
        findings = [
            _explained(f, ran.get(f.name, f.name), by_name, names) if root in ("", f.root) else f
            for f in findings
        ]
    if len(programs.files) == 1:
        findings = [_of_either(finding) for finding in findings]
    if len(programs.pairs) > 1:
        equal_count = sum(line.partition(": ")[2].startswith(EQUAL) for line in equal)
        equal = (
            [f"the programs of {equal_count} of {len(programs.pairs)} predictors are equal"]
            if equal_count
            else []
        )
    return replace(
        result,
        findings=tuple(findings),
        programs=(*differing, *equal),
        program_files=programs.files,
    )


def _of_either(finding: Finding) -> Finding:
    """A finding of two runs beside one program: whether the target's operator has the same
    attributes is not known.
    """
    if finding.cause != CauseKind.KERNEL:
        return finding
    words = (
        "one program was given for both runs: another attribute in the target's is as likely "
        "as its kernel (--program once for each)"
    )
    return replace(finding, cause=CauseKind.UNKNOWN, sentence=f"{finding.sentence}; {words}")


def _explained(
    finding: Finding, name: str, by_name: Mapping[str, Difference], names: Set[str]
) -> Finding:
    """A finding with what its operator, `name` in the program, differs in there."""
    difference = by_name.get(name)
    if difference is None:
        return finding
    cause = (
        CauseKind.SEMANTIC
        if finding.verdict == VerdictKind.INTRODUCED
        and not finding.cause
        and difference.kind == "attributes"
        else finding.cause
    )
    is_said = difference.words.rpartition(": ")[2] in finding.sentence or (
        difference.kind == "weights" and finding.cause == CauseKind.PARAMETER
    )
    place = f" ({name})" if name != finding.name and name in names else ""
    words = "" if is_said else f"; in its program{place} {difference.words}"
    return replace(finding, cause=cause, sentence=f"{finding.sentence}{words}")


# Calls of the target under the names of the calls of the reference whose operators they are
# paired with in the programs of both runs.

Execution = tuple[Any, int, int]
"""(step, operator of the program, which time it ran in that step)."""
_NUMBERED = re.compile(r"inner_var\.\d+")


def renamed_as_partners(
    reference: Run, target: Run, both_programs: tuple[Run, Run], root: str
) -> tuple[Run, Run]:
    """Both runs, calls of the target named as those of the reference whose operators they are
    paired with in the programs.

    Only where the programs differ; names of variables that are no numbers of the executor stay. An
    operator that does what several of the reference do is paired with the last of them; what the
    two read cannot be compared. Constants that a pass folded are left out.
    """
    diff = diff_programs(both_programs[0], both_programs[1], ({}, {}))
    if all(d.kind in ("attributes", "weights") for d in diff.differences):
        return reference, target
    if _is_rewritten(diff):
        return reference, _marked(target, root)
    places = [
        operators_of_calls(run, program, root)
        for run, program in zip((reference, target), both_programs)
    ]
    reference_calls, target_calls = (
        _executions(run, ran) for run, ran in zip((reference, target), places)
    )
    put_in = [_put_in(run, ran, root) for run, ran in zip((reference, target), places)]
    names = {call.scope for call in reference_calls.values()}
    numbered = any(_NUMBERED.fullmatch(name) for name in names)
    reference_changes, target_changes, omitted = _changes_of_pairs(
        diff, reference_calls, target_calls, numbered
    )
    for call in target.calls:
        is_unmatched = call.root == root and call.id not in target_changes
        if numbered and is_unmatched and call.scope in names:
            target_changes[call.id] = replace(call, scope=f"{call.scope} (target)")
    if not diff.turned:
        paired = {a for a, _ in diff.pairs}
        folded = {
            c.id
            for c in operators(both_programs[0])
            if c.leaf and c.id not in paired and _reads_nothing(c)
        }
        omitted |= {
            call.id for (_, operator, _), call in reference_calls.items() if operator in folded
        }
        constants = [[c for c in calls if _reads_nothing(c)] for calls in put_in]
        target_types = {constant.op_type for constant in constants[1]}
        omitted |= {call.id for call in constants[0] if call.op_type not in target_types}
    out = [_changed(reference, reference_changes), _changed(target, target_changes)]
    left_out = [
        {c.id for c in calls if region.hands_on(run, c)}
        for run, calls in zip((reference, target), put_in)
    ]
    left_out[diff.turned] |= omitted
    out = [_without(run, ids) for run, ids in zip(out, left_out)]
    if omitted:
        sentence = (
            f"{len(omitted)} calls of operators that passes fused or folded in the other run are "
            "compared by what they end in"
        )
        out[diff.turned].notes = [*out[diff.turned].notes, Note("inside-not-seen", sentence)]  # type: ignore[misc]
    return out[0], out[1]


def _is_rewritten(diff: ProgramDiff) -> bool:
    """Does one program run operators that the other does without, in other places?"""
    return {"removed", "inserted"} <= {d.kind for d in diff.differences}


def _marked(run: Run, root: str | None = None) -> Run:
    """The run, for its operators to be paired by the values that they make."""
    chosen = (c for c in operators(run) if c.kind == "operator" and root in (None, c.root))
    marked = {c.id: replace(c, notes=(*c.notes, Mark.REWRITTEN)) for c in chosen}
    return _changed(run, marked)


def _changes_of_pairs(
    diff: ProgramDiff,
    reference_calls: Mapping[Execution, Call],
    target_calls: Mapping[Execution, Call],
    numbered: bool,
) -> tuple[dict[int, Call], dict[int, Call], set[int]]:
    """(changed calls of the reference, of the target, calls to leave out) for operators that are
    paired. numbered: names are numbers of the executor.
    """
    partner = {b: a for a, b in diff.pairs}
    reference_changes: dict[int, Call] = {}
    target_changes: dict[int, Call] = {}
    omitted: set[int] = set()
    for (group, operator, number), call in target_calls.items():
        reference_call = reference_calls.get((group, partner.get(operator, -1), number))
        if reference_call is None or not (numbered or reference_call.scope == call.scope):
            continue
        renamed = replace(call, scope=reference_call.scope, occurrence=reference_call.occurrence)
        target_changes[call.id] = renamed
        end = operator if diff.turned else partner[operator]
        if end in diff.fused:
            reference_changes[reference_call.id] = _unread(reference_call)
            target_changes[call.id] = _unread(renamed)
            longer = target_calls if diff.turned else reference_calls
            members = (longer.get((group, member, number)) for member in diff.fused[end])
            omitted |= {member.id for member in members if member is not None}
    return reference_changes, target_changes, omitted


def _reads_nothing(call: Call) -> bool:
    return not call.slots("input") and not call.slots("param")


def _put_in(run: Run, ran: Mapping[int, int], root: str) -> list[Call]:
    """Calls that the program does not have: constants and changes of layout that Paddle puts in
    when it lowers it.
    """
    return [
        c
        for c in operators(run)
        if c.root == root and c.leaf and c.id not in ran and c.op_type not in DRAWS
    ]


def _without(run: Run, omitted: Set[int]) -> Run:
    """The run without some of its leaf calls."""
    if not omitted:
        return run
    remaining = [c for c in run.calls if c.id not in omitted]
    position = {c.id: i for i, c in enumerate(remaining)}
    out = Over(
        run,
        [replace(c, id=i, parent=position.get(c.parent, -1)) for i, c in enumerate(remaining)],
    )
    return like(run, out)


def _executions(run: Run, ran: Mapping[int, int]) -> dict[Execution, Call]:
    """Calls of the operators of a program."""
    out: dict[Execution, Call] = {}
    times: Counter[tuple[Any, int]] = Counter()
    for call in operators(run):
        if call.id in ran:
            key = (call.rank, call.step, call.micro), ran[call.id]
            out[*key, times[key]] = call
            times[key] += 1
    return out


def _unread(call: Call) -> Call:
    """A call without its inputs, which counts as depending on everything before it."""
    return replace(
        call,
        refs=tuple(r for r in call.refs if not is_read(r.slot)),
        notes=(*call.notes, UNTOLD),
        program="",
        no_program="a pass fused it with others in the target",
    )


def _changed(run: Run, calls: Mapping[int, Call]) -> Run:
    return like(run, Over(run, [calls.get(c.id, c) for c in run.calls])) if calls else run


# Two programs operator by operator: what they differ in before anything is computed.

_LONGEST = 60  # characters of an attribute
_SHOWN = 8  # differences that are spelt out
_ABSENT = "absent"
_ONLY_SHAPE = ("reshape", "transpose", "scale", "squeeze", "unsqueeze")
EQUAL = "the programs are equal"


class Difference(NamedTuple):
    """Something two programs do not share. name: of the operator, in the reference where it has it.
    call: there, -1 where it has none.

    kind: "attributes", "wiring" (types, inputs, shapes), "removed", "inserted", "fused" or
    "weights". attributes: how many of its attributes differ. words: a clause.
    """

    name: str
    op_type: str
    call: int
    kind: str
    attributes: int
    words: str


class ProgramDiff(NamedTuple):
    """Two programs operator by operator: pairs of calls, and what they differ in, in the
    reference's order.

    compared: attributes; weights: parameters compared by hash, of `of_weights`.
    onednn: operators that only the reference and only the target give to oneDNN. fused: operators
    of the reference (turned: of the target) whose partner does what others before them do too, with
    these.
    """

    pairs: tuple[tuple[int, int], ...]
    differences: tuple[Difference, ...]
    compared: int
    weights: int = 0
    of_weights: int = 0
    onednn: tuple[int, int] = (0, 0)
    fused: Mapping[int, tuple[int, ...]] = {}
    turned: bool = False

    @property
    def sentence(self) -> str:
        """Both programs in a clause."""
        differences = self.differences
        if not differences:
            return (
                f"{EQUAL}: {len(self.pairs)} operators with {self.compared} "
                f"attributes{self._weighed}"
            )
        first = (
            f"{differences[0].words} ({differences[0].name})"
            if differences[0].kind != "attributes"
            else f"{differences[0].words}"
        )
        if sum(d.attributes for d in differences) == 1 and len(differences) == 1:
            return f"exactly one attribute differs: {first}"
        if len(differences) == 1 and differences[0].kind == "weights":
            return f"exactly one weight differs: {first}"
        places = f"{len(differences)} operator{'s' if len(differences) > 1 else ''}"
        return f"the programs differ at {places}; the first: {first}"

    @property
    def _weighed(self) -> str:
        return f", {self.weights} of {self.of_weights} weights by hash" if self.weights else ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The differences as lines: the sentence, then each, those of one form together."""
        out = [self.sentence]
        forms = Counter(
            d.words for d in self.differences if d.kind in ("fused", "removed", "inserted")
        )
        listed: set[str] = set()
        texts = []
        for d in self.differences:
            if forms[d.words] > 1:
                if d.words not in listed:
                    texts.append(f"{d.words} ({forms[d.words]} times, first at {d.name})")
                listed.add(d.words)
            else:
                texts.append(d.words if d.kind == "attributes" else f"{d.name}: {d.words}")
        if len(self.differences) > 1:
            out += texts[:_SHOWN]
            out += [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
        for side, count in zip(("reference", "target"), self.onednn):
            out += [f"{count} operators run in oneDNN in the {side} only"] if count else []
        if (
            self.differences
            and self.weights
            and not any(d.kind == "weights" for d in self.differences)
        ):
            out.append(f"weights: {self.weights} of {self.of_weights} compared, all equal by hash")
        return tuple(out)


def diff_programs(
    reference: Run, target: Run, weights: tuple[Mapping[str, str], Mapping[str, str]] | None = None
) -> ProgramDiff:
    """Compare two programs. weights: by parameter a hash, of both; None takes the
    .pdiparams beside the programs.
    """
    calls = operators(reference), operators(target)
    # passes fuse, so the longer one has what the other does at once
    turned = running_operators(calls[1]) > running_operators(calls[0])
    if turned:
        reversed_pairs, fused = pair_operators((target, calls[1]), (reference, calls[0]))
        pairs = [(a, b) for b, a in reversed_pairs]
    else:
        pairs, fused = pair_operators((reference, calls[0]), (target, calls[1]))
    pairs.sort(key=lambda pair: pair[0].order)
    ordered = _without_equal_partner(pairs, calls, fused, turned)
    across = _across(pairs)
    compared = 0
    for a, b in pairs:
        if (b if turned else a).id in fused.pairs:
            continue
        compared += len(a.arguments)
        words, count, attributes_only = _differs(reference, target, a, b, across)
        if words:
            kind = "attributes" if attributes_only else "wiring"
            ordered.append((a.order, _difference(a, kind, words, count)))
    hashes = weights if weights is not None else (weights_beside(reference), weights_beside(target))
    weighed, of, other_weights = compare_weights(pairs, *hashes)
    ordered += [
        (call.order, _difference(call, "weights", f"its weight {name} is another one, by hash"))
        for call, name in other_weights
    ]
    ordered.sort(key=lambda item: item[0])
    in_onednn = [(has_mark(a, Mark.ONEDNN), has_mark(b, Mark.ONEDNN)) for a, b in pairs]
    joined = {end: tuple(c.id for c in chain if c.id != end) for end, chain in fused.pairs.items()}
    differences = tuple(d for _, d in ordered)
    return ProgramDiff(
        tuple((a.id, b.id) for a, b in pairs),
        differences,
        compared,
        weighed,
        of,
        (in_onednn.count((True, False)), in_onednn.count((False, True))),
        joined,
        turned,
    )


def _difference(call: Call, kind: str, words: str, attributes: int = 0) -> Difference:
    return Difference(call.scope, call.op_type, call.id, kind, attributes, words)


def _without_equal_partner(
    pairs: Sequence[tuple[Call, Call]],
    calls: tuple[Sequence[Call], Sequence[Call]],
    fused: FusedChains,
    turned: bool,
) -> list[tuple[int, Difference]]:
    """(order, difference) of operators without a partner, and of those that the other side runs as
    one. calls: of the reference, of the target. turned: the reference is the one that fuses.
    """
    partner = {(b if turned else a).id: (a if turned else b) for a, b in pairs}
    longer = {c.id: c for c in calls[turned]}
    chains = {
        i: [longer[i]]
        for i, other in partner.items()
        if other.op_type.startswith("fused_") and not longer[i].op_type.startswith("fused_")
    } | fused.pairs
    folded = _folded(
        calls[not turned], [partner[end] for end in chains], {c.id for c in partner.values()}
    )
    maker = {r.record: c for c in calls[turned] for r in c.slots("output")}
    absorbed, out = set(fused.inside), []
    for end, chain in chains.items():
        members = _with_changes_of_shape(chain, maker, partner)
        absorbed |= {c.id for c in members} - {end}
        if len(members) > 1:
            fused.pairs[end] = members
            sides = ([partner[end]], members) if turned else (members, [partner[end]])
            out.append((sides[0][-1].order, _as_one(*sides)))
    last_order = -1
    order_of = {b.id: a.order for a, b in pairs}
    for call in calls[1]:
        last_order = order_of.get(call.id, last_order)
        if call.id not in order_of and call.id not in (absorbed if turned else folded):
            words = f"only the target runs {call.op_type}"
            out.append((last_order, _difference(call, "inserted", words)._replace(call=-1)))
    paired = {a.id for a, _ in pairs}
    out += [
        (call.order, _difference(call, "removed", f"only the reference runs {call.op_type}"))
        for call in calls[0]
        if call.id not in paired and call.id not in (folded if turned else absorbed)
    ]
    return out


def _with_changes_of_shape(
    chain: Sequence[Call], maker: Mapping[int, Call], paired: Container[int]
) -> list[Call]:
    """A chain that the other program runs as one operator, in order, with what only changes the
    shape of what it reads and has no partner: that is done inside as well. maker: by record.
    """
    members, todo = {c.id: c for c in chain}, list(chain)
    while todo:
        for ref in todo.pop().slots("input"):
            producer = maker.get(ref.record)
            if (
                producer is not None
                and plain(producer.op_type) in _ONLY_SHAPE
                and producer.id not in paired
                and producer.id not in members
            ):
                members[producer.id] = producer
                todo.append(producer)
    return sorted(members.values(), key=lambda c: c.order)


def _folded(calls: Sequence[Call], ends: Sequence[Call], met: Set[int]) -> set[int]:
    """Operators without a partner that compute the weights of fused ones: a pass put them there."""
    maker = {r.record: c for c in calls for r in c.slots("output")}
    folded: set[int] = set()
    todo = [r.record for end in ends for r in end.slots("input")]
    constant = constant_records(calls)
    while todo:
        producer = maker.get(record := todo.pop())
        if (
            producer is not None
            and record in constant
            and producer.id not in met
            and producer.id not in folded
        ):
            folded.add(producer.id)
            todo += [r.record for r in producer.slots("input")]
    return folded


def _as_one(reference_calls: Sequence[Call], target_calls: Sequence[Call]) -> Difference:
    """The difference of operators of which one side runs several as one."""
    reference_types, target_types = (
        " + ".join(c.op_type for c in side[:6]) + (" + ..." if len(side) > 6 else "")
        for side in (reference_calls, target_calls)
    )
    verb = "are one" if len(target_calls) == 1 else "is"
    words = f"{reference_types} of the reference {verb} {target_types} in the target"
    return _difference(reference_calls[-1], "fused", words)


def _across(pairs: Sequence[tuple[Call, Call]]) -> dict[int, int]:
    """Records of the reference -> records of the target that partners have in the same output or
    parameter.
    """
    out: dict[int, int] = {}
    for a, b in pairs:
        for kind in ("output", "param"):
            out.update(
                (x.record, y.record)
                for x, y in zip(a.slots(kind), b.slots(kind))
                if x.record not in out
            )
    return out


# ---- what they differ in


def _differs(
    reference: Run, target: Run, a: Call, b: Call, across: Mapping[int, int]
) -> tuple[str, int, bool]:
    """(what two operators differ in, how many attributes of it, is it nothing else)."""
    attributes = _attributes_that_differ(a, b)
    words: list[str] = []
    if plain(a.op_type) != plain(b.op_type):
        words.append(f"the reference runs {a.op_type} where the target runs {b.op_type}")
    words += attributes
    sentence = "it {} {} in the reference and {} in the target".format
    for x, y in list(zip(a.slots("output"), b.slots("output")))[:1]:
        record, target_record = reference.records[x.record], target.records[y.record]
        shapes = record.shape, target_record.shape
        if record.dtype != target_record.dtype:
            words.append(sentence("writes", record.dtype, target_record.dtype))
        elif len(shapes[0]) != len(shapes[1]) or any(
            m != n and -1 not in (m, n) for m, n in zip(*shapes)
        ):
            words.append(sentence("writes", *map(_extents, shapes)))
    inputs = a.slots("input"), b.slots("input")
    if len(inputs[0]) != len(inputs[1]):
        words.append(sentence("reads", *(_tensors(len(refs)) for refs in inputs)))
    words += [
        f"its {x.slot} comes from another operator in the target"
        for x, y in zip(*inputs)
        if x.record in across and across[x.record] != y.record
    ]
    for x, y in zip(a.slots("param"), b.slots("param")):
        forms = [
            (record.dtype, record.shape)
            for record in (reference.records[x.record], target.records[y.record])
        ]
        if forms[0] != forms[1]:
            described = " against ".join(f"{dtype} {_extents(shape)}" for dtype, shape in forms)
            words.append(f"its parameter {param_name(x.slot)} is {described}")
    return "; ".join(words), len(attributes), len(words) == len(attributes)


def _attributes_that_differ(a: Call, b: Call) -> list[str]:
    """A clause for each attribute that two operators of one type have otherwise."""
    if a.op_type != b.op_type:
        return []
    clauses = []
    # A pass adds attributes for its kernel.
    moved = has_mark(a, Mark.ONEDNN) != has_mark(b, Mark.ONEDNN)
    for key in dict.fromkeys((*a.arguments, *b.arguments)):
        x, y = a.arguments.get(key, _ABSENT), b.arguments.get(key, _ABSENT)
        if (moved or None in (x, y)) and _ABSENT in (x, y):
            continue
        if x != y:
            clauses.append(f"{key} of {a.scope}: {_shown(x)} against {_shown(y)}")
    return clauses


def _tensors(count: int) -> str:
    return f"{count} tensor{'' if count == 1 else 's'}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _extents(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('?' if n < 0 else str(n) for n in shape)}]"


# Weights of two programs, compared by hash.


def weights_beside(program: Run) -> dict[str, str]:
    """Hashes of the parameters of a program, from the .pdiparams beside it; {} where there is none
    that can be read.
    """
    file = Path(program.path).with_suffix(".pdiparams")
    if not file.is_file():
        return {}
    try:
        run = open_run(str(file))
    except UnreadableRun:
        return {}
    out = {}
    for call in run.calls:
        for ref in call.slots("param"):
            name = ".".join(part for part in (call.scope, param_name(ref.slot)) if part)
            try:
                array = np.ascontiguousarray(run.array(ref.record))
                out[name] = host.digest(array.reshape(-1).view(np.uint8)).hex()
            except ElementsMissing:
                continue
    return out


def weights_seen(run: Run, root: str = "") -> dict[str, str]:
    """Hashes of the parameters that a run saw, of one root or of all, by name."""
    calls = (c for c in run.calls if root in ("", c.root))
    return {
        param_name(r.slot): run.records[r.record].hash
        for c in calls
        for r in c.slots("param")
        if run.records[r.record].hash
    }


def compare_weights(
    pairs: Sequence[tuple[Call, Call]],
    reference_hashes: Mapping[str, str],
    target_hashes: Mapping[str, str],
) -> tuple[int, int, list[tuple[Call, str]]]:
    """(how many were compared, of how many, (call of the reference, name) of those that differ):
    parameters that partners take in one place.
    """
    compared: dict[str, bool] = {}
    differences: list[tuple[Call, str]] = []

    def compare(call: Call, name: str, target_name: str) -> None:
        compared[name] = name in reference_hashes and target_name in target_hashes
        if compared[name] and reference_hashes[name] != target_hashes[target_name]:
            differences.append((call, name))

    for a, b in pairs:
        for ref, target_ref in zip(a.slots("param"), b.slots("param")):
            name, target_name = param_name(ref.slot), param_name(target_ref.slot)
            if name not in compared and (a.op_type == b.op_type or name == target_name):
                compare(a, name, target_name)
    for a, _ in pairs:  # of a fused operator the parameters stand elsewhere, under their names
        for name in (param_name(r.slot) for r in a.slots("param")):
            if not compared.get(name, False) and name in reference_hashes and name in target_hashes:
                compare(a, name, name)
    return sum(compared.values()), len(compared), differences
