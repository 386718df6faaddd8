"""Writes the script of a finding and runs it on both sides.

A script runs in an interpreter of its own, which may load modules before the script exists.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whence import align, disk, dtypes, extras, judge
from whence.comparison.replays.program_difference import differing_arguments, differing_sizes
from whence.comparison.replays.self_check import Threads
from whence.display import listed
from whence.errors import ElementsMissing, OutputExists, ReplayRefused, UsageError
from whence.records import Call, Run
from whence.records.marks import was_compiled
from whence.records.slots import is_of_child, split_child
from whence.regular_files import is_regular
from whence.results import Comparison, Finding, Reproduction, VerdictKind
from whence.workflows.repro.operator_calls import gathered_program, tensor_number
from whence.workflows.repro.reference_operators import ReferenceTrace, reference_trace
from whence.workflows.repro.subject import NothingToRun, Subject, open_subject
from whence.workflows.saved import AnyComparison, AnyPath, as_comparison, storing

if TYPE_CHECKING:
    from torch.nn import Module

    from whence.replay.export.script import Case
    from whence.replay.export.trace import Piece, Trace
    from whence.replay.export.ways import Way
    from whence.replay.flatten import Flat

_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp")


def repro(
    comparison: AnyComparison,
    output: AnyPath,
    *,
    finding: int = 1,
    force: bool = False,
    run: bool = True,
    model: str | Module | Callable[[], Module] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Reproduction:
    """Write `repro.py` and `repro.safetensors` into `output`: one script that shows a finding of a
    comparison, and a pytest test.

    comparison: a folder that `compare` wrote, or what it returned; the runs must still be
    where they were. finding: its number, from 1. run: run the script both ways afterwards. model:
    as `compare` takes it, where no program of the reference is usable. tell: called with what is
    done next. Raises UsageError when there is no such finding, ReplayRefused with the reason when
    it cannot be run again, OutputExists, UnreadableRun, StoreFailed.
    """
    began = time.monotonic()
    compared = as_comparison(comparison)
    named = f"{compared.reference} against {compared.target}"
    if not isinstance(comparison, Comparison):
        named = os.fspath(comparison)
    chosen = _finding(compared, finding, named)
    folder = Path(output)
    _check(folder, force)
    extras.needed("torch", "a repro, which runs operators of torch,")
    both_ways: _BothWays | None = None
    try:
        tell("reading the runs")
        subject = open_subject(compared, chosen, model)
        if run:
            both_ways = _BothWays(_COMPILER if was_compiled(subject.target_call) else ())
        case, how, notes = choose_case(subject, tell)
        describe(case, subject, finding, named, how)
        path = _written(case, folder)
        printed: dict[str, str] = {}
        holds, sentence = None, "not run"
        if both_ways is not None:
            tell("running the script both ways")
            printed, holds, sentence = both_ways.outcome(path, case.default, case.missing)
    except (ReplayRefused, ElementsMissing) as error:
        if isinstance(error, NothingToRun):
            raise ReplayRefused(
                f"finding {finding} ({chosen.name}) cannot be run again: {error}"
            ) from error
        model_hint = ";\n  or the reference's model: whence repro --model MODULE:FACTORY"
        raise ReplayRefused(
            f"finding {finding} ({chosen.name}) cannot be run again: {error}\n"
            "  what it takes: a reference captured with its programs and elements (whence run, "
            f"--keep full, not --no-programs){'' if model is not None else model_hint}"
        ) from error
    finally:
        if both_ways is not None:
            both_ways.leave()
    return Reproduction(
        str(path),
        chosen.name,
        tuple(s.title for s in executed_piece(case).steps),
        how,
        case.default,
        holds,
        sentence,
        printed,
        tuple(notes),
        time.monotonic() - began,
    )


def _finding(compared: Comparison, number: int, named: str) -> Finding:
    """The finding with this number. Raises UsageError."""
    if not compared.findings:
        raise UsageError(
            f"{named} names no operator at fault (status {compared.status}): there is nothing to "
            "reproduce"
        )
    if not 1 <= number <= len(compared.findings):
        raise UsageError(
            f"{named} has findings 1 to {len(compared.findings)}; there is no finding {number}"
        )
    return compared.findings[number - 1]


def _written(case: Case, folder: Path) -> Path:
    """Write the script and its tensors; returns the script's path."""
    from whence.replay.export.script import FILES, script
    from whence.replay.export.script_data import save

    text, tensors = script(case)
    with storing(f"write the script to {folder}"):
        disk.make_folders(folder)
        # write the script last, because it reads the tensors
        disk.write_together(folder, {FILES[1]: save(tensors), FILES[0]: text})
    return folder / FILES[0]


def _check(folder: Path, force: bool) -> None:
    """Raise OutputExists when the script cannot be written; only an earlier script is replaced."""
    if folder.is_file():
        raise OutputExists(f"cannot write a script into {folder}: it is a file; choose another -o")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise OutputExists(
            f"{folder} already holds files; --force writes into it, or choose another -o"
        )
    strange = next((file for file in _of_others(folder)), None)
    if strange is not None:
        raise OutputExists(
            f"{strange} is not of a script that whence wrote, and --force replaces nothing else; "
            "choose another -o"
        )


def _of_others(folder: Path) -> Iterator[Path]:
    """Files that whence did not write, at the paths of the script and its tensors."""
    from whence.replay.export.script import FILES, LIMITS

    script, tensors = (folder / name for name in FILES)
    is_ours = is_regular(script) and LIMITS.encode() in script.read_bytes()
    if os.path.lexists(script) and not is_ours:
        yield script
    if os.path.lexists(tensors) and not (is_ours and is_regular(tensors)):
        yield tensors


_LIMIT_S = 300.0  # one run of the script
_LAST_LINES = 5
# Reads the script and its arguments as lines, once the modules are loaded: what follows is as
# `python SCRIPT ARGUMENTS`.
_WAIT = """
import importlib, runpy, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
path, *arguments = sys.stdin.readline().rstrip("\\n").split("\\t")
sys.argv = [path, *arguments]
runpy.run_path(path, run_name="__main__")
"""


class _Waiting:
    """An interpreter that loads `modules` now and runs a script later. End it with `run` or
    `leave`.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WAIT, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def run(self, path: Path, side: str) -> tuple[bool | None, str]:
        """(whether `path --side SIDE` passed, its output); None when it neither passed
        nor failed.
        """
        try:
            printed, errors = self._process.communicate(
                f"{path.absolute()}\t--side\t{side}\n", timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            self.leave()
            return None, f"still running after {_LIMIT_S:.0f} s"
        lines = [line for line in printed.splitlines() if line.strip()]
        if (
            self._process.returncode in (0, 1)
            and lines
            and re.fullmatch(r"(PASS|FAIL) \(\w+\)", lines[-1])
        ):
            return lines[-1].startswith("PASS"), "\n".join(lines[:-1])
        return None, "\n".join(errors.splitlines()[-_LAST_LINES:])

    def leave(self) -> None:
        """End the interpreter, whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class _BothWays:
    """Runs a script for the reference's and for the target's side.

    heavy: modules that the target's side needs; they are loaded while the script is written.
    """

    def __init__(self, heavy: Sequence[str]) -> None:
        self._waiting = {"reference": _Waiting("torch"), "target": _Waiting("torch", *heavy)}

    def leave(self) -> None:
        """End both interpreters, whatever they are doing."""
        for interpreter in self._waiting.values():
            interpreter.leave()

    def outcome(self, path: Path, default: str, missing: str) -> tuple[dict[str, str], bool, str]:
        """(output of each side, whether the reproduction holds, that in words)."""
        if default == "recorded":
            self._waiting["recorded"] = _Waiting("torch")
            if missing:
                self._waiting.pop("target").leave()
        with ThreadPoolExecutor(len(self._waiting)) as pool:
            results = pool.map(lambda item: item[1].run(path, item[0]), self._waiting.items())
            ended = dict(zip(self._waiting, results))
        words = {
            side: "fails" if passes is False else "passes" if passes else "could not be run"
            for side, (passes, _) in ended.items()
        }
        if default == "recorded":
            rerun = missing or f"run on this machine as the target was it {words['target']}"
            sentence = f"what was recorded {words['recorded']}; {rerun}"
        else:
            sentence = f"{words['target']} as the target runs it"
        holds = ended[default][0] is False and ended["reference"][0] is True
        printed = {side: text for side, (_, text) in ended.items()}
        return printed, holds, f"{sentence}; {words['reference']} as the reference does"


# Chooses what the script of a finding shows: operators, their tensors, and how they are run.
#
# How the runs of a finding executed their operators, and whether this machine can do so.
#
# Runs the target's own operators of a finding, as its program has them.

_SHOWN = 6
"""Most operators of each side that are listed."""


class ChosenCase(NamedTuple):
    """The contents of the script, how the fault shows (`Reproduction.how`), and remarks."""

    case: Case
    how: str
    notes: list[str]


class _Ways(NamedTuple):
    """How each side runs its operators; the reference's operators run eagerly on the CPU."""

    target: Way
    reference: Way


def choose_case(subject: Subject, tell: Callable[[str], None]) -> ChosenCase:
    """The smallest case that shows the finding. Raises ReplayRefused, ElementsMissing."""
    notes: list[str] = []
    tell("running the reference's operators on the target's inputs")
    with Threads(1):
        good = reference_trace(subject)
    call, swapped = subject.target_call, subject.is_of_reference
    target_way = way_of(subject.paired.target, call, notes)
    reference_way = way_of(subject.paired.reference, subject.reference_call, notes)
    ways = _Ways(target_way, replace(reference_way, backend="", device="cpu"))
    compiled = was_compiled(call) and not swapped
    if not compiled and not swapped:
        bad = _target_trace(subject, good)
        if bad is not None and bad.reproduces:
            return _semantic(subject, good, bad, ways, notes)
    missing = _why_not_here(target_way, compiled)
    if compiled and not missing and any(step.is_own for step in good.trace.steps):
        missing = "a script compiles neither backward passes nor steps of optimisers"
    if missing:
        notes.append(f"{missing}: only what was recorded shows the fault")
    elif not swapped:
        if not compiled and not call.program:
            notes.append(
                "the target's own operators are not known "
                f"({call.no_program or 'no program'}); the reference's are run"
            )
        tell("looking for the operator")
        case = _kernel(good, ways, notes)
        if case is not None:
            return ChosenCase(case, "compiled" if compiled else "kernel", notes)
        notes.append(
            "run here as the target was, nothing is wrong: only what was recorded shows the fault"
        )
    return ChosenCase(_recorded(good, ways, missing), "recorded", notes)


def _semantic(
    subject: Subject, good: ReferenceTrace, bad: TargetTrace, ways: _Ways, notes: list[str]
) -> ChosenCase:
    """The operators of both sides, when they differ."""
    from whence.replay.export.isolate import parting
    from whence.replay.export.script import Case

    reference, target, equal = parting(
        good.trace, bad.trace, good.results, bad.results, _is_bitwise_equal
    )
    differs = differing(reference, target)
    # The fault is in the operators and arguments, not in the device, so any device shows it.
    way = replace(ways.target, backend="", device="cpu")
    case = Case(reference, target, way, ways.reference, equal=equal, differs=differs[0])
    is_parameter = subject.finding.verdict == VerdictKind.PARAM_DIFF
    return ChosenCase(case, "parameter" if is_parameter else "semantic", [*notes, *differs])


def _is_bitwise_equal(a: Any, b: Any) -> bool:
    import torch

    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(first, second))


def _kernel(good: ReferenceTrace, ways: _Ways, notes: list[str]) -> Case | None:
    """The fewest operators that give a wrong result when they run as in the target; None when all
    are right.
    """
    from whence.replay.export.isolate import Drill
    from whence.replay.export.script import Case
    from whence.replay.export.trace import piece

    threads = ways.target.settings.get("threads")
    with Threads(threads if isinstance(threads, int) else 1):
        drill = Drill(good.trace, good.results, ways.target)
        smallest = drill.smallest()
    if drill.failed_to_run:
        notes.append(f"{drill.failed_to_run} of {drill.tried} pieces could not be run alone")
    if smallest is None:
        return None
    count = len(good.trace.steps)
    is_all = (smallest.begin, smallest.end) == (0, count)
    operators = piece(good.trace, smallest.begin, smallest.end, good.results if is_all else ())
    recorded = {
        operators.results.index(n): t for n, t in good.recorded.items() if n in operators.results
    }
    notes.append(f"operator {smallest.end} of {count}: wrong {smallest.words}")
    return Case(operators, None, *ways, recorded=recorded)


def _recorded(good: ReferenceTrace, ways: _Ways, missing: str) -> Case:
    """All operators, judged by the results that the target recorded."""
    from whence.replay.export.script import Case
    from whence.replay.export.trace import piece

    whole = piece(good.trace, 0, len(good.trace.steps), good.results)
    recorded = {list(whole.results).index(n): t for n, t in good.recorded.items()}
    # a custom compiler, which the script cannot name
    foreign = ways.target.backend and missing and ways.target.device == "cpu"
    return Case(
        whole,
        None,
        ways.reference if foreign else ways.target,
        ways.reference,
        recorded=recorded,
        default="recorded",
        missing=missing,
    )


# ---- words


def describe(case: Case, subject: Subject, number: int, comparison: str, how: str) -> None:
    """Fill the case's title and story."""
    f, reference, target = subject.finding, subject.paired.reference, subject.paired.target
    names = [
        s.title.removeprefix("aten.").removesuffix(".default") for s in executed_piece(case).steps
    ]
    operators = listed(names, 4) or "nothing"
    where = f"{f.name} ({f.op_type})" if f.op_type and f.op_type != f.name else f.name
    verb = {
        "compiled": "is wrong as the target compiled it",
        "kernel": "is wrong as the target runs it",
        "semantic": "is not what the reference runs",
        "parameter": "has other parameters than the reference",
        "recorded": "is not what the target recorded",
    }[how]
    place = f"{f.root or subject.reference_call.root}, {where}, step {f.step}, rank {f.rank}"
    facts = {
        "found by": f"whence compare {reference.path} {target.path}, finding {number} "
        f"of {comparison}",
        "where": place + (f", {f.source}" if f.source else ""),
        "target": _run_conditions(target, subject.target_call, case.way),
        "reference": _run_conditions(reference, subject.reference_call, case.reference),
    }
    case.title = f"{where}: {operators} {verb}."
    case.story = [f.sentence, *(f"{name:<11}{text}" for name, text in facts.items() if text)]


def executed_piece(case: Case) -> Piece:
    """The operators at fault: the target's own if the case has them, else the reference's."""
    return case.bad if case.bad is not None and case.bad.steps else case.good


def differing(reference: Piece, target: Piece) -> list[str]:
    """Describe the differences between the operators of both sides."""
    if [s.name for s in reference.steps] == [s.name for s in target.steps]:
        arguments = []
        for step, its_partner in zip(reference.steps, target.steps):
            clauses = differing_arguments(step, its_partner) or differing_sizes(step, its_partner)
            arguments += [f"{its_partner.title}: {clause}" for clause in clauses]
        return arguments or ["the same operators with the same arguments, on other tensors"]
    a, b = ([s.title for s in p.steps] for p in (reference, target))
    are_whole = reference.differentiated and target.differentiated
    if are_whole or a[:_SHOWN] == b[:_SHOWN]:
        a, b = _without_common_ends(a, b)
    words = [", ".join(titles[:_SHOWN]) or "nothing" for titles in (a, b)]
    return [f"the reference runs {words[0]}; the target {words[1]}"]


def _without_common_ends(a: list[str], b: list[str]) -> tuple[list[str], list[str]]:
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return a, b


def way_of(run: Run, call: Call, notes: list[str]) -> Way:
    """How a run executed a call; what cannot be reproduced is added to `notes`."""
    from whence.replay.export.ways import Way, known_config

    settings = align.settings_of(run).get(call.root, {})
    results = (*call.slots("output"), *call.slots("mutated"))
    device = next((run.records[r.record].device for r in results), "cpu") or "cpu"
    if not re.fullmatch(r"[a-z]{1,20}(:\d{1,3})?", device):
        device = "cpu"
    if not was_compiled(call):
        return Way(device=device, settings=settings)
    compiled = _compile_settings(run, call)
    if compiled is None:
        notes.append(
            "the run does not say how it was compiled (an older capture): the defaults of "
            "torch.compile are used"
        )
        compiled = {"backend": "inductor"}
    inductor, unknown = known_config(
        "torch._inductor.config",
        {**_settings_table(compiled, "inductor"), **_settings_table(compiled, "options")},
    )
    dynamo, unknown_dynamo = known_config(
        "torch._dynamo.config", _settings_table(compiled, "dynamo")
    )
    if unknown or unknown_dynamo:
        notes.append(
            "settings of the compiler that were not copied: "
            f"{', '.join(sorted((*unknown, *unknown_dynamo))[:10])}"
        )
    dynamic = compiled.get("dynamic")
    return Way(
        str(compiled.get("backend", "inductor")),
        inductor,
        dynamo,
        dynamic if isinstance(dynamic, bool) else None,
        device,
        settings,
    )


def _why_not_here(way: Way, compiled: bool) -> str:
    """Why this machine cannot run operators in that way, "" when it can."""
    import torch

    from whence.replay.export.ways import is_backend

    if compiled and not is_backend(way.backend):
        return (
            f"the target was compiled by {way.backend!r}, which is not a backend of torch.compile "
            "here"
        )
    try:
        torch.empty(1, device=way.device)
    except Exception:  # noqa: BLE001 - torch raises anything for a device that is not there
        return f"the target ran on {way.device}, which this machine has not"
    return ""


def _run_conditions(run: Run, call: Call, way: Way) -> str:
    """Describe the versions, device and settings of a call."""
    settings = align.settings_of(run).get(call.root, {})
    info = run.info
    parts = [f"torch {settings['torch']}"] if "torch" in settings else []
    parts += [
        f"{k} {settings[k]}"
        for k in ("cpu_capability", "threads", "matmul_precision", "attention")
        if k in settings
    ]
    device = next((run.records[r.record].device for r in call.slots("output")), "")
    parts += [f"device {device}"] if device else []
    parts += ["training"] if call.training else []
    parts += ["oneDNN off"] if settings.get("mkldnn") is False else []
    parts += [f"autocast {settings['autocast']}"] if settings.get("autocast") else []
    parts += [f"compiled by {way.backend}"] if way.backend else []
    parts += [f"seed {info.seed}"] if info.seed is not None else []
    return ", ".join(parts)


def _compile_settings(run: Run, call: Call) -> dict[str, Any] | None:
    """The compile settings of a call, from the nearest enclosing or inner call with such a note."""
    by_distance: list[tuple[int, dict[str, Any]]] = []
    for scope, settings in align.told(run, "compiled"):
        if settings.get("root", call.root) != call.root:
            continue
        around = scope in ("", call.scope) or call.scope.startswith(f"{scope}.")
        within = not call.scope or scope.startswith(f"{call.scope}.")
        if around or within:
            by_distance.append((-len(scope) if around else len(scope), settings))
    return min(by_distance, key=lambda item: item[0])[1] if by_distance else None


def _settings_table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = settings.get(name)
    return {k: v for k, v in table.items() if isinstance(k, str)} if isinstance(table, dict) else {}


@dataclass(frozen=True)
class TargetTrace:
    """What the target's operators computed.

    results: numbers of the judged tensors. reproduces: whether the trace matches the target's
    recording up to rounding.
    """

    trace: Trace
    results: Sequence[int]
    reproduces: bool


def _target_trace(subject: Subject, reference: ReferenceTrace) -> TargetTrace | None:
    """The trace; None when the target has no program that can be run for these outputs."""
    try:
        return _trace(subject, reference)
    except (ReplayRefused, ElementsMissing, KeyError, ValueError):
        return None


def _trace(subject: Subject, reference: ReferenceTrace) -> TargetTrace | None:
    from whence.replay.export.trace import Trace

    source, call = subject.target_source, subject.target_call
    gathered = gathered_program(source, call, source.program)
    loaded = _loaded(subject, gathered)
    program = loaded.program
    outputs = [_target_slot(subject, slot) for slot in reference.slots]
    outputs = [s for s in outputs if s in dict(program.outputs)]
    if len(outputs) != len(reference.results):
        return None
    slots = (*program.inputs, *program.params)
    if gathered is not None:
        records = {}
        for slot in slots:
            number, own_slot = gathered.origins[slot]
            if (record := source.record(source.run.calls[number], own_slot)) is not None:
                records[slot] = record
    else:
        records = source.records(call, slots)
    arrays, strides = source.arrays(records)
    recorded, _ = source.arrays(source.records(call, outputs))
    if not recorded:
        return None
    trace = Trace(copies=loaded.writes)
    with Threads(1):
        working = loaded.run(arrays, arrays, strides=strides, outputs=outputs, watch=trace)
        roundoffs = [judge.unit_roundoff(dtypes.of(a).name) or 1.0 for a in recorded.values()]
        wide = "float64" if min(roundoffs) < 1e-5 else "float32"
        exact = loaded.run(arrays, arrays, working=wide, strides=strides, outputs=outputs)
    scores = (
        judge.local(array, exact[s], working[s]).score
        for s, array in recorded.items()
        if exact[s].shape == array.shape
    )
    reproduces = max(scores, default=float("inf")) <= 1
    numbers = [n for s in outputs if (n := tensor_number(trace, program, s)) is not None]
    return TargetTrace(trace, numbers, reproduces) if len(numbers) == len(outputs) else None


def _loaded(subject: Subject, gathered: Flat | None) -> Any:
    from whence.replay.validation import load

    source = subject.target_source
    if gathered is None:
        return source.load(subject.target_call)
    constants = [source.run.array(c) for c in gathered.program.constants]
    return load(gathered.program, constants, allow=source.allow)


def _target_slot(subject: Subject, slot: str) -> str:
    """The target's name of an output of the reference's program; "" when it has none."""
    paired = subject.paired
    pair = paired.slot(subject.pair, slot)
    if pair is None:
        return ""
    if not is_of_child(slot):
        return pair.target_slot
    child = subject.reference_source.children(subject.reference_call.id)[split_child(slot)[0]]
    partner = paired.plan.pairs[paired.pair_of[child]].target
    children = subject.target_source.children(subject.target_call.id)
    return f"{children.index(partner)}:{pair.target_slot}" if partner in children else ""
