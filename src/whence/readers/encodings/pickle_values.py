"""The objects in a pickle of torch or numpy: containers, tensors whose elements are read later, and
`Unknown` for every object that is not in the table of makers. Nothing is imported, nothing called.
Source: torch/_utils.py.

`PickleMachine` interprets a pickle without unpickling it: with a stack, a memo and these values.
Source: the documentation of pickletools.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.encodings import limits
from whence.readers.encodings.archive import Bytes, File

_FLAT = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to; it is never resolved. name: "torch.float32"."""

    name: str


@dataclass(slots=True, eq=False)
class Unknown:
    """An object of an unknown class, with what the file states about it.

    name: of the class or function. args: its call arguments. state: set afterwards. items: of a
    container.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The bytes that tensors share. key: its name in the file. read: returns them; raises
    ElementsMissing. big: big endian.
    """

    key: str
    dtype: str
    read: Callable[[], Bytes]
    big: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TorchTensor:
    """A tensor of a file; its elements are read on request.

    dtype: whence's name (or torch's, where whence has none). shape: logical. stride, offset: in
    elements of the storage.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: Storage
    conjugated: bool = False
    negated: bool = False

    @property
    def is_contiguous(self) -> bool:
        return self.stride == _dense(self.shape) or limits.count(self.shape) < 2

    def array(self) -> Array:
        """Returns the logical tensor, memory-mapped where the file allows it. Raises
        ElementsMissing when it exceeds its storage.
        """
        if self.dtype not in dtypes.DTYPES:
            raise ElementsMissing(f"dtype {self.dtype} is not known to whence")
        kind, data = dtypes.named(self.dtype), self.storage.read()
        if not limits.count(self.shape):
            return np.empty(self.shape, kind.numpy)
        size = kind.itemsize
        last = self.offset + sum(
            (n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)
        )
        if (last + 1) * size > data.size:
            raise ElementsMissing(
                f"shape {self.shape} with strides {self.stride} from element {self.offset} needs "
                f"{(last + 1) * size} bytes; "
                f"storage {self.storage.key!r} has {data.size}"
            )
        try:
            limits.unpacked(limits.count(self.shape) * size, data.size, "an expanded tensor")
        except UnreadableRun as error:
            raise ElementsMissing(str(error)) from error
        word = (
            kind.numpy
            if not self.storage.big
            else kind.numpy.newbyteorder(">")
            if kind.numpy.isbuiltin == 1
            else np.dtype(f">u{size}")
        )
        strides = tuple(step * size for step in self.stride)
        elements: npt.NDArray[Any] = np.ndarray(self.shape, word, data, self.offset * size, strides)
        if self.storage.big:
            elements = elements.astype(word.newbyteorder("=")).view(kind.numpy)
        if self.conjugated:
            elements = np.conj(elements)
        return -elements if self.negated else elements


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    out, step = [], 1
    for extent in reversed(shape):
        out.append(step)
        step *= max(extent, 1)
    return tuple(reversed(out))


def name_of(value: Any) -> str:
    """Returns a text or integer as text. Raises ValueError for any other value, whose text could be
    unboundedly long.
    """
    if not isinstance(value, (str, int)):
        raise ValueError("a name is not text")
    return str(value)


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is not text")
    return value


def tuple_of(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise ValueError("arguments are not a tuple")
    return value


def _key(value: Any) -> Hashable:
    """Returns a plain key unchanged; any other key is replaced by the name of its type, since
    hashing a nested one could take unbounded time.
    """
    if isinstance(value, _FLAT) or (
        isinstance(value, tuple) and len(value) <= 64 and all(isinstance(v, _FLAT) for v in value)
    ):
        return value
    return value.name if isinstance(value, Global) else f"<{type(value).__name__}>"


def append_to(target: Any, items: list[Any]) -> None:
    if isinstance(target, Unknown):
        target.items += ((len(target.items) + i, item) for i, item in enumerate(items))
    elif isinstance(target, list):
        target += items
    else:
        raise ValueError("appends to what is not a list")


def put_into(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, Unknown):
        target.items += ((_key(key), value) for key, value in pairs)
    elif isinstance(target, dict):
        target.update((_key(key), value) for key, value in pairs)
    else:
        raise ValueError("puts items into what is not a dict")


# ---- objects that may be made


Makers = Mapping[str, Callable[..., Any]]


def called(target: Any, args: tuple[Any, ...], makers: Makers) -> Any:
    """Returns the result of calling a global: only those in `makers` are known, all others become
    `Unknown`.
    """
    if not isinstance(target, Global):
        return Unknown(target.name if isinstance(target, Unknown) else "<not a name>", args)
    maker = makers.get(target.name)
    if maker is None:
        return Unknown(target.name, args)
    try:
        return maker(*args)
    except (TypeError, ValueError, IndexError, AttributeError, UnreadableRun):
        return Unknown(target.name, args)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *extra: Any) -> TorchTensor:
    bits = extra[2] if len(extra) > 2 and isinstance(extra[2], dict) else {}
    return _made(storage, storage.dtype, offset, shape, stride, bits)


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    *extra: Any,
) -> TorchTensor:
    bits = extra[0] if extra and isinstance(extra[0], dict) else {}
    return _made(storage, _dtype_name(dtype), offset, shape, stride, bits)


def _made(
    storage: Any, dtype: str, offset: Any, shape: Any, stride: Any, bits: dict[Any, Any]
) -> TorchTensor:
    extents, steps, (start,) = _extents(shape), _extents(stride), _extents((offset,))
    if not isinstance(storage, Storage) or len(extents) != len(steps):
        raise ValueError("no tensor")
    return TorchTensor(
        dtype, extents, steps, start, storage, bits.get("conj") is True, bits.get("neg") is True
    )


def _without_storage(dtype: Any, shape: Any, stride: Any, *extra: Any) -> TorchTensor:
    def read() -> Bytes:
        raise ElementsMissing("it was on the meta device: no elements")

    kind = _dtype_name(dtype)
    return _made(Storage("meta", kind, read), kind, 0, shape, stride, {})


def _first(data: Any, *extra: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, args: Any, state: Any = None) -> Any:
    return called(function, tuple_of(args), MAKERS)


def _ordered(items: Any = ()) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    if isinstance(items, dict):
        return dict(items)
    for key, value in items:
        out[_key(key)] = value
    return out


def _sequence(items: Any = ()) -> Any:
    if not isinstance(items, (list, tuple)):
        raise ValueError("no sequence")
    return items


def _size(items: Any = ()) -> tuple[int, ...]:
    return _extents(items)


def _extents(value: Any) -> tuple[int, ...]:
    """Checks a shape. Raises ValueError, without quoting the value, when it is none."""
    if (
        not isinstance(value, (list, tuple))
        or len(value) > limits.RANK
        or not all(isinstance(n, int) for n in value)
    ):
        raise ValueError("no shape")
    return limits.extents(value, "a tensor")


def _encoded(text: Any, codec: Any = "latin1") -> bytes:
    if codec not in ("latin1", "latin-1"):
        raise ValueError("another codec")
    return text_of(text).encode("latin1")


def _empty_bytes(*args: Any) -> bytes:
    if any(not isinstance(arg, (bytes, bytearray)) for arg in args):
        raise ValueError("no bytes")
    return bytes(args[0]) if args else b""


def _word(name: Any, *numbers: Any) -> str:
    return ":".join(map(name_of, (name, *numbers)))


def _dtype_name(value: Any) -> str:
    name = value.name if isinstance(value, Global) else ""
    if not name.startswith("torch."):
        raise ValueError("no dtype")
    return str(name.removeprefix("torch."))


# numpy: an array is made empty and given (version, shape, dtype, is Fortran, bytes) afterwards; a
# scalar at once.


class _NumpyDType:
    def __init__(self, name: Any, *extra: Any) -> None:
        name = name.name.removeprefix("ml_dtypes.") if isinstance(name, Global) else name
        if not isinstance(name, str) or len(name) > 12:
            raise ValueError("no dtype")
        self.name, self.order = name.lstrip("<>=|"), "<"

    def dtype(self) -> np.dtype[Any]:
        ml_dtype = _ML_DTYPES.get(self.name)
        if ml_dtype is not None:
            return ml_dtype
        dtype = np.dtype(self.order + self.name)
        if dtype.kind not in "biufc" or dtype.itemsize > 16:
            raise ValueError("no dtype of numbers")
        return dtype


_ML_DTYPES = {d.name: d.numpy for d in dtypes.DTYPES.values() if d.numpy.isbuiltin != 1}


class _NumpyArray:
    """An array under construction. built: the finished value."""

    built: Any = None


def _numpy_array(*args: Any) -> _NumpyArray:
    return _NumpyArray()


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    value = np.frombuffer(bytes(data), dtype.dtype(), 1)[0]
    return value.item() if value.dtype.kind in "biufc" else float(value)


def _numpy_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> TorchTensor:
    return _numpy_tensor(data, dtype, shape, order == "F")


def _numpy_tensor(data: Any, dtype: Any, shape: Any, fortran: bool) -> TorchTensor:
    kind, extents = dtype.dtype(), _extents(shape)
    raw = np.frombuffer(data if isinstance(data, (bytes, bytearray)) else _encoded(data), np.uint8)
    name = dtypes.of(np.empty(0, kind)).name
    stride = tuple(reversed(_dense(tuple(reversed(extents))))) if fortran else _dense(extents)
    return TorchTensor(
        name, extents, stride, 0, Storage("numpy", name, lambda: raw, kind.str.startswith(">"))
    )


def built(target: Any, state: Any) -> Any:
    """Returns an object with the state that the file sets."""
    if isinstance(target, _NumpyDType):
        target.order = state[1] if state[1] in ("<", ">") else "<"
        return target
    if isinstance(target, _NumpyArray):
        try:
            _, shape, dtype, fortran, data = state
            if dtype.name[:1] == "O" and isinstance(data, list):
                target.built = data if _extents(shape) else data[0]
            else:
                target.built = _numpy_tensor(data, dtype, shape, bool(fortran))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, UnreadableRun):
            target.built = Unknown("numpy.ndarray")
        return target.built
    if isinstance(target, Unknown):
        target.state = state
    return target


def _jax_array(function: Any, args: Any, state: Any, *extra: Any) -> Any:
    return built(called(function, tuple_of(args), MAKERS), state)


_PLAIN: dict[str, Callable[..., Any]] = {
    "dict": _ordered, "list": _sequence, "tuple": _sequence, "set": _sequence,
    "frozenset": _sequence, "complex": complex, "bytes": _empty_bytes, "bytearray": _empty_bytes,
}  # fmt: skip
_NUMPY: dict[str, Callable[..., Any]] = {
    "multiarray._reconstruct": _numpy_array,
    "multiarray.scalar": _numpy_scalar,
    "numeric._frombuffer": _numpy_buffer,
}
MAKERS: Makers = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_meta_tensor_no_storage": _without_storage,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._utils._rebuild_device_tensor_from_numpy": _first,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "jax._src.array._reconstruct_array": _jax_array,
    "torch.Size": _size,
    "torch.device": _word,
    "torch.serialization._get_layout": _word,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *args: {},
    "collections.Counter": _ordered,
    "collections.deque": _sequence,
    "_codecs.encode": _encoded,
    **{
        f"{module}.{name}": maker
        for module in ("builtins", "__builtin__")
        for name, maker in _PLAIN.items()
    },
    "numpy.dtype": _NumpyDType,
    **{
        f"numpy.{core}.{name}": maker
        for core in ("core", "_core")
        for name, maker in _NUMPY.items()
    },
}

_LINE_BYTES = 1 << 16  # of a name in a pickle


class _Mark:
    pass


class PickleMachine:
    """Interprets one pickle. storage: returns the object of a persistent id. makers: global name ->
    the function that makes its value.
    """

    def __init__(
        self, file: File, name: str, storage: Callable[[Any], Any], makers: Makers = MAKERS
    ) -> None:
        self.file, self.name, self.storage = file, name or file.name, storage
        self.makers = makers
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, start: int) -> tuple[Any, int]:
        """Returns (the object of the pickle that begins at this byte, the position after it).
        Raises UnreadableRun.
        """
        stream = _Stream(self.file, start)
        try:
            while True:
                code = stream.read(1)
                operation = _OPERATIONS.get(code)
                if operation is None:
                    raise ValueError(
                        f"at position {stream.place - 1}, opcode {code!r} unknown"
                        if code
                        else "pickle exhausted before seeing STOP"
                    )
                name, argument, follow = operation
                arg = None if argument is None else argument(stream)
                if name == "STOP":
                    return self.stack.pop(), stream.place
                follow(self, name, arg)
        except (
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
        ) as error:
            raise UnreadableRun(
                f"{self.name}: its pickle cannot be followed at byte {stream.place}: "
                f"{str(error)[:120]}"
            ) from error

    def take(self, count: int) -> list[Any]:
        """Pops the last values of the stack; `_MARKED`: all behind the last mark."""
        stack, start = self.stack, len(self.stack) - count
        if count == _MARKED:
            start = next(
                (i for i in reversed(range(len(stack))) if isinstance(stack[i], _Mark)), -1
            )
        if start < 0:
            raise ValueError("its stack is empty, or lacks a mark")
        items = stack[start + (count == _MARKED) :]
        del stack[start:]
        return items

    def _ignore(self, op: str, arg: Any) -> None:
        pass

    def _refuse(self, op: str, arg: Any) -> None:
        raise ValueError(f"operation {op} is not read")

    def _value(self, op: str, arg: Any) -> None:
        self.stack.append(arg)

    def _constant(self, op: str, arg: Any) -> None:
        self.stack.append(_CONSTANTS[op])

    def _empty(self, op: str, arg: Any) -> None:
        self.stack.append(_EMPTY[op]())

    def _remember(self, op: str, arg: Any) -> None:
        self.memo[len(self.memo) if op == "MEMOIZE" else int(arg)] = self.stack[-1]

    def _recall(self, op: str, arg: Any) -> None:
        value = self.memo[int(arg)]
        self.stack.append(value.built if isinstance(value, _NumpyArray) else value)

    def _repeat(self, op: str, arg: Any) -> None:
        self.stack.append(self.stack[-1])

    def _drop(self, op: str, arg: Any) -> None:
        self.take(_DROPPED[op])

    def _fill(self, op: str, arg: Any) -> None:
        count, fill = _FILLED[op]
        items = self.take(count)
        fill(self.stack[-1], items)

    def _make(self, op: str, arg: Any) -> None:
        count, make = _MADE[op]
        self.stack.append(make(self, *self.take(count)))

    def _named(self, op: str, arg: Any) -> None:
        named = Global(arg.replace(" ", ".", 1))
        is_called = op == "INST"
        self.stack.append(self.call(named, *self.take(_MARKED)) if is_called else named)

    def call(self, target: Any, *args: Any) -> Any:
        return called(target, args, self.makers)

    def apply(self, target: Any, args: Any, *named: Any) -> Any:
        return self.call(target, *tuple_of(args), *named)


def _a_tuple(machine: PickleMachine, *items: Any) -> tuple[Any, ...]:
    return items


def _a_list(machine: PickleMachine, *items: Any) -> list[Any]:
    return list(items)


def _a_dict(machine: PickleMachine, *items: Any) -> dict[Any, Any]:
    entries: dict[Any, Any] = {}
    put_into(entries, list(items))
    return entries


_MARKED = -1
_MADE: dict[str, tuple[int, Callable[..., Any]]] = {
    **{f"TUPLE{count}": (count, _a_tuple) for count in (1, 2, 3)},
    "TUPLE": (_MARKED, _a_tuple), "LIST": (_MARKED, _a_list), "FROZENSET": (_MARKED, _a_list),
    "DICT": (_MARKED, _a_dict), "OBJ": (_MARKED, PickleMachine.call),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), (2, PickleMachine.apply)),
    "NEWOBJ_EX": (3, PickleMachine.apply),
    "STACK_GLOBAL": (2, lambda _, module, name: Global(f"{text_of(module)}.{text_of(name)}")),
    "BUILD": (2, lambda _, target, state: built(target, state)),
    "BINPERSID": (1, lambda machine, pid: machine.storage(tuple_of(pid))),
}  # fmt: skip
"""Operation -> (how many values it pops off the stack, the value that it makes of them)."""
_FILLED: dict[str, tuple[int, Callable[[Any, list[Any]], None]]] = {
    "APPEND": (1, append_to), "APPENDS": (_MARKED, append_to), "ADDITEMS": (_MARKED, append_to),
    "SETITEM": (2, put_into), "SETITEMS": (_MARKED, put_into),
}  # fmt: skip
"""Operation -> (how many values it pops, how these fill the value below them)."""
_DROPPED = {"POP": 1, "POP_MARK": _MARKED}
_IGNORED = ("PROTO", "FRAME", "READONLY_BUFFER")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,
    "MARK": _Mark,
}
_FOLLOW: dict[str, Callable[[PickleMachine, str, Any], None]] = {
    name: follow
    for names, follow in (
        (_IGNORED, PickleMachine._ignore),
        (_CONSTANTS, PickleMachine._constant),
        (_VALUES, PickleMachine._value),
        (_EMPTY, PickleMachine._empty),
        (("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"), PickleMachine._remember),
        (("BINGET", "LONG_BINGET", "GET"), PickleMachine._recall),
        (("DUP",), PickleMachine._repeat),
        (_DROPPED, PickleMachine._drop),
        (_FILLED, PickleMachine._fill),
        (_MADE, PickleMachine._make),
        (("GLOBAL", "INST"), PickleMachine._named),
    )
    for name in names
}
_OPERATIONS: dict[bytes, tuple[str, Callable[..., Any] | None, Callable[..., None]]] = {
    opcode.code.encode("latin-1"): (
        opcode.name,
        None if opcode.arg is None else opcode.arg.reader,
        _FOLLOW.get(opcode.name, PickleMachine._refuse),
    )
    for opcode in pickletools.opcodes
}
"""Byte -> (name, reader of its argument, action) of every pickle operation."""


class _Stream:
    """The stream that pickletools reads from: never reads more than requested, and limits lines."""

    def __init__(self, file: File, start: int) -> None:
        self.place, self._data = start, file.part(0, file.size).data

    def read(self, n: int) -> bytes:
        start = self.place
        data = self._data[start : start + n].tobytes() if n > 0 else b""
        self.place = start + len(data)
        return data

    def readline(self) -> bytes:
        line = self._data[self.place : self.place + _LINE_BYTES].tobytes()
        line = line[: line.find(b"\n") + 1]
        self.place += len(line)
        return line

    def tell(self) -> int:
        return self.place
