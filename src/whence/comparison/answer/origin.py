"""Traces a difference back through the program to the operator where it arises.

Each read of a tensor is matched with the last write before it. The trace follows differences that
rounding does not explain, past operators without a partner, to the first operator whose inputs
agree and whose output does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from whence.align.call_sites import LastWriters
from whence.records import Call, Ref, Run
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, split_slot
from whence.results import (
    GUILTY,
    CallPair,
    Evidence,
    Measured,
    Origin,
    Plan,
    Row,
    TracedInput,
    TracedStep,
    Verdict,
    VerdictKind,
    severity,
)

_LONGEST = 200  # steps of a way that are listed
_AGREE = (
    VerdictKind.IDENTICAL,
    VerdictKind.NOISE,
    VerdictKind.DECLARED,
    VerdictKind.OTHER_FORM,
    VerdictKind.NONDETERMINISTIC,
    VerdictKind.PRECISION,
)


class DataFlow(NamedTuple):
    """The data of a comparison that a trace needs. measured: by (index of the pair, slot of the
    reference); verdicts: the worst one by call of the reference.
    """

    reference: Run
    target: Run
    pairs: Sequence[CallPair]
    measured: Mapping[tuple[int, str], Measured]
    verdicts: Mapping[int, Verdict]


def flow_of(
    reference: Run, target: Run, plan: Plan, rows: Iterable[Row], verdicts: Iterable[Verdict]
) -> DataFlow:
    """The data flow of a finished comparison."""
    worst: dict[int, Verdict] = {}
    for verdict in verdicts:
        call = plan.pairs[verdict.pair].reference
        if call not in worst or severity(verdict.verdict) > severity(worst[call].verdict):
            worst[call] = verdict
    return DataFlow(
        reference,
        target,
        plan.pairs,
        {(row.pair, row.reference_slot): row.measured for row in rows},
        worst,
    )


class OriginTracer:
    """Traces differences to their origin in one comparison. significant: ids of calls whose
    difference rounding does not explain.
    """

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow
        self.calls = sorted(
            (c for c in flow.reference.calls if c.leaf and not has_mark(c, Mark.PUT_TOGETHER)),
            key=lambda c: (c.step, c.micro, c.order),
        )
        self.place = {c.id: i for i, c in enumerate(self.calls)}
        self.pair_of = {p.reference: i for i, p in enumerate(flow.pairs)}
        self._writers = LastWriters(
            (call, ref.record)
            for call in self.calls
            for ref in (*call.slots("output"), *call.slots("mutated"))
        )
        self.significant: set[int] = set()
        # Calls whose output was not captured pass on what they read.
        handing: set[int] = set()
        faulty = False
        for call in self.calls:
            makers = {
                m.id for ref in call.slots("input") if (m := self.maker(call, ref)) is not None
            }
            hit = bool(makers & (self.significant | handing)) or (
                has_mark(call, Mark.INPUTS_UNKNOWN) and faulty
            )
            judged = flow.verdicts.get(call.id)
            verdict = judged.verdict if judged is not None else ""
            faulty |= verdict in GUILTY
            if verdict in GUILTY or (hit and self.differs(call) and verdict not in _AGREE):
                self.significant.add(call.id)
            elif hit and not self.seen(call):
                handing.add(call.id)

    # ---- what is known of a call

    def maker(self, call: Call, ref: Ref) -> Call | None:
        """The last call before this one that wrote the tensor which it reads; None for an input of
        the model.
        """
        return self._writers.before(call, ref.record)

    def _outputs(self, call: Call) -> list[Measured]:
        index = self.pair_of.get(call.id)
        if index is None:
            return []
        refs = (*call.slots("output"), *call.slots("mutated"))
        return [
            m
            for r in refs
            if (m := self.flow.measured.get((index, r.slot))) is not None and m.tier != "none"
        ]

    def seen(self, call: Call) -> bool:
        """Whether an output of the call was compared."""
        return bool(self._outputs(call))

    def differs(self, call: Call) -> bool:
        return any(not m.identical for m in self._outputs(call))

    def rel_l2(self, call: Call) -> float | None:
        values = [m.values.get("rel_l2") for m in self._outputs(call)]
        measured = [v for v in values if v is not None]
        return max(measured) if measured else None

    def first(self) -> Call | None:
        """The first significant call, in the order of execution; without one, the first that
        differs.
        """
        significant = next((c for c in self.calls if c.id in self.significant), None)
        return significant or next((c for c in self.calls if self.differs(c)), None)

    # ---- the trace

    def origin(self, call: Call) -> Origin:
        """The trace from a call's output back to the operator where its difference arises."""
        steps: list[TracedStep] = []
        current, skipped = call, []
        while True:
            inputs = self._inputs(current)
            steps.append(
                TracedStep(
                    current.id,
                    current.module_name,
                    current.op_type,
                    current.occurrence,
                    current.step,
                    self._verdict(current),
                    self.rel_l2(current),
                    inputs,
                )
            )
            following = self._following(current)
            if following is None or len(steps) >= _LONGEST:
                break
            current = following
        # If the trace ends among operators that were not compared, any of them may be the origin.
        while steps and steps[-1].verdict == "not compared" and len(steps) > 1:
            skipped.append(steps.pop().name)
        end = self.flow.reference.calls[steps[-1].call]
        return self._ended(end, tuple(steps), tuple(reversed(skipped)))

    def _verdict(self, call: Call) -> str:
        if not self.seen(call):
            return "not compared"
        verdict = self.flow.verdicts.get(call.id)
        return (
            verdict.verdict
            if verdict is not None
            else (VerdictKind.INHERITED if self.differs(call) else VerdictKind.IDENTICAL)
        )

    def _following(self, call: Call) -> Call | None:
        """The next call of the trace: the significant writer of an input with the largest error,
        else a writer that was not compared; None at the end.
        """
        makers = [m for ref in call.slots("input") if (m := self.maker(call, ref)) is not None]
        wrong = [m for m in makers if m.id in self.significant]
        if wrong:
            return max(wrong, key=lambda m: self.rel_l2(m) or 0.0)
        if self._verdict(call) in GUILTY and all(map(self.seen, makers)):
            return None
        return next((m for m in makers if not self.seen(m)), None)

    def _inputs(self, call: Call) -> tuple[TracedInput, ...]:
        index = self.pair_of.get(call.id)
        out = []
        for ref in (*call.slots("input"), *call.slots("param")):
            maker = self.maker(call, ref) if is_input(ref.slot) else None
            name = maker.module_name if maker is not None else split_slot(ref.slot)[1]
            measured = self.flow.measured.get((index, ref.slot)) if index is not None else None
            out.append(
                TracedInput(
                    ref.slot,
                    name,
                    self._state(measured, maker),
                    measured.values.get("rel_l2") if measured is not None else None,
                    maker.id if maker is not None else -1,
                )
            )
        return tuple(out)

    def _state(self, measured: Measured | None, maker: Call | None) -> str:
        if measured is None or measured.tier == "none":
            return (
                "not compared" if maker is None or not self.seen(maker) else self._state_of(maker)
            )
        if measured.identical:
            return "equal"
        return "differs" if maker is None or maker.id in self.significant else "within noise"

    def _state_of(self, maker: Call) -> str:
        return (
            "differs"
            if maker.id in self.significant
            else "within noise"
            if self.differs(maker)
            else "equal"
        )

    # ---- where it ends

    def _ended(self, end: Call, steps: tuple[TracedStep, ...], skipped: tuple[str, ...]) -> Origin:
        pair = self.flow.pairs[self.pair_of[end.id]] if end.id in self.pair_of else None
        partner = self.flow.target.calls[pair.target] if pair is not None else None
        partner_arguments = partner.arguments if partner is not None else {}
        attributes = (
            {k: (_plain(v), _plain(partner_arguments.get(k))) for k, v in end.arguments.items()}
            if partner is not None
            else {}
        )
        differ = tuple(
            sorted(k for k, (a, b) in attributes.items() if a != b and k in partner_arguments)
        )
        verdict = self.flow.verdicts.get(end.id)
        return Origin(
            steps,
            end.id,
            skipped,
            {k: _plain(v) for k, v in end.arguments.items()},
            {k: _plain(partner_arguments[k]) for k in differ},
            self._inside(end),
            self._missing(end, pair),
            _outcome(verdict, end, self.differs(end)),
            verdict.sentence if verdict is not None else "",
            end.source,
        )

    def _inside(self, end: Call) -> tuple[TracedInput, ...]:
        """Labels and logged lines of the operator's kernel: those between the operator before it
        and itself.
        """
        out: list[TracedInput] = []
        for call in reversed(self.calls[: self.place[end.id]]):
            if call.kind != "label" or call.step != end.step:
                break
            rel = self.rel_l2(call)
            state = (
                "not compared"
                if not self.seen(call)
                else "differs"
                if self.differs(call)
                else "equal as far as shown"
            )
            out.append(TracedInput("label", call.scope, state, rel, call.id))
        return tuple(reversed(out))

    def _missing(self, end: Call, pair: CallPair | None) -> tuple[str, ...]:
        """Inputs that were not captured or have no partner, each with advice, in words."""
        out = []
        if pair is None:
            out.append("it has no partner in the target; pair it by hand with whence compare --map")
        else:
            out += [
                f"the target has no {slot} of it" for slot in pair.only_reference if is_input(slot)
            ]
        if has_mark(end, Mark.INPUTS_UNKNOWN):
            out.append(
                f"{Mark.INPUTS_UNKNOWN}: give the program that ran (--program), or capture "
                "with whence run"
            )
        if end.no_program and "was not captured" in end.no_program:
            out.append(
                f"{end.no_program}: capture inputs too (whence run hooks both sides; a cache "
                "that is written in place is an input)"
            )
        reads = [r for r in end.slots("input") if self.flow.reference.records[r.record].why]
        out += [
            f"{r.slot}: {self.flow.reference.records[r.record].why} (--keep all keeps elements)"
            for r in reads
        ]
        return tuple(out)


def _outcome(verdict: Verdict | None, call: Call, differs: bool) -> str:
    """The result of replaying the operator: which side is wrong, or why that is not known."""
    if verdict is None or verdict.evidence != Evidence.REPLAY:
        if verdict is not None and verdict.verdict == VerdictKind.PARAM_DIFF and call.program:
            return "not asked: its parameters differ"
        why = call.no_program if not call.program else ""
        return f"inputs insufficient{f': {why}' if why else ''}" if differs else "equal"
    if verdict.verdict in GUILTY or verdict.verdict == VerdictKind.PARAM_DIFF:
        return "reference wrong" if verdict.side == "reference" else "target wrong"
    return "both within bound: another algorithm, not another result"


def _plain(value: Any) -> Any:
    """An attribute as a JSON value."""
    return value if isinstance(value, (int, float, str, bool)) or value is None else str(value)
