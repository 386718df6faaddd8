"""Tells whether the programs of both runs compute the same function.

Run on the same inputs in float64, two ways to write one formula agree to about 1e-15. A different
constant or a missing term shows, however small it is compared with rounding in the target's dtype.

This is more exact than statistics: an epsilon of 1e-5 instead of 1e-6 causes a hundredth of a
rounding in bfloat16, and no error of a recorded tensor tells it from noise. It needs a program on
both sides. Differences that a correct target may have are removed first: casts, constants rounded
to the target's dtype, and constants that follow from a dtype (its epsilon, its smallest number).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.both_sides import BothSides, Slots, slot_in_target
from whence.comparison.replays.program_difference import CASTS
from whence.comparison.replays.self_check import Threads
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.frameworks.operator_names import CHOOSES, base_name
from whence.records import Call, Operation, Program, marks
from whence.records.marks import Mark, has_mark
from whence.records.program import TENSOR_OPERANDS, map_operands
from whence.records.slots import is_param

Keep = Callable[[str, tuple[int, ...]], Array | None]

_CLEAN_RUNS = 3
"""Number of calls on which two programs must agree before they count as the same function."""


class Formulas:
    """Compares the programs of paired calls as functions. Pairs of programs that have agreed often
    enough are not run again.
    """

    def __init__(self, sides: BothSides) -> None:
        self._sides = sides
        self._agreed: Counter[tuple[str, str, frozenset[str]]] = Counter()

    def difference(
        self,
        call: Call,
        partner: Call,
        slots: Slots,
        outputs: Collection[str],
        keep: Keep | None = None,
    ) -> judge.FormulaDifference | None:
        """The largest difference at these outputs that a correct target would not have; None if
        there is none or if it is not known. keep: (slot, shape) -> the elements that count.
        """
        programs = self._programs(call, partner)
        if programs is None:
            return None
        key = programs[0].id, programs[1].id, frozenset(outputs)
        if self._agreed[key] >= _CLEAN_RUNS:
            return None
        try:
            self._sides.unmasked.load(partner)  # checks what nothing has run yet
            if not all(map(is_smooth, programs)):
                return None
            pair = _ProgramPair(self._sides, call, partner, slots, *programs)
            if pair.is_one_function:
                self._agreed[key] = _CLEAN_RUNS
                return None
            with Threads(1):
                worst = pair.worst(outputs, keep)
        except (ReplayRefused, ElementsMissing, KeyError, ValueError):
            return None
        if worst is None and not pair.constants_differ:
            self._agreed[key] += 1
        return worst

    def _programs(self, call: Call, partner: Call) -> tuple[Program, Program] | None:
        """Both programs if they differ and both were recorded as their code ran, else None."""
        kinds = {call.kind, partner.kind}
        if kinds not in ({"module"}, {"operator"}) or self._sides.reference.borrows(call):
            return None
        programs = (
            self._sides.reference.run.programs.get(call.program),
            self._sides.unmasked.run.programs.get(partner.program),
        )
        reference, target = programs
        if reference is None or target is None or reference.id == target.id:
            return None
        is_rewritten = any(
            marks.is_gathered(c) or marks.is_of_pieces(c) or marks.was_compiled(c)
            for c in (call, partner)
        ) or any(has_mark(p, Mark.COMPOSED) for p in (reference, target))
        return None if is_rewritten else (reference, target)


class _ProgramPair:
    """The programs of one paired call. Constants of the target that a correct target may have are
    replaced by the reference's.
    """

    def __init__(
        self,
        sides: BothSides,
        call: Call,
        partner: Call,
        slots: Slots,
        reference: Program,
        target: Program,
    ) -> None:
        self._sides, self._call, self._partner = sides, call, partner
        self._reference = reference
        self._target = with_reference_constants(reference, target)
        self._pairs = {
            slot: pair
            for slot in (*reference.inputs, *reference.params, *(s for s, _ in reference.outputs))
            if (pair := slots(slot)) is not None
        }
        self._target_slot = {
            slot: name
            for slot, pair in self._pairs.items()
            if (name := slot_in_target(sides, partner, self._target, slot, pair)) is not None
        }
        self._reference_slot = {name: slot for slot, name in self._target_slot.items()}
        forms = (
            list(normal_form(reference, lambda slot: slot)),
            list(normal_form(self._target, lambda slot: self._reference_slot.get(slot, slot))),
        )
        self.is_one_function = forms[0] == forms[1]
        self.constants_differ = not self.is_one_function and (
            without_floats(forms[0]) == without_floats(forms[1])
        )

    def worst(self, outputs: Collection[str], keep: Keep | None) -> judge.FormulaDifference | None:
        """The difference at these outputs that exceeds its limit most, None if none does. Raises
        ReplayRefused, ElementsMissing, KeyError.
        """
        reference, target = self._loaded()
        wanted = [slot for slot in outputs if slot in self._target_slot]
        read = {slot: reference.needs(slot) for slot in wanted}
        wanted = [slot for slot in wanted if self._reads_the_same(read[slot], target, slot)]
        if not wanted:
            return None
        records = {s: self._pairs[s].target_record for slot in wanted for s in read[slot]}
        of_reference = _run(reference, *self._sides.target.arrays(records), wanted)
        target_slots = [self._target_slot[slot] for slot in wanted]
        needed = {s for slot in target_slots for s in target.needs(slot)}
        target_inputs = self._sides.unmasked.arrays(
            self._sides.unmasked.records(self._partner, needed)
        )
        of_target = _run(target, *target_inputs, target_slots)
        own_rounding = functools.cache(lambda: _own_rounding(target, target_inputs, of_target))
        differences = []
        for slot, target_slot in zip(wanted, target_slots, strict=True):
            rounding = functools.partial(lambda name: own_rounding()[name], target_slot)
            difference = self._at(slot, of_reference[slot], of_target[target_slot], keep, rounding)
            differences += [difference] if difference is not None else []
        return max(differences, key=lambda d: d.score, default=None)

    def _loaded(self) -> tuple[Any, Any]:
        reference = self._sides.reference.load(self._call)
        target = self._sides.unmasked.edited(self._target)
        arrays = [
            [source.run.array(c) for c in program.constants]
            for source, program in (
                (self._sides.reference, self._reference),
                (self._sides.unmasked, self._target),
            )
        ]
        if not _constants_agree(*arrays):
            raise ReplayRefused("tensors made inside differ, which rounding may have done")
        return reference, target

    def _reads_the_same(self, read: Collection[str], target: Any, slot: str) -> bool:
        """Whether both programs compute an output from the same inputs and parameters."""
        if any(s not in self._target_slot or self._pairs[s].target_record < 0 for s in read):
            return False
        needed = target.needs(self._target_slot[slot])
        of_reference = {self._target_slot[s] for s in read}
        outputs = {self._target_slot.get(s) for s, _ in self._reference.outputs}
        outputs |= {s for s, _ in self._target.outputs}
        # What only one of them makes itself was rounded before the other reads it.
        return needed <= self._reference_slot.keys() and not any(
            is_param(s) or s in outputs for s in of_reference ^ needed
        )

    def _at(
        self,
        slot: str,
        of_reference: Array,
        of_target: Array,
        keep: Keep | None,
        own_rounding: Callable[[], float],
    ) -> judge.FormulaDifference | None:
        record = self._sides.target.run.records[self._pairs[slot].target_record]
        rounding = dtypes.unit_roundoff(record.dtype)
        if (
            of_reference.shape != of_target.shape
            or not rounding
            or not dtypes.of(of_reference).is_floating
        ):
            return None
        shown = keep(slot, of_reference.shape) if keep is not None else None
        error = relative_distance(of_reference, of_target, shown)
        return judge.formula_difference(
            slot, error, rounding, own_rounding, only_constants=self.constants_differ
        )


def _constants_agree(reference: list[Array], target: list[Array]) -> bool:
    """Whether every constant tensor of the target's program equals one of the reference's, up to
    rounding to the coarser dtype.
    """

    def alike(a: Array, b: Array) -> bool:
        if a.shape != b.shape or dtypes.of(a).is_floating != dtypes.of(b).is_floating:
            return False
        if dtypes.of(a).is_floating:
            coarser = max(dtypes.of(a).name, dtypes.of(b).name, key=dtypes.unit_roundoff)
            a, b = judge.rounded(a, coarser), judge.rounded(b, coarser)
        return np.array_equal(a, b)

    return all(any(alike(a, b) for a in reference) for b in target)


def _run(
    loaded: Any,
    arrays: Mapping[str, Array],
    strides: Mapping[str, tuple[int, ...]],
    outputs: list[str],
) -> dict[str, Array]:
    results: dict[str, Array] = loaded.run(
        arrays, arrays, working="float64", strides=strides, outputs=outputs
    )
    return results


def _own_rounding(
    loaded: Any,
    inputs: tuple[Mapping[str, Array], Mapping[str, tuple[int, ...]]],
    wide: Mapping[str, Array],
) -> dict[str, float]:
    """By slot, the relative 2-norm distance between a program's results in its own dtypes and in
    float64.
    """
    arrays, strides = inputs
    working = loaded.run(arrays, arrays, working="recorded", strides=strides, outputs=list(wide))
    return {slot: relative_distance(wide[slot], working[slot], None) for slot in wide}


def relative_distance(a: Array, b: Array, shown: Array | None) -> float:
    """||b - a|| / ||a|| over elements that count (`shown`) and are finite in both; 0 if a is 0."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        counted = (np.abs(x) < 1e300) & (np.abs(y) < 1e300)
    if shown is not None:
        counted &= shown.astype(bool)
    x, y = x[counted], y[counted]
    size = float(np.linalg.norm(x))
    return float(np.linalg.norm(y - x)) / size if size else 0.0


# What a program computes, apart from dtypes: its operators without casts, and its numbers without
# their rounding to a dtype.

_JUMPS = frozenset((
    "round", "floor", "ceil", "trunc", "fix", "frac", "sign", "sgn", "floor_divide", "remainder",
    "fmod", "bucketize", "searchsorted", "heaviside", "nonzero", "multinomial", "bernoulli",
    "unique", "_unique2", "histc", "bincount",
))  # fmt: skip
"""Operators whose result jumps: a change of the last bit of an input may change a whole step."""


def with_reference_constants(reference: Program, target: Program) -> Program:
    """The target's program with the reference's constants in place of its own that differ only
    because of a dtype: rounded to the program's dtype, or a limit of a dtype such as its epsilon.
    """
    of_target, of_reference = set(_floats(target)), set(_floats(reference))
    other_name = {
        number: match
        for number in of_target - of_reference
        if (
            match := next(
                (n for n in of_reference - of_target if _is_rounded(n, number, target)), None
            )
        )
        is not None
    }
    if not other_name:
        return target

    def put_back(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [put_back(item) for item in value]
        return other_name.get(value, value) if isinstance(value, float) else value

    operations = tuple(
        msgspec.structs.replace(
            op,
            args=tuple(put_back(op.args)),
            kwargs={key: put_back(value) for key, value in op.kwargs.items()},
        )
        for op in target.operations
    )
    return msgspec.structs.replace(
        target, id=f"{target.id} with constants of {reference.id}", operations=operations
    )


def _is_rounded(number: float, target_number: float, target: Program) -> bool:
    """Whether `target_number` is `number` rounded to the program's dtype, or the same limit (such
    as the epsilon) of another dtype.
    """
    if target.base and float(np.asarray(number, dtypes.named(target.base).numpy)) == target_number:
        return True
    return bool(
        _limits_of_dtypes().get(number, set()) & _limits_of_dtypes().get(target_number, set())
    )


@functools.cache
def _limits_of_dtypes() -> dict[float, set[str]]:
    """By number, the limits of floating dtypes ("eps", "tiny", "max", ...) that it is."""
    import ml_dtypes

    names: dict[float, set[str]] = {}
    for name in ("float64", "float32", "float16", "bfloat16"):
        limits = ml_dtypes.finfo(dtypes.named(name).numpy)
        for limit in ("eps", "tiny", "min", "max", "smallest_subnormal"):
            names.setdefault(float(getattr(limits, limit)), set()).add(limit)
    return names


def is_smooth(program: Program) -> bool:
    """Whether a program may be compared in float64: it was recorded as the code ran, no value
    decides which operators run or which elements are chosen, and no result jumps. What follows from
    whole numbers alone, as places in a window do, is the same in every dtype.
    """
    if has_mark(program, Mark.TRANSLATED):
        return False
    kinds = program.input_dtypes or ("",) * len(program.inputs)
    inputs = {k for k, kind in enumerate(kinds) if not kind or dtypes.is_floating(kind)}
    varying = set[int]()  # operations that follow from other numbers too

    def varies(kind: str, value: Any) -> bool:
        is_op, is_input = kind == "op", kind == "in"
        return kind == "param" or (is_op and value[0] in varying) or (is_input and value in inputs)

    for place, op in enumerate(program.operations):
        if any(varies(operand.kind, operand.value) for operand in op.operands()):
            varying.add(place)
            if op.guard is not None or _jumps(op) or base_name(op.name) in CHOOSES:
                return False
    return True


def _jumps(op: Operation) -> bool:
    """Whether the result of an operation jumps: it is such an operator, rounds a quotient, or casts
    to integers.
    """
    to_integer = op.name.startswith(CASTS) and any(
        kind == "dtype" and str(value).startswith(("int", "uint")) for kind, value in op.operands()
    )
    by_rounding = op.kwargs.get("rounding_mode") is not None
    return to_integer or by_rounding or base_name(op.name).removesuffix("_") in _JUMPS


def _floats(program: Program) -> Iterator[float]:
    """The floats among the arguments of a program's operations."""

    def numbers(value: Any) -> Iterator[float]:
        if isinstance(value, float):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from numbers(item)

    for op in program.operations:
        yield from numbers((*op.args, *op.kwargs.values()))


def normal_form(program: Program, name: Callable[[str], str]) -> Iterator[tuple[str, Any, Any]]:
    """The operations of a program with their arguments, without casts and dtypes, then the outputs.
    name: renames a slot. Equal forms mean equal functions; equal functions may have different
    forms.
    """
    number: dict[int, Any] = {}

    def renamed(kind: str, value: Any) -> Any:
        if kind == "in":
            return "in", name(program.inputs[value])
        if kind == "param":
            return "param", name(value)
        if kind == "op":
            place, result = value
            return (number[place], result) if isinstance(number[place], int) else number[place]
        return None if kind in ("dtype", "device", "layout", "memory_format") else (kind, value)

    kept = 0
    for place, op in enumerate(program.operations):
        source = map_operands(renamed, op.args[0]) if op.args else None
        if op.name.startswith(CASTS) and _is_tensor(op):
            number[place] = source
            continue
        number[place], kept = kept, kept + 1
        kwargs = {
            key: value
            for key, item in sorted(op.kwargs.items())
            if (value := map_operands(renamed, item)) is not None
        }
        yield op.name, tuple(map_operands(renamed, op.args)), kwargs
    for slot, operand in sorted(program.outputs, key=lambda output: name(output[0])):
        yield "output", name(slot), map_operands(renamed, operand)


def _is_tensor(op: Operation) -> bool:
    """Whether the first argument of an operation is a tensor."""
    first = op.args[0] if op.args else None
    return isinstance(first, dict) and next(iter(first)) in TENSOR_OPERANDS


def without_floats(form: Any) -> Any:
    """A normal form with every float replaced by 0."""
    if isinstance(form, float):
        return 0.0
    if isinstance(form, dict):
        return {key: without_floats(value) for key, value in form.items()}
    if isinstance(form, (list, tuple)):
        return [without_floats(item) for item in form]
    return form
