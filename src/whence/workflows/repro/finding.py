"""From a finding to a script that shows it: which operators, on which tensors, run how; then the
script is run both ways.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence import align, dtypes, extras, judge
from whence.comparison.replays.self_check import Threads
from whence.dtypes import Array
from whence.errors import (
    ElementsMissing,
    OutputExists,
    ReplayRefused,
    StoreFailed,
    UnreadableRun,
    UsageError,
)
from whence.records import Call, Program, Run
from whence.records.marks import was_compiled
from whence.records.slots import is_of_child, is_param, is_written, split_child
from whence.results import CallPair, Comparison, Finding, Reproduction, SlotPair, VerdictKind
from whence.workflows.repro.warm_interpreter import Waiting

if TYPE_CHECKING:
    from torch.nn import Module

    from whence.comparison.paired_runs import PairedRuns
    from whence.comparison.replays.replayer import Replayer
    from whence.comparison.replays.side import ReplaySource
    from whence.replay.export.script import Case
    from whence.replay.export.trace import Trace
    from whence.replay.export.ways import Way
    from whence.replay.flatten import Flat
if TYPE_CHECKING:
    from torch.nn import Module

    from whence.results import Comparison, Reproduction


def reproduce(
    comparison: str | os.PathLike[str] | Comparison,
    output: str | os.PathLike[str],
    finding: int,
    force: bool,
    run: bool,
    model: str | Module | Callable[[], Module] | None,
    tell: Callable[[str], None],
) -> Reproduction:
    """As `whence.repro`."""
    from whence.workflows.saved import load_comparison

    began = time.monotonic()
    compared = comparison if isinstance(comparison, Comparison) else load_comparison(comparison)
    named = (
        f"{compared.reference} against {compared.target}"
        if isinstance(comparison, Comparison)
        else os.fspath(comparison)
    )
    if not compared.findings:
        raise UsageError(
            f"{named} names no operator at fault (status {compared.status}): there is nothing to "
            "reproduce"
        )
    if not 1 <= finding <= len(compared.findings):
        raise UsageError(
            f"{named} has findings 1 to {len(compared.findings)}; there is no finding {finding}"
        )
    folder = Path(output)
    _check(folder, force)
    extras.needed("torch", "a repro, which runs operators of torch,")
    what = compared.findings[finding - 1]
    outcome: _Outcome | None = None
    try:
        subject = _Subject(compared, what, model, tell)
        if run:
            heavy = (
                ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp")
                if was_compiled(subject.other)
                else ()
            )
            outcome = _Outcome(heavy)
        case, how, notes = subject.case()
        subject.describe(case, finding, named, how)
        path = _written(case, folder)
        if outcome is not None:
            tell("running the script both ways")
        seen, holds, sentence = (
            outcome.of(path, case.default, case.missing)
            if outcome is not None
            else ({}, None, "not run")
        )
    except (ReplayRefused, ElementsMissing) as error:
        raise ReplayRefused(
            f"finding {finding} ({what.name}) cannot be run again: {error}\n"
            "  what it takes: a reference captured with its programs and elements (whence run, "
            "--keep full, not --no-programs)"
            + (
                ""
                if model is not None
                else ";\n  or the reference's model: whence repro --model MODULE:FACTORY"
            )
        ) from error
    finally:
        if outcome is not None:
            outcome.leave()
    ran = case.bad if case.bad is not None and case.bad.steps else case.good
    return Reproduction(
        str(path),
        what.name,
        tuple(s.name for s in ran.steps),
        how,
        case.default,
        holds,
        sentence,
        seen,
        tuple(notes),
        time.monotonic() - began,
    )


def _written(case: Case, folder: Path) -> Path:
    """Write the script and its tensors; returns its path."""
    from whence.replay.export.script import FILES, script
    from whence.replay.export.script_data import save

    text, tensors = script(case)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILES[0]).write_text(text, encoding="utf-8")
        (folder / FILES[1]).write_bytes(save(tensors))
    except OSError as error:
        raise StoreFailed(
            f"cannot write the script to {folder}: {error.strerror or error}"
        ) from error
    return folder / FILES[0]


def _check(folder: Path, force: bool) -> None:
    if folder.is_file():
        raise OutputExists(f"cannot write a script into {folder}: it is a file; choose another -o")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise OutputExists(
            f"{folder} already holds files; --force writes into it, or choose another -o"
        )


# ---- running what was written


class _Outcome:
    """Runs the script both ways. heavy: modules that the target's side will load; they are loaded
    while the script is made.
    """

    def __init__(self, heavy: Sequence[str]) -> None:
        self._waiting = {"reference": Waiting("torch"), "target": Waiting("torch", *heavy)}

    def leave(self) -> None:
        for one in self._waiting.values():
            one.leave()

    def of(self, path: Path, default: str, missing: str) -> tuple[dict[str, str], bool, str]:
        """(what each side said, does the reproduction hold, that in words)."""
        if default == "recorded":
            self._waiting["recorded"] = Waiting("torch")
            if missing:
                self._waiting.pop("target").leave()
        with ThreadPoolExecutor(len(self._waiting)) as pool:
            ended = dict(
                zip(
                    self._waiting,
                    pool.map(lambda item: item[1].run(path, item[0]), self._waiting.items()),
                )
            )
        seen = {side: said for side, (_, said) in ended.items()}
        words = {
            side: "fails" if state is False else "passes" if state else "could not be run"
            for side, (state, _) in ended.items()
        }
        holds = ended[default][0] is False and ended["reference"][0] is True
        if default == "recorded":
            here = missing or f"run on this machine as the target was it {words['target']}"
            sentence = f"what was recorded {words['recorded']}; {here}"
        else:
            sentence = f"{words['target']} as the target runs it"
        return seen, holds, f"{sentence}; {words['reference']} as the reference does"


# ---- what is reproduced


class _Subject:
    """One finding with both of its calls, and all that the script is made of."""

    def __init__(
        self,
        compared: Comparison,
        finding: Finding,
        model: str | Module | Callable[[], Module] | None,
        tell: Callable[[str], None],
    ) -> None:
        self.finding, self.tell = finding, tell
        tell("reading the runs")
        self.paired, self.replayer = _faced(compared, model)
        self.index = finding.pair
        if not 0 <= self.index < len(compared.plan.pairs):
            raise ReplayRefused("it is about no pair of calls")
        then = compared.plan.pairs[self.index]
        now = (
            self.paired.plan.pairs[self.index] if self.index < len(self.paired.plan.pairs) else None
        )
        if now is None or (now.reference, now.target) != (then.reference, then.target):
            raise UnreadableRun(
                f"{compared.reference} and {compared.target} do not face each other as they did "
                "when they were compared; compare them again"
            )
        self.index = self._innermost(now)
        self.pair: CallPair = self.paired.plan.pairs[self.index]
        self.call: Call = self.paired.calls[self.pair.reference]
        self.other: Call = self.paired.target.calls[self.pair.target]
        self.reference_side, self.target_side = (
            self.replayer.reference,
            self.replayer.sides.unmasked,
        )
        self.swapped = finding.side == "reference"
        self.judged: list[str] = []

    def _innermost(self, pair: CallPair) -> int:
        """The index of the pair that is named, where the finding is about a parameter of a call
        inside that has a partner.
        """
        if self.finding.verdict != VerdictKind.PARAM_DIFF:
            return self.index
        above = self.paired.calls[pair.reference]
        for call, index in self.paired.pair_of.items():
            c = self.paired.calls[call]
            if c.scope == self.finding.name and (c.root, c.step, c.rank, c.micro) == (
                above.root,
                above.step,
                above.rank,
                above.micro,
            ):
                return index
        return self.index

    # ---- the reference's operators on the target's tensors

    def case(self) -> tuple[Case, str, list[str]]:
        """(the script's contents, how the fault shows, remarks). Raises ReplayRefused,
        ElementsMissing.
        """
        from whence.replay.export.isolate import Drill
        from whence.replay.export.script import Case as Made
        from whence.replay.export.trace import piece

        notes: list[str] = []
        self.tell("running the reference's operators on the target's inputs")
        with Threads(1):
            good, results, recorded = self._reference_trace()
        way, ours = (
            self._way(self.paired.target, self.other, notes),
            self._way(self.paired.reference, self.call, notes),
        )
        ours = replace(ours, backend="", device="cpu")
        whole = piece(good, 0, len(good.steps), results)
        compiled = was_compiled(self.other) and not self.swapped
        if not compiled and not self.swapped:
            other = self._target_trace(results, recorded)
            if other is not None:
                bad, bad_results, reproduces = other
                if reproduces:
                    return self._semantic(good, results, bad, bad_results, way, ours, notes)
        missing = self._missing(way, compiled)
        if missing:
            notes.append(f"{missing}: only what was recorded shows the fault")
        elif not self.swapped:
            if not compiled and not self.other.program:
                notes.append(
                    "the target's own operators are not known "
                    f"({self.other.no_program or 'no program'}); the reference's are run"
                )
            self.tell("looking for the operator")
            with Threads(
                way.settings["threads"] if isinstance(way.settings.get("threads"), int) else 1
            ):
                drill = Drill(good, results, way)
                found = drill.smallest()
            if drill.failed_to_run:
                notes.append(
                    f"{drill.failed_to_run} of {drill.tried} pieces could not be run alone"
                )
            if found is not None:
                all_of_it = (found.begin, found.end) == (0, len(good.steps))
                small = piece(good, found.begin, found.end, results if all_of_it else ())
                kept = {
                    small.results.index(n): t for n, t in recorded.items() if n in small.results
                }
                notes.append(f"operator {found.end} of {len(good.steps)}: wrong {found.words}")
                return (
                    Made(small, None, way, ours, recorded=kept),
                    "compiled" if compiled else "kernel",
                    notes,
                )
            notes.append(
                "run here as the target was, nothing is wrong: only what was recorded shows the "
                "fault"
            )
        kept = {list(whole.results).index(n): t for n, t in recorded.items()}
        # a compiler that no script can name
        foreign = way.backend and missing and way.device == "cpu"
        return (
            Made(
                whole,
                None,
                ours if foreign else way,
                ours,
                recorded=kept,
                default="recorded",
                missing=missing,
            ),
            "recorded",
            notes,
        )

    def _semantic(
        self,
        good: Trace,
        results: Sequence[int],
        bad: Trace,
        bad_results: Sequence[int],
        way: Way,
        ours: Way,
        notes: list[str],
    ) -> tuple[Case, str, list[str]]:
        """Both sides' operators, as far as they part."""
        import torch

        from whence.replay.export.isolate import parting
        from whence.replay.export.script import Case as Made

        def same(a: Any, b: Any) -> bool:
            if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
                return False
            return bool(
                torch.equal(
                    a.contiguous().reshape(-1).view(torch.uint8),
                    b.contiguous().reshape(-1).view(torch.uint8),
                )
            )

        one, two, equal = parting(good, bad, results, bad_results, same)
        differs = differing(one, two)
        notes += differs
        how = "parameter" if self.finding.verdict == VerdictKind.PARAM_DIFF else "semantic"
        # The fault is in what was asked of the device, so any device shows it.
        return (
            Made(
                one,
                two,
                replace(way, backend="", device="cpu"),
                ours,
                equal=equal,
                differs=differs[0],
            ),
            how,
            notes,
        )

    def _reference_trace(self) -> tuple[Trace, list[int], dict[int, Any]]:
        """(trace, numbers of what is judged, what the target recorded of these)."""
        from whence.frameworks.torch_arrays import from_host
        from whence.replay.export.trace import Trace
        from whence.replay.flatten import Flat, flatten
        from whence.replay.validation import load

        gathered = self._gathered(self.reference_side, self.call)
        borrowed = self._of_model() if gathered is None else None
        if gathered is not None:
            flat, wanted = gathered, self._judged(gathered.program)
        elif borrowed is not None:
            origins = {
                slot: (self.call.id, slot)
                for slot in (*borrowed.program.inputs, *borrowed.program.params)
            }
            flat = Flat(
                borrowed.program, origins, (self.call.id,) * len(borrowed.program.operations)
            )
            wanted = self._judged(borrowed.program)
        else:
            wanted = self._judged(self._trusted(self.call))
            flat = flatten(self.call.id, lambda call: self._node(call, wanted))
        arrays, strides, faced = self._arrays(flat.origins, flat.program)
        if borrowed is not None:
            loaded = borrowed
        elif flat.program.id == self.call.program:
            loaded = self.reference_side.load(self.call)
        else:
            constants = [self.paired.reference.array(c) for c in flat.program.constants]
            loaded = load(flat.program, constants, allow=self.reference_side.allow)
        outputs = [slot for slot in wanted if slot in dict(flat.program.outputs)]
        pairs = {
            slot: pair
            for slot in outputs
            if (pair := self.paired.slot(self.index, slot)) is not None
        }
        produced = {slot: self._recorded(pair) for slot, pair in pairs.items()}
        if not produced:
            raise ReplayRefused("the target has no tensor for what the reference's program makes")
        working = (
            "recorded"
            if self.swapped
            else self.replayer.sides.working_dtypes(faced, pairs, produced)[1]
        )
        writes = loaded.writes
        self.judged = list(produced)
        trace = Trace(copies=writes)
        loaded.run(
            arrays,
            arrays,
            working=working,
            strides=strides,
            outputs=list(produced),
            convert=False,
            watch=trace,
        )
        numbers = {
            slot: n for slot in produced if (n := _number(trace, loaded.program, slot)) is not None
        }
        if not trace.steps or not numbers:
            raise ReplayRefused("its program runs no operator")
        return (
            trace,
            list(dict.fromkeys(numbers.values())),
            {n: from_host(produced[slot]) for slot, n in numbers.items()},
        )

    def _gathered(self, side: ReplaySource, call: Call) -> Flat | None:
        """The operators below a call, of a run that has them as calls of their own; None of any
        other.
        """
        from whence.replay.flatten import Node, gather

        calls = side.run.calls
        below, todo = [], list(side.children(call.id))
        while todo:
            below.append(inner := calls[todo.pop()])
            todo += side.children(inner.id)
        operators = sorted(
            (c for c in below if c.kind == "operator" and c.phase == call.phase),
            key=lambda c: c.order,
        )
        if call.program or not operators:
            return None
        known: dict[int, tuple[int, str]] = {}
        for module in (call, *(c for c in below if c.kind == "module")):
            for ref in (*module.slots("param"), *module.slots("input")):
                known.setdefault(ref.record, (module.id, ref.slot))
        records = {c.id: {r.slot: r.record for r in c.refs} for c in operators}
        nodes = []
        for c in operators:
            program = self._trusted(c) if side is self.reference_side else side.program(c)
            shapes = {
                slot: side.run.records[record].shape for slot, record in records[c.id].items()
            }
            nodes.append(Node(c.id, program, (), frozenset(), shapes))
        outputs = {r.slot: r.record for r in call.refs if is_written(r.slot)}
        return gather(nodes, records.__getitem__, known, outputs)

    def _recorded(self, pair: SlotPair) -> Array:
        if self.swapped:
            return self.paired.reference.array(pair.reference_record)
        return self.paired.target.array(pair.target_record)

    def _trusted(self, call: Call) -> Program:
        """The program of a call of the reference; where it found its own recording wrong, also
        that.
        """
        try:
            loaded = self.reference_side.trusted(call)
        except ReplayRefused:
            if not self.swapped:
                raise
            loaded = self.reference_side.load(call)
        program: Program = loaded.program
        if not program.operations and self.reference_side.borrows(call):
            raise ReplayRefused(
                f"the model stands for {call.scope or call.root}, and its operators are not known"
            )
        return program

    def _of_model(self) -> Any:
        """What the user's model runs in the place of the call, recorded now; None where the call
        has a program of its own.
        """
        from whence.readers.opening import open_run
        from whence.replay.validation import load
        from whence.workflows.capture.capture import capture

        side, call = self.reference_side, self.call
        if side.model is None:
            return None
        borrowed = side.trusted(call)
        if not side.borrows(call):
            return None
        if side.children(call.id):
            raise ReplayRefused(
                f"the model stands for {call.scope or call.root}, which calls others; only a "
                "module without is recorded again"
            )
        arrays, strides = side.arrays(
            side.records(call, (*borrowed.program.inputs, *borrowed.program.params))
        )
        with tempfile.TemporaryDirectory(prefix="whence-repro-") as place:
            with (
                contextlib.redirect_stderr(io.StringIO()),
                capture(borrowed.module, place, force=True),
            ):
                borrowed.run(arrays, arrays, strides=strides)
            run = open_run(place)
            again = next((c for c in run.calls if c.parent < 0), None)
            program = run.programs.get(again.program) if again is not None else None
            if program is None:
                raise ReplayRefused(
                    f"the model's {borrowed.kind} has no program either: "
                    f"{again.no_program if again else 'it was not called'}"
                )
            return load(program, [run.array(c).copy() for c in program.constants], allow=side.allow)

    def _judged(self, program: Program) -> list[str]:
        """The outputs that the finding is about."""
        slots = [slot for slot, _ in program.outputs]
        child, _, inner = self.finding.slot.rpartition(":")
        calls = (self.paired.calls[kid] for kid in self.reference_side.children(self.call.id))
        kids = [c.scope.rpartition(".")[2] or c.op_type for c in calls]
        named = [f"{k}:{inner}" for k, kid in enumerate(kids) if child and kid == child]
        for slot in (self.finding.slot, *named):
            if slot in slots:
                return [slot]
        return [s for s in slots if self.paired.slot(self.index, s) is not None]

    def _node(self, call: int, wanted: Sequence[str]) -> Any:
        from whence.replay.flatten import Node

        c = self.paired.calls[call]
        program = self._trusted(c)
        kids = self.reference_side.children(call)
        alone = {k for k, kid in enumerate(kids) if kid not in self.paired.pair_of}
        hidden: set[int] = set()
        loaded = self.reference_side.load(c)
        todo = [
            s
            for s in (
                wanted if c is self.call else [s for s, _ in program.outputs if not is_of_child(s)]
            )
            if s in dict(program.outputs)
        ]
        while todo:
            for need in loaded.needs(todo.pop()):
                k = split_child(need)[0] if is_of_child(need) else -1
                if k in alone and k not in hidden:
                    hidden.add(k)
                    todo += [s for s, _ in program.outputs if s.startswith(f"{k}:")]
        shapes = {r.slot: self.paired.reference.records[r.record].shape for r in c.refs}
        return Node(call, program, kids, frozenset(hidden), shapes)

    def _arrays(
        self, origins: Mapping[str, tuple[int, str]], program: Program
    ) -> tuple[dict[str, Array], dict[str, tuple[int, ...]], dict[str, SlotPair]]:
        """What the program reads, by slot: the target's, or of the reference what a correct target
        has the same.
        """
        from whence.comparison.verdicts.parameters import Parameters

        arrays: dict[str, Array] = {}
        strides: dict[str, tuple[int, ...]] = {}
        faced: dict[str, SlotPair] = {}
        run = self.paired.reference if self.swapped else self.paired.target
        given = Parameters(self.paired).given(self.call, self.paired.slots[self.index])
        for slot in (*program.inputs, *program.params):
            call, own = origins[slot]
            pair = self._facing(call, own, slot)
            parameter = is_param(own)
            if pair is None:
                record = self.reference_side.record(self.paired.calls[call], own)
                lent = self.reference_side.lent(record) if not parameter else None
                if parameter and record is not None:
                    lent = self.paired.reference.array(record)
                if lent is not None:
                    arrays[slot] = lent
                continue
            record = pair.reference_record if self.swapped else pair.target_record
            if parameter and not self.swapped:
                arrays[slot] = self.replayer.sides.parameters.expected(pair, given.get(own, True))
            else:
                arrays[slot] = run.array(record)
                faced[slot] = pair
            if run.records[record].stride and run.records[record].shape == arrays[slot].shape:
                strides[slot] = run.records[record].stride
        return arrays, strides, faced

    def _facing(self, call: int, own: str, slot: str) -> SlotPair | None:
        if call == self.call.id:
            return self.paired.slot(self.index, slot if is_of_child(slot) else own)
        if call in self.paired.pair_of:
            return self.paired.slots[self.paired.pair_of[call]].get(own)
        if is_param(own):
            return self.paired.inner_parameter(self.other, self.paired.calls[call], own)
        return None

    # ---- the target's own operators

    def _target_trace(
        self, results: Sequence[int], recorded: Mapping[int, Any]
    ) -> tuple[Trace, list[int], bool] | None:
        """(trace of what the target says it ran, numbers of what is judged, does that give what it
        recorded); None without a program.
        """
        from whence.replay.export.trace import Trace
        from whence.replay.validation import load

        side = self.target_side
        try:
            gathered = self._gathered(side, self.other)
            if gathered is not None:
                loaded = load(
                    gathered.program,
                    [side.run.array(c) for c in gathered.program.constants],
                    allow=side.allow,
                )
            else:
                loaded = side.load(self.other)
            program = loaded.program
            outputs = [self._across(slot) for slot in self.judged]
            outputs = [s for s in outputs if s in dict(program.outputs)]
            if len(outputs) != len(results):
                return None
            slots = (*program.inputs, *program.params)
            if gathered is not None:
                places = ((slot, gathered.origins[slot]) for slot in slots)
                found = {
                    slot: side.record(side.run.calls[call], own) for slot, (call, own) in places
                }
                arrays, strides = side.arrays(
                    {slot: record for slot, record in found.items() if record is not None}
                )
            else:
                arrays, strides = side.arrays(side.records(self.other, slots))
            made, _ = side.arrays(side.records(self.other, outputs))
            trace = Trace(copies=loaded.writes)
            with Threads(1):
                working = loaded.run(arrays, arrays, strides=strides, outputs=outputs, watch=trace)
                wide = (
                    "float64"
                    if min(judge.unit_roundoff(dtypes.of(a).name) or 1.0 for a in made.values())
                    < 1e-5
                    else "float32"
                )
                right = loaded.run(arrays, arrays, working=wide, strides=strides, outputs=outputs)
            score = max(
                (
                    judge.local(y, right[s], working[s]).score
                    for s, y in made.items()
                    if right[s].shape == y.shape
                ),
                default=float("inf"),
            )
            numbers = [_number(trace, program, slot) for slot in outputs]
        except (ReplayRefused, ElementsMissing, KeyError, ValueError):
            return None
        if any(n is None for n in numbers) or not made:
            return None
        return trace, [n for n in numbers if n is not None], score <= 1

    def _across(self, slot: str) -> str:
        """The target's name of an output of the reference's program."""
        pair = self.paired.slot(self.index, slot)
        if pair is None:
            return ""
        if not is_of_child(slot):
            return pair.target_slot
        kid = self.reference_side.children(self.call.id)[split_child(slot)[0]]
        there = self.paired.plan.pairs[self.paired.pair_of[kid]].target
        kids = self.target_side.children(self.other.id)
        return f"{kids.index(there)}:{pair.target_slot}" if there in kids else ""

    # ---- how it ran

    def _way(self, run: Run, call: Call, notes: list[str]) -> Way:
        from whence.replay.export.ways import Way, known_config

        settings = align.settings_of(run).get(call.root, {})
        device = (
            next(
                (
                    run.records[r.record].device
                    for r in (*call.slots("output"), *call.slots("mutated"))
                ),
                "cpu",
            )
            or "cpu"
        )
        if not re.fullmatch(r"[a-z]{1,20}(:\d{1,3})?", device):
            device = "cpu"
        if not was_compiled(call):
            return Way(device=device, settings=settings)
        told = _compiler(run, call)
        if told is None:
            notes.append(
                "the run does not say how it was compiled (an older capture): the defaults of "
                "torch.compile are taken"
            )
            told = {"backend": "inductor"}
        inductor, left = known_config(
            "torch._inductor.config", {**_table(told, "inductor"), **_table(told, "options")}
        )
        dynamo, also = known_config("torch._dynamo.config", _table(told, "dynamo"))
        if left or also:
            notes.append(
                "settings of the compiler that were not taken over: "
                f"{', '.join(sorted((*left, *also))[:10])}"
            )
        dynamic = told.get("dynamic")
        return Way(
            str(told.get("backend", "inductor")),
            inductor,
            dynamo,
            dynamic if isinstance(dynamic, bool) else None,
            device,
            settings,
        )

    def _missing(self, way: Way, compiled: bool) -> str:
        """Why this machine cannot run operators that way, "" when it can."""
        import torch

        from whence.replay.export.ways import is_backend

        if compiled and not is_backend(way.backend):
            return (
                f"the target was compiled by {way.backend!r}, which is no backend of "
                "torch.compile here"
            )
        try:
            torch.empty(1, device=way.device)
        except Exception:  # noqa: BLE001 - torch raises anything for a device that is not there
            return f"the target ran on {way.device}, which this machine has not"
        return ""

    # ---- words

    def describe(self, case: Case, number: int, comparison: str, how: str) -> None:
        """Fill the case's title and story."""
        f, target = self.finding, self.paired.target
        ran = case.bad if case.bad is not None and case.bad.steps else case.good
        names = [s.name.removeprefix("aten.").removesuffix(".default") for s in ran.steps]
        shown = (
            ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            if names
            else "nothing"
        )
        where = f"{f.name} ({f.op_type})" if f.op_type and f.op_type != f.name else f.name
        verb = {
            "compiled": "is wrong as the target compiled it",
            "kernel": "is wrong as the target runs it",
            "semantic": "is not what the reference runs",
            "parameter": "has other parameters than the reference",
            "recorded": "is not what the target recorded",
        }[how]
        case.title = f"{where}: {shown} {verb}."
        case.story = [
            f.sentence,
            *_facts(
                (
                    "found by",
                    f"whence compare {self.paired.reference.path} {target.path}, finding {number} "
                    f"of {comparison}",
                ),
                (
                    "where",
                    f"{f.root or self.call.root}, {where}, step {f.step}, rank {f.rank}"
                    + (f", {f.source}" if f.source else ""),
                ),
                ("target", _conditions(target, self.other, case.way)),
                ("reference", _conditions(self.paired.reference, self.call, case.reference)),
            ),
        ]


def _facts(*facts: tuple[str, str]) -> list[str]:
    return [f"{name:<11}{text}" for name, text in facts if text]


def _conditions(run: Run, call: Call, way: Way) -> str:
    settings = align.settings_of(run).get(call.root, {})
    info = run.info
    parts = [f"torch {settings['torch']}"] if "torch" in settings else []
    parts += [
        f"{k} {settings[k]}"
        for k in ("cpu_capability", "threads", "matmul_precision", "attention")
        if k in settings
    ]
    device = next((run.records[r.record].device for r in call.slots("output")), "")
    parts += [f"device {device}"] if device else []
    parts += ["training"] if call.training else []
    parts += ["oneDNN off"] if settings.get("mkldnn") is False else []
    parts += [f"autocast {settings['autocast']}"] if settings.get("autocast") else []
    parts += [f"compiled by {way.backend}"] if way.backend else []
    parts += [f"seed {info.seed}"] if info.seed is not None else []
    return ", ".join(parts)


def differing(one: Any, two: Any) -> list[str]:
    """What differs between the operators of both sides, in words."""
    if len(one.steps) == len(two.steps) == 1 and one.steps[0].name == two.steps[0].name:
        from whence.replay.export.trace import Value, overload

        a, b = one.steps[0], two.steps[0]
        names = [x.name for x in overload(a.name)._schema.arguments]
        left, right = dict(zip(names, a.args)) | a.kwargs, dict(zip(names, b.args)) | b.kwargs
        out = []
        for key in dict.fromkeys((*left, *right)):
            x, y = left.get(key, "its default"), right.get(key, "its default")
            if not isinstance(x, Value) and not isinstance(y, Value) and repr(x) != repr(y):
                out.append(f"{a.name}: {key} {x} in the reference, {y} in the target")
        if out:
            return out
    if [s.name for s in one.steps] == [s.name for s in two.steps]:
        return ["the same operators with the same arguments, on other tensors"]
    names_of = [", ".join(s.name for s in p.steps[:6]) or "nothing" for p in (one, two)]
    return [f"the reference runs {names_of[0]}; the target {names_of[1]}"]


# ---- small things


def _number(trace: Trace, program: Program, slot: str) -> int | None:
    """Which tensor of a trace an output of its program is."""
    operand = dict(program.outputs)[slot]
    kind, at = next(iter(operand.items()))
    if kind == "op":
        made = trace.by_place.get(at[0], [])
        return made[at[1]] if at[1] < len(made) else None
    name = program.inputs[at] if kind == "in" else at
    return trace.slots.get(name) if kind in ("in", "param") else None


def _compiler(run: Run, call: Call) -> dict[str, Any] | None:
    """What the capture noted of how a call, or one around or inside it, was compiled."""
    found: list[tuple[int, dict[str, Any]]] = []
    for scope, told in align.told(run, "compiled"):
        if told.get("root", call.root) != call.root:
            continue
        around = scope in ("", call.scope) or call.scope.startswith(f"{scope}.")
        within = not call.scope or scope.startswith(f"{call.scope}.")
        if around or within:
            found.append((-len(scope) if around else len(scope), told))
    return min(found, key=lambda item: item[0])[1] if found else None


def _table(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = told.get(name)
    return {k: v for k, v in table.items() if isinstance(k, str)} if isinstance(table, dict) else {}


def _faced(compared: Comparison, model: Any) -> tuple[PairedRuns, Replayer]:
    """Both runs of a comparison face to face again, as they were then."""
    from whence.comparison.paired_runs import PairedRuns
    from whence.comparison.prepare.whole_model import put_together
    from whence.comparison.replays import user_model
    from whence.comparison.replays.replayer import Replayer
    from whence.records.views import CachedRun
    from whence.workflows.reopen import reopened

    aligned, options = reopened(compared, user_model.read(model) if model is not None else None)
    one, two = CachedRun(aligned.reference), CachedRun(aligned.target)
    paired = PairedRuns(
        one, two, put_together(aligned.plan, one.calls, two.calls), options, lambda *_: None
    )
    replayer = Replayer(
        one,
        paired.target,
        paired=paired.pair_of,
        inner=paired.inner_parameter,
        pair_of=lambda call, slot: paired.slot(paired.pair_of[call.id], slot),
        allow=options.allow,
        model=options.model,
    )
    return paired, replayer
