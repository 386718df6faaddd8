"""Tensors of one module call: what it is given, holds, changes and returns, as records and refs of
its frame.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from whence.frameworks import torch_arrays as tensors
from whence.frameworks.torch_arrays import address_of
from whence.frameworks.torch_trees import CLOSED, NESTING, SIMPLE, ObjectSnapshot, is_plain_object
from whence.instrument.session import Session
from whence.instrument.torch.caller_code import is_block_cache, tensors_of
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import HeldTensor, ModuleInfo, home_of, is_boundary
from whence.instrument.torch.tensor_content import Pending
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.records import Ref
from whence.records.slots import is_param

_TENSOR = torch.Tensor
_MAX_OBJECTS = 64  # of so many objects it is looked at the end of a step which are gone


class CallTensors:
    """Records the tensors of module calls."""

    def __init__(self, session: Session, registry: TensorRegistry) -> None:
        self._session, self._registry = session, registry
        self._takes_inputs = session.selector.slots("input")
        self._takes_outputs = session.selector.slots("output")
        self._objects: dict[int, ObjectSnapshot] = {}

    def clear(self) -> None:
        """Forget the objects that were met."""
        self._objects.clear()

    def prune(self) -> None:
        """Forget objects that are gone."""
        if len(self._objects) > _MAX_OBJECTS:
            self._objects = {k: w for k, w in self._objects.items() if w.ref() is not None}

    # ---- before the call

    def take_inputs(
        self, frame: ModuleFrame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """(slot, tensor) of everything this call was handed, recorded where inputs are wanted."""
        self._take_parameters(frame)
        if len(args) == 1 and not kwargs and type(args[0]) is _TENSOR and not args[0].is_nested:
            inputs = [("input.0", args[0])]
        else:
            walk = _ValueWalk(self._objects, frame)
            for i, value in enumerate(args):
                walk.collect(value, f"input.{i}")
            for name, value in kwargs.items():
                walk.collect(value, f"input.{name}")
            inputs, frame.arguments = walk.tensors, walk.arguments
        if self._takes_inputs:
            refs, forms, given = frame.refs, frame.forms, frame.inputs
            record_of = self._registry.record_of
            for slot, tensor in inputs:
                number, edge, form = record_of(tensor, slot, frame)
                refs.append(Ref(slot, number, edge))
                forms.append((slot, form))
                version = None if tensor.is_inference() else tensor._version
                given.append((slot, tensor, version, number))
        return inputs

    # ---- after the call

    def take_results(self, frame: ModuleFrame, out: Any, error: str) -> None:
        """Record mutations and outputs of a call that ends."""
        info, leaf = frame.info, frame.children == 0
        if not error:
            if frame.inputs:
                self._take_mutated_inputs(frame)
            if frame.objects:
                self._take_mutated_objects(frame)
            if info.entries:
                self._take_mutated_parameters(frame, leaf)
            self._take_outputs(frame, out)
        if info.entries is None and not (leaf and info.branches):
            self._take_parameters(frame)  # of a lazy module: the call made them
        if info.deep and not leaf and is_boundary(info, frame.module):
            # It ran uncompiled: each module below it has what it holds.
            info.deep, info.entries, info.sizes = False, None, (-1, -1, -1)
            frame.refs = [r for r in frame.refs if not is_param(r.slot) or "." not in r.slot[6:]]
        if leaf and info.branches and not info.deep:
            # None of its children was called, so their parameters are its own, from now on.
            info.deep, info.entries, info.sizes = True, None, (-1, -1, -1)
            frame.refs = [r for r in frame.refs if not is_param(r.slot)]
            self._take_parameters(frame)

    def _take_mutated_inputs(self, frame: ModuleFrame) -> None:
        for slot, tensor, version, number in frame.inputs:
            # Inference tensors carry no version: their bytes are looked at again.
            if version is not None:
                if tensor._version == version:
                    continue
            elif self._registry.is_as_it_was(tensor, number):
                continue
            mutated = "mutated" + slot[5:]
            record, edge, _ = self._registry.record_of(tensor, mutated, frame)
            if record is not number and record != number:
                frame.refs.append(Ref(mutated, record, edge))
                frame.results.append((mutated, tensor))

    def _take_mutated_objects(self, frame: ModuleFrame) -> None:
        for slot, holder in frame.objects:
            # Of its inference tensors the bytes are looked at where it was handed to last, and at
            # the root.
            innermost = frame.parent is None or holder.holder == frame.order
            for path, tensor, certain in holder.changed(unversioned=innermost):
                mutated = "mutated" + slot[5:] + path
                record, edge, _ = self._registry.record_of(
                    tensor, mutated, frame, grows=(holder, path)
                )
                if isinstance(record, Pending):
                    record.certain = certain
                if certain or not edge:
                    frame.refs.append(Ref(mutated, record, edge))
                    frame.results.append((mutated, tensor))

    def _take_mutated_parameters(self, frame: ModuleFrame, leaf: bool) -> None:
        for entry in frame.info.entries or ():
            tensor = entry.tensor()
            if entry.last_ref is None or tensor is None or tensor.is_inference():
                continue
            # Batch norm writes its running statistics without a new version. The buffers of a
            # scripted module are no dict and have no get.
            name, buffers = entry.slot[6:], frame.module._buffers
            if tensor._version != entry.version or (
                frame.training and leaf and name in buffers and tensor is buffers[name]
            ):
                mutated = "mutated" + entry.slot[5:]
                number, edge, _ = self._registry.record_of(tensor, mutated, frame)
                if number == entry.last_ref.record:
                    continue
                entry.version, entry.last_ref = tensor._version, Ref(entry.slot, number, "identity")
                entry.remember(tensor)
                frame.refs.append(Ref(mutated, number, edge))
                frame.results.append((mutated, tensor))

    def _take_outputs(self, frame: ModuleFrame, out: Any) -> None:
        if not self._takes_outputs:
            return
        if type(out) is _TENSOR and not out.is_nested:
            outputs = [("output.0", out)]
        else:
            walk = _ValueWalk(self._objects, None)
            several = isinstance(out, (list, tuple, dict)) or dataclasses.is_dataclass(out)
            walk.collect(out, "output" if several else "output.0")
            outputs = walk.tensors
        for slot, tensor in outputs:
            number, edge, _ = self._registry.record_of(tensor, slot, frame)
            frame.refs.append(Ref(slot, number, edge))
        frame.results += outputs

    # ---- what a module holds

    def _take_parameters(self, frame: ModuleFrame) -> None:
        """Parameters, buffers and plain tensor attributes of the module; of the modules below it
        too where those are never called.
        """
        info, module = frame.info, frame.module
        if info.entries is None and is_boundary(info, module):
            info.deep = True  # it reads what the modules below it hold, and may change it
        entries = info.entries
        sizes = len(module._parameters), len(module._buffers), len(module._modules)
        if entries is None or info.sizes != sizes:
            entries = self._entries_of(info, module)
            if entries is None:  # they are made by the call itself
                return
            info.sizes, frame.op_type = sizes, info.op_type
        if not entries:
            return
        refs = frame.refs
        calls = info.root.calls
        trains = frame.training or info.root.has_stepped  # a model may be trained as in evaluation
        all_change = trains and torch.is_grad_enabled()
        for entry in entries:
            tensor = entry.tensor()
            if tensor is None:
                continue
            version = None if tensor.is_inference() else tensor._version
            ref = entry.last_ref
            unchanged = (
                ref is not None and entry.version == version and address_of(tensor) == entry.pointer
            )
            if unchanged and entry.looked != calls:
                # `p.data.add_()`, numpy and fused optimizers leave the version as it is: a training
                # step changes all, elsewhere a sample shows it.
                unchanged = not all_change and entry.looks_the_same()
            entry.looked = calls
            if not unchanged or ref is None:
                number, edge, _ = self._registry.record_of(
                    tensor, entry.slot, frame, parameter=True
                )
                ref = Ref(entry.slot, number, edge)
                entry.last_ref = ref if edge else Ref(entry.slot, number, "identity")
                entry.version, entry.placement = version, frame.placements.get(entry.slot)
                entry.remember(tensor)
            elif entry.placement is not None:
                frame.placements[entry.slot] = entry.placement
            refs.append(ref)

    def _entries_of(self, info: ModuleInfo, module: Any) -> list[HeldTensor] | None:
        """What the module holds now, None while a part of it is lazy."""
        if info.entries is None:
            for name in [n for n, value in module.__dict__.items() if is_block_cache(n, value)]:
                text = f"{name}: a cache that the module keeps, 64 MiB or more, and no parameter"
                self._session.note("not-captured", text, info.scope)
        info.op_type = type(module).__name__
        info.branches = any(child is not None for child in module._modules.values())
        if info.deep or not info.branches:
            named = tensors_of(module)
        else:
            tables = (module._parameters, module._buffers)
            named = [
                (f"param.{n}", t) for table in tables for n, t in table.items() if t is not None
            ]
        if any(torch.nn.parameter.is_lazy(t) for _, t in named):
            info.entries = None
            return None
        info.entries = []
        for slot, tensor in named:
            if not tensors.answers(tensor):
                text = f"{slot}: {type(tensor).__name__}, {CLOSED}"
                self._session.note("not-captured", text, info.scope)
                continue
            parts = tensors.plain(tensor) if hasattr(type(tensor), "__tensor_flatten__") else None
            if parts is None or len(parts) == 1:
                info.entries.append(HeldTensor(slot, tensor, home_of(module, slot[6:])))
            else:
                info.entries += [HeldTensor(f"{slot}.{name}", part, None) for name, part in parts]
        return info.entries


class _ValueWalk:
    """Collects the tensors of arguments or results, in any nesting, and simple values.

    objects: plain objects that were met before, by id. frame: the call whose arguments these are,
    None for results.
    """

    def __init__(self, objects: dict[int, ObjectSnapshot], frame: ModuleFrame | None) -> None:
        self._objects, self._frame = objects, frame
        self.tensors: list[tuple[str, Any]] = []
        self.arguments: dict[str, Any] = {}

    def collect(self, value: Any, slot: str) -> None:
        """Collect what `value` holds, under slots that begin with `slot`."""
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and not value.is_nested:
                self.tensors.append((slot, value))
            else:
                self._collect_parts(value, slot)
        elif value is None or slot.count(".") > NESTING:
            return
        elif isinstance(value, SIMPLE):
            if not isinstance(value, str) or len(value) <= 200:
                self.arguments[slot] = value
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                name = key if isinstance(key, SIMPLE) else type(key).__name__
                self.collect(item, f"{slot}.{name}")
        elif isinstance(value, torch.dtype):
            self.arguments[slot] = str(value).removeprefix("torch.")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                self.collect(getattr(value, field.name, None), f"{slot}.{field.name}")
        elif is_plain_object(value):
            self._collect_object(value, slot)

    def _collect_parts(self, value: Any, slot: str) -> None:
        """A tensor of a subclass, or a nested one: itself, or the plain tensors it consists of."""
        if not tensors.answers(value):
            self.arguments[slot] = f"{type(value).__name__}, {CLOSED}"
            return
        parts = tensors.plain(value) if hasattr(type(value), "__tensor_flatten__") else None
        if value.is_nested and value.layout is torch.strided:
            parts = [("values", value.values()), ("sizes", value._nested_tensor_size())]
        if parts is None or len(parts) == 1:
            self.tensors.append((slot, value))
        else:
            self.tensors += [(f"{slot}.{name}", tensor) for name, tensor in parts]
            self.arguments[slot] = f"{type(value).__name__}({', '.join(name for name, _ in parts)})"

    def _collect_object(self, value: Any, slot: str) -> None:
        """An object that holds tensors: all are listed at roots and where it is first met, else
        only what changed.
        """
        frame, holder = self._frame, self._objects.get(id(value))
        first = holder is None or holder.ref() is not value
        if first or holder is None:
            holder = self._new_object(value)
        if frame is None:
            self.tensors.extend((slot + path, tensor) for path, tensor in holder.items())
            return
        if holder.places or holder.sizes:
            frame.objects.append((slot, holder))
        holder.holder = frame.order
        fresh = (
            list(holder.items())
            if first or frame.parent is None
            else [(path, tensor) for path, tensor, _ in holder.changed()]
        )
        if frame.parent is None and not first:
            holder.walk(value)
        self.tensors.extend((slot + path, tensor) for path, tensor in fresh)

    def _new_object(self, value: Any) -> ObjectSnapshot:
        place, objects = id(value), self._objects

        def gone(ref: Any) -> None:
            if place in objects and objects[place].ref is ref:
                del objects[place]

        objects[place] = holder = ObjectSnapshot(value, gone)
        return holder
