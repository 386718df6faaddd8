"""Records what one region of an eager torch program ran, as a program: operators, argument graph,
constants; data, never code.

Listening happens at the dispatcher, below autograd and autocast, where an operator is an overload
with a schema. One thing is not visible there: `x.float()` on a tensor that is float32 already runs
no operator, yet in a 16-bit run of the same code it would widen. Such cast points are seen one
level up, at the torch-function level, and become the operation "whence.cast".

A tensor is recognised by storage, offset, shape, strides and dtype (Python objects do not last).
What cannot be followed (a tensor from nowhere, a random draw, a number taken out of a tensor past
the dispatcher) ends the recording with a reason: the program of a region is whole or there is none.
Nothing here changes the recorded code: every operator runs exactly once, also when the recorder
fails.
"""

from __future__ import annotations

import bisect
import contextlib
import dis
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from types import CodeType, TracebackType
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_arrays import NAMES, canonical, tensors_in
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
from whence.instrument.torch.sources import source_here
from whence.records import Operation, Program
from whence.records.program import map_operands, operands

MAX_CONSTANT_BYTES = 1 << 20

Operand = dict[str, Any]

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
_FILLED = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor", "eye"}
_BLOCK_CACHE_BYTES = 64 << 20
_CASTS = {"_to_copy", "to", "type_as"}
# Arguments that hold sizes: the only places where a number may follow an input's extent.
_SIZE_ARGUMENTS = {
    "size",
    "sizes",
    "shape",
    "start",
    "end",
    "length",
    "split_sizes",
    "split_size",
    "output_size",
    "repeats",
    "self_size",
}

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


class _Stop(Exception):
    pass


def layout(tensor: Any) -> tuple[Any, ...]:
    """What a tensor is recognised by while its storage lives. A lazy conjugate is another tensor
    over the same memory.
    """
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()),
    )


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
        self._over = False
        self._entered: list[Any] = []
        self._casts = casts
        self._autocast: tuple[str, ...] = ()
        self._operations: list[
            tuple[str, tuple[Any, ...], dict[str, Any], Any, OperatorSchema | None]
        ] = []
        self._operand: dict[tuple[Any, ...], Operand] = {}
        self._sight: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._epoch: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._owners: dict[int, list[tuple[Operand, Any, int, int]]] = {}
        self._unwritten: set[int] = set()
        self._pinned: set[tuple[Any, ...]] = set()
        self._constants: list[Any] = []
        self._raised: set[tuple[Any, ...]] = set()
        self._explicit = False
        self._paused = False
        self._notes: set[str] = set()
        self._fixed: set[tuple[int, int, int]] = set()
        self._grad: set[str] = set()
        self._guarded = False
        self._find = find
        self._hole = ""
        self._calls: list[tuple[int, int]] = []
        self._lines: dict[int, str] = {}  # by operation
        self._call_lines: list[str] = []
        self._handed: list[tuple[str, Operand, Operand]] = []
        self._given: dict[tuple[Any, ...], str] = {}
        self._same: list[tuple[str, str]] = []
        self._replaced: set[int] = set()
        self._inputs: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._input_dtypes: list[str] = []
        self._params: dict[tuple[Any, ...], Any] = {}
        self._param_extents: set[int] = set()
        self._base: Any = None
        try:
            self._adopt_boundary(inputs, params)
        except _Stop:
            pass
        except Exception as error:  # noqa: BLE001 - recording must never break the recorded program
            self._broke("reading the region's inputs", error)

    # ---- what the caller does

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

    # ---- calls of other modules: their own business, their tensors are what this call is judged by

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
            self._given = {}
            for slot, tensor in tensors:
                operand = self._boundary(tensor)
                self._given[layout(tensor)] = f"{k}:{slot}"
                # What is written in place later must not change what the child was given.
                copy = {"op": [len(self._operations), 0]}
                if "hole" not in operand:
                    self._operations.append(("aten.clone.default", (operand,), {}, None, None))
                self._handed.append((f"{k}:{slot}", operand, copy))
            self._calls.append((k, len(self._operations)))
            self._call_lines.append(source_here())
            for slot, tensor in tensors:
                key = layout(tensor)
                if self._operand.get(key, {}).keys() & {"op", "const"}:
                    # It can be seen from here on: what follows starts from it, not from what it was
                    # made of.
                    pinned = key in self._pinned
                    self._renew(f"{k}:{slot}", tensor, key)
                    (self._pinned.add if pinned else self._pinned.discard)(key)
        except _Stop:
            pass
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
                if not self._is_plain(tensor):
                    continue
                key = layout(tensor)
                if slot.startswith("mutated"):
                    self._poison(key[0], "a module changed memory that this is a view of")
                elif key in self._given:
                    self._same.append((self._given[key], f"{k}:{slot}"))
                self._renew(f"{k}:{slot}", tensor, key)
        except _Stop:
            pass
        except Exception as error:  # noqa: BLE001 - as above
            self._broke("looking at what a module returned", error)

    def _renew(self, slot: str, tensor: Any, key: tuple[Any, ...]) -> None:
        """From here on this tensor is an input."""
        if self._operand.pop(key, None) is not None:
            self._replaced.add(key[0])
            self._owners.pop(key[0], None)
        self._new_input(slot, tensor)

    def _boundary(self, tensor: Any) -> Operand:
        if not self._is_plain(tensor):
            return {
                "hole": f"hands on a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
            }
        operand = self._ref(tensor)
        self._check_written(tensor)
        return operand

    @staticmethod
    def _is_plain(tensor: Any) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.dtype in NAMES
            and not hasattr(tensor, "__tensor_flatten__")
        )

    def _new_input(self, slot: str, tensor: Any) -> Operand:
        self._plain(tensor, slot)
        operand = {"in": len(self._inputs)}
        self._inputs.append(slot)
        self._shapes.append(tuple(tensor.shape))
        if tensor.requires_grad:
            self._grad.add(slot)
        self._input_dtypes.append(NAMES.get(tensor.dtype, ""))
        if self._base is None and tensor.is_floating_point():
            self._base = tensor.dtype
        self._adopt(tensor, operand)
        self._pinned.discard(layout(tensor))
        return operand

    def _poison(self, storage: int, reason: str) -> None:
        """Nothing is known any more of the tensors over this memory."""
        for key in self._operand:
            if key[0] == storage:
                self._operand[key] = {"hole": reason}
        self._owners.pop(storage, None)

    def finish(self, outputs: Sequence[tuple[str, Any]]) -> Recording:
        """The program that computes `outputs` (slot, tensor after the call) from inputs and params,
        or the reason why there is none.

        A tensor the call changed is given as an output too ("mutated.input.0", tensor after the
        call). What other modules were given are outputs as well. An output that cannot be followed
        is left out where there are others between modules.
        """
        program: Program | None = None
        if not self._reason:
            self._paused = True
            try:
                program = self._program(outputs)
            except _Stop:
                pass
            except Exception as error:  # noqa: BLE001 - as above
                self._broke("writing the program", error)
        constants = self._constants if program is not None else []
        self._over = True
        self._operand, self._sight, self._alive, self._owners, self._params = {}, {}, {}, {}, {}
        return Recording(program, constants, self._reason)

    @staticmethod
    def _on_top(mode: Any) -> bool:
        if isinstance(mode, TorchFunctionMode):
            depth = torch._C._len_torch_function_stack()
            return depth > 0 and torch._C._get_function_stack_at(depth - 1) is mode
        depth = torch._C._len_torch_dispatch_stack()
        return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is mode

    # ---- ending a recording early

    def _give_up(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
        self._over = True
        # Nothing is kept of a recording that failed.
        self._operations, self._constants = [], []

    def _stop(self, reason: str) -> None:
        self._give_up(reason)
        raise _Stop

    def _broke(self, doing: str, error: Exception) -> None:
        self._give_up(
            f"the recorder failed while {doing}: {type(error).__name__}: {str(error)[:200]}"
        )

    # ---- tensors at the boundary

    def _adopt_boundary(
        self, inputs: Sequence[tuple[str, Any]], params: Sequence[tuple[str, Any]]
    ) -> None:
        for slot, tensor in inputs:
            self._new_input(slot, tensor)
        for slot, tensor in params:
            self._new_param(slot, tensor)

    def _new_param(self, slot: str, tensor: Any) -> Operand:
        self._plain(tensor, slot)
        operand = {"param": slot}
        self._adopt(tensor, operand)
        if tensor.requires_grad:
            self._grad.add(slot)
        self._param_extents.update(tensor.shape)
        self._params[layout(tensor)] = tensor
        if self._base is None and tensor.is_floating_point():
            self._base = tensor.dtype
        return operand

    def _plain(self, tensor: Any, what: str) -> None:
        if hasattr(tensor, "__tensor_flatten__"):
            self._stop(f"{what} is a {type(tensor).__name__}, not a plain tensor")
        if tensor.layout is not torch.strided:
            self._stop(f"{what} has the layout {str(tensor.layout).removeprefix('torch.')}")
        if tensor.dtype not in NAMES:
            self._stop(f"{what} has the dtype {tensor.dtype}")

    def _adopt(self, tensor: Any, operand: Operand) -> None:
        key = layout(tensor)
        owners = self._owners.setdefault(self._hold(tensor, key[0]), [])
        if key in self._operand:
            return
        self._operand[key] = operand
        self._see(tensor, key)
        span = tensor.numel() if tensor.is_contiguous() else -1
        owners.append((operand, tensor.dtype, tensor.storage_offset(), span))

    def _hold(self, tensor: Any, storage: int) -> int:
        # A weak reference pins the storage's address, not its bytes, so that no later storage is
        # taken for this one.
        if storage not in self._alive:
            self._alive[storage] = StorageWeakRef(tensor.untyped_storage())
        return storage

    def _see(self, tensor: Any, key: tuple[Any, ...]) -> None:
        if not tensor.is_inference():
            self._sight[key] = (tensor._version, self._epoch.get(key[0], 0))

    # ---- operands

    def _ref(self, tensor: Any) -> Operand:
        if hasattr(tensor, "__tensor_flatten__"):
            self._stop(f"works on a {type(tensor).__name__}, not a plain tensor")
        key = layout(tensor)
        found = self._operand.get(key)
        if found is None:
            found = self._provenance(tensor, key)
            if "hole" in found:
                self._hole = self._hole or found["hole"]
            return found
        if "hole" in found:
            self._hole = self._hole or found["hole"]
            return found
        if not tensor.is_inference():
            version, epoch = self._sight.get(key, (-1, -1))
            if epoch != self._epoch.get(key[0], 0):  # not seen since it was made or last written
                self._see(tensor, key)
            elif version != tensor._version:
                self._stop("a tensor changed without an operator that wrote it")
        return found

    def _provenance(self, tensor: Any, key: tuple[Any, ...]) -> Operand:
        """An operand for a tensor that no operator handed out: another view of known memory, a
        parameter cast by autocast, or nothing.
        """
        for operand, dtype, offset, count in self._owners.get(key[0], ()):
            span = (
                1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
                if tensor.numel()
                else 0
            )
            start = tensor.storage_offset() - offset
            if dtype == tensor.dtype and not key[5] and start >= 0 and start + span <= count:
                if "in" in operand:
                    self._fixed.update(
                        (operand["in"], axis, n)
                        for axis, n in enumerate(self._shapes[operand["in"]])
                    )
                elif "op" in operand:
                    self._fixed.update(
                        (k, axis, n)
                        for k, shape in enumerate(self._shapes)
                        for axis, n in enumerate(shape)
                    )
                return self._emit(
                    "aten.as_strided.default",
                    (operand, list(tensor.shape), list(tensor.stride()), start),
                    {},
                    tensor,
                    key,
                )
        if tensor.dtype in (torch.bfloat16, torch.float16):
            # Autocast casts a parameter once and hands the copy out again without an operator.
            for layout, param in self._params.items():
                if (
                    param.shape == tensor.shape
                    and param.is_floating_point()
                    and torch.equal(param.detach().to(tensor.dtype), tensor.detach())
                ):
                    kwargs = {"dtype": {"dtype": NAMES[tensor.dtype]}}
                    return self._emit(
                        "aten._to_copy.default", (self._operand[layout],), kwargs, tensor, key
                    )
        slot = self._find(tensor) if self._find is not None else ""
        if slot:
            return (
                self._new_param(slot, tensor)
                if slot.startswith("param")
                else self._new_input(slot, tensor)
            )
        shape = tuple(tensor.shape)
        return self._unknown(
            tensor,
            key,
            "reads a tensor that is neither an input, a parameter nor made inside "
            f"({tensor.dtype} {shape})",
        )

    def _unknown(self, tensor: Any, key: tuple[Any, ...], reason: str) -> Operand:
        self._operand[key] = {"hole": reason}
        self._hold(tensor, key[0])
        return self._operand[key]

    def _emit(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor: Any,
        key: tuple[Any, ...],
    ) -> Operand:
        self._operations.append((name, args, kwargs, None, None))
        operand = {"op": [len(self._operations) - 1, 0]}
        self._operand[key] = operand
        self._hold(tensor, key[0])
        self._see(tensor, key)
        return operand

    def _encode(self, value: Any) -> Any:
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind is int or kind is str:
            return value
        if isinstance(value, torch.Tensor):
            return self._ref(value)
        if isinstance(value, (list, tuple)):
            return [self._encode(item) for item in value]
        if isinstance(value, float):
            number = float(value)
            return (
                number
                if math.isfinite(number)
                else {"float": "nan" if number != number else "inf" if number > 0 else "-inf"}
            )
        if isinstance(value, int):
            return int(value)
        if isinstance(value, complex):
            return {"complex": [self._encode(value.real), self._encode(value.imag)]}
        if isinstance(value, torch.dtype):
            if value not in NAMES:
                self._stop(f"uses the dtype {value}")
            return {"dtype": NAMES[value]}
        if isinstance(value, torch.device):
            return {"device": ""}
        if isinstance(value, torch.layout):
            return {"layout": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"memory_format": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Generator):
            self._stop("takes random numbers from a generator")
        self._stop(f"an operator takes a {kind.__name__}")
        raise AssertionError  # not reached

    # ---- one operator

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
        except _Stop:
            pass
        except Exception as error:  # noqa: BLE001 - recording must never break the recorded program
            self._broke(f"looking at {func}", error)
        with around:
            out = func(*args, **kwargs)
        if ready is not None:
            try:
                self._after(func, args, kwargs, out, *ready)
            except _Stop:
                pass
            except Exception as error:  # noqa: BLE001 - as above
                self._broke(f"looking at what {func} returned", error)
        return out

    def _before(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[OperatorSchema, dict[str, Any], tuple[Any, ...], dict[str, Any], str]:
        if not isinstance(func, torch._ops.OpOverload):
            self._stop(f"calls compiled code or a higher-order operator ({func})")
        facts = schema_of(func)
        named = dict(zip(facts.positional, args))
        named.update(kwargs)
        if draws(facts, named):
            return facts, named, (), {}, f"draws random numbers ({facts.name})"
        self._hole = ""
        if facts.base == "lift_fresh" and (key := layout(args[0])) not in self._operand:
            self._constant(args[0], key)
        if facts.base == "set_" or facts.base.startswith("resize"):
            self._stop(f"replaces the memory of a tensor ({facts.name})")
        encoded = tuple(self._encode(a) for a in args)
        encoded_kwargs = {
            k: self._encode(v) for k, v in kwargs.items() if not (k == "pin_memory" or v is None)
        }
        if self._unwritten and not facts.view and facts.base not in _METADATA_READERS:
            for name, value in named.items():
                if name not in facts.writes:
                    self._check_written(value)
        return facts, named, encoded, encoded_kwargs, self._hole

    def _check_written(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.numel() and tensor.untyped_storage()._cdata in self._unwritten:
                self._stop(
                    "a tensor changed without an operator that wrote it (memory made by `empty` "
                    "is read)"
                )

    def _constant(self, tensor: Any, key: tuple[Any, ...]) -> None:
        if self._guarded:
            self._stop("makes a tensor from Python data after reading a number from a tensor")
        self._plain(tensor, "a constant")
        if tensor.numel() * tensor.element_size() > MAX_CONSTANT_BYTES:
            size = f"{tensor.numel() * tensor.element_size()} bytes"
            self._unknown(
                tensor,
                key,
                f"makes a tensor of {size} from Python data (at most {MAX_CONSTANT_BYTES})",
            )
            return
        if tensor.dtype is torch.float32 and tensor.numel():
            self._pinned.add(key)  # float32 by default in a 16-bit run too
        self._operand[key] = {"const": len(self._constants)}
        self._constants.append(tensor.detach().clone())
        self._hold(tensor, key[0])
        self._see(tensor, key)

    def _written(self, facts: OperatorSchema, named: dict[str, Any]) -> list[Any]:
        return [t for name in written(facts, named) for t in tensors_in(named.get(name))]

    def _after(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        facts: OperatorSchema,
        named: dict[str, Any],
        encoded: Any,
        encoded_kwargs: Any,
        hole: str,
    ) -> None:
        name = facts.name
        outs = list(tensors_in(out))
        written = self._written(facts, named)
        if hole:
            self._lost(out, outs, written, hole)
            return
        place = len(self._operations)
        guard = None
        if not outs and not written:
            if out is None:
                return  # an assertion: _assert_async, record_stream
            if not isinstance(out, (bool, int, float)):
                self._stop(f"reads a {type(out).__name__} from a tensor ({name})")
            guard, self._guarded = out, True
            if isinstance(out, float) and not math.isfinite(out):
                self._stop(f"reads a number that is not finite from a tensor ({name})")
        elif facts.base in _DATA_DEPENDENT and self._size_depends_on_data(facts, named):
            guard = sum(t.numel() for t in outs)
        if facts.base in _CASTS and self._cast(facts, encoded, named, outs):
            return
        if written and name not in METADATA_ONLY:
            for storage in {t.untyped_storage()._cdata for t in written}:
                if len(self._owners.get(storage, ())) > 1:
                    self._stop("writes into memory that two of its inputs or parameters share")
                if storage in self._replaced:
                    kept = {key: self._operand.get(key) for key in map(layout, written)}
                    self._poison(
                        storage,
                        "a view of a tensor that a module handed on and that was written since",
                    )
                    self._operand.update(
                        {key: operand for key, operand in kept.items() if operand is not None}
                    )
                self._epoch[storage] = self._epoch.get(storage, 0) + 1
                self._unwritten.discard(storage)
            self._notes.add("in-place")
        if facts.composite and torch.is_inference_mode_enabled():
            self._notes.add("inference")
        self._lines[len(self._operations)] = source_here()
        self._operations.append(
            (METADATA_ONLY.get(name, name), encoded, encoded_kwargs, guard, facts)
        )
        pinned = self._is_pinned(facts, named, outs)
        for j, tensor in enumerate(outs):
            if hasattr(tensor, "__tensor_flatten__"):
                self._stop(f"makes a {type(tensor).__name__}, not a plain tensor")
            key = layout(tensor)
            operand = {"op": [place, j]}
            fresh = key[0] not in self._alive
            if fresh:
                self._hold(tensor, key[0])
                if facts.base in UNINITIALISED and tensor.numel():
                    self._unwritten.add(key[0])
                if tensor.is_contiguous():
                    self._owners.setdefault(key[0], []).append(
                        (operand, tensor.dtype, tensor.storage_offset(), tensor.numel())
                    )
            if not written:
                (
                    self._pinned.add
                    if pinned and tensor.is_floating_point()
                    else self._pinned.discard
                )(key)
            self._operand[key] = operand
            # Above this level a view is still to get its base's version counter, and a written
            # tensor its next version.
            if written or facts.view or not fresh:
                self._sight.pop(key, None)
            else:
                self._see(tensor, key)

    def _lost(self, out: Any, outs: list[Any], written: list[Any], reason: str) -> None:
        """An operator on something unknown, or a random one: what it makes is unknown, and what it
        writes from now on.
        """
        if out is not None and not outs and not written:
            self._stop(reason)  # a number: what the code does next may rest on it
        for tensor in written:
            self._poison(tensor.untyped_storage()._cdata, reason)
            self._unwritten.discard(tensor.untyped_storage()._cdata)
        for tensor in outs:
            self._unknown(tensor, layout(tensor), reason)

    @staticmethod
    def _size_depends_on_data(facts: OperatorSchema, named: dict[str, Any]) -> bool:
        if facts.base == "index":
            return any(
                t.dtype in (torch.bool, torch.uint8) for t in tensors_in(named.get("indices"))
            )
        if facts.base == "repeat_interleave":
            return "output_size" not in named and any(
                n in named and isinstance(named[n], torch.Tensor) for n in ("repeats",)
            )
        if facts.base == "where":
            return "other" not in named
        if facts.base == "one_hot":
            return bool(named.get("num_classes", -1) == -1)
        return True

    # ---- cast points: what an fp32 recording must remember for a 16-bit replay

    def _is_pinned(self, facts: OperatorSchema, named: dict[str, Any], outs: list[Any]) -> bool:
        """Would the result be float32 in a 16-bit run too? Only asked of float32 recordings."""
        if self._base is not torch.float32 or not any(t.dtype is torch.float32 for t in outs):
            return False
        if facts.base in _FILLED or facts.base.endswith("_like"):
            return named.get("dtype") is None and "self" not in named
        floats = [t for value in named.values() for t in tensors_in(value) if t.is_floating_point()]
        if not floats:
            return True  # int -> float: positions, counts
        pins = [t for t in floats if t.dtype is torch.float32 and layout(t) in self._pinned]
        return bool(pins) and (any(t.dim() for t in pins) or not any(t.dim() for t in floats))

    def _cast(
        self, facts: OperatorSchema, encoded: Any, named: dict[str, Any], outs: list[Any]
    ) -> bool:
        """Record a cast operator as a cast point where a 16-bit run would tell them apart; False:
        record it as it is.
        """
        source, result = named.get("self"), outs[0] if outs else None
        if (
            self._base is not torch.float32
            or source is None
            or result is None
            or result.dtype is not torch.float32
        ):
            return False
        if layout(source) == layout(result):
            # `to` that moved nothing (it is an operator under inference_mode only): the
            # torch-function level tells which way it goes.
            self._operand[layout(result)] = encoded[0]
            return True
        if source.dtype is not torch.bool:
            return False
        # 0 and 1 are exact in any dtype, so only `.float()` asks for float32; a mask cast
        # `.to(x.dtype)` follows the working dtype.
        key = layout(result)
        self._emit(
            "whence.cast",
            (encoded[0], {"dtype": "float32"}, "up" if self._explicit else "back"),
            {},
            result,
            key,
        )
        (self._pinned.add if self._explicit else self._pinned.discard)(key)
        return True

    def _cast_point(self, tensor: Any, way: str) -> None:
        """A cast of float32 to float32. way: "up" (stays float32 in 16 bit), "back" (to the working
        dtype), "" (by turns).
        """
        key = layout(tensor)
        pinned = key in self._pinned
        way = way or ("back" if pinned else "up")
        if pinned == (way == "up"):
            return
        self._emit("whence.cast", (self._ref(tensor), {"dtype": "float32"}, way), {}, tensor, key)
        self._notes.add("cast pinned")
        (self._raised.add if way == "up" else self._raised.discard)(key)
        (self._pinned.add if way == "up" else self._pinned.discard)(key)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One watched call at the torch-function level."""
        name = func.__name__
        before, undo = len(self._operations), None
        explicit, paused = self._explicit, self._paused
        try:
            if name in _NUMBERS_TAKEN or (name == "__set__" and func == torch.Tensor.data.__set__):
                self._give_up(f"reads or replaces a tensor's memory outside any operator ({name})")
            elif name in _PRINTING:
                self._paused = True
            elif name == "float":
                self._explicit = True
            elif name in _WIDENING:
                undo = self._widened(args, kwargs)
                before = len(self._operations)
        except _Stop:
            pass
        except Exception as error:  # noqa: BLE001 - recording must never break the recorded program
            self._broke(f"looking at {name}", error)
        try:
            out = func(*args, **kwargs)
        finally:
            self._explicit, self._paused = explicit, paused
        if self._over:
            return out
        try:
            if undo is not None:
                key, operand = undo
                self._operand[key] = operand
                self._pinned.discard(key)
            if (
                name in ("to", "float", "type", "type_as")
                and out is args[0]
                and len(self._operations) == before
            ):
                self._unmoved(name, args, kwargs)
        except _Stop:
            pass
        except Exception as error:  # noqa: BLE001 - as above
            self._broke(f"looking at {name}", error)
        return out

    def _widened(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], Operand] | None:
        """`softmax(x, dtype=float32)` of a float32 x: x is widened for this call only."""
        if self._base is not torch.float32:
            return None
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)]
        operand = args[0] if args else kwargs.get("input")
        if (
            given != [torch.float32]
            or not isinstance(operand, torch.Tensor)
            or operand.dtype is not torch.float32
        ):
            return None
        key = layout(operand)
        if key in self._pinned:
            return None
        known = self._ref(operand)
        self._cast_point(operand, "up")
        return key, known

    def _unmoved(self, name: str, args: Any, kwargs: Any) -> None:
        """A cast that returned its own tensor: no operator ran."""
        tensor = args[0]
        if self._base is not torch.float32 or tensor.dtype is not torch.float32:
            return
        if name == "float":
            self._cast_point(tensor, "up")
            return
        others = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.Tensor)]
        if others:
            # `h.type_as(x)` after `h = x.float()`: x is h's own tensor, and what is meant is x
            # before it was widened.
            self._cast_point(
                tensor, "up" if layout(others[0]) in self._pinned - self._raised else "back"
            )
        elif any(isinstance(v, torch.dtype) for v in (*args[1:], *kwargs.values())):
            self._cast_point(tensor, _way(sys._getframe(3)))

    # ---- writing the program

    def _program(self, outputs: Sequence[tuple[str, Any]]) -> Program:
        # of a call between whose operators others lie, each output stands for itself
        whole = not self._calls
        in_place = "in-place" in self._notes
        operands = [
            (slot, copy if in_place and "hole" not in operand else operand)
            for slot, operand, copy in self._handed
        ]
        for slot, tensor in outputs:
            if whole:
                self._plain(tensor, slot)
            known = layout(tensor) in self._operand
            operand = self._boundary(tensor)
            if whole and "hole" in operand:
                self._stop(
                    operand["hole"] if known else operand["hole"].replace("reads", "returns", 1)
                )
            operands.append((slot, operand))
        lost = tuple((slot, operand["hole"]) for slot, operand in operands if "hole" in operand)
        operands = [(slot, operand) for slot, operand in operands if "hole" not in operand]
        if not operands:
            self._stop(lost[0][1] if lost else "returns no tensor")
        guarded = any(op[3] is not None for op in self._operations)
        keep = (
            set(range(len(self._operations))) if in_place else self._live([o for _, o in operands])
        )
        order = sorted(keep)
        number = {old: new for new, old in enumerate(order)}
        used = _Used()
        written = []
        for old in order:
            name, args, kwargs, guard, facts = self._operations[old]
            args, kwargs = self._sized(facts, args, kwargs, self._known_at(old))
            written.append((name, args, kwargs, guard))
            used.walk([*args, *kwargs.values()])
        used.walk([o for _, o in operands])
        fixed = self._fixed_extents(
            any(self._takes_sizes(self._operations[old][4]) for old in keep)
        )
        agreeing = self._agreements(None if whole else used.inputs)
        if whole:
            used.inputs.update(k for k, _, _ in fixed)
            used.inputs.update(k for i, _, m, _ in agreeing for k in (i, m))
        else:
            fixed = {f for f in fixed if f[0] in used.inputs}
        places = {old: new for new, old in enumerate(sorted(used.inputs))}
        constants = {old: new for new, old in enumerate(sorted(used.constants))}
        self._constants = [self._constants[old] for old in sorted(used.constants)]
        rename = functools.partial(_renumbered, number, places, constants)
        # composite operators choose their way by what requires grad
        inference = "inference" in self._notes
        used_slots = {self._inputs[k] for k in used.inputs} | used.params
        program = Program(
            id="",
            operations=tuple(
                Operation(name, tuple(args), kwargs, guard).with_operands(rename)
                for name, args, kwargs, guard in written
            ),
            inputs=tuple(self._inputs[k] for k in sorted(used.inputs)),
            outputs=tuple((slot, map_operands(rename, operand)) for slot, operand in operands),
            params=tuple(sorted(used.params)),
            base=NAMES[self._base] if self._base is not None else "",
            input_dtypes=tuple(self._input_dtypes[k] for k in sorted(used.inputs)),
            default_dtype=NAMES[torch.get_default_dtype()],
            fixed=tuple(sorted((places[k], axis, n) for k, axis, n in fixed)),
            equal=tuple(
                sorted((places[i], axis, places[k], other) for i, axis, k, other in agreeing)
            ),
            inference=inference,
            grad=tuple(sorted(self._grad & used_slots)) if inference else (),
            notes=tuple(sorted((self._notes - {"inference"}) | ({"guard"} if guarded else set()))),
            calls=tuple((k, bisect.bisect_left(order, at)) for k, at in self._calls),
            same=tuple(pair for pair in self._same if pair[1] in used_slots),
            lost=lost,
        )
        digest = xxhash.xxh3_128(
            msgspec.json.encode(msgspec.structs.replace(program, lost=()), order="sorted")
        )
        for constant in self._constants:
            digest.update(f"{constant.dtype}{tuple(constant.shape)}".encode())
            digest.update(canonical(constant).tobytes())
        # Equal code at other lines is the same program.
        lines = tuple(self._lines.get(old, "") for old in order)
        return msgspec.structs.replace(
            program,
            id=digest.hexdigest(),
            lines=lines if any(lines) else (),
            call_lines=tuple(self._call_lines),
        )

    def _live(self, operands: list[Operand]) -> set[int]:
        """Operations the outputs rest on, and guards with what they rest on."""
        keep: set[int] = set()
        todo = [o["op"][0] for o in operands if "op" in o]
        todo += [i for i, op in enumerate(self._operations) if op[3] is not None]
        while todo:
            i = todo.pop()
            if i not in keep:
                keep.add(i)
                used = _Used()
                _, args, kwargs, *_ = self._operations[i]
                used.walk([*args, *kwargs.values()])
                todo += used.operations
        return keep

    # ---- sizes that follow an input

    @staticmethod
    def _takes_sizes(facts: OperatorSchema | None) -> bool:
        return facts is not None and any(n in _SIZE_ARGUMENTS for n in facts.positional)

    def _known_at(self, place: int) -> set[int]:
        """The inputs that are there when the operation at this place runs: not what calls after it
        are given and leave.
        """
        entered = {k for k, at in self._calls if at <= place}
        return {
            k
            for k, slot in enumerate(self._inputs)
            if not slot[0].isdigit() or int(slot.partition(":")[0]) in entered
        }

    def _sized(
        self, facts: OperatorSchema | None, args: Any, kwargs: Any, known: set[int]
    ) -> tuple[Any, Any]:
        if facts is None:
            return args, kwargs

        def one(name: str, value: Any) -> Any:
            return self._follow(value, known) if name in _SIZE_ARGUMENTS else self._scalar(value)

        sized = tuple(one(name, value) for name, value in zip(facts.positional, args))
        return (*sized, *args[len(sized) :]), {
            name: one(name, value) for name, value in kwargs.items()
        }

    def _follow(self, value: Any, known: set[int]) -> Any:
        """A size as the extent of an input that is known by then, or the product of two, where only
        one reading is possible.

        Extents that are equal in the recording must be equal on replay (`_agreements`), so which of
        them is named does not matter.
        """
        if isinstance(value, list):
            return [self._follow(item, known) for item in value]
        if type(value) is not int or value < 2 or value >= 1 << 40:
            return value
        places = [
            (k, axis)
            for k, shape in enumerate(self._shapes)
            for axis, n in enumerate(shape)
            if n == value
        ]
        pairs = [
            (k, a, b)
            for k, shape in enumerate(self._shapes)
            for a, b in itertools.combinations(range(len(shape)), 2)
            if shape[a] * shape[b] == value and shape[a] > 1 < shape[b]
        ]
        if value not in self._param_extents:
            early = [(k, axis) for k, axis in places if k in known]
            if early:
                return {"dim": list(early[0])}
            products = [(k, a, b) for k, a, b in pairs if k in known and not places]
            if (
                len(
                    {
                        tuple(sorted((self._shapes[k][a], self._shapes[k][b])))
                        for k, a, b in products
                    }
                )
                == 1
            ):
                k, a, b = products[0]
                return {"mul": [{"dim": [k, a]}, {"dim": [k, b]}]}
        self._fixed.update((k, axis, value) for k, axis in places)
        if not places:
            self._fixed.update(
                (k, axis, self._shapes[k][axis]) for k, a, b in pairs for axis in (a, b)
            )
        return value

    def _agreements(self, among: set[int] | None) -> set[tuple[int, int, int, int]]:
        """Extents that were equal: code that cuts one input to the length of another leaves no
        operator where they agree already.

        among: inputs to look at, None for all.
        """
        first: dict[int, tuple[int, int]] = {}
        found = set()
        for k, shape in enumerate(self._shapes):
            if among is not None and k not in among:
                continue
            for axis, n in enumerate(shape):
                if n > 1 and first.setdefault(n, (k, axis)) != (k, axis):
                    found.add((*first[n], k, axis))
        return found

    def _scalar(self, value: Any) -> Any:
        """A plain number that equals an extent may have been taken from it (`x.sum(1) /
        x.shape[1]`): that extent may not change.
        """
        if type(value) in (int, float) and value >= 3:
            self._fixed.update(
                (k, a, n)
                for k, shape in enumerate(self._shapes)
                for a, n in enumerate(shape)
                if n == value
            )
        return value

    def _fixed_extents(self, sizes: bool) -> set[tuple[int, int, int]]:
        """Extents a replay must share. An extent of 1 broadcasts, so where sizes are written down
        it may not grow.
        """
        ones = (
            {
                (k, a, 1)
                for k, shape in enumerate(self._shapes)
                for a, n in enumerate(shape)
                if n == 1
            }
            if sizes
            else set()
        )
        return self._fixed | ones


class _Used:
    """What the arguments of operations refer to."""

    def __init__(self) -> None:
        self.inputs: set[int] = set()
        self.params: set[str] = set()
        self.constants: set[int] = set()
        self.operations: set[int] = set()

    def walk(self, value: Any) -> None:
        for kind, at in operands(value):
            if kind == "in":
                self.inputs.add(at)
            elif kind == "param":
                self.params.add(at)
            elif kind == "const":
                self.constants.add(at)
            elif kind == "op":
                self.operations.add(at[0])
            elif kind == "dim":
                self.inputs.add(at[0])


def _renumbered(
    operations: dict[int, int],
    inputs: dict[int, int],
    constants: dict[int, int],
    kind: str,
    at: Any,
) -> Any:
    if kind == "op":
        return {"op": [operations[at[0]], at[1]]}
    if kind == "dim":
        return {"dim": [inputs[at[0]], at[1]]}
    if kind == "in":
        return {"in": inputs[at]}
    if kind == "const":
        return {"const": constants[at]}
    if kind == "mul":
        return {
            "mul": map_operands(functools.partial(_renumbered, operations, inputs, constants), at)
        }
    return {kind: at}


# ---- reading the caller's code


def _way(frame: Any) -> str:
    """Which way the cast goes that `frame` is making: "up" for `.to(torch.float32)`, "back" for
    `.to(x.dtype)`, "" when a variable says.
    """
    return _way_at(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _way_at(code: CodeType, last: int) -> str:
    attributes: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset >= last:
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            attributes = (
                [] if instruction.argval in ("to", "type") else [*attributes, instruction.argval]
            )
    if "float32" in attributes or "float" in attributes:
        return "up"
    return "back" if "dtype" in attributes else ""


def asks_for_listeners(module: Any) -> bool:
    """Does the module's forward call `has_torch_function` itself (nn.MultiheadAttention does, to
    choose its fast path)?

    Such code runs differently while a torch-function mode is active; record it with `casts=False`.
    """
    return "has_torch_function" in _names(module)


def compiled_inside(module: Any) -> str:
    """The name of something compiled that the module's forward refers to, "" when none is found.

    A dispatch mode around compiled code silently makes it eager, so such a module is not recorded.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return type(module).__name__
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    reachable = getattr(forward, "__globals__", {})
    for name in _names(module):
        # its modules are calls of their own
        for value in (
            reachable.get(name),
            module.__dict__.get(name),
        ):
            if hasattr(value, "_torchdynamo_orig_callable") or isinstance(
                value, torch.jit.ScriptFunction
            ):
                return name
    return ""


def _names(module: Any) -> tuple[str, ...]:
    forward: Callable[..., Any] | None = module.__dict__.get("forward") or getattr(
        type(module), "forward", None
    )
    forward = getattr(forward, "__func__", forward)
    forward = getattr(forward, "__wrapped__", forward)
    code = getattr(forward, "__code__", None)
    return code.co_names if code is not None else ()


def is_block_cache(name: str, value: Any) -> bool:
    """Is this plain attribute of a module the memory in which an engine keeps keys and values of
    all requests?
    """
    parts = (
        [value]
        if isinstance(value, torch.Tensor)
        else value
        if isinstance(value, (list, tuple))
        else []
    )
    return (
        "cache" in name
        and sum(t.numel() * t.element_size() for t in parts if isinstance(t, torch.Tensor))
        >= _BLOCK_CACHE_BYTES
    )


def tensors_of(module: Any) -> list[tuple[str, Any]]:
    """(slot, tensor) of everything a leaf module holds: parameters and buffers, also of children it
    does not call, and plain attributes.

    Slots: "param.weight", "param.out_proj.weight", "param.scale" for a plain attribute
    `self.scale`, "param.tables.0" in a list or dict. An engine's block cache is no parameter, and
    as large as the memory left: it is left out.
    """
    found = [
        (f"param.{name}", tensor)
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
    ]
    for name, value in module.__dict__.items():
        if (name.startswith("_") and name != "_flat_weights") or is_block_cache(name, value):
            continue
        if isinstance(value, torch.Tensor):
            found.append((f"param.{name}", value))
        elif isinstance(value, dict):
            found += [
                (f"param.{name}.{key}", item)
                for key, item in value.items()
                if isinstance(item, torch.Tensor)
            ]
        elif isinstance(value, (list, tuple)):
            found += [
                (f"param.{name}.{key}", item)
                for key, item in enumerate(value)
                if isinstance(item, torch.Tensor)
            ]
    return found
