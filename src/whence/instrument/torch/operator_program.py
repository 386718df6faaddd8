"""One call of an operator as a program of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from whence.frameworks.torch_arrays import NAMES, tensors_in
from whence.frameworks.torch_schema import METADATA_ONLY
from whence.instrument.torch.operator_call import OperatorCall
from whence.records import Operation, Program
from whence.records.program import identified
from whence.records.slots import is_output

_TENSOR = torch.Tensor
_MAX_PROGRAMS = 1 << 14
_NOT_NULL = 1 << 12
_programs: dict[tuple[Any, ...], tuple[Program | None, str]] = {}


def program_of(call: OperatorCall, out: Any) -> tuple[Program | None, str]:
    """The program of a call that returned `out`, or the reason why there is none. Calls of one form
    share a program.
    """
    overload = call.overload
    if call.unseen:
        return None, call.unseen
    if overload.uninitialised:
        return None, "makes memory that is not written"
    if type(out) is not _TENSOR and not any(True for _ in tensors_in(out)) and not overload.writes:
        return None, "returns no tensor"
    if overload.writes and _writes_into_another(call):
        return None, "writes into memory that two of its inputs share"
    inference = torch.is_inference_mode_enabled()
    under_grad = overload.by_grad_mode and torch.is_grad_enabled()
    key = (
        overload.name,
        tuple([(slot, sight[2]) for slot, sight in call.sights.items()]),
        repr(call.arguments),
        torch.get_default_dtype(),
        inference,
        under_grad,
        tuple([t.requires_grad for _, t in call.inputs]) if inference else (),
    )
    program_or_reason = _programs.get(key)
    if program_or_reason is None:
        if len(_programs) > _MAX_PROGRAMS:
            _programs.clear()
        program_or_reason = _programs[key] = _written(call, out, inference, under_grad)
    return program_or_reason


def _writes_into_another(call: OperatorCall) -> bool:
    """Whether a call writes elements that another of its inputs also holds."""
    written_slots = tuple(f"input.{name}" for name in call.overload.writes)
    written = [(s, t) for s, t in call.inputs if s.startswith(written_slots)]
    return any(
        slot != read_slot and _share_elements(tensor, read)
        for slot, tensor in written
        for read_slot, read in call.inputs
    )


class _Memory:
    """Describes the bytes of a strided tensor to numpy, counted from the start of its storage, for
    `np.shares_memory`. The address is not real.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(size * step for step in tensor.stride()),
            "data": (_NOT_NULL + size * tensor.storage_offset(), False),
        }


def _share_elements(tensor: torch.Tensor, read: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common; parts of one storage need not. No element is
    read.
    """
    try:
        is_shared = tensor.untyped_storage()._cdata == read.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    places = np.asarray(_Memory(tensor)), np.asarray(_Memory(read))
    return is_shared and bool(np.shares_memory(*places))


def _written(
    call: OperatorCall, out: Any, inference: bool, under_grad: bool
) -> tuple[Program | None, str]:
    overload, inputs = call.overload, _Inputs()
    for slot, tensor in call.inputs:
        if tensor.layout is not torch.strided or tensor.dtype not in NAMES:
            return None, f"takes a tensor of {tensor.dtype}, {tensor.layout}"
        inputs.add(slot, tensor, slot in overload.overwritten)
    operands = inputs.operands
    args, kwargs = call.called
    operation = Operation(
        METADATA_ONLY.get(overload.name, overload.name),
        tuple(_operand(call.form_of(k), operands) for k, _ in zip(overload.positional, args)),
        {
            k: _operand(call.form_of(k), operands)
            for k, v in kwargs.items()
            if not (k == "pin_memory" or v is None)
        },
    )
    program = Program(
        id="",
        operations=(*inputs.operations, operation),
        inputs=tuple(inputs.slots),
        outputs=_outputs(call, out, operands, len(inputs.operations)),
        base=inputs.base,
        input_dtypes=tuple(inputs.dtypes),
        default_dtype=NAMES[torch.get_default_dtype()],
        # An in-place transpose has already changed the axes of its operand here.
        fixed=tuple(inputs.extents)
        if (overload.sizes or overload.overwritten) and overload.name not in METADATA_ONLY
        else (),
        inference=inference,
        grad=tuple(slot for slot, t in call.inputs if t.requires_grad and slot in inputs.slots)
        if inference
        else (),
        notes=("in-place",) if overload.writes or overload.statistics else (),
        under_grad=under_grad,
    )
    return identified(program), ""


class _Inputs:
    """The tensors of a call as inputs of its program. operands: by slot. extents: (input, axis,
    size) of all inputs. base: dtype of the first floating-point tensor.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.operands: dict[str, Any] = {}
        self.slots: list[str] = []
        self.dtypes: list[str] = []
        self.extents: list[tuple[int, int, int]] = []
        self.base = ""

    def add(self, slot: str, tensor: Any, overwritten: bool) -> None:
        """Add a tensor. overwritten: the operator overwrites it, so only its shape, strides and
        dtype matter.
        """
        dtype = NAMES[tensor.dtype]
        if not self.base and tensor.is_floating_point():
            self.base = dtype
        if overwritten:
            form = ([*tensor.shape], [*tensor.stride()])
            self.operands[slot] = {"op": [len(self.operations), 0]}
            self.operations.append(
                Operation("aten.empty_strided.default", form, {"dtype": {"dtype": dtype}})
            )
            return
        place = len(self.slots)
        self.operands[slot] = {"in": place}
        self.extents += [(place, axis, n) for axis, n in enumerate(tensor.shape)]
        self.slots.append(slot)
        self.dtypes.append(dtype)


def _outputs(
    call: OperatorCall, out: Any, operands: dict[str, Any], place: int
) -> tuple[tuple[str, Any], ...]:
    """(slot, operand) of what the operation at index `place` returns and writes."""
    outputs: list[tuple[str, Any]] = []
    position = 0
    for slot, _, _ in call.results(out):
        if is_output(slot):
            outputs.append((slot, {"op": [place, position]}))
            position += 1
        elif (into := f"input{slot[7:]}") in operands:
            renewed = call.overload.name in METADATA_ONLY
            outputs.append((slot, {"op": [place, 0]} if renewed else operands[into]))
    return tuple(outputs)


def _operand(value: Any, operands: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if "slot" in value:
            return operands[value["slot"]]
        return {"device": ""} if "device" in value else value
    return [_operand(item, operands) for item in value] if isinstance(value, list) else value
