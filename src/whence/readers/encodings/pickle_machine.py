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
        elif op == "SETITEMS":
            items = self.marked()
            put_into(stack[-1], items)
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
        elif op == "BINPERSID":
            stack.append(self.storage(tuple_of(stack.pop())))
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
        data = self._data[self.place : self.place + max(n, 0)].tobytes()
        self.place += len(data)
        return data

    def readline(self) -> bytes:
        line = self._data[self.place : self.place + _LINE_BYTES].tobytes()
        line = line[: line.find(b"\n") + 1]
        self.place += len(line)
        return line

    def tell(self) -> int:
        return self.place
