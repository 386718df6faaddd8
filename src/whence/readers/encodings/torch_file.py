"""Reads `.pt` and `.pth` files, as torch.save writes them, without torch and without unpickling.

`PickleMachine` interprets the pickle inside; it builds containers and tensors and no other object.
Formats: the zip archive (torch >= 1.6), the sequence of pickles before it, and a plain pickle
(numpy arrays, paddle's parameters). Source: torch/serialization.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from whence import dtypes
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.encodings import limits, numpy_file, raw_form
from whence.readers.encodings.archive import MAPPED_FROM, Bytes, File
from whence.readers.encodings.number_text import Values
from whence.readers.encodings.pickle_values import (
    MAKERS,
    Global,
    PickleMachine,
    Storage,
    TorchTensor,
    Unknown,
    name_of,
)

_MAGIC = 0x1950A86A20F9469CFC6C
# The magic number as a pickle of its own, with the protocols 2 and 3, and with a frame around it (4
# and 5).
_LEGACY = re.compile(
    rb"\x80(?:[\x02\x03]|[\x04\x05]\x95.{8})\x8a\x0a"
    + re.escape(_MAGIC.to_bytes(10, "little"))
    + rb"\.",
    re.DOTALL,
)
# Protocols 0 and 1 have no mark: a mark of a container or the name of a class begins them.
_PICKLE = re.compile(rb"\x80[\x02-\x05]|[(}\]c]")
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
_MANY = 64  # bytes of an object from which it may be a tensor; a date has ten
CONTENTS = ("value", "values", "data", "tensor", "array")
"""Usual keys of the tensor in a dict that also has its name."""
CODED = (*CONTENTS, "base64", "b64", "data_b64", "data_base64", "bytes", "raw", "content")
"""Usual keys of its bytes."""
_NAMES = ("layer", "module", "layer_name", "module_name", "op_name", "tensor_name")
"""Usual keys of the name in a dict of one tensor or call; a list of such dicts may use others."""
_HEAD_BYTES = numpy_file.HEAD_BYTES
_MARKS = ("epoch", "step", "iteration", "iter", "batch", "call", "token", "rank")
_PLACES = ("torch", "torch.storage", "torch.cuda")
_ONE_TENSOR = 4096
"""Most bytes of a pickle of one tensor."""


def recognised(head: bytes) -> bool:
    """Whether these first bytes (a few hundred) start a file of torch.save."""
    return (
        bool(_LEGACY.match(head))
        or (head.startswith(b"PK\x03\x04") and b"data.pkl" in head[:4096])
        or _is_tar(head)
    )


def is_pickle(head: bytes) -> bool:
    """Whether these first bytes could start a pickle. Other files may also start so; only the name
    of the file decides.
    """
    return bool(_PICKLE.match(head))


def load(source: Path | bytes, name: str = "", *, start: int = 0) -> Any:
    """Returns the object passed to torch.save: dicts, lists, tuples and scalars as they are,
    tensors as `TorchTensor`, other objects as `Unknown`.

    source: a file, or its bytes. name: in errors. start: of a pickle behind a header of another
    format, in bytes. Raises UnreadableRun when it is not such a file, or when damage affects more
    than one tensor.
    """
    file = File(source, name)
    head = file.head(4096)
    try:
        if start:
            return _plain(file, start)
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
        tree = _plain(file, 0)
        # the magic number is pickled too, with any protocol
        return _from_sequence(file) if tree == _MAGIC else tree
    except (UnreadableRun, ElementsMissing):
        raise
    except RecursionError as error:
        raise UnreadableRun(f"{file.name} is nested too deeply") from error
    except Exception as error:  # whatever a damaged file does to a parser
        raise UnreadableRun(
            f"{file.name} is damaged: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def tensors(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) of every tensor in a tree, in its order: `TorchTensor`, `Unknown` for a
    tensor that is not read (quantised), `Values` in a tree of texts.

    Names are keys and positions joined by dots, "" for the tree itself; the internal dicts of
    nn.Module add nothing to a name. Raises UnreadableRun beyond 300 000 nodes.
    """
    visits = 0
    named = _with_names([tree]) if isinstance(tree, (dict, tuple)) else []
    name, tree = named[0] if named else ("", tree)
    todo: list[tuple[str, Any, frozenset[int]]] = [(name, tree, frozenset())]
    while todo:
        name, node, above = todo.pop()
        visits += 1
        if visits > _VISITS:
            raise UnreadableRun(f"the file holds a tree of more than {_VISITS} nodes")
        node = _of_bytes(node, name) if isinstance(node, (bytes, bytearray, dict)) else node
        if isinstance(node, (TorchTensor, Values)):
            yield name, node
            continue
        below = _parts(node)
        if id(node) in above or len(above) > limits.RANK:
            continue
        if isinstance(node, Unknown) and _is_tensor(node):
            yield name, node
        inner = above | {id(node)}
        for key, part in reversed(below):
            if isinstance(part, (TorchTensor, Values, Unknown, dict, list, tuple, bytes)):
                todo.append((_joined(name, key), part, inner))


def _of_bytes(node: Any, name: str) -> Any:
    """Returns what bytes hold: the content of a file of torch.save or np.save, or the elements
    whose dtype and shape stand beside them. Many others that are no text count as uint8, so that
    they are compared; the rest as they are.
    """
    if isinstance(node, dict):
        data = next((node[key] for key in CODED if isinstance(node.get(key), bytes)), b"")
        form = raw_form.of_value(node, len(data)) if data else None
        if form is None:
            return node
        return _tensor_of(form.dtype, form.shape, data)
    head = bytes(node[:_HEAD_BYTES])
    if head.startswith(numpy_file.MAGIC):
        header = numpy_file.header(head, name)
        if header.word is not None and header.word.isnative and not header.fortran:
            return _tensor_of(header.dtype, header.shape, node[header.start :])
    if recognised(head):
        return load(bytes(node), name)
    is_text = len(node) < _MANY or not any(byte > 127 or byte < 9 for byte in head)
    return node if is_text else _tensor_of("uint8", (len(node),), node)


def _tensor_of(dtype: str, shape: tuple[int, ...], data: bytes) -> TorchTensor:
    elements = np.frombuffer(data, np.uint8)
    steps = tuple(limits.count(shape[axis + 1 :]) for axis in range(len(shape)))
    return TorchTensor(dtype, shape, steps, 0, Storage("", dtype, lambda: elements))


def _is_tensor(node: Unknown) -> bool:
    """Whether an unknown object has elements."""
    holds_bytes = any(isinstance(a, (bytes, bytearray)) and len(a) >= _MANY for a in node.args)
    return (
        node.name == "numpy.ndarray"
        or node.name.startswith("torch._utils._rebuild")
        or holds_bytes
        or any(isinstance(arg, Storage) for arg in node.args)
    )


def _joined(name: str, key: Any) -> str:
    if key in ("_parameters", "_buffers", "_modules", None):
        return name
    key = ".".join(map(str, key)) if isinstance(key, tuple) else key
    return f"{name}.{key}" if name else str(key)


def _parts(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        if _number_word([*node]) == "call":  # keys of step and name
            node = {_named_call(key): part for key, part in node.items()}
        return _with_names_beside(node) or _with_sides(node) or list(node.items())
    if isinstance(node, (list, tuple)):
        names, others = node[::2], node[1::2]
        if len(names) == len(others) and all(isinstance(name, str) for name in names):
            node = list(zip(names, others, strict=True))  # rows of (name, array) in one array
        alone = len(node) == 1 and isinstance(node[0], TorchTensor)
        return _with_names(node, is_list=True) or [
            (None if alone else n, part) for n, part in enumerate(node)
        ]
    if isinstance(node, Unknown):
        state = (
            [(None, part) for part in node.state]
            if isinstance(node.state, tuple)
            else _parts(node.state)
        )
        return [*enumerate(node.args), *node.items, *state]
    return []


def _with_names(items: Sequence[Any], *, is_list: bool = False) -> list[tuple[Any, Any]]:
    """Returns (name, part) of tuples with one text, or of dicts that state their name and perhaps
    step or rank; [] where one states none. is_list: a field `name` is enough.
    """
    named: list[tuple[Any, Any]] = []
    numbered = _number_word(items)
    for item in items:
        if isinstance(item, Unknown) and isinstance(item.state, dict):  # of a class of one's own
            item = item.state
        texts = [part for part in item if isinstance(part, str)] if isinstance(item, tuple) else []
        if len(texts) == 1 and len(item) > 1:
            rest = [part for part in item if not isinstance(part, (str, int))]
            sides = dict(zip(("input", "output"), rest)) if len(rest) == 2 else rest
            name = _named_call(item, numbered) if numbered is not None else texts[0]
            named.append((name, rest[0] if len(rest) == 1 else sides))
            continue
        match item:
            case [str() as name, part]:
                named.append((name, part))
            case dict() if key := _name_key(item, is_list=is_list):
                marks = [f"{k}{item[k]}." for k in _MARKS if str(item.get(k, "")).isdecimal()]
                kept = {None if k in CONTENTS else k: v for k, v in item.items() if k != key}
                named.append(("".join(marks) + item[key], kept))
            case _:
                return []
    return named


def _named_call(item: Sequence[Any], word: str = "call") -> str:
    """Returns the text in a tuple with its numbers and their word in front."""
    numbers = (f"{word}{part}" for part in item if isinstance(part, int) and part >= 0)
    return ".".join((*numbers, *(part for part in item if isinstance(part, str))))


def _number_word(items: Sequence[Any]) -> str | None:
    """Returns the word for the numbers beside names in tuples: that of a call where each name comes
    with the same ones, "" of a layer where they tell names apart; None where names do without.
    """
    numbers: dict[str, list[int]] = {}
    for item in items:
        texts = [p for p in item if isinstance(p, str)] if isinstance(item, tuple) else []
        for text in texts[:1]:
            numbers.setdefault(text, []).append(next((p for p in item if isinstance(p, int)), -1))
    if all(len(its) == 1 for its in numbers.values()):
        return None
    if len({frozenset(its) for its in numbers.values()}) == 1 and re.search(
        r"\d", "".join(numbers)
    ):
        return "call"
    return ""


def _name_key(item: dict[Any, Any], *, is_list: bool) -> str:
    """Returns the key of a dict's own name, "" where it has none: of an item of a list, also the
    key of its only text.
    """
    texts = [k for k, part in item.items() if isinstance(part, str) and not part.isdecimal()]
    keys = (*_NAMES, "name", "op", "node", "tap", *texts[: len(texts) == 1]) if is_list else _NAMES
    return next((key for key in keys if key in texts), "")


def _with_sides(node: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Returns the parts of a dict of what hooks are called with: a tuple of inputs and an output
    each, most of which are tensors.
    """
    are_calls = all(
        isinstance(part, (tuple, list)) and len(part) == 2 and isinstance(part[0], tuple)
        for part in node.values()
    )
    outputs = [part[1] for part in node.values()] if are_calls else []
    if 2 * sum(isinstance(output, TorchTensor) for output in outputs) <= len(outputs):
        return []
    return [(key, dict(zip(("input", "output"), part, strict=True))) for key, part in node.items()]


def _with_names_beside(node: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Returns (name, part) of a dict with a list of names and a list of as many tensors."""
    lists = [part for part in node.values() if isinstance(part, (list, tuple)) and part]
    names = [part for part in lists if all(isinstance(name, str) for name in part)]
    tensors = [part for part in lists if all(isinstance(t, (TorchTensor, Values)) for t in part)]
    if len(names) != 1 or len(tensors) != 1 or len(names[0]) != len(tensors[0]):
        return []
    return list(zip(names[0], tensors[0], strict=True))


# ---- the three containers


def _from_zip(file: File) -> Any:
    # a small file is read at once: of many, opening them is most of the work
    small = file.size < MAPPED_FROM
    whole = File(bytes(file.part(0, file.size)), file.name) if small else file
    entries = whole.entries()
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
        whole.entry(entries[f"{prefix}byteorder"]) if f"{prefix}byteorder" in entries else b"little"
    )
    pickled = bytes(whole.entry(entries[f"{prefix}data.pkl"]))
    is_big = bytes(order).strip() == b"big"

    def storage(pid: Any) -> Storage:
        tag, kind, key = pid[0], pid[1], name_of(pid[2])
        if tag != "storage":
            raise UnreadableRun(f"{file.name} refers to something that torch.save does not write")
        entry = entries.get(f"{prefix}data/{key}") or entries.get(f"{prefix}{key}")

        def read() -> Bytes:
            if entry is None:
                raise ElementsMissing(f"{file.name} has no storage {key!r}")
            return file.entry(entry)

        return Storage(key, _storage_dtype(kind)[0], read, is_big)

    if len(pickled) <= _ONE_TENSOR and (alone := _of_one_tensor(pickled)):
        return replace(alone[0], storage=storage(alone[1]))
    return PickleMachine(File(pickled, f"{file.name}: data.pkl"), file.name, storage).run(0)[0]


@functools.lru_cache(maxsize=256)
def _of_one_tensor(pickled: bytes) -> tuple[TorchTensor, Any] | None:
    """Returns (tensor, the name of its storage) of a pickle of one tensor, None for any other;
    cached, since the files of a folder differ in their elements alone.
    """
    names: list[Any] = []

    def storage(pid: Any) -> Storage:
        names.append(pid)
        return Storage("", _storage_dtype(pid[1])[0], lambda: np.empty(0, np.uint8))

    try:
        tree = PickleMachine(File(pickled), "", storage).run(0)[0]
    except (UnreadableRun, LookupError, TypeError, ValueError):
        return None  # the parser of any other pickle says what is wrong, with the file's name
    return (tree, *names) if isinstance(tree, TorchTensor) and len(names) == 1 else None


def _from_sequence(file: File) -> Any:
    """Reads the older format: magic, protocol, system, object, keys of storages, then each storage:
    a count of elements and the elements, little endian.
    """
    sizes: dict[str, int] = {}
    starts: dict[str, tuple[int, int]] = {}

    def storage(pid: Any) -> Any:
        if pid[0] == "module":  # a class, with its source; what is left is its name
            return pid[1]
        _, kind, key, _, _, *tail = pid
        key, (dtype, size) = name_of(key), _storage_dtype(kind)
        view = tail[0] if tail else None
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
        _, place = PickleMachine(file, file.name, lambda pid: _refused(file.name, pid)).run(place)
    tree, place = PickleMachine(file, file.name, storage).run(place)
    keys, place = PickleMachine(file, file.name, lambda pid: _refused(file.name, pid)).run(place)
    if not isinstance(keys, list):
        raise UnreadableRun(f"{file.name} has no list of storages")
    for key in map(name_of, keys):
        # the start of the next one is then unknown
        if not sizes.get(key) or place + 8 > file.size:
            break
        nbytes = int.from_bytes(bytes(file.part(place, 8)), "little") * sizes[key]
        starts[key] = (place + 8, nbytes)
        place += 8 + nbytes
    else:
        file.all_read(0, min(place, file.size))
    return tree


def _plain(file: File, start: int) -> Any:
    """Returns the object of a pickle in which each storage is a torch.save file of its own, as
    bytes; a list of the objects of several pickles behind each other, as hooks append them.
    """
    storages: dict[int, tuple[Any, Any]] = {}
    objects: list[Any] = []

    def inline(data: Any) -> Any:
        if id(data) not in storages:  # the bytes are kept: their number stays theirs
            storages[id(data)] = data, _from_sequence(File(bytes(data), file.name))
        return storages[id(data)][1]

    makers = {**MAKERS, "torch.storage._load_from_bytes": inline}
    while not objects or (start < file.size and objects != [_MAGIC]):
        machine = PickleMachine(file, "", lambda pid: _refused(file.name, pid), makers)
        item, start = machine.run(start)
        objects.append(item)
    return objects if len(objects) > 1 else objects[0]


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
    """Returns (dtype of a storage, bytes of an element). An unknown one keeps the file's name and
    has 0 bytes.
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
