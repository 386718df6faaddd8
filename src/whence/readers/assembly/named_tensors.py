"""Tensors that have a name and nothing else: what a name says, and how such tensors become calls.

A name may say that a tensor is a weight, which tensor of which module it is, the step and the rank.
Weights are parameters of modules; everything else is something that was recorded on the way, a
label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from whence.errors import UnreadableRun
from whence.readers.assembly.builder import Building, Load
from whence.readers.encodings.archive import File
from whence.readers.encodings.pickle_values import TorchTensor, Unknown
from whence.readers.source import Place
from whence.readers.unread import not_read
from whence.records import Lack
from whence.records.marks import Mark, mark

# Last parts of names that only weights, and what optimizers keep of them, have.
_WEIGHTS = re.compile(
    r"(weight|bias|gamma|beta|kernel|embedding|running_mean|running_var|num_batches_tracked|inv_freq|A_log|dt_bias|rotary_emb"
    r"|q?weight_(scale|scale_inv|packed|shape|zero_point|g_idx)|qweight|qzeros|scales|g_idx|absmax|quant_map|quant_state|input_scale"
    r"|lora_[AB]|weight_[gv]|in_proj_(weight|bias)|logit_scale|class_embedding|cls_token|mask_token|position_ids"
    r"|(weight|bias)_(ih|hh)(_l\d{1,3})?(_reverse)?|exp_avg|exp_avg_sq|momentum_buffer)$"
)
_WRAPPERS = ("state_dict", "model_state_dict", "module_state_dict")
_SLOT = re.compile(r"(?:^|[._-])(?P<kind>input|output)s?(?:[._-](?P<slot>\d{1,4}))?$")
_ORDERED = re.compile(r"^(\d{1,12})[_-](?=.)")
_STEP = re.compile(r"^(?:step|iter|iteration|pass|token)[_=-]?(\d{1,9})$", re.IGNORECASE)
_RANK = re.compile(r"^(?:rank|global_?rank|device|worker|proc)[_=-]?(\d{1,9})$", re.IGNORECASE)
# Forward passes of a served model as engines capture them: prefill_s128_0, decode_b1_3.
_PHASE = re.compile(r"^(?P<kind>prefill|decode)(?:_[a-z]+\d+)*_(?P<number>\d{1,9})$")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor with a name. name: dotted. dtype, shape, load, why, stride: as `Building.tensor`
    takes them.

    modified_ns: of its file. ordered: whether the file has its tensors in the order in which they
    were made. place_in_call: scope, "input" or "output", and slot, where the dump states them.
    arguments: of its call. file: relative to the dump. is_text: it holds words and no numbers.
    options: others of `Building.tensor`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Load | None
    why: str = ""
    step: int = 0
    rank: int = 0
    modified_ns: int = 0
    ordered: bool = False
    stride: tuple[int, ...] = ()
    place_in_call: tuple[str, str, str] | None = None
    file: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_text: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def record(self, building: Building) -> int:
        return building.tensor(
            self.dtype,
            self.shape,
            self.load,
            why=self.why,
            stride=self.stride,
            file="" if self.is_text else self.file,
            **self.options,
        )


Items = Callable[[Building, File, str], Iterable[Named]]


def of_torch(name: str, tensor: TorchTensor | Unknown, **fields: Any) -> Named:
    """A tensor of a file as a `Named`; one that is not read says so. fields: others of `Named`."""
    if isinstance(tensor, TorchTensor):
        return Named(
            name,
            tensor.dtype,
            tensor.shape,
            tensor.array,
            stride=() if tensor.is_contiguous else tensor.stride,
            **fields,
        )
    return Named(
        name,
        tensor.name.rpartition(".")[2],
        (),
        None,
        f"{tensor.name} is not read; save it as a plain tensor",
        **fields,
    )


def natural(name: str) -> tuple[Any, ...]:
    """What to sort a name by: numbers in it by size."""
    parts = re.split(r"(\d+)", name)
    return tuple(
        (len(p.lstrip("0")), p.lstrip("0")) if i % 2 else (0, p) for i, p in enumerate(parts)
    )


def of_files(
    building: Building, place: Place, is_ours: Callable[[str], bool], items: Items
) -> list[Named]:
    """The tensors of a file, or of every file of a folder that is one of ours by its name; in the
    order of the dump, as far as it has one.

    items: the tensors of one file, given the prefix of their names. A file that cannot be read is
    lacking. Raises UnreadableRun when a single file cannot be read.
    """
    if not place.is_folder:
        only = File(place.path)
        return [
            item if item.load is not None else replace(item, file=place.path.name)
            for item in items(building, only, "")
        ]
    chosen = [name for name in place.files if is_ours(name)]
    tensors: list[Named] = []
    steps = steps_of_phases(chosen)
    for name in chosen:
        prefix, step, rank = placed(name, is_only=len(chosen) == 1, phases=steps)
        try:
            file = File(place.inside(name))
            tensors += (
                replace(
                    item, step=item.step or step, rank=rank, modified_ns=file.modified_ns, file=name
                )
                for item in items(building, file, prefix)
            )
        except UnreadableRun as error:
            building.lacks(Lack.DAMAGED, name, not_read(name, error))
    return tensors


def steps_of_phases(paths: Iterable[str]) -> dict[str, int]:
    """The step that each folder named after a phase stands for: prefills first, then decodes, by
    their numbers. A dump of decodes alone begins with step 1, after the prefill that it lacks.
    """
    phases = {
        part: match for path in paths for part in path.split("/") if (match := _PHASE.match(part))
    }
    ordered = sorted(phases, key=lambda part: (int(phases[part]["number"]), natural(part)))
    prefills, decodes = (
        [part for part in ordered if phases[part]["kind"] == kind] for kind in ("prefill", "decode")
    )
    first = max(len(prefills), 1)
    return {part: n for n, part in enumerate(prefills)} | {
        part: first + n for n, part in enumerate(decodes)
    }


def placed(
    path: str, *, is_only: bool = False, phases: Mapping[str, int] | None = None
) -> tuple[str, int, int]:
    """(dotted name, step, rank) of a file in a tree: folders and files called step3 or rank0 are
    not part of the name.

    path: relative, with forward slashes. is_only: the only file of a dump adds no name, nor do
    parts of one checkpoint (model-00001-of-00002). phases: steps of folders, from
    `steps_of_phases`.
    """
    step, rank, parts = 0, 0, []
    pure = PurePosixPath(path)
    stem = pure.name.removesuffix(pure.suffix)
    for part in (*pure.parts[:-1], stem):
        if match := _STEP.match(part):
            step = int(match[1])
        elif match := _RANK.match(part):
            rank = int(match[1])
        elif phases and part in phases:
            step = phases[part]
        elif part is not stem or not (is_only or _SHARD.search(stem)):
            parts.append(part)
    return ".".join(parts), step, rank


def below(name: str, inner: str) -> str:
    """A name within another; either may be empty."""
    return f"{name}.{inner}" if name and inner else name or inner


def add(building: Building, items: Sequence[Named]) -> None:
    """Add the tensors of one dump as calls. Gradients are often kept under the names of their
    weights; the dump's name tells.
    """
    if (
        is_checkpoint(item.name for item in items)
        and "grad" not in PurePosixPath(building.path).name.lower()
    ):
        add_weights(building, items)
    else:
        add_labels(building, *in_order(items))


def is_checkpoint(names: Iterable[str]) -> bool:
    """Are more than half of these names those of weights?"""
    last = [name.rpartition(".")[2] for name in names]
    return 2 * sum(bool(_WEIGHTS.match(name)) for name in last) > len(last)


def in_order(items: Sequence[Named]) -> tuple[list[Named], bool]:
    """Tensors in the order in which they were made, and whether that order is known.

    By the number that all names begin with ("003_attn"), which is then no part of the name; else by
    the order within the file, where files hold several; else by the times of the files, where these
    differ and agree with the numbers in the names; else by name, numbers by size, which is an order
    only where names differ in numbers alone.
    """
    numbers = [_ORDERED.match(item.name) for item in items]
    if items and all(numbers):
        counted = [
            (item.step, item.rank, int(match[1]), i)
            for i, (match, item) in enumerate(zip(numbers, items))
            if match
        ]
        return [
            replace(items[i], name=_ORDERED.sub("", items[i].name)) for *_, i in sorted(counted)
        ], True
    if items and all(item.ordered for item in items):
        return list(items), True
    by_name = sorted(items, key=lambda item: (item.step, item.rank, natural(item.name)))
    by_time = sorted(by_name, key=lambda item: (item.step, item.rank, item.modified_ns))
    if _told_by_time(by_time):
        return by_time, True
    return by_name, len({_family(item.name) for item in items}) < 2


def _told_by_time(items: Sequence[Named]) -> bool:
    """Whether these were written one after the other, layer 0 before layer 1. A copied folder is
    written in any order.
    """
    last: dict[Any, tuple[Any, ...]] = {}
    moments: set[tuple[int, int, int]] = set()
    for item in items:
        moments.add((item.step, item.rank, item.modified_ns))
        family = (item.step, item.rank, _family(item.name))
        numbers = natural(item.name)[1::2]
        if family in last and numbers < last[family]:
            return False
        last[family] = numbers
    return len(moments) == len(items)


def _family(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def slot_of(name: str) -> tuple[str, str, str]:
    """(scope, "input" or "output", slot) that a name says: "layers.0.mlp.input.1" is input 1 of
    layers.0.mlp; all "" when it says none.
    """
    match = _SLOT.search(name, max(0, len(name) - 20))
    return (name[: match.start()], match["kind"], match["slot"] or "0") if match else ("", "", "")


def add_labels(building: Building, items: Sequence[Named], has_order: bool = True) -> None:
    """Each name a call with that output; where names say which are inputs and outputs of a module,
    these are one call and nest.

    BERT has modules called output: names are taken apart only where some say "input", or all say
    something.
    """
    places = [item.place_in_call or slot_of(item.name) for item in items]
    tells = any(kind == "input" for _, kind, _ in places) or all(kind for _, kind, _ in places)
    calls: list[_Group] = []
    open_: dict[tuple[int, int, str], _Group] = {}
    for item, (scope, kind, slot) in zip(items, places, strict=True):
        if item.place_in_call is None and not (tells and kind):
            scope, kind, slot = item.name, "output", "0"
        group = open_.get((item.step, item.rank, scope))
        # An output ends a call: what comes in afterwards is the next one's.
        if (
            group is None
            or slot in group.slots[kind]
            or (kind == "input" and group.slots["output"])
        ):
            group = open_[item.step, item.rank, scope] = _Group(item.step, item.rank, scope)
            calls.append(group)
        group.slots[kind][slot] = item
        group.arguments.update(item.arguments)
    handles: dict[tuple[int, int, str], int] = {}
    # which of them the whole was given and returned is not known either
    if not has_order and all(group.scope for group in calls):
        for step, rank in dict.fromkeys((group.step, group.rank) for group in calls):
            handles[step, rank, ""] = building.call(
                "", kind="module", step=step, rank=rank, notes=(mark(Mark.UNORDERED),)
            )
    for group in _nested(calls):
        moment = (group.step, group.rank)
        parent = next(
            (
                handles[*moment, above]
                for above in _above(group.scope)
                if (*moment, above) in handles
            ),
            -1,
        )
        inputs, outputs = (
            {slot: item.record(building) for slot, item in group.slots[kind].items()}
            for kind in ("input", "output")
        )
        kind = "label" if group.scope or len(calls) == 1 else "module"
        handle = building.call(
            group.scope,
            kind=kind,
            step=group.step,
            rank=group.rank,
            parent=parent,
            inputs=inputs,
            outputs=outputs,
            arguments=group.arguments,
            notes=() if has_order else (mark(Mark.UNORDERED),),
        )
        if group.holds_others:
            handles[*moment, group.scope] = handle


@dataclass(frozen=True, slots=True)
class _Group:
    """The tensors of one call."""

    step: int
    rank: int
    scope: str
    slots: dict[str, dict[str, Named]] = field(default_factory=lambda: {"input": {}, "output": {}})
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def holds_others(self) -> bool:
        """Whether calls may be part of it. When a module without inputs began is not known; it
        stands where its output was made.
        """
        return bool(self.slots["input"]) or not self.scope


def _nested(calls: Sequence[_Group]) -> list[_Group]:
    """The calls, each module before the first that is part of it, as the names say."""
    first: dict[tuple[int, int, str], int] = {}
    starts: list[tuple[int, int, int]] = []
    for place, group in enumerate(calls):
        for scope in (group.scope, *_above(group.scope)):
            first.setdefault((group.step, group.rank, scope), place)
    moved: set[tuple[int, int, str]] = set()
    for place, group in enumerate(calls):
        key = (group.step, group.rank, group.scope)
        start = first[key] if group.holds_others and key not in moved else place
        moved.add(key)
        starts.append((start, len(group.scope), place))
    return [calls[place] for _, _, place in sorted(starts)]


def _above(scope: str) -> list[str]:
    """Names of the modules that this one is part of, the innermost first; the root last."""
    parts = scope.split(".")
    return [".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1)] + ([""] if scope else [])


def add_weights(building: Building, items: Sequence[Named]) -> None:
    """Parameters of modules, below one root."""
    modules: dict[tuple[int, int, str], dict[str, Named]] = {}
    for item in items:
        scope, _, name = _unwrapped(item.name).rpartition(".")
        modules.setdefault((item.step, item.rank, scope), {})[name] = item
    roots: dict[tuple[int, int], int] = {}
    for step, rank in dict.fromkeys((step, rank) for step, rank, _ in modules):
        roots[step, rank] = building.call("", kind="module", step=step, rank=rank)
    for (step, rank, scope), parameters in sorted(
        modules.items(), key=lambda m: (m[0][:2], natural(m[0][2]))
    ):
        params = {name: item.record(building) for name, item in parameters.items()}
        if scope:
            building.call(
                scope, kind="module", step=step, rank=rank, parent=roots[step, rank], params=params
            )
        else:
            building.fill(roots[step, rank], params=params)


def _unwrapped(name: str) -> str:
    first, _, inner = name.partition(".")
    return inner if inner and first in _WRAPPERS else name
