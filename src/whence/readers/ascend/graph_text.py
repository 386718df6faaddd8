"""Reads graphs of GE in readable form: protobuf text (`dynamo_*.txt`, `ge_proto_*.txt`) and the
JSON of an offline model.

Source of the text form: https://protobuf.dev/reference/protobuf/textformat-spec/.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from whence.errors import UnreadableRun

Message = dict[str, list[Any]]

_BYTES = 1 << 30  # of one graph file
_DEPTH = 64  # of messages in messages
_TORCHS = re.compile(r"\s*class \S+\(torch\.nn\.Module\):")
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<name>[A-Za-z_][\w.\-/]*)|(?P<number>[-+]?[0-9.][\w.+\-]*|-inf\b|-nan\b)"""
    r"""|(?P<string>"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+')|(?P<mark>[{}<>\[\]:,;])"""
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def parsed(text: str, label: str) -> Message:
    """Parses a message in protobuf text form: every field is a list of its values, messages are
    dicts, all other values are strings.

    label: names the text in errors. Raises UnreadableRun when the text is not such a message.
    """
    top: Message = defaultdict(list)
    stack: list[tuple[Message, str]] = [(top, "")]
    field, lists = "", 0
    glued = False  # the token before was a string that this one may go on
    for kind, word, place in _tokens(text, label):
        message, end = stack[-1]
        if kind == "string" and glued:
            message[field][-1] += _unescaped(word)
            continue
        glued = False
        if word in "{<" and kind == "mark":
            if not field or len(stack) > _DEPTH:
                raise UnreadableRun(
                    f"{label}: a message at character {place} has no name, or is nested "
                    f"{_DEPTH} deep"
                )
            inner: Message = defaultdict(list)
            message[field].append(inner)
            stack.append((inner, "}" if word == "{" else ">"))
            field = field if lists else ""
        elif kind == "mark" and word in "}>":
            if word != end or len(stack) == 1:
                raise UnreadableRun(f"{label}: {word} at character {place} ends nothing")
            stack.pop()
            field = ""
        elif kind == "mark":
            lists += {"[": 1, "]": -1}.get(word, 0)
        elif kind == "string":
            message[field].append(_unescaped(word))
            glued = True
        elif kind == "name" and (not field or not _takes_value(text, place)):
            field = word
        else:
            message[field].append(word)
    if len(stack) > 1:
        raise UnreadableRun(f"{label} ends within a message")
    return top


def _takes_value(text: str, place: int) -> bool:
    """Whether the name that starts here is a value (`key: DT_FLOAT`), not a field."""
    i = place - 1
    while i >= 0 and text[i] in " \t\r\n":
        i -= 1
    return i >= 0 and text[i] in ":[,"


def _tokens(text: str, label: str) -> Iterator[tuple[str, str, int]]:
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise UnreadableRun(
                f"{label}: {text[place : place + 20]!r} at character {place} is not protobuf text"
            )
        if match.lastgroup != "space":
            yield str(match.lastgroup), match.group(), place
        place = match.end()


def _unescaped(quoted: str) -> str:
    inner = quoted[1:-1]
    if "\\" not in inner:
        return inner
    raw = bytearray()
    last = 0
    for match in _ESCAPE.finditer(inner):
        raw += inner[last : match.start()].encode()
        octal, hexadecimal, letter = match.groups()
        if letter is None:
            raw.append(int(octal, 8) & 0xFF if octal else int(hexadecimal, 16))
        else:
            raw += _PLAIN.get(letter, letter).encode()
        last = match.end()
    raw += inner[last:].encode()
    return raw.decode("utf-8", "backslashreplace")


class Node(NamedTuple):
    """One operator of a graph.

    inputs: (producer, its output) of every input that is data, in order; ("", 0) for one that is
    left out. fx: name of the FX node of each stamped output. origins: operators of the original
    program that were fused into it; None when not stated.
    """

    name: str
    type: str
    inputs: tuple[tuple[str, int], ...]
    fx: tuple[str, ...]
    origins: tuple[str, ...] | None


class Graph:
    """The operators of one graph by name. path: the file it comes from."""

    def __init__(self, name: str, nodes: Iterable[Node], path: str = "") -> None:
        self.name, self.path = name, path
        self.nodes: Mapping[str, Node] = {node.name: node for node in nodes}

    @cached_property
    def fx_names(self) -> Mapping[str, str]:
        """FX node of every operator: its own stamp; without one, the common FX node of its readers,
        since only the last operator of an FX node has the stamp. Operators that several FX nodes
        read, and inputs of the graph, have none.
        """
        readers: dict[str, list[str]] = defaultdict(list)
        for node in self.nodes.values():
            for producer, _ in node.inputs:
                readers[producer].append(node.name)
        owner: dict[str, str] = {}
        for node in reversed(self.in_order()):
            if node.fx:
                owner[node.name] = node.fx[0].rpartition(".OUTPUT.")[0].partition("-")[0]
            elif node.type not in _SOURCES:
                owners = {owner.get(reader, "") for reader in readers[node.name]}
                if len(owners) == 1 and "" not in owners:
                    owner[node.name] = owners.pop()
        return owner

    def in_order(self) -> list[Node]:
        """Returns producers before readers; operators in a cycle come last."""
        waiting = {
            name: len({p for p, _ in node.inputs if p in self.nodes and p != name})
            for name, node in self.nodes.items()
        }
        readers: dict[str, set[str]] = defaultdict(set)
        for name, node in self.nodes.items():
            for producer, _ in node.inputs:
                if producer in self.nodes and producer != name:
                    readers[producer].add(name)
        ready = [name for name, count in waiting.items() if not count]
        out: list[str] = []
        for name in ready:  # grows while it is walked
            out.append(name)
            for reader in readers[name]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    ready.append(reader)
        ordered = set(out)
        return [self.nodes[name] for name in (*out, *(n for n in self.nodes if n not in ordered))]

    def feeds(self, name: str, reader: str) -> bool:
        """Whether an operator reads an output of another."""
        node = self.nodes.get(reader)
        return node is not None and any(producer == name for producer, _ in node.inputs)


_SOURCES = frozenset({
    "Data", "RefData", "AnyData", "Const", "Constant", "ConstPlaceHolder", "Variable",
    "PlaceHolder", "FileConstant",
})  # fmt: skip


def graphs(path: Path) -> list[Graph]:
    """Returns the graphs in a file of protobuf text or JSON. Raises UnreadableRun that says what is
    wrong with it.
    """
    return [Graph(name, map(node, operators), path.name) for name, operators in messages(path)]


def messages(path: Path) -> list[tuple[str, list[Message]]]:
    """Returns (name, operators as stored in the file) of every graph in it. Raises
    UnreadableRun.
    """
    try:
        if path.stat().st_size > _BYTES:
            raise UnreadableRun(
                f"{path.name} has more than {_BYTES} bytes; a graph that large is not read"
            )
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableRun(f"cannot read {path.name}: {error.strerror or error}") from error
    if b"\0" in data:  # before it takes several times its size as text
        raise UnreadableRun(f"{path.name} is binary, not the text of a graph")
    text = data.decode("utf-8", "backslashreplace")
    del data
    if _TORCHS.match(text):
        return []  # a graph of FX as torch prints it: what is dumped is called as its nodes
    if path.suffix == ".json":
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnreadableRun(f"{path.name} is not JSON: {error}") from error
    else:
        message = parsed(text, path.name)
    if not isinstance(message, dict):
        raise UnreadableRun(f"{path.name} is not the graph of a model")
    wrapped = [g for g in many(message, "graph") if isinstance(g, dict)]
    by_graph = [
        (text_of(one(g, "name")), [op for op in many(g, "op") if isinstance(op, dict)])
        for g in (wrapped or [message])
    ]
    return [(name, operators) for name, operators in by_graph if operators]


def node(op: Mapping[str, Any]) -> Node:
    """Converts an operator as returned by `messages`."""
    attributes = attributes_of(op)
    inputs = [_input(text_of(entry)) for entry in many(op, "input")]
    outputs = [o for o in many(op, "output_desc") if isinstance(o, dict)]
    stamps = (
        text_of(one(value, "s"))
        for o in outputs
        if (value := attributes_of(o).get("_fx_tensor_name")) is not None
    )
    names = attributes.get("_datadump_original_op_names")
    origins = (
        None
        if names is None
        else tuple(text_of(s) for entry in many(names, "list") for s in many(entry, "s"))
    )
    return Node(
        text_of(one(op, "name")),
        text_of(one(op, "type")),
        tuple(i for i in inputs if i is not None),
        tuple(filter(None, stamps)),
        origins,
    )


def _input(text: str) -> tuple[str, int] | None:
    """Splits "producer:output"; None for a control edge, which carries no tensor."""
    producer, _, output = text.rpartition(":")
    if not producer:
        return (text, 0)
    return None if output == "-1" else (producer, int(output) if output.isdigit() else 0)


def attributes_of(of: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the attributes of an operator or tensor by key, each a message with one of s, i, f,
    b, list, t.
    """
    out: dict[str, Mapping[str, Any]] = {}
    for attribute in many(of, "attr"):
        value = one(attribute, "value") if isinstance(attribute, dict) else None
        if isinstance(value, dict):
            out[text_of(one(attribute, "key"))] = value
    return out


def many(message: Any, field: str) -> list[Any]:
    """Returns the values of a repeated field, which JSON and text write as a list, as one value, or
    not at all.
    """
    value = message.get(field) if isinstance(message, dict) else None
    return value if isinstance(value, list) else [] if value is None else [value]


def one(message: Any, field: str) -> Any:
    """Returns the last value of a field, None without one."""
    values = many(message, field)
    return values[-1] if values else None


def text_of(value: Any) -> str:
    """Returns a string; "" for any other value."""
    return value if isinstance(value, str) else ""
