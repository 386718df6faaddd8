"""What a capture keeps: one frozen set of options, the same for the command line, for code and for
child processes.

It travels to child processes as JSON in an environment variable, so every field is a plain JSON
value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from whence.errors import UsageError
from whence.instrument.choices import nearest, one_of
from whence.instrument.patch_points import parse_fault, parse_point
from whence.instrument.rungs import every_rung, framework_of

SLOTS = ("both", "input", "output")
KEEP = ("full", "stats", "none")
LEVELS = ("modules", "logits", "op", "graph", "io")
GRAPH_MODES = ("exact", "deep", "fx")
POSITIONS = ("last", "all")
DEFAULT_MAX_BYTES = 20 * 10**9

_TEXTS = (
    "include", "exclude", "classes", "no_inputs", "ids", "weights", "patch", "disabled_optimizers",
)  # fmt: skip
_NUMBER = re.compile(r"(0|[1-9][0-9]*(_[1-9][0-9]*)*)")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)
_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class CaptureOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options of one capture; the defaults keep everything. Raises UsageError for a value that
    cannot be meant.

    include, exclude: patterns on the dotted scope (shell style, `re:` for a regular expression); a
    call is captured when it matches any include (or there is none) and no exclude. classes:
    patterns on the class name. max_depth: calls nested deeper than this are left out, the root is
    depth 0. ids: tree numbers ("3", "7_1") with their subtrees, or without when no_children. slots:
    "both", "input" or "output". steps: (start, stop), stop exclusive, None for open. ranks: None
    for all. keep: "full" elements, "stats" only, "none" topology only. max_bytes: of elements per
    run; None is the smaller of 20 GB and a quarter of the free space, resolved where the run is
    written. on_record: "module:function" called with (op type, name, tensor), "" for none.
    print_pattern: names to print live, None for no printing. seed, deterministic: see
    `framework.set_determinism`. no_inputs: names whose elements are never kept, statistics
    only. programs: record what leaf modules ran. gradients: record backward passes and steps of
    optimisers. weights: checkpoint files parameters may be
    referenced from instead of copied. force: replace an existing run. patch: points
    (`capture.points`) whose outputs are replaced by those of the run `patch_from`; inject: a fault
    to plant, or "". force_tokens: a run whose tokens the program goes on with, "" for its own.
    These three change the program on purpose; without them nothing does. level: "modules"; "op":
    every operator too, in the place of programs; "graph": what torch.compile makes too;
    "logits": of every call of the model its tokens and logits alone; or "io": of sessions of ONNX
    Runtime what they are given and return. positions: "last" token of a
    row, or "all". samples: with level "op", so many calls of each operator keep their elements,
    chosen by the seed, None for all. dedup: of equal operator calls (dtypes, shapes, strides,
    arguments) only the first is written, and all are counted. logits_module: pattern of the module
    inside that makes them, "" to find them in what the model returns. graph_mode: with level
    "graph", "exact": what kernels leave, "deep": what every node computes, "fx": the graph run node
    by node instead of inductor's code. graph_buffers: keep buffers too that no node of the graph
    names. graph_anyway: mode "deep" even where it changes the result. rung: the stage of
    torch.compile that a program is compiled to (docs/graph.md), or the level to which ONNX Runtime
    optimises its graphs (docs/onnxruntime.md); "" for what it asks for itself.
    disabled_optimizers: names of optimisers of ONNX Runtime that its sessions do without.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    max_depth: int | None = None
    ids: tuple[str, ...] = ()
    no_children: bool = False
    slots: str = "both"
    steps: tuple[int, int | None] | None = None
    ranks: tuple[int, ...] | None = None
    keep: str = "full"
    max_bytes: int | None = None
    on_record: str = ""
    print_pattern: str | None = None
    seed: int | None = None
    deterministic: bool = False
    no_inputs: tuple[str, ...] = ()
    programs: bool = True
    weights: tuple[str, ...] = ()
    force: bool = False
    patch: tuple[str, ...] = ()
    patch_from: str = ""
    inject: str = ""
    level: str = "modules"
    logits_module: str = ""
    positions: str = "last"
    force_tokens: str = ""
    samples: int | None = None
    dedup: bool = False
    graph_mode: str = "exact"
    graph_buffers: bool = False
    graph_anyway: bool = False
    rung: str = ""
    disabled_optimizers: tuple[str, ...] = ()
    gradients: bool = True

    def __post_init__(self) -> None:
        self._check_texts()
        one_of("slots", self.slots, SLOTS)
        one_of("keep", self.keep, KEEP)
        one_of("level", self.level, LEVELS)
        one_of("positions", self.positions, POSITIONS)
        one_of("graph_mode", self.graph_mode, GRAPH_MODES)
        one_of("rung", self.rung, ("", *every_rung()))
        framework_of(self.rung, self.disabled_optimizers)
        self._check_operators()
        self._check_graph()
        self._check_logits()
        self._check_boundary()
        self._check_ranges()
        if bool(self.patch) != bool(self.patch_from):
            raise UsageError(
                "patch names calls and patch_from the run whose outputs go in there: one needs "
                "the other"
            )
        for point in self.patch:
            parse_point(point)
        if self.inject:
            parse_fault(self.inject)
        if self.on_record and not _HOOK.fullmatch(self.on_record):
            raise UsageError(f"on_record: {self.on_record!r} is not module:function")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise UsageError(
                f"seed: {self.seed} is outside 0..{2**32 - 1}, what every framework accepts"
            )

    def _check_texts(self) -> None:
        for name in _TEXTS:
            value: object = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                raise UsageError(f"{name}: expected a tuple of strings, found {value!r}")
        for name in ("include", "exclude", "classes", "no_inputs"):
            for pattern in getattr(self, name):
                check_pattern(pattern, name)
        if self.print_pattern is not None:
            check_pattern(self.print_pattern, "print_pattern")
        for number in self.ids:
            if not _NUMBER.fullmatch(number):
                raise UsageError(
                    f"ids: {number!r} is not a tree number like 0, 3 or 7_1 (whence show RUN "
                    "--tree lists them)"
                )
        if self.no_children and not self.ids:
            raise UsageError("no_children says what ids leave out: it needs ids")

    def _check_ranges(self) -> None:
        if self.max_depth is not None and self.max_depth < 0:
            raise UsageError(f"max_depth: {self.max_depth} is negative; the root call is depth 0")
        if self.max_bytes is not None and self.max_bytes < 0:
            raise UsageError(f"max_bytes: {self.max_bytes} is negative")
        if self.steps is not None:
            start, stop = self.steps
            if start < 0 or (stop is not None and stop <= start):
                raise UsageError(
                    f"steps: {start}:{'' if stop is None else stop} holds no step; write "
                    "START:STOP with 0 <= START < STOP"
                )
        if self.ranks is not None and (not self.ranks or min(self.ranks) < 0):
            raise UsageError(f"ranks: {self.ranks!r} holds no rank, or a negative one")

    def _check_operators(self) -> None:
        if self.level != "op" and (self.samples is not None or self.dedup):
            name = "dedup" if self.dedup else "samples"
            raise UsageError(
                f"{name} chooses among operator calls: it needs --level op (level='op')"
            )
        if self.samples is not None and self.samples < 0:
            raise UsageError(f"samples: {self.samples} is negative; 0 keeps statistics only")
        if self.samples and self.keep != "full":
            raise UsageError(
                f"samples keeps the elements of some operator calls, keep={self.keep!r} of none: "
                "leave one of them out"
            )
        if self.level == "op" and (self.patch or self.inject):
            raise UsageError(
                "level op records what the program runs; patch and inject change what modules "
                "return: leave one of them out"
            )

    def _check_graph(self) -> None:
        if self.level != "graph":
            for name, usual in (
                ("graph_mode", "exact"),
                ("graph_buffers", False),
                ("graph_anyway", False),
            ):
                if getattr(self, name) != usual:
                    raise UsageError(
                        f"{name} says how compiled graphs are captured: it needs --level graph "
                        "(level='graph')"
                    )
        if self.graph_anyway and self.graph_mode != "deep":
            raise UsageError(
                "graph_anyway keeps mode deep where it changes the result; this is mode "
                f"{self.graph_mode}"
            )

    def _check_logits(self) -> None:
        if self.level != "logits":
            for name in ("logits_module", "positions"):
                if getattr(self, name) not in ("", "last"):
                    raise UsageError(
                        f"{name} chooses which logits are captured: it needs --level logits "
                        "(level='logits')"
                    )
            return
        for name in ("include", "exclude", "classes", "ids", "max_depth", "patch"):
            if getattr(self, name) not in ((), None):
                raise UsageError(
                    f"{name} chooses modules; --level logits takes only what the model returns: "
                    "leave one of them out"
                )
        if self.slots != "both" or self.keep != "full":
            raise UsageError(
                "level logits keeps the elements of tokens and logits: leave slots and keep as "
                "they are"
            )
        if self.logits_module:
            check_pattern(self.logits_module, "logits_module")

    def _check_boundary(self) -> None:
        if self.level != "io":
            return
        for name in ("include", "exclude", "classes", "ids", "max_depth", "patch", "inject"):
            if getattr(self, name) not in ((), None, ""):
                raise UsageError(
                    f"{name} chooses calls inside a model; --level io takes only what a session is "
                    "given and returns: leave one of them out"
                )

    def encode(self) -> str:
        """These options as JSON; fields at their default are left out."""
        return msgspec.json.encode(self).decode()

    def asdict(self) -> dict[str, Any]:
        """These options as plain JSON values, for `RunInfo.options`; fields at their default are
        left out.
        """
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def decode(text: str | bytes) -> CaptureOptions:
    """Options back from `CaptureOptions.encode`. Raises UsageError for anything else."""
    try:
        return msgspec.json.decode(text, type=CaptureOptions)
    except msgspec.MsgspecError as err:
        raise UsageError(f"capture options cannot be read: {err}") from err


def make(**options: Any) -> CaptureOptions:
    """Options from keyword arguments, as code gives them: lists or one string for tuples, "0:10"
    for steps, "2GB" for max_bytes, logits=True for level="logits".

    Raises UsageError naming the nearest option for a misspelt one.
    """
    fields = CaptureOptions.__struct_fields__
    for name in options:
        if name not in (*fields, "logits"):
            hint = nearest(name, fields)
            raise UsageError(f"unknown capture option {name!r}{hint}; known: {', '.join(fields)}")
    values = dict(options)
    if (short := values.pop("logits", None)) is not None:
        values["level"] = "logits" if short else "modules"
    for name, read in _READ.items():
        if name in values:
            values[name] = read(values[name])
    try:
        return msgspec.convert(values, CaptureOptions)
    except msgspec.ValidationError as err:
        raise UsageError(f"capture options: {err}") from err


def parse_steps(text: str) -> tuple[int, int | None]:
    """Read "0:1000" -> (0, 1000), "5:" -> (5, None), ":3" -> (0, 3), "7" -> (7, 8). Raises
    UsageError.
    """
    start, colon, stop = text.strip().partition(":")
    try:
        first = int(start) if start or not colon else 0
        last = (int(stop) if stop else None) if colon else first + 1
    except ValueError:
        raise UsageError(
            f"steps: {text!r} is not START:STOP (0:1000, 5:, :3) or one step"
        ) from None
    if first < 0 or (last is not None and last <= first):
        raise UsageError(f"steps: {text!r} holds no step; write START:STOP with 0 <= START < STOP")
    return first, last


def parse_ids(text: str) -> tuple[str, ...]:
    """Read "3,7_1" -> ("3", "7_1"). Raises UsageError for what is no tree number."""
    numbers = tuple(part.strip() for part in text.split(",") if part.strip())
    for number in numbers:
        if not _NUMBER.fullmatch(number):
            raise UsageError(
                f"ids: {number!r} is not a tree number like 0, 3 or 7_1 (whence show RUN --tree "
                "lists them)"
            )
    if not numbers:
        raise UsageError("ids: no tree number given; write them like 3,7_1")
    return numbers


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read "0,3" -> (0, 3), "0-2" -> (0, 1, 2). Raises UsageError."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            ranks.extend(range(int(first), int(last) + 1) if dash else [int(first)])
        except ValueError:
            raise UsageError(f"ranks: {text!r} is not a list of ranks like 0,3 or 0-7") from None
    if not ranks:
        raise UsageError(f"ranks: {text!r} holds no rank")
    return tuple(dict.fromkeys(ranks))


def parse_size(text: str) -> int:
    """Read "20GB" -> 20 * 10**9, "512MiB" -> 512 * 2**20, "4096" -> 4096 bytes. Raises
    UsageError.
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise UsageError(f"size: {text!r} is not a number of bytes like 20GB, 512MiB or 4096")
    power = " kmgtp".index(match[2].lower() or " ")
    size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if size >= 1 << 62:
        raise UsageError(f"size: {text[:40]!r} is more than any disk holds")
    return int(size)


def check_pattern(pattern: str, option: str) -> None:
    """Raise UsageError when `pattern` is empty or an invalid regular expression (`re:...`)."""
    if not pattern:
        raise UsageError(f"{option}: an empty pattern matches nothing; * matches every name")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as err:
            raise UsageError(f"{option}: {pattern!r} is not a regular expression: {err}") from None


def _strings(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _ids(value: Any) -> tuple[Any, ...]:
    return parse_ids(value) if isinstance(value, str) else _strings(value)


def _steps(value: Any) -> Any:
    if isinstance(value, range):
        if value.step != 1:
            raise UsageError(f"steps: {value} leaves steps out; a capture keeps consecutive ones")
        return value.start, value.stop
    if isinstance(value, str):
        return parse_steps(value)
    return tuple(value) if isinstance(value, Iterable) else value


def _ranks(value: Any) -> Any:
    if isinstance(value, str):
        return parse_ranks(value)
    return tuple(value) if isinstance(value, Iterable) else value


def _path(value: Any) -> str:
    # a child may run elsewhere
    return str(Path(value).absolute()) if value else ""


_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("include", "exclude", "classes", "no_inputs", "weights", "patch"), _strings),
    "ids": _ids,
    "steps": _steps,
    "ranks": _ranks,
    "max_bytes": lambda value: parse_size(value) if isinstance(value, str) else value,
    "patch_from": _path,
    "force_tokens": _path,
}
"""How code and the command line give an option -> the value of its field."""
