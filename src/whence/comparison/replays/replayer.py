"""Replays the reference's programs on the target's inputs: figures of every output, with every
refusal counted by its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from whence import dtypes, judge
from whence.comparison.prepare.masks import UnifiedMasks
from whence.comparison.prepare.stored_precision import executed_in
from whence.comparison.replays import both_sides, noise_floors
from whence.comparison.replays.both_sides import BothSides, Slots
from whence.comparison.replays.program_run import (
    CallParameters,
    Misrouted,
    ParameterCache,
    ProgramRun,
)
from whence.comparison.replays.self_check import Threads
from whence.comparison.replays.semantics import PLAIN, ReplayResult, Semantics
from whence.comparison.replays.side import ReplaySource
from whence.comparison.replays.tied_choices import ChoiceHints
from whence.comparison.replays.whole_call import WholeCall
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.frameworks.operator_names import base_name
from whence.records import Call, Program, Run
from whence.records.marks import Mark, has_mark, is_gathered
from whence.records.slots import is_param
from whence.records.training import OPTIMIZER
from whence.replay.allowed_operators import CONTRACTIONS, VIEWS
from whence.results import SlotPair

if TYPE_CHECKING:
    from whence.comparison.replays.user_model import Models


_PRINTED = "its tensors were printed to fewer digits than they have, which no replay repeats"
# Length of a sum that rounds as much as a correct kernel of another library may: 1.2 roundings.
_OTHER_LIBRARY = 16


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One paired call to replay.

    slots: slot of the program -> its pair of tensors. is_initial: by parameter slot, whether the
    parameter has its initial value (a correct target then holds the reference's, rounded) or was
    changed (the target's own value is then an input like any other). skip: (output slot, slots that
    it depends on) -> whether a replay could show nothing. semantics: what is declared of the call.
    """

    call: Call
    partner: Call
    slots: Slots
    is_initial: Mapping[str, bool]
    skip: Callable[[str, Sequence[str]], bool]
    semantics: Semantics = PLAIN


@dataclass(slots=True)
class _Prepared:
    """A program and the tensors to replay it with.

    pairs: of inputs and parameters, by slot. lent: by slot, the reference's record of an input that
    the target lacks and that is the same in every correct run. inside: input slots that unpaired
    children fill. outputs: by slot, the pairs to measure.
    """

    loaded: Any
    pairs: dict[str, SlotPair]
    lent: dict[str, int]
    inside: set[str]
    outputs: dict[str, SlotPair] = field(default_factory=dict)


class Replayer:
    """Replays calls and returns their figures.

    Needs torch; without it every call is refused with the pip command. allow: vendor namespaces
    whose operators may be run. model: the user's model, for calls without a usable program. beside:
    number of judged calls besides `paired`. The other options are those of `BothSides`.
    """

    def __init__(
        self,
        reference: Run,
        target: Run,
        *,
        paired: Collection[int] = (),
        inner: Callable[[Call, Call, str], SlotPair | None] | None = None,
        pair_of: Callable[[Call, str], SlotPair | None] = lambda *_: None,
        allow: Sequence[str] = (),
        spread: Callable[[int], Array | None] = lambda _: None,
        model: Models | None = None,
        beside: int = 0,
    ) -> None:
        self.reference = ReplaySource(reference, allow, model)
        self.target = ReplaySource(target, allow)
        as_run = target.base if isinstance(target, UnifiedMasks) else target
        self.sides = BothSides(
            self.reference,
            self.target,
            ReplaySource(as_run, allow),
            ParameterCache(reference, target),
            paired,
            inner,
            pair_of,
            spread,
        )
        self._lowered = LoweredPrecision(reference, as_run)
        self.outputs = max(len(paired) + beside, 1)
        self.refused: Counter[str] = Counter()
        # By call of the target, its choices; a backward pass repeats those of its forward pass.
        self._choices: defaultdict[Hashable, dict[int, Any]] = defaultdict(dict)
        self._sides: defaultdict[Hashable, dict[Any, Any]] = defaultdict(dict)

    def figures(self, request: ReplayRequest) -> ReplayResult:
        """The figures of one paired call, for every output of its program that the target has."""
        has_code = request.call.program or request.semantics.program or self.reference.model
        # torch is imported only where there is something to run.
        with Threads(1) if has_code else contextlib.nullcontext():
            try:
                result = self._figures(request)
            except (ReplayRefused, ElementsMissing) as error:
                # The program exists but does not fit these inputs (a guard, an extent).
                if self.instead(request.call, str(error)):
                    return self.figures(request)
                result = ReplayResult(
                    refused={"": str(error)},
                    misrouted=error.slots if isinstance(error, Misrouted) else {},
                )
        assumed = result.assumed.keys() & result.local.keys()
        if any(result.local[slot].score > 1 for slot in assumed):
            # The assumed input may differ in the target, so no output proves anything.
            for slot in assumed:
                del result.local[slot]
                result.refused[slot] = f"the target has no tensor for {result.assumed[slot]}"
        self.refused.update(set(result.refused.values()))
        return result

    def _figures(self, request: ReplayRequest) -> ReplayResult:
        call, semantics = request.call, request.semantics
        loaded = both_sides.load(self.sides, call)
        if semantics.program is not None:
            loaded = self.reference.edited(semantics.program)
        result = ReplayResult(refused=dict(loaded.program.lost))
        prepared = self._prepared(request, loaded)
        if prepared is None:
            return ReplayResult(refused={"": _PRINTED})
        self._choose_outputs(request, prepared, result)
        if not prepared.outputs:
            return result
        program, pairs = loaded.program, prepared.pairs
        inputs, strides = self.target.arrays(
            {s: pairs[s].target_record for s in program.inputs if s in pairs}
        )
        params = CallParameters(
            self.sides.parameters,
            loaded,
            [(pairs[s], request.is_initial.get(s, True)) for s in program.params if s in pairs],
            semantics,
            executed := self._lowered.dtype(request.partner),
            self._widened(inputs),
        )
        produced = {
            slot: self.target.run.array(pair.target_record)
            for slot, pair in prepared.outputs.items()
        }
        wide, working = self.sides.working_dtypes(pairs, prepared.outputs, produced)
        if executed:
            # outputs are stored wider than computed, so they round as the executed dtype does
            produced = {slot: judge.rounded(array, executed) for slot, array in produced.items()}
            inputs = {slot: judge.rounded(array, executed) for slot, array in inputs.items()}
            wide, working = "float32", executed
        inputs |= {
            slot: array
            for slot, record in prepared.lent.items()
            if (array := self.reference.lent(record, working)) is not None
        }
        run = ProgramRun(
            loaded,
            (inputs, strides),
            params,
            produced,
            semantics,
            (wide, working),
            ChoiceHints(
                lambda: both_sides.own_integers(self.sides, request.partner),
                self._choices[_call_key(request.partner)],
                self._sides[_call_key(request.partner)],
            ),
        )
        if any(prepared.inside & loaded.needs(slot) for slot in prepared.outputs):
            self._measure_whole(request, prepared, result, produced, run)
        else:
            self._measure_program(request, prepared, result, produced, run)
        return result

    def _widened(self, inputs: Mapping[str, Array]) -> str:
        """The dtype to which a graph of the target widens 16-bit weights of its file; "" if the
        inputs have 16 bits too, or if it comes from no file.
        """
        floating = {kind.name for kind in map(dtypes.of, inputs.values()) if kind.is_floating}
        return "float32" if floating == {"float32"} and self.target.is_of_file else ""

    def _prepared(self, request: ReplayRequest, loaded: Any) -> _Prepared | None:
        """The tensors to replay a program with; None if they were printed to too few digits."""
        call, slots, program = request.call, request.slots, loaded.program
        pairs = {
            slot: pair
            for slot in (*program.inputs, *program.params)
            if (pair := slots(slot)) is not None
        }
        if has_mark(program, Mark.COMPOSED):
            both_sides.check_same_choices(self.sides, call, loaded, pairs)
        output_pairs = [pair for slot, _ in program.outputs if (pair := slots(slot)) is not None]
        if any(map(self.sides.is_print, (*pairs.values(), *output_pairs))):
            return None
        # A parameter that the target keeps in another form has no partner; the reference's value,
        # or the declared one, stands in for it. So it does if an engine shows no parameters, and in
        # a container, as for calls inside it.
        is_bare = not call.leaf or not any(is_param(r.slot) for r in request.partner.refs)
        stand_ins = [
            s
            for s in program.params
            if s not in pairs and (is_bare or s in request.semantics.params)
        ]
        pairs |= {
            slot: SlotPair(slot, "", record, -1)
            for slot, record in self.reference.records(call, stand_ins).items()
        }
        unpaired = self.reference.records(call, [s for s in program.inputs if s not in pairs])
        lent = {
            slot: record
            for slot, record in unpaired.items()
            if self.reference.lent(record) is not None
        }
        inside = both_sides.inside_slots(self.sides, call, program.inputs, pairs)
        for first, second in program.same:
            both_sides.check_still_one(self.sides, first, second, slots)
        return _Prepared(loaded, pairs, lent, inside)

    def _choose_outputs(
        self, request: ReplayRequest, prepared: _Prepared, result: ReplayResult
    ) -> None:
        """Put the outputs whose inputs are available into `prepared.outputs`, and the reasons
        against others into `result.refused`.
        """
        loaded, pairs = prepared.loaded, prepared.pairs
        program = loaded.program
        for slot, operand in program.outputs:
            pair = request.slots(slot)
            if pair is None:
                continue
            needs = loaded.needs(slot)
            missing = sorted(
                s
                for s in needs
                if s not in pairs and s not in prepared.lent and s not in prepared.inside
            )
            if missing:
                result.refused[slot] = f"the target has no tensor for {missing[0]}"
            elif not request.skip(slot, needs) and not both_sides.is_passthrough(
                self.sides, operand, program.inputs, pairs, pair
            ):
                prepared.outputs[slot] = pair
                read = sorted(s for s in needs if not is_param(s))
                unseen = sorted(
                    s
                    for s in needs - request.semantics.params.keys()
                    if s in pairs and pairs[s].target_record < 0
                )
                if read and not any(s in pairs or s in prepared.inside for s in read):
                    unseen.append(read[0])
                if unseen:
                    result.assumed[slot] = unseen[0]

    def _measure_whole(
        self,
        request: ReplayRequest,
        prepared: _Prepared,
        result: ReplayResult,
        produced: Mapping[str, Array],
        run: ProgramRun,
    ) -> None:
        """Put the figures of a call whose inside only the reference shows into `result`."""
        call = request.call
        # Tensors in a cache are read by calls inside, not by this call's own operators.
        cached = {
            r.slot: pair
            for r in call.slots("input")
            if r.slot not in prepared.pairs and (pair := request.slots(r.slot)) is not None
        }
        state = {
            pair.reference_record: self.target.run.array(pair.target_record)
            for pair in cached.values()
        }
        whole = WholeCall(self.sides, call, request.partner, run, state)
        equal_inputs = all(map(self.sides.is_equal, (*prepared.pairs.values(), *cached.values())))
        records = {slot: pair.reference_record for slot, pair in prepared.outputs.items()}
        try:
            whole.measure(
                result, produced, records, equal_inputs=equal_inputs, semantics=request.semantics
            )
        except ReplayRefused as refused:
            raise run.unserved(refused) from refused

    def _measure_program(
        self,
        request: ReplayRequest,
        prepared: _Prepared,
        result: ReplayResult,
        produced: Mapping[str, Array],
        run: ProgramRun,
    ) -> None:
        """Put the figures of a call's own operators into `result`."""
        loaded, outputs = prepared.loaded, prepared.outputs
        wide, refused_otherwise = run.wide_or_routed()
        # A kernel of another library may be off by a few roundings.
        translated = has_mark(loaded.program, Mark.TRANSLATED)
        is_other = translated or has_mark(request.partner, Mark.OPSET)
        terms = max(loaded.length, _OTHER_LIBRARY) if is_other else loaded.length
        measurement = noise_floors.Measurement(
            run,
            produced,
            wide,
            terms,
            both_sides.reference_outputs(
                self.sides, request.call, loaded, prepared.pairs, outputs, run.wide_dtype
            ),
            {slot: self.sides.spread(pair.reference_record) for slot, pair in outputs.items()},
            request.semantics,
            (request.call, request.partner),
            self.outputs,
            bool(self._lowered.dtype(request.partner)),
        )
        result.local = noise_floors.measure(measurement)
        if refused_otherwise is not None and any(e.score > 1 for e in result.local.values()):
            raise run.misrouted(refused_otherwise)

    def examined(self, call: Call, result: ReplayResult) -> ReplayResult:
        """The result if the program reproduces the reference's recording. If it does not, a result
        with `broken` set if the target agrees with the program, else a refusal.
        """
        with Threads(1):
            for ran in (call, *result.ran):
                why, score = self.reference.confirm(ran)
                if not why:
                    continue
                agrees = (
                    result.local
                    and all(local.score <= 1 for local in result.local.values())
                    and not result.ran
                    and not is_gathered(ran)  # such a call was put together, it never ran
                )
                if agrees and np.isfinite(score) and score > 1:
                    return dataclasses.replace(result, broken=score)
                self.refused[why] += 1
                return ReplayResult(refused={"": why})
        return result

    def instead(self, call: Call, why: str) -> bool:
        """Replace the call's program by the user's model, if that is possible. Returns whether the
        model newly stands for the call. why: why the program cannot be used.
        """
        if self.reference.model is None or self.reference.borrows(call):
            return False
        with contextlib.suppress(ReplayRefused), Threads(1):
            self.reference.instead(call, why)
        return self.reference.borrows(call)

    def wide(self, program: Program, inputs: Slots) -> dict[str, Array]:
        """The outputs of a program without parameters on the target's inputs, in float64. Raises
        ReplayRefused, ElementsMissing.
        """
        records = {
            slot: pair.target_record
            for slot in program.inputs
            if (pair := inputs(slot)) is not None
        }
        arrays, strides = self.target.arrays(records)
        with Threads(1):
            outputs: dict[str, Array] = self.reference.edited(program).run(
                arrays, {}, working="float64", strides=strides
            )
        return outputs


def _call_key(call: Call) -> Hashable:
    """A key that a call and its backward pass share."""
    return call.rank, call.root, call.step, call.micro, call.scope, call.occurrence


# Calls that compute in 16 bits and return float32, as under autocast: a product of bfloat16 copies
# whose result a softmax or a sum of gradients widens again; or code between modules that works on
# the result of such a product, such as the loss of a router on its scores.

_CASTS = {"_to_copy", "to", "type_as", "convert_element_type", "cast"}


class LoweredPrecision:
    """Finds calls of the target that compute products in 16 bits, if most products of the target do
    and the reference has no 16-bit tensor.

    A reference with 16-bit tensors shows itself where they belong, and a single layer in 16 bits is
    a difference. Steps of optimisers do not count, since 16-bit state is no sign of autocast.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self._reference, self._target = reference, target

    def dtype(self, partner: Call) -> str:
        """The 16-bit dtype in which a call of the target computes, or in which an engine executed
        it or a call inside it; "" if neither.
        """
        if kind := self._executed.get(partner.id, ""):
            return kind
        program = self._target.programs.get(partner.program)
        if program is None or not self._kinds or _has_products(program):
            return self._kinds.get(partner.program, "")
        return _computes_in(program)

    @functools.cached_property
    def _executed(self) -> dict[int, str]:
        """By call, the 16-bit dtype in which an engine executed it or a call inside it."""
        kinds: dict[int, str] = {}
        for call in self._target.calls:
            kind, place = executed_in(call), call.id
            while kind and place != -1:
                kinds.setdefault(place, kind)
                place = self._target.calls[place].parent
        return kinds

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """By program of the target with products, the 16-bit dtype that it casts to, "" if none.
        Empty if at most half of these programs cast, or if the reference has 16-bit tensors.
        """
        if self._reference_has_half:
            return {}
        kinds = {
            name: _lowered(program)
            for name in {call.program for call in _without_steps(self._target) if call.program}
            if (program := self._target.programs.get(name)) is not None and _has_products(program)
        }
        lowered = sum(bool(kind) for kind in kinds.values())
        return kinds if lowered > len(kinds) / 2 else {}

    @property
    def _reference_has_half(self) -> bool:
        half = {name for name in dtypes.DTYPES if dtypes.is_half(name)}
        records = self._reference.records
        return any(
            records[ref.record].dtype in half
            for call in _without_steps(self._reference)
            for ref in call.refs
        )


def _without_steps(run: Run) -> Iterator[Call]:
    return (call for call in run.calls if call.phase != OPTIMIZER)


def _lowered(program: Program) -> str:
    """The first 16-bit dtype that a program casts to, "" if there is none."""
    for operation in program.operations:
        kind = operation.kwargs.get("dtype")
        name = kind.get("dtype", "") if isinstance(kind, dict) else ""
        if name in dtypes.DTYPES and dtypes.is_half(name):
            return str(name)
    return ""


def _computes_in(program: Program) -> str:
    """The 16-bit dtype of the inputs on which a program computes before widening them; "" if
    none.
    """
    half: dict[tuple[str, Any], str] = {
        ("in", place): name
        for place, name in enumerate(program.input_dtypes)
        if name in dtypes.DTYPES and dtypes.is_half(name)
    }
    for place, operation in enumerate(program.operations):
        read = [(o.kind, o.value) for o in operation.operands() if o.kind == "in"]
        read += [("op", tuple(o.value)) for o in operation.operands() if o.kind == "op"]
        narrow = [half[key] for key in read if key in half]
        base = base_name(operation.name)
        if not narrow or base in _CASTS or "dtype" in operation.kwargs:
            continue
        if base not in VIEWS:
            return narrow[0]
        half["op", (place, 0)] = narrow[0]
    return ""


def _has_products(program: Program) -> bool:
    bases = {base_name(operation.name) for operation in program.operations}
    return bool(bases & CONTRACTIONS) or any(map(_is_recurrent, bases))


def _is_recurrent(base: str) -> bool:
    return base.removesuffix("_cell") in ("lstm", "gru", "rnn_tanh", "rnn_relu") or (
        base == "mkldnn_rnn_layer"
    )
