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
# Terms of a sum that rounds as a correct kernel of another library may: 1.2 roundings.
_OTHER_LIBRARY = 16


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One paired call to replay.

    slots: the pair of tensors in a slot of the program. is_initial: parameter slots -> whether the
    run started with that value (then a correct target holds the reference's, rounded) or changed it
    (then the target's own value is an input like any other). skip: of an output and what it rests
    on, whether there is nothing to find out. semantics: what is declared of the call.
    """

    call: Call
    partner: Call
    slots: Slots
    is_initial: Mapping[str, bool]
    skip: Callable[[str, Sequence[str]], bool]
    semantics: Semantics = PLAIN


@dataclass(slots=True)
class _Prepared:
    """A program with what the target has for it.

    pairs: of inputs and parameters, by slot. lent: record of the reference for inputs of which the
    target has none. inside: inputs that children without a partner leave. outputs: the pairs to
    measure.
    """

    loaded: Any
    pairs: dict[str, SlotPair]
    lent: dict[str, int]
    inside: set[str]
    outputs: dict[str, SlotPair] = field(default_factory=dict)


class Replayer:
    """Figures of calls from replay.

    Needs torch; without it every call is refused with the pip command. allow: vendor namespaces
    whose operators may be run. model: the user's, for calls without a usable program. beside: how
    many calls more than `paired` are judged. The other options are those of `BothSides`.
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
        # By call of the target, what programs chose: a backward pass runs the operators again.
        self._choices: defaultdict[Hashable, dict[int, Any]] = defaultdict(dict)
        self._sides: defaultdict[Hashable, dict[Any, Any]] = defaultdict(dict)

    def figures(self, request: ReplayRequest) -> ReplayResult:
        """Figures of one paired call, for every output of its program that the target has."""
        has_code = request.call.program or request.semantics.program or self.reference.model
        # torch is imported only where there is something to run.
        with Threads(1) if has_code else contextlib.nullcontext():
            try:
                result = self._figures(request)
            except (ReplayRefused, ElementsMissing) as error:
                # A guard, an extent: there is a program, and it does not serve these inputs.
                if self.instead(request.call, str(error)):
                    return self.figures(request)
                result = ReplayResult(
                    refused={"": str(error)},
                    misrouted=error.slots if isinstance(error, Misrouted) else {},
                )
        assumed = result.assumed.keys() & result.local.keys()
        if any(result.local[slot].score > 1 for slot in assumed):
            # It may as well have been given something else: then no output proves anything.
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
            # stored wider than it was computed: what it rounds is as large as that dtype's
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
        """The dtype in which a graph of the target has weights that its file has in 16 bits, ""
        where these inputs are of 16 bits too.
        """
        floating = {kind.name for kind in map(dtypes.of, inputs.values()) if kind.is_floating}
        return "float32" if floating == {"float32"} and self.target.is_of_file else ""

    def _prepared(self, request: ReplayRequest, loaded: Any) -> _Prepared | None:
        """What the target has for a program; None where its tensors are prints."""
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
        # A parameter that the target keeps in another form has no partner; what stands in for it
        # needs none.
        # An engine that shows no parameters of a call has them inside.
        is_bare = not any(is_param(r.slot) for r in request.partner.refs)
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
        """The outputs whose inputs the target has, into `prepared.outputs`."""
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
        """Figures of a call whose inside only the reference shows, into `result`."""
        call = request.call
        # What hangs in a cache is read by calls inside, not by this one's own operators.
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
        """Figures of a call's own operators, into `result`."""
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
        """The result; none where the program is wrong about the reference too, unless the target
        agrees with it.
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
                    and not is_gathered(ran)  # it never ran so: it was cut from others
                )
                if agrees and np.isfinite(score) and score > 1:
                    return dataclasses.replace(result, broken=score)
                self.refused[why] += 1
                return ReplayResult(refused={"": why})
        return result

    def instead(self, call: Call, why: str) -> bool:
        """Does the user's model stand for the call from now on, and did not before? why: its
        program cannot be used.
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
    """The same of a call and of its backward pass."""
    return call.rank, call.root, call.step, call.micro, call.scope, call.occurrence


# Calls that compute in 16 bits and hand over float32, as autocast has them do: a product of
# copies in bfloat16 whose result a softmax, or a sum of gradients, widens again; or code between
# modules that works on what such a product left, as the loss of a router on its scores.

_CASTS = {"_to_copy", "to", "type_as", "convert_element_type", "cast"}


class LoweredPrecision:
    """Which calls of the target compute products in 16 bits, where the reference knows no 16 bits
    and the target computes most of its products so.

    A reference that has some itself says where, and one layer that is lowered among others that
    are not is a difference. Steps of optimisers do not count: what they keep, and compute in 16
    bits, is not a sign of autocast.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self._reference, self._target = reference, target

    def dtype(self, partner: Call) -> str:
        """The dtype of 16 bits that a call of the target, or of an engine one inside it, computes
        in; "" where it does not.
        """
        if kind := self._executed.get(partner.id, ""):
            return kind
        program = self._target.programs.get(partner.program)
        if program is None or not self._kinds or _has_products(program):
            return self._kinds.get(partner.program, "")
        return _computes_in(program)

    @functools.cached_property
    def _executed(self) -> dict[int, str]:
        """By call, what an engine says that it, or a call inside it, was executed in."""
        kinds: dict[int, str] = {}
        for call in self._target.calls:
            kind, place = executed_in(call), call.id
            while kind and place != -1:
                kinds.setdefault(place, kind)
                place = self._target.calls[place].parent
        return kinds

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """By program of the target that computes products: the dtype of 16 bits that it casts to,
        "" of none.
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
    """The first dtype of 16 bits that a program casts to."""
    for operation in program.operations:
        kind = operation.kwargs.get("dtype")
        name = kind.get("dtype", "") if isinstance(kind, dict) else ""
        if name in dtypes.DTYPES and dtypes.is_half(name):
            return str(name)
    return ""


def _computes_in(program: Program) -> str:
    """The dtype of 16 bits of its inputs that a program computes on before it widens them."""
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
