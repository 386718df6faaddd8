"""What a capture keeps: one frozen set of options, the same for the command line, for code and for
child processes.

It travels to child processes as JSON in an environment variable, so every field is a plain JSON
value.

Values of an option that are one of a few are checked by `_one_of`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, get_args

import msgspec

from whence.errors import UsageError
from whence.instrument.arguments import GraphMode, Keep, Level, Positions, Slots
from whence.instrument.option_values import (
    TREE_NUMBER,
    check_pattern,
    parse_ids,
    parse_ranks,
    parse_size,
)
from whence.instrument.patch_points import parse_fault, parse_point
from whence.instrument.rungs import every_rung, framework_of
from whence.instrument.step_choice.conditions import conditions_of
from whence.instrument.step_choice.windows import Ranges, StepRange, checked, read_steps
from whence.records.places import absolute

DEFAULT_MAX_BYTES = 20 * 10**9

_TEXTS = (
    "include", "exclude", "classes", "no_inputs", "ids", "weights", "patch", "disabled_optimizers",
    "when",
)  # fmt: skip
_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class CaptureOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options of one capture; the defaults keep everything. Raises UsageError for a value that
    cannot be meant.

    include, exclude: patterns on the dotted scope (shell style, `re:` for a regular expression); a
    call is captured when it matches any include (or there is none) and no exclude. classes:
    patterns on the class name. max_depth: calls nested deeper than this are left out, the root is
    depth 0. ids: tree numbers ("3", "7_1") with their subtrees, or without when no_children. slots:
    "both", "input" or "output". steps: ranges of steps, () for all; every: one of so many too.
    when: conditions on loss and gradient norm, each of which has
    the next for_steps steps recorded. ring: so many steps are kept in memory, in ring_size bytes,
    and written when a condition holds or the program fails. ranks: None for all. keep: "full"
    elements, "stats" only, "none" topology only. max_bytes: of elements per run; None is the
    smaller of 20 GB and a quarter of the free space, resolved where the run is written. on_record:
    "module:function" called with (op type, name, tensor), "" for none. print_pattern: names to
    print live, None for no printing. seed, deterministic: see `framework.set_determinism`.
    no_inputs: names whose elements are never kept, statistics only. programs: record what leaf
    modules ran. gradients: record backward passes and steps of optimisers. weights: checkpoint
    files parameters may be referenced from instead of copied. force: replace an existing run.
    patch: points (`capture.points`) whose outputs are replaced by those of the run `patch_from`;
    recompute: by what that run's program and parameters make of the inputs here, instead of by what
    it recorded. inject: a fault to plant, or "". force_tokens: a run whose tokens the program goes
    on with, "" for its own. These change the program on purpose; without them nothing does. level:
    "modules"; "op": every operator too, in the place of programs; "graph": what torch.compile makes
    too; "logits": of every call of the model its tokens and logits alone; or "io": of sessions of
    ONNX Runtime what they are given and return. positions: "last" token of a row, or "all".
    samples: with level "op", so many calls of each operator keep their elements, chosen by the
    seed, None for all. dedup: of equal operator calls (dtypes, shapes, strides, arguments) only the
    first is written, and all are counted. logits_module: pattern of the module inside that makes
    them, "" to find them in what the model returns. graph_mode: with level "graph", "exact": what
    kernels leave, "deep": what every node computes, "fx": the graph run node by node instead of
    inductor's code. graph_buffers: keep buffers too that no node of the graph names. graph_anyway:
    mode "deep" even where it changes the result. rung: the stage of torch.compile that a program is
    compiled to (docs/graph.md), or the level to which ONNX Runtime optimises its graphs
    (docs/onnxruntime.md); "" for what it asks for itself. disabled_optimizers: names of optimisers
    of ONNX Runtime that its sessions do without.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    max_depth: int | None = None
    ids: tuple[str, ...] = ()
    no_children: bool = False
    slots: str = "both"
    steps: Ranges = ()
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
    recompute: bool = False
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
    every: int | None = None
    when: tuple[str, ...] = ()
    for_steps: int = 3
    ring: int | None = None
    ring_size: int | None = None

    @property
    def ranges(self) -> Ranges:
        """Steps known before the program runs, `every` among them; () for all."""
        return self.steps if self.every is None else (*self.steps, StepRange(every=self.every))

    @property
    def waits(self) -> bool:
        """Whether nothing may be recorded for a long time, or ever, because steps wait for a
        condition.
        """
        return bool(self.when or self.ring)

    def __post_init__(self) -> None:
        self._check_texts()
        _one_of("slots", self.slots, get_args(Slots))
        _one_of("keep", self.keep, get_args(Keep))
        _one_of("level", self.level, get_args(Level))
        _one_of("positions", self.positions, get_args(Positions))
        _one_of("graph_mode", self.graph_mode, get_args(GraphMode))
        _one_of("rung", self.rung, ("", *every_rung()))
        framework_of(self.rung, self.disabled_optimizers)
        self._check_operators()
        self._check_graph()
        self._check_logits()
        self._check_boundary()
        self._check_ranges()
        self._check_long_runs()
        if bool(self.patch) != bool(self.patch_from):
            raise UsageError(
                "patch names calls and patch_from the run whose outputs go in there: one needs "
                "the other"
            )
        if self.recompute and not self.patch:
            raise UsageError(
                "recompute says how calls are patched: it needs patch, which names them"
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
            if not TREE_NUMBER.fullmatch(number):
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
        for steps in self.steps:
            checked(steps)
        if self.ranks is not None and (not self.ranks or min(self.ranks) < 0):
            raise UsageError(f"ranks: {self.ranks!r} holds no rank, or a negative one")

    def _check_long_runs(self) -> None:
        conditions_of(self.when)
        for name in ("every", "for_steps", "ring", "ring_size"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"{name}: {number} is less than 1")
        if self.ring_size is not None and self.ring is None:
            raise UsageError("ring_size bounds the ring: it needs ring, how many steps it keeps")
        for name in ("when", "ring"):
            if not getattr(self, name):
                continue
            if self.level != "modules":
                raise UsageError(f"{name} is for --level modules, not for --level {self.level}")
            if self.patch or self.inject or self.force_tokens:
                raise UsageError(
                    f"{name} leaves steps unseen; patch, inject and force_tokens change every "
                    "step: leave one of them out"
                )

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
            hint = _nearest(name, fields)
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


def _strings(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _ids(value: Any) -> tuple[Any, ...]:
    return parse_ids(value) if isinstance(value, str) else _strings(value)


def _ranks(value: Any) -> Any:
    if isinstance(value, str):
        return parse_ranks(value)
    return tuple(value) if isinstance(value, Iterable) else value


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _path(value: Any) -> str:
    return absolute(value) if value else ""  # a child may run elsewhere


_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("include", "exclude", "classes", "no_inputs", "weights", "patch", "when"), _strings
    ),
    "ids": _ids,
    "steps": read_steps,
    "ranks": _ranks,
    "max_bytes": _size,
    "ring_size": _size,
    "patch_from": _path,
    "force_tokens": _path,
}
"""How code and the command line give an option -> the value of its field."""


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError for a value that is not one of the choices."""
    if value not in choices:
        raise UsageError(
            f"{option}: {value!r} is not one of {', '.join(choices)}{_nearest(str(value), choices)}"
        )


def _nearest(name: str, choices: tuple[str, ...]) -> str:
    """ " (did you mean NAME?)", "" where nothing is near."""
    close = difflib.get_close_matches(name, choices, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
