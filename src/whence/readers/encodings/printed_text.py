"""Reads tensors and their statistics as people print them into a log: `print(name, tensor)` of
torch, numpy, jax, tensorflow and mindspore, and lines such as `fc1: mean=0.1 std=0.9 min=-2 max=3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from whence.readers.encodings import limits
from whence.readers.encodings.number_text import NUMBER, Digits, Values

MARK = re.compile(
    r"\b[tT]ensor\(\s*[\[\d-]|\b[Aa]rray\(\s*[\[\d-]|\bTensor\(shape=\[[^\n]{0,90}value="
    r"|\[ *-?\d+\.\d*(?:e[-+]\d+)?,? +-?\d+\."
)
"""Occurs in every text with printed tensors."""
_OPENS = re.compile(r"\[|(?<=ensor\()(?=[-\dnTFi])|(?<=rray\()(?=[-\dnTFi])")
_TOKEN = re.compile(rf"([\[\]])|(\.\.\.)|({NUMBER}|True|False)|[\s,]+")
_WRAPPER = re.compile(
    r"(?:<tf\.\w+:?[^<>\n]{0,200}numpy=\s*)?(?:\bParameter containing:\s*)?"
    r"(?:\b(?:tf\.)?[Tt]ensor\(\s*(?:shape=[^\n]{0,150}value=\s*)?|\b[Aa]rray\(\s*)$"
)
_TAIL = re.compile(
    r"(?:,\s*(?:dtype|device|grad_fn|requires_grad|shape|size|layout|weak_type)="
    r"(?:<[^>\n]{0,80}>|\([\d, ]{0,90}\)|[^\s,()<>]{1,40}))*,?\s*\)?>?"
)
_DTYPE = re.compile(r"dtype[=:] ?(?:torch\.|np\.|jnp\.|<dtype: ')?([a-zA-Z]+\d*)")
_SHAPE = re.compile(r"(?:\b[Ss]hape|\bsize|\bSize|\|)[=:( ]{0,3}[(\[](\d[\d, ]{0,90}|)[)\]]\)?")
_NO_TENSOR = re.compile(r"(?:[Ss]hapes?|[Ss]ize|[Dd]ims?|[Ss]trides?|[Pp]ads?|[Aa]xes|[Aa]xis)\W*$")
_LOG = re.compile(
    r"^(?:[\[(]?\d{4}-\d\d-\d\d[T ][\d:.,]{5,18}[\])]?|[\[(]?\d\d:\d\d:\d\d[.,\d]*[\])]?"
    r"|[\[(]?(?:INFO|DEBUG|WARNING|ERROR|root)[\])]?|[-:|>]+|\[[A-Za-z_ ]{1,40}\](?=\s)"
    r"|[\[(]?[\w./-]{1,80}\.(?:py|cc|cpp|cu|rs):\d{1,6}[\])]?(?=[\s:-]))\s*"
)
_STEP = re.compile(r"[-=#>* ]*(?:step|iteration|iter)[ :=#]*(\d{1,9})[-=#<*: ]*", re.IGNORECASE)
_FIGURE = re.compile(
    rf"\b(mean|avg|std|min|max|norm|l2|l2_norm|sum|abs_?max|max_?abs|amax)\b[\"']?\s?[=:]?\s?"
    rf"(?:tensor)?\(?({NUMBER})(?!\w)",
    re.IGNORECASE,
)
_OF_FIGURE = re.compile(
    r"\b(?:mean|avg|std|min|max|norm|sum|amax)\b[\"']?\s?[=:]\s?$", re.IGNORECASE
)
FIGURES = frozenset(("mean", "std", "min", "max", "norm", "sum"))
_LARGEST = ("absmax", "abs_max", "maxabs", "max_abs", "amax")
ALIASES = {"avg": "mean", "l2": "norm", "l2_norm": "norm"} | dict.fromkeys(_LARGEST, "max")
_OTHER_FIGURES = re.compile(r"time|latency|\bms\b|sec|loss|throughput|memory|/s\b", re.IGNORECASE)
_NAME_CHARS = 200
_OF_RANK = re.compile(r"\[((?:global_|local_)?rank|gpu)[ :=]?(\d{1,6})\][ :]*", re.IGNORECASE)
_CLASS = re.compile(r"\s\([A-Z]\w{0,60}\)(?=\W*$)")
"""The class of a module behind its name."""


@dataclass(slots=True)
class Print:
    """A tensor that a text shows.

    numbers: as printed. shape: of the printed numbers. whole: of the tensor, (-1,) where the text
    omits elements and does not say how many. figures: statistics in place of numbers. why: it
    cannot be read. row: its line, from 1, where it has numbers.
    """

    name: str
    step: int = 0
    numbers: list[str] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    dtype: str = ""
    figures: dict[str, str] = field(default_factory=dict)
    why: str = ""
    row: int = 0

    def values(self, dtype: str = "") -> Values:
        """Returns its numbers in the shape and dtype that the text states. Raises ValueError where
        they are none.
        """
        if self.why:
            raise ValueError(self.why)
        values = Values.of(self.numbers, self.shape, Digits.of(self.numbers))
        return values.shaped(self.shape, dtype)


def prints(text: str) -> Iterator[Print]:
    """Returns every print of a text, in order. Linear in the length of the text."""
    step, start, place, row = 0, 0, 0, 1
    while True:
        match = _OPENS.search(text, place)
        opens = match.start() if match is not None else len(text)
        if match is None:
            shown, step = _figures(text[start:].split("\n"), step)
            yield from shown
            if text[start:].strip() and not text.endswith("\n"):
                yield Print("the end", step, why="the text ends within a line: it may be cut off")
            return
        before = text[max(start, opens - 2000) : opens]
        wrapper = _WRAPPER.search(before)
        block, end = _block(text, opens)
        is_figure = wrapper and not block.lengths and _OF_FIGURE.search(before[: wrapper.start()])
        if is_figure or not (wrapper or _is_tensor(block, before)):
            place = max(end, opens + 1)
            continue
        tail = _TAIL.match(text, end)
        ends = tail.end() if tail is not None else end
        if wrapper and ends == len(text) and text[-1] not in ")>\n":
            block.why = "its print breaks off"
        lines = text[start : opens - len(wrapper[0] if wrapper else "")].split("\n")
        shown, step = _figures(lines[:-1], step)
        yield from shown
        surroundings = f"{lines[-1]} {wrapper[0] if wrapper else ''} {text[end:ends]}"
        described, _ = _figures([lines[-1]], step)
        printed = _described(block, _name(lines), step, surroundings)
        printed.row = row + len(lines) - 1
        for figures in described:  # some elements, behind the statistics of all of them
            printed.name, printed.whole = f"{figures.name}.output.1", (-1,)
            figures.name = f"{figures.name}.output.0"
            yield figures
        yield printed
        place = max(ends, opens + 1)
        row += text.count("\n", start, place)
        start = place


@dataclass(slots=True)
class _Block:
    """Nested brackets with numbers. lengths: of the rows at each depth."""

    numbers: list[str] = field(default_factory=list)
    lengths: dict[int, set[int]] = field(default_factory=dict)
    is_part: bool = False
    why: str = ""


def _block(text: str, start: int) -> tuple[_Block, int]:
    """Returns (content of the brackets that open here, the position behind them)."""
    block, place = _Block(), start
    open_: list[int] = []
    while (match := _TOKEN.match(text, place)) is not None:
        place = match.end()
        bracket, dots, number = match.groups()
        if bracket == "[":
            open_.append(0)
        elif bracket:
            block.lengths.setdefault(len(open_) - 1, set()).add(open_.pop())
        elif number:
            block.numbers.append(number)
        block.is_part = block.is_part or bool(dots)
        if open_ and (number or bracket == "]"):
            open_[-1] += 1
        if not open_ and (number or bracket):
            return block, place
        if len(open_) > limits.RANK:
            break
    block.why = "its print breaks off" if place >= len(text) else "its print holds something else"
    return block, place


def _is_tensor(block: _Block, before: str) -> bool:
    """Whether brackets without a word around them are a print of numbers."""
    if block.why or not block.numbers or _NO_TENSOR.search(before[-40:]):
        return False
    return len(block.numbers) > 1 or any("." in number for number in block.numbers)


def _described(block: _Block, name: str, step: int, surroundings: str) -> Print:
    printed = Print(name, step, block.numbers, why=block.why)
    if dtype := _DTYPE.search(surroundings):
        printed.dtype = dtype[1].lower()
    if printed.why:
        return printed
    depths = [block.lengths[depth] for depth in sorted(block.lengths)]
    printed.shape = tuple(max(lengths) for lengths in depths)
    is_whole = limits.count(printed.shape) == len(block.numbers)
    if not is_whole or any(len(lengths) > 1 for lengths in depths):
        printed.why = "rows of its print have different lengths"
    shape = _SHAPE.search(surroundings)
    whole = tuple(int(n) for n in shape[1].split(",") if n.strip()) if shape else ()
    if block.is_part or limits.count(whole) > len(block.numbers):
        fits = len(whole) == len(printed.shape)
        printed.whole = whole if fits else (-1,)
    return printed


def _name(lines: list[str]) -> str:
    """Returns the text before a print in its line, else in the nearest of a few lines above that
    says more than a shape and a dtype.
    """
    for line in lines[:-5:-1]:
        if name := _cleaned(line):
            return name
    return "tensor"


def _cleaned(line: str) -> str:
    text = _DTYPE.sub(" ", _SHAPE.sub(" ", line.replace("torch.Size", "size")[-_NAME_CHARS:]))
    text = _OF_RANK.sub(r"\1\2.", _CLASS.sub(" ", text))
    while (rest := _LOG.sub("", text.lstrip())) != text:
        text = rest
    return " ".join(text.strip(" \t:=,|>-()[]{}'\"*#").split())


def _figures(lines: list[str], step: int) -> tuple[list[Print], int]:
    """Returns (the statistics of tensors in the lines between prints, the step after them)."""
    shown: list[Print] = []
    for line in lines:
        if match := _STEP.fullmatch(line.strip()):
            step = int(match[1])
        matches = list(_FIGURE.finditer(line)) if len(line) < 1000 else []
        figures = {ALIASES.get(m[1].lower(), m[1].lower()): m[2] for m in reversed(matches)}
        shape = _SHAPE.search(line)
        if len(figures) > 1 and (shape or not _OTHER_FIGURES.search(line)):
            before = line[: matches[0].start()]
            name = _cleaned(before.rpartition("{")[0] or before) or "tensor"
            whole = [int(n) for n in shape[1].split(",") if n.strip()] if shape else []
            extents = limits.extents(tuple(whole), "a line")
            shown.append(Print(name, step, shape=extents, figures=figures))
    return shown, step


def has_figures(text: str) -> bool:
    """Whether a line holds statistics of a tensor."""
    return bool(_figures(text.split("\n"), 0)[0])
