"""Replays the reference's programs on the target's inputs, and remembers which programs may be trusted."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whence import align, dtypes, judge, locate
from whence.api.declaring import PLAIN, Semantics
from whence.dtypes import Array
from whence.errors import ElementsMissing, MissingDependency, ReplayRefused
from whence.records import Call, Program, Run
from whence.results import SlotPair

# A program is checked on so many recorded calls (first ones met): the recording's own cannot show a value baked into it.
_CHECKS = 3
# Converted parameters kept for the next call of the same module; never the whole model at once.
_HELD_BYTES = 512 << 20


class _Threads:
    """So many intra-op threads of torch inside. One is fastest for many small operators: more spin while they wait for each other."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        torch = sys.modules.get("torch") or _torch()
        self._torch, self._before = torch, torch.get_num_threads() if torch is not None else 0
        if torch is not None and self._before != self._count:
            torch.set_num_threads(self._count)

    def __exit__(self, *exc: object) -> None:
        if self._torch is not None and self._before != self._count:
            self._torch.set_num_threads(self._before)


def _torch() -> Any:
    """torch, or None where it is not installed: then nothing can be replayed, and the reason is given for each call."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


class _Params:
    """The parameters of one replayed call, converted once per working dtype and kept for the module's other calls."""

    def __init__(self, replayer: Replayer, loaded: Any, pairs: list[tuple[SlotPair, bool]], semantics: Semantics) -> None:
        self._replayer, self._loaded, self._pairs, self._semantics = replayer, loaded, pairs, semantics
        self._key = (loaded.program.id, tuple((p.reference_record, p.target_record, given) for p, given in pairs))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        records = self._replayer.reference.records
        return {p.reference_slot: records[p.reference_record].shape for p, _ in self._pairs}

    def held(self, working: str) -> Any:
        """The parameters for `Loaded.run` with this working dtype."""
        cache, key = self._replayer.held, (*self._key, working)
        stand_ins = self._semantics.params
        found = cache.get(key) if not stand_ins else None
        if found is not None:
            cache.move_to_end(key)
            return found[0]
        arrays = {p.reference_slot: self._replayer.parameter(p, given) for p, given in self._pairs if p.reference_slot not in stand_ins}
        if stand_ins:
            records = self._replayer.reference.records
            like = {p.reference_slot: dtypes.named(records[p.reference_record].dtype).numpy for p, _ in self._pairs}
            arrays |= {s: self._semantics.param(s, working, np.empty(0, like[s])) for s in stand_ins if s in like}
            return self._loaded.hold(arrays, working=working)
        held = self._loaded.hold(arrays, working=working)
        nbytes = sum(t.nbytes for t in held.tensors.values())
        cache[key] = (held, nbytes)
        self._replayer.held_bytes += nbytes
        while self._replayer.held_bytes > _HELD_BYTES and len(cache) > 1:
            _, (_, freed) = cache.popitem(last=False)
            self._replayer.held_bytes -= freed
        return held


class Replayer:
    """Figures of leaf calls from replay, with every refusal counted by its reason.

    Needs torch; without it every call is refused with the pip command. Programs are loaded and checked once each.
    """

    def __init__(self, reference: Run, target: Run, *, allow: Sequence[str] = ()) -> None:
        self.reference, self.target, self.allow = reference, target, tuple(allow)
        self.replayed = 0
        self.refused: Counter[str] = Counter()
        self._loaded: dict[tuple[int, str], Any] = {}
        self._checked: Counter[tuple[int, str]] = Counter()
        self._failed: dict[tuple[int, str], str] = {}
        self.held: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self.held_bytes = 0

    def figures(
        self, call: Call, other: Call, slots: Mapping[str, SlotPair], given: Mapping[str, bool], semantics: Semantics = PLAIN
    ) -> tuple[list[tuple[str, judge.Local]] | None, str]:
        """(figures by output slot, "") of one leaf call, or (None, why it could not be replayed).

        given: parameter slots -> whether the run started with that value (then a correct target holds the reference's,
        rounded) or changed it (then the target's own value is an input like any other). semantics: what is declared of the call;
        a replay under a declaration is one more of the same call and is not counted.
        """
        with _Threads(1):
            local, why = self._figures(call, other, slots, given, semantics)
        if semantics.name:
            return local, why
        if local is None:
            self.refused[why] += 1
        else:
            self.replayed += 1
        return local, why

    def _figures(
        self, call: Call, other: Call, slots: Mapping[str, SlotPair], given: Mapping[str, bool], semantics: Semantics
    ) -> tuple[list[tuple[str, judge.Local]] | None, str]:
        if not call.program:
            return None, call.no_program or "no program was recorded"
        try:
            loaded = self._trusted(self.reference, 0, call)
            program = self.reference.programs[call.program]
            if semantics.program is not None:
                program = semantics.program
                loaded = self._edited(program)
            inputs, strides = self._inputs(program, slots)
            params = _Params(self, loaded, self._param_pairs(call, program, slots, given, semantics), semantics)
            outputs = [(slot, slots[slot]) for slot, _ in program.outputs if slot in slots]
            if not outputs:
                return None, "the target has none of its outputs"
            produced = {slot: self.target.array(pair.target_record) for slot, pair in outputs}
            wide, working = self._dtypes(call, slots, produced.values())
            held = params.held(wide)
            r = semantics.run(lambda given: loaded.run(given, held, working=wide, strides=strides), inputs, wide, produced)

            def in_working(*, stepwise: bool) -> dict[str, Array]:
                run = functools.partial(self._working, loaded, stepwise=stepwise)
                return semantics.run(lambda given: run(given, params, working, wide, strides), inputs, working, produced)

            w = in_working(stepwise=False)
            terms = loaded.reduction_length({k: a.shape for k, a in inputs.items()}, params.shapes())
            local = [(slot, self._measure(slot, pair, produced[slot], r, w, terms, semantics)) for slot, pair in outputs]
            if max(item.score for _, item in local) > 1:
                # A fused operator rounds once, a correct target may round in between: the noisier of both floors counts.
                stepwise = in_working(stepwise=True)
                again = [(slot, self._measure(slot, pair, produced[slot], r, stepwise, terms, semantics)) for slot, pair in outputs]
                local = [min(a, b, key=lambda item: item[1].score) for a, b in zip(local, again)]
        except (ReplayRefused, ElementsMissing) as error:
            return None, str(error)
        return local, ""

    def _measure(
        self, slot: str, pair: SlotPair, produced: Array, wide: Mapping[str, Array], working: Mapping[str, Array], terms: int,
        semantics: Semantics,
    ) -> judge.Local:  # fmt: skip
        r, w = wide[slot], working[slot]
        if r.shape != produced.shape or w.shape != produced.shape:
            raise ReplayRefused(f"{slot} of the replay has shape {r.shape}, the target's {produced.shape}")
        try:
            reference: Array | None = self.reference.array(pair.reference_record)
        except ElementsMissing:
            reference = None
        return semantics.measure(slot, produced, r, w, terms=terms, reference=reference)

    def _working(
        self, loaded: Any, inputs: Mapping[str, Array], params: _Params, working: str, wide: str,
        strides: Mapping[str, tuple[int, ...]], *, stepwise: bool = False,
    ) -> dict[str, Array]:  # fmt: skip
        try:
            result: dict[str, Array] = loaded.run(inputs, params.held(working), working=working, strides=strides, stepwise=stepwise)
        except ReplayRefused:
            if working in ("recorded", wide):
                raise
            # Mixed dtypes inside: computed in float32 and rounded once at the end.
            result = loaded.run(inputs, params.held("float32"), working="float32", strides=strides, stepwise=stepwise)
        return result

    def _dtypes(self, call: Call, slots: Mapping[str, SlotPair], produced: Any) -> tuple[str, str]:
        """(dtype of the wide replay, dtype of the working one) for what the target produced."""
        names = [dtypes.of(a).name for a in produced]
        floating = [n for n in names if dtypes.named(n).is_floating]
        target = floating[0] if floating else "float32"
        u = judge.unit_roundoff(target)
        recorded = {
            self.reference.records[s.reference_record].dtype for s in slots.values() if s.reference_slot.startswith(("input", "output"))
        }
        mine = {self.target.records[s.target_record].dtype for s in slots.values() if s.reference_slot.startswith(("input", "output"))}
        wide = "float64" if u < 1e-5 or target == "float64" else "float32"
        return wide, "recorded" if recorded == mine else target

    # ---- the pieces a program needs

    def _inputs(self, program: Program, slots: Mapping[str, SlotPair]) -> tuple[dict[str, Array], dict[str, tuple[int, ...]]]:
        arrays: dict[str, Array] = {}
        strides: dict[str, tuple[int, ...]] = {}
        for slot in program.inputs:
            pair = slots.get(slot)
            if pair is None:
                raise ReplayRefused(f"the target has no tensor for {slot}")
            arrays[slot] = self.target.array(pair.target_record)
            stride = self.target.records[pair.target_record].stride
            if stride:
                strides[slot] = stride
        return arrays, strides

    def _param_pairs(
        self, call: Call, program: Program, slots: Mapping[str, SlotPair], given: Mapping[str, bool], semantics: Semantics
    ) -> list[tuple[SlotPair, bool]]:
        # A parameter that is kept in another form there has no partner; what stands in for it needs none.
        own = {r.slot: SlotPair(r.slot, "", r.record, -1) for r in call.slots("param") if r.slot in semantics.params}
        known = {**own, **slots}
        missing = [slot for slot in program.params if slot not in known]
        if missing:
            raise ReplayRefused(f"the target has no {missing[0]}")
        return [(known[slot], given.get(slot, True)) for slot in program.params]

    def _edited(self, program: Program) -> Any:
        """A program with declared semantics, loaded. Its constants are the reference's."""
        key = (0, program.id)
        if key not in self._loaded:
            from whence.replay.programs import load

            self._loaded[key] = load(program, [self.reference.array(c) for c in program.constants], allow=self.allow)
        return self._loaded[key]

    def wide(self, program: Program, slots: Mapping[str, SlotPair]) -> dict[str, Array]:
        """The outputs of a program without parameters on the target's inputs, in float64. Raises ReplayRefused, ElementsMissing."""
        inputs, strides = self._inputs(program, slots)
        with _Threads(1):
            made: dict[str, Array] = self._edited(program).run(inputs, {}, working="float64", strides=strides)
        return made

    def parameter(self, pair: SlotPair, given: bool) -> Array:
        """What a correct target would hold: the reference's value at the target's precision; its own where the run changed it."""
        if not given:
            return self.target.array(pair.target_record)
        return judge.rounded(self.reference.array(pair.reference_record), self.target.records[pair.target_record].dtype)

    def _trusted(self, run: Run, side: int, call: Call) -> Any:
        """The loaded program of a call, after it reproduced this call's recorded outputs (the first few calls it serves)."""
        key = (side, call.program)
        if key in self._failed:
            raise ReplayRefused(self._failed[key])
        try:
            loaded = self._load(run, key)
            if self._checked[key] < _CHECKS:
                why = self._check(run, call, loaded)
                threads = self._recorded_threads(run)
                if why and threads > 1:
                    # Sums over threads round otherwise: once more with as many as the capture had.
                    with _Threads(threads):
                        why = self._check(run, call, loaded)
                if why:
                    raise ReplayRefused(f"the program does not reproduce its own recording: {why}")
                self._checked[key] += 1
        except (ReplayRefused, ElementsMissing) as error:
            self._failed[key] = str(error)
            raise
        return loaded

    @staticmethod
    def _recorded_threads(run: Run) -> int:
        counts = [s.get("threads") for s in align.settings_of(run).values()]
        return max((n for n in counts if isinstance(n, int)), default=1)

    def _load(self, run: Run, key: tuple[int, str]) -> Any:
        loaded = self._loaded.get(key)
        if loaded is None:
            try:
                from whence.replay.programs import load
            except ImportError as error:
                raise ReplayRefused("replay needs torch: pip install 'whence[torch]'") from MissingDependency(str(error))
            program = run.programs.get(key[1])
            if program is None:
                raise ReplayRefused("its program was not written (the capture ended early)")
            loaded = self._loaded[key] = load(program, [run.array(c) for c in program.constants], allow=self.allow)
        return loaded

    @staticmethod
    def _check(run: Run, call: Call, loaded: Any) -> str:
        from whence.replay.check import check

        program = run.programs[call.program]
        records = {r.slot: r.record for r in call.refs}
        missing = [s for s in (*program.inputs, *program.params) if s not in records]
        if missing:
            return f"{missing[0]} was not captured"
        inputs = {s: run.array(records[s]) for s in program.inputs}
        params = {s: run.array(records[s]) for s in program.params}
        outputs = {s: run.array(records[s]) for s, _ in program.outputs if s in records}
        strides = {s: run.records[records[s]].stride for s in program.inputs if run.records[records[s]].stride}
        why: str = check(loaded, inputs, params, outputs, strides)
        return why

    # ---- why a flagged operator is at fault

    def cause(self, call: Call, other: Call, slots: Mapping[str, SlotPair]) -> tuple[str, str]:
        """(cause, words) of an introduced error whose parameters are equal.

        The target's own program on its own inputs: where it gives what the target recorded (within rounding), the kernel does
        what the code says, so the code differs (`semantic`); where it does not, the kernel is at fault.
        """
        if not other.program:
            # The reference could be replayed, so it drew none.
            random = other.no_program.startswith("draws random numbers")
            return ("semantic", f"only the target {other.no_program}") if random else ("", "")
        mine, theirs = self.reference.programs.get(call.program), self.target.programs.get(other.program)
        words = locate.program_difference(mine, theirs) if mine is not None and theirs is not None else ""
        try:
            loaded = self._load(self.target, (1, other.program))
            records = {r.slot: r.record for r in other.refs}
            program = self.target.programs[other.program]
            inputs = {s: self.target.array(records[s]) for s in program.inputs}
            params = {s: self.target.array(records[s]) for s in program.params}
            made = {s: self.target.array(records[s]) for s, _ in program.outputs if s in records}
            strides = {s: self.target.records[records[s]].stride for s in program.inputs if self.target.records[records[s]].stride}
            wide, _ = self._dtypes(call, slots, made.values())
            with _Threads(1):
                r = loaded.run(inputs, params, working=wide, strides=strides)
                w = loaded.run(inputs, params, working="recorded", strides=strides)
            scores = [judge.local(y, r[s], w[s]).score for s, y in made.items() if r[s].shape == y.shape]
        except (ReplayRefused, ElementsMissing, KeyError):
            return "", words
        if scores and max(scores) > 1:
            return "kernel", "the target's own operators, run again on its own inputs, do not give what it recorded"
        return "semantic", words or "the target's own operators reproduce it, so its code computes something else"
