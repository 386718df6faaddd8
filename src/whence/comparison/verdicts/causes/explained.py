"""Adds explanations to the sentences of guilty verdicts: a tied parameter, one that was not loaded,
the positions that a mask shows, allowed TF32, or code of another
release.
"""

from __future__ import annotations

import ast
import difflib
import re
import socket
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from whence.align.environment import settings_of
from whence.comparison.inputs.differing_masks import differing_mask
from whence.comparison.paired_runs import PairedRuns
from whence.display import listed
from whence.frameworks.operator_names import base_name
from whence.judge.initialisation import unlike
from whence.records import Call, Record, Run
from whence.records.slots import is_param, param_name
from whence.replay.allowed_operators import CONTRACTIONS
from whence.results import GUILTY, CauseKind, Confidence, SlotPair, Verdict, VerdictKind

_MOST = 40  # verdicts that are explained: an answer names the most upstream few

Verdicts = dict[tuple[int, int], Verdict]


def explained(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, with the sentences of the first guilty ones explained."""
    guilty = [
        key
        for key, verdict in verdicts.items()
        if verdict.verdict in GUILTY
        and verdict.confidence in (Confidence.LIKELY, Confidence.CERTAIN)
    ]
    guilty.sort(key=lambda key: paired.calls[key[0]].order)
    out, origins, code = dict(verdicts), ParameterOrigins(paired), ChangedCode(paired)
    precision = AllowedTF32(paired)
    for key in guilty[:_MOST]:
        verdict = verdicts[key]
        if verdict.verdict == VerdictKind.PARAM_DIFF:
            words = origins.words(verdict)
        else:
            words = mask_cause(verdict, paired)
        words = words or precision.words(verdict)
        if verdict.cause in (CauseKind.SEMANTIC, CauseKind.STRUCTURAL, CauseKind.UNKNOWN):
            words = "; ".join(filter(None, (words, code.words(verdict))))
        if words:
            out[key] = verdict.replace(sentence=f"{verdict.sentence}; {words}")
    return out


# Says which positions the target's attention mask exposes that the reference's mask hides.

# An argument of an attention operator, as it appears in the sentence of a verdict.
_CAUSAL = re.compile(r"is_causal is (True|False) in the reference, (True|False) in the target")


def mask_cause(verdict: Verdict, paired: PairedRuns) -> str:
    """How the target's mask differs, in words; "" if the verdict is not about a mask."""
    if (said := _CAUSAL.search(verdict.sentence)) is not None:
        return (
            "the target lets each position see later ones"
            if said[1] == "True"
            else "the target hides later positions"
        )
    slot = _slot(verdict, paired)
    return differing_mask(slot.reference_slot, paired.arrays(slot)) if slot is not None else ""


def _slot(verdict: Verdict, paired: PairedRuns) -> SlotPair | None:
    """The pair of tensors in a verdict's slot, also if that names an input without its kind."""
    index = verdict.pair
    return paired.slot(index, verdict.slot) or paired.slot(index, f"input.{verdict.slot}")


# Names the setting that allows TF32 if a GPU kernel is further off than float32 rounding.


class AllowedTF32:
    """Looks up whether the target's settings allow TF32."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired, self._settings = paired, settings_of(paired.target)

    def words(self, verdict: Verdict) -> str:
        """A sentence about the setting that may explain a verdict on a kernel, "" if none may."""
        call = self._paired.pair(verdict.pair).call
        settings = self._settings.get(call.root, {})
        program = self._paired.reference.programs.get(call.program)
        if (
            verdict.cause != CauseKind.KERNEL
            or program is None
            or "cuda" not in str(settings.get("devices", ""))
        ):
            return ""
        bases = {base_name(operation.name) for operation in program.operations}
        if settings.get("cudnn_tf32") and any("conv" in base for base in bases):
            setting = "torch.backends.cudnn.allow_tf32"
        elif bases & CONTRACTIONS and settings.get("matmul_precision", "highest") != "highest":
            setting = "torch.set_float32_matmul_precision"
        else:
            return ""
        return (
            f"the target allows TF32 ({setting}), which keeps 10 bits of what is multiplied: "
            "switch it off, or declare it (whence compare --policy)"
        )


# Possible origins of a differing parameter: it is tied on one side only, it is another parameter of
# the reference, or it was never loaded.

_PLAIN = re.compile("elements differ|all zero")
"""Matches sentences about a difference that no order, scale or rounding explains."""


class _Held(NamedTuple):
    """A pair of parameters, by its full name in the reference."""

    name: str
    reference: Record
    target: Record


class ParameterOrigins:
    """Explains the parameters of guilty verdicts; each is examined once."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._held: list[_Held] | None = None
        self._words: dict[tuple[int, int], str] = {}

    def words(self, verdict: Verdict) -> str:
        """An explanation of the verdict's parameter, "" if there is none."""
        slot = self._paired.slots[verdict.pair].get(verdict.slot)
        if slot is None or not is_param(verdict.slot):
            return ""
        key = slot.reference_record, slot.target_record
        if key not in self._words:
            call = self._paired.pair(verdict.pair).call
            name, is_plain = _full(call.scope, verdict.slot), bool(_PLAIN.search(verdict.sentence))
            self._words[key] = self._explain(name, slot, is_plain)
        return self._words[key]

    def _explain(self, name: str, slot: SlotPair, is_plain: bool) -> str:
        reference, target = self._paired.records(slot)
        others = [held for held in self._parameters() if held.name != name]
        tied = self._tied(reference, target, others)
        clauses = [tied or self._elsewhere(reference, target, others)]
        if is_plain and not any(clauses):
            arrays = self._paired.arrays_of_one_shape(slot)
            if arrays is not None:
                clauses.append(unlike(*arrays))
        return "; ".join(filter(None, clauses))

    def _tied(self, reference: Record, target: Record, others: list[_Held]) -> str:
        """A clause if only one side holds the same elements in two parameters; else "".

        More than two parameters do not count, since layers may be initialised alike.
        """
        equal: dict[str, list[tuple[str, bool]]] = {"reference": [], "target": []}
        for other in others:
            in_reference = _hold_the_same(reference, other.reference)
            in_target = _hold_the_same(target, other.target)
            if in_reference and not in_target:
                equal["reference"].append((other.name, reference.id == other.reference.id))
            if in_target and not in_reference:
                equal["target"].append((other.name, target.id == other.target.id))
        for side, counterpart in (("reference", "target"), ("target", "reference")):
            for name, is_one_tensor in equal[side]:
                if is_one_tensor:
                    return f"the {side} ties it to {name} (one tensor), the {counterpart} does not"
            if len(equal[side]) == 1:
                name = equal[side][0][0]
                return f"the {side} holds the same elements as {name}, the {counterpart} does not"
        return ""

    @staticmethod
    def _elsewhere(reference: Record, target: Record, others: list[_Held]) -> str:
        """A clause if the target's parameter equals another parameter of the reference; else ""."""
        for other in others:
            if _hold_the_same(target, other.reference) and not _hold_the_same(
                reference, other.reference
            ):
                return f"it is what the reference has as {other.name}"
        return ""

    def _parameters(self) -> list[_Held]:
        if self._held is None:
            self._held = list(self._all())
        return self._held

    def _all(self) -> Iterator[_Held]:
        paired = self._paired
        visited: set[tuple[int, int, str]] = set()
        for pair in paired.plan.pairs:
            scope = paired.calls[pair.reference].scope
            for slot in pair.slots:
                if not is_param(slot.reference_slot):
                    continue
                key = slot.reference_record, slot.target_record, scope
                if key not in visited:
                    visited.add(key)
                    yield _Held(_full(scope, slot.reference_slot), *paired.records(slot))


def _full(scope: str, slot: str) -> str:
    return ".".join(filter(None, (scope, param_name(slot))))


def _hold_the_same(first: Record, second: Record) -> bool:
    """Whether two parameters hold the same elements. Only matrices that are not constant count,
    since parameters of norms are equal from the start.
    """
    if first.shape != second.shape or len(first.shape) < 2 or first.dtype != second.dtype:
        return False
    statistics = first.statistics
    if statistics is None or statistics.min == statistics.max:
        return False
    return first.id == second.id or bool(first.hash and first.hash == second.hash)


# The lines in which the code of a module differs between the runs, where both files are on this
# machine: two installed releases of a library, two worktrees.
#
# A path comes from a run, which nobody vouches for: only Python files are read, nothing of them
# is run, and two lines are shown.

_PLACE = re.compile(r"(?P<file>.+\.py):(?P<line>\d{1,7})")
_LARGEST = 4_000_000  # bytes of a file of code
_WIDEST = 100  # characters of a line
_SHOWN = 2
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")


class _Function(NamedTuple):
    """A function of a file: its lines, without its docstring, and the number of the first."""

    file: Path
    first: int
    name: str
    lines: tuple[str, ...]


class ChangedCode:
    """Compares the functions that guilty calls of the two runs come from."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        runs = (paired.reference, paired.target)
        self._here = all(r.info.host in ("", socket.gethostname()) for r in runs)

    def words(self, verdict: Verdict) -> str:
        """Which lines differ, in words; "" where the code is one file, or is not here."""
        if not self._here or verdict.side == "reference":
            return ""
        pair = self._paired.plan.pairs[verdict.pair]
        paired = self._paired
        stated = _place(verdict.source, paired.target)
        places = [stated] if stated else _places(paired.target, paired.target.calls[pair.target])
        references = list(_places(paired.reference, paired.calls[pair.reference]))
        for target in places:
            for place in references:
                if place[0] != target[0] and _within(place[0]) == _within(target[0]):
                    own = _function_of(*target)
                    if own is not None and (words := _differing(place, own)):
                        return words
        return ""


def _places(run: Run, call: Call) -> Iterator[tuple[Path, int]]:
    """Where the code of a call, and of the call around it, calls what it calls."""
    parent = run.calls[call.parent] if call.parent >= 0 else None
    for owner in filter(None, (call, parent)):
        program = run.programs.get(owner.program)
        if program is not None:
            for line in dict.fromkeys((*program.lines, *program.call_lines)):
                if (place := _place(line, run)) is not None:
                    yield place
    if (place := _place(call.source, run)) is not None:
        yield place


def _place(source: str, run: Run) -> tuple[Path, int] | None:
    match = _PLACE.fullmatch(source)
    if match is None:
        return None
    return (Path(run.info.cwd) / match["file"]), int(match["line"])


def _within(path: Path) -> str:
    """A path below the folder that packages are installed in; of any other file its name."""
    text = path.as_posix()
    installed = _INSTALLED.match(text)
    return text[installed.end() :] if installed else path.name


def _function_of(file: Path, line: int) -> _Function | None:
    """The function around a line."""
    try:
        status = file.stat()
        if file.suffix != ".py" or status.st_size > _LARGEST:
            return None
    except (OSError, ValueError):
        return None
    tree = _tree(file, status.st_mtime_ns)
    if tree is None:
        return None
    text, parsed = tree
    around = [
        node
        for node in ast.walk(parsed)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return None
    node = max(around, key=lambda node: node.lineno)
    lines = list(text[node.lineno - 1 : node.end_lineno])
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        for at in range(first.lineno, (first.end_lineno or first.lineno) + 1):
            lines[at - node.lineno] = ""
    return _Function(file, node.lineno, node.name, tuple(lines))


@lru_cache(maxsize=16)
def _tree(file: Path, changed: int) -> tuple[tuple[str, ...], ast.Module] | None:
    """The lines of a file and what they are. changed: when it was last written."""
    try:
        text = file.read_text(encoding="utf-8")
        return tuple(text.splitlines()), ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def _differing(place: tuple[Path, int], target: _Function) -> str:
    """What differs between the function at a place of the reference and its namesake of the
    target.
    """
    reference = _function_of(*place)
    if reference is None or reference.name != target.name:
        return ""
    left, right = ([line.strip() for line in f.lines] for f in (reference, target))
    changes = [
        opcode
        for opcode in difflib.SequenceMatcher(a=left, b=right, autojunk=False).get_opcodes()
        if opcode[0] != "equal"
    ]
    shown = []
    for _, a0, a1, b0, b1 in changes:
        old, new = (
            [line for line in lines if line and not line.startswith("#")]
            for lines in (left[a0:a1], right[b0:b1])
        )
        if old or new:
            shown.append(f"line {target.first + b0}: {_code(new)}, in the reference {_code(old)}")
    if not shown:
        return ""
    versions = _releases(reference.file, target.file)
    where = f"{_within(target.file)}{versions}"
    return f"the code differs in {where}, {listed(shown, _SHOWN, '; ')}"


def _code(lines: Sequence[str]) -> str:
    if not lines:
        return "nothing"
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ..."
    return f"`{text[:_WIDEST]}`"


def _releases(reference: Path, target: Path) -> str:
    """ " (library 1.2 against 1.3)" for files of an installed package."""
    names = [_release(path) for path in (reference, target)]
    if not all(names) or names[0] == names[1]:
        return ""
    package = _within(target).partition("/")[0]
    return f" ({package} {names[0]} against {names[1]})"


def _release(path: Path) -> str:
    installed = _INSTALLED.match(path.as_posix())
    if installed is None:
        return ""
    package = _within(path).partition("/")[0].removesuffix(".py")
    for info in sorted(Path(installed[0]).glob(f"{package}-*.dist-info")):
        return info.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""
