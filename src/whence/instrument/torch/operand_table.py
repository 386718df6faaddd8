"""Maps the tensors of a recorded call to the operands of its program.

A tensor is recognised by storage, offset, shape, strides and dtype, since Python objects do not
last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from whence.frameworks.torch_arrays import NAMES, encoded_setting, tensors_in
from whence.frameworks.torch_schema import OperatorSchema
from whence.records.marks import EMPTY_IS_READ
from whence.records.slots import is_param

MAX_CONSTANT_BYTES = 1 << 20

Operand = dict[str, Any]
_PLAIN = {bool, int, str}


class Stop(Exception):
    """A recording cannot go on; its text is the reason why there is no program."""


class RecordedOperation(NamedTuple):
    """An operator that ran, with its arguments as operands. guard: the number that it took out of a
    tensor; schema: None for an operation that the recorder added itself.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    guard: Any = None
    schema: OperatorSchema | None = None


def layout(tensor: Any) -> tuple[Any, ...]:
    """The key by which a tensor is recognised while its storage lives. A lazy conjugate over the
    same memory has another key.
    """
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()),
    )


class OperandTable:
    """The operands by the layout of their tensors, and the operations recorded so far.

    find: returns the slot of a tensor that is not known yet but visible to the call, "" for any
    other. watch_versions: stop where a tensor's version shows a write without an operator; False
    for code that may write through `.data`, which has its own version counter. versions: (version,
    epoch) at the last sight of a tensor; epochs: number of operator writes to a storage. owners:
    (operand, dtype, offset, elements) in a storage, for views that no operator made. pinned:
    layouts of tensors that stay float32 in a 16-bit run. fixed: (input, axis, extent) that a replay
    must share. hole: why an argument of the current operator is unknown. detached: for each tensor
    argument of the current operator, whether it requires no gradient. takes_shards: follow
    operators on DTensors as operators on the whole tensor.
    """

    def __init__(self, find: Callable[[Any], str] | None, *, watch_versions: bool = True) -> None:
        self.find, self._watch_versions = find, watch_versions
        self.takes_shards = False
        self.operations: list[RecordedOperation] = []
        self.operands: dict[tuple[Any, ...], Operand] = {}
        self.versions: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.epochs: dict[int, int] = {}
        self.alive: dict[int, Any] = {}
        self.owners: dict[int, list[tuple[Operand, Any, int, int]]] = {}
        self.replaced: set[int] = set()
        self.unwritten: set[int] = set()
        self.pinned: set[tuple[Any, ...]] = set()
        self.constants: list[Any] = []
        self.guarded = False
        self.hole = ""
        self.notes: set[str] = set()
        self.inputs: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.input_dtypes: list[str] = []
        self.params: dict[tuple[Any, ...], Any] = {}
        self.param_extents: set[int] = set()
        self.fixed: set[tuple[int, int, int]] = set()
        self.grad: set[str] = set()
        self.detached: list[bool] = []
        self.base: Any = None

    def forget_tensors(self) -> None:
        """Drop all references to tensors except constants."""
        self.operands, self.versions, self.alive = {}, {}, {}
        self.owners, self.params = {}, {}

    def new_input(self, slot: str, tensor: Any) -> Operand:
        self.require_plain(tensor, slot)
        operand = {"in": len(self.inputs)}
        self.inputs.append(slot)
        self.shapes.append(tuple(tensor.shape))
        if tensor.requires_grad:
            self.grad.add(slot)
        self.input_dtypes.append(NAMES.get(tensor.dtype, ""))
        if self.base is None and tensor.is_floating_point():
            self.base = tensor.dtype
        self.adopt(tensor, operand)
        self.pinned.discard(layout(tensor))
        return operand

    def new_param(self, slot: str, tensor: Any) -> Operand:
        self.require_plain(tensor, slot)
        operand = {"param": slot}
        self.adopt(tensor, operand)
        if tensor.requires_grad:
            self.grad.add(slot)
        self.param_extents.update(tensor.shape)
        self.params[layout(tensor)] = tensor
        if self.base is None and tensor.is_floating_point():
            self.base = tensor.dtype
        return operand

    def renew(self, slot: str, tensor: Any, key: tuple[Any, ...]) -> None:
        """Treat this tensor as an input from here on."""
        if self.operands.pop(key, None) is not None:
            self.replaced.add(key[0])
            self.owners.pop(key[0], None)
        self.new_input(slot, tensor)

    def boundary(self, tensor: Any) -> Operand:
        if not self.is_plain(tensor):
            return {
                "hole": f"hands on a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
            }
        operand = self.ref(tensor)
        self.check_written(tensor)
        return operand

    def is_foreign(self, tensor: Any) -> bool:
        """Whether the tensor is of a subclass whose operators cannot be followed."""
        is_whole = self.takes_shards and type(tensor).__name__ == "DTensor"
        return _is_in_parts(tensor) and not is_whole

    def is_plain(self, tensor: Any) -> bool:
        """Whether a program can read this tensor."""
        return is_strided(tensor) and not self.is_foreign(tensor)

    def require_plain(self, tensor: Any, name: str) -> None:
        if self.is_foreign(tensor):
            raise Stop(f"{name} is a {type(tensor).__name__}, not a plain tensor")
        if tensor.layout is not torch.strided:
            raise Stop(f"{name} has the layout {str(tensor.layout).removeprefix('torch.')}")
        if tensor.dtype not in NAMES:
            raise Stop(f"{name} has the dtype {tensor.dtype}")

    def adopt(self, tensor: Any, operand: Operand) -> None:
        key = layout(tensor)
        owners = self.owners.setdefault(self.hold(tensor, key[0]), [])
        if key in self.operands:
            return
        self.operands[key] = operand
        self.see(tensor, key)
        span = tensor.numel() if tensor.is_contiguous() else -1
        owners.append((operand, tensor.dtype, tensor.storage_offset(), span))

    def adopt_result(
        self, tensor: Any, key: tuple[Any, ...], operand: Operand, *, unwritten: bool
    ) -> bool:
        """Register the result of an operation under `operand`. Returns whether its memory is new.

        unwritten: the operator allocates memory and writes nothing to it.
        """
        fresh = key[0] not in self.alive
        if fresh:
            self.hold(tensor, key[0])
            if unwritten and tensor.numel():
                self.unwritten.add(key[0])
            if tensor.is_contiguous():
                self.owners.setdefault(key[0], []).append(
                    (operand, tensor.dtype, tensor.storage_offset(), tensor.numel())
                )
        self.operands[key] = operand
        return fresh

    def hold(self, tensor: Any, storage: int) -> int:
        # A weak reference keeps the address of the storage from being reused, but frees its bytes.
        if storage not in self.alive:
            self.alive[storage] = StorageWeakRef(tensor.untyped_storage())
        return storage

    def see(self, tensor: Any, key: tuple[Any, ...]) -> None:
        if not tensor.is_inference():
            self.versions[key] = (tensor._version, self.epochs.get(key[0], 0))

    def ref(self, tensor: Any) -> Operand:
        if self.is_foreign(tensor):
            raise Stop(f"works on a {type(tensor).__name__}, not a plain tensor")
        key = layout(tensor)
        operand = self.operands.get(key)
        if operand is None:
            operand = self._provenance(tensor, key)
            if "hole" in operand:
                self.hole = self.hole or operand["hole"]
            return operand
        if "hole" in operand:
            self.hole = self.hole or operand["hole"]
            return operand
        if self._watch_versions and not tensor.is_inference():
            version, epoch = self.versions.get(key, (-1, -1))
            if epoch != self.epochs.get(key[0], 0):  # not seen since it was made or last written
                self.see(tensor, key)
            elif version != tensor._version:
                raise Stop("a tensor changed without an operator that wrote it")
        return operand

    def _provenance(self, tensor: Any, key: tuple[Any, ...]) -> Operand:
        """The operand of a tensor that no operator returned: another view of known memory, a
        parameter cast by autocast, a tensor that `find` knows, or else a hole with the reason.
        """
        for operand, dtype, offset, count in self.owners.get(key[0], ()):
            span = (
                1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
                if tensor.numel()
                else 0
            )
            start = tensor.storage_offset() - offset
            if dtype == tensor.dtype and not key[5] and start >= 0 and start + span <= count:
                if "in" in operand:
                    self.fixed.update(
                        (operand["in"], axis, n)
                        for axis, n in enumerate(self.shapes[operand["in"]])
                    )
                elif "op" in operand:
                    self.fixed.update(
                        (k, axis, n)
                        for k, shape in enumerate(self.shapes)
                        for axis, n in enumerate(shape)
                    )
                return self.emit(
                    "aten.as_strided.default",
                    (operand, list(tensor.shape), list(tensor.stride()), start),
                    {},
                    tensor,
                    key,
                )
        if tensor.dtype in (torch.bfloat16, torch.float16):
            # Autocast casts a parameter once and hands the copy out again without an operator.
            for key_of_param, param in self.params.items():
                if (
                    param.shape == tensor.shape
                    and param.is_floating_point()
                    and torch.equal(param.detach().to(tensor.dtype), tensor.detach())
                ):
                    kwargs = {"dtype": {"dtype": NAMES[tensor.dtype]}}
                    return self.emit(
                        "aten._to_copy.default", (self.operands[key_of_param],), kwargs, tensor, key
                    )
        slot = self.find(tensor) if self.find is not None else ""
        if slot:
            return self.new_param(slot, tensor) if is_param(slot) else self.new_input(slot, tensor)
        shape = tuple(tensor.shape)
        return self.unknown(
            tensor,
            key,
            "reads a tensor that is neither an input, a parameter nor made inside "
            f"({tensor.dtype} {shape})",
        )

    def unknown(self, tensor: Any, key: tuple[Any, ...], reason: str) -> Operand:
        self.operands[key] = {"hole": reason}
        self.hold(tensor, key[0])
        return self.operands[key]

    def poison(self, storage: int, reason: str) -> None:
        """Make all tensors over this memory unknown. reason: why."""
        for key in self.operands:
            if key[0] == storage:
                self.operands[key] = {"hole": reason}
        self.owners.pop(storage, None)

    def emit(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor: Any,
        key: tuple[Any, ...],
    ) -> Operand:
        operand = self.operands[key] = self.add(name, *args, **kwargs)
        self.hold(tensor, key[0])
        self.see(tensor, key)
        return operand

    def add(self, name: str, *args: Any, **kwargs: Any) -> Operand:
        """Append an operation of the recorder's own. Returns its result as an operand."""
        self.operations.append(RecordedOperation(name, args, kwargs))
        return {"op": [len(self.operations) - 1, 0]}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._argument(value)
        if isinstance(value, (list, tuple)):
            return [self.encode(item) for item in value]
        return _setting(value)

    def _argument(self, tensor: Any) -> Operand:
        """The operand of a tensor argument of an operator."""
        self.detached.append(not tensor.requires_grad)
        return self.ref(tensor)

    def check_written(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.numel() and tensor.untyped_storage()._cdata in self.unwritten:
                self.hole = self.hole or EMPTY_IS_READ

    def constant(self, tensor: Any, key: tuple[Any, ...]) -> None:
        if self.guarded:
            raise Stop("makes a tensor from Python data after reading a number that rounding moves")
        self.require_plain(tensor, "a constant")
        if tensor.numel() * tensor.element_size() > MAX_CONSTANT_BYTES:
            size = f"{tensor.numel() * tensor.element_size()} bytes"
            self.unknown(
                tensor,
                key,
                f"makes a tensor of {size} from Python data (at most {MAX_CONSTANT_BYTES})",
            )
            return
        if tensor.dtype is torch.float32 and tensor.numel():
            self.pinned.add(key)  # float32 by default in a 16-bit run too
        self.operands[key] = {"const": len(self.constants)}
        self.constants.append(tensor.detach().clone())
        self.hold(tensor, key[0])
        self.see(tensor, key)


def _is_in_parts(tensor: Any) -> bool:
    """Whether the tensor is of a subclass that consists of other tensors."""
    return hasattr(tensor, "__tensor_flatten__")


def is_strided(tensor: Any) -> bool:
    """Whether the tensor is strided and of a known dtype."""
    return tensor.layout is torch.strided and tensor.dtype in NAMES


def is_plain(tensor: Any) -> bool:
    """Whether the tensor is strided, of a known dtype, and no subclass that consists of other
    tensors.
    """
    return is_strided(tensor) and not _is_in_parts(tensor)


def _setting(value: Any) -> Any:
    """An argument that is not a tensor, as an operand. Raises Stop for one that cannot be
    recorded.
    """
    if isinstance(value, torch.dtype) and value not in NAMES:
        raise Stop(f"uses the dtype {value}")
    if isinstance(value, torch.Generator):
        raise Stop("takes random numbers from a generator")
    encoded = encoded_setting(value)
    if encoded is None:
        raise Stop(f"an operator takes a {type(value).__name__}")
    return encoded
