"""Differences that a user declares in advance: which calls may differ, and how. Read from TOML or
YAML; no framework, no data.

    [[allow]]
    module = "model.layers.*"     # glob over the module path ("*" also crosses dots), or /regular expression/; or a list of them
    op = "Linear"                 # the same over the operator type, of either side
    declare = "quantisation"
    weights = { bits = 8, per = "channel" }

An entry selects calls and declares one kind of difference for them. If several entries apply to one
call, those of different kinds add up, and of one kind the last counts.
"""  # noqa: E501

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whence import config_files
from whence.errors import UsageError

KINDS = ("quantisation", "tf32", "fast-gelu", "fused-rounding", "skip-masked-rows", "tolerance")
FORMATS = ("int", "e4m3", "e5m2")
FORMS = ("tanh", "erf", "sigmoid")
_COMMON = ("module", "op", "slot", "declare", "why", "min_sqnr")
_OWN: dict[str, tuple[str, ...]] = {
    "quantisation": ("weights", "activations"),
    "tf32": (),
    "fast-gelu": ("form",),
    "fused-rounding": (),
    "skip-masked-rows": ("mask",),
    "tolerance": ("rtol", "atol", "rel_l2", "ignore"),
}
_WEIGHTS = ("bits", "per", "axis", "group", "symmetric", "format", "rounding")
_ACTIVATIONS = ("mode", "bits", "per", "symmetric", "format", "scale")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one tensor is quantised. per: "tensor", "channel" (along `axis`), "group" (of `group`
    along the last axis) or "token".

    format: "int" with `bits`, or an 8-bit float. symmetric: no zero point. rounding: "nearest", or
    "free" where the codes were optimised (GPTQ, AWQ) and need not be the nearest. mode: of
    activations, "static" (one scale) or "dynamic". scale: the static one where the target does not
    hold it.
    """

    bits: int = 8
    per: str = "channel"
    axis: int = 0
    group: int = 0
    symmetric: bool = True
    format: str = "int"
    rounding: str = "nearest"
    mode: str = ""
    scale: float | None = None

    def __str__(self) -> str:
        kind = f"int{self.bits}" if self.format == "int" else f"float8 {self.format}"
        size = {
            "group": f"group of {self.group}",
            "channel": "channel" + (f" of axis {self.axis}" if self.axis else ""),
        }.get(self.per, self.per)
        parts = [
            self.mode,
            kind,
            f"per {size}",
            "" if self.symmetric else "asymmetric",
            "" if self.rounding == "nearest" else "rounded freely",
        ]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Entry:
    """One declaration. number: its place in the file, from 1. module, op, slot: patterns, () for
    any. min_sqnr: in dB.
    """

    number: int
    declare: str
    module: tuple[str, ...] = ()
    op: tuple[str, ...] = ()
    slot: tuple[str, ...] = ()
    weights: Scheme | None = None
    activations: Scheme | None = None
    form: str = ""
    mask: str = "attention_mask"
    rtol: float = 0.0
    atol: float = 0.0
    rel_l2: float | None = None
    ignore: bool = False
    min_sqnr: float | None = None
    why: str = ""

    def covers(self, scope: str, op_types: Sequence[str]) -> bool:
        """Whether this entry applies to a call with this module path and one of these operator
        types.
        """
        return _fits(self.module, (scope,)) and _fits(self.op, op_types)

    def covers_slot(self, slot: str) -> bool:
        """Whether the entry applies to this slot ("output.0") of the calls it covers."""
        return _fits(self.slot, (slot,))

    def __str__(self) -> str:
        """What is declared, in words: "quantisation (weights int8 per channel)"."""
        parts = []
        if self.weights is not None:
            parts.append(f"weights {self.weights}")
        if self.activations is not None:
            parts.append(f"activations {self.activations}")
        if self.form:
            parts.append(self.form)
        if self.ignore:
            parts.append("ignored")
        elif self.declare == "tolerance":
            parts.append(
                f"rel_l2 {self.rel_l2:g}"
                if self.rel_l2 is not None
                else f"rtol {self.rtol:g}, atol {self.atol:g}"
            )
        return f"{self.declare} ({', '.join(parts)})" if parts else self.declare

    @property
    def selection(self) -> str:
        """The selected calls in words, for messages."""
        parts = [
            f"{name} {', '.join(pattern)}"
            for name, pattern in (("module", self.module), ("op", self.op))
            if pattern
        ]
        return "; ".join(parts) or "every call"


@dataclass(frozen=True, slots=True)
class Policy:
    """All declared differences. path: the file they were read from, for messages."""

    entries: tuple[Entry, ...] = ()
    path: str = "<policy>"
    _seen: dict[tuple[str, tuple[str, ...]], dict[str, Entry]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def of(self, scope: str, op_types: Sequence[str]) -> dict[str, Entry]:
        """The entries that apply to a call, by kind; of several of one kind the last."""
        key = (scope, tuple(op_types))
        entries = self._seen.get(key)
        if entries is None:
            entries = self._seen[key] = {
                e.declare: e for e in self.entries if e.covers(scope, op_types)
            }
        return entries

    def check(self, calls: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Raise UsageError for an entry that selects no call. calls: (module path, operator types)
        of every paired call.
        """
        distinct = dict.fromkeys((scope, tuple(ops)) for scope, ops in calls)
        for entry in self.entries:
            if any(entry.covers(scope, ops) for scope, ops in distinct):
                continue
            near = _nearest(
                entry,
                [scope for scope, _ in distinct if scope],
                sorted({o for _, ops in distinct for o in ops}),
            )
            raise UsageError(
                f"{self.path}: entry {entry.number} ({entry}) matches no call that both runs have\n"
                f"  it selects {entry.selection}{near}\n"
                "  whence show RUN lists the module paths and operator types; a declaration that "
                "covers nothing is not passed over"
            )


def load(path: str | os.PathLike[str]) -> Policy:
    """Read a policy from a .toml, .yaml or .yml file. Raises UsageError with the place and the
    accepted values.
    """
    place = Path(path)
    suffix = place.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise UsageError(
            f"policy {place}: written as TOML or YAML, so it ends in .toml, .yaml or .yml"
        )
    try:
        text = config_files.text_of(place)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"policy {place} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        data = config_files.toml_value(text) if suffix == ".toml" else config_files.yaml_value(text)
    except config_files.NotConfig as error:
        raise UsageError(f"policy {place}: {error}") from error
    return parse(data, path=str(place))


def parse(data: Any, *, path: str = "<policy>") -> Policy:
    """A policy from plain values, as TOML and YAML give them: {"allow": [entry, ...]}. Raises
    UsageError.
    """
    if not isinstance(data, dict):
        raise UsageError(
            f"{path}: a policy is a table with a list `allow`, not {type(data).__name__}"
        )
    check_keys(data, ("allow",), path)
    entries = data.get("allow")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path}: `allow` must be a list of declarations and hold at least one")
    return Policy(tuple(_entry(item, i + 1, path) for i, item in enumerate(entries)), path)


def _entry(item: Any, number: int, path: str) -> Entry:
    where = f"{path}: entry {number}"
    if not isinstance(item, dict):
        raise UsageError(f"{where} is not a table")
    kind = item.get("declare")
    if kind not in KINDS:
        words = "says nothing to declare" if kind is None else f"declares {kind!r}"
        raise UsageError(
            f"{where} {words}; what can be declared: {', '.join(KINDS)}{suggestion(kind, KINDS)}"
        )
    where = f"{where} ({kind})"
    check_keys(item, (*_COMMON, *_OWN[kind]), where)
    patterns = {
        key: read_patterns(item.get(key), f"{where}: {key}") for key in ("module", "op", "slot")
    }
    if not patterns["module"] and not patterns["op"]:
        raise UsageError(
            f'{where} selects every call; say module or op (module = "*" if every call is meant)'
        )
    weights = activations = None
    if kind == "quantisation":
        weights, activations = (
            _scheme(item[key], keys, f"{where}: {key}") if key in item else None
            for key, keys in (("weights", _WEIGHTS), ("activations", _ACTIVATIONS))
        )
        if weights is None and activations is None:
            raise UsageError(
                f"{where}: say weights, activations or both: weights = {{ bits = 8, per = "
                f'"channel" }}'
            )
    entry = Entry(
        number,
        kind,
        patterns["module"],
        patterns["op"],
        patterns["slot"],
        weights,
        activations,
        form=read_word(item.get("form", ""), ("", *FORMS), f"{where}: form"),
        mask=read_text(item.get("mask", "attention_mask"), f"{where}: mask"),
        rtol=read_number(item.get("rtol", 0.0), f"{where}: rtol"),
        atol=read_number(item.get("atol", 0.0), f"{where}: atol"),
        rel_l2=None if "rel_l2" not in item else read_number(item["rel_l2"], f"{where}: rel_l2"),
        ignore=read_truth(item.get("ignore", False), f"{where}: ignore"),
        min_sqnr=None
        if "min_sqnr" not in item
        else read_number(item["min_sqnr"], f"{where}: min_sqnr", negative=True),
        why=read_text(item.get("why", ""), f"{where}: why"),
    )
    if kind == "tolerance":
        _check_tolerance(item, entry, where)
    return entry


def _check_tolerance(item: Mapping[str, Any], entry: Entry, where: str) -> None:
    """Raise UsageError unless the entry gives exactly one limit."""
    limits = [k for k in ("rel_l2", "ignore") if k in item] + (
        ["rtol, atol"] if "rtol" in item or "atol" in item else []
    )
    if len(limits) != 1:
        raise UsageError(
            f"{where}: say one of rel_l2, rtol with atol, or ignore = true"
            + (f"; it says {', '.join(limits)}" if limits else "")
        )
    if limits == ["ignore"] and not entry.ignore:
        raise UsageError(f"{where}: ignore = false declares nothing")


def _scheme(value: Any, keys: tuple[str, ...], where: str) -> Scheme | None:
    if value == "none":
        return None
    if not isinstance(value, dict):
        raise UsageError(
            f"{where} must be a table such as {{ bits = 8, per = "
            f'"{"channel" if keys is _WEIGHTS else "token"}" }}, or "none"'
        )
    check_keys(value, keys, where)
    is_weights = keys is _WEIGHTS
    kind = read_word(value.get("format", "int"), FORMATS, f"{where}.format")
    bits = value.get("bits", 8)
    if (
        not isinstance(bits, int)
        or isinstance(bits, bool)
        or not 2 <= bits <= 8
        or (kind != "int" and bits != 8)
    ):
        raise UsageError(
            f"{where}.bits is {bits!r}: a whole number from 2 to 8 (8 for e4m3 and e5m2)"
        )
    mode = (
        ""
        if is_weights
        else read_word(value.get("mode", "dynamic"), ("none", "static", "dynamic"), f"{where}.mode")
    )
    if mode == "none":
        return None
    sizes = ("tensor", "channel", "group") if is_weights else ("tensor", "token")
    per = read_word(
        value.get("per", "channel" if is_weights else "tensor" if mode == "static" else "token"),
        sizes,
        f"{where}.per",
    )
    group = value.get("group", 0)
    if per == "group" and not (
        isinstance(group, int) and not isinstance(group, bool) and group > 1
    ):
        raise UsageError(f'{where}: per = "group" needs its size: group = 128')
    if per != "group" and "group" in value:
        raise UsageError(f'{where}: group is for per = "group"')
    axis = value.get("axis", 0)
    if not isinstance(axis, int) or isinstance(axis, bool) or axis < 0:
        raise UsageError(
            f"{where}.axis is {axis!r}: which axis of the weight has a scale each, from 0"
        )
    scale = value.get("scale")
    return Scheme(
        bits,
        per,
        axis,
        int(group),
        read_truth(value.get("symmetric", True), f"{where}.symmetric"),
        kind,
        read_word(value.get("rounding", "nearest"), ("nearest", "free"), f"{where}.rounding"),
        mode,
        None if scale is None else read_number(scale, f"{where}.scale"),
    )


def _fits(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return not patterns or any(_match(p, name) for p in patterns for name in names)


def _match(pattern: str, name: str) -> bool:
    if len(pattern) > 1 and pattern[0] == pattern[-1] == "/":
        return re.fullmatch(pattern[1:-1], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def _nearest(entry: Entry, scopes: Sequence[str], ops: Sequence[str]) -> str:
    near = [*(suggestion(p, scopes) for p in entry.module), *(suggestion(p, ops) for p in entry.op)]
    return next((n for n in near if n), "")


# Read values of a policy file; a refused value is answered with the accepted ones.


def suggestion(word: Any, among: Sequence[str]) -> str:
    names = {name.lower(): name for name in among}
    near = difflib.get_close_matches(str(word).lower(), names, 1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def check_keys(table: Mapping[Any, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise UsageError(
                f"{where}: unknown key {str(key)[:60]!r}; known: "
                f"{', '.join(keys)}{suggestion(key, keys)}"
            )


def read_patterns(value: Any, where: str) -> tuple[str, ...]:
    patterns = [] if value is None else value if isinstance(value, list) else [value]
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UsageError(f"{where} must be a pattern or a list of patterns, not {pattern!r}")
        if len(pattern) > 1 and pattern[0] == pattern[-1] == "/":
            try:
                re.compile(pattern[1:-1])
            except re.error as error:
                raise UsageError(
                    f"{where}: {pattern} is not a regular expression: {error}"
                ) from error
    return tuple(patterns)


def read_word(value: Any, allowed: Sequence[str], where: str) -> str:
    if value not in allowed or not isinstance(value, str):
        raise UsageError(
            f"{where} is {value!r}; one of "
            f"{', '.join(a for a in allowed if a)}{suggestion(value, allowed)}"
        )
    return value


def read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be a text, not {value!r}")
    return value


def read_truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{where} must be true or false, not {value!r}")
    return value


def read_number(value: Any, where: str, *, negative: bool = False) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or (value < 0 and not negative)
    ):
        raise UsageError(
            f"{where} is {value!r}: a {'finite number' if negative else 'number of at least 0'}"
        )
    return float(value)
