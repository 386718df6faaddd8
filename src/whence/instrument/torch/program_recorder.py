"""Records what one region of an eager torch program ran, as a program: operators, argument graph,
constants; data, never code.

Listening happens at the dispatcher, below autograd and autocast, where an operator is an overload
with a schema. One thing is not visible there: `x.float()` on a tensor that is float32 already runs
no operator, yet in a 16-bit run of the same code it would widen. Such cast points are seen one
level up, at the torch-function level, and become the operation "whence.cast".

What cannot be followed (a tensor from nowhere, a random draw, a number taken out of a tensor past
the dispatcher) ends the recording with a reason: the program of a region is whole or there is none.
Nothing here changes the recorded code: every operator runs exactly once, also when the recorder
fails.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_arrays import tensors_in
from whence.frameworks.torch_schema import (
    AUTOCAST_KEYS,
    METADATA_ONLY,
    UNINITIALISED,
    OperatorSchema,
    draws,
    restored,
    schema_of,
    written,
)
from whence.instrument.torch.cast_points import CastPoints
from whence.instrument.torch.operand_table import OperandTable, RecordedOperation, Stop, layout
from whence.instrument.torch.program_writer import ChildCalls, write_program
from whence.instrument.torch.sources import source_here
from whence.records import Program
from whence.records.slots import is_mutated

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
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "__reduce_ex__",
    "__cuda_array_interface__",
}
_PRINTING = {"__repr__", "__str__", "__format__"}
_WATCHED = {"to", "float", "type", "type_as", "__set__"} | _WIDENING | _NUMBERS_TAKEN | _PRINTING


class Recording(NamedTuple):
    """What came of recording one call: a program with the tensors of its constants, in order, or
    the reason why there is none.

    program.constants is empty: whoever stores the constants puts their record ids there
    (msgspec.structs.replace).
    """

    program: Program | None
    constants: list[Any]
    reason: str


class _Dispatch(TorchDispatchMode):  # type: ignore[misc]
    # Without this a higher-order operator under the mode raises into the user's program.
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the handler in torch._dynamo.disable, which imports dynamo (seconds) at
        # the first operator.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder._operator(func, args, kwargs or {})


class _Function(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _WATCHED or self._recorder._over:
            return func(*args, **(kwargs or {}))
        return self._recorder._call(func, args, kwargs or {})


class Recorder:
    """Records what runs inside its `with` block, the calls of other modules left out (`pause`
    before them, `resume` after).

    inputs, params: the tensors that are visible to the call, by slot ("input.0",
    "input.hidden_states", "param.weight", "param.running_mean"); a tensor that is both is an input.
    casts: listen at the torch-function level too; False for code that asks `has_torch_function` and
    would decide otherwise while someone listens (`asks_for_listeners`). find: gives the slot of a
    tensor that is visible in another way (it hangs in a cache, it is a parameter of a module
    below), "" when it is not.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[str, Any]],
        params: Sequence[tuple[str, Any]],
        *,
        casts: bool = True,
        find: Callable[[Any], str] | None = None,
    ) -> None:
        self._reason = ""
        self._over = self._paused = False
        self._entered: list[Any] = []
        self._casts = casts
        self._autocast: tuple[str, ...] = ()
        self._table = OperandTable(find)
        self._cast_points = CastPoints(self._table)
        self._children = ChildCalls()
        self._child_inputs: dict[tuple[Any, ...], str] = {}  # to the child that runs now
        self._lines: dict[int, str] = {}  # by operation
        try:
            self._adopt_boundary(inputs, params)
        except Stop as stop:
            self._give_up(str(stop))
        except Exception as error:  # noqa: BLE001 - recording must never break the recorded program
            self._broke("reading the region's inputs", error)

    def __enter__(self) -> Recorder:
        try:
            self._autocast = tuple(
                key for device, key in AUTOCAST_KEYS.items() if torch.is_autocast_enabled(device)
            )
            if self._autocast and torch.is_inference_mode_enabled():
                # Composite operators arrive whole there, and whether autocast was on for what they
                # call cannot be known.
                self._give_up(
                    "autocast under inference_mode cannot be listened to without changing it"
                )
            self.resume()
        except Exception as error:  # noqa: BLE001 - as above
            self._broke("starting to listen", error)
            while self._entered:
                self._entered.pop().__exit__(None, None, None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._give_up(f"{type(error).__name__} left the call")
        while self._entered:
            self._entered.pop().__exit__(kind, error, trace)

    def abandon(self, reason: str = "calls other modules") -> None:
        """Stop recording: a child module turned out to be called, or the region is not wanted.
        Nothing is listened to from here on.

        The modes are taken off at once where they are on top, so that what runs next does not see
        them.
        """
        self._give_up(reason)
        while self._entered and self._on_top(self._entered[-1]):
            self._entered.pop().__exit__(None, None, None)

    @property
    def listening(self) -> bool:
        """Are modes of this recorder around what runs now?"""
        return bool(self._entered)

    def pause(self) -> None:
        """Another module is called next: take the modes off."""
        while self._entered and self._on_top(self._entered[-1]):
            self._entered.pop().__exit__(None, None, None)
        if self._entered:
            self._give_up("calls a module inside a mode of its own")

    def resume(self) -> None:
        """Listen (again)."""
        if not self._over and not self._entered:
            for mode in (_Dispatch(self), *((_Function(self),) if self._casts else ())):
                mode.__enter__()
                self._entered.append(mode)

    def child_enters(self, k: int, tensors: Sequence[tuple[str, Any]]) -> None:
        """Child number k is called with these tensors (slot, tensor): outputs "k:slot" of this
        call's own operators.
        """
        if self._over:
            return
        try:
            self._child_inputs = {}
            for slot, tensor in tensors:
                operand = self._table.boundary(tensor)
                self._child_inputs[layout(tensor)] = f"{k}:{slot}"
                # What is written in place later must not change what the child was given.
                copy = {"op": [len(self._table.operations), 0]}
                if "hole" not in operand:
                    self._table.operations.append(
                        RecordedOperation("aten.clone.default", (operand,), {})
                    )
                self._children.handed.append((f"{k}:{slot}", operand, copy))
            self._children.calls.append((k, len(self._table.operations)))
            self._children.lines.append(source_here())
            for slot, tensor in tensors:
                key = layout(tensor)
                if self._table.operands.get(key, {}).keys() & {"op", "const"}:
                    # It can be seen from here on: what follows starts from it, not from what it was
                    # made of.
                    pinned = key in self._table.pinned
                    self._table.renew(f"{k}:{slot}", tensor, key)
                    (self._table.pinned.add if pinned else self._table.pinned.discard)(key)
        except Stop as stop:
            self._give_up(str(stop))
        except Exception as error:  # noqa: BLE001 - as above
            self._broke("looking at what a module was given", error)

    def child_leaves(self, k: int, tensors: Sequence[tuple[str, Any]]) -> None:
        """Child number k is over and left these tensors (outputs, and what it changed): inputs
        "k:slot" of what follows.
        """
        if self._over:
            return
        try:
            for slot, tensor in tensors:
                if not self._table.is_plain(tensor):
                    continue
                key = layout(tensor)
                if is_mutated(slot):
                    self._table.poison(key[0], "a module changed memory that this is a view of")
                elif key in self._child_inputs:
                    self._children.same_tensors.append((self._child_inputs[key], f"{k}:{slot}"))
                self._table.renew(f"{k}:{slot}", tensor, key)
        except Stop as stop:
            self._give_up(str(stop))
        except Exception as error:  # noqa: BLE001 - as above
            self._broke("looking at what a module returned", error)

    def finish(self, outputs: Sequence[tuple[str, Any]]) -> Recording:
        """The program that computes `outputs` (slot, tensor after the call) from inputs and params,
        or the reason why there is none.

        A tensor the call changed is given as an output too ("mutated.input.0", tensor after the
        call). What other modules were given are outputs as well. An output that cannot be followed
        is left out where there are others between modules.
        """
        program: Program | None = None
        constants: list[Any] = []
        if not self._reason:
            self._paused = True
            try:
                program, constants = write_program(
                    self._table, self._children, self._lines, outputs
                )
            except Stop as stop:
                self._give_up(str(stop))
            except Exception as error:  # noqa: BLE001 - as above
                self._broke("writing the program", error)
        self._over = True
        self._table.forget_tensors()
        return Recording(program, constants, self._reason)

    @staticmethod
    def _on_top(mode: Any) -> bool:
        if isinstance(mode, TorchFunctionMode):
            depth = torch._C._len_torch_function_stack()
            return depth > 0 and torch._C._get_function_stack_at(depth - 1) is mode
        depth = torch._C._len_torch_dispatch_stack()
        return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is mode

    def _give_up(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
        self._over = True
        # Nothing is kept of a recording that failed.
        self._table.operations, self._table.constants = [], []

    def _broke(self, doing: str, error: Exception) -> None:
        self._give_up(
            f"the recorder failed while {doing}: {type(error).__name__}: {str(error)[:200]}"
        )

    def _adopt_boundary(
        self, inputs: Sequence[tuple[str, Any]], params: Sequence[tuple[str, Any]]
    ) -> None:
        for slot, tensor in inputs:
            self._table.new_input(slot, tensor)
        for slot, tensor in params:
            self._table.new_param(slot, tensor)

    def _operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        around: Any = contextlib.nullcontext()
        try:
            around = restored(func, self._autocast)
        except Exception as error:  # noqa: BLE001 - recording must never break the recorded program
            self._broke(f"looking at {func}", error)
        if self._over or self._paused:
            with around:
                return func(*args, **kwargs)
        ready = None
        try:
            ready = self._before(func, args, kwargs)
        except Stop as stop:
            self._give_up(str(stop))
        except Exception as error:  # noqa: BLE001 - recording must never break the recorded program
            self._broke(f"looking at {func}", error)
        with around:
            out = func(*args, **kwargs)
        if ready is not None:
            try:
                self._after(out, *ready)
            except Stop as stop:
                self._give_up(str(stop))
            except Exception as error:  # noqa: BLE001 - as above
                self._broke(f"looking at what {func} returned", error)
        return out

    def _before(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[OperatorSchema, dict[str, Any], tuple[Any, ...], dict[str, Any], str]:
        if not isinstance(func, torch._ops.OpOverload):
            raise Stop(f"calls compiled code or a higher-order operator ({func})")
        schema = schema_of(func)
        named = dict(zip(schema.positional, args))
        named.update(kwargs)
        if draws(schema, named):
            return schema, named, (), {}, f"draws random numbers ({schema.name})"
        self._table.hole = ""
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
            for name, value in named.items():
                if name not in schema.writes:
                    self._table.check_written(value)
        return schema, named, encoded, encoded_kwargs, self._table.hole

    def _written(self, schema: OperatorSchema, named: dict[str, Any]) -> list[Any]:
        return [t for name in written(schema, named) for t in tensors_in(named.get(name))]

    def _after(
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
        outs = list(tensors_in(out))
        mutated = self._written(schema, named)
        if hole:
            self._lost(out, outs, mutated, hole)
            return
        guard = None
        if not outs and not mutated:
            if out is None:
                return  # an assertion: _assert_async, record_stream
            guard = self._number_taken(out, name)
        elif schema.base in _DATA_DEPENDENT and self._size_depends_on_data(schema, named):
            guard = sum(t.numel() for t in outs)
        if schema.base in _CASTS and self._cast_points.record_cast(schema, encoded, named, outs):
            return
        if mutated and name not in METADATA_ONLY:
            self._note_writes(mutated)
        if schema.composite and torch.is_inference_mode_enabled():
            table.notes.add("inference")
        place = len(table.operations)
        self._lines[place] = source_here()
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

    def _number_taken(self, out: Any, name: str) -> Any:
        """A number that an operator took out of a tensor: what the code does next may rest on
        it.
        """
        if not isinstance(out, (bool, int, float)):
            raise Stop(f"reads a {type(out).__name__} from a tensor ({name})")
        self._table.guarded = True
        if isinstance(out, float) and not math.isfinite(out):
            raise Stop(f"reads a number that is not finite from a tensor ({name})")
        return out

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
            raise Stop(reason)  # a number: what the code does next may rest on it
        for tensor in mutated:
            self._table.poison(tensor.untyped_storage()._cdata, reason)
            self._table.unwritten.discard(tensor.untyped_storage()._cdata)
        for tensor in outs:
            self._table.unknown(tensor, layout(tensor), reason)

    @staticmethod
    def _size_depends_on_data(schema: OperatorSchema, named: dict[str, Any]) -> bool:
        if schema.base == "index":
            return any(
                t.dtype in (torch.bool, torch.uint8) for t in tensors_in(named.get("indices"))
            )
        if schema.base == "repeat_interleave":
            return "output_size" not in named and any(
                n in named and isinstance(named[n], torch.Tensor) for n in ("repeats",)
            )
        if schema.base == "where":
            return "other" not in named
        if schema.base == "one_hot":
            return bool(named.get("num_classes", -1) == -1)
        return True

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One watched call at the torch-function level."""
        name = func.__name__
        position, undo = len(self._table.operations), None
        explicit, paused = self._cast_points.explicit, self._paused
        try:
            if name in _NUMBERS_TAKEN or (name == "__set__" and func == torch.Tensor.data.__set__):
                self._give_up(f"reads or replaces a tensor's memory outside any operator ({name})")
            elif name in _PRINTING:
                self._paused = True
            elif name == "float":
                self._cast_points.explicit = True
            elif name in _WIDENING:
                undo = self._cast_points.widened(args, kwargs)
                position = len(self._table.operations)
        except Stop as stop:
            self._give_up(str(stop))
        except Exception as error:  # noqa: BLE001 - recording must never break the recorded program
            self._broke(f"looking at {name}", error)
        try:
            out = func(*args, **kwargs)
        finally:
            self._cast_points.explicit, self._paused = explicit, paused
        if self._over:
            return out
        try:
            if undo is not None:
                key, operand = undo
                self._table.operands[key] = operand
                self._table.pinned.discard(key)
            if (
                name in ("to", "float", "type", "type_as")
                and out is args[0]
                and len(self._table.operations) == position
            ):
                self._cast_points.unmoved(name, args, kwargs, sys._getframe(2))
        except Stop as stop:
            self._give_up(str(stop))
        except Exception as error:  # noqa: BLE001 - as above
            self._broke(f"looking at {name}", error)
        return out
