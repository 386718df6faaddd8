"""Check whence on a program: equal runs must be silent, known faults in its own modules must be
named first.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from whence import _kernels
from whence.errors import UsageError, WhenceError
from whence.readers.opening import open_run
from whence.records import Call
from whence.records.slots import is_output
from whence.results import Checkup, Clean, Comparison, PlantedFault, Status, VerdictKind
from whence.workflows.notebook_progress import Tell
from whence.workflows.rerun import Subject
from whence.workflows.rounding.ways import arguments, with_leaves
from whence.workflows.saved import AnyPath

CLEAR, NEAR = 6.0, 1.5
"""Sizes of a fault in units of its operator's own rounding, as in `docs/dev/faultbench.md`: clear
from 6 on, below rounding under 1.5.
"""

_NORMAL = ("scale", "row", "eps", "bias", "channel", "stale", "constant", "weight")
_SMALLEST = 32  # elements of an output that a fault is planted in


def doctor(
    model: Any,
    inputs: Any = (),
    *,
    faults: int = 8,
    seed: int | None = None,
    dtype: Any = None,
    keep: AnyPath | None = None,
    tell: Tell | None = None,
) -> Checkup:
    """Run a torch model again and again, as it is and with known faults, and see what whence says
    each time.

    inputs: a tensor, a tuple of positional or a dict of named arguments (copied for every run, used
    under no_grad); or a function that is called with the model. faults: how many are planted. seed:
    for drawing them. dtype: also a clean run of a copy in this dtype. keep: a new folder that keeps
    the runs. tell: called with what is done next. Afterwards the model is as it was. Raises
    UsageError, CaptureError when the model cannot be run, OutputExists.
    """
    from whence.workflows.rerun import Program

    if not hasattr(model, "named_modules"):
        raise UsageError(
            f"whence.doctor takes a torch.nn.Module, not a {type(model).__name__}; a command is "
            "checked by `whence doctor -- CMD`"
        )
    return _check(Program(model, caller(inputs, dtype), dtype=dtype), faults, seed, {}, keep, tell)


def doctor_command(
    command: Sequence[str],
    *,
    faults: int = 8,
    seed: int | None = None,
    keep: AnyPath | None = None,
    tell: Tell | None = None,
) -> Checkup:
    """`doctor` for a command: every run is a run of the command, the faults are planted in its
    processes and nothing is edited.

    seed: draws the faults, and seeds every run (as `whence run --seed`); None seeds nothing.
    """
    from whence.workflows.rerun import Command

    return _check(
        Command(command), faults, seed, {} if seed is None else {"seed": seed}, keep, tell
    )


def _check(
    subject: Subject,
    faults: int,
    seed: int | None,
    options: dict[str, Any],
    keep: AnyPath | None,
    tell: Tell | None,
) -> Checkup:
    from whence.workflows.notebook_progress import telling
    from whence.workflows.rerun import workplace

    if faults < 0:
        raise UsageError(f"faults {faults}: a number of faults to plant, 0 for none")
    with workplace(keep, "doctor") as place, telling(tell) as say:
        return _Doctor(subject, place, keep is not None, options, say).result(faults, seed or 0)


class _Doctor:
    def __init__(
        self, subject: Subject, place: Path, keep: bool, options: dict[str, Any], tell: Tell
    ) -> None:
        self.subject, self.place, self.keep, self.options, self.tell = (
            subject,
            place,
            keep,
            options,
            tell,
        )

    def result(self, faults: int, seed: int) -> Checkup:
        from whence.instrument.launch import outcome

        self.tell("running it without a capture")
        bare = self.subject.bare()
        self.tell("capturing the reference")
        reference = self.place / "reference"
        captured = self.subject.capture(reference, **self.options)
        self.golden = open_run(str(reference))
        # The first of two equal runs reads the files and compiles; the second shows what a capture
        # costs.
        clean = []
        for name in ("the same again", *self.subject.variants):
            self.tell(f"clean run: {name}")
            variant = "" if name == "the same again" else name
            path = self.place / (variant or "again").replace(" ", "-")
            took = self.subject.capture(path, variant=variant, **self.options)
            captured = captured if variant else min(captured, took)
            clean.append(self._clean(name, path))
            self._drop(path)
        planted, notes = self._planted(faults, seed)
        calls = self.golden.calls
        reasons = Counter(c.no_program or "no reason given" for c in calls if not c.program)
        silent = all(c.status == Status.SAME for c in clean)
        named = all(p.outcome == "named first" for p in planted if p.size_class == "clear")
        return Checkup(
            self.subject.words,
            tuple(clean),
            tuple(planted),
            len(calls),
            sum(1 for c in calls if c.program),
            dict(reasons.most_common()),
            bare,
            captured,
            outcome.on_disk(str(reference)),
            silent and named,
            tuple(notes),
            _kernels.about(),
        )

    def _clean(self, name: str, path: Path) -> Clean:
        result = self._compare(path)
        differ = [
            v
            for v in result.verdicts
            if v.verdict != VerdictKind.IDENTICAL
            and not v.numbers.get("e_in")
            and v.numbers.get("e_out")
        ]
        calls = [self.golden.calls[result.plan.pairs[v.pair].reference] for v in differ]
        names = tuple(dict.fromkeys(c.module_name for c in calls))
        headline = "; ".join(result.inputs_differ[:1]) or result.headline
        return Clean(
            name,
            result.status,
            set(result.counts) <= {VerdictKind.IDENTICAL},
            tuple(f.name for f in result.findings),
            names,
            headline,
        )

    # ---- faults

    def _planted(self, faults: int, seed: int) -> tuple[list[PlantedFault], list[str]]:
        sites = self._sites()
        order = Random(f"kinds {seed}").sample(_NORMAL, len(_NORMAL))
        remaining = {
            kind: iter(Random(f"{kind} {seed}").sample(sites[kind], len(sites[kind])))
            for kind in order
        }
        out: list[PlantedFault] = []
        notes: list[str] = []
        while len([p for p in out if p.outcome != "not planted"]) < faults and remaining:
            for kind in [k for k in order if k in remaining]:
                if len([p for p in out if p.outcome != "not planted"]) >= faults:
                    break
                call = next(remaining[kind], None)
                if call is None:
                    del remaining[kind]
                    continue
                self.tell(f"fault {len(out) + 1} of {faults}: {kind} in {call.scope}")
                out.append(self._one(kind, call, len(out) + 1))
        planted = [p for p in out if p.outcome != "not planted"]
        if len(planted) < faults:
            notes.append(
                f"only {len(planted)} of {faults} faults found a place: the program calls too few "
                "modules that can have one"
            )
        return out, notes

    def _one(self, kind: str, call: Call, number: int) -> PlantedFault:

        path = self.place / f"fault-{number:02d}-{kind}"
        self.subject.capture(path, **self.options, inject=f"{kind}@{call.root}/{call.scope}")
        run = open_run(str(path))
        notes = {n.kind: n.text for n in run.notes if n.kind in ("fault", "fault-refused")}
        words = notes.get("fault", notes.get("fault-refused", "not planted")).partition(": ")[2]
        if "fault" not in notes:
            self._drop(path)
            return PlantedFault(kind, call.scope, call.op_type, words, "not planted")
        result = self._compare(path)
        self._drop(path)
        size = self._size(call, result)
        first = result.findings[0] if result.findings else None
        if first is not None and first.name == call.scope:
            outcome = "named first"
        elif any(call.scope in (f.name, *f.also) for f in result.findings):
            outcome = "named"
        elif result.status != Status.SAME:
            outcome = "detected"
        else:
            outcome = "missed" if size >= NEAR else "below rounding" if size else "no effect"
        clear = "clear" if size >= CLEAR else "near rounding" if size >= NEAR else "below rounding"
        name, cause = (first.name, first.cause) if first else ("", "")
        return PlantedFault(
            kind,
            call.scope,
            call.op_type,
            words,
            outcome,
            size if math.isfinite(size) else None,
            clear,
            name,
            cause,
        )

    def _sites(self) -> dict[str, list[Call]]:
        """For each kind of fault, the first calls of the modules that can have it, one call a
        module.
        """
        first: dict[tuple[str, str], Call] = {}
        for call in self.golden.calls:
            if (
                call.parent != -1
                and call.kind == "module"
                and call.phase == "forward"
                and call.refs
                and not call.error
                and "<" not in call.scope
            ):
                first.setdefault((call.root, call.scope), call)
        calls = sorted(first.values(), key=lambda c: c.order)
        holders: Counter[int] = Counter(
            number for c in calls for number in {r.record for r in c.slots("param")}
        )
        big = [c for c in calls if self._output(c) is not None]
        leaves = [c for c in big if c.leaf]

        def has(call: Call, slot: str, rank: int) -> bool:
            records = [
                r.record
                for r in call.slots("param")
                if r.slot == f"param.{slot}" and holders[r.record] == 1
            ]
            return any(len(self.golden.records[n].shape) >= rank for n in records)

        weights = [c for c in leaves if has(c, "weight", 2) and "Embedding" not in c.op_type]
        return {
            "scale": leaves,
            "channel": leaves,
            "stale": leaves,
            "constant": [c for c in big if not c.leaf] or leaves,
            "row": weights,
            "weight": weights,
            "bias": [c for c in leaves if has(c, "bias", 1) and not self._has_zero_bias(c)],
            "eps": [c for c in leaves if "norm" in c.op_type.lower()],
        }

    def _has_zero_bias(self, call: Call) -> bool:
        records = [self.golden.records[r.record] for r in call.refs if r.slot == "param.bias"]
        statistics = [record.statistics for record in records]
        return all(s is not None and s.zero == s.count for s in statistics)

    def _output(self, call: Call) -> Any:
        """The record that a fault of the output changes: the first floating-point output, if it is
        large enough to be judged.
        """
        from whence import dtypes

        for ref in call.slots("output"):
            record = self.golden.records[ref.record]
            if dtypes.is_floating(record.dtype) and record.shape:
                return record if record.count >= _SMALLEST and record.shape[-1] >= 4 else None
        return None

    def _size(self, call: Call, result: Comparison) -> float:
        """The error of the module's outputs, with the reference's inputs, in units of the
        operator's own rounding.
        """
        place = {p.reference: i for i, p in enumerate(result.plan.pairs)}.get(call.id)
        rows = [r for r in result.rows if r.pair == place and is_output(r.reference_slot)]
        errors = [0.0 if r.measured.identical else r.measured.values.get("rel_l2") for r in rows]
        error = max((math.inf if e is None else e for e in errors), default=math.inf)
        return error / self._floor(call)

    def _floor(self, call: Call) -> float:
        """The operator's own rounding, relative, from replaying the reference on its own inputs.

        Without a replay it is the unit roundoff of the output's dtype.
        """
        from whence import judge
        from whence.comparison.replays.replayer import Replayer, ReplayRequest
        from whence.results import SlotPair

        record = self._output(call)
        u = judge.unit_roundoff(record.dtype)
        if call.leaf and call.program:
            slots = {r.slot: SlotPair(r.slot, r.slot, r.record, r.record) for r in call.refs}
            equal = {r.slot: True for r in call.slots("param")}
            request = ReplayRequest(call, call, slots.get, equal, lambda slot, needs: False)
            result = Replayer(self.golden, self.golden).figures(request)
            return max((local.floor_rel for local in result.local.values()), default=u) or u
        return u

    # ---- pieces

    def _compare(self, path: Path) -> Comparison:
        from whence.workflows.compare import compare

        try:
            return compare(self.golden, str(path))
        except WhenceError as error:
            raise type(error)(f"{path.name}: {error}") from error

    def _drop(self, path: Path) -> None:
        if not self.keep:
            shutil.rmtree(path, ignore_errors=True)


# ---- inputs of a model


def caller(inputs: Any, dtype: Any = None) -> Callable[[Any], Any]:
    """The function that runs a model on `inputs`, given as `doctor` takes them; each call uses a
    copy.
    """
    if callable(inputs) and not _is_tensor(inputs):
        return inputs  # type: ignore[no-any-return]

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if _is_tensor(leaf) and leaf.is_floating_point() else leaf

    def use(model: Any) -> Any:
        import torch

        values = copy.deepcopy(inputs)
        with torch.no_grad():
            parameter = next(iter(model.parameters()), None)
            if dtype is not None and parameter is not None and parameter.dtype == dtype:
                values = with_leaves(values, cast)
            args, kwargs = arguments(tuple(values) if isinstance(values, list) else values)
            return model(*args, **kwargs)

    return use


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
