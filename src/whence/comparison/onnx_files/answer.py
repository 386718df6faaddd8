"""Two ONNX graphs as a comparison: `same` where they compute the same, element by element;
`different` where something proves that they do not; else `undecided`, since nothing was run.
"""

from __future__ import annotations

import shlex

from whence import dtypes
from whence._version import __version__
from whence.comparison.onnx_files.differences import Differences, differences
from whence.comparison.onnx_files.graph import Graph, Node, is_session, of_file, of_session
from whence.comparison.onnx_files.normal_form import has_codes, normal_form
from whence.comparison.onnx_files.pairing import Pairs, pair
from whence.comparison.onnx_files.regions import Difference, Kind
from whence.comparison.onnx_files.weights import State
from whence.errors import UsageError
from whence.readers.formats.onnx_model import KIND
from whence.records import Run
from whence.results import (
    CallPair,
    CauseKind,
    Comparison,
    Confidence,
    Coverage,
    Evidence,
    Finding,
    NextStep,
    Plan,
    Status,
    VerdictKind,
)

_MOST = 200  # differences that become findings
_SHOWN = 8  # that are spelt out
_NOT_RUN = "nothing was run"
_CAUSES = {Kind.ATTRIBUTE: CauseKind.SEMANTIC, Kind.WEIGHT: CauseKind.PARAMETER}


def is_onnx_file(run: Run) -> bool:
    """Was the run opened from a model's file?"""
    return run.info.kind == KIND


def can_compare(reference: Run, target: Run) -> bool:
    """Is one a model's file, and the other such a file or the capture of one?"""
    runs = reference, target
    return any(map(is_onnx_file, runs)) and all(is_onnx_file(r) or is_session(r) for r in runs)


def compare(reference: Run, target: Run) -> Comparison:
    """Compare two models before anything is computed. Raises UsageError where `can_compare` is
    not.
    """
    if not can_compare(reference, target):
        raise UsageError(f"{reference.path} and {target.path} are not two ONNX graphs")
    graphs = [of_file(run) if is_onnx_file(run) else of_session(run) for run in (reference, target)]
    without = has_codes(graphs[0]) != has_codes(graphs[1])
    first, second = (
        normal_form(a, b, without_codes=without) for a, b in (graphs, reversed(graphs))
    )
    pairs = pair(first, second)
    all_differences = differences(pairs)
    proved = [d for d in all_differences.found if d.proves]
    doubts = [d for d in all_differences.found if not d.proves]
    reasons = _reasons(first, second, all_differences)
    is_copy = not doubts and _is_in_16_bits(first, second, all_differences)
    is_undecided = doubts or (reasons and not is_copy)
    status = Status.DIFFERENT if proved else Status.UNDECIDED if is_undecided else Status.SAME
    sentence = _sentence(all_differences, proved, doubts, reasons, pairs)
    findings = tuple(map(_finding, proved[:_MOST]))
    return _comparison(
        (reference, target),
        pairs,
        (status, _passed(status, is_copy=is_copy)),
        findings,
        sentence,
        tuple(_lines(sentence, proved, doubts)),
        (*_notes(first, second), *(reasons if proved or doubts else ())),
    )


def _comparison(
    runs: tuple[Run, Run],
    pairs: Pairs,
    answer: tuple[Status, VerdictKind],
    findings: tuple[Finding, ...],
    sentence: str,
    lines: tuple[str, ...],
    notes: tuple[str, ...],
) -> Comparison:
    reference, target = runs
    status, passed = answer
    at_fault = {f.name for f in findings}
    whole = _call_pairs(pairs)
    guilty = sum(reference.calls[p.reference].scope in at_fault for p in whole)
    counts = {VerdictKind.STRUCTURAL: guilty, passed: len(whole) - guilty}
    lone = _without_partner(pairs)
    first = next(iter(findings), None)
    return Comparison(
        status=status,
        evidence=Evidence.PROGRAM,
        reference=reference.path,
        target=target.path,
        findings=findings,
        first_difference=None
        if first is None
        else {
            "name": first.name,
            "op_type": first.op_type,
            "step": 0,
            "rank": 0,
            "verdict": first.verdict,
        },
        counts={k: n for k, n in counts.items() if n},
        coverage=Coverage(len(whole) + len(lone.get("reference", ())), len(whole), 0, 0, 0, False),
        unmatched=sum(len(nodes) for nodes in lone.values()),
        incomparable=0,
        inputs_differ=(),
        versions={"whence": __version__},
        plan=Plan(whole, (), (), ()),
        rows=(),
        verdicts=(),
        headline=sentence if status != Status.DIFFERENT else "",
        notes=notes,
        without_partner=lone,
        programs=lines,
        next=() if status == Status.SAME else _next(reference, target),
    )


def _passed(status: Status, *, is_copy: bool) -> VerdictKind:
    """The verdict of the nodes at which nothing is at fault."""
    if status != Status.SAME:
        return VerdictKind.UNDETERMINED
    return VerdictKind.PRECISION if is_copy else VerdictKind.IDENTICAL


def _call_pairs(pairs: Pairs) -> tuple[CallPair, ...]:
    """Each node of both files once."""
    out, seen = [], (set[int](), set[int]())
    for a in pairs.reference.nodes:
        b = pairs.partner.get(id(a))
        if b is None or -1 in (a.place, b.place) or a.place in seen[0] or b.place in seen[1]:
            continue
        seen[0].add(a.place)
        seen[1].add(b.place)
        out.append(CallPair(a.place, b.place, "structure", ""))
    return tuple(out)


def _without_partner(pairs: Pairs) -> dict[str, tuple[str, ...]]:
    sides = {
        "reference": [n.name for n in pairs.reference.nodes if id(n) not in pairs.partner],
        "target": [n.name for n in pairs.target.nodes if id(n) not in pairs.turned],
    }
    return {side: tuple(dict.fromkeys(names)) for side, names in sides.items() if names}


def _finding(difference: Difference) -> Finding:
    node, is_weight = difference.node, difference.kind == Kind.WEIGHT
    return Finding(
        name=node.name,
        op_type=node.said,
        cause=_CAUSES.get(difference.kind, CauseKind.STRUCTURAL),
        verdict=VerdictKind.PARAM_DIFF if is_weight else VerdictKind.STRUCTURAL,
        confidence=Confidence.CERTAIN,
        step=0,
        rank=0,
        evidence=Evidence.PROGRAM,
        sentence=difference.words,
        root="model",
        slot=f"param.{difference.weight}" if is_weight else "",
    )


# ---- sentences


def _reasons(reference: Graph, target: Graph, found: Differences) -> list[str]:
    """What keeps two graphs without a difference from computing the same, bit for bit."""
    out = [f"{_count(n, 'weight')}: {words}" for words, n in found.copies.items()]
    if reference.casts != target.casts:
        counts = len(reference.casts), len(target.casts)
        if sorted(reference.casts) != sorted(target.casts):
            out.append(f"casts between floating types: {counts[0]} against {counts[1]}")
    if len(reference.quantised) != len(target.quantised):
        counts = len(reference.quantised), len(target.quantised)
        out.append(f"values that are rounded to codes: {counts[0]} against {counts[1]}")
    used = {n.op_type for g in (reference, target) for n in g.nodes}
    out += [
        f"the function {name} of the models is another one, which is not looked into"
        for name in sorted(reference.functions.keys() | target.functions.keys())
        if name in used and reference.functions.get(name) != target.functions.get(name)
    ]
    given = [{g.dtypes.get(v, "") for v in g.inputs} - {""} for g in (reference, target)]
    if all(given) and given[0] != given[1] and not out:
        out.append(f"inputs are {_listed(given[0])} against {_listed(given[1])}")
    return out


def _is_in_16_bits(reference: Graph, target: Graph, found: Differences) -> bool:
    """Does the target have most of its weights in 16 bits, all of them rounded from the
    reference's, so that its casts are those of the file and not of a place, and is that all?
    """
    return (
        (found.is_narrowed or dtypes.is_half(target.precision()))
        and found.states[State.ROUNDED] == sum(found.copies.values()) > 0
        and len(reference.quantised) == len(target.quantised)
        and reference.functions == target.functions
    )


def _listed(words: set[str]) -> str:
    return " and ".join(sorted(words))


def _sentence(
    all_differences: Differences,
    proved: list[Difference],
    doubts: list[Difference],
    reasons: list[str],
    pairs: Pairs,
) -> str:
    if proved:
        first = _said(proved[0])
        if len(proved) == 1 and not doubts:
            what = {
                Kind.ATTRIBUTE: "attribute differs",
                Kind.WEIGHT: "weight differs",
                Kind.WIRING: "input differs",
            }.get(proved[0].kind, "node differs")
            return f"exactly one {what}: {first}; {_NOT_RUN}"
        return f"{_count(len(proved), 'difference')}; the first: {first}; {_NOT_RUN}"
    attributes = _count(all_differences.attributes, "attribute")
    weights = _count(sum(all_differences.states.values()), "weight")
    held = f"{_count(len(pairs.partner), 'node')} with {attributes} and {weights}"
    if doubts:
        return (
            f"{_count(len(doubts), 'place')} could not be compared; the first: "
            f"{_said(doubts[0])}; of {held}, all else is the same; {_NOT_RUN}"
        )
    if reasons:
        size = all_differences.rounding
        by = f"by {size:.1g} of a weight at most, " if size else ""
        words = "; ".join(reasons)
        return f"the graphs are the same but for precision ({by}{words}); {_NOT_RUN}"
    folded = all_differences.states[State.FOLDED]
    extra = f", {folded} of them with a norm folded in" if folded else ""
    return f"the graphs are the same: {held}{extra}; {_NOT_RUN}"


def _said(difference: Difference) -> str:
    return f"node {_called(difference.node)}: {difference.words}"


def _called(node: Node) -> str:
    return f"{node.name} ({node.said})"


def _lines(sentence: str, proved: list[Difference], doubts: list[Difference]) -> list[str]:
    """What proves that they differ in a sentence, then each difference, certain ones first, where
    there is more than one.
    """
    listed = [_said(d) for d in proved]
    listed += [f"not compared: {_said(d)}" for d in doubts]
    if len(listed) < 2:
        return [sentence] if proved else []
    more = len(listed) - _SHOWN
    first = [sentence] if proved else []
    return [*first, *listed[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _notes(reference: Graph, target: Graph) -> list[str]:
    out = []
    versions = [g.opsets.get("") for g in (reference, target)]
    if versions[0] != versions[1] and None not in versions:
        out.append(f"opset {versions[0]} in the reference, {versions[1]} in the target")
    names = [f"{', '.join(g.inputs)} -> {', '.join(g.outputs)}" for g in (reference, target)]
    if reference.inputs != target.inputs and not any("#" in n for n in names):
        out.append(f"inputs are called {', '.join(reference.inputs)} in the reference, "
                   f"{', '.join(target.inputs)} in the target")  # fmt: skip
    return out


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _next(reference: Run, target: Run) -> tuple[NextStep, ...]:
    """Both models run on one input, and compared; what is captured already stays."""
    commands, paths = [], []
    for side, run in (("runs/ref", reference), ("runs/tgt", target)):
        is_file = is_onnx_file(run)
        paths.append(side if is_file else shlex.quote(run.path))
        if is_file:
            words = f"python serve.py {shlex.quote(run.path)}"
            commands.append(f"whence run -o {side} -- {words}")
    commands.append(f"whence compare {' '.join(paths)}")
    decides = "what comes of it at the outputs (serve.py: your program, given the model)"
    return (NextStep(" && ".join(commands), decides, fill_in=True),)
