"""Texts of a run without what is private: paths, user, hosts, commit, words of the command.

Names that a comparison pairs by (scopes, operators, slots) stay. All other texts are cleaned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import msgspec

from whence.errors import UnreadableRun
from whence.records import RunInfo

GONE = "<scrubbed>"
_NOBODY = "scrubbed"

# What calls are paired and replayed by, and what holds no text of anybody's.
_STRUCTURE = frozenset((
    "t", "id", "scope", "root", "op", "op_type", "phase", "kind", "number", "dtype", "hash",
    "program", "refs", "in", "aliases", "origins", "statistics", "sketch", "shape", "stride",
    "inputs", "outputs", "params", "names", "scopes", "picks", "same", "grad", "input_dtypes",
    "base", "default_dtype", "operations", "constants", "fixed", "equal", "calls", "subclass",
))  # fmt: skip
# A path of two parts or more from a root on, and a Python file by any path.
_PART = r"[^\s\x00-\x1f/'\"<>|:;,(){}\[\]\\]+"
_PATH = rf"(?<![\w.])(?:~|[A-Za-z]:)?(?:/{_PART}){{2,}}/?|[^\s\x00-\x1f'\"<>|:;,(){{}}\[\]\\=]+\.(?:py|ipynb|sh)\b"  # noqa: E501
_LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|lib/python[\d.]+)/(.+)")
_PUBLIC = (
    "torch",
    "transformers",
    "paddle",
    "accelerate",
    "onnxruntime",
    "openvino",
    "builtins",
    "__main__",
)
_SOURCE_LINE = re.compile(r"(.*):(\d+)")
# an attribute of a ProgramDesc: its name, and that it holds strings
_STACK = re.compile(rb"\x0a\x0cop_callstack\x10\x05")
_STRINGS = 0x42
# the same attribute of PIR in JSON, {"AT": {"#": "0.a_array", "D": [...]}, "N": "op_callstack"}
_JSON_STACK = rb'"N"\s*:\s*"op_callstack"'
_JSON_TOKEN = re.compile(rb'%s|"(?:[^"\\]|\\.)*"|[{}]' % _JSON_STACK, re.DOTALL)
_JSON_WORD = re.compile(rb'"(?:AT|N|D|#|\d+\.[a-z]_\w+)"')
_LEAST = 3  # letters of a name that is looked for in texts
_LEAST_WORD = 5  # of a word of a command, where it looks like one of the language


class Anonymous:
    """Cleans the texts of one run. info, hosts: hold its private words. Idempotent."""

    def __init__(self, info: RunInfo, hosts: Iterable[str]) -> None:
        hosts = {part for host in (info.host, *hosts) for part in (host, host.partition(".")[0])}
        words = {info.user, *hosts}
        words |= {
            word
            for argument in (*info.command, *info.environment.values())
            for word in _telling(argument)
        }
        paths = (
            {
                info.cwd,
                *(str(parent) for parent in PurePath(info.cwd).parents if len(parent.parts) > 2),
            }
            if info.cwd
            else set()
        )
        wholes = sorted(
            {w for w in words if len(w) >= _LEAST and w not in (GONE, _NOBODY)},
            key=len,
            reverse=True,
        )
        literal = [
            rf"{re.escape(p)}(?!\w)(?:/{_PART})*/?" for p in sorted(paths, key=len, reverse=True)
        ]
        literal += [
            rf"(?<!\w){re.escape(w)}(?!\w)" + (r"(?:\.[A-Za-z][\w-]*)*" if w in hosts else "")
            for w in wholes
        ]
        if commit := re.match(r"[0-9a-f]{7,}", info.git):  # however it is cut short
            literal.append(rf"(?<![0-9a-z]){commit[0][:7]}[0-9a-f]*")
        self._free = re.compile("|".join((*literal, _PATH)))
        self._bytes = re.compile(self._free.pattern.encode("utf-8", "surrogateescape"))
        self._paths = (
            re.compile(
                "|".join(
                    map(re.escape, sorted((p for p in paths if "/" in p), key=len, reverse=True))
                )
            )
            if paths
            else None
        )

    def text(self, text: str) -> str:
        """A free text. Files of libraries keep their path below the library."""
        return self._free.sub(_without, text)

    def source(self, source: str) -> str:
        """`Call.source`: the line and names of public libraries stay, other files and modules
        go.
        """
        if line := _SOURCE_LINE.fullmatch(source):
            library = _LIBRARY.fullmatch(line[1])
            return f"{library[1] if library else GONE}:{line[2]}"
        return source if source.partition(".")[0] in (*_PUBLIC, "", GONE) else GONE

    def value(self, value: Any) -> Any:
        """A JSON value with all texts in it cleaned, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return value

    def line(self, raw: bytes) -> bytes:
        """A line of a journal, its newline included; the same bytes where nothing in it is
        private. Raises UnreadableRun where it is no JSON.
        """
        try:
            fields = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableRun(
                f"a line of the journal is damaged ({error}), so private words in it cannot be "
                "found; the run is not clean, do not share it"
            ) from error
        if not isinstance(fields, dict):
            return b"{}\n"
        cleaned = {name: self._field(name, item) for name, item in fields.items()}
        return raw if cleaned == fields else msgspec.json.encode(cleaned) + b"\n"

    def file(self, data: bytes) -> bytes:
        """A file of another tool, whose offsets must not change: every private byte becomes x."""
        without = _without_json_stacks(_without_stacks(data))
        return self._bytes.sub(lambda match: b"x" * len(match[0]), without)

    def _field(self, name: str, item: Any) -> Any:
        if name == "source" and isinstance(item, str):
            return self.source(item)
        if name == "elements":
            return item  # places in shards; references to files of the user's were taken out
        return self._structure(item) if name in _STRUCTURE else self.value(item)

    def _structure(self, item: Any) -> Any:
        """Names keep all but a path that is known to be private."""
        if self._paths is None:
            return item
        if isinstance(item, str):
            return self._paths.sub(GONE, item)
        if isinstance(item, list):
            return [self._structure(part) for part in item]
        if isinstance(item, dict):
            return {key: self._structure(part) for key, part in item.items()}
        return item


def _without_stacks(data: bytes) -> bytes:
    """A Paddle program with the call stacks of its operators overwritten: strings (field 8) of that
    attribute.
    """
    out = bytearray(data)
    for match in _STACK.finditer(data):
        i = match.end()
        while i < len(data) and data[i] == _STRINGS:
            length = shift = 0
            continues = True
            while continues and (i := i + 1) < len(data):
                length |= (data[i] & 0x7F) << shift
                shift += 7
                continues = bool(data[i] & 0x80)
            end = min(i + 1 + length, len(data))
            out[i + 1 : end] = b"x" * (end - i - 1)
            i = end
    return bytes(out)


def _without_json_stacks(data: bytes) -> bytes:
    """A program of PIR with the call stacks of its operators overwritten: all texts of the object
    that is named so, but for the words of the format.
    """
    if re.search(_JSON_STACK, data) is None:
        return data
    out = bytearray(data)
    texts: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []  # of each object: texts before it; is it a call stack?
    for match in _JSON_TOKEN.finditer(data):
        token = match[0]
        if token == b"{":
            opened.append((len(texts), False))
        elif token == b"}" and opened:
            first, is_stack = opened.pop()
            for start, end in texts[first:] if is_stack else ():
                out[start + 1 : end - 1] = b"x" * (end - start - 2)
            if is_stack or not opened:
                del texts[first:]
        elif token.endswith(b'"op_callstack"') and token != b'"op_callstack"' and opened:
            opened[-1] = opened[-1][0], True
        elif token != b"}" and not _JSON_WORD.fullmatch(token):
            texts.append(match.span())
    return bytes(out)


def _without(match: re.Match[str]) -> str:
    library = _LIBRARY.fullmatch(match[0])
    return library[1] if library else GONE


def _telling(argument: str) -> Iterable[str]:
    """Words of a command that are specific to it, unlike "python", "--dtype" and "bf16"."""
    yield from (
        (argument,) if len(argument) >= _LEAST_WORD and re.search(r"[/\\.:@\s]", argument) else ()
    )
    for word in re.split(r"[\s=,;'\"]+", argument):
        # bfloat16, 1e-5
        if len(word) >= _LEAST_WORD and not re.fullmatch(r"-*[a-z]+\d{0,3}|[-+\d.e]+", word):
            yield word
