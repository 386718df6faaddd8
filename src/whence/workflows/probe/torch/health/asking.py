"""Numeric health of one call: which operators lose precision that the outputs need.

To measure how an operator's loss affects the outputs, the loss is inserted into a float64 run, and
its outputs are compared with those of a run without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from whence.results.probe import (
    HealthFinding,
    Held,
    OperatorPlace,
    Property,
    PropertyAnswer,
    Symptom,
)
from whence.workflows.probe.torch.answering import Unanswered
from whence.workflows.probe.torch.health.figures import Figures, figures, inputs_within
from whence.workflows.probe.torch.health.operands import Operands, Reading
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import Judge, said
from whence.workflows.probe.torch.measuring import relative_rms
from whence.workflows.probe.torch.outputs import Outputs, equal_outputs
from whence.workflows.probe.torch.trace import Key, TracedOperator

AMPLIFIES = 32.0
"""Least amplification, in roundings of the inputs, for an operator's loss to be examined:
5 bits.
"""
MATTERS = 32.0
"""Least change of the outputs, in roundings of the model's dtype, for a loss to be reported."""
SATURATED = 0.5
"""Share of saturated softmax rows, or elements of a bounded function, from which it is reported."""
_MOST = 24
"""Number of operators whose loss is inserted into a run of its own: those with the largest loss."""
_SUMS = ("add", "sub", "rsub", "sum", "mean", "var", "std", "cumsum", "logsumexp")


class _Looked(NamedTuple):
    """One operator of the run, with the figures of its loss."""

    number: int
    operator: TracedOperator
    figures: Figures


def health(judge: Judge, inputs: CallInputs) -> PropertyAnswer:
    """Run the call once and examine every operator; report a loss when the outputs show it."""
    looked: dict[Key, Figures] = {}
    left_out: set[str] = set()

    def look(key: Key, read: Operands, results: list[torch.Tensor]) -> None:
        try:
            looked[key] = figures(read, results)
        except Exception:  # noqa: BLE001 - dtypes and layouts that hardly any operator takes
            left_out.add(key[2])

    try:
        reading = Reading(judge.subject.model, look)
        judge.subject.run(inputs, reading.listening())
    except Exception as error:  # whatever the user's model raises
        raise Unanswered(f"no operator can be looked at: {said(error)}", Held.UNKNOWN) from error
    operators = [
        _Looked(reading.by_key[key], reading.operators[reading.by_key[key]], found)
        for key, found in looked.items()
    ]
    effects = _Effects(judge, inputs)
    notes = [f"not looked at: {_named(name)}" for name in sorted(left_out)]
    born = _born(operators, effects, notes)
    losses = _losses(operators, effects, judge.unit, notes)
    findings = (*born, *losses, *_at_end(operators), *_saturated(operators))
    held = Held.VIOLATED if born else Held.UNHEALTHY if findings else Held.HEALTHY
    return PropertyAnswer(
        Property.HEALTH,
        held,
        cause=_cause(findings),
        power=_power(operators, judge.unit),
        findings=tuple(_by_line(findings)),
        notes=tuple(notes),
        next="whence probe --only precision: which modules may be narrower",
    )


def _cause(findings: tuple[HealthFinding, ...]) -> str:
    if not findings:
        return ""
    worst = findings[0]
    return f"{worst.symptom} in {worst.first.operator}: {worst.meaning}"


def _power(operators: list[_Looked], unit: float) -> str:
    """Say what was examined, and the largest loss."""
    seen = [o for o in operators if o.figures.looked_at]
    if not seen:
        return "no operator runs in float64: only NaN, Inf and the ends of the range were looked at"
    worst = max(seen, key=lambda o: o.figures.amplification)
    key = worst.operator.key
    return (
        f"{len(seen)} of {len(operators)} operators: a loss that moves the outputs by more than "
        f"{MATTERS * unit:.1g} rms would be seen; the largest amplification is "
        f"{worst.figures.amplification:.2g} ({_named(key[2])} in {key[0] or 'the model itself'})"
    )


# ---- findings


def _born(
    operators: list[_Looked], effects: _Effects, notes: list[str]
) -> tuple[HealthFinding, ...]:
    """Operators that produce NaN or Inf from finite inputs, when the outputs show it."""
    born = [o for o in operators if o.figures.born]
    if not born:
        return ()
    without = effects.without_births()
    if equal_outputs(without, effects.as_it_runs()):
        places = ", ".join(sorted({_named(o.operator.key[2]) for o in born}))
        notes.append(f"infinities of {places} reach no output: the largest numbers do as well")
        return ()
    shown = [
        o
        for o in born[:_MOST]
        if not equal_outputs(without, effects.without_births(o.operator.key))
    ]
    return tuple(
        _finding(
            o,
            Symptom.NONFINITE,
            share=o.figures.born / o.figures.elements,
            meaning=f"{o.figures.born} of {o.figures.elements} elements are NaN or Inf, of finite "
            "inputs, and the outputs show it",
        )
        for o in shown or born[:1]
    )


def _losses(
    operators: list[_Looked], effects: _Effects, unit: float, notes: list[str]
) -> tuple[HealthFinding, ...]:
    """Operators that amplify roundings or underflow, when the outputs change by it."""
    losing = [o for o in operators if o.figures.amplification >= AMPLIFIES or o.figures.underflow]
    if not losing:
        return ()
    losses = {o.operator.key: _lost(o.figures) for o in losing}
    together = effects.of(losses)
    if together is None:
        notes.append(
            f"{len(losing)} operators amplify roundings by {AMPLIFIES:.0f} or more, or underflow; "
            "what the outputs see of it was not measured: the model does not run in float64"
        )
        return ()
    if together < MATTERS * unit:
        return ()
    losing.sort(key=lambda o: -max(o.figures.amplification, float(bool(o.figures.underflow))))
    found = []
    for one in losing[:_MOST]:
        effect = effects.of({one.operator.key: losses[one.operator.key]})
        if effect is not None and effect >= MATTERS * max(unit, one.figures.unit):
            found.append(_loss(one, effect))
    return tuple(sorted(found, key=lambda finding: -(finding.effect or 0.0)))


def _lost(found: Figures) -> Figures:
    """The loss, with an amplification too small to count set to 0."""
    return found if found.amplification >= AMPLIFIES else found._replace(amplification=0.0)


def _loss(one: _Looked, effect: float) -> HealthFinding:
    found, name = one.figures, _named(one.operator.key[2])
    moved = f"the outputs move by {effect:.2g} rms" if effect < math.inf else "outputs become Inf"
    if found.amplification < AMPLIFIES:
        share = found.underflow / found.elements
        text = f"{100 * share:.3g} % of its results are too small for {found.dtype}; {moved}"
        return _finding(one, Symptom.UNDERFLOW, share=share, effect=effect, meaning=text)
    is_sum = name.removeprefix("aten.").split(".")[0].rstrip("_").startswith(_SUMS)
    symptom = Symptom.CANCELLATION if is_sum else Symptom.AMPLIFICATION
    lost, digits = math.log2(found.amplification), -math.log2(found.unit)
    text = (
        f"loses {lost:.1f} of {digits:.0f} bits: a rounding of what it reads is "
        f"{found.amplification:.3g} times larger in its result; {moved}"
    )
    return _finding(one, symptom, effect=effect, meaning=text, amplification=found.amplification)


def _at_end(operators: list[_Looked]) -> list[HealthFinding]:
    """Operators whose results reach the end of the range although their inputs do not."""
    out = []
    for one in operators:
        found = one.figures
        if found.at_end:
            most = float(torch.finfo(getattr(torch, found.dtype)).max)
            text = (
                f"{found.at_end} of {found.elements} elements: the largest is {found.largest:.3g}, "
                f"{most / found.largest:.2g} times below the end of {found.dtype}"
            )
            share = found.at_end / found.elements
            out.append(_finding(one, Symptom.RANGE, share=share, meaning=text))
    return sorted(out, key=lambda finding: -finding.largest)


def _saturated(operators: list[_Looked]) -> list[HealthFinding]:
    """Softmax and bounded functions whose results reach their bound."""
    out = []
    for one in operators:
        found = one.figures
        share = found.saturated / max(found.saturable, 1)
        if share >= SATURATED:
            text = (
                f"{100 * share:.0f} % of {found.saturable} rows or elements are at the bound: "
                "other inputs there do not reach the result, and gradients are 0"
            )
            out.append(_finding(one, Symptom.SATURATION, share=share, meaning=text))
    return sorted(out, key=lambda finding: -finding.share)


def _finding(one: _Looked, symptom: Symptom, **values: object) -> HealthFinding:
    key, operator = one.operator.key, one.operator
    place = OperatorPlace(_named(key[2]), key[0], operator.op_type, operator.line)
    return HealthFinding(symptom, place, one.figures.dtype, largest=one.figures.largest, **values)  # type: ignore[arg-type]


def _by_line(findings: Iterable[HealthFinding]) -> list[HealthFinding]:
    """One finding for each line of code and symptom, with the other modules that show the same."""
    from msgspec.structs import replace

    out: dict[tuple[str, str, str], HealthFinding] = {}
    for finding in findings:
        key = finding.symptom, finding.first.operator, finding.first.line
        first = out.get(key)
        if first is None:
            out[key] = finding
        elif finding.first.scope not in (first.first.scope, *first.also):
            out[key] = replace(first, also=(*first.also, finding.first.scope))
    return list(out.values())


def _named(operator: str) -> str:
    return operator.removesuffix(".default")


_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


class _Effects:
    """Runs one call with losses inserted. Creating it raises what a copy of the model in float64
    raises.
    """

    def __init__(self, judge: Judge, inputs: CallInputs) -> None:
        self._judge, self._inputs = judge, inputs

    def of(self, losses: Mapping[Key, Figures]) -> float | None:
        """How far these losses together change the outputs: the largest change, in root mean
        squares of an output.

        Infinite when they make an output NaN or Inf. None when the model cannot run in float64, or
        none of these operators runs there.
        """
        subject = self._judge.wide()
        if subject is None:
            return None
        met: set[Key] = set()

        def look(key: Key, read: Operands, results: list[Any]) -> Any:
            if key not in losses:
                return None
            met.add(key)
            return _with_loss(losses[key], read, results[0])

        try:
            base = self._judge.base(self._inputs, wide=True)
            reading = Reading(subject.model, look)
            changed = subject.run(self._inputs, reading.listening())
        except Exception:  # noqa: BLE001 - whatever the user's model raises in float64
            return None
        finally:
            self._judge.subject.restore()  # what both share, as a closure may
        return _outputs_apart(base, changed) if met else None

    def without_births(self, spared: Key | None = None) -> Outputs:
        """The model's results when NaN and Inf that an operator produces from finite inputs are
        replaced.

        NaN becomes 0, Inf the largest finite number. spared: an operator whose results are not
        replaced. Raises what the model raises.
        """

        def look(key: Key, read: Operands, results: list[Any]) -> Any:
            if key == spared or bool(results[0].isfinite().all()) or not inputs_within(read, 1.0):
                return None
            return results[0].nan_to_num()

        subject = self._judge.subject
        return subject.run(self._inputs, Reading(subject.model, look).listening())

    def as_it_runs(self) -> Outputs:
        """The results of the unchanged model."""
        return self._judge.base(self._inputs)


def _with_loss(lost: Figures, read: Operands, result: torch.Tensor) -> torch.Tensor:
    """The float64 result with the operator's loss added: from inputs rounded differently, and with
    values below the smallest normal number rounded to the grid of the dtype's subnormals.
    """
    changed = (
        read.in_float64(1, lost.unit)[0].reshape(result.shape) if lost.amplification else result
    )
    if not lost.underflow:
        return changed
    info = torch.finfo(_DTYPES[lost.dtype])
    step = info.smallest_normal * info.eps  # between subnormal numbers
    is_small = changed.abs() < info.smallest_normal
    return torch.where(is_small, (changed / step).round() * step, changed)


def _outputs_apart(base: Outputs, changed: Outputs) -> float:
    """The largest relative distance over all outputs; 0 when no output is floating-point."""
    pairs = ((a, changed[name]) for name, a in base.items() if name in changed)
    return max(
        (relative_rms(a, b) for a, b in pairs if a.is_floating_point() and a.shape == b.shape),
        default=0.0,
    )
