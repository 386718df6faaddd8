"""Walks a pickle without unpickling: a stack, a memo and the values of `pickle_values`. Source: the
documentation of pickletools.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from whence.errors import UnreadableRun
from whence.readers.encodings.archive import File
from whence.readers.encodings.pickle_values import (
    Global,
    append_to,
    built,
    called,
    put_into,
    text_of,
    tuple_of,
)

_LINE_BYTES = 1 << 16  # of a name in a pickle


class _Mark:
    pass


class PickleMachine:
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
        self.stack.append(self.memo[int(arg)])

    def _move(self, op: str, arg: Any) -> None:
        """Operations on the stack alone."""
        stack = self.stack
        if op == "MARK":
            stack.append(_Mark())
        elif op == "DUP":
            stack.append(stack[-1])
        elif op == "POP":
            stack.pop()
        else:  # POP_MARK
            self.marked()

    def _collect(self, op: str, arg: Any) -> None:
        """Operations that make containers or fill them."""
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
            put_into(stack[-1], items)
        elif op == "APPEND":
            item = stack.pop()
            append_to(stack[-1], [item])
        elif op in ("APPENDS", "ADDITEMS"):
            items = self.marked()
            append_to(stack[-1], items)
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            put_into(stack[-1], [key, value])
        else:  # SETITEMS
            items = self.marked()
            put_into(stack[-1], items)

    def _construct(self, op: str, arg: Any) -> None:
        """Operations that name a class or make an object."""
        stack = self.stack
        if op == "GLOBAL":
            stack.append(Global(arg.replace(" ", ".", 1)))
        elif op == "INST":
            stack.append(called(Global(arg.replace(" ", ".", 1)), tuple(self.marked())))
        elif op == "STACK_GLOBAL":
            last, module = stack.pop(), stack.pop()
            stack.append(Global(f"{text_of(module)}.{text_of(last)}"))
        elif op in ("REDUCE", "NEWOBJ"):
            args, target = stack.pop(), stack.pop()
            stack.append(called(target, tuple_of(args)))
        elif op == "NEWOBJ_EX":
            named, args, target = stack.pop(), stack.pop(), stack.pop()
            stack.append(called(target, (*tuple_of(args), named)))
        elif op == "OBJ":
            target, *arguments = self.marked()
            stack.append(called(target, tuple(arguments)))
        elif op == "BUILD":
            state = stack.pop()
            stack[-1] = built(stack[-1], state)
        else:  # BINPERSID
            stack.append(self.storage(tuple_of(stack.pop())))

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
_FOLLOW: dict[str, Callable[[PickleMachine, str, Any], None]] = {
    name: follow
    for names, follow in (
        (_IGNORED, PickleMachine._ignore),
        (_CONSTANTS, PickleMachine._constant),
        (_VALUES, PickleMachine._value),
        (_EMPTY, PickleMachine._empty),
        (("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"), PickleMachine._remember),
        (("BINGET", "LONG_BINGET", "GET"), PickleMachine._recall),
        (("MARK", "DUP", "POP", "POP_MARK"), PickleMachine._move),
        ((*_TUPLES, "TUPLE", "LIST", "FROZENSET", "DICT"), PickleMachine._collect),
        (("APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS"), PickleMachine._collect),
        (("GLOBAL", "INST", "STACK_GLOBAL", "REDUCE", "NEWOBJ"), PickleMachine._construct),
        (("NEWOBJ_EX", "OBJ", "BUILD", "BINPERSID"), PickleMachine._construct),
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
"""By its byte: (name, how its argument is read, what it does) of every operation of a pickle."""


class _Stream:
    """What pickletools reads from: never more than asked for, and no endless lines."""

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
