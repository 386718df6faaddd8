"""A map: what a user says of who faces whom. Read from YAML; no framework, no data.

    names:                                    # the target's names, rewritten before anything is paired
      - {from: "decoder.block.{i}.attn.*", to: "model.layers.{i}.self_attn.*"}
    pairs:                                    # this faces that
      - reference: model.layers.{i}.self_attn.q_proj
        target: model.layers.{i}.self_attn.qkv_proj
        slots: {output.0: "x[..., 0:192]", param.weight: "x[0:192]"}
      - reference: model.layers.{i}.mlp.gate_up
        target: {g: "model.layers.{i}.mlp.gate", u: "model.layers.{i}.mlp.up"}
        slots: {output.0: "cat(g, u, axis=-1)"}
      - reference: model.norm
        target: model.norm
        slots: {output.0: {dims: a + b, a: output.0, b: output.1}, input.1: null}
    ranks:                                    # how tensors lie on the ranks of a run
      - {names: "model.layers.*.mlp.down_proj", slot: output.0, as: sum}
      - {names: "*", slot: input.hidden_states, as: zigzag, axis: 1}
    ignore: {reference: ["*.dropout"], target: ["*.rotary_emb"]}

`{i}` stands for one component of a name or a part of one, `*` for anything; both hold on either side of an entry.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from whence.align.derived import Derived, Making
from whence.align.expressions import Node, Unfit, parse
from whence.align.matching import USER_MAP, Matching
from whence.align.plan import pair_of
from whence.align.shards import HOW, Shard
from whence.align.sites import NOT_SELECTED, selected
from whence.errors import UsageError
from whence.records import Call, Run
from whence.results import CallPair, Plan, SlotPair

_TOP = ("names", "pairs", "ranks", "ignore")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Names of the target that match `old` are read as `new`."""

    old: str
    new: str
    line: int


@dataclass(frozen=True, slots=True)
class Slot:
    """How a slot of the reference is made. names: operand -> slot of the target; () for the slot of the same name. None: left out."""

    dims: Node | None
    names: tuple[tuple[str, str], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Entry:
    """Calls of the reference face these calls of the target. target: operand name -> pattern ("x" when there is one)."""

    reference: str
    target: tuple[tuple[str, str], ...]
    slots: Mapping[str, Slot]
    line: int


@dataclass(frozen=True, slots=True)
class Map:
    """A map file, read."""

    path: str
    names: tuple[Rewrite, ...] = ()
    pairs: tuple[Entry, ...] = ()
    ignore_reference: tuple[tuple[str, int], ...] = ()
    ignore_target: tuple[tuple[str, int], ...] = ()
    ranks: tuple[Shard, ...] = ()

    def error(self, line: int, what: str) -> UsageError:
        """An error at a line of the file."""
        return UsageError(f"{self.path}, line {line}: {what}")


# ---- reading


def load(path: str | os.PathLike[str]) -> Map:
    """Read a map. Raises UsageError with the line and the known keys."""
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"no map at {name}: {error}; whence align REF TGT -o {name} writes one") from error
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{name}{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
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
        ignore = self._table(top["ignore"], "ignore", ("reference", "target")) if "ignore" in top else {}
        sides = [
            tuple((self._text(n, "ignore"), _line(n)) for n in self._list(ignore.get(s), f"ignore.{s}")) for s in ("reference", "target")
        ]
        return Map(self.path, names, pairs, sides[0], sides[1], tuple(self._shard(n) for n in self._list(top.get("ranks"), "ranks")))

    def _shard(self, node: yaml.Node) -> Shard:
        table = self._table(node, "an entry of ranks", ("names", "slot", "as", "axis"), needed=("names", "as"))
        slot = self._text(table["slot"], "slot") if "slot" in table else "*"
        axis = self._text(table["axis"], "axis") if "axis" in table else "-1"
        if not axis.removeprefix("-").isdigit():
            raise self._error(table["axis"], f"axis: {axis!r} is not a whole number")
        how = self._text(table["as"], "as")
        if how not in HOW:
            raise self._error(table["as"], f"as: {how!r} is not known; there are {', '.join(HOW)}")
        return Shard(self._text(table["names"], "names"), how, int(axis), slot, f"{self.path}, line {_line(node)}")

    def _rewrite(self, node: yaml.Node) -> Rewrite:
        table = self._table(node, "an entry of names", ("from", "to"), needed=("from", "to"))
        old, new = self._text(table["from"], "from"), self._text(table["to"], "to")
        self._holds(old, new, node, "to")
        return Rewrite(old, new, _line(node))

    def _entry(self, node: yaml.Node) -> Entry:
        table = self._table(node, "an entry of pairs", ("reference", "target", "slots"), needed=("reference", "target"))
        reference = self._text(table["reference"], "reference")
        given = table["target"]
        if isinstance(given, yaml.MappingNode):
            target = tuple((name, self._text(n, "target")) for name, n in self._table(given, "target").items())
        else:
            target = (("x", self._text(given, "target")),)
        for name, pattern in target:
            if not name.isidentifier():
                raise self._error(given, f"target: {name!r} cannot stand in an expression; give it a name like q")
            self._holds(reference, pattern, given, "target")
        slots = {}
        if "slots" in table:
            for slot, how in self._table(table["slots"], "slots").items():
                slots[slot] = self._slot(how, [name for name, _ in target])
        if len(target) > 1 and not any(s.dims is not None for s in slots.values()):
            raise self._error(node, "several calls of the target need slots with an expression that joins them, like cat(q, k, axis=-1)")
        return Entry(reference, target, slots, _line(node))

    def _slot(self, node: yaml.Node, operands: Sequence[str]) -> Slot:
        names: tuple[tuple[str, str], ...] = ()
        given = node
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
            return Slot(None, (), _line(node))
        if isinstance(node, yaml.MappingNode):
            table = self._table(node, "a slot", needed=("dims",))
            given = table.pop("dims")
            names = tuple((name, self._text(n, name)) for name, n in table.items())
            operands = [*operands, *(name for name, _ in names)]
        try:
            return Slot(parse(self._text(given, "dims"), operands[0]), names, _line(node))
        except Unfit as error:
            raise self._error(given, str(error)) from None

    def _holds(self, old: str, new: str, node: yaml.Node, what: str) -> None:
        have, want = set(_placeholders(old)), _placeholders(new)
        missing = [w for w in want if w not in have and w != "*"]
        if missing or want.count("*") > _placeholders(old).count("*"):
            raise self._error(node, f"{what}: {new!r} uses {', '.join(missing) or 'more * than'}, which {old!r} does not hold")

    def _table(
        self, node: yaml.Node, what: str, known: Sequence[str] = (), *, needed: Sequence[str] = ()
    ) -> dict[str, yaml.Node]:  # fmt: skip
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, f"{what} is no table of {', '.join(known or needed) or 'names'}")
        out: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self._text(key, "a key")
            if known and name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise self._error(key, f"{name!r} is not known in {what}; {f'{near[0]!r}?' if near else 'known: ' + ', '.join(known)}")
            if name in out:
                raise self._error(key, f"{name!r} is there twice in {what}")
            out[name] = value
        for name in needed:
            if name not in out:
                raise self._error(node, f"{what} needs {name!r}")
        return out

    def _list(self, node: yaml.Node | None, what: str) -> list[yaml.Node]:
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
            return []
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, f"{what} is no list")
        return list(node.value)

    def _text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, f"{what} is no text")
        return str(node.value)

    def _error(self, node: yaml.Node, what: str) -> UsageError:
        return UsageError(f"{self.path}, line {_line(node)}: {what}")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _placeholders(pattern: str) -> list[str]:
    return re.findall(r"\*|\{\w+\}", pattern)


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression: {i} inside one component, * anything; a name twice must be the same text."""
    out, seen, stars = [], set(), 0
    for part in re.split(r"(\*|\{\w+\})", pattern):
        if part == "*":
            out.append(f"(?P<star{stars}>.*)")
            stars += 1
        elif part.startswith("{") and part.endswith("}") and len(part) > 2:
            name = part[1:-1]
            out.append(f"(?P=n_{name})" if name in seen else f"(?P<n_{name}>[^.]+?)")
            seen.add(name)
        else:
            out.append(re.escape(part))
    return re.compile("".join(out))


def _filled(pattern: str, found: re.Match[str]) -> str:
    groups, stars = found.groupdict(), iter(range(len(found.groups())))

    def one(match: re.Match[str]) -> str:
        return groups[f"star{next(stars)}"] if match[0] == "*" else groups[f"n_{match[0][1:-1]}"]

    return re.sub(r"\*|\{\w+\}", one, pattern)


# ---- carrying out


def prepared(reference: Run, target: Run, chart: Map) -> tuple[Run, Run, Mapping[str, str], list[str]]:
    """(reference, target, new names of the target -> old ones, notes): names rewritten, ignored calls not selected.

    Raises UsageError for patterns that match nothing.
    """
    notes = []
    left = _ignored(reference, chart, chart.ignore_reference, "reference")
    right = _ignored(target, chart, chart.ignore_target, "target")
    for side, before, after in (("reference", reference, left), ("target", target, right)):
        gone = len(selected(before.calls)) - len(selected(after.calls))
        if gone:
            notes.append(f"the map leaves out {gone} calls of the {side}")
    return left, *_renamed(right, chart), notes


def _ignored(run: Run, chart: Map, patterns: Sequence[tuple[str, int]], side: str) -> Run:
    if not patterns:
        return run
    gone: set[int] = set()
    for pattern, line in patterns:
        found = [c.id for c in run.calls if _compiled(pattern).fullmatch(c.scope)]
        if not found:
            raise chart.error(line, f"ignore.{side}: {_nothing(pattern, run, side)}")
        gone.update(found)
    calls = [msgspec.structs.replace(c, notes=(*c.notes, NOT_SELECTED)) if c.id in gone else c for c in run.calls]
    return Derived(run, (), (), calls)


def _renamed(run: Run, chart: Map) -> tuple[Run, Mapping[str, str]]:
    if not chart.names:
        return run, {}
    rules = [(_compiled(r.old), r) for r in chart.names]
    used: set[int] = set()
    new: dict[str, str] = {}
    for scope in dict.fromkeys(c.scope for c in run.calls):
        for at, (expression, rule) in enumerate(rules):
            found = expression.fullmatch(scope)
            if found:
                used.add(at)
                new[scope] = _filled(rule.new, found)
                break
    for at, (_, rule) in enumerate(rules):
        if at not in used:
            raise chart.error(rule.line, f"names.from: {_nothing(rule.old, run, 'target')}")
    calls = [msgspec.structs.replace(c, scope=new[c.scope]) if c.scope in new else c for c in run.calls]
    return Derived(run, (), (), calls), {new: old for old, new in new.items()}


def applied(reference: Run, target: Run, plan: Plan, chart: Map, named: Mapping[str, str]) -> tuple[Run, Plan]:
    """(target with what the map makes of it, plan with its pairs): they take the place of all others of the same calls.

    named: the target's own names by rewritten ones. Raises UsageError for entries that match nothing, contradict or do not fit.
    """
    at = Matching(reference, target, plan)
    at.pairs = {call: _by_name(pair, target, named) for call, pair in at.pairs.items()}
    said: dict[int, tuple[Entry, CallPair]] = {}
    others = _table(selected(target.calls))
    for entry in chart.pairs:
        calls = [(c, m) for c in selected(reference.calls) if (m := _compiled(entry.reference).fullmatch(c.scope))]
        if not calls:
            raise chart.error(entry.line, f"pairs.reference: {_nothing(entry.reference, reference, 'reference')}")
        hit = 0
        for call, match in calls:
            if call.id in said:
                raise chart.error(entry.line, f"{call.scope} was paired on line {said[call.id][0].line} already; leave one of them out")
            facing = {name: _facing(call, _filled(pattern, match), others) for name, pattern in entry.target}
            if all(facing.values()):
                hit += 1
                pair = _explicit(call, facing, entry, chart, reference, target, at.making)  # type: ignore[arg-type]
                said[call.id] = entry, pair
        if not hit:
            call, match = calls[0]
            wanted = next(w for _, pattern in entry.target if _facing(call, w := _filled(pattern, match), others) is None)
            raise chart.error(entry.line, f"pairs.target: {_nothing(wanted, target, 'target')} where {call.scope} is")
    for _, pair in said.values():
        at.free("reference", reference.calls[pair.reference])
        for other in (pair.target, *pair.also):
            at.free("target", target.calls[other])
    for _, pair in said.values():
        at.take(pair)
    return at.done()


def _by_name(pair: CallPair, target: Run, named: Mapping[str, str]) -> CallPair:
    """A pair that rests on a rewritten name says so."""
    old = named.get(target.calls[pair.target].scope)
    return pair if old is None else msgspec.structs.replace(pair, rule=USER_MAP, evidence=f"{old} in the target")


def _table(calls: Iterable[Call]) -> Mapping[tuple[Any, ...], list[Call]]:
    out: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        out[call.scope, call.step, call.micro, call.phase].append(call)
    return out


def _facing(call: Call, scope: str, others: Mapping[tuple[Any, ...], list[Call]]) -> Call | None:
    """The call of that name in the same step: of the same rank and occurrence where there are several."""
    found = others.get((scope, call.step, call.micro, call.phase), [])
    exact = [c for c in found if (c.rank, c.occurrence) == (call.rank, call.occurrence)]
    return next(iter(exact or (found if len(found) == 1 else [])), None)


def _explicit(call: Call, facing: Mapping[str, Call], entry: Entry, chart: Map, reference: Run, target: Run, making: Making) -> CallPair:
    first = next(iter(facing.values()))
    base = pair_of(call, first, USER_MAP, reference, target)
    slots = {s.reference_slot: s for s in base.slots} if len(facing) == 1 else {}
    records = {r.slot: r.record for r in call.refs}
    for name, how in entry.slots.items():
        if name not in records:
            raise chart.error(how.line, f"{call.scope} has no slot {name!r}; it has {', '.join(records)}")
        if how.dims is None:
            slots.pop(name, None)
            continue
        theirs = dict(how.names)
        bound: dict[str, list[int]] = {}
        for operand in (*facing, *theirs):
            other = facing.get(operand, first)
            slot = theirs.get(operand, name)
            record = next((r.record for r in other.refs if r.slot == slot), None)
            if record is not None:
                bound[operand] = [record]
            elif operand in theirs:
                raise chart.error(
                    how.line, f"{other.scope} of the target has no slot {slot!r} (it has {', '.join(r.slot for r in other.refs)})"
                )
        try:
            made = making.add(how.dims, bound, f"{chart.path}, line {how.line}")
        except Unfit as error:
            raise chart.error(how.line, f"{call.scope}, {name}: {error}") from None
        shape = reference.records[records[name]].shape
        if making.record(made).shape != shape:
            raise chart.error(
                how.line, f"{call.scope}, {name}: {how.dims} has shape {making.record(made).shape}, the reference's is {shape}"
            )
        slots[name] = SlotPair(name, theirs.get(next(iter(facing)), name), records[name], made, str(how.dims))
    only = tuple(r.slot for r in call.refs if r.slot not in slots)
    names = " and ".join(dict.fromkeys(c.scope for c in facing.values()))
    also = tuple(c.id for c in facing.values() if c.id != first.id)
    return CallPair(call.id, first.id, USER_MAP, f"line {entry.line}: {names}", tuple(slots.values()), only, base.only_target, also)


def _nothing(pattern: str, run: Run, side: str) -> str:
    """Words for a pattern that matches no name, with the nearest."""
    scopes = list(dict.fromkeys(c.scope for c in run.calls if c.scope))
    plain = re.sub(r"\{\w+\}|\*", "0", pattern)
    near = difflib.get_close_matches(plain, scopes, 3, 0.5)
    return f"{pattern!r} matches no call of the {side}" + (f"; nearest: {', '.join(near)}" if near else "")
