"""Turns tensors that have nothing but a name into calls.

A name may state that a tensor is a weight, which tensor of which module it is, the step and the
rank. Weights become parameters of modules; every other tensor becomes a label.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from whence import dtypes
from whence.errors import UnreadableRun
from whence.readers.assembly import spoken_names
from whence.readers.assembly.builder import Building, Load
from whence.readers.assembly.texts_beside import TextsBeside
from whence.readers.encodings import limits
from whence.readers.encodings.archive import File
from whence.readers.encodings.pickle_values import TorchTensor, Unknown
from whence.readers.source import Place
from whence.readers.unread import not_read
from whence.records import Lack, known_order
from whence.records.known_order import Trace
from whence.records.marks import Mark, mark

# Last parts of names that only weights and optimizer states have.
_WEIGHTS = re.compile(
    r"(weight|bias|gamma|beta|kernel|embedding|running_mean|running_var|num_batches_tracked|inv_freq|A_log|dt_bias|rotary_emb"
    r"|q?weight_(scale|scale_inv|packed|shape|zero_point|g_idx)|qweight|qzeros|scales|g_idx|absmax|quant_map|quant_state|input_scale"
    r"|lora_[AB]|weight_[gv]|in_proj_(weight|bias)|logit_scale|class_embedding|cls_token|mask_token|position_ids"
    r"|(weight|bias)_(ih|hh)(_l\d{1,3})?(_reverse)?|exp_avg|exp_avg_sq|momentum_buffer)$"
)
_WRAPPERS = ("state_dict", "model_state_dict", "module_state_dict")
_TELLING_BYTES = 64
"""Smallest size in bytes of a tensor that does not equal another by chance."""
_FLOW_BYTES = 1 << 30
"""Most bytes of a dump that are read to find which tensors are inputs of which calls."""


_STACK = re.compile(r"(^|[._/-])(hidden_?states|layer_outputs|all_layers)$", re.IGNORECASE)
_NORM = re.compile(r"(norm|bn)[^._/-]*$")
_CONVOLUTION = re.compile(r"conv[^._/-]*$")
_TELLING_ELEMENTS = 8
"""Smallest number of elements of a channel that does not correlate with another by chance."""
_SCALED = 0.999
"""Correlation from which two channels count as the same up to scale, shift and rounding."""


class Named(msgspec.Struct, frozen=True):
    """A tensor with a name. name: dotted. dtype, shape, load, why, stride: as in `Building.tensor`.

    modified_ns: of its file. ordered: whether the file keeps its tensors in the order of
    computation. container: which of several in the file, whose contents have no order between
    them. entry: its position in such a file, else -1. counter: number of its call, -1
    without one. place_in_call: scope, "input" or "output", and slot, where the dump states them.
    is_whole: its name is complete without that of its file. arguments, note: of its call. file:
    relative to the dump. row: its line there, 0 in a file that is not text. is_text: it holds words
    and no numbers. options: others of `Building.tensor`.
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
    entry: int = -1
    counter: int = -1
    container: str = ""
    stride: tuple[int, ...] = ()
    place_in_call: tuple[str, str, str] | None = None
    note: str = ""
    is_whole: bool = False
    file: str = ""
    row: int = 0
    arguments: Mapping[str, Any] = {}
    is_text: bool = False
    options: Mapping[str, Any] = {}

    def record(self, building: Building) -> int:
        return building.tensor(
            self.dtype,
            self.shape,
            self.load,
            why=self.why,
            stride=self.stride,
            file="" if self.is_text else f"{self.file},{self.row}" if self.row else self.file,
            **self.options,
        )

    @property
    def nbytes(self) -> int:
        """The size of its elements, 0 where they are not read."""
        known = self.load is not None and self.dtype in dtypes.DTYPES
        return limits.count(self.shape) * dtypes.named(self.dtype).itemsize if known else 0

    def content(self) -> Hashable:
        """Returns a stand-in for its elements that is equal for equal tensors; () where they are
        not read, or may be equal by chance.
        """
        array = self._array() if self.nbytes >= _TELLING_BYTES else np.empty(0)
        elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not (elements[8:] != elements[:-8]).any():
            return ()
        return self.shape, self.dtype, xxhash.xxh3_128_digest(elements.data)

    def channels(self) -> npt.NDArray[np.float64]:
        """Returns its channels (axis 1), centred and scaled to unit norm; NaN where they are not
        read.
        """
        array = self._array().astype(np.float64)
        if array.ndim < 2:
            return np.full(1, np.nan)
        x = np.moveaxis(array, 1, 0).reshape(array.shape[1], -1)
        x = x - x.mean(1, keepdims=True)
        with np.errstate(all="ignore"):
            unit: npt.NDArray[np.float64] = x / np.linalg.norm(x, axis=1, keepdims=True)
        return unit

    def _array(self) -> dtypes.Array:
        """Returns its elements; an empty array where they cannot be read."""
        try:
            return self.load() if self.load is not None else np.empty(0)
        except Exception:  # noqa: BLE001 - whatever a damaged file does to a parser: it tells nothing
            return np.empty(0)


Items = Callable[[Building, File], Iterable[Named]]


def of_torch(name: str, tensor: TorchTensor | Unknown, **fields: Any) -> Named:
    """Returns a tensor of a torch file as `Named`; one that is not read states the reason. fields:
    others of `Named`.
    """
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
    """Returns a sort key for a name that orders the numbers in it by value."""
    parts = re.split(r"(\d+)", name)
    return tuple(
        (len(p.lstrip("0")), p.lstrip("0")) if i % 2 else (0, p) for i, p in enumerate(parts)
    )


def of_files(
    building: Building, place: Place, is_ours: Callable[[str], bool], items: Items
) -> list[Named]:
    """Returns the tensors of a file, or of every file of a folder whose name this reader
    recognises; in the order of the dump, as far as it has one.

    items: returns the tensors of one file. A file that cannot be read is noted as missing. Raises
    UnreadableRun when a single file cannot be read.
    """
    beside = TextsBeside(place.path if place.is_folder else place.path.parent)
    if not place.is_folder:
        loose = list(items(building, File(place.path)))
        return _of_file(place, _with_names_beside(loose, beside, place.path.name))
    tensors: list[tuple[Named, int, File, str]] = []
    for name in filter(is_ours, place.files):
        try:
            file = File(place.inside(name))
            read = _with_names_beside(list(items(building, file)), beside, name)
            tensors += ((item, n, file, name) for n, item in enumerate(read))
        except UnreadableRun as error:
            building.lacks(Lack.DAMAGED, name, not_read(name, error))
    files = [name for *_, name in tensors]
    names = [beside.called(name) for name in files]
    if all(names) and len(set(names)) == len(set(files)) == len(files):
        tensors = [
            (replace(item, name=name, is_whole=True), n, file, path)
            for (item, n, file, path), name in zip(tensors, names, strict=True)
        ]
    paths = [_named_for(item, name) for item, *_, name in tensors]
    spoken = spoken_names.tell(
        spoken_names.without_forms(paths, [item.shape for item, *_ in tensors]),
        ["" if item.is_whole else item.name for item, *_ in tensors],
    )
    return [
        replace(
            item, name=say.name, step=item.step or say.step, rank=say.rank, file=name,
            entry=n if item.ordered else -1, modified_ns=file.modified_ns,
        )
        for (item, n, file, name), say in zip(tensors, spoken, strict=True)
    ]  # fmt: skip


def _with_names_beside(items: Sequence[Named], beside: TextsBeside, file: str) -> Sequence[Named]:
    """Returns the tensors of a file that have positions for names under those that a text beside
    the file lists, as many as they are.
    """
    if len(items) < 2 or any(
        item.name.removeprefix("arr_") != str(n) for n, item in enumerate(items)
    ):
        return items
    names = beside.listed(file, len(items))
    return [replace(item, name=name) for item, name in zip(items, names)] if names else items


def _of_file(place: Place, items: Sequence[Named]) -> list[Named]:
    """Returns the tensors of the only file of a dump; the file's own name is ignored."""
    names = [item.name for item in items]
    spoken = spoken_names.tell(["_"] * len(names), names) if len(names) > 1 and all(names) else []
    return [
        replace(
            item,
            name=spoken[n].name if spoken else item.name,
            step=item.step or (spoken[n].step if spoken else 0),
            rank=item.rank or (spoken[n].rank if spoken else 0),
            entry=n if item.ordered else -1,
            file=place.path.name if item.row or item.load is None else "",
        )
        for n, item in enumerate(items)
    ]


def _named_for(item: Named, path: str) -> str:
    """Returns the path of a tensor; a complete tensor name replaces that of the file."""
    folder = path.rpartition("/")[0]
    return f"{folder}/{item.name}._" if item.is_whole else path


def placed(path: str, *, is_only: bool = False) -> tuple[str, int, int]:
    """Returns (dotted name, step, rank) of a file in a tree. path: relative, with forward slashes.
    is_only: the only file of a dump adds no name.
    """
    spoken = spoken_names.tell([path], ["all"] if is_only else [""])[0]
    return spoken.name.removesuffix("all").removesuffix("."), spoken.step, spoken.rank


def below(name: str, inner: str) -> str:
    """Joins two names with a dot; either may be empty."""
    return f"{name}.{inner}" if name and inner else name or inner


def add(building: Building, items: Sequence[Named]) -> None:
    """Adds the tensors of one dump as calls. Gradients are often stored under the names of their
    weights; the dump's name tells them apart. Texts beside tensors are left out.
    """
    items = [item for item in items if not _is_text(item)] or items
    paths = [PurePosixPath(building.path).name, *(item.file for item in items)]
    weights = [item for item in items if not spoken_names.is_activation(item.name)]
    if not is_checkpoint(item.name for item in weights) or _are_of_gradients(paths):
        weights = []
    add_weights(building, weights)
    is_weight = set(map(id, weights)).__contains__
    if labels := [item for item in items if not is_weight(id(item))]:
        add_labels(building, *in_order(labels))


def _is_text(item: Named) -> bool:
    """Whether an array of texts was kept: a prompt, the class of a module."""
    return item.is_text and not item.options


def _unstacked(items: Sequence[Named]) -> Sequence[Named]:
    """Returns the layers of `torch.stack(hidden_states)` one by one: where a dump holds nothing
    else, or the logits beside them have one axis less in front of the last.
    """
    moments = {(item.step, item.rank) for item in items}
    is_stack = all(len(item.shape) > 3 and _STACK.search(item.name) for item in items)
    is_stack = is_stack and len(moments) == len(items)
    places = {
        (item.step, item.rank, item.name.removesuffix("logits")): item.shape[:-1]
        for item in items
        if item.name.endswith("logits")
    }
    unstacked: list[Named] = []
    for item in items:
        match = _STACK.search(item.name)
        beside = (item.step, item.rank, item.name[: match.start(2)] if match else "")
        if is_stack or (match and places.get(beside, ()) == item.shape[1:-1] != ()):
            unstacked += [
                replace(item, name=f"{item.name}.{n}", shape=item.shape[1:], stride=(),
                        load=_nth(item, n))
                for n in range(item.shape[0])
            ]  # fmt: skip
        else:
            unstacked.append(item)
    return unstacked


def _of_classes(items: Sequence[Named]) -> Sequence[Named]:
    """Returns tensors that classes of modules name in place of modules, each with its number among
    those of its class.
    """
    names = [item.name for item in items]
    kinds = [*dict.fromkeys(names)]
    is_named = any(re.search(r"[\d./]", re.sub(r"[123]d\b", "", name)) for name in kinds)
    if is_named or 2 * len(kinds) > len(names) or names == kinds * (len(names) // len(kinds)):
        return items
    seen: Counter[str] = Counter()
    numbered: list[Named] = []
    for item in items:
        numbered.append(replace(item, name=f"{item.name}.{seen[item.name]}"))
        seen[item.name] += 1
    return numbered


def _nth(item: Named, n: int) -> Load | None:
    load = item.load
    return None if load is None else lambda: load()[n]


def _are_of_gradients(paths: Sequence[str]) -> bool:
    """Whether the name of the dump, or of each of its files, says gradients."""
    dump, *files = ["grad" in path.lower() for path in paths]
    return dump or (bool(files) and all(files))


def is_checkpoint(names: Iterable[str]) -> bool:
    """Whether more than half of these names are those of weights."""
    last = [name.rpartition(".")[2] for name in names]
    return 2 * sum(bool(_WEIGHTS.match(name)) for name in last) > len(last)


def _with_calls(items: Sequence[Named]) -> list[Named]:
    """Returns the tensors with the calls that their names state: scopes, sides, slots
    and counters.
    """
    spoken = spoken_names.sides([item.name for item in items])
    places = [item.place_in_call or place for item, place in zip(items, spoken, strict=True)]
    scopes = [scope for scope, _, _ in places]
    counted = [(scope, item.counter) for scope, item in zip(scopes, items, strict=True)]
    if all(counter < 0 for _, counter in counted):
        moments = [(item.step, item.rank) for item in items]
        counted = spoken_names.counted(moments, scopes) or counted
    return [
        replace(item, place_in_call=(scope, *place[1:]), counter=counter)
        for item, place, (scope, counter) in zip(items, places, counted, strict=True)
    ]


def in_order(items: Sequence[Named]) -> tuple[list[Named], bool]:
    """Returns (tensors with their calls, in the order of computation; whether that order is known).
    Where it is not, notes of the calls state what is known of it.
    """
    moments: dict[tuple[int, int], list[Named]] = {}
    for item in _with_calls(_of_classes(_unstacked(items))):
        moments.setdefault((item.step, item.rank), []).append(item)
    orders = [_Moment(moments[moment]) for moment in sorted(moments)]
    is_known = all(order.known.is_total for order in orders)
    return [item for order in orders for item in order.items(with_notes=not is_known)], is_known


class _Moment:
    """The calls of one step and rank, and what is known of their order."""

    def __init__(self, items: Sequence[Named]) -> None:
        calls: dict[tuple[str, int], list[Named]] = {}
        seen: Counter[tuple[str, str, str]] = Counter()
        for item in sorted(items, key=lambda item: (item.counter, item.entry)):
            place = _place(item)
            calls.setdefault((place[0], seen[place]), []).append(item)
            seen[place] += 1
        self._calls = [
            sorted(calls[key], key=lambda item: _place(item)[1])
            for key in sorted(calls, key=_by_name)
        ]
        self._traces = [_trace(call[-1]) for call in self._calls]
        self.known = known_order.known(self._traces)
        if not self.known.is_total and (sources := self._sources()):
            self._traces = [
                trace._replace(made_of=tuple(sources.get(node, ())))
                for node, trace in enumerate(self._traces)
            ]
            self.known = known_order.known(self._traces)

    def items(self, *, with_notes: bool) -> Iterator[Named]:
        """Yields all tensors, the inputs of a call before its outputs."""
        for node in self.known.order:
            if node < len(self._calls):
                *others, last = self._calls[node]
                yield from others
                yield replace(last, note=self._traces[node].note()) if with_notes else last

    def _sources(self) -> dict[int, dict[str, None]]:
        """Returns call -> names of the tensors that it was computed from: its inputs are their
        content, or it is a norm of theirs. Either is left out where too much would have to be read.
        """
        of_several = [call if len(call) > 1 else [] for call in self._calls]
        if sum(item.nbytes for call in of_several for item in call) > _FLOW_BYTES:
            of_several = []
        pairs = list(self._normalised())
        last = {node: self._calls[node][-1].nbytes for pair in pairs for node in pair}
        if sum(last.values()) > _FLOW_BYTES:
            pairs = []
        reads: list[dict[Hashable, None]] = []
        makers: dict[Hashable, list[int]] = {}
        for node, call in enumerate(of_several):
            contents = [(_place(item)[1], item.content()) for item in call]
            reads.append({content: None for side, content in contents if side == "input"})
            for side, content in contents:
                if side == "output" and content not in reads[node]:
                    makers.setdefault(content, []).append(node)
        channels = functools.cache(lambda node: self._calls[node][-1].channels())
        flow = [
            (maker, node)
            for node, read in enumerate(reads)
            for content in read
            for maker in makers.get(content, ())
            if content != ()
        ]
        flow += [
            (maker, node)
            for maker, node in pairs
            if (abs((channels(maker) * channels(node)).sum(-1)) > _SCALED).all()
        ]
        sources: dict[int, dict[str, None]] = {}
        for maker, node in flow:
            above, scope = (self._traces[n].name for n in (maker, node))
            if not f"{above}.".startswith(f"{scope}.") and not scope.startswith(f"{above}."):
                sources.setdefault(node, {})[above] = None
        return sources

    def _normalised(self) -> Iterator[tuple[int, int]]:
        """Yields pairs of a convolution and a norm beside it with tensors of the same shape."""
        beside: dict[Hashable, list[int]] = {}
        names = [trace.name for trace in known_order.with_spelt_names(self._traces)]
        for node, call in enumerate(self._calls):
            shape = call[-1].shape
            if len(shape) > 2 and limits.count(shape) >= _TELLING_ELEMENTS * max(shape[1], 1):
                above = re.sub(r"[^._/-]+$", "", names[node])
                beside.setdefault((above, shape), []).append(node)
        for nodes in beside.values():
            norms = [n for n in nodes if _NORM.search(names[n].lower())]
            convs = [n for n in nodes if _CONVOLUTION.search(names[n].lower())]
            yield from itertools.product(convs, norms)


def _place(item: Named) -> tuple[str, str, str]:
    return item.place_in_call or (item.name, "output", "0")


def _by_name(key: tuple[str, int]) -> tuple[Any, ...]:
    return natural(key[0]), key[1]


def _trace(item: Named) -> Trace:
    """Returns what the last tensor of a call tells of the time of its computation."""
    file = item.file + item.container
    return Trace(_place(item)[0], item.counter, item.entry, item.modified_ns or -1, file)


def add_labels(building: Building, items: Sequence[Named], has_order: bool = True) -> None:
    """Adds each name as a call with that output; where names state inputs and outputs of a module,
    these become one call, and calls nest.
    """
    calls: list[_Group] = []
    open_: dict[tuple[int, int, str], _Group] = {}
    for item in items:
        scope, kind, slot = _place(item)
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
        group.note = item.note or group.note
    handles: dict[tuple[int, int, str], int] = {}
    # which of them the whole was given and returned is not known either
    if not has_order and all(group.scope for group in calls):
        for step, rank in dict.fromkeys((group.step, group.rank) for group in calls):
            handles[step, rank, ""] = building.call(
                "", kind="module", step=step, rank=rank, notes=(mark(Mark.UNORDERED),)
            )
    # names written with underscores for dots nest where modules show their inputs
    mark_of_parts = "." if any("." in group.scope for group in calls) else "_"
    for group in _nested(calls, mark_of_parts):
        moment = (group.step, group.rank)
        parent = next(
            (
                handles[*moment, above]
                for above in _above(group.scope, mark_of_parts)
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
            notes=() if has_order else (group.note or mark(Mark.UNORDERED),),
        )
        if group.holds_others:
            handles[*moment, group.scope] = handle


@dataclass(slots=True)
class _Group:
    """The tensors of one call."""

    step: int
    rank: int
    scope: str
    note: str = ""
    slots: dict[str, dict[str, Named]] = field(default_factory=lambda: {"input": {}, "output": {}})
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def holds_others(self) -> bool:
        """Whether calls may be nested in it. The begin of a module without inputs is not known; it
        is placed where its output was computed.
        """
        return bool(self.slots["input"]) or not self.scope


def _nested(calls: Sequence[_Group], mark_of_parts: str) -> list[_Group]:
    """Returns the calls, each module before the first call inside it, according to the names."""
    first: dict[tuple[int, int, str], int] = {}
    starts: list[tuple[int, int, int]] = []
    for place, group in enumerate(calls):
        for scope in (group.scope, *_above(group.scope, mark_of_parts)):
            first.setdefault((group.step, group.rank, scope), place)
    moved: set[tuple[int, int, str]] = set()
    for place, group in enumerate(calls):
        key = (group.step, group.rank, group.scope)
        start = first[key] if group.holds_others and key not in moved else place
        moved.add(key)
        starts.append((start, len(group.scope), place))
    return [calls[place] for _, _, place in sorted(starts)]


def _above(scope: str, mark_of_parts: str) -> list[str]:
    """Returns the names of the modules that contain this one, innermost first; the root last."""
    parts = scope.split(mark_of_parts)
    above = [mark_of_parts.join(parts[:k]) for k in range(len(parts) - 1, 0, -1)]
    return above + ([""] if scope else [])


def add_weights(building: Building, items: Sequence[Named]) -> None:
    """Adds parameters of modules, below one root."""
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
