"""Records what one region of an eager torch program ran, as a program: operators, arguments and
constants, as data without code.

Listening happens at the dispatcher, below autograd and autocast, where an operator is an overload
with a schema. One thing is invisible there: `x.float()` on a float32 tensor runs no operator, yet
in a 16-bit run of the same code it would widen. Such casts are seen one level up, at the
torch-function level, and become the operation "whence.cast".

If something cannot be followed (a tensor of unknown origin, a random draw, a number taken out of a
tensor without the dispatcher), the recording ends with a reason: a region has a complete program or
none. The recorded code is never changed: every operator runs exactly once, even if the recorder
fails.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode

from whence.frameworks.torch_arrays import tensors_in
from whence.frameworks.torch_schema import (
    BY_GRAD_MODE,
    METADATA_ONLY,
    UNINITIALISED,
    OperatorSchema,
    draws,
    restored,
    schema_of,
    written,
)
from whence.instrument.torch.caller_code import cast_way
from whence.instrument.torch.list_operators import OneOfList
from whence.instrument.torch.operand_table import (
    Operand,
    OperandTable,
    RecordedOperation,
    Stop,
    layout,
)
from whence.instrument.torch.operator_listener import OperatorListener
from whence.instrument.torch.pool_rows import PoolAccess, Pools, named_arguments
from whence.instrument.torch.program_writer import ChildCalls, write_program
from whence.instrument.torch.random_draws import FUSED_DROPOUT, Draw, draw_of
from whence.instrument.torch.sources import source_here
from whence.instrument.torch.split_recording import SplitRecording, Wanted
from whence.records import Program
from whence.records.backward import DIFFERENTIATES
from whence.records.program import ProgramDraw

# Torch functions whose `dtype=float32` widens their operand first, without an operator when it is
# float32 already.
_WIDENING = {
    "softmax",
    "log_softmax",
    "softmin",
    "sum",
    "nansum",
    "mean",
    "cumsum",
    "cumprod",
    "prod",
    "norm",
    "logsumexp",
}
_NUMBERS_TAKEN = {
    "numpy",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "__reduce_ex__",
    "__cuda_array_interface__",
}
_PROFILER = "profiler"  # operators that compute nothing: they mark where a stretch begins and ends
_PRINTING = {"__repr__", "__str__", "__format__"}
_LIST = "tolist"
_LONGEST_LIST = 1024
"""Most elements of a tensor that are read one by one when the code turns it into a list."""
_WATCHED = (
    {"to", "float", "type", "type_as", "__set__", _LIST} | _WIDENING | _NUMBERS_TAKEN | _PRINTING
)


class Recording(NamedTuple):
    """The result of recording one call: a program with the tensors of its constants, in order, or
    the reason why there is none.

    program.constants is empty: whoever stores the constants puts their record ids there
    (msgspec.structs.replace).
    """

    program: Program | None
    constants: list[Any]
    reason: str


class _Function(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _WATCHED or self._recorder.over:
            return func(*args, **(kwargs or {}))
        return self._recorder.function(func, args, kwargs or {})


class Recorder(OperatorListener):
    """Records the operators inside its `with` block, without those of other modules (`pause` before
    their calls, `resume` after).

    inputs, params: the tensors that are visible to the call, by slot ("input.0",
    "input.hidden_states", "param.weight", "param.running_mean"); a tensor that is both counts as an
    input. casts: listen at the torch-function level too; False for code that asks
    `has_torch_function` and would take another path (`asks_for_listeners`). find: returns the slot
    of a tensor visible in another way (in a cache, a parameter of a module below), "" for any
    other. drawn: returns the slot of a tensor of random numbers just drawn; without it, code that
    draws has no program. most: limit on the number of operators. pools: those passed to the call.
    watch_versions: as for `OperandTable`.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[str, Any]],
        params: Sequence[tuple[str, Any]],
        *,
        casts: bool = True,
        find: Callable[[Any], str] | None = None,
        drawn: Callable[[Any], str] | None = None,
        most: int | None = None,
        watch_versions: bool = True,
    ) -> None:
        super().__init__()
        self._most = most
        self._paused = False
        self._casts = casts
        self._table = OperandTable(find, watch_versions=watch_versions)
        self._cast_points = CastPoints(self._table)
        self._operators = _OperatorRecording(self._table, self._cast_points, drawn)
        self._children = ChildCalls(self._table)
        self.pools: Pools | None = None
        with self._guarded("reading the region's inputs"):
            for slot, tensor in inputs:
                self._table.new_input(slot, tensor)
            for slot, tensor in params:
                self._table.new_param(slot, tensor)

    def __enter__(self) -> Self:
        with self._guarded("starting to listen"):
            if torch.is_inference_mode_enabled() and torch._C._is_any_autocast_enabled():
                # Composite operators are not decomposed in this mode, so it is unknown whether
                # autocast applied to the operators that they call.
                raise Stop(
                    "autocast under inference_mode cannot be listened to without changing it"
                )
        return super().__enter__()

    def function_mode(self) -> TorchFunctionMode | None:
        """The mode that sees casts that run no operator."""
        return _Function(self) if self._casts else None

    def knows(self, tensor: Any) -> bool:
        """Whether the recording knows a tensor over the same memory."""
        return self._table.is_plain(tensor) and (
            tensor.untyped_storage()._cdata in self._table.alive
        )

    def forget(self, tensors: Iterable[Any], reason: str) -> None:
        """Make these tensors unknown, because something that cannot be followed may change them."""
        with self._guarded("looking at what a message changes"):
            for tensor in tensors:
                self._table.poison(tensor.untyped_storage()._cdata, reason)

    def child_enters(self, k: int, tensors: Sequence[tuple[str, Any]]) -> None:
        """Child number k is called with these (slot, tensor): they become outputs "k:slot" of this
        call's own operators.
        """
        if not self.over:
            with self._guarded("looking at what a module was given"):
                self._children.enter(k, tensors)

    def child_leaves(self, k: int, tensors: Sequence[tuple[str, Any]]) -> None:
        """Child number k has returned or changed these (slot, tensor): they become inputs "k:slot"
        of the operators that follow.
        """
        if not self.over:
            with self._guarded("looking at what a module returned"):
                self._children.leave(k, tensors)

    def finish(self, outputs: Sequence[tuple[str, Any]]) -> Recording:
        """The program that computes `outputs` (slot, tensor after the call) from inputs and params,
        or the reason why there is none.

        A tensor the call changed is given as an output too ("mutated.input.0", tensor after the
        call). What other modules were given are outputs as well. An output that cannot be followed
        is left out where there are others between modules.
        """
        recording = self.so_far(outputs)
        self.over = True
        self._table.forget_tensors()
        return recording

    def each(self, parts: Sequence[Wanted]) -> list[Recording]:
        """For each of these parts, its program, or the reason why there is none."""
        recordings: list[Recording] = []
        reason = self.reason
        if not reason:
            with self._guarded("dividing what ran into programs"):
                split = SplitRecording(self._table, self._operators.lines)
                recordings = [_recording_of(split, part) for part in parts]
            reason = self.reason
        return [Recording(None, [], reason) for _ in parts] if reason else recordings

    def so_far(self, outputs: Sequence[tuple[str, Any]], *, alone: bool = False) -> Recording:
        """Like `finish`, but the recording may go on. alone: the program reads only what these
        outputs depend on.
        """
        program: Program | None = None
        constants: list[Any] = []
        if not self.reason:
            paused, self._paused = self._paused, True
            with self._guarded("writing the program"):
                program, constants = write_program(
                    self._table,
                    self._children,
                    self._operators.lines,
                    self._operators.detached,
                    self._operators.draws,
                    outputs,
                    alone=alone,
                )
            self._paused = paused
        return Recording(program, constants, self.reason)

    def give_up(self, reason: str) -> None:
        """Stop listening for good and drop what was recorded."""
        super().give_up(reason)
        self._table.operations, self._table.constants = [], []

    def _guarded(self, doing: str, subject: Any = None) -> _Guarded:
        """A context for the recorder's own code: a failure in it ends the recording, but not the
        recorded program.
        """
        return _Guarded(self.give_up, doing, subject)

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle one operator at the dispatcher, and run it exactly once."""
        pools = None if self.over or self._paused else self.pools
        if pools is not None and pools.holds([*args, *kwargs.values()]):
            return self._on_pools(pools, func, args, kwargs)
        return self._on_tensors(func, args, kwargs)

    def _on_pools(self, pools: Pools, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operator with pools among its arguments, and run it exactly once."""
        access = PoolAccess()
        with self._guarded("looking at {}", func):
            schema, named = schema_of(func), named_arguments(func, args, kwargs)
            access = pools.access(schema, named)
            if access.reason:
                raise Stop(access.reason)
            for tensor in access.given:
                self._table.renew(pools.read(named, tensor), tensor, layout(tensor))
        if access.given:
            return self._on_tensors(func, args, kwargs)
        out = self.run(func, args, kwargs)
        with self._guarded("looking at what {} did to a pool", func):
            if access.takes_rows:
                self._table.renew(pools.read(named, out), out, layout(out))
            for tensor in access.written:
                self._children.hand(pools.wrote(named, tensor), tensor)
        return out

    def _on_tensors(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operator on tensors that can be followed, and run it exactly once."""
        around: Any = contextlib.nullcontext()
        ready = None
        with self._guarded("looking at {}", func):
            around = restored(func, self.autocast)
            if not self.over and not self._paused and func.namespace != _PROFILER:
                if self._most is not None and len(self._table.operations) >= self._most:
                    raise Stop(f"runs more than {self._most} operators")
                ready = self._operators.before(func, args, kwargs)
        with around:
            out = func(*args, **kwargs)
        if ready is not None:
            with self._guarded("looking at what {} returned", func):
                self._operators.after(out, *ready)
                if self.pools is not None:
                    self._learn_pool(self.pools, ready[0], ready[1], out)
        return out

    def _learn_pool(self, pools: Pools, schema: OperatorSchema, named: Any, out: Any) -> None:
        """Make the result of an operator an input if the operator shows that it reads a pool."""
        if pools.learn(schema, named, out):
            self._table.renew(pools.read(named, out), out, layout(out))

    def operator_as(self, run: Callable[[], Any], parts: Sequence[OneOfList]) -> Any:
        """Run an operator on lists exactly once, and record what it does at each index of the
        lists.
        """
        ready: list[Any] = []
        with self._guarded("looking at {}", parts[0].func):
            if not self.over and not self._paused:
                ready = [self._operators.before(*part) for part in parts]
        out = run()
        with self._guarded("looking at what {} left", parts[0].func):
            for place, before in enumerate(ready):
                self._operators.after(parts[place].result(place, out), *before)
        return out

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle one watched call at the torch-function level, and run it exactly once."""
        name, points, table = func.__name__, self._cast_points, self._table
        position, undo = len(table.operations), None
        explicit, paused = points.explicit, self._paused
        with self._guarded("looking at {}", name):
            if name in _NUMBERS_TAKEN or (name == "__set__" and func == torch.Tensor.data.__set__):
                raise Stop(f"reads or replaces a tensor's memory outside any operator ({name})")
            if name == _LIST:
                _read_elements(args[0])
            elif name in _PRINTING:
                self._paused = True
            elif name == "float":
                points.explicit = True
            elif name in _WIDENING:
                undo = points.widened(args, kwargs)
                position = len(table.operations)
        try:
            out = func(*args, **kwargs)
        finally:
            points.explicit, self._paused = explicit, paused
        if self.over:
            return out
        with self._guarded("looking at {}", name):
            if undo is not None:
                key, operand = undo
                table.operands[key] = operand
                table.pinned.discard(key)
            if (
                name in ("to", "float", "type", "type_as")
                and out is args[0]
                and len(table.operations) == position
            ):
                points.unmoved(name, args, kwargs, sys._getframe(2))
        return out


def _read_elements(tensor: Any) -> None:
    """Read each element of a tensor by an operator, so that the recording sees what `tolist` reads
    without operators.
    """
    if tensor.numel() > _LONGEST_LIST:
        raise Stop(f"reads a list of {tensor.numel()} numbers (at most {_LONGEST_LIST})")
    for element in tensor.reshape(-1).unbind():
        element.item()


def _recording_of(split: SplitRecording, part: Wanted) -> Recording:
    try:
        return Recording(*split.program(part), "")
    except Stop as stop:
        return Recording(None, [], str(stop))


class _Guarded:
    """A block of the recorder's own code: an exception in it ends the recording, with the reason.

    doing: what the block does, with {} for `subject`.
    """

    def __init__(self, give_up: Callable[[str], None], doing: str, subject: Any) -> None:
        self._give_up, self._doing, self._subject = give_up, doing, subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Stop):
            self._give_up(str(error))
        elif isinstance(error, Exception):
            text = f"{type(error).__name__}: {str(error)[:200]}"
            doing = self._doing.format(self._subject)
            self._give_up(f"the recorder failed while {doing}: {text}")
        return isinstance(error, Exception)


_backward_task = torch._C._current_graph_task_id

_METADATA_READERS = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
# The number of rows they return depends on the elements.
_DATA_DEPENDENT = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave", "bincount", "argwhere", "_unique", "nonzero_numpy", "where", "index",
    "unique_dim_consecutive", "one_hot", "_pack_padded_sequence",
}  # fmt: skip
_CASTS = {"_to_copy", "to", "type_as"}
# beta x self + alpha x a product
_WEIGHTED = {"addmm", "addmv", "addbmm", "addr", "baddbmm"}
_COPY = "aten.copy_.default"


class _OperatorRecording:
    """Adds operators to a table of operands; every method may raise `Stop`.

    drawn: returns the slot of a tensor of random numbers just drawn. draws: those tensors. lines:
    source line by operation. detached: by operation, for each tensor argument whether it requires
    no gradient.
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
        """What `after` needs besides the result: schema, arguments by name, arguments as operands,
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
        """Add the operation of an operator that has run, and its results as operands."""
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
            if table.is_foreign(tensor):
                raise Stop(f"makes a {type(tensor).__name__}, not a plain tensor")
            key = layout(tensor)
            if not mutated:
                follows = pinned and tensor.is_floating_point()
                (table.pinned.add if follows else table.pinned.discard)(key)
            fresh = table.adopt_result(
                tensor, key, {"op": [place, j]}, unwritten=schema.base in UNINITIALISED
            )
            # Only after this handler does torch give a view the version counter of its base, and a
            # written tensor its next version.
            if mutated or schema.view or not fresh:
                table.versions.pop(key, None)
            else:
                table.see(tensor, key)

    def _returned(
        self, returning: Any, named: dict[str, Any], encoded: Any, encoded_kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add the functional operation of an operator that writes into `out`. Returns the arguments
        of the copy into `out`.
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
        """Whether an operator adds no operation: it drew random numbers, its results are unknown,
        or it returned its input.
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
        # A detached tensor has the same elements; each use notes whether it needs a gradient.
        return bool(hole) or schema.base == "detach"

    def _draw(self, draw: Draw, schema: OperatorSchema, encoded: Any, out: Any) -> None:
        """Make drawn random numbers an input of the program."""
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
        """Check a number that an operator took out of a tensor, and return it as a guard: what the
        code does next may depend on it.
        """
        if not isinstance(out, (bool, int, float)):
            raise Stop(f"reads a {type(out).__name__} from a tensor ({name})")
        self._table.guarded |= isinstance(out, float)
        if isinstance(out, float) and not math.isfinite(out):
            raise Stop(f"reads a number that is not finite from a tensor ({name})")
        return out

    def _note_modes(self, schema: OperatorSchema) -> None:
        """Note the modes that influence how an operator computes."""
        if schema.composite and torch.is_inference_mode_enabled():
            self._table.notes.add("inference")
        if schema.base in BY_GRAD_MODE and torch.is_grad_enabled():
            self._table.notes.add("under grad")
        if _backward_task() != self._task:
            self._table.notes.add(DIFFERENTIATES)

    def _note_writes(self, mutated: list[Any]) -> None:
        """Note that an operator wrote these tensors."""
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
        """Make the results of an operator, and the memory it writes, unknown: it read something
        unknown or drew random numbers.
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
    """The functional counterpart of an operator that writes into `out`. None for an operator
    without `out`, with several outputs, or without a counterpart.
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


# Cast points: what a float32 recording must remember for a 16-bit replay.

_FILLED = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor", "eye"}


class CastPoints:
    """Records casts of float32 to float32, which run no operator, as operations "whence.cast".

    explicit: `.float()` is running.
    """

    def __init__(self, table: OperandTable) -> None:
        self._table = table
        self._raised: set[tuple[Any, ...]] = set()
        self.explicit = False

    def is_pinned(self, facts: OperatorSchema, named: dict[str, Any], outs: list[Any]) -> bool:
        """Whether the result would stay float32 in a 16-bit run. Meaningful for float32 recordings
        only.
        """
        if self._table.base is not torch.float32 or not any(t.dtype is torch.float32 for t in outs):
            return False
        if facts.base in _FILLED or facts.base.endswith("_like"):
            return named.get("dtype") is None and "self" not in named
        floats = [t for value in named.values() for t in tensors_in(value) if t.is_floating_point()]
        if not floats:
            return True  # int -> float: positions, counts
        pins = [t for t in floats if t.dtype is torch.float32 and layout(t) in self._table.pinned]
        return bool(pins) and (any(t.dim() for t in pins) or not any(t.dim() for t in floats))

    def record_cast(
        self, facts: OperatorSchema, encoded: Any, named: dict[str, Any], outs: list[Any]
    ) -> bool:
        """Record a cast operator as a cast point where a 16-bit run needs the distinction. Returns
        False if it should be recorded unchanged.
        """
        source, result = named.get("self"), outs[0] if outs else None
        if (
            self._table.base is not torch.float32
            or source is None
            or result is None
            or result.dtype is not torch.float32
        ):
            return False
        if layout(source) == layout(result):
            # `to` that moved nothing (it is an operator under inference_mode only): the
            # torch-function level tells which way it goes.
            self._table.operands[layout(result)] = encoded[0]
            return True
        if source.dtype is not torch.bool:
            return False
        # 0 and 1 are exact in any dtype, so only `.float()` asks for float32; a mask cast
        # `.to(x.dtype)` follows the working dtype.
        key = layout(result)
        self._table.emit(
            "whence.cast",
            (encoded[0], {"dtype": "float32"}, "up" if self.explicit else "back"),
            {},
            result,
            key,
        )
        (self._table.pinned.add if self.explicit else self._table.pinned.discard)(key)
        return True

    def add(self, tensor: Any, way: str) -> None:
        """Record a cast of float32 to float32. way: "up" (stays float32 in 16 bit), "back" (to the
        working dtype), "" (the opposite of the last one).
        """
        key = layout(tensor)
        pinned = key in self._table.pinned
        way = way or ("back" if pinned else "up")
        if pinned == (way == "up"):
            return
        self._table.emit(
            "whence.cast", (self._table.ref(tensor), {"dtype": "float32"}, way), {}, tensor, key
        )
        self._table.notes.add("cast pinned")
        (self._raised.add if way == "up" else self._raised.discard)(key)
        (self._table.pinned.add if way == "up" else self._table.pinned.discard)(key)

    def widened(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], Operand] | None:
        """For `softmax(x, dtype=float32)` of a float32 x: widen x for this call only. Returns what
        is needed to undo that, None where nothing was done.
        """
        if self._table.base is not torch.float32:
            return None
        dtypes = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)]
        operand = args[0] if args else kwargs.get("input")
        if (
            dtypes != [torch.float32]
            or not isinstance(operand, torch.Tensor)
            or operand.dtype is not torch.float32
        ):
            return None
        key = layout(operand)
        if key in self._table.pinned:
            return None
        source = self._table.ref(operand)
        self.add(operand, "up")
        return key, source

    def unmoved(self, name: str, args: Any, kwargs: Any, caller: Any) -> None:
        """Record a cast that returned its argument and ran no operator. caller: the frame that
        called it.
        """
        tensor = args[0]
        if self._table.base is not torch.float32 or tensor.dtype is not torch.float32:
            return
        if name == "float":
            self.add(tensor, "up")
            return
        others = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.Tensor)]
        if others:
            # `h.type_as(x)` after `h = x.float()`: x and h are one tensor, and the cast goes to the
            # dtype of x before it was widened.
            self.add(
                tensor, "up" if layout(others[0]) in self._table.pinned - self._raised else "back"
            )
        elif any(isinstance(v, torch.dtype) for v in (*args[1:], *kwargs.values())):
            self.add(tensor, cast_way(caller))
