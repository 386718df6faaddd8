"""One call of an operator: its tensors by the names of the schema, its other arguments as plain
values, and the program that it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import xxhash

from whence.frameworks.torch_arrays import NAMES, answers, plain, tensors_in
from whence.frameworks.torch_schema import (
    METADATA_ONLY,
    STATISTICS_WRITERS,
    UNINITIALISED,
    draws,
    schema_of,
)
from whence.frameworks.torch_trees import CLOSED
from whence.records import Operation, Placement, Program, Ref, Statistics
from whence.records.marks import NoProgram
from whence.records.slots import is_input, is_output

# In-place operators that do not look at what they write.
_OVERWRITE = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_",
    "log_normal_", "geometric_", "cauchy_", "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip
_MAX_TEXT = 1000
_NO_OPERATORS = ("profiler.", "debug_mode_ops.")  # marks of tools


class Overload:
    """What must be known of an overload for every call of it, worked out once."""

    __slots__ = (
        "base",
        "func",
        "implied",
        "key",
        "listed",
        "name",
        "overwritten",
        "plain",
        "positional",
        "random",
        "sizes",
        "slots",
        "statistics",
        "tool",
        "uninitialised",
        "view",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        facts, schema = schema_of(func), func._schema
        self.func, self.name, self.base, self.positional, self.view = (
            func,
            facts.name,
            facts.base,
            facts.positional,
            facts.view,
        )
        self.key = f"/{self.name}"
        self.tool = self.name.startswith(_NO_OPERATORS)
        self.slots = {a.name: f"input.{a.name}" for a in schema.arguments}
        self.statistics = facts.base in STATISTICS_WRITERS
        self.writes = facts.writes
        out = {a.name for a in schema.arguments if a.is_out}
        blind = out | (set(facts.writes) if facts.base in _OVERWRITE else set())
        self.overwritten = frozenset(f"input.{name}" for name in blind)
        self.uninitialised = facts.base in UNINITIALISED
        # All that may be said of a result is that it is new, or a view.
        self.plain = not self.writes and not self.statistics and not self.uninitialised
        self.random = facts.random
        self.sizes = any("int" in str(a.real_type) for a in schema.arguments)
        # (argument, result) that the schema says are one tensor.
        sets = {
            a.name: set(a.alias_info.before_set)
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        }
        self.implied = {
            (f"input.{name}", f"output.{i}")
            for i, r in enumerate(schema.returns)
            if r.alias_info is not None and r.alias_info.is_write
            for name, aliases in sets.items()
            if aliases & set(r.alias_info.before_set)
        }
        self.listed = len(schema.returns) == 1 and str(schema.returns[0].real_type).startswith(
            "List"
        )

    def draws(self, named: dict[str, Any]) -> bool:
        return self.random and draws(schema_of(self.func), named)


_OVERLOADS: dict[
    int, Overload
] = {}  # by id, for the hash of one is a function of Python's; an Overload keeps it


def overload_of(func: Any) -> Overload:
    overload = _OVERLOADS.get(id(func))
    if overload is None:
        overload = _OVERLOADS[id(func)] = Overload(func)
    return overload


class OperatorCall:
    """A call of an operator that is being recorded. above: the frame or region it is in. inputs:
    (slot, tensor), in schema order.

    called: what it is called with, positional and by name. sights: (record, edge, form) by slot. It
    is what a tensor is sighted by: scope, op_type and keep say for whom and whether elements are
    wanted.
    """

    __slots__ = (
        "_named_arguments",
        "above",
        "arguments",
        "called",
        "forward",
        "inputs",
        "is_written",
        "keep",
        "notes",
        "occurrence",
        "op_type",
        "order",
        "overload",
        "phase",
        "place",
        "placements",
        "ranges",
        "refs",
        "scope",
        "seconds",
        "sights",
        "source",
        "tally",
        "unseen",
    )
    _named_arguments: dict[str, Any] | None
    occurrence: int
    place: int
    ranges: dict[str, list[Any]] | None
    tally: Any

    def __init__(
        self,
        overload: Overload,
        order: int,
        scope: str,
        phase: str,
        above: Any,
        forward: int,
        source: str,
        called: Any,
    ) -> None:
        self.overload, self.op_type, self.order = overload, overload.base, order
        self.scope, self.phase, self.above = scope, phase, above
        self.forward, self.source, self.called = forward, source, called
        self.keep, self.is_written, self.seconds = False, True, 0.0
        self.refs: list[Ref] = []
        self.sights: dict[str, tuple[Any, str, Any]] = {}
        self.inputs: list[tuple[str, Any]] = []
        self.arguments: dict[str, Any] = {}
        self.notes: tuple[str, ...] = ()
        self.placements: dict[str, Placement] = {}
        self.unseen = ""
        self._named_arguments = self.ranges = self.tally = None

    @property
    def number(self) -> str:
        """Its place in the tree: operators are counted apart from modules, so that these have the
        numbers they always have.
        """
        return (
            f"op{self.place}" if self.above.number == "0" else f"{self.above.number}_op{self.place}"
        )

    # ---- before it runs

    def take(self) -> None:
        """Sort what it was called with."""
        args, kwargs = self.called
        inputs, arguments, slots = self.inputs, self.arguments, self.overload.slots
        for name, value in zip(self.overload.positional, args):
            kind = type(value)
            if (kind is _TENSOR or kind is _PARAMETER) and not value.is_nested:
                inputs.append((slots[name], value))
            elif kind is int or kind is bool or value is None:
                arguments[name] = value
            else:
                self._take(name, value)
        for name, value in kwargs.items():
            self._take(name, value)

    def _take(self, name: str, value: Any) -> Any:
        """An argument as plain values, {"slot": ...} where it is a tensor."""
        if isinstance(value, torch.Tensor):
            return self._tensor(self.overload.slots[name], value)
        if isinstance(value, (list, tuple)) and any(
            isinstance(item, torch.Tensor) for item in value
        ):
            slot = self.overload.slots[name]
            items = [
                self._tensor(f"{slot}.{i}", v) if isinstance(v, torch.Tensor) else self._encoded(v)
                for i, v in enumerate(value)
            ]
            if not all(isinstance(v, torch.Tensor) for v in value):
                self.arguments[name] = items
            return items
        encoded = self.arguments[name] = self._encoded(value)
        return encoded

    @property
    def named_arguments(self) -> dict[str, Any]:
        """What it was called with, by name."""
        if self._named_arguments is None:
            args, kwargs = self.called
            self._named_arguments = dict(zip(self.overload.positional, args)) | kwargs
        return self._named_arguments

    def _tensor(self, slot: str, tensor: Any) -> dict[str, str]:
        inner: Any
        if not answers(tensor):
            self.unseen = self.unseen or f"takes a {type(tensor).__name__}, {CLOSED}"
            return {"object": type(tensor).__name__}
        if tensor.is_nested and tensor.layout is torch.strided:
            inner = [("values", tensor.values()), ("sizes", tensor._nested_tensor_size())]
        elif isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            self.unseen = self.unseen or "takes a parameter that is not there yet"
            return {"object": type(tensor).__name__}
        else:
            inner = plain(tensor) if hasattr(type(tensor), "__tensor_flatten__") else None
        if inner is None or len(inner) == 1:
            self.inputs.append((slot, tensor))
        else:
            self.inputs += [(f"{slot}.{part}", t) for part, t in inner]
            self.unseen = self.unseen or f"takes a {type(tensor).__name__}"
        return {"slot": slot}

    def _encoded(self, value: Any) -> Any:
        """In the encoding of `records.Operation`, devices by their names."""
        if value is None or value is True or value is False or type(value) is int:
            return value
        if isinstance(value, float):
            return (
                float(value)
                if math.isfinite(value)
                else {"float": "nan" if value != value else "inf" if value > 0 else "-inf"}
            )
        if isinstance(value, str):
            return value[:_MAX_TEXT]
        if isinstance(value, (list, tuple)):
            return [self._encoded(item) for item in value]
        if isinstance(value, (int, torch.SymInt)):
            return int(value)
        if isinstance(value, torch.SymFloat):
            return self._encoded(float(value))
        if isinstance(value, complex):
            return {"complex": [self._encoded(value.real), self._encoded(value.imag)]}
        if isinstance(value, torch.dtype):
            return {"dtype": NAMES.get(value, str(value).removeprefix("torch."))}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.layout):
            return {"layout": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"memory_format": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Generator):
            return {"generator": str(value.device)}
        self.unseen = self.unseen or f"takes a {type(value).__name__}"
        return {"object": type(value).__name__}

    def states(self) -> Iterator[tuple[str, Any]]:
        """(device type, state of the generator) where it draws random numbers."""
        if not self.overload.random or not self.overload.draws(self.named_arguments):
            return
        self.unseen = self.unseen or NoProgram.RANDOM.value
        generator = next(
            (v for v in self.named_arguments.values() if isinstance(v, torch.Generator)), None
        )
        device = next((t.device for _, t in self.inputs), None)
        if generator is not None:
            device = generator.device
        elif device is None:
            device_argument = self.named_arguments.get("device")
            device = (
                device_argument
                if isinstance(device_argument, torch.device)
                else torch.get_default_device()
            )
        if device.type == "meta":
            return
        if generator is not None:
            yield device.type, generator.get_state()
        elif device.type == "cpu":
            yield "cpu", torch.get_rng_state()
        else:
            module: Any = torch.get_device_module(device)
            yield device.type, module.get_rng_state(device)

    def see(self, slot: str, sight: tuple[Any, str, Any], why: str) -> None:
        """A tensor was sighted: (record, edge, look). why: its elements say nothing."""
        self.sights[slot] = sight
        self.refs.append(Ref(slot, sight[0], sight[1]))
        if why and is_input(slot) and slot not in self.overload.overwritten:
            self.unseen = self.unseen or "works on memory that was not written yet"

    # ---- after it ran

    def results(self, out: Any) -> list[tuple[str, Any, str]]:
        """(slot, tensor, slot of the written argument that it is) of what it wrote, then of what it
        returned.
        """
        overload = self.overload
        if type(out) is _TENSOR and not overload.writes and not overload.statistics:
            return [("output.0", out, "")]
        results: list[tuple[str, Any, str]] = []
        ids: dict[int, str] = {}
        names = overload.writes
        if overload.statistics and self.named_arguments.get(
            "training",
            self.named_arguments.get("train", self.named_arguments.get("use_input_stats")),
        ):
            names = (*names, "running_mean", "running_var")
        for name in names:
            value = self.named_arguments.get(name)
            for i, tensor in enumerate(tensors_in(value)):
                slot = f"mutated.{name}" if value is tensor else f"mutated.{name}.{i}"
                results.append((slot, tensor, ""))
                ids[id(tensor)] = slot
        if isinstance(out, torch.Tensor):
            results.append(("output.0", out, ids.get(id(out), "")))
        elif isinstance(out, (list, tuple)):
            nested = overload.listed
            for i, item in enumerate((out,) if nested else out):
                if isinstance(item, torch.Tensor):
                    results.append((f"output.{i}", item, ids.get(id(item), "")))
                elif isinstance(item, (list, tuple)):
                    results += [
                        (f"output.{i}.{j}", t, ids.get(id(t), ""))
                        for j, t in enumerate(item)
                        if isinstance(t, torch.Tensor)
                    ]
        elif out is not None:
            self.notes = (f"returned {out!r}"[:_MAX_TEXT],)
        return [result for result in results if type(result[1]) is _TENSOR or answers(result[1])]

    def aliases(self, results: list[tuple[str, Any, str]]) -> tuple[tuple[str, str], ...]:
        """Slots that share a storage, each with the first one of it, as far as the schema does not
        say so.
        """
        view = self.overload.view
        if len(self.inputs) < 2 and not view:
            return ()
        # Only a view shares memory with what went in, as far as a schema goes.
        candidates = (
            self.inputs + [(s, t) for s, t, _ in results if is_output(s)] if view else self.inputs
        )
        first: dict[int, str] = {}
        pairs = []
        for slot, tensor in candidates:
            try:
                storage = tensor.untyped_storage()._cdata
            except (RuntimeError, NotImplementedError, AttributeError):
                continue
            earlier = first.setdefault(storage, slot)
            if earlier is not slot and (earlier, slot) not in self.overload.implied:
                pairs.append((earlier, slot))
        return tuple(pairs)

    # ---- as a program

    def program(self, out: Any) -> tuple[Program | None, str]:
        """The program of this one operation, or why there is none."""
        if self.unseen:
            return None, self.unseen
        if self.overload.uninitialised:
            return None, "makes memory that is not written"
        if not any(True for _ in tensors_in(out)) and not self.overload.writes:
            return None, "returns no tensor"
        written_slots = {slot for name in self.overload.writes for slot in (f"input.{name}",)}
        if len(self.inputs) > 1 and written_slots:
            shared = self.aliases([])
            if any(s.startswith(tuple(written_slots)) for pair in shared for s in pair):
                return None, "writes into memory that two of its inputs share"
        key = (
            self.overload.name,
            tuple((slot, form) for slot, (_, _, form) in self.sights.items()),
            repr(self.arguments),
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
            tuple(t.requires_grad for _, t in self.inputs)
            if torch.is_inference_mode_enabled()
            else (),
        )
        program_or_reason = _PROGRAMS.get(key)
        if program_or_reason is None:
            if len(_PROGRAMS) > 1 << 14:
                _PROGRAMS.clear()
            program_or_reason = _PROGRAMS[key] = self._program(out)
        return program_or_reason

    def _program(self, out: Any) -> tuple[Program | None, str]:
        overload = self.overload
        operations: list[Operation] = []
        slots: list[str] = []
        operands: dict[str, Any] = {}
        dtypes: list[str] = []
        fixed: list[tuple[int, int, int]] = []
        base = ""
        for slot, tensor in self.inputs:
            if tensor.layout is not torch.strided or tensor.dtype not in NAMES:
                return None, f"takes a tensor of {tensor.dtype}, {tensor.layout}"
            if not base and tensor.is_floating_point():
                base = NAMES[tensor.dtype]
            if slot in overload.overwritten:
                # What it holds does not matter, only its form.
                form = ([*tensor.shape], [*tensor.stride()])
                operations.append(
                    Operation(
                        "aten.empty_strided.default",
                        form,
                        {"dtype": {"dtype": NAMES[tensor.dtype]}},
                    )
                )
                operands[slot] = {"op": [len(operations) - 1, 0]}
                continue
            operands[slot] = {"in": len(slots)}
            if overload.sizes or overload.overwritten:
                fixed += [(len(slots), axis, n) for axis, n in enumerate(tensor.shape)]
            slots.append(slot)
            dtypes.append(NAMES[tensor.dtype])
        name = METADATA_ONLY.get(overload.name, overload.name)
        kwargs = {
            k: _operand(self._form(k), operands)
            for k, v in self.called[1].items()
            if not (k == "pin_memory" or v is None)
        }
        args = zip(overload.positional, self.called[0])
        place = len(operations)
        operations.append(
            Operation(name, tuple(_operand(self._form(k), operands) for k, _ in args), kwargs)
        )
        outputs: list[tuple[str, Any]] = []
        position = 0
        for slot, _, _ in self.results(out):
            if is_output(slot):
                outputs.append((slot, {"op": [place, position]}))
                position += 1
            elif (into := f"input{slot[7:]}") in operands:
                outputs.append(
                    (
                        slot,
                        operands[into]
                        if overload.name not in METADATA_ONLY
                        else {"op": [place, 0]},
                    )
                )
        inference = torch.is_inference_mode_enabled()
        program = Program(
            id="",
            operations=tuple(operations),
            inputs=tuple(slots),
            outputs=tuple(outputs),
            base=base,
            input_dtypes=tuple(dtypes),
            default_dtype=NAMES[torch.get_default_dtype()],
            fixed=tuple(fixed),
            inference=inference,
            grad=tuple(slot for slot, t in self.inputs if t.requires_grad and slot in slots)
            if inference
            else (),
            notes=("in-place",) if overload.writes or overload.statistics else (),
        )
        digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(program, order="sorted"))
        return msgspec.structs.replace(program, id=digest), ""

    def _form(self, name: str) -> Any:
        """What `_take` said of an argument."""
        if name in self.arguments:
            return self.arguments[name]
        slot, value = self.overload.slots[name], self.named_arguments[name]
        return (
            {"slot": slot}
            if isinstance(value, torch.Tensor)
            else [{"slot": f"{slot}.{i}"} for i in range(len(value))]
        )

    # ---- figures of all calls of a signature

    def range_of(self, slot: str) -> Callable[[Statistics], None]:
        """Takes the figures of a slot of this call; they may come later."""
        if self.ranges is None:
            self.ranges = {}
        ranges = self.ranges.setdefault(slot, [None, None, 0, 0])

        def take(figures: Statistics) -> None:
            widen(ranges, figures.min, figures.max, figures.nan, figures.inf)

        return take


_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_PROGRAMS: dict[tuple[Any, ...], tuple[Program | None, str]] = {}


def widen(ranges: list[Any], low: float | None, high: float | None, nan: int, inf: int) -> None:
    """A range [min, max, NaN, Inf] takes in another."""
    if low is not None:
        ranges[0] = low if ranges[0] is None else min(ranges[0], low)
    if high is not None:
        ranges[1] = high if ranges[1] is None else max(ranges[1], high)
    ranges[2] += nan
    ranges[3] += inf


def _operand(value: Any, operands: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if "slot" in value:
            return operands[value["slot"]]
        return {"device": ""} if "device" in value else value
    return [_operand(item, operands) for item in value] if isinstance(value, list) else value
