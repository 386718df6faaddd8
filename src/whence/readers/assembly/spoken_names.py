"""Parses names of files and entries that people chose: steps, ranks, counters, inputs and outputs.

The tables here are the only place that lists such words. A mark is a word with a number (`step3`,
`dp0`, `第3步`). Parts of a path that consist of marks only always count; a mark at the end of a
longer name counts where at least half of the names of the dump have that word, so that a module
called `token_1` keeps its name.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

_TOKEN_WORDS = "tok(?:en)?|词"
_PROMPT_WORDS = "batch|sample|prompt|request|批次?"
_STEP_WORDS = (
    "epoch|轮次?",
    "(?:global_?)?step|it(?:er(?:ation)?)?|[eé]tape|schritt|步骤?|迭代",
    _PROMPT_WORDS,
    "micro(?:_?batch)?|mb",
    "pass|forward|fwd|turn|call|frame|chunk",
    _TOKEN_WORDS,
)
"""Words of counters, the outermost counter first."""
_RANK_WORDS = (
    "(?:(?:global|local|tp|mp|pp|dp|ep|cp|sp|tensor|pipeline|data)_?)?rank|[tmpdec]p|node|device|worker"
    "|proc(?:ess)?|gpu|cuda|npu|xpu|hpu|shard|card|chip|replica|卡|进程|设备"
)
_NUMBER = re.compile(r"([^\W\d_]*)[_=:-]?(\d{1,9})")
_PHASE = re.compile(
    r"(?P<kind>prefill|decode)(?:_[a-z]+\d+)*_(?P<number>\d{1,9})|(?P<only>prefill)"
)
_MARK = "(?:" + "|".join(
    [f"(?:(?P<s{n}>{words})[_=-]?(?P<n{n}>\\d{{1,9}}))" for n, words in enumerate(_STEP_WORDS)]
    + [f"(?:(?P<rank>{_RANK_WORDS})[_=:-]?(?P<nr>\\d{{1,9}}))", "第(?P<nc>\\d{1,9})[步轮批]"]
) + ")"  # fmt: skip
_AT_START = re.compile(_MARK + r"(?:$|[._-])", re.IGNORECASE)
_AT_END = re.compile(r"(?:^|[._-])" + _MARK + "$", re.IGNORECASE)
_ANY = re.compile("|".join((*_STEP_WORDS, _RANK_WORDS, "第", "prefill|decode")), re.IGNORECASE)
_LAYERS = r"(?:layers?|l|blocks?|blk|h|stages?|encoders?|decoders?|experts?)"
_COUNT = rf"(?!{_LAYERS}[_-]?\d)(?:(?P<word>[a-z]+)[_-]?)?(?P<number>\d{{1,9}})"
_CALLS = (
    re.compile(rf"{_COUNT}$|(?P<key>[a-z]+)=(?P<value>\d{{1,9}})[./_-]", re.IGNORECASE),
    re.compile(r"(?:^|[\[._@#/-])(?P<word>[a-gi-km-z]?)(?P<number>\d{1,9})\]?$", re.IGNORECASE),
)
"""Numbers behind words that are not known: all of a part, in front of one, or behind one."""
_LAYER = re.compile(rf"{_LAYERS}[_-]?\d", re.IGNORECASE)
_OWN = re.compile(rf"(?:^|[._/-]){_LAYERS}?[_-]?\d+(?=$|[._/-])", re.IGNORECASE)
_RANK_LETTER, _CALL_LEVEL = "r", 4
_OF_A_RUN = 1000  # from where on a number that all names have is one of a process or a port
_CALL_OF_CLASS = re.compile(
    r"(?:(?:Module|Cell)\.)?(?:(.+)\.)?[A-Z]\w*\.forward(?:\.(\d{1,9}))?(?=\.(?:input|output)|$)(.*)"
)
_DTYPE = "(?:bf|f|fp|b?float|u?int|i|u)(?:8|16|32|64)|bool"
_CONTENT = re.compile(r"(?<=.)(?:[./](?:__\w{1,30}__(?:[./]0)?|data|tensor|array)|\[0\])$")
_NO_NAME = re.compile(r"-\d{5}-of-\d{5}$|^[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}$")
"""A file that is a part of one, or is called by chance (UUID)."""
_GLUED = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[a-z]{3})(?=\d)|(?<=\d)(?=[A-Z])")
_PLACE = re.compile(r"(?:arr_)?(\d{1,4})")
_KEY = re.compile(r"""\[\s*(?:'([^'\]]*)'|"([^"\]]*)")\s*\]""")

_LEVEL = re.compile(r"[./]")
_SIDES = {
    "input": "input", "inputs": "input", "输入": "input", "in": "input", "args": "input",
    "entree": "input", "entrée": "input", "eingang": "input",
    "output": "output", "outputs": "output", "输出": "output", "out": "output",
    "result": "output", "ret": "output", "sortie": "output", "ausgang": "output",
    "ouput": "output", "ouputs": "output",
}  # fmt: skip
_LAST_WORDS = {
    "x": "input", "y": "output", "pre": "input", "post": "output",
    "before": "input", "after": "output",
}  # fmt: skip
"""Words of a side (input or output) that count where all names end in one; they also begin and end
names of modules.
"""
_CLEAR = frozenset(("input", "inputs", "输入", "output", "outputs", "ouput", "ouputs", "输出"))
"""Those words that mean a side wherever they end a name."""
_ACTIVATION = re.compile(
    r"(?:act(?:ivation)?s?|hidden(?:_states?)?|features?|taps?|intermediates?|激活)\."
    r"(?!.*(?:weight|bias|running_\w+|num_batches_tracked)$)|.*\.grad$",
    re.IGNORECASE,
)
_SIDE = rf"(?P<word>(?i:{'|'.join(_SIDES)}))"
_SUFFIX = re.compile(
    rf"(?:^|[._/:#@-])(?:(?:fwd|forward)[._-])?{_SIDE}(?:[._-]?\[?(?P<slot>\d{{1,4}})\]?)?$"
)
_OF_ARGUMENT = re.compile(rf"(?:^|[._-]){_SIDE}\.(?P<slot>[A-Za-z][A-Za-z0-9_]{{0,30}})$")
_LAST = re.compile(rf"[._-](?P<word>(?i:{'|'.join(_LAST_WORDS)}))(?P<slot>)$")
_PREFIX = re.compile(rf"^{_SIDE}[._-](?=.)|(?<=\.)(?P<inner>(?i:{'|'.join(_SIDES)}))\.")


class Mark(NamedTuple):
    """A word with a number. level: of a step, as in `_STEP_WORDS`, -1 for a rank, -2 for a phase.
    word: in lower case.
    """

    level: int
    word: str
    number: int


class Said(NamedTuple):
    """What the path of a tensor states."""

    name: str
    step: int
    rank: int


class NumberInName(NamedTuple):
    """A number in a name and the word before it, "" without one."""

    word: str
    number: int

    @property
    def is_rank(self) -> bool:
        return bool(re.fullmatch(_RANK_WORDS, self.word, re.IGNORECASE))

    @property
    def is_prompt(self) -> bool:
        return bool(re.fullmatch(_PROMPT_WORDS, self.word, re.IGNORECASE))

    @property
    def is_token(self) -> bool:
        return bool(re.fullmatch(_TOKEN_WORDS, self.word, re.IGNORECASE))

    @property
    def is_step(self) -> bool:
        """Whether the word is a counter's: that of a step, a prompt or a token."""
        return bool(re.fullmatch("|".join(_STEP_WORDS), self.word, re.IGNORECASE))


def numbers_in(name: str) -> list[NumberInName]:
    """Returns all numbers of a name with the words before them."""
    return [NumberInName(word, int(number)) for word, number in _NUMBER.findall(name)]


def tell(paths: Sequence[str], inner: Sequence[str]) -> list[Said]:
    """Parses the names of the tensors of one dump.

    paths: of their files, relative, with forward slashes. inner: names in the file, "" for its only
    tensor.
    """
    inner = [_KEY.sub(lambda m: f".{m[1] or m[2]}", name).lstrip(".") for name in inner]
    while len(inner) > 1 and all(map(_CONTENT.search, inner)):
        inner = [_CONTENT.sub("", name) for name in inner]
    paths = _without_run(paths)
    if len(set(inner)) == 1 and inner[0].lower() not in _SIDES and _tell_apart(paths):
        inner = [""] * len(inner)
    rows = _without_classes([_pieces(path, name) for path, name in zip(paths, inner, strict=True)])
    glued = sum(bool(re.fullmatch(r"[^\W_]+[a-z0-9][A-Z][^\W_]+", row[-1])) for row in rows)
    if 2 * glued > len(rows) and not any(re.search(r"[\W_]", row[-1]) for row in rows):
        rows = [[*row[:-1], _GLUED.sub("_", row[-1])] for row in rows]
    if all(_CONTENT.search(row[-1]) and row[-1].endswith("]") for row in rows):
        rows = [[*row[:-1], _CONTENT.sub("", row[-1])] for row in rows]
    marks = _marks_of_classes(rows)
    while _take_words(rows, marks) or _take_calls(rows, marks, inner):
        pass
    steps = _numbered([[m for m in row if m.level != -1] for row in marks])
    ranks = _numbered([[m for m in row if m.level == -1] for row in marks])
    names = _names(rows, inner, len(set(paths)))
    return [Said(*row) for row in zip(names, steps, ranks, strict=True)]


def _without_run(paths: Sequence[str]) -> Sequence[str]:
    """Returns the paths below the folders that all are in and that tell runs apart: by a number
    that is none of a layer, a step or a rank.
    """
    while paths:
        run, bar, _ = paths[0].partition("/")
        is_run = re.search(r"\d", run) and _marked(run)[0] and not _LAYER.match(run)
        is_number = run.isdecimal() and len({path.count("/") for path in paths}) == 1
        if not (bar and (is_run or is_number)) or any(p.partition("/")[0] != run for p in paths):
            break
        paths = [path.partition("/")[2] for path in paths]
    return paths


def _without_classes(rows: list[list[str]]) -> list[list[str]]:
    """Returns the parts of paths without the folders of classes that hold folders or files of the
    modules of each: they tell nothing that the names of modules do not.
    """
    rests = ["/".join(row[1:]) for row in rows]
    is_class = all(len(row) > 1 and re.fullmatch(r"[A-Z][A-Za-z]\w*", row[0]) for row in rows)
    is_path = 2 * sum(bool(re.search(r"\w\.\d|\d\.\w", rest)) for rest in rests) > len(rests)
    is_told = len(set(rests)) == len({(row[0], rest) for row, rest in zip(rows, rests)})
    return [row[1:] for row in rows] if is_class and is_path and is_told else rows


def _tell_apart(paths: Sequence[str]) -> bool:
    """Whether the names of files differ in more than steps and ranks."""
    return len({tuple(_marked(piece)[0] for piece in _pieces(path, "")) for path in paths}) > 1


def without_forms(paths: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Sequence[str]:
    """Returns the paths of files without what they end in: the dtype and shape of the tensor that
    each holds, where all state them.
    """
    forms = [_form(shape).search(path) for path, shape in zip(paths, shapes, strict=True)]
    if not all(forms):
        return paths
    return [m.string[: m.start()] + m.string[m.end() :] for m in forms if m is not None]


@lru_cache(maxsize=1024)
def _form(shape: tuple[int, ...]) -> re.Pattern[str]:
    numbers = "[x_,-]".join(map(str, shape)) or "scalar"
    return re.compile(rf"(?<=.)(?:[._-](?:{_DTYPE}|[(\[]?{numbers}[)\]]?))+(?=[._-])")


def _pieces(path: str, name: str) -> list[str]:
    """Splits a path into folders, the name of the file and the name in it."""
    *folders, last = path.split("/")
    stem, dot, _ = last.rpartition(".")
    return [*folders, stem if dot and stem else last, *([name] if name else [])]


def _marks_of_classes(rows: Sequence[list[str]]) -> list[list[Mark]]:
    """Takes the numbers of calls out of names of the form of precision tools,
    `Module.layers.3.mlp.Linear.forward.1`, where all have it.
    """
    of_classes = [_CALL_OF_CLASS.fullmatch(row[-1]) for row in rows]
    if not all(of_classes):
        return [[] for _ in rows]
    for row, m in zip(rows, of_classes, strict=True):
        row[-1] = f"{m[1] or ''}{m[3]}".strip(".") if m else ""
    return [[Mark(_CALL_LEVEL, "call", int(m[2] or 0))] for m in of_classes if m]


def _take_words(rows: Sequence[list[str]], marks: Sequence[list[Mark]]) -> bool:
    """Moves marks whose words are known from names to `marks`; returns whether there are any.

    A word counts where it and its number are a whole part of a path, else where at least half of
    the names have it.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        if words := [word for piece in row for word in _words_of(piece)]:
            counts.update(set(words))
    common = frozenset(word for word, count in counts.items() if 2 * count >= len(rows))
    before = sum(map(len, marks))
    for row, its_marks in zip(rows, marks, strict=True) if counts else ():
        for place, piece in enumerate(row):
            row[place], more = _parted(piece, common)
            its_marks += more
    return sum(map(len, marks)) > before


def _take_calls(
    rows: Sequence[list[str]], marks: Sequence[list[Mark]], inner: Sequence[str]
) -> bool:
    """Moves the numbers of calls or ranks behind words that are not known (`dump7`, `t=981`,
    `r0`, `mlp-1`) from names to `marks`; returns whether there are any.

    They are at the same place of all names, and nearly every name without them occurs with each;
    but for ranks most of these names have another number, that of a layer.
    """
    columns = zip(*(row[:-1] for row in rows))
    shared = sum(1 for _ in itertools.takewhile(lambda pieces: len({*pieces}) == 1, columns))
    firsts = [next((k for k, p in enumerate(row) if k >= shared and p), -1) for row in rows]
    stems = [len(row) - 1 - bool(name) for row, name in zip(rows, inner, strict=True)]
    lasts = [len(row) - 1 for row in rows]
    for places, pattern in itertools.product((firsts, stems, lasts), _CALLS):
        found = (pattern.search(row[k]) for row, k in zip(rows, places, strict=True))
        matches = [match for match in itertools.takewhile(bool, found) if match is not None]
        if len(matches) < len(rows) or any(
            (m.start() and m.re is _CALLS[0]) or _NO_NAME.search(m.string) for m in matches
        ):
            continue
        words = {(m["word"] or m.groupdict().get("key") or "").lower() for m in matches}
        rests = [
            [*row[:k], row[k][: m.start()] + row[k][m.end() :], *row[k + 1 :]]
            for row, k, m in zip(rows, places, matches, strict=True)
        ]
        numbers = [int(m["number"] or m.groupdict().get("value") or 0) for m in matches]
        names = [".".join(filter(None, rest)) for rest in rests]
        # in the same part, unless that is a number alone
        owners = [rest[k] or name for rest, k, name in zip(rests, places, names, strict=True)]
        own = sum(map(bool, map(_OWN.search, owners)))
        is_rank = words == {_RANK_LETTER}
        if len(words) > 1 or not _are_crossed(names, numbers, pattern is _CALLS[1]):
            continue
        if is_rank or 2 * own > len(rows) or {*numbers} == {max(numbers[0], _OF_A_RUN)}:
            mark = (-1, _RANK_LETTER) if is_rank else (_CALL_LEVEL, "call")
            for row, rest, its_marks, number in zip(rows, rests, marks, numbers, strict=True):
                row[:] = rest
                its_marks += [Mark(*mark, number)] * (is_rank or len(set(numbers)) > 1)
            return True
    return False


def _are_crossed(names: Sequence[str], numbers: Sequence[int], may_be_one: bool) -> bool:
    """Whether numbers say when, and not what: most names occur with all of them, and the others
    with all but the last, which may be missing. may_be_one: whether a number that all have says
    nothing.
    """
    several: dict[str, set[int]] = defaultdict(set)
    for name, number in zip(names, numbers, strict=True):
        several[name].add(number)
    all_ = set(numbers)
    whole = sum(its == all_ for its in several.values())
    return (
        len(several if len(all_) == 1 else all_) > 1
        and may_be_one >= (len(all_) == 1)
        and "" not in several
        and 2 * whole >= len(several)
        and all(its >= all_ - {max(all_)} for its in several.values())
    )


@lru_cache(maxsize=65536)
def _marked(piece: str) -> tuple[str, tuple[Mark, ...]]:
    """Returns (a part of a name without the marks at its ends, these marks)."""
    if not _ANY.search(piece):
        return piece, ()
    if phase := _PHASE.fullmatch(piece):
        return "", (Mark(-2, phase["kind"] or phase["only"], int(phase["number"] or 0)),)
    marks: list[Mark] = []
    while match := _AT_START.match(piece) or _AT_END.search(piece):
        marks.append(_mark(match))
        piece = piece[match.end() :] if not match.start() else piece[: match.start()]
    return piece, tuple(marks)


def _mark(match: re.Match[str]) -> Mark:
    if match["rank"]:
        return Mark(-1, match["rank"].lower(), int(match["nr"]))
    if match["nc"]:
        return Mark(1, "第", int(match["nc"]))
    level = next(n for n in range(len(_STEP_WORDS)) if match[f"s{n}"])
    return Mark(level, match[f"s{level}"].lower(), int(match[f"n{level}"]))


@lru_cache(maxsize=65536)
def _words_of(piece: str) -> frozenset[str]:
    """Returns the words of the marks in a part of a path."""
    parts = _LEVEL.split(piece) if _ANY.search(piece) else ()
    return frozenset(mark.word for part in parts for mark in _marked(part)[1])


@lru_cache(maxsize=65536)
def _parted(piece: str, common: frozenset[str]) -> tuple[str, tuple[Mark, ...]]:
    """As `_marked`, for a part of a path, and for what stands between its dots, that consists of
    marks only, or only with words that most names have.
    """
    rest, marks = _marked(piece)
    if marks and (not rest or common.issuperset(mark.word for mark in marks)):
        return rest, marks
    if not common or not _LEVEL.search(piece):
        return piece, ()
    kept: list[str] = []
    taken: list[Mark] = []
    for part in _LEVEL.split(piece):
        rest, marks = _marked(part)
        is_common = bool(marks) and common.issuperset(mark.word for mark in marks)
        taken += marks * is_common
        kept += [rest] * bool(rest) if is_common else [part]
    return (".".join(kept), tuple(taken)) if taken else (piece, ())


def _numbered(marks: Sequence[Sequence[Mark]]) -> list[int]:
    """Returns one number for the marks of each name: their own number where only one kind of mark
    varies, else their position among all. Prefills come first; a dump of decodes alone begins with
    1, after the missing prefill.
    """
    keys = [{(mark.level, mark.word): mark.number for mark in row} for row in marks]
    values: dict[tuple[int, str], set[int | None]] = defaultdict(set)
    kinds = {kind for key in keys for kind in key}
    for key in keys:
        for kind in kinds:
            values[kind].add(key.get(kind))
    varying = sorted(kind for kind, numbers in values.items() if len(numbers) > 1)
    if not any(level == -2 for level, _ in kinds) and len(varying) < 2:
        chosen = (varying or sorted(kinds, key=lambda kind: (kind[0], "rank" in kind[1])))[-1:]
        return [next((key[kind] for kind in chosen if kind in key), 0) for key in keys]
    places = [_place_of(key) for key in keys]
    different = sorted(set(places))
    first = int(bool(different[0]) and different[0][0][:2] == (-2, "decode"))
    number = {place: n + first for n, place in enumerate(different)}
    return [number[place] for place in places]


def _place_of(key: Mapping[tuple[int, str], int]) -> tuple[tuple[int, str, int], ...]:
    """Returns a sort key of marks: prefills before decodes, the outermost counter first."""
    words = {"prefill": ""}
    return tuple(sorted((level, words.get(word, word), n) for (level, word), n in key.items()))


def _names(
    parts: Sequence[Sequence[str]], inner: Sequence[str], files: int
) -> list[str]:  # fmt: skip
    """Returns dotted names of the rest. The name of the file is left out where all files have the
    same one, or are parts of one checkpoint; so is a name in the file that is the same in all.
    """
    heads, tails = [], []
    for row, name in zip(parts, inner, strict=True):
        cut = len(row) - bool(name)
        kept = [part for part in row[:cut] if part]
        if kept and row[cut - 1 : cut] == kept[-1:] and _NO_NAME.search(kept[-1]):
            kept = kept[: None if not name or _PLACE.fullmatch(name) else -1]
        heads.append(".".join(kept))
        tails.append(row[cut] if name else "")
    is_told = 2 * sum(map(bool, tails)) > len(tails)  # all, but for the root
    if is_told and len(set(heads)) == 1 and (files > 1 or "/" not in heads[0]):
        if _SIDES.get(heads[0].lower()) == "input":
            tails = [f"{tail}.input" for tail in tails]
        heads = [""] * len(heads)
    elif is_told and len(set(heads)) > 1 and all(map(_PLACE.fullmatch, tails)):
        tails = [f"output.{tail.removeprefix('arr_')}" for tail in tails]
    return [f"{a}.{b}" if a and b else a or b for a, b in zip(heads, tails, strict=True)]


# ---- inputs and outputs


def sides(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns (scope, "input" or "output", slot) of each name: `layers.0.mlp.input.1` is input 1 of
    layers.0.mlp. A name that states no side is an output under its whole name.

    A word at the end of a name, else at its beginning or as a folder, counts where every name has
    one, or most have one and most of their modules have both sides. Elsewhere a clear word makes an
    input, and a word makes an output if its module has an input: BERT has modules called output.
    Names that state inputs alone are checked one by one, under their whole names.
    """
    at_end = _with_arguments([_at_end(name) for name in names])
    if all(side and side[0] and side[1] == "input" for side in at_end):
        return [(name, "output", "0") for name in names]  # what was recorded, in its order
    at_start = [_at_start(name) for name in names]
    # The reading that explains more names comes first.
    readings = sorted(((at_end, 1), (at_start, 0)), key=lambda reading: -sum(map(bool, reading[0])))
    for marked, alone in readings:
        called, with_inputs = _scopes(marked, "output"), _scopes(marked, "input")
        both = called & with_inputs
        if marked is at_end and all(at_end):
            # out1, out2 are no outputs of one call
            if (both or called != {""}) and not _are_folders(filter(None, at_end)):
                break
        elif (
            2 * sum(map(bool, marked)) > len(names)
            and len(both) > alone
            and 2 * len(both) >= max(len(called), len(with_inputs))
        ):
            called = both
            marked = [side if side and side[0] in both else None for side in marked]
            break
    else:
        marked = [_at_end(name, clear=True) for name in names]
        called = _scopes(marked, "input")
    return [
        side if side and (side[1] == "input" or side[0] in called) else (name, "output", "0")
        for side, name in zip(marked, names, strict=True)
    ]


def _with_arguments(
    sides: Sequence[tuple[str, str, str] | None],
) -> list[tuple[str, str, str] | None]:
    """Returns inputs under the modules that have outputs, if a scope is that of one with the name
    of an argument behind it.
    """
    called = {side[0] for side in sides if side and side[1] == "output"}
    out: list[tuple[str, str, str] | None] = []
    for side in sides:
        if side and side[1] == "input" and side[0] not in called:
            ends = (m.start() for m in re.finditer(r"[._/-]", side[0]))
            above = max((e for e in ends if side[0][:e] in called), default=0)
            if above:
                side = (side[0][:above], "input", side[0][above:].strip("._/-"))
        out.append(side)
    return out


def _scopes(sides: Iterable[tuple[str, str, str] | None], kind: str) -> set[str]:
    return {side[0] for side in sides if side and side[1] == kind}


def _are_folders(sides: Iterable[tuple[str, str, str]]) -> bool:
    """Whether sides precede module names, with the same several modules on both sides:
    `layer_0.in.conv1`.
    """
    slots: dict[tuple[str, str], set[str]] = defaultdict(set)
    for scope, side, slot in sides:
        slots[scope, side].update([slot] * slot[:1].isalpha())
    return any(
        len(named & slots.get((s, "output"), set())) > 1
        for (s, side), named in slots.items()
        if side == "input"
    )


def is_activation(name: str) -> bool:
    """Whether a name states that its tensor is not a weight: `activations.x`, `x.output.0`,
    `x.grad`.
    """
    return bool(_ACTIVATION.match(name)) or _at_end(name, clear=True) is not None


def _at_end(name: str, *, clear: bool = False) -> tuple[str, str, str] | None:
    start = max(0, len(name) - 60)
    patterns = (_SUFFIX,) if clear else (_SUFFIX, _OF_ARGUMENT, _LAST)
    match = next(filter(None, (pattern.search(name, start) for pattern in patterns)), None)
    if match is None or (clear and match["word"].lower() not in _CLEAR):
        return None
    side = (_SIDES | _LAST_WORDS)[match["word"].lower()]
    return name[: match.start()].rstrip("._-/"), side, match["slot"] or "0"


def _at_start(name: str) -> tuple[str, str, str] | None:
    match = _PREFIX.search(name)
    if match is None:
        return None
    word = match["word"] or match["inner"]
    return name[: match.start()] + name[match.end() :], _SIDES[word.lower()], "0"


# ---- counters


_WORD = r"^(?P<word>[A-Za-z]+[._-])?"
_COUNTERS = (
    re.compile(_WORD + r"(?P<number>\d{6,20}(?:[T_.-]\d{1,12}){0,2}|\d{1,12})[_-]"),  # or a time
    re.compile(_WORD + r"(?P<number>\d{1,12})[._-](?=.)"),
    re.compile(r"(?<=.)(?P<word>)[._-](?P<number>\d{6,20}(?:[T_.-]\d{1,12}){1,2}|\d{1,20})$"),
)


def counted(moments: Sequence[Hashable], scopes: Sequence[str]) -> list[tuple[str, int]] | None:
    """Returns (name without its counter, counter) of each name, None where there is none. All names
    must have one, behind the same word if any: a number that belongs to one call in each moment.
    moments: steps and ranks.

    A number at the front, followed by a bar, is a counter. Any other number is one if it separates
    calls that have several names each, since all names inside a layer share its number.
    """
    for pattern in _COUNTERS:
        matches = [match for scope in scopes if (match := pattern.search(scope))]
        words = {match["word"] for match in matches}
        if len(matches) < len(scopes) or len(words) != 1:
            continue
        numbers = [int(re.sub(r"\D", "", match["number"])) for match in matches]
        names = [m.string[: m.start()] + m.string[m.end() :] for m in matches]
        calls = {*zip(moments, numbers, names, strict=True)}
        tells = len(set(names)) > 1 and len(calls) == len({call[:2] for call in calls})
        if tells or (pattern is _COUNTERS[0] and not any(words)):
            return list(zip(names, numbers, strict=True))
    return None
