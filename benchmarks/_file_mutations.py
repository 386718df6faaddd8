"""Ways to spoil the files of a dump, by what is in them: bytes, lengths, JSON, YAML, archives,
links."""

from __future__ import annotations

import io
import json
import os
import random
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

MOST_BYTES = 4 << 20
NUMBERS = (0, 1, -1, 2, 7, 64, 255, 4096, 65535, 1 << 31, -(1 << 31), (1 << 32) - 1, (1 << 62),
           (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 10**18, 10**40)  # fmt: skip
FLOATS = (0.5, -0.0, 1e308, -1e308, 1e-320, float("inf"), float("-inf"), float("nan"))
NAMES = ("", ".", "..", "../../outside/canary", "/etc/passwd", "a/../../b", "x\0y", "con", "a" * 300,
         "\ud800", "\u202e\u2066", "\x1b[31m", "<script>alert(1)</script>", "=cmd|'/C calc'!A0", "%2e%2e",
         "file:///etc/passwd", "layers.*", "(a+)+$", "{}", "{0.__class__}", "%s%n", "float32", "pad.0")  # fmt: skip
YAML = (
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c]\ne: [*d, *d, *d, *d, *d, *d, *d, *d]\n",
    "!!python/object/apply:os.system ['touch pwned']\n",
    "&a [*a]\n", "? {a: b}\n: c\n", "2026-13-45", "1_000:60:60", "!!binary x", "<<: *x\n", "- " * 3000,
    "[" * 3000, "{a: " * 500, "%YAML 9.9\n---\n", "\t", "a: b: c", "- !!set {}\n", "0x" + "f" * 5000, "- 1e400\n",
)  # fmt: skip


def _bytes(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """One change of bytes."""
    size = len(data)
    at = draw.randrange(size + 1) if draw.random() < 0.5 else draw.randrange(min(size, 512) + 1)
    kind = draw.randrange(9)
    if kind == 0 and size:
        at = min(at, size - 1)
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[at + draw.choice((1, 2, 8, 64, 1000)) :]
    if kind == 3:
        length = draw.choice((1, 4, 16, 200))
        return data[:at] + data[at : at + length] * draw.choice((2, 3, 50)) + data[at + length :]
    if kind == 4:
        return data[:at] + draw.randbytes(draw.choice((1, 4, 40))) + data[at:]
    if kind == 5 and other:
        place = draw.randrange(len(other))
        return data[:at] + other[place : place + draw.choice((8, 100, 5000))] + data[at:]
    if kind == 6:  # what may be a length or an offset
        code = draw.choice(("<I", "<Q", ">I", "<H", "<B"))
        width = struct.calcsize(code)
        value = draw.choice(NUMBERS) & ((1 << 8 * width) - 1)
        return data[:at] + struct.pack(code, value) + data[at + width :]
    if kind == 7:
        end = draw.randrange(at, size + 1)
        return data[:at] + data[end:] + data[at:end]
    return data[:at] + b"\xff" * draw.choice((1, 5, 10)) + data[at + 1 :]


def _numbers_in_text(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """One number or word of a text."""
    found = [*re.finditer(rb"-?\d+(?:\.\d+)?|[A-Za-z_][\w.]*", data[:100_000])]
    if not found:
        return _bytes(draw, data, other)
    match = draw.choice(found)
    if match[0][:1].isalpha():
        new = draw.choice(NAMES).encode("utf-8", "surrogatepass")
    else:
        new = str(draw.choice((*NUMBERS, *FLOATS))).encode()
    return data[: match.start()] + new + data[match.end() :]


def _lines(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """Lines taken away, repeated, moved, or one of another file."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    kind = draw.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines[at:at] = [lines[at]] * draw.choice((1, 2, 100))
    elif kind == 2:
        lines.insert(draw.randrange(len(lines)), lines.pop(at))
    else:
        lines.insert(at, draw.choice(other.split(b"\n"))[:10_000])
    return b"\n".join(lines)


def _value(draw: random.Random) -> object:
    kind = draw.randrange(9)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice(FLOATS)
    if kind < 5:
        return draw.choice(NAMES)
    if kind == 5:
        deep: object = 1
        for _ in range(draw.choice((2, 60, 400))):
            deep = [deep] if draw.random() < 0.5 else {"a": deep}
        return deep
    return draw.choice(
        (None, True, False, [], {}, [0] * 2000, {"a": None}, [[]], [-1, 1 << 40], "x" * 5000)
    )


def edit_tree(draw: random.Random, tree: object) -> object:
    """A tree of JSON with one node changed."""
    places: list[tuple[object, object]] = []
    stack = [tree]
    while stack and len(places) < 20_000:
        node = stack.pop()
        if isinstance(node, dict | list):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            places += [(node, key) for key in keys]
            stack += [node[key] for key in keys]
    if not places or draw.random() < 0.02:
        return _value(draw)
    node, key = draw.choice(places)
    kind = draw.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[draw.choice(NAMES)] = node.pop(key)
    elif kind == 2 and isinstance(node[key], int | float) and abs(node[key]) < 1e300:
        node[key] = draw.choice(
            (node[key] + 1, node[key] - 1, -node[key], node[key] * 1000, str(node[key]))
        )
    elif kind == 3:  # of another place
        other, from_key = draw.choice(places)
        node[key] = (
            other.get(from_key)
            if isinstance(other, dict)
            else (other[from_key : from_key + 1] or [0])[0]
        )
    else:
        node[key] = _value(draw)
    return tree


def _json(draw: random.Random, data: bytes, other: bytes) -> bytes:
    if len(data) > 300_000:
        return _numbers_in_text(draw, data, other)
    try:
        return _dumped(edit_tree(draw, json.loads(data)))
    except (ValueError, RecursionError, KeyError, IndexError):
        return _numbers_in_text(draw, data, other)


def _dumped(tree: object) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _json_lines(draw: random.Random, data: bytes, other: bytes) -> bytes:
    if draw.random() < 0.3:
        return _lines(draw, data, other)
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    lines[at] = _json(draw, lines[at], b"")
    return b"\n".join(lines)


def _safetensors(draw: random.Random, data: bytes, other: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    if draw.random() < 0.2 or length > len(data):
        return _bytes(draw, data, other)
    text = _json(draw, data[8 : 8 + length].rstrip(), b"")
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _npy(draw: random.Random, data: bytes, other: bytes) -> bytes:
    head, rest = data[:128], data[128:]
    return (_numbers_in_text if draw.random() < 0.7 else _bytes)(draw, head, other) + rest


def _zip(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """An archive with one entry changed and sums that are right; or one that unpacks to far more."""
    if draw.random() < 0.3:
        return _bytes(draw, data, other)
    out = io.BytesIO()
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # of a name that stands there twice
            zipfile.ZipFile(io.BytesIO(data)) as old,
            zipfile.ZipFile(out, "w") as new,
        ):
            names = old.namelist()
            chosen = draw.choice(names)
            for name in names:
                content = old.read(name)
                if name == chosen:
                    kind = draw.randrange(6)
                    if kind == 0:
                        continue
                    if kind == 1:
                        name = draw.choice(NAMES).replace("\ud800", "") or "x"
                    elif kind == 2:
                        new.writestr(
                            name, bytes(draw.choice((1 << 20, 1 << 25))), zipfile.ZIP_DEFLATED
                        )
                        continue
                    else:
                        content = (_numbers_in_text if kind == 3 else _bytes)(draw, content, other)
                new.writestr(name, content)
    except (
        ValueError,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        KeyError,
        EOFError,
        IndexError,
        zlib.error,
    ):
        return _bytes(draw, data, other)
    return out.getvalue()


def _yaml(draw: random.Random, data: bytes, other: bytes) -> bytes:
    if draw.random() < 0.4:
        at = draw.randrange(len(data) + 1)
        return data[:at] + draw.choice(YAML).encode() + data[at:]
    return draw.choice((_numbers_in_text, _lines, _bytes))(draw, data, other)


def of_content(name: str, data: bytes) -> list[Callable[[random.Random, bytes, bytes], bytes]]:
    """What may be done to a file of this name and content; the likelier ones more than once."""
    text = data[:200].strip()
    ways = [_bytes]
    if data[:2] == b"PK":
        return [_zip, _zip, _bytes]
    if data[:6] == b"\x93NUMPY":
        return [_npy, _npy, _bytes]
    if name.endswith((".jsonl",)):
        return [_json_lines, _json_lines, _json_lines, _bytes]
    if text[:1] in (b"{", b"[") and name.endswith((".json", "")):
        return [_json, _json, _json, _numbers_in_text, _bytes]
    if name.endswith((".yaml", ".yml", ".toml")):
        return [_yaml]
    if len(data) > 8 and int.from_bytes(data[:8], "little") < len(data) and data[8:9] == b"{":
        return [_safetensors, _safetensors, _bytes]
    if b"\0" not in data[:1000]:
        ways += [_numbers_in_text, _lines, _numbers_in_text]
    return ways


def of_place(draw: random.Random, file: Path, canary: Path) -> None:
    """Put something else where a file was."""
    kind = draw.randrange(8)
    data = file.read_bytes() if file.stat().st_size < MOST_BYTES else b""
    file.unlink()
    if kind == 0:
        file.symlink_to(draw.choice((canary, file.name, "nowhere", ".", "/dev/zero", "/dev/stdin")))
    elif kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        file.mkdir()
    elif kind == 3:
        file.write_bytes(data)
        os.truncate(file, draw.choice((0, 1 << 28, len(data) + 4096)))
    elif kind == 4:
        file.write_bytes(draw.randbytes(50))
    elif kind == 5:
        file.with_name(f"{file.name}.{draw.choice(('npy', 'json', 'bak', 'pt'))}").write_bytes(data)


def mutate(
    draw: random.Random, files: list[Path], canary: Path, steps: list[int] | None = None
) -> int:
    """Spoil one or more files in place. steps: which of the changes are made, None for all; how many
    there are."""
    count = draw.choice((1, 1, 1, 2, 2, 3, 5))
    for step in range(count):
        here = random.Random(draw.getrandbits(64))
        file = here.choice(files)
        if (steps is not None and step not in steps) or not file.is_file() or file.is_symlink():
            continue
        if here.random() < 0.03:
            of_place(here, file, canary)
            continue
        if file.stat().st_size >= MOST_BYTES:
            continue
        data = file.read_bytes()
        others = [
            p for p in files if p.is_file() and not p.is_symlink() and p.stat().st_size < MOST_BYTES
        ]
        other = here.choice(others).read_bytes() if others else b""
        changed = here.choice(of_content(file.name, data))(here, data, other)
        if len(changed) < 4 * MOST_BYTES:
            file.write_bytes(changed)
    return count
