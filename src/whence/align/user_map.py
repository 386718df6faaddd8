"""A map: what a user says of which calls are paired. Read from YAML; no framework, no data.

    names:                                    # the target's names, rewritten before anything is paired
      - {from: "decoder.block.{i}.attn.*", to: "model.layers.{i}.self_attn.*"}
    pairs:                                    # these are paired
      - reference: model.layers.{i}.self_attn.q_proj
        target: model.layers.{i}.self_attn.qkv_proj
        slots: {output.0: "x[..., 0:192]", param.weight: "x[0:192]"}
      - reference: model.layers.{i}.mlp.gate_up
        target: {g: "model.layers.{i}.mlp.gate", u: "model.layers.{i}.mlp.up"}
        slots: {output.0: "cat(g, u, axis=-1)"}
      - reference: model.norm
        target: model.norm
        slots: {output.0: {dims: a + b, a: output.0, b: output.1}, input.1: null}
    ranks:                                    # how tensors are laid out over ranks
      - {names: "model.layers.*.mlp.down_proj", slot: output.0, as: sum}
      - {names: "*", slot: input.hidden_states, as: zigzag, axis: 1}
    ignore: {reference: ["*.dropout"], target: ["*.rotary_emb"]}

`{i}` stands for one component of a name or a part of one, `*` for anything; both hold on either
side of an entry.
"""  # noqa: E501

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from whence import config_files
from whence.align.dims import Node, Unfit, parse
from whence.align.ranks.shards import HOW, Shard
from whence.errors import UsageError

_TOP = ("names", "pairs", "ranks", "ignore")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewriting rule: names of the target that match `old` are read as `new`."""

    old: str
    new: str
    line: int


@dataclass(frozen=True, slots=True)
class Slot:
    """How a slot is made. names: operand -> slot of the target. dims: None to leave it out."""

    dims: Node | None
    names: tuple[tuple[str, str], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A pair of the map. target: operand name -> pattern; the only operand is called "x"."""

    reference: str
    target: tuple[tuple[str, str], ...]
    slots: Mapping[str, Slot]
    line: int


@dataclass(frozen=True, slots=True)
class Map:
    """The content of a map file."""

    path: str
    names: tuple[Rewrite, ...] = ()
    pairs: tuple[Entry, ...] = ()
    ignore_reference: tuple[tuple[str, int], ...] = ()
    ignore_target: tuple[tuple[str, int], ...] = ()
    ranks: tuple[Shard, ...] = ()

    def error(self, line: int, message: str) -> UsageError:
        """The error for a line of the file."""
        return UsageError(f"{self.path}, line {line}: {message}")


# ---- reading


def load(path: str | os.PathLike[str]) -> Map:
    """Read a map. Raises UsageError with the line and the known keys."""
    name = os.fspath(path)
    try:
        text = config_files.text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"no map at {name}: {error}; whence align REF TGT -o {name} writes one"
        ) from error
    try:
        tree = config_files.yaml_tree(text)
    except config_files.NotConfig as error:
        raise UsageError(
            f"{name}{f', line {error.line}' if error.line else ''}: {error.reason}"
        ) from error
    return _Reader(name).map(tree)


class _Reader:
    def __init__(self, path: str) -> None:
        self.path = path

    def map(self, tree: yaml.Node | None) -> Map:
        if tree is None:
            return Map(self.path)
        top = self._table(tree, "the map", _TOP)
        names = tuple(self._rewrite(n) for n in self._list(top.get("names"), "names"))
        pairs = tuple(self._entry(n) for n in self._list(top.get("pairs"), "pairs"))
        ignore = (
            self._table(top["ignore"], "ignore", ("reference", "target")) if "ignore" in top else {}
        )
        sides = [
            tuple(
                (self._text(n, "ignore"), _line(n))
                for n in self._list(ignore.get(s), f"ignore.{s}")
            )
            for s in ("reference", "target")
        ]
        return Map(
            self.path,
            names,
            pairs,
            sides[0],
            sides[1],
            tuple(self._shard(n) for n in self._list(top.get("ranks"), "ranks")),
        )

    def _shard(self, node: yaml.Node) -> Shard:
        table = self._table(
            node, "an entry of ranks", ("names", "slot", "as", "axis"), needed=("names", "as")
        )
        slot = self._text(table["slot"], "slot") if "slot" in table else "*"
        axis = self._text(table["axis"], "axis") if "axis" in table else "-1"
        if not axis.removeprefix("-").isdigit():
            raise self._error(table["axis"], f"axis: {axis!r} is not a whole number")
        how = self._text(table["as"], "as")
        if how not in HOW:
            raise self._error(table["as"], f"as: {how!r} is not known; there are {', '.join(HOW)}")
        return Shard(
            self._text(table["names"], "names"),
            how,
            int(axis),
            slot,
            f"{self.path}, line {_line(node)}",
        )

    def _rewrite(self, node: yaml.Node) -> Rewrite:
        table = self._table(node, "an entry of names", ("from", "to"), needed=("from", "to"))
        old, new = self._text(table["from"], "from"), self._text(table["to"], "to")
        self._holds(old, new, node, "to")
        return Rewrite(old, new, _line(node))

    def _entry(self, node: yaml.Node) -> Entry:
        table = self._table(
            node,
            "an entry of pairs",
            ("reference", "target", "slots"),
            needed=("reference", "target"),
        )
        reference = self._text(table["reference"], "reference")
        target_node = table["target"]
        if isinstance(target_node, yaml.MappingNode):
            target = tuple(
                (name, self._text(n, "target"))
                for name, n in self._table(target_node, "target").items()
            )
        else:
            target = (("x", self._text(target_node, "target")),)
        for name, pattern in target:
            if not name.isidentifier():
                raise self._error(
                    target_node,
                    f"target: {name!r} cannot be used in an expression; give it a name like q",
                )
            self._holds(reference, pattern, target_node, "target")
        slots = {}
        if "slots" in table:
            for slot, how in self._table(table["slots"], "slots").items():
                slots[slot] = self._slot(how, [name for name, _ in target])
        if len(target) > 1 and not any(s.dims is not None for s in slots.values()):
            raise self._error(
                node,
                "several calls of the target need slots with an expression that joins them, like "
                "cat(q, k, axis=-1)",
            )
        return Entry(reference, target, slots, _line(node))

    def _slot(self, node: yaml.Node, operands: Sequence[str]) -> Slot:
        names: tuple[tuple[str, str], ...] = ()
        expression = node
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
            return Slot(None, (), _line(node))
        if isinstance(node, yaml.MappingNode):
            table = self._table(node, "a slot", needed=("dims",))
            expression = table.pop("dims")
            names = tuple((name, self._text(n, name)) for name, n in table.items())
            operands = [*operands, *(name for name, _ in names)]
        try:
            return Slot(parse(self._text(expression, "dims"), operands[0]), names, _line(node))
        except Unfit as error:
            raise self._error(expression, str(error)) from None

    def _holds(self, old: str, new: str, node: yaml.Node, key: str) -> None:
        have, want = set(_placeholders(old)), _placeholders(new)
        missing = [w for w in want if w not in have and w != "*"]
        if missing or want.count("*") > _placeholders(old).count("*"):
            raise self._error(
                node,
                f"{key}: {new!r} uses {', '.join(missing) or 'more * than'}, which {old!r} does "
                "not hold",
            )

    def _table(
        self,
        node: yaml.Node,
        subject: str,
        allowed: Sequence[str] = (),
        *,
        needed: Sequence[str] = (),
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(
                node, f"{subject} must be a table of {', '.join(allowed or needed) or 'names'}"
            )
        out: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self._text(key, "a key")
            if allowed and name not in allowed:
                near = difflib.get_close_matches(name, allowed, 1)
                raise self._error(
                    key,
                    f"{name!r} is not known in {subject}; "
                    f"{f'{near[0]!r}?' if near else 'known: ' + ', '.join(allowed)}",
                )
            if name in out:
                raise self._error(key, f"{name!r} is there twice in {subject}")
            out[name] = value
        for name in needed:
            if name not in out:
                raise self._error(node, f"{subject} needs {name!r}")
        return out

    def _list(self, node: yaml.Node | None, subject: str) -> list[yaml.Node]:
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
            return []
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, f"{subject} is not a list")
        return list(node.value)

    def _text(self, node: yaml.Node, subject: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, f"{subject} is not text")
        return str(node.value)

    def _error(self, node: yaml.Node, message: str) -> UsageError:
        return UsageError(f"{self.path}, line {_line(node)}: {message}")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _placeholders(pattern: str) -> list[str]:
    return re.findall(r"\*|\{\w+\}", pattern)


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression: {i} matches within a component, the same text each time; *
    matches anything.
    """
    out, names, stars = [], set(), 0
    for part in re.split(r"(\*|\{\w+\})", pattern):
        if part == "*":
            out.append(f"(?P<star{stars}>.*)")
            stars += 1
        elif part.startswith("{") and part.endswith("}") and len(part) > 2:
            name = part[1:-1]
            out.append(f"(?P=n_{name})" if name in names else f"(?P<n_{name}>[^.]+?)")
            names.add(name)
        else:
            out.append(re.escape(part))
    return re.compile("".join(out))


def filled(pattern: str, match: re.Match[str]) -> str:
    groups, stars = match.groupdict(), iter(range(len(match.groups())))

    def one(match: re.Match[str]) -> str:
        return groups[f"star{next(stars)}"] if match[0] == "*" else groups[f"n_{match[0][1:-1]}"]

    return re.sub(r"\*|\{\w+\}", one, pattern)
