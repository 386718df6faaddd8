"""What a comparison says of one module: its calls, their tensors, and where its error comes from.

`result["layers.3.mlp"]` makes it of the rows, verdicts and findings of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from whence.display import Described, Displayed
from whence.records.slots import is_read, is_written
from whence.results.rows import Row
from whence.results.verdict import (
    GUILTY,
    VERDICTS,
    Confidence,
    Evidence,
    Finding,
    Verdict,
    VerdictKind,
    severity,
)

_CAME_IN = (VerdictKind.INHERITED, VerdictKind.AMPLIFIED)


class ModuleCall(Described, msgspec.Struct, frozen=True):
    """One call of a module, and what was compared of it.

    name, op_type: of the module. pair: index into `Plan.pairs`. verdict: what the differences of
    the whole call mean. tensors: its pairs of tensors. verdicts: of the code of the module itself,
    the worst first; of a container one for each stretch between its children.
    """

    name: str
    op_type: str
    pair: int
    step: int
    rank: int
    occurrence: int
    verdict: VerdictKind
    tensors: tuple[Row, ...]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def introduced(self) -> bool:
        """Does its error arise here?"""
        return self.verdict in GUILTY

    @property
    def inherited(self) -> bool:
        """Did its error come in with its inputs?"""
        return self.verdict in _CAME_IN

    @property
    def worst(self) -> Row | None:
        """The output with the largest error; None where no output could be measured."""
        return _worst(row for row in self.tensors if is_written(row.reference_slot))

    @property
    def worst_input(self) -> Row | None:
        """The input or parameter with the largest error; None where none could be measured."""
        return _worst(row for row in self.tensors if is_read(row.reference_slot))

    def __getitem__(self, slot: str) -> Row:
        """The pair of tensors of a slot ("output.0"). Raises KeyError that lists the slots."""
        return _of_slot(self.name, self.tensors, slot)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def _ipython_key_completions_(self) -> list[str]:
        return [row.reference_slot for row in self.tensors]


class ModuleResult(Displayed, msgspec.Struct, frozen=True):
    """What a comparison says of one module.

    calls: in the order of the comparison. findings: of these calls; inside: findings of the modules
    below it. Verdict, evidence, sentence and error are those of `call`, the call that is worst.
    """

    name: str
    op_type: str
    calls: tuple[ModuleCall, ...]
    findings: tuple[Finding, ...] = ()
    inside: tuple[Finding, ...] = ()

    @property
    def call(self) -> ModuleCall:
        """The call with the worst verdict; among equals the one with the largest error."""
        return max(self.calls, key=_badness)

    @property
    def verdict(self) -> VerdictKind:
        """What the differences mean: "introduced", "inherited", "noise", "identical", ..."""
        return self.call.verdict

    @property
    def introduced(self) -> bool:
        """Does an error arise in this module's own code or parameters?"""
        return any(call.introduced for call in self.calls)

    @property
    def inherited(self) -> bool:
        """Does an error come in, and none arise here?"""
        return not self.introduced and any(call.inherited for call in self.calls)

    @property
    def worst(self) -> Row | None:
        """The output with the largest error, of all calls; None where none could be measured."""
        return _worst(row for call in self.calls if (row := call.worst) is not None)

    @property
    def error(self) -> float | None:
        """The largest error of an output, as relative 2-norm; None where it is not defined."""
        worst = self.worst
        return worst.error if worst is not None else None

    @property
    def evidence(self) -> Evidence:
        """What the verdict rests on."""
        return self._told.evidence if self._told is not None else Evidence.NONE

    @property
    def confidence(self) -> Confidence:
        """How sure the verdict is."""
        return self._told.confidence if self._told is not None else Confidence.NONE

    @property
    def sentence(self) -> str:
        """Why the verdict is what it is."""
        return self._told.sentence if self._told is not None else ""

    @property
    def tensors(self) -> tuple[Row, ...]:
        """The pairs of tensors of all calls."""
        return tuple(row for call in self.calls for row in call.tensors)

    @property
    def _told(self) -> Finding | Verdict | None:
        """What says most of the worst call."""
        if self.findings and self.call.introduced:
            return next((f for f in self.findings if f.pair == self.call.pair), self.findings[0])
        return next(iter(self.call.verdicts), None)

    def __getitem__(self, slot: str) -> Row:
        """The pair of tensors of a slot ("output.0"), in the first call that has it; that of
        another call is `calls[i][slot]`. Raises KeyError that lists the slots.
        """
        return _of_slot(self.name, self.tensors, slot)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def _ipython_key_completions_(self) -> list[str]:
        return list(dict.fromkeys(row.reference_slot for row in self.tensors))


def module_result(
    name: str, rows: Iterable[Row], verdicts: Iterable[Verdict], findings: Sequence[Finding]
) -> ModuleResult | None:
    """The module of a name, of the rows, verdicts and findings of a comparison; None where it has
    no tensor of a call of that name.
    """
    by_pair: dict[int, list[Row]] = {}
    for row in rows:
        if row.name == name:
            by_pair.setdefault(row.pair, []).append(row)
    if not by_pair:
        return None
    judged: dict[int, list[Verdict]] = {pair: [] for pair in by_pair}
    for verdict in verdicts:
        if verdict.pair in judged:
            judged[verdict.pair].append(verdict)
    calls = tuple(_call(pair, own_rows, judged[pair]) for pair, own_rows in by_pair.items())
    below = f"{name}."
    own, inside = [], []
    for finding in findings:
        names = (finding.name, *finding.also)
        if name in names:
            own.append(finding)
        elif finding.root == name or any(other.startswith(below) for other in names):
            inside.append(finding)
    return ModuleResult(name, calls[0].op_type, calls, tuple(own), tuple(inside))


def _call(pair: int, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> ModuleCall:
    first = rows[0]
    worst_first = sorted(verdicts, key=lambda v: (_severity(v.verdict), v.score or 0), reverse=True)
    return ModuleCall(
        first.name,
        first.op_type,
        pair,
        first.step,
        first.rank,
        first.occurrence,
        VerdictKind(first.verdict),
        tuple(rows),
        tuple(worst_first),
    )


def _severity(verdict: VerdictKind) -> int:
    """How bad a verdict is; one of a later version is least, since nothing is known of it."""
    return severity(verdict) if verdict in VERDICTS else -1


def _badness(call: ModuleCall) -> tuple[int, float]:
    worst = call.worst
    error = worst.error if worst is not None else None
    return _severity(call.verdict), error or 0.0


def _worst(rows: Iterator[Row]) -> Row | None:
    """The row with the largest error; one that differs and has no figure is worse than any."""
    measured = [row for row in rows if row.measured.tier != "none"]
    return max(measured, key=_size, default=None)


def _size(row: Row) -> float:
    if row.measured.identical:
        return 0.0
    return row.error if row.error is not None else float("inf")


def _of_slot(name: str, rows: Sequence[Row], slot: str) -> Row:
    for row in rows:
        if slot in (row.reference_slot, row.target_slot):
            return row
    slots = ", ".join(dict.fromkeys(row.reference_slot for row in rows))
    raise KeyError(f"no {slot!r} among the tensors of {name}: {slots}")
