"""What is known of the order in which tensors were computed, where a dump does not state it.

Each source states of some tensors that they were computed before others. The sources are applied in
turn, the strongest first; a statement that contradicts a stronger source is dropped. Pairs without
a statement stay unordered.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from whence.records.marks import Mark, has_mark, mark, mark_value
from whence.records.run import Call

Chain = Sequence[Sequence[int]]
"""Groups of tensors: all of one were computed before all of the next; within a group nothing is
known.
"""


class Trace(NamedTuple):
    """What a dump tells of the time of a tensor's computation. name: dotted. counter: a number in
    its name.

    entry: its position in its file, where that may be an order. time: when the file was written, in
    ns. -1 or "": not known. made_of: names of tensors from which, by content, it was computed.
    """

    name: str
    counter: int = -1
    entry: int = -1
    time: int = -1
    file: str = ""
    made_of: tuple[str, ...] = ()

    def note(self) -> str:
        """Returns the trace as a note of its call."""
        parts = [f"{word} {number}" for word, number in zip(_WORDS, self[1:4]) if number >= 0]
        parts += [f"file {self.file}"] if self.file else []
        text = "".join([", ".join(parts), *(f"{_MADE_OF}{name}" for name in self.made_of)])
        return mark(Mark.UNORDERED, f": {text}" if text else "")


_WORDS = ("number", "entry", "time")
_MADE_OF = "\nmade of "
_NOTE = re.compile(
    r"(?:: )?(?:number (\d{1,19}))?(?:, )?(?:entry (\d{1,19}))?(?:, )?(?:time (\d{1,19}))?"
    r"(?:, )?(?:file (.*))?",
    re.DOTALL,
)


def trace_of(call: Call) -> Trace:
    """Returns the trace of a call of a dump; without any other information, its position among the
    calls.
    """
    if not has_mark(call, Mark.UNORDERED):
        return Trace(call.scope, call.order)
    text, *made_of = mark_value(call, Mark.UNORDERED).split(_MADE_OF)
    match = _NOTE.fullmatch(text)
    if match is None:
        return Trace(call.scope)
    counter, entry, time = (int(number or -1) for number in match.groups()[:3])
    return Trace(call.scope, counter, entry, time, match[4] or "", tuple(made_of))


class PartialOrder:
    """A partial order of tensors. Nodes from 0 to `count` are tensors; separators between groups of
    them have higher numbers.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.before: list[list[int]] = [[] for _ in range(count)]
        """By node, what was made right before it."""
        self.order: list[int] = list(range(count))
        """All nodes, each behind what was made before it; tensors by number where that is open."""
        self.is_total = count < 2

    def add_all(self, sources: Sequence[Sequence[Chain]]) -> None:
        """Adds the statements of sources, the strongest first; at once where none contradicts."""
        if not self._take(itertools.chain(*sources)):
            for chains in sources:
                self.add(chains)

    def add(self, chains: Sequence[Chain]) -> None:
        """Adds the statements of a source that do not contradict earlier ones."""
        if self.is_total or not chains or self._take(chains) or len(chains) > _TRIED:
            return
        for chain in chains:
            self._take([chain])

    def _take(self, chains: Iterable[Chain]) -> bool:
        many = len(self.before)
        added: list[int] = []
        for chain in chains:
            for former, later in itertools.pairwise(chain):
                last = list(former)
                if len(former) * len(later) > len(former) + len(later):
                    self.before.append(last)  # what stands between
                    last = [len(self.before) - 1]
                for node in later:
                    self.before[node] += last
                    added += [node] * len(last)
        sort = self._sorted()
        if sort is not None:
            self.order, self.is_total = sort
            return True
        for node in added:
            self.before[node].pop()
        del self.before[many:]
        return False

    def _sorted(self) -> tuple[list[int], bool] | None:
        """Returns (order, whether no other is possible); None where there is a cycle."""
        waiting = [len(before) for before in self.before]
        after: list[list[int]] = [[] for _ in self.before]
        for node, before in enumerate(self.before):
            for former in before:
                after[former].append(node)
        # what stands between comes at once
        ready = [(node < self.count, node) for node, left in enumerate(waiting) if not left]
        heapq.heapify(ready)
        order, is_total = list[int](), True
        while ready:
            is_tensor, node = heapq.heappop(ready)
            is_total = is_total and not (is_tensor and ready)
            order.append(node)
            for later in after[node]:
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(ready, (later < self.count, later))
        return (order, is_total) if len(order) == len(self.before) else None


_TRIED = 64
"""Most chains of a source that are tried one by one where it contradicts a stronger one."""


def known(traces: Sequence[Trace], other: Sequence[Trace] = ()) -> PartialOrder:
    """Returns the known order of the tensors of one step and rank. other: traces of the other run.

    Gradients of parameters are computed in the order of a backward pass, whatever order they are
    stored in.
    """
    order = PartialOrder(len(traces))
    traces, other = map(with_spelt_names, (traces, other))
    if are_gradients([trace.name for trace in traces]):
        modules = [Trace(module_of(trace.name)) for trace in traces]
        for by_name in _BY_NAME:
            order.add([chain[::-1] for chain in by_name(modules)])
        return order
    for source in _STATED:
        order.add(_chains(source, traces))
    if not order.is_total:
        sources = [_chains(source, traces) for source in _INFERRED]
        sources += [_chains(source, other) for source in (*_STATED, *_INFERRED) if other]
        order.add_all(sources)
    return order


def with_spelt_names(traces: Sequence[Trace]) -> list[Trace]:
    """Normalises names, with the number of a layer in front: `attn_norm-3` and `attn_norm_layer3`
    become layer.3.attn_norm, where most names in front of a number have the same several ones.
    """
    names = {name: _spelt(name) for trace in traces for name in (trace.name, *trace.made_of)}
    behind = {name: m for name in names.values() if (m := _LAYER_BEHIND.fullmatch(name))}
    numbers: dict[str, set[str]] = defaultdict(set)
    for match in behind.values():
        numbers[match[1]].add(match[2])
    (usual, many), *_ = [*Counter(map(frozenset, numbers.values())).most_common(1), ((), 0)]
    of_classes = sum(bool(_CLASS.fullmatch(name.lower())) for name in numbers)
    if (
        len(usual) > 1
        and 2 * min(many, len(numbers) - of_classes) > len(numbers)
        and (2 * len(behind) > len(names))
    ):
        names = {
            name: f"layer.{m[2]}.{m[1]}" if (m := behind.get(spelt)) else spelt
            for name, spelt in names.items()
        }
    return [
        trace._replace(name=names[trace.name], made_of=(*map(names.__getitem__, trace.made_of),))
        for trace in traces
    ]


def _chains(source: _Source, traces: Sequence[Trace]) -> Sequence[Chain]:
    if source in _OF_NAMES:
        return _of_names(source, tuple(trace.name for trace in traces))
    return source(traces)


@functools.lru_cache(maxsize=32)
def _of_names(source: _Source, names: tuple[str, ...]) -> Sequence[Chain]:
    """Returns what names alone state; cached, since every step and rank has the same ones."""
    return source([Trace(name) for name in names])


@functools.lru_cache(maxsize=65536)
def _spelt(name: str) -> str:
    """Normalises a name for the sources: `layers[3]` and `第3层` become layers.3, outputs of
    TensorFlow (`mlp:0`) their operator, and roles English words.
    """
    name = _LAYER_IN_CHINESE.sub(
        r"layer.\1\2", _INDEX.sub(r".\1", name.replace("@", ".")).strip(".")
    )
    name = _BETWEEN_WORDS.sub("_", _BETWEEN_PARTS.sub(".", name))
    for word, role in _ROLES_IN_CHINESE:
        name = name.replace(word, role)
    return name


_CLASS = re.compile(
    r"(\w+_)?(norm|normalization)|(layer|batch|rms|group)norm|conv([123]d)?|linear|dense|gemm|matmul|add|mul"
    r"|\w*(relu|gelu|silu|softmax|pool([123]d)?|pooling)|dropout|embedding"
)
_LAYER_BEHIND = re.compile(
    r"(?!.*[._/-]\d+[._/-])(.*?[A-Za-z].*?)[._@-](?:layer|block|blk|l|L)?[._-]?(\d+)"
)
_INDEX = re.compile(r"\[(\d+)\]|:\d+$")
_BETWEEN_PARTS, _BETWEEN_WORDS = re.compile(r"\s+-\s+|(?<=[^_])__(?=[^_])|:\s+"), re.compile(r"\s+")
_LAYER_IN_CHINESE = re.compile(r"第(\d+)[层块]|[层块][._-]?(\d+)")
_ROLES_IN_CHINESE = (
    ("嵌入", "embed"), ("注意力", "attn"), ("前馈", "mlp"), ("归一化", "norm"), ("投影", "proj"),
    ("激活", "act"), ("线性", "linear"), ("池化", "pool"), ("分类头", "head"), ("输出头", "head"),
)  # fmt: skip
_PARAMETER = re.compile(
    r"^(?:(?:d|grads?|gradients?)[._-])?(?P<module>.*?)[._-]?(?<![A-Za-z])(?:weight|bias|gamma|beta|kernel)"
    r"(?:[._-](?:grads?|gradient))?$"
)


def module_of(name: str) -> str:
    """Returns the module whose parameter a gradient belongs to, by its name; "" for a name that is
    not a gradient's.
    """
    match = _PARAMETER.match(name)
    return match["module"] if match else ""


def layer_before(name: str) -> list[str]:
    """Returns the names of the same tensor one layer earlier: by each number that has a name behind
    it, or a word for layers in front. Other numbers count what is of different kinds.
    """
    return [
        f"{name[: m.start()]}{str(int(m[0]) - 1).zfill(width)}{name[m.end() :]}"
        for m in _NUMBER.finditer(name)
        for width in (0, len(m[0]))
        if int(m[0]) and (name[m.end() :] or _OF_A_LAYER.search(name[: m.start()]))
    ]


_OF_A_LAYER = re.compile(
    r"(?:layer|block|blk|stage|resid\w*|hidden_states?|(?<![^\W_])[hl])s?[._/-]?$", re.IGNORECASE
)


def are_gradients(names: Sequence[str]) -> bool:
    """Whether most of these are gradients of parameters."""
    return 2 * sum(bool(module_of(name)) for name in names) > len(names)


# ---- sources


def _by_counter(traces: Sequence[Trace]) -> list[Chain]:
    """Numbers that count calls, if all names have one. Most wholes in front of their parts were
    counted as they were entered or registered: they are left out.
    """
    if any(trace.counter < 0 for trace in traces):
        return []
    wholes = [
        (whole, min(traces[n].counter for n in parts) > traces[whole].counter)
        for parts, (whole, *_) in _chains(_by_part, traces)
    ]
    early = {whole for whole, is_early in wholes if is_early}
    left_out = early if 2 * len(early) > len(wholes) else set()
    counted = [n for n in range(len(traces)) if n not in left_out]
    return [_grouped(counted, lambda n: traces[n].counter)]


def _by_entry(traces: Sequence[Trace]) -> list[Chain]:
    """Positions in a file, unless they may result from sorting. What a model returns may state its
    results in front of the layers that they come from.
    """
    return [
        [[n] for n in _with_results_last(entries, traces)]
        for entries in _files(traces)
        if not _is_sorted([traces[n].name for n in entries])
    ]


def _with_results_last(entries: Sequence[int], traces: Sequence[Trace]) -> list[int]:
    places = {n: place for place, n in enumerate(entries)}
    last: dict[str, int] = {}
    for n in entries:
        if match := _HIDDEN.search(traces[n].name):
            last[traces[n].name[: match.start()]] = places[n]

    def place(n: int) -> tuple[int, bool]:
        match = _RETURNED.search(traces[n].name)
        behind = last.get(traces[n].name[: match.start()], -1) if match else -1
        return max(places[n], behind), behind > places[n]

    return sorted(entries, key=place)


_HIDDEN = re.compile(r"(?:layer\.\d+\.)?\w*(?:hidden_states|attentions|past_key_values)(?:\.\d+)*$")
_RETURNED = re.compile(r"(?:logits|loss|last_hidden_state|pooler_output)$")


def _by_sorted_entry(traces: Sequence[Trace]) -> list[Chain]:
    """Positions in an alphabetical file, where the alphabet may be chance."""
    return [
        [[n] for n in entries]
        for entries in _files(traces)
        if _is_sorted(names := [traces[n].name for n in entries]) and _choices(names) < _CHANCE
    ]


def _places(traces: Sequence[Trace]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = defaultdict(list)
    for n, trace in enumerate(traces):
        places[trace.name].append(n)
    return places


def _by_content(traces: Sequence[Trace]) -> list[Chain]:
    """The tensors from which, by content, a tensor was computed."""
    places = _places(traces)
    return [
        [places[name], [n]]
        for n, trace in enumerate(traces)
        for name in trace.made_of
        if len(places[name]) == 1
    ]


def _by_part(traces: Sequence[Trace]) -> list[Chain]:
    """A module returns after its parts, according to nested names."""
    places = _places(traces)
    parts: dict[str, list[int]] = defaultdict(list)
    below: dict[str, list[int]] = defaultdict(list)
    for n, trace in enumerate(traces):
        for match in _INNER.finditer(trace.name):
            whole = trace.name[: match.start()]
            if whole in places and match[0] == "_" and not trace.name[match.start() - 1].isdigit():
                below[whole].append(n)
            elif whole in places:
                parts[whole].append(n)
    if "" in places:
        parts[""] = [n for n, trace in enumerate(traces) if trace.name]
    # gate and gate_proj stand side by side, unless underscores part several modules
    if sum(len(inner) > 1 for inner in below.values()) > 1:
        for whole, inner in below.items():
            if not all(_BESIDE.search(traces[n].name[len(whole) :]) for n in inner):
                parts[whole] += inner
    return [[inner, places[whole]] for whole, inner in parts.items()]


def _by_result(traces: Sequence[Trace]) -> list[Chain]:
    """A tensor named as the output of a whole comes after the parts: `layer_2.out`."""
    return _by_part([trace._replace(name=_RESULT.sub("", trace.name)) for trace in traces])


_INNER = re.compile(r"[./_]|(?<=\d)-|-(?=\d+\.)")
_BESIDE = re.compile(r"^_(?:\w+_)?(?:norm|ln|layernorm|proj)\w*$", re.IGNORECASE)
_RESULT = re.compile(
    r"(?:(?<=.)[./]|(?<=\d)_)(?:(?:l|layer|block|resid\w*)[._-])?(?:out|output|post|result|ret|y)$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")
_LEVEL = re.compile(r"[./]")


def _by_number(traces: Sequence[Trace]) -> list[Chain]:
    """Layers by their numbers, compared as integers; likewise modules beside convolutions."""
    numbered: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    beside: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    with_convolutions = set()
    for n, trace in enumerate(traces):
        for match in _NUMBER.finditer(trace.name):
            before = trace.name[: match.start()]
            if not _GATED.search(before):
                numbered[before][int(match[0])].append(n)
            above = before.rstrip(_LETTERS)
            if above != before:
                beside[above][int(match[0])].append(n)
                if before[len(above) :].lower() == "conv":
                    with_convolutions.add(above)
    chosen = [*numbered.values(), *(beside[above] for above in with_convolutions)]
    return [[numbers[k] for k in sorted(numbers)] for numbers in chosen if len(numbers) > 1]


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COUNTED = re.compile(r"\D+[_-]\d+")
_GATED = re.compile(r"(?:^|[._/-])w$")
"""In front of the numbers of a gated MLP, in which w3 runs before w2."""
_GIVEN = re.compile(r"^(\w*input_ids|\w*attention_mask|position_ids|pixel_values|inputs?)$")
_TRUNK = (
    re.compile(r"embe?d|(^|[._/-])(wte|wpe|stem|conv_in|patchify)([._/-]|$)|^conv$"),
    re.compile(r"^(?!.*(norm|ln_f|pool|head|classif|final)).*(transformer|encoder|decoder|backbone|trunk|block"
               r"|layer|stage|features|body)"),
    re.compile(r"(^|[._/-])(final\w*|norm|ln_f|post_layernorm|layer_?norm)([._/-]|$)"),
    re.compile(r"pool"),
    re.compile(r"(^|[._/-])(lm_?head|head|classifier|classification|fc|logits|score|cls|ctc|proj_out|conv_out"
               r"|output|last_hidden_state)([._/-]|$)"),
)  # fmt: skip
"""Roles around layers, in the order in which they run."""
_TOWERS = (("encoder", "decoder"), ("down", "mid", "up"))
_OF_LAYERS = 1


def _by_role(traces: Sequence[Trace]) -> list[Chain]:
    """What the caller gave before all else; embeddings before layers before the last norm before
    the head, in each tower; an encoder before its decoder.
    """
    names = [trace.name.lower() for trace in traces]
    if len({name.partition(".")[0] for name in names}) == 1:  # decoder.fc, decoder.layers.3
        names = [name.partition(".")[2] for name in names]
    heads = [_NUMBER.split(name, 1)[0] for name in names]
    counts = Counter(h for h, name in zip(heads, names, strict=True) if _COUNTED.fullmatch(name))
    towers = [_tower(head) for head in heads]
    several = Counter(kind for kind, _ in {*towers})
    towers = [tower if several[tower[0]] > 1 else _NO_TOWER for tower in towers]
    roles = [
        -1 if _GIVEN.match(name) else _role(head, head != name, counts[head] > 1)
        for name, head in zip(names, heads, strict=True)
    ]
    nodes = range(len(names))
    chains = [_grouped(nodes, lambda n: not _GIVEN.match(names[n]))]
    for kind, _ in enumerate(_TOWERS):
        chains.append(_grouped((n for n in nodes if towers[n][0] == kind), lambda n: towers[n][1]))
    for tower in dict.fromkeys(towers):
        members = [n for n in nodes if towers[n] == tower and roles[n] >= 0]
        chains.append(_grouped(members, roles.__getitem__))
    ends = {n for n in nodes if towers[n] == _NO_TOWER and roles[n] == len(_TRUNK) - 1}
    inside = [n for n in nodes if towers[n] != _NO_TOWER]
    chains.append(_grouped([*inside, *ends], ends.__contains__))
    return [chain for chain in chains if len(chain) > 1]


_NO_TOWER = (-1, 0)


def _tower(head: str) -> tuple[int, int]:
    """Returns (which kind of towers, which of them) a name begins in."""
    return next(
        (
            (kind, place)
            for kind, words in enumerate(_TOWERS)
            for place, word in enumerate(words)
            if re.search(rf"(^|[._/-]){word}", head)
        ),
        _NO_TOWER,
    )


def _role(head: str, has_number: bool, is_counted: bool) -> int:
    """Returns the place in `_TRUNK` of what a name begins with, -1 for none. Numbers make layers,
    also those behind names of classes (linear_3).
    """
    role = next((k for k, words in enumerate(_TRUNK) if words.search(head)), -1)
    is_layer = has_number and (role < 0 or (role > 0 and is_counted))
    return _OF_LAYERS if is_layer else role


_LAYER = tuple((stage, re.compile(rf"(^|\.)({words})$")) for stage, words in (
    (0, r"input\.layernorm|pre\.attention\.\w+|(attn|attention|self\.attn)\.norm|ln\.attn"),
    (3, r"(attn|attention)\.(o|wo|out\.proj|c\.proj|proj|dense|output\.dense|to\.out(\.0)?)"
        r"(\.proj|\.lin)?|[ow]\.proj|out\.proj|kqv\.out"),
    (1, r"(q|k|v|qkv|query|key|value|query\.key\.value|c\.attn|in|w[qkv]|to\.[qkv]|[qkv]cur)"
        r"(\.proj|\.lin|\.norm)?"),
    (2, r"rotary\w*|softmax|scores?|attention\.self|attn\.weights|context"),
    (4, r"(attn|attention)\.out(put)?(\.layernorm)?|((self|cross)\.)?(attn|attention)|mixer"
        r"|selfattention"),
    (5, r"post\.attention\.layernorm|ffn\.norm|pre\.feedforward\.layernorm|mlp\.norm|ln\.mlp"),
    (6, r"(fc\.?1|c\.fc|gate|gate\.up|w1|wi(\.\d)?|linear\.?1|lin\.?1|dense\.h\.to\.4h)"
        r"(\.proj)?|intermediate(\.dense)?"),
    (12, r"(up|w3)(\.proj)?"),
    (7, r"act(\.fn)?|activation(\.fn)?|gelu|silu|intermediate\.act\.fn"),
    (8, r"(fc\.?2|c\.proj|down|w2|wo|linear\.?2|lin\.?2|dense\.4h\.to\.h|output\.dense)(\.proj)?"),
    (9, r"(mlp|ffn|feed\.forward)(\.out(put)?)?|output(\.layernorm)?|(block|layer)\.out(put)?"),
    (10, r"(norm|ln|layernorm|layer\.norm)\.?1"),
    (11, r"(norm|ln|layernorm|layer\.norm)\.?2"),
))  # fmt: skip
"""Roles in a layer of a transformer. Whether the numbered norms (10, 11) stand before or behind is
another matter in each model, and whether the activation (7) waits for the second gate (12).
"""
_NORM_1, _NORM_2, _UP = 10, 11, 12


def _in_layer(traces: Sequence[Trace]) -> list[Chain]:
    """Within a layer: attention before the MLP, projections in and out; of experts, each by
    itself.
    """
    layers: dict[tuple[str, bool], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    with_inner = set[str]()
    for n, trace in enumerate(traces):
        ends = [m.end() for m in _NUMBER.finditer(trace.name)]
        inner = [end for end in ends[1:] if trace.name[end : end + 1] in (".", "/")]
        for end, is_inner in [*((end, False) for end in ends[:1]), *((end, True) for end in inner)]:
            stage = _stage(trace.name[end:])
            layers[trace.name[:end], is_inner][stage].append(n)
        with_inner.update(trace.name[:end] for end in ends[: bool(inner)])
    chains = [
        [group for stages in chain if (group := [n for k in stages for n in layer.get(k, ())])]
        for (name, _), layer in layers.items()
        for chain in (_AROUND_INNER if name in with_inner else _IN_LAYER)
    ]
    return [chain for chain in chains if len(chain) > 1]


_IN_LAYER: tuple[tuple[Sequence[int], ...], ...] = (
    tuple((k,) for k in range(_NORM_1)),
    ((_NORM_1,), (*range(6, _NORM_1), _UP)),
    ((*range(5), _NORM_1), (_NORM_2,)),
    (range(6), (_UP,), (8, 9)),
)
_AROUND_INNER = ((*((k,) for k in range(6)), (*range(6, _NORM_1), _UP)),)
"""Chains of stages, each of one or several roles; of a layer with numbered parts, such as experts,
which run one after another.
"""


@functools.lru_cache(maxsize=4096)
def _stage(inner: str) -> int:
    """Returns the role of the part of a layer, -1 for none."""
    words = re.sub(r"[/_-]+", ".", inner).strip(".").lower()
    return next((stage for stage, role in _LAYER if role.search(words)), -1)


def _by_time(traces: Sequence[Trace]) -> list[Chain]:
    """Times at which files were written, unless these are alphabetical, as after a copy."""
    timed = [n for n, trace in enumerate(traces) if trace.time >= 0]
    chain = _grouped(timed, lambda n: traces[n].time)
    files = dict.fromkeys(traces[n].file for group in chain for n in sorted(group))
    if len(chain) < 2 or (_is_sorted([*files]) and _choices([*files]) >= _CHANCE):
        return []
    return [chain]


_Source = Callable[[Sequence[Trace]], list[Chain]]
_STATED: tuple[_Source, ...] = (_by_counter, _by_entry)
_INFERRED: tuple[_Source, ...] = (
    _by_content, _by_part, _by_number, _by_role, _in_layer, _by_result, _by_sorted_entry, _by_time,
)  # fmt: skip
"""The sources, the strongest first; what is stated often says all."""

_BY_NAME: tuple[_Source, ...] = (_by_number, _by_role, _in_layer)
_OF_NAMES: tuple[_Source, ...] = (_by_part, _by_result, *_BY_NAME)

_CHANCE = 100.0
"""From so many possible orders on, an alphabetical one is the result of sorting, not chance."""


def _files(traces: Sequence[Trace]) -> list[list[int]]:
    """Returns the tensors of each file that has an order, in that order."""
    files: dict[str, list[int]] = defaultdict(list)
    for n, trace in enumerate(traces):
        if trace.entry >= 0:
            files[trace.file].append(n)
    for entries in files.values():
        entries.sort(key=lambda n: traces[n].entry)
    return [entries for entries in files.values() if len(entries) > 1]


def _grouped(nodes: Iterable[int], key: Callable[[int], int]) -> Chain:
    groups: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        groups[key(node)].append(node)
    return [groups[k] for k in sorted(groups)]


def _is_sorted(names: Sequence[str]) -> bool:
    """Whether at every level what is called otherwise than by numbers stands in the order of the
    alphabet, and numbers do as well, as texts (with a bracket behind, too) or by value.
    """
    kids: dict[str, dict[str, None]] = defaultdict(dict)
    last = ""
    for name in names:
        above = ""
        for part in _LEVEL.split(name):
            whole = f"{above}.{part}"
            if part in kids[above] and not f"{last}.".startswith(f"{whole}."):
                return False  # sorting leaves together what is inside one module
            kids[above][part] = None
            above = whole
        last = above
    return all(
        list(parts) in [sorted(parts, key=key) for key in (str, "{}]".format, _by_value)]
        for parts in kids.values()
    )


def _by_value(part: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders the numbers in a name by value."""
    pieces = re.split(r"(\d+)", part)
    return [(int(p) if n % 2 else -1, p) for n, p in enumerate(pieces)]


def _choices(names: Sequence[str]) -> float:
    """Returns the number of possible orders of the modules with these names, ignoring numbers."""
    kids: dict[str, set[str]] = defaultdict(set)
    for name in names:
        above = ""
        for part in _LEVEL.split(_NUMBER.sub("*", name)):
            kids[above].add(part)
            above = f"{above}.{part}"
    return math.exp(min(sum(math.lgamma(len(parts) + 1) for parts in kids.values()), 50))
