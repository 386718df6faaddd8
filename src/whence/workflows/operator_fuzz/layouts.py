"""Arrays laid out in memory as a caller may have them: views into larger memory, transposed, every
second element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whence.dtypes import Array


class LaidOut:
    """One input as a kernel gets it. value: of numpy or torch. memory: that it is a view of."""

    def __init__(self, array: Array, layout: str, is_torch: bool) -> None:
        self._content = array
        self._memory, self._take = _memory(array, layout)
        self._before = self._memory.copy()
        if not is_torch:
            self._held: Any = self._memory
            self.value: Any = self._take(self._memory)
            return
        from whence.frameworks.torch_arrays import from_host

        self._held = from_host(self._memory)
        self.value = _torch_view(self._held, self._memory, self._take(self._memory))

    def is_written(self) -> bool:
        """Did what it was given to change it, or the memory around it?"""
        return self._now().tobytes() != self._before.tobytes()

    def _now(self) -> Array:
        if isinstance(self._held, np.ndarray):
            return self._held
        from whence.frameworks.torch_arrays import to_host

        return to_host(self._held)


def _memory(array: Array, layout: str) -> tuple[Array, Any]:
    """(memory that holds the array, how it is taken from it)."""
    last = array.shape[-1] if array.ndim else 0
    if layout == "offset":
        memory = np.ones(array.size + 1, array.dtype)
        memory[1:] = array.reshape(-1)
        return memory, lambda m: m[1:].reshape(array.shape)
    if layout == "transposed" and array.ndim > 1:
        return np.ascontiguousarray(array.swapaxes(-1, -2)), lambda m: m.swapaxes(-1, -2)
    if layout == "rows apart" and array.ndim > 1:
        memory = np.ones((*array.shape[:-1], last + 3), array.dtype)
        memory[..., :last] = array
        return memory, lambda m: m[..., :last]
    if layout == "every second" and array.ndim:
        memory = np.ones((*array.shape[:-1], 2 * last), array.dtype)
        memory[..., ::2] = array
        return memory, lambda m: m[..., ::2]
    if layout == "one row repeated" and array.ndim > 1 and array.shape[0]:
        memory = np.ascontiguousarray(array[:1])
        return memory, lambda m: np.broadcast_to(m, array.shape)
    return np.array(array, order="C"), lambda m: m


def _torch_view(held: Any, memory: Array, view: Array) -> Any:
    """The view of a tensor that the view of the array is. Strides of torch count elements."""
    if memory.size == 0 or view.size == 0:
        return held.new_empty(view.shape)
    size = memory.itemsize
    start = (view.ctypes.data - memory.ctypes.data) // size
    return held.as_strided(view.shape, [s // size for s in view.strides], start)
