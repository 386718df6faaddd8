"""One call of an operator: its tensors by the names of the schema, and its other arguments as plain
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from whence.frameworks.torch_arrays import answers, encoded_setting, parts_of, tensors_in
from whence.frameworks.torch_trees import CLOSED
from whence.instrument.torch.overload import Overload
from whence.records import Placement, Ref, Statistics
from whence.records.marks import READS_UNWRITTEN, NoProgram
from whence.records.slots import is_input, is_output

_MAX_TEXT = 1000


class OperatorCall:
    """A call of an operator that is being recorded. inputs: (slot, tensor), in schema order.

    site: (enclosing frame or region, scope, phase, order of the forward operator if this is its
    backward operator, else -1, source line). called: positional and named arguments. sights:
    (record, edge, form) by slot. Serves as the `Sighter` of its tensors: scope, op_type and keep
    tell for which call they are recorded and whether elements are wanted.
    """

    __slots__ = (
        "_named_arguments", "above", "arguments", "called", "forward", "inputs", "is_written",
        "keep", "notes", "occurrence", "op_type", "order", "overload", "phase", "place",
        "placements", "ranges", "refs", "scope", "seconds", "sights", "source", "tally", "unseen",
    )  # fmt: skip
    _named_arguments: dict[str, Any] | None
    occurrence: int
    place: int
    ranges: dict[str, list[Any]] | None
    tally: Any

    def __init__(
        self,
        overload: Overload,
        order: int,
        site: tuple[Any, str, str, int, str],
        called: tuple[Any, Any],
    ) -> None:
        self.overload, self.op_type, self.order = overload, overload.base, order
        self.above, self.scope, self.phase, self.forward, self.source = site
        self.called = called
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
        """Its number in the call tree. Operators are counted separately from modules, so that
        modules keep the numbers they have without operators.
        """
        return (
            f"op{self.place}" if self.above.number == "0" else f"{self.above.number}_op{self.place}"
        )

    # ---- before it runs

    def take(self) -> None:
        """Sort the arguments into tensors (`inputs`) and plain values (`arguments`)."""
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
        """All arguments by name."""
        if self._named_arguments is None:
            args, kwargs = self.called
            self._named_arguments = dict(zip(self.overload.positional, args)) | kwargs
        return self._named_arguments

    def _tensor(self, slot: str, tensor: Any) -> dict[str, str]:
        if not answers(tensor):
            self.unseen = self.unseen or f"takes a {type(tensor).__name__}, {CLOSED}"
            return {"object": type(tensor).__name__}
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            self.unseen = self.unseen or "takes a parameter that is not there yet"
            return {"object": type(tensor).__name__}
        inner = parts_of(tensor)
        if inner is None:
            self.inputs.append((slot, tensor))
        else:
            self.inputs += [(f"{slot}.{part}", t) for part, t in inner]
            self.unseen = self.unseen or f"takes a {type(tensor).__name__}"
        return {"slot": slot}

    def _encoded(self, value: Any) -> Any:
        """A value in the encoding of `records.Operation`, devices by name."""
        if value is None or value is True or value is False or type(value) is int:
            return value
        if isinstance(value, str):
            return value[:_MAX_TEXT]
        if isinstance(value, (list, tuple)):
            return [self._encoded(item) for item in value]
        if isinstance(value, torch.SymFloat):
            value = float(value)
        if isinstance(value, torch.Generator):
            return {"generator": str(value.device)}
        encoded = encoded_setting(value, names_device=True)
        if encoded is not None:
            return encoded
        self.unseen = self.unseen or f"takes a {type(value).__name__}"
        return {"object": type(value).__name__}

    def states(self) -> Iterator[tuple[str, Any]]:
        """(device type, generator state) if this call draws random numbers."""
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
        """Add a tensor that was recorded. sight: (record, edge, form). why: reason why its elements
        have no meaning, "" if they have.
        """
        self.sights[slot] = sight
        self.refs.append(Ref(slot, sight[0], sight[1]))
        if why and is_input(slot) and slot not in self.overload.overwritten:
            self.unseen = self.unseen or READS_UNWRITTEN

    # ---- after it ran

    def results(self, out: Any) -> list[tuple[str, Any, str]]:
        """(slot, tensor, slot of the written argument that this tensor is, or "") of what the call
        wrote, then of what it returned.
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
        """(first slot, slot) of tensors that share a storage where the schema does not already say
        so.
        """
        view = self.overload.view
        if len(self.inputs) < 2 and not view:
            return ()
        # By the schemas, only the result of a view shares memory with an input.
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

    def form_of(self, name: str) -> Any:
        """An argument as plain values, {"slot": ...} where it is a tensor."""
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
        """A function that adds figures to the range of a slot of this call; it may be called
        later.
        """
        if self.ranges is None:
            self.ranges = {}
        ranges = self.ranges.setdefault(slot, [None, None, 0, 0])

        def take(figures: Statistics) -> None:
            widen(ranges, figures.min, figures.max, figures.nan, figures.inf)

        return take


_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter


def widen(ranges: list[Any], low: float | None, high: float | None, nan: int, inf: int) -> None:
    """Extend a range [min, max, NaN count, Inf count] in place by the figures of another tensor."""
    if low is not None:
        ranges[0] = low if ranges[0] is None else min(ranges[0], low)
    if high is not None:
        ranges[1] = high if ranges[1] is None else max(ranges[1], high)
    ranges[2] += nan
    ranges[3] += inf
