"""`.pt` and `.pth` files as torch.save writes them, read without torch and without unpickling.

The pickle inside is walked by a small machine that builds containers and tensors and knows no other
object: every global that is not in its table becomes an `Unknown` that bears its name; none is
imported, none is called. Formats: the zip archive (torch >= 1.6), the sequence of pickles before
it, and a plain pickle (numpy arrays, paddle's parameters). Source: torch/serialization.py,
torch/_utils.py, the documentation of pickletools.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.encodings import limits
from whence.readers.encodings.archive import Bytes, File

_MAGIC = 0x1950A86A20F9469CFC6C
# The magic number as a pickle of its own, with the protocols 2 and 3, and with a frame around it (4
# and 5).
_LEGACY = re.compile(
    rb"\x80(?:[\x02\x03]|[\x04\x05]\x95.{8})\x8a\x0a"
    + re.escape(_MAGIC.to_bytes(10, "little"))
    + rb"\.",
    re.DOTALL,
)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_LINE_BYTES = 1 << 16  # of a name in a pickle
# nodes of one tree; containers may share parts, so that a small file holds an endless tree
_VISITS = 300_000
_STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Untyped": "uint8",
}  # fmt: skip
# Those of quantised tensors, which are no tensors here: (what they are called, bytes of an element
# in the file).
_QUANTISED = {
    "QInt8": ("qint8", 1),
    "QUInt8": ("quint8", 1),
    "QInt32": ("qint32", 4),
    "QUInt4x2": ("quint4x2", 1),
    "QUInt2x4": ("quint2x4", 1),
}
_PLACES = ("torch", "torch.storage", "torch.cuda")
_FLAT = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to; nothing is looked up. name: "torch.float32"."""

    name: str


@dataclass(slots=True, eq=False)
class Unknown:
    """An object of a class that is not known here, with what the file says about it.

    name: of the class or function. args: what it was called with. state: what it was given
    afterwards. items: of a container.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The bytes that tensors lie in. key: its name in the file. read: gives them; raises
    ElementsMissing. big: big endian.
    """

    key: str
    dtype: str
    read: Callable[[], Bytes]
    big: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TorchTensor:
    """A tensor of a file; its elements are read when asked for.

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
        """The logical tensor, memory-mapped where the file allows. Raises ElementsMissing when it
        does not lie within its storage.
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
        found: npt.NDArray[Any] = np.ndarray(self.shape, word, data, self.offset * size, strides)
        if self.storage.big:
            found = found.astype(word.newbyteorder("=")).view(kind.numpy)
        if self.conjugated:
            found = np.conj(found)
        return -found if self.negated else found


def recognised(head: bytes) -> bool:
    """Do these first bytes (a few hundred) start a file of torch.save?"""
    return (
        bool(_LEGACY.match(head))
        or (head.startswith(b"PK\x03\x04") and b"data.pkl" in head[:4096])
        or _is_tar(head)
    )


def is_pickle(head: bytes) -> bool:
    """Do these first bytes start a pickle of protocol 2 or later? Many things are pickles: only a
    name tells that this one is ours.
    """
    return bool(_PICKLE.match(head))


def load(source: Path | bytes, name: str = "") -> Any:
    """What torch.save was given: dicts, lists, tuples and scalars as they are, tensors as
    `TorchTensor`, other objects as `Unknown`.

    source: a file, or its bytes. name: to call it in errors. Raises UnreadableRun when it is no
    such file, or is damaged where the damage is not that of one tensor.
    """
    file = File(source, name)
    head = file.head(4096)
    try:
        if head.startswith(b"PK"):
            return _from_zip(file)
        if _LEGACY.match(head):
            return _from_sequence(file)
        if _is_tar(head):
            raise UnreadableRun(
                f"{file.name} is a tar archive of torch < 0.1.10; load it with torch and save it "
                "again:"
                ' python -c "import torch; torch.save(torch.load(OLD), NEW)"'
            )
        tree = _Machine(file, "", lambda pid: _refused(file.name, pid)).run(0)[0]
        return (
            _from_sequence(file) if tree == _MAGIC else tree
        )  # the magic number is pickled too, with any protocol
    except (UnreadableRun, ElementsMissing):
        raise
    except RecursionError as error:
        raise UnreadableRun(f"{file.name} is nested too deeply") from error
    except Exception as error:  # whatever a damaged file does to a parser
        raise UnreadableRun(
            f"{file.name} is damaged: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def tensors(tree: Any) -> Iterator[tuple[str, TorchTensor | Unknown]]:
    """(name, tensor) of every tensor in a tree, in its order: `TorchTensor`, or the `Unknown` of a
    tensor that is not read (quantised).

    Names are keys and positions joined by dots, "" for the tree itself; what nn.Module keeps its
    parts in has no name of its own. Raises UnreadableRun beyond 300 000 nodes.
    """
    visits = 0
    todo: list[tuple[str, Any, frozenset[int]]] = [("", tree, frozenset())]
    while todo:
        name, node, above = todo.pop()
        visits += 1
        if visits > _VISITS:
            raise UnreadableRun(f"the file holds a tree of more than {_VISITS} nodes")
        if isinstance(node, TorchTensor):
            yield name, node
            continue
        below = _parts(node)
        if id(node) in above or len(above) > limits.RANK:
            continue
        if isinstance(node, Unknown) and (
            node.name == "numpy.ndarray" or any(isinstance(arg, Storage) for arg in node.args)
        ):
            yield name, node
        inner = above | {id(node)}
        for key, part in reversed(below):
            if isinstance(part, (TorchTensor, Unknown, dict, list, tuple)):
                todo.append((_joined(name, key), part, inner))


def _joined(name: str, key: Any) -> str:
    if key in ("_parameters", "_buffers", "_modules", None):
        return name
    return f"{name}.{key}" if name else str(key)


def _parts(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    if isinstance(node, Unknown):
        state = (
            [(None, part) for part in node.state]
            if isinstance(node.state, tuple)
            else _parts(node.state)
        )
        return [*enumerate(node.args), *node.items, *state]
    return []


# ---- the three containers


def _from_zip(file: File) -> Any:
    entries = file.entries()
    prefix = next(
        (
            name[: -len("data.pkl")]
            for name in entries
            if name in ("data.pkl", f"{name.split('/')[0]}/data.pkl")
        ),
        None,
    )
    if prefix is None:
        raise UnreadableRun(f"{file.name} is a zip archive without data.pkl, not one of torch.save")
    order = (
        file.entry(entries[f"{prefix}byteorder"]) if f"{prefix}byteorder" in entries else b"little"
    )
    pickled = file.entry(entries[f"{prefix}data.pkl"])
    is_big = bytes(order).strip() == b"big"

    def storage(pid: Any) -> Storage:
        tag, kind, key = pid[0], pid[1], _name(pid[2])
        if tag != "storage":
            raise UnreadableRun(f"{file.name} refers to something that torch.save does not write")
        found = entries.get(f"{prefix}data/{key}") or entries.get(f"{prefix}{key}")

        def read() -> Bytes:
            if found is None:
                raise ElementsMissing(f"{file.name} has no storage {key!r}")
            return file.entry(found)

        return Storage(key, _storage_dtype(kind)[0], read, is_big)

    return _Machine(File(bytes(pickled), f"{file.name}: data.pkl"), file.name, storage).run(0)[0]


def _from_sequence(file: File) -> Any:
    """Magic, protocol, system, object, keys of storages, then each of them: a count of elements and
    the elements, little endian.
    """
    sizes: dict[str, int] = {}
    starts: dict[str, tuple[int, int]] = {}

    def storage(pid: Any) -> Any:
        if pid[0] == "module":  # a class, with its source; what is left is its name
            return pid[1]
        _, kind, key, _, _, *rest = pid
        key, (dtype, size) = _name(key), _storage_dtype(kind)
        view = rest[0] if rest else None
        begin, count = (0, None) if view is None else (int(view[1]) * size, int(view[2]) * size)
        sizes[key] = size

        def read() -> Bytes:
            if key not in starts:
                raise ElementsMissing(f"{file.name} ends before storage {key!r}")
            data = file.part(*starts[key])
            if begin < 0 or (count is not None and begin + count > data.size):
                raise ElementsMissing(f"{file.name}: a view reaches beyond storage {key!r}")
            return data if count is None else data[begin : begin + count]

        return Storage(key, dtype, read)

    place = 0
    for _ in range(3):
        _, place = _Machine(file, file.name, lambda pid: _refused(file.name, pid)).run(place)
    tree, place = _Machine(file, file.name, storage).run(place)
    keys, place = _Machine(file, file.name, lambda pid: _refused(file.name, pid)).run(place)
    if not isinstance(keys, list):
        raise UnreadableRun(f"{file.name} has no list of storages")
    for key in map(_name, keys):
        if (
            not sizes.get(key) or place + 8 > file.size
        ):  # where the next one begins is not known then
            break
        nbytes = int.from_bytes(bytes(file.part(place, 8)), "little") * sizes[key]
        starts[key] = (place + 8, nbytes)
        place += 8 + nbytes
    return tree


def _refused(name: str, pid: Any) -> Storage:
    raise UnreadableRun(
        f"{name} is a pickle that keeps objects elsewhere, which torch.save does not write"
    )


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar" and head.split(b"\0", 1)[0] in (
        b"sys_info",
        b"pickle",
        b"storages",
        b"tensors",
    )


def _storage_dtype(kind: Any) -> tuple[str, int]:
    """(dtype of a storage, bytes of an element). One that is not known is called what the file
    calls it, and has 0 bytes.
    """
    name = kind.name if isinstance(kind, Global) else "an object"
    place, _, last = name.rpartition(".")
    word = last.removesuffix("Storage")
    if place in _PLACES and last.endswith("Storage"):
        if word in _STORAGES:
            return _STORAGES[word], dtypes.named(_STORAGES[word]).itemsize
        if word in _QUANTISED:
            return _QUANTISED[word]
    return name[:80], 0


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    out, step = [], 1
    for extent in reversed(shape):
        out.append(step)
        step *= max(extent, 1)
    return tuple(reversed(out))


# ---- the machine


class _Mark:
    pass


class _Machine:
    """Follows one pickle. storage: what a persistent id stands for."""

    def __init__(self, file: File, name: str, storage: Callable[[Any], Any]) -> None:
        self.file, self.name, self.storage = file, name or file.name, storage
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, start: int) -> tuple[Any, int]:
        """(the object of the pickle that begins at this byte, the place after it). Raises
        UnreadableRun.
        """
        stream = _Stream(self.file, start)
        try:
            for opcode, arg, _ in pickletools.genops(stream):  # type: ignore[arg-type]
                if opcode.name == "STOP":
                    return self.stack.pop(), stream.place
                self.step(opcode.name, arg)
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
        raise UnreadableRun(f"{self.name}: its pickle does not end")

    def step(self, op: str, arg: Any) -> None:
        if op in _IGNORED:
            return
        if op in _CONSTANTS:
            self.stack.append(_CONSTANTS[op])
        elif op in _VALUES:
            self.stack.append(arg)
        elif op in _EMPTY:
            self.stack.append(_EMPTY[op]())
        elif not (self._move(op, arg) or self._collect(op) or self._construct(op, arg)):
            raise ValueError(f"operation {op} is not read")

    def _move(self, op: str, arg: Any) -> bool:
        """Operations on the stack and the memo. Returns whether this is one of them."""
        stack = self.stack
        if op == "MARK":
            stack.append(_Mark())
        elif op in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(arg)] = stack[-1]
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[int(arg)])
        elif op == "DUP":
            stack.append(stack[-1])
        elif op == "POP":
            stack.pop()
        elif op == "POP_MARK":
            self.marked()
        else:
            return False
        return True

    def _collect(self, op: str) -> bool:
        """Operations that make containers or fill them. Returns whether this is one of them."""
        stack = self.stack
        if op in _TUPLES:
            n = _TUPLES[op]
            if len(stack) < n:
                raise ValueError("its stack is empty")
            items = stack[-n:]
            del stack[-n:]
            stack.append(tuple(items))
        elif op == "TUPLE":
            stack.append(tuple(self.marked()))
        elif op in ("LIST", "FROZENSET"):
            stack.append(self.marked())
        elif op == "DICT":
            items = self.marked()
            stack.append({})
            _put(stack[-1], items)
        elif op == "APPEND":
            item = stack.pop()
            _append(stack[-1], [item])
        elif op in ("APPENDS", "ADDITEMS"):
            items = self.marked()
            _append(stack[-1], items)
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _put(stack[-1], [key, value])
        elif op == "SETITEMS":
            items = self.marked()
            _put(stack[-1], items)
        else:
            return False
        return True

    def _construct(self, op: str, arg: Any) -> bool:
        """Operations that name a class or make an object. Returns whether this is one of them."""
        stack = self.stack
        if op == "GLOBAL":
            stack.append(Global(arg.replace(" ", ".", 1)))
        elif op == "INST":
            stack.append(called(Global(arg.replace(" ", ".", 1)), tuple(self.marked())))
        elif op == "STACK_GLOBAL":
            last, module = stack.pop(), stack.pop()
            stack.append(Global(f"{_text(module)}.{_text(last)}"))
        elif op in ("REDUCE", "NEWOBJ"):
            args, what = stack.pop(), stack.pop()
            stack.append(called(what, _tuple(args)))
        elif op == "NEWOBJ_EX":
            named, args, what = stack.pop(), stack.pop(), stack.pop()
            stack.append(called(what, (*_tuple(args), named)))
        elif op == "OBJ":
            what, *rest = self.marked()
            stack.append(called(what, tuple(rest)))
        elif op == "BUILD":
            state = stack.pop()
            stack[-1] = _built(stack[-1], state)
        elif op == "BINPERSID":
            stack.append(self.storage(_tuple(stack.pop())))
        else:
            return False
        return True

    def marked(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[i], _Mark):
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise ValueError("a mark is missing")


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
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Stream:
    """What pickletools reads from: never more than asked for, and no endless lines."""

    def __init__(self, file: File, start: int) -> None:
        self.place, self._data = start, file.part(0, file.size)

    def read(self, n: int) -> bytes:
        found = self._data[self.place : self.place + max(n, 0)].tobytes()
        self.place += len(found)
        return found

    def readline(self) -> bytes:
        found = self._data[self.place : self.place + _LINE_BYTES].tobytes()
        found = found[: found.find(b"\n") + 1]
        self.place += len(found)
        return found

    def tell(self) -> int:
        return self.place


def _name(value: Any) -> str:
    """A key or a number as text; of nothing else, which could be endless to write out."""
    if not isinstance(value, (str, int)):
        raise ValueError("a name is not text")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is not text")
    return value


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise ValueError("arguments are no tuple")
    return value


def _key(value: Any) -> Hashable:
    """A key as it stands where it is plain; a nested one would cost without bound to hash."""
    if isinstance(value, _FLAT) or (
        isinstance(value, tuple) and len(value) <= 64 and all(isinstance(v, _FLAT) for v in value)
    ):
        return value
    return value.name if isinstance(value, Global) else f"<{type(value).__name__}>"


def _append(target: Any, items: list[Any]) -> None:
    if isinstance(target, Unknown):
        target.items += ((len(target.items) + i, item) for i, item in enumerate(items))
    elif isinstance(target, list):
        target += items
    else:
        raise ValueError("appends to what is no list")


def _put(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, Unknown):
        target.items += ((_key(key), value) for key, value in pairs)
    elif isinstance(target, dict):
        target.update((_key(key), value) for key, value in pairs)
    else:
        raise ValueError("puts items into what is no dict")


# ---- what may be made


def called(what: Any, args: tuple[Any, ...]) -> Any:
    """What a call of a global gives: only these few, all others become `Unknown`."""
    if not isinstance(what, Global):
        return Unknown(what.name if isinstance(what, Unknown) else "<not a name>", args)
    maker = _MAKERS.get(what.name)
    if maker is None:
        return Unknown(what.name, args)
    try:
        return maker(*args)
    except (TypeError, ValueError, IndexError, AttributeError, UnreadableRun):
        return Unknown(what.name, args)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> TorchTensor:
    bits = rest[2] if len(rest) > 2 and isinstance(rest[2], dict) else {}
    return _made(storage, storage.dtype, offset, shape, stride, bits)


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    *rest: Any,
) -> TorchTensor:
    bits = rest[0] if rest and isinstance(rest[0], dict) else {}
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


def _without_storage(dtype: Any, shape: Any, stride: Any, *rest: Any) -> TorchTensor:
    def read() -> Bytes:
        raise ElementsMissing("it was on the meta device: no elements")

    kind = _dtype_name(dtype)
    return _made(Storage("meta", kind, read), kind, 0, shape, stride, {})


def _first(data: Any, *rest: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, args: Any, state: Any = None) -> Any:
    return called(function, _tuple(args))


def _ordered(items: Any = ()) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    if isinstance(items, dict):
        return dict(items)
    for key, value in items:
        made[_key(key)] = value
    return made


def _sequence(items: Any = ()) -> Any:
    if not isinstance(items, (list, tuple)):
        raise ValueError("no sequence")
    return items


def _size(items: Any = ()) -> tuple[int, ...]:
    return _extents(items)


def _extents(value: Any) -> tuple[int, ...]:
    """A shape; what is none is not written out."""
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
    return _text(text).encode("latin1")


def _empty_bytes(*args: Any) -> bytes:
    if any(not isinstance(arg, (bytes, bytearray)) for arg in args):
        raise ValueError("no bytes")
    return bytes(args[0]) if args else b""


def _word(name: Any, *rest: Any) -> str:
    return ":".join(map(_name, (name, *rest)))


def _dtype_name(value: Any) -> str:
    name = value.name if isinstance(value, Global) else ""
    if not name.startswith("torch."):
        raise ValueError("no dtype")
    return str(name.removeprefix("torch."))


# numpy: an array is made empty and given (version, shape, dtype, is Fortran, bytes) afterwards; a
# scalar at once.


class _NumpyDType:
    def __init__(self, name: Any, *rest: Any) -> None:
        if not isinstance(name, str) or len(name) > 12:
            raise ValueError("no dtype")
        self.name, self.order = name.lstrip("<>=|"), "<"

    def dtype(self) -> np.dtype[Any]:
        known = _ML_DTYPES.get(self.name)
        if known is not None:
            return known
        found = np.dtype(self.order + self.name)
        if found.kind not in "biufc" or found.itemsize > 16:
            raise ValueError("no dtype of numbers")
        return found


_ML_DTYPES = {d.name: d.numpy for d in dtypes.DTYPES.values() if d.numpy.isbuiltin != 1}


class _NumpyArray:
    pass


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


def _built(target: Any, state: Any) -> Any:
    """An object with the state that the file gives it."""
    if isinstance(target, _NumpyDType):
        target.order = state[1] if state[1] in ("<", ">") else "<"
        return target
    if isinstance(target, _NumpyArray):
        try:
            _, shape, dtype, fortran, data = state
            return _numpy_tensor(data, dtype, shape, bool(fortran))
        except (TypeError, ValueError, KeyError, AttributeError, UnreadableRun):
            return Unknown("numpy.ndarray")
    if isinstance(target, Unknown):
        target.state = state
    return target


_PLAIN: dict[str, Callable[..., Any]] = {
    "dict": _ordered,
    "list": _sequence,
    "tuple": _sequence,
    "set": _sequence,
    "frozenset": _sequence,
    "complex": complex,
    "bytes": _empty_bytes,
    "bytearray": _empty_bytes,
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "multiarray._reconstruct": _numpy_array,
    "multiarray.scalar": _numpy_scalar,
    "numeric._frombuffer": _numpy_buffer,
}
_MAKERS: dict[str, Callable[..., Any]] = {
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
