"""What a comparison says of one module, in lines: the verdict and its reason, where the error comes
from, its calls and tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from whence.report.tables import called_at, clean, columns, count, shape
from whence.results import CauseKind, ModuleCall, ModuleResult, Row, VerdictKind

_MEANS: dict[str, str] = {
    VerdictKind.IDENTICAL: "bitwise equal",
    VerdictKind.NOISE: "rounding",
    VerdictKind.DECLARED: "as declared",
    VerdictKind.OTHER_FORM: "another form, taken back behind it",
    VerdictKind.INHERITED: "the error came in with its inputs",
    VerdictKind.AMPLIFIED: "the error came in with its inputs, and grew as its code lets it grow",
    VerdictKind.PRECISION: "more than rounding, as a low-precision intermediate leaves it",
    VerdictKind.INTRODUCED: "the error arises here",
    VerdictKind.PARAM_DIFF: "its parameters differ",
    VerdictKind.STRUCTURAL: "its structure differs",
    VerdictKind.NONDETERMINISTIC: "the reference does not repeat itself here",
    VerdictKind.INCOMPARABLE: "could not be compared",
    VerdictKind.UNDETERMINED: "whence cannot tell",
}
_TENSORS = 5


def module_lines(module: ModuleResult) -> Iterator[str]:
    """The whole text, at most ten lines."""
    yield f"{clean(module.name)} ({clean(module.op_type)}): {meaning(module)}"
    for title, text in module_rows(module):
        yield f"  {title:<11}{text}"
    shown = sorted(module.call.tensors, key=lambda row: row.measured.identical)
    table = columns([_cells(row) for row in shown[:_TENSORS]])
    for number, line in enumerate(table):
        yield f"  {'' if number else 'tensors':<11}{line}"
    if len(shown) > _TENSORS:
        yield f"  {'':<11}... {count(len(shown) - _TENSORS)} more in .tensors"


def meaning(module: ModuleResult) -> str:
    """The meaning of the differences, and its certainty."""
    words = f"{module.verdict}: {_MEANS.get(module.verdict, module.verdict)}"
    first = module.findings[0] if module.findings else None
    if module.inside and not module.introduced:
        name = clean(module.inside[0].name)
        words = (
            f"{module.verdict}: its own code adds no error; the fault is in {name}, inside of it"
        )
    basis = [
        *([str(first.cause)] if first is not None and first.cause != CauseKind.UNKNOWN else []),
        *([str(module.confidence)] if module.confidence else []),
        *([f"by {module.evidence}"] if module.evidence else []),
    ]
    return f"{words} ({', '.join(basis)})" if basis else words


def module_rows(module: ModuleResult) -> Iterator[tuple[str, str]]:
    """(title, text) of each line except those of tensors."""
    if module.sentence and module.verdict != VerdictKind.IDENTICAL:
        yield "why", clean(module.sentence)
    if text := _came_in(module.call):
        yield "error", text
    if lines := list(filter(None, (called_at(f.source) for f in module.findings))):
        yield "called at", clean(lines[0])
    if len(module.calls) > 1:
        kinds = Counter(str(call.verdict) for call in module.calls)
        parts = ", ".join(f"{count(n)} {kind}" for kind, n in kinds.items())
        worst = module.call
        yield "calls", f"{parts}; this is step {worst.step}, rank {worst.rank}"


def size(row: Row) -> str:
    """How far apart the two tensors are."""
    if row.measured.identical:
        return "bitwise equal"
    if row.measured.tier == "none":
        return f"not measured: {clean(row.measured.why)}" if row.measured.why else "not measured"
    return f"rel_l2 {row.error:.2g}" if row.error is not None else "differs, not finite"


def _came_in(call: ModuleCall) -> str:
    """The error at the output, compared with the error at the inputs."""
    after, before = call.worst, call.worst_input
    if after is None or after.measured.identical:
        return ""
    text = f"{clean(after.reference_slot)} {size(after)}"
    if before is None:
        return text
    if before.measured.identical:
        return f"{text}; its inputs and parameters are bitwise equal"
    return f"{text}; came in: {clean(before.reference_slot)} {size(before)}"


def _cells(row: Row) -> tuple[str, str, str]:
    reference = f"{row.reference_dtype}{shape(row.reference_shape)}"
    target = f"{row.target_dtype}{shape(row.target_shape)}"
    kind = reference if reference == target else f"{reference} / {target}"
    return row.reference_slot, kind, size(row)
