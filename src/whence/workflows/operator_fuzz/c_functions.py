"""Functions of C, called in a process of their own, which a crash ends instead of this one."""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from whence.dtypes import Array
from whence.engines.processes import Processes
from whence.engines.task import Task
from whence.errors import UsageError

GUARD = 64
"""Number of guard elements before and after each array; the function must leave them alone."""
_CANARY = 0x5A
_C_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}  # fmt: skip


class WritesOutside(Exception):
    """A kernel changed memory outside of the arrays that it was given."""


class Crashed(Exception):
    """A kernel ended its process."""


class _Call(msgspec.Struct, frozen=True):
    """A call as sent to the process. parameters: in order the number of a memory, or (type, value);
    None only loads the function. guards: bytes before the array in each memory.
    """

    library: str
    name: str
    parameters: tuple[int | tuple[str, float | int], ...] | None = None
    memories: tuple[bytes, ...] = ()
    guards: tuple[int, ...] = ()


def perform(payload: bytes) -> bytes:
    """Make a call, in the process of the function; the memories after it."""
    call = msgspec.msgpack.decode(payload, type=_Call)
    function = getattr(ctypes.CDLL(call.library), call.name)
    function.restype = None
    held = [np.frombuffer(memory, np.uint8).copy() for memory in call.memories]
    at = [ctypes.c_void_p(m.ctypes.data + guard) for m, guard in zip(held, call.guards)]
    if call.parameters is not None:
        function(*(at[p] if isinstance(p, int) else _C_TYPES[p[0]](p[1]) for p in call.parameters))
    return msgspec.msgpack.encode([memory.tobytes() for memory in held])


class Function:
    """A function of a shared library. Raises UsageError when it cannot be loaded."""

    def __init__(self, path: str, name: str) -> None:
        self._library, self._name = str(Path(path).resolve()), name
        try:
            _performed(_Call(self._library, name))
        except Crashed as error:
            raise UsageError(f"{path}:{name} cannot be loaded: {error}") from error

    def __call__(self, arrays: dict[str, Array], order: Sequence[tuple[str, str, Any]]) -> None:
        """Call the function; it writes into the arrays.

        order: of each parameter its name, its type ("" for the usual one), and its value, which an
        array lacks. Raises WritesOutside, Crashed, UsageError.
        """
        names = list(arrays)
        guards = tuple(GUARD * array.itemsize for array in arrays.values())
        around = [bytes([_CANARY]) * guard for guard in guards]
        memories = tuple(g + a.tobytes() + g for g, a in zip(around, arrays.values()))
        parameters = tuple(
            names.index(name) if name in arrays else _number(name, kind, value)
            for name, kind, value in order
        )
        after = _performed(_Call(self._library, self._name, parameters, memories, guards))
        for (name, array), guard, memory in zip(arrays.items(), around, after):
            content = memory[len(guard) : -len(guard)]
            if guard + content + guard != memory:
                raise WritesOutside(f"it writes before or behind {name}")
            array.view(np.uint8).reshape(-1)[...] = np.frombuffer(content, np.uint8)


def _number(name: str, kind: str, value: Any) -> tuple[str, float | int]:
    if value is None:
        raise UsageError(
            f"the order of parameters names {name!r}, which is not an input or argument"
        )
    return kind or ("f64" if isinstance(value, float) else "i64"), value


def _performed(call: _Call) -> list[bytes]:
    (outcome,) = _engine().run([Task(0, __name__, msgspec.msgpack.encode(call))])
    if outcome.error:
        raise Crashed(outcome.error)
    return msgspec.msgpack.decode(outcome.result, type=list[bytes])


@functools.cache
def _engine() -> Processes:
    engine = Processes(1)
    atexit.register(engine.close)
    return engine
