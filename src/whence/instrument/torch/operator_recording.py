"""What an operator that runs adds to the program that is recorded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from whence.frameworks.torch_arrays import tensors_in
from whence.frameworks.torch_schema import (
    BY_GRAD_MODE,
    METADATA_ONLY,
    UNINITIALISED,
    OperatorSchema,
    draws,
    schema_of,
    written,
)
from whence.instrument.torch.cast_points import CastPoints
from whence.instrument.torch.operand_table import OperandTable, RecordedOperation, Stop, layout
from whence.instrument.torch.random_draws import FUSED_DROPOUT, Draw, draw_of
from whence.instrument.torch.sources import source_here
from whence.records.backward import DIFFERENTIATES
from whence.records.program import ProgramDraw

_backward_task = torch._C._current_graph_task_id

_METADATA_READERS = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
# The number of rows they return depends on the elements.
_DATA_DEPENDENT = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave", "bincount", "argwhere", "_unique", "nonzero_numpy", "where", "index",
    "unique_dim_consecutive", "one_hot",
}  # fmt: skip
_CASTS = {"_to_copy", "to", "type_as"}
# beta x self + alpha x a product
_WEIGHTED = {"addmm", "addmv", "addbmm", "addr", "baddbmm"}
_COPY = "aten.copy_.default"


class OperatorRecording:
    """Adds operators to a table of operands; every method may raise `Stop`.

    drawn: gives the slot of a tensor of random numbers that was just drawn. draws: those tensors.
    lines: source line of each operation. detached: of each tensor that an operation is
    given, by the place of the operation, whether it requires no gradient.
    """

    def __init__(
        self,
        table: OperandTable,
        cast_points: CastPoints,
        drawn: Callable[[Any], str] | None = None,
    ) -> None:
        self._table, self._cast_points, self._drawn = table, cast_points, drawn
        self._task = _backward_task()
        self.draws: list[ProgramDraw] = []
        self.lines: dict[int, str] = {}
        self.detached: dict[int, list[bool]] = {}

    def before(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[OperatorSchema, dict[str, Any], tuple[Any, ...], dict[str, Any], str]:
        """What `after` needs beside the result: schema, arguments by name, arguments as operands,
        and why one of them is unknown.
        """
        if not isinstance(func, torch._ops.OpOverload):
            raise Stop(f"calls compiled code or a higher-order operator ({func})")
        schema = schema_of(func)
        named = dict(zip(schema.positional, args))
        named.update(kwargs)
        if draws(schema, named):
            fused = schema.base == FUSED_DROPOUT and self._drawn is not None
            encoded = (self._table.encode(named["input"]),) if fused else ()
            return schema, named, encoded, {}, f"draws random numbers ({schema.name})"
        self._table.hole, self._table.detached = "", []
        if schema.base == "lift_fresh" and (key := layout(args[0])) not in self._table.operands:
            self._table.constant(args[0], key)
        if schema.base == "set_" or schema.base.startswith("resize"):
            raise Stop(f"replaces the memory of a tensor ({schema.name})")
        encoded = tuple(self._table.encode(a) for a in args)
        encoded_kwargs = {
            k: self._table.encode(v)
            for k, v in kwargs.items()
            if not (k == "pin_memory" or v is None)
        }
        if self._table.unwritten and not schema.view and schema.base not in _METADATA_READERS:
            ignored = {"self"} if schema.base in _WEIGHTED and named.get("beta") == 0 else set()
            for name, value in named.items():
                if name not in schema.writes and name not in ignored:
                    self._table.check_written(value)
        return schema, named, encoded, encoded_kwargs, self._table.hole

    def after(
        self,
        out: Any,
        schema: OperatorSchema,
        named: dict[str, Any],
        encoded: Any,
        encoded_kwargs: Any,
        hole: str,
    ) -> None:
        """An operator has run: its operation, and its results as operands."""
        table, name = self._table, schema.name
        if self._is_no_operation(out, schema, named, encoded, hole):
            return
        outs = list(tensors_in(out))
        mutated = [t for n in written(schema, named) for t in tensors_in(named.get(n))]
        guard = None
        if not outs and not mutated:
            if out is None:
                return  # an assertion: _assert_async, record_stream
            guard = self._number_taken(out, name)
        elif schema.base in _DATA_DEPENDENT and _size_depends_on_data(schema, named):
            guard = sum(t.numel() for t in outs)
        if schema.base in _CASTS and self._cast_points.record_cast(schema, encoded, named, outs):
            return
        if mutated and name not in METADATA_ONLY:
            self._note_writes(mutated)
        self._note_modes(schema)
        line = source_here()
        if "out" in named and (returning := _returning(name)) is not None:
            encoded, encoded_kwargs = self._returned(returning, named, encoded, encoded_kwargs)
            name, schema = _COPY, schema_of(torch.ops.aten.copy_.default)
            self.lines[len(table.operations) - 1] = line
        place = len(table.operations)
        self.lines[place] = line
        self.detached[place] = table.detached if torch.is_grad_enabled() else []
        table.operations.append(
            RecordedOperation(METADATA_ONLY.get(name, name), encoded, encoded_kwargs, guard, schema)
        )
        pinned = self._cast_points.is_pinned(schema, named, outs)
        for j, tensor in enumerate(outs):
            if hasattr(tensor, "__tensor_flatten__"):
                raise Stop(f"makes a {type(tensor).__name__}, not a plain tensor")
            key = layout(tensor)
            if not mutated:
                follows = pinned and tensor.is_floating_point()
                (table.pinned.add if follows else table.pinned.discard)(key)
            fresh = table.adopt_result(
                tensor, key, {"op": [place, j]}, unwritten=schema.base in UNINITIALISED
            )
            # Above this level a view is still to get its base's version counter, and a written
            # tensor its next version.
            if mutated or schema.view or not fresh:
                table.versions.pop(key, None)
            else:
                table.see(tensor, key)

    def _returned(
        self, returning: Any, named: dict[str, Any], encoded: Any, encoded_kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Adds what an operator that writes into `out` computes. Returns the arguments of the copy
        that puts it there.
        """
        table, given = self._table, dict(encoded_kwargs)
        written = given.pop("out")
        if layout(named["out"]) not in table.operands:
            raise Stop("an operator changes the size of the tensor that it writes its result into")
        schema = schema_of(returning)
        table.operations.append(RecordedOperation(schema.name, encoded, given, None, schema))
        return (written, {"op": [len(table.operations) - 1, 0]}), {}

    def _is_no_operation(
        self, out: Any, schema: OperatorSchema, named: dict[str, Any], encoded: Any, hole: str
    ) -> bool:
        """Does an operator add nothing to compute: it drew random numbers, its results are unknown,
        or they are what it was given?
        """
        if self._drawn is not None and draws(schema, named):
            draw = draw_of(schema, named, out)
            if draw is not None:
                self._draw(draw, schema, encoded, out)
                return True
        if hole:
            outs = list(tensors_in(out))
            mutated = [t for n in written(schema, named) for t in tensors_in(named.get(n))]
            self._lost(out, outs, mutated, hole)
        # Detached are the same elements: who uses them without a gradient shows in the using.
        return bool(hole) or schema.base == "detach"

    def _draw(self, draw: Draw, schema: OperatorSchema, encoded: Any, out: Any) -> None:
        """Random numbers were drawn: they are an input of the program from here on."""
        table, tensor = self._table, draw.tensor
        key = layout(tensor)
        table.poison(key[0], "a view of a tensor that random numbers were written to")
        table.unwritten.discard(key[0])
        slot = self._drawn(tensor) if self._drawn is not None else ""
        if not slot:
            raise Stop(f"draws random numbers ({schema.name})")
        table.renew(slot, tensor, key)
        table.versions.pop(key, None)  # a written tensor is still to get its next version
        self.draws.append(ProgramDraw(slot, draw.operator, draw.settings))
        if encoded and "hole" in encoded[0]:
            table.unknown(out[0], layout(out[0]), encoded[0]["hole"])
        elif encoded:
            scale = 1 / (1 - draw.settings["p"]) if draw.settings["p"] < 1 else 0.0
            operands = (*encoded, table.operands[key], scale)
            table.emit("aten.native_dropout_backward.default", operands, {}, out[0], layout(out[0]))

    def _number_taken(self, out: Any, name: str) -> Any:
        """A number that an operator took out of a tensor: what the code does next may depend on
        it.
        """
        if not isinstance(out, (bool, int, float)):
            raise Stop(f"reads a {type(out).__name__} from a tensor ({name})")
        self._table.guarded = True
        if isinstance(out, float) and not math.isfinite(out):
            raise Stop(f"reads a number that is not finite from a tensor ({name})")
        return out

    def _note_modes(self, schema: OperatorSchema) -> None:
        """The modes that decide how an operator computes."""
        if schema.composite and torch.is_inference_mode_enabled():
            self._table.notes.add("inference")
        if schema.base in BY_GRAD_MODE and torch.is_grad_enabled():
            self._table.notes.add("under grad")
        if _backward_task() != self._task:
            self._table.notes.add(DIFFERENTIATES)

    def _note_writes(self, mutated: list[Any]) -> None:
        """An operator wrote these tensors."""
        table = self._table
        for storage in {t.untyped_storage()._cdata for t in mutated}:
            if len(table.owners.get(storage, ())) > 1:
                raise Stop("writes into memory that two of its inputs or parameters share")
            if storage in table.replaced:
                operands = {key: table.operands.get(key) for key in map(layout, mutated)}
                table.poison(
                    storage, "a view of a tensor that a module handed on and that was written since"
                )
                table.operands.update(
                    {key: operand for key, operand in operands.items() if operand is not None}
                )
            table.epochs[storage] = table.epochs.get(storage, 0) + 1
            table.unwritten.discard(storage)
        table.notes.add("in-place")

    def _lost(self, out: Any, outs: list[Any], mutated: list[Any], reason: str) -> None:
        """An operator on something unknown, or a random one: what it makes is unknown, and what it
        writes from now on.
        """
        if out is not None and not outs and not mutated:
            raise Stop(reason)  # a number: what the code does next may depend on it
        for tensor in mutated:
            self._table.poison(tensor.untyped_storage()._cdata, reason)
            self._table.unwritten.discard(tensor.untyped_storage()._cdata)
        for tensor in outs:
            self._table.unknown(tensor, layout(tensor), reason)


@functools.cache
def _returning(name: str) -> Any:
    """The operator that returns what the one of this name writes into `out`, None where that
    writes into nothing or several tensors, or has no such counterpart.
    """
    namespace, base, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), base)
    taken = [a.name for a in getattr(packet, overload)._schema.arguments]
    if taken[-1:] != ["out"]:
        return None
    for other in packet.overloads():
        schema = getattr(packet, other)._schema
        if [a.name for a in schema.arguments] == taken[:-1] and len(schema.returns) == 1:
            return getattr(packet, other)
    return None


def _size_depends_on_data(schema: OperatorSchema, named: dict[str, Any]) -> bool:
    if schema.base == "index":
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(named.get("indices")))
    if schema.base == "repeat_interleave":
        return "output_size" not in named and any(
            n in named and isinstance(named[n], torch.Tensor) for n in ("repeats",)
        )
    if schema.base == "where":
        return "other" not in named
    if schema.base == "one_hot":
        return bool(named.get("num_classes", -1) == -1)
    return True
