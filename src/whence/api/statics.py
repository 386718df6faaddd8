"""Programs beside runs: what two of them differ in before anything is computed, and the data flow a log does not tell.

A program is a run of calls without values (`readers/paddle_program.py`): operators, attributes, who reads what of whom.
"""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from whence import __version__
from whence.api.paddle_calls import with_programs
from whence.errors import UsageError
from whence.readers import GATHERED, UNTOLD, Opened
from whence.records import Call, Note, Over, Ref, Run
from whence.results import CallPair, Comparison, Coverage, Finding, Plan

PROGRAM = "program"
_MOST = 200  # differences that become findings
_WORK = 40_000_000  # pairs of operators that are held against each other
_LEAST = 0.5  # of a log's tensors that a program must write to be its program
_LONGEST = 60  # characters of an attribute


class Difference(NamedTuple):
    """Something two programs do not share. name: of the operator, in the reference where it has it. call: there, -1 where it has none.

    attributes: how many of its attributes differ; 0 when it is something else. words: a clause.
    """

    name: str
    op_type: str
    call: int
    attributes: int
    words: str


class Faced(NamedTuple):
    """Two programs operator by operator: pairs of calls, and what they differ in, in the reference's order."""

    pairs: tuple[tuple[int, int], ...]
    differences: tuple[Difference, ...]
    compared: int

    @property
    def sentence(self) -> str:
        """What is to be said of both, a clause."""
        found = self.differences
        if not found:
            return f"the programs are equal: {len(self.pairs)} operators with {self.compared} attributes"
        first = f"{found[0].words} ({found[0].name})" if not found[0].attributes else f"{found[0].words}"
        attributes = sum(d.attributes for d in found)
        if attributes == 1 and len(found) == 1:
            return f"exactly one attribute differs: {first}"
        return f"the programs differ at {len(found)} operator{'s' if len(found) > 1 else ''}; the first: {first}"


def is_program(run: Run) -> bool:
    """Does this run hold operators without values?"""
    return run.info.kind.endswith(PROGRAM)


# ---- two programs


def face(reference: Run, target: Run) -> Faced:
    """Hold two programs against each other. Operators face each other in order by type and rank; names and numbers may differ."""
    ours, theirs = _operators(reference), _operators(target)
    blocks = _blocks([_token(reference, c) for c in ours], [_token(target, c) for c in theirs], [c.scope for c in ours],
                     [c.scope for c in theirs])  # fmt: skip
    pairs: list[tuple[Call, Call]] = []
    alone: list[tuple[Call, str]] = []
    for a0, a1, b0, b1, equal in blocks:
        if equal or a1 - a0 == b1 - b0:
            pairs += zip(ours[a0:a1], theirs[b0:b1], strict=True)
            continue
        mine, others = ours[a0:a1], theirs[b0:b1]
        alone += [(c, "reference") for c in mine] + [(c, "target") for c in others]
    across = _across(reference, target, pairs)
    found: list[tuple[int, Difference]] = []
    compared = 0
    for a, b in pairs:
        compared += len(a.arguments)
        words, count = _differs(reference, target, a, b, across)
        if words:
            found.append((a.order, Difference(a.scope, a.op_type, a.id, count, words)))
    where = {b.id: a.order for a, b in pairs}
    for call, side in alone:
        order = call.order if side == "reference" else _before(theirs, call, where)
        words = f"only the {side} runs {call.op_type}"
        found.append((order, Difference(call.scope, call.op_type, call.id if side == "reference" else -1, 0, words)))
    found.sort(key=lambda item: item[0])
    return Faced(tuple((a.id, b.id) for a, b in pairs), tuple(d for _, d in found), compared)


def _operators(run: Run) -> list[Call]:
    return sorted((c for c in run.calls if GATHERED not in c.notes), key=lambda c: c.order)


def _token(run: Run, call: Call) -> tuple[str, int]:
    outputs = call.slots("output")
    return call.op_type, len(run.records[outputs[0].record].shape) if outputs else -1


def _blocks(
    ours: Sequence[Any], theirs: Sequence[Any], names: Sequence[str], others: Sequence[str]
) -> list[tuple[int, int, int, int, bool]]:  # fmt: skip
    """(from, to, from, to, equal) of runs of operators that face each other and of what lies between."""
    start, least = 0, min(len(ours), len(theirs))
    while start < least and ours[start] == theirs[start]:
        start += 1
    end = 0
    while end < least - start and ours[-1 - end] == theirs[-1 - end]:
        end += 1
    a, b = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    out = [(0, start, 0, start, True)]
    if len(a) * len(b) > _WORK:
        raise UsageError(f"the programs share {start + end} operators at their ends and then {len(a)} face {len(b)}; that is not compared")
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    out += [
        (start + i0, start + i1, start + j0, start + j1, tag == "equal") for tag, i0, i1, j0, j1 in matcher.get_opcodes()
    ]  # fmt: skip
    return [*out, (len(ours) - end, len(ours), len(theirs) - end, len(theirs), True)]


def _across(reference: Run, target: Run, pairs: Sequence[tuple[Call, Call]]) -> dict[int, int]:
    """Records of the reference -> records of the target that face them as outputs or parameters of partners."""
    out: dict[int, int] = {}
    for a, b in pairs:
        for kind in ("output", "param"):
            out.update((x.record, y.record) for x, y in zip(a.slots(kind), b.slots(kind)) if x.record not in out)
    return out


def _differs(reference: Run, target: Run, a: Call, b: Call, across: Mapping[int, int]) -> tuple[str, int]:
    """(what two operators differ in, how many attributes of it)."""
    words: list[str] = []
    if a.op_type != b.op_type:
        words.append(f"the reference runs {a.op_type} where the target runs {b.op_type}")
    count = 0
    keys = [*a.arguments, *(k for k in b.arguments if k not in a.arguments)] if a.op_type == b.op_type else []
    for key in keys:
        x, y = a.arguments.get(key, _ABSENT), b.arguments.get(key, _ABSENT)
        if x != y and not (x is None and y is _ABSENT) and not (x is _ABSENT and y is None):
            count += 1
            words.append(f"{key} of {a.scope}: {_shown(x)} against {_shown(y)}")
    made = [(r.record, s.record) for r, s in zip(a.slots("output"), b.slots("output"))]
    for x, y in made[:1]:
        one, two = reference.records[x], target.records[y]
        if one.dtype != two.dtype:
            words.append(f"it writes {one.dtype} in the reference and {two.dtype} in the target")
        elif len(one.shape) != len(two.shape) or any(m != n and -1 not in (m, n) for m, n in zip(one.shape, two.shape)):
            words.append(f"it writes {_extents(one.shape)} in the reference and {_extents(two.shape)} in the target")
    mine, others = a.slots("input"), b.slots("input")
    if len(mine) != len(others):
        words.append(f"it reads {len(mine)} tensors in the reference and {len(others)} in the target")
    for ref, other in zip(mine, others):
        if ref.record in across and across[ref.record] != other.record:
            words.append(f"its {ref.slot} comes from another operator in the target")
    for ref, other in zip(a.slots("param"), b.slots("param")):
        one, two = reference.records[ref.record], target.records[other.record]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            words.append(f"its parameter {ref.slot[6:]} is {one.dtype} {_extents(one.shape)} against {two.dtype} {_extents(two.shape)}")
    return "; ".join(words), count


_ABSENT = "absent"
_RUNS = "operator of the program: "


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _extents(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('?' if n < 0 else str(n) for n in shape)}]"


def _before(calls: Sequence[Call], call: Call, where: Mapping[int, int]) -> int:
    """The place in the reference of the last operator before this one of the target that has a partner."""
    known = [where[c.id] for c in calls if c.order < call.order and c.id in where]
    return max(known, default=-1)


def compare(reference: Run, target: Run) -> Comparison:
    """Two programs: `different` when they do other things, else `undecided`, since nothing was computed that could be the same.

    Raises UsageError when only one of the two is a program.
    """
    for one, other in ((reference, target), (target, reference)):
        if not is_program(other):
            raise UsageError(
                f"{one.path} is a program and has no values, {other.path} has: compare two runs and give the program with --program"
            )
    faced = face(reference, target)
    findings = tuple(
        Finding(
            name=d.name, op_type=d.op_type, cause="semantic" if d.attributes else "structural", verdict="structural",
            confidence="certain", step=0, rank=0, evidence=PROGRAM, sentence=d.words, root="model",
        )
        for d in faced.differences[:_MOST]
    )  # fmt: skip
    calls = len(_operators(reference))
    pairs = tuple(CallPair(a, b, "order", "") for a, b in faced.pairs)
    paired_a, paired_b = {a for a, _ in faced.pairs}, {b for _, b in faced.pairs}
    left = tuple(c.id for c in _operators(reference) if c.id not in paired_a)
    right = tuple(c.id for c in _operators(target) if c.id not in paired_b)
    at_fault = len({d.call for d in faced.differences if d.call in paired_a})
    counts = {"structural": at_fault, "undetermined": len(pairs) - at_fault}
    said = "nothing was run, so nothing was measured" + ("" if not faced.differences else f"; {faced.sentence}")
    without = {
        side: tuple(run.calls[i].scope for i in ids)
        for side, run, ids in (("reference", reference, left), ("target", target, right))
        if ids
    }
    return Comparison(
        status="different" if findings else "undecided", evidence=PROGRAM, reference=reference.path, target=target.path,
        findings=findings, first_difference=_first(findings), counts={k: n for k, n in counts.items() if n},
        coverage=Coverage(calls, len(pairs), 0, 0, 0, False), unmatched=len(left) + len(right), incomparable=0, inputs_differ=(),
        versions={"whence": __version__}, plan=Plan(pairs, left, right, ()), rows=(), verdicts=(),
        headline="" if findings else f"{faced.sentence}; nothing was run, so nothing was measured",
        notes=(said,) if findings else (), without_partner=without,
    )  # fmt: skip


def _first(findings: Sequence[Finding]) -> dict[str, Any] | None:
    found = next(iter(findings), None)
    return None if found is None else {"name": found.name, "op_type": found.op_type, "step": 0, "rank": 0, "verdict": found.verdict}


# ---- a program beside a log


def programs(given: str | os.PathLike[str] | Run | Sequence[Any] | None, opened: Callable[[Any], Run]) -> tuple[Run, ...]:
    """The programs a user gave: of the reference, and of the target when it is another. Raises UsageError, UnreadableRun."""
    if given is None:
        return ()
    listed = [given] if isinstance(given, (str, os.PathLike)) or hasattr(given, "calls") else list(given)
    if not 1 <= len(listed) <= 2:
        raise UsageError(f"program takes one (of both runs) or two (of the reference, of the target), not {len(listed)}")
    runs = tuple(opened(one) for one in listed)
    for run in runs:
        if not is_program(run):
            raise UsageError(f"{run.path} is no program; --program takes what a framework saved of a model without its weights (.pdmodel)")
    return runs


def attached(run: Run, program: Run) -> Run:
    """A log with the data flow of its program: every tensor gets the operator's inputs, as far as the log has them, and attributes.

    A tensor is found by its name (the n-th writer of a name is its n-th print of a step), or by the order of operators where names are
    numbers of the executor's. Of operators whose outputs were not printed, what they read counts. Raises UsageError when it fits less
    than half.
    """
    made = _operators(program)
    writers: defaultdict[str, list[int]] = defaultdict(list)
    for call in made:
        for name in (call.scope, *(note.removeprefix("writes ") for note in call.notes if note.startswith("writes "))):
            writers[name].append(call.id)
    maker = {ref.record: call.id for call in made for ref in call.slots("output")}
    logged = [c for c in _operators(run) if c.kind == "operator" and c.leaf]
    named = sum(c.scope in writers for c in logged)
    steps: dict[tuple[int, str, int, int], list[Call]] = {}
    for call in logged:
        steps.setdefault((call.rank, call.root, call.step, call.micro), []).append(call)
    changed: dict[int, Call] = {}
    where: dict[int, int] = {}
    for calls in steps.values():
        if named >= _LEAST * len(logged):
            found = {c.id: w[c.occurrence % len(w)] for c in calls if (w := writers.get(c.scope))}
        else:
            found = _in_order(calls, made)
        changed |= _linked(calls, found, program, maker, seen_only=run.info.kind == _LOG)
        where |= found
    known = len(changed)
    if known < _LEAST * len(logged):
        raise UsageError(
            f"{program.path} is not the program of {run.path}: it writes {known} of its {len(logged)} tensors; "
            "give the program that was run (after its passes: Config.enable_save_optim_model)"
        )
    for call in logged:
        if call.id not in changed and not call.slots("input"):
            changed[call.id] = msgspec.structs.replace(call, notes=(*call.notes, UNTOLD))
    note = Note("program", f"data flow from {program.path}: {known} of {len(logged)} tensors")
    out = Over(run, [changed.get(c.id, c) for c in run.calls])
    out.notes = [*run.notes, note]
    return with_programs(Opened(out, run.reader) if isinstance(run, Opened) else out, program, where)


def _in_order(calls: Sequence[Call], made: Sequence[Call]) -> dict[int, int]:
    """Calls of one step of a log -> operators of a program, where types stand in one order."""
    types, others = [c.op_type for c in calls], [c.op_type for c in made]
    out: dict[int, int] = {}
    for a0, a1, b0, _, equal in _blocks(types, others, types, others):
        if equal:
            out.update((calls[a0 + i].id, made[b0 + i].id) for i in range(a1 - a0))
    return out


def _linked(
    calls: Sequence[Call], found: Mapping[int, int], program: Run, maker: Mapping[int, int], *, seen_only: bool
) -> dict[int, Call]:  # fmt: skip
    """The calls with the outputs of others as inputs. found: the operator that made each; maker: by record of the program, who wrote it.

    seen_only: the run saw what operators made, not what they read (a log).
    """
    printed: dict[int, int] = {}  # operator -> the record of the log, as the step goes on
    out: dict[int, Call] = {}
    for call in calls:
        operator = found.get(call.id)
        if operator is None:
            continue
        sources: dict[str, int] | None = {}
        seen, todo = {operator}, [r.record for r in reversed(program.calls[operator].slots("input"))]
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
        inner = program.calls[program.calls[operator].parent].parent != -1 if program.calls[operator].parent != -1 else False
        told = sources is not None and not inner
        inputs = tuple(Ref(f"input.{name}", record, PROGRAM) for name, record in (sources or {}).items()) if told else ()
        inputs = inputs if seen_only else ()  # a capture saw what was read
        rest = tuple(r for r in call.refs if not inputs or not r.slot.startswith("input"))
        source = program.calls[operator].source or call.source
        notes = (*call.notes, f"{_RUNS}{program.calls[operator].scope}")
        notes = notes if told or any(r.slot.startswith("input") for r in rest) else (*notes, UNTOLD)
        out[call.id] = msgspec.structs.replace(
            call, refs=(*inputs, *rest), arguments=program.calls[operator].arguments, source=source, notes=notes
        )  # fmt: skip
        made = call.slots("output")
        if made:
            printed[operator] = made[0].record
    return out


def agreed(reference: Run, target: Run) -> tuple[Run, Run]:
    """Both logs, without the inputs of calls that do not read the same: one log skips operators (fused ones) that the other shows.

    What such a call was given cannot be held against each other; it counts as depending on everything before it.
    """
    if {reference.info.kind, target.info.kind} != {_LOG}:
        return reference, target
    ours, theirs = _by_operator(reference), _by_operator(target)
    out = []
    for run, mine, others in ((reference, ours, theirs), (target, theirs, ours)):
        cut = {
            call.id: msgspec.structs.replace(
                call, refs=tuple(r for r in call.refs if not r.slot.startswith("input")), notes=(*call.notes, UNTOLD)
            )
            for key, call in mine.items()
            if key in others and {r.slot for r in call.slots("input")} != {r.slot for r in others[key].slots("input")}
        }
        changed = Over(run, [cut.get(c.id, c) for c in run.calls]) if cut else run
        out.append(Opened(changed, run.reader) if cut and isinstance(run, Opened) else changed)
    return out[0], out[1]


_LOG = "paddle log"


def _by_operator(run: Run) -> dict[Any, Call]:
    """The calls of a log by what stays the same when names do not: the operator of the program, else the name; and which time it ran."""
    out: dict[Any, Call] = {}
    for call in _operators(run):
        name = next((note for note in call.notes if note.startswith(_RUNS)), call.scope)
        key, time = (call.rank, call.root, call.step, call.micro, name), 0
        while (*key, time) in out:
            time += 1
        out[*key, time] = call
    return out


def told(result: Comparison, given: Sequence[Run]) -> Comparison:
    """The comparison with what the programs of both runs differ in, at the findings it concerns and as a note."""
    if len(given) < 2:
        return result
    faced = face(given[0], given[1])
    by_name = {d.name: d for d in faced.differences}

    def explained(finding: Finding) -> Finding:
        found = by_name.get(finding.name)
        if found is None:
            return finding
        cause = "semantic" if finding.verdict == "introduced" and not finding.cause else finding.cause
        said = "" if "arguments differ" in finding.sentence else f"; in its program {found.words}"
        return msgspec.structs.replace(finding, cause=cause, sentence=f"{finding.sentence}{said}")

    said = f"programs: {faced.sentence}"
    return msgspec.structs.replace(result, findings=tuple(map(explained, result.findings)), notes=(said, *result.notes))
