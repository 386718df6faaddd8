"""Small files that a user writes, in YAML or TOML: read within limits, whatever stands in them.

Parsers of both end in a RecursionError, a ValueError of `int` or worse when nesting or numbers are
absurd; a few lines of YAML that refer to each other unfold to more than any memory holds. Here each
of these is a `NotConfig` with one sentence.
"""

from __future__ import annotations

import errno
import os
import re
import tomllib
from typing import Any

import yaml

_CHARACTERS = 16 << 20
_DEPTH = 64
_OPEN = 2 * _DEPTH
_NODES = 1_000_000  # with aliases unfolded
_DIGITS = 4300  # as many as Python itself takes
_BITS = 1023  # as many as a float takes
# tomllib takes minutes for keys of many parts.
_DEEP_KEY = re.compile(rf"^[ \t\[]*[^=\n#\"']*?(?:\.[^=.\n#\"']*){{{_DEPTH}}}", re.MULTILINE)


def text_of(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """The text of a file that a user writes. Raises OSError, also where it is larger than such a
    file is, and UnicodeDecodeError.
    """
    with open(path, "rb") as file:  # noqa: PTH123 - of any path
        data = file.read(4 * _CHARACTERS + 1)
    if len(data) > 4 * _CHARACTERS:
        raise OSError(
            errno.EFBIG, f"larger than the {4 * _CHARACTERS} bytes that are read", str(path)
        )
    return data.decode(encoding)


class NotConfig(Exception):
    """Why the text cannot be used. line: from 1, 0 where it is not known."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {reason}" if line else reason)
        self.reason, self.line = reason, line


def yaml_tree(text: str) -> yaml.Node | None:
    """The nodes of a YAML text, with their lines; None of an empty one. Raises NotConfig."""
    _check_length(text)
    _check_brackets(text)
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise NotConfig(
            f"not YAML: {reason[:200]}", mark.line + 1 if mark is not None else 0
        ) from error
    except RecursionError as error:
        raise NotConfig("nested too deeply") from error
    if tree is not None:
        _unfolded(tree, {}, 0)
    return tree


def yaml_value(text: str) -> Any:
    """The value of a YAML text: dicts, lists and scalars; nothing else is made of it. Raises
    NotConfig.
    """
    tree = yaml_tree(text)
    if tree is None:
        return None
    try:
        value = yaml.SafeLoader("").construct_document(tree)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise NotConfig(
            f"not YAML: {' '.join(str(error).split())[:200]}",
            mark.line + 1 if mark is not None else 0,
        ) from error
    except RecursionError as error:
        raise NotConfig("nested too deeply") from error
    except (
        Exception
    ) as error:  # "2026-13-45" is not a date, and a number of a million digits none for Python
        raise NotConfig(
            f"a value that cannot be read: {str(error)[:120] or type(error).__name__}"
        ) from error
    _check_numbers(value)
    return value


def toml_value(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises NotConfig."""
    _check_length(text)
    if found := _DEEP_KEY.search(text):
        raise NotConfig("nested too deeply", text.count("\n", 0, found.start()) + 1)
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise NotConfig("nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        raise NotConfig(f"not TOML: {str(error)[:200]}") from error
    except Exception as error:  # as above
        raise NotConfig(
            f"a value that cannot be read: {str(error)[:120] or type(error).__name__}"
        ) from error
    _check_numbers(table)
    return table


def _check_numbers(value: Any) -> None:
    """Raise NotConfig for a whole number that is larger than any float: hexadecimal ones are read
    whatever their length, and neither a float nor the words of an error can be made of them.
    """
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise NotConfig(f"a value that cannot be read: a whole number of {value.bit_length()} bits")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(key)
            _check_numbers(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _check_numbers(item)


def _check_length(text: str) -> None:
    if len(text) > _CHARACTERS:
        raise NotConfig(
            f"it has {len(text)} characters; files of this kind are read up to {_CHARACTERS}"
        )


def _check_brackets(text: str) -> None:
    """Raise NotConfig for more open brackets in a line than any config has: PyYAML looks at each of
    them again at every character.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if line.count("[") + line.count("{") <= _OPEN:
            continue
        depth = 0
        for character in line:
            depth += (character in "[{") - (character in "]}")
            if depth > _OPEN:
                raise NotConfig("nested too deeply", number)


def _unfolded(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """How many nodes a node holds when every alias is written out. Raises NotConfig for too many,
    too deep, or a circle.
    """
    line = node.start_mark.line + 1 if node.start_mark is not None else 0
    if depth > _DEPTH:
        raise NotConfig("nested too deeply", line)
    if (
        isinstance(node, yaml.ScalarNode)
        and not node.tag.endswith((":str", ":binary"))
        and len(node.value) > _DIGITS
    ):
        raise NotConfig(f"a number of {len(node.value)} characters", line)
    count = known.get(id(node))
    if count == -1:
        raise NotConfig("part of itself, through an alias", line)
    if count is not None:
        return count
    known[id(node)] = -1
    parts = (
        [p for pair in node.value for p in pair]
        if isinstance(node, yaml.MappingNode)
        else node.value
    )
    count = (
        1 + sum(_unfolded(part, known, depth + 1) for part in parts)
        if not isinstance(node, yaml.ScalarNode)
        else 1
    )
    if count > _NODES:
        raise NotConfig(f"its aliases unfold to more than {_NODES} values", line)
    known[id(node)] = count
    return count
