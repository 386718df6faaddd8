"""Programs beside runs: what two of them differ in before anything is computed, and the data flow a
log does not tell.

A program is a run of calls without values (`readers/formats/paddle_program.py`): operators,
attributes, who reads what of whom.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from whence import align
from whence._version import __version__
from whence.comparison.programs.paddle_attributes import with_programs
from whence.comparison.programs.program_diff import (
    EQUAL,
    Difference,
    face,
    operators,
    weights_beside,
    weights_seen,
)
from whence.comparison.programs.program_order import in_order, taking
from whence.errors import UsageError
from whence.frameworks.paddle_programs import DRAWS, FOLDED
from whence.readers import UNTOLD, ForeignRun
from whence.records import Call, Note, Over, Ref, Run, region
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

PROGRAM = "program"
PLACED = "its operator is known by its place in the program, not by a name"
"""The note of a call whose inputs a program tells that may be another operator's: they are right
where replay reproduces the recording.
"""
_MOST = 200  # differences that become findings
_LEAST = 0.5  # of a log's tensors that a program must write to be its program


def is_program(run: Run) -> bool:
    """Does this run hold operators without values?"""
    return run.info.kind.endswith(PROGRAM)


_RUNS = "operator of the program: "


# ---- two programs


def compare(reference: Run, target: Run) -> Comparison:
    """Two programs: `different` when they do other things, else `undecided`, since nothing was
    computed that could be the same.

    Raises UsageError when only one of the two is a program.
    """
    for one, other in ((reference, target), (target, reference)):
        if not is_program(other):
            raise UsageError(
                f"{one.path} is a program and has no values, {other.path} has: compare two runs "
                "and give the program with --program"
            )
    faced = face(reference, target)
    findings = tuple(
        Finding(
            name=d.name,
            op_type=d.op_type,
            cause=_cause(d),
            verdict=VerdictKind.PARAM_DIFF if d.kind == "weights" else VerdictKind.STRUCTURAL,
            confidence=Confidence.CERTAIN,
            step=0,
            rank=0,
            evidence=Evidence.PROGRAM,
            sentence=d.words,
            root="model",
        )
        for d in faced.differences[:_MOST]
    )
    calls = len(operators(reference))
    pairs = tuple(CallPair(a, b, "order", "") for a, b in faced.pairs)
    paired_a, paired_b = {a for a, _ in faced.pairs}, {b for _, b in faced.pairs}
    left = tuple(c.id for c in operators(reference) if c.id not in paired_a)
    right = tuple(c.id for c in operators(target) if c.id not in paired_b)
    at_fault = len({d.call for d in faced.differences if d.call in paired_a})
    counts = {VerdictKind.STRUCTURAL: at_fault, VerdictKind.UNDETERMINED: len(pairs) - at_fault}
    said = "nothing was run, so nothing was measured" + (
        "" if not faced.differences else f"; {faced.sentence}"
    )
    without = {
        side: tuple(run.calls[i].scope for i in ids)
        for side, run, ids in (("reference", reference, left), ("target", target, right))
        if ids
    }
    programs = faced.lines if len(faced.differences) > 1 else ()
    return Comparison(
        status=Status.DIFFERENT if findings else Status.UNDECIDED,
        evidence=PROGRAM,
        reference=reference.path,
        target=target.path,
        findings=findings,
        first_difference=_first(findings),
        counts={k: n for k, n in counts.items() if n},
        coverage=Coverage(calls, len(pairs), 0, 0, 0, False),
        unmatched=len(left) + len(right),
        incomparable=0,
        inputs_differ=(),
        versions={"whence": __version__},
        plan=Plan(pairs, left, right, ()),
        rows=(),
        verdicts=(),
        headline="" if findings else f"{faced.sentence}; nothing was run, so nothing was measured",
        notes=(said,) if findings else (),
        without_partner=without,
        programs=programs,
    )


def _cause(difference: Difference) -> CauseKind:
    if difference.kind == "weights":
        return CauseKind.PARAMETER
    return CauseKind.SEMANTIC if difference.attributes else CauseKind.STRUCTURAL


def _first(findings: Sequence[Finding]) -> dict[str, Any] | None:
    found = next(iter(findings), None)
    return (
        None
        if found is None
        else {
            "name": found.name,
            "op_type": found.op_type,
            "step": 0,
            "rank": 0,
            "verdict": found.verdict,
        }
    )


# ---- a program beside a log


def programs(
    given: str | os.PathLike[str] | Run | Sequence[Any] | None, opened: Callable[[Any], Run]
) -> tuple[Run, ...]:
    """The programs a user gave: of the reference, and of the target when it is another. Raises
    UsageError, UnreadableRun.
    """
    if given is None:
        return ()
    listed = (
        [given] if isinstance(given, (str, os.PathLike)) or hasattr(given, "calls") else list(given)
    )
    if not 1 <= len(listed) <= 2:
        raise UsageError(
            "program takes one (of both runs) or two (of the reference, of the target), not "
            f"{len(listed)}"
        )
    runs = tuple(opened(one) for one in listed)
    for run in runs:
        if not is_program(run):
            raise UsageError(
                f"{run.path} is no program; --program takes what a framework saved of a model "
                "without its weights (.pdmodel)"
            )
    return runs


class Programs(NamedTuple):
    """Programs of two runs. pairs: (root, the reference's, the target's), root "" for those that
    were given; files: those.
    """

    pairs: tuple[tuple[str, Run, Run], ...] = ()
    files: tuple[str, ...] = ()


def laid(reference: Run, target: Run, given: Sequence[Run]) -> tuple[Run, Run, Programs]:
    """Both runs with what their programs say, and the programs: those given, else those that a
    capture saved with its run.
    """
    if given:
        both = (("", given[0], given[-1]),)
        files = tuple(run.path for run in given[:2])
        return (
            attached(reference, given[0]),
            attached(target, given[-1]),
            Programs(both if len(given) == 2 else (), files),
        )
    programs_of = own(reference), own(target)
    sides = [_said(run, programs_) for run, programs_ in zip((reference, target), programs_of)]
    pairs = tuple(
        (root, programs_of[0][root], programs_of[1][root])
        for root in programs_of[0]
        if root in programs_of[1]
    )
    left, right = sides
    for root, mine, others in pairs:
        left, right = _facing(left, right, (mine, others), root)
    return left, right, Programs(pairs)


def own(run: Run) -> dict[str, Run]:
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


def _said(run: Run, programs_of: Mapping[str, Run]) -> Run:
    """A captured run with what its programs say of its calls."""
    for root, program in programs_of.items():
        run = with_programs(run, program, _ran(run, program, root))
    return run


def _facing(reference: Run, target: Run, given: tuple[Run, Run], root: str) -> tuple[Run, Run]:
    """Both runs, calls of the target named as those of the reference whose operators they face in
    the programs.

    Only where the programs differ; names of variables that are no numbers of the executor stay. An
    operator that does what several of the reference do faces the last of them; what the two read
    cannot be held against each other. Constants that a pass folded are left out.
    """
    faced = face(given[0], given[1], ({}, {}))
    if all(d.kind in ("attributes", "weights") for d in faced.differences):
        return reference, target
    partner = {b: a for a, b in faced.pairs}
    places = [_ran(run, program, root) for run, program in zip((reference, target), given)]
    ours, theirs = (_executions(run, ran) for run, ran in zip((reference, target), places))
    put_in = [_put_in(run, ran, root) for run, ran in zip((reference, target), places)]
    names = {call.scope for call in ours.values()}
    numbered = any(_NUMBERED.fullmatch(name) for name in names)
    left: dict[int, Call] = {}
    right: dict[int, Call] = {}
    met: set[int] = set()
    gone: set[int] = set()
    for (group, operator, number), call in theirs.items():
        mine = ours.get((group, partner.get(operator, -1), number))
        if mine is not None and (numbered or mine.scope == call.scope):
            met.add(call.id)
            right[call.id] = msgspec.structs.replace(
                call, scope=mine.scope, occurrence=mine.occurrence
            )
            end = operator if faced.turned else partner[operator]
            if end in faced.fused:
                left[mine.id], right[call.id] = _unread(mine), _unread(right[call.id])
                inside = (
                    (theirs if faced.turned else ours).get((group, member, number))
                    for member in faced.fused[end]
                )
                gone |= {one.id for one in inside if one is not None}
    for call in target.calls:
        if numbered and call.root == root and call.id not in met and call.scope in names:
            right[call.id] = msgspec.structs.replace(call, scope=f"{call.scope} (target)")
    if not faced.turned:
        met_a = {a for a, _ in faced.pairs}
        made = {
            c.id
            for c in operators(given[0])
            if c.id not in met_a and not c.slots("input") and not c.slots("param") and c.leaf
        }
        gone |= {call.id for (_, operator, _), call in ours.items() if operator in made}
        constants = [
            [c for c in calls if not c.slots("input") and not c.slots("param")] for calls in put_in
        ]
        gone |= {
            call.id
            for call in constants[0]
            if call.op_type not in {other.op_type for other in constants[1]}
        }
    out = [_changed(reference, left), _changed(target, right)]
    left_out = [
        {c.id for c in calls if region.hands_on(run, c)}
        for run, calls in zip((reference, target), put_in)
    ]
    left_out[faced.turned] |= gone
    out = [_without(run, ids) for run, ids in zip(out, left_out)]
    if gone:
        said = (
            f"{len(gone)} calls of operators that passes fused or folded in the other run are "
            "compared by what they end in"
        )
        out[faced.turned].notes = [*out[faced.turned].notes, Note("inside-not-seen", said)]  # type: ignore[misc]
    return out[0], out[1]


def _put_in(run: Run, ran: Mapping[int, int], root: str) -> list[Call]:
    """Calls that the program does not have: constants and changes of layout that Paddle puts in
    when it lowers it.
    """
    return [
        c
        for c in operators(run)
        if c.root == root and c.leaf and c.id not in ran and c.op_type not in DRAWS
    ]


def _without(run: Run, gone: Set[int]) -> Run:
    """The run without some of its leaf calls."""
    if not gone:
        return run
    kept = [c for c in run.calls if c.id not in gone]
    position = {c.id: i for i, c in enumerate(kept)}
    out = Over(
        run,
        [
            msgspec.structs.replace(c, id=i, parent=position.get(c.parent, -1))
            for i, c in enumerate(kept)
        ],
    )
    return ForeignRun(out, run.reader) if isinstance(run, ForeignRun) else out


_NUMBERED = re.compile(r"inner_var\.\d+")


def _executions(run: Run, ran: Mapping[int, int]) -> dict[tuple[Any, int, int], Call]:
    """Calls by (step, operator of the program, which time it ran in that step)."""
    out: dict[tuple[Any, int, int], Call] = {}
    seen: Counter[tuple[Any, int]] = Counter()
    for call in operators(run):
        if call.id in ran:
            key = (call.rank, call.step, call.micro), ran[call.id]
            out[*key, seen[key]] = call
            seen[key] += 1
    return out


def _unread(call: Call) -> Call:
    """A call without its inputs, which counts as depending on everything before it."""
    return msgspec.structs.replace(
        call,
        refs=tuple(r for r in call.refs if not r.slot.startswith(("input", "param"))),
        notes=(*call.notes, UNTOLD),
        program="",
        no_program="a pass fused it with others in the target",
    )


def _changed(run: Run, calls: Mapping[int, Call]) -> Run:
    out = Over(run, [calls.get(c.id, c) for c in run.calls]) if calls else run
    return ForeignRun(out, run.reader) if calls and isinstance(run, ForeignRun) else out


def _ran(run: Run, program: Run, root: str | None = None) -> dict[int, int]:
    """Calls of a run -> operators of its program. root: only calls of this one."""
    made = _unfolded(run, operators(program))
    writers: defaultdict[str, list[int]] = defaultdict(list)
    for call in made:
        for name in _written(call):
            writers[name].append(call.id)
    ran = [c for c in operators(run) if c.kind == "operator" and root in (None, c.root)]
    named = sum(c.scope in writers for c in ran)
    out: dict[int, int] = {}
    for calls in _by_step(ran).values():
        if named >= _LEAST * len(ran):
            out |= {c.id: w[c.occurrence % len(w)] for c in calls if (w := writers.get(c.scope))}
        else:
            out |= in_order(calls, made)
    return out


def _written(operator: Call) -> tuple[str, ...]:
    """The names of the variables that an operator of a program writes."""
    return (
        operator.scope,
        *(note.removeprefix("writes ") for note in operator.notes if note.startswith("writes ")),
    )


def _unfolded(run: Run, made: list[Call]) -> list[Call]:
    """Operators of a program without those that rest on constants and parameters alone, where a run
    shows that Paddle folded them.
    """
    if not any(ref.slot.startswith(f"param.{FOLDED}") for call in run.calls for ref in call.refs):
        return made
    ran = {taking(call) for call in run.calls}
    constant: set[int] = set()
    out = []
    for call in made:
        kept = call.op_type in DRAWS or (bool(taking(call)[1]) and taking(call) in ran)
        if call.leaf and not kept and all(ref.record in constant for ref in call.slots("input")):
            constant.update(ref.record for ref in call.slots("output"))
        else:
            out.append(call)
    return out


def _by_step(calls: Iterable[Call]) -> dict[tuple[int, str, int, int], list[Call]]:
    out: dict[tuple[int, str, int, int], list[Call]] = {}
    for call in calls:
        out.setdefault((call.rank, call.root, call.step, call.micro), []).append(call)
    return out


def attached(run: Run, program: Run) -> Run:
    """A log with the data flow of its program: every tensor gets the operator's inputs, as far as
    the log has them, and attributes.

    A tensor is found by its name (the n-th writer of a name is its n-th print of a step), or by the
    order of operators where names are numbers of the executor's. Of operators whose outputs were
    not printed, what they read counts. Raises UsageError when it fits less than half.
    """
    made = operators(program)
    maker = {ref.record: call.id for call in made for ref in call.slots("output")}
    logged = [c for c in operators(run) if c.kind == "operator" and c.leaf]
    where = _ran(run, program)
    changed: dict[int, Call] = {}
    for calls in _by_step(logged).values():
        found = {c.id: where[c.id] for c in calls if c.id in where}
        changed |= _linked(calls, found, program, maker, seen_only=run.info.kind == _LOG)
    known = len(changed)
    if known < _LEAST * len(logged):
        raise UsageError(
            f"{program.path} is not the program of {run.path}: it writes {known} of its "
            f"{len(logged)} tensors; "
            "give the program that was run (after its passes: Config.enable_save_optim_model)"
        )
    for call in logged:
        if call.id not in changed and not call.slots("input"):
            changed[call.id] = msgspec.structs.replace(call, notes=(*call.notes, UNTOLD))
    note = Note("program", f"data flow from {program.path}: {known} of {len(logged)} tensors")
    out = Over(run, [changed.get(c.id, c) for c in run.calls])
    out.notes = [*run.notes, note]
    return with_programs(
        ForeignRun(out, run.reader) if isinstance(run, ForeignRun) else out, program, where
    )


def _linked(
    calls: Sequence[Call],
    found: Mapping[int, int],
    program: Run,
    maker: Mapping[int, int],
    *,
    seen_only: bool,
) -> dict[int, Call]:
    """The calls with the outputs of others as inputs. found: the operator that made each; maker: by
    record of the program, who wrote it.

    seen_only: the run saw what operators made, not what they read (a log).
    """
    printed: dict[int, int] = {}  # operator -> the record of the log, as the step goes on
    out: dict[int, Call] = {}
    for call in calls:
        operator = found.get(call.id)
        if operator is None:
            continue
        sources: dict[str, int] | None = {}
        seen, todo = (
            {operator},
            [r.record for r in reversed(program.calls[operator].slots("input"))],
        )
        while todo and sources is not None:
            before = maker.get(todo.pop())
            if before is None or before in seen:
                continue
            seen.add(before)
            if before in printed:
                sources[program.calls[before].scope] = printed[before]
            elif program.calls[before].leaf:
                todo += [r.record for r in reversed(program.calls[before].slots("input"))]
            else:
                sources = None  # loops and branches hand on what was made inside
        inner = (
            program.calls[program.calls[operator].parent].parent != -1
            if program.calls[operator].parent != -1
            else False
        )
        told = sources is not None and not inner
        inputs = (
            tuple(Ref(f"input.{name}", record, PROGRAM) for name, record in (sources or {}).items())
            if told
            else ()
        )
        inputs = inputs if seen_only else ()  # a capture saw what was read
        rest = tuple(r for r in call.refs if not inputs or not r.slot.startswith("input"))
        source = program.calls[operator].source or call.source
        notes = (*call.notes, f"{_RUNS}{program.calls[operator].scope}")
        notes = (
            notes
            if call.scope in _written(program.calls[operator]) or not seen_only
            else (*notes, PLACED)
        )
        notes = notes if told or any(r.slot.startswith("input") for r in rest) else (*notes, UNTOLD)
        out[call.id] = msgspec.structs.replace(
            call,
            refs=(*inputs, *rest),
            arguments=program.calls[operator].arguments,
            source=source,
            notes=notes,
        )
        made = call.slots("output")
        if made:
            printed[operator] = made[0].record
    return out


def agreed(reference: Run, target: Run) -> tuple[Run, Run]:
    """Both logs, without the inputs of calls that do not read the same: one log skips operators
    (fused ones) that the other shows.

    What such a call was given cannot be held against each other; it counts as depending on
    everything before it.
    """
    if {reference.info.kind, target.info.kind} != {_LOG}:
        return reference, target
    ours, theirs = _by_operator(reference), _by_operator(target)
    out = []
    for run, mine, others in ((reference, ours, theirs), (target, theirs, ours)):
        cut = {
            call.id: msgspec.structs.replace(
                call,
                refs=tuple(r for r in call.refs if not r.slot.startswith("input")),
                notes=(*call.notes, UNTOLD),
            )
            for key, call in mine.items()
            if key in others
            and {r.slot for r in call.slots("input")}
            != {r.slot for r in others[key].slots("input")}
        }
        changed = Over(run, [cut.get(c.id, c) for c in run.calls]) if cut else run
        out.append(
            ForeignRun(changed, run.reader) if cut and isinstance(run, ForeignRun) else changed
        )
    return out[0], out[1]


_LOG = "paddle log"


def _by_operator(run: Run) -> dict[Any, Call]:
    """The calls of a log by what stays the same when names do not: the operator of the program,
    else the name; and which time it ran.
    """
    out: dict[Any, Call] = {}
    for call in operators(run):
        name = next((note for note in call.notes if note.startswith(_RUNS)), call.scope)
        key, time = (call.rank, call.root, call.step, call.micro, name), 0
        while (*key, time) in out:
            time += 1
        out[*key, time] = call
    return out


def told(result: Comparison, programs: Programs, reference: Run, target: Run) -> Comparison:
    """The comparison with what the programs of both runs differ in, first of all and at the
    findings it concerns.

    reference, target: the runs, whose captured weights are compared by hash where there are none
    beside the programs.
    """
    ran = {
        c.scope: next((n.removeprefix(_RUNS) for n in c.notes if n.startswith(_RUNS)), c.scope)
        for c in operators(reference)
    }
    apart: list[str] = []
    equal: list[str] = []
    findings = list(result.findings)
    for root, one, two in programs.pairs:
        seen = tuple(
            weights_beside(program) or weights_seen(run, root)
            for program, run in ((one, reference), (two, target))
        )
        faced = face(one, two, (seen[0], seen[1]))
        named = f"{root}: " if len(programs.pairs) > 1 else ""
        (apart if faced.differences else equal).extend(f"{named}{line}" for line in faced.lines)
        by_name = {d.name: d for d in faced.differences}
        names = {one.calls[a].scope for a, _ in faced.pairs}
        findings = [
            _explained(f, ran.get(f.name, f.name), by_name, names) if root in ("", f.root) else f
            for f in findings
        ]
    if len(programs.files) == 1:
        findings = [_of_either(finding) for finding in findings]
    if len(programs.pairs) > 1:
        same = sum(line.partition(": ")[2].startswith(EQUAL) for line in equal)
        equal = (
            [f"the programs of {same} of {len(programs.pairs)} predictors are equal"]
            if same
            else []
        )
    return msgspec.structs.replace(
        result, findings=tuple(findings), programs=(*apart, *equal), program_files=programs.files
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
    return msgspec.structs.replace(
        finding, cause=CauseKind.UNKNOWN, sentence=f"{finding.sentence}; {words}"
    )


def _explained(
    finding: Finding, name: str, by_name: Mapping[str, Difference], names: Set[str]
) -> Finding:
    """A finding with what its operator, `name` in the program, differs in there."""
    found = by_name.get(name)
    if found is None:
        return finding
    cause = (
        CauseKind.SEMANTIC
        if finding.verdict == VerdictKind.INTRODUCED
        and not finding.cause
        and found.kind == "attributes"
        else finding.cause
    )
    said = found.words.rpartition(": ")[2] in finding.sentence or (
        found.kind == "weights" and finding.cause == CauseKind.PARAMETER
    )
    at = f" ({name})" if name != finding.name and name in names else ""
    words = "" if said else f"; in its program{at} {found.words}"
    return msgspec.structs.replace(finding, cause=cause, sentence=f"{finding.sentence}{words}")
