"""What programs bind to an `IOBinding`: which value is read from where, and which result goes
where. The binding itself does not tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from whence.instrument.engines.values import Seen
from whence.instrument.onnxruntime.values import at_pointer, seen_values

_METHODS = (
    "bind_cpu_input",
    "bind_input",
    "bind_ortvalue_input",
    "bind_output",
    "bind_ortvalue_output",
    "clear_binding_inputs",
    "clear_binding_outputs",
)


class Bindings:
    """Bindings of a process, as their methods were called. Keeps none of them alive."""

    def __init__(self) -> None:
        self._inputs: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._outputs: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def methods(self) -> Iterator[tuple[str, Callable[..., None]]]:
        """(name of a method of IOBinding, what notes that it was called with these arguments)."""
        for name in _METHODS:
            yield name, getattr(self, f"_{name}")

    def inputs(self, binding: Any) -> dict[str, list[tuple[str, Seen]]]:
        """What its inputs are now, by name, as far as it is known."""
        bound = dict(getattr(binding, "_numpy_obj_references", None) or {})
        bound |= {k: v for k, v in (getattr(binding, "_bound_inputs", None) or {}).items() if v}
        bound |= self._inputs.get(binding, {})
        return {
            name: list(seen_values(value, f"input.{name}"))
            if not isinstance(value, Seen)
            else [(f"input.{name}", value)]
            for name, value in bound.items()
        }

    def outputs(self, binding: Any) -> list[tuple[str, Any]]:
        """(name, OrtValue) of its results."""
        names = self._outputs.get(binding) or getattr(binding, "_bound_outputs", None) or {}
        values = list(binding.get_outputs())
        if len(names) != len(values):
            return [(str(place), value) for place, value in enumerate(values)]
        return list(zip(names, values, strict=True))

    # ---- what was called

    def _bind_cpu_input(self, binding: Any, name: str, arr_on_cpu: Any) -> None:
        self._inputs.setdefault(binding, {})[name] = arr_on_cpu

    def _bind_input(
        self,
        binding: Any,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Any,
        buffer_ptr: int,
    ) -> None:
        seen = at_pointer(element_type, shape, str(device_type), buffer_ptr)
        self._inputs.setdefault(binding, {})[name] = seen

    def _bind_ortvalue_input(self, binding: Any, name: str, ortvalue: Any) -> None:
        self._inputs.setdefault(binding, {})[name] = ortvalue

    def _bind_output(self, binding: Any, name: str, *_: Any, **__: Any) -> None:
        self._outputs.setdefault(binding, {})[name] = None

    def _bind_ortvalue_output(self, binding: Any, name: str, ortvalue: Any) -> None:
        self._outputs.setdefault(binding, {})[name] = None

    def _clear_binding_inputs(self, binding: Any) -> None:
        self._inputs.pop(binding, None)

    def _clear_binding_outputs(self, binding: Any) -> None:
        self._outputs.pop(binding, None)
