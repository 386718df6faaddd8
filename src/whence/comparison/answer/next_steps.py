"""Which experiments take an answer further: commands, chosen for this answer, that can be typed as
they stand.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from whence.records import Call, Run
from whence.records.marks import hidden_inside
from whence.records.slots import is_input
from whence.results import (
    Comparison,
    Evidence,
    Finding,
    NextStep,
    Status,
    VerdictKind,
)

MOST = 3
_SIDES = ("reference", "target")
_FULL = ("--keep", "full")
_OPERATORS = ("--level", "op")


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer and the two runs that it is about, as they were read."""

    result: Comparison
    reference: Run
    target: Run

    @property
    def first(self) -> Finding | None:
        return next(iter(self.result.findings), None)

    @property
    def runs(self) -> tuple[Run, Run]:
        return self.reference, self.target

    def calls_of(self, pair: int) -> tuple[Call, Call] | None:
        """The calls of a pair, where they are calls of the runs as they were read.

        Alignment may have cut or joined calls, so that the pair is of others.
        """
        pairs = self.result.plan.pairs
        if not 0 <= pair < len(pairs):
            return None
        reference, target = pairs[pair].reference, pairs[pair].target
        if reference >= len(self.reference.calls) or target >= len(self.target.calls):
            return None
        return self.reference.calls[reference], self.target.calls[target]


Rule = Callable[[_Answer], Iterator[NextStep]]


def next_steps(result: Comparison, reference: Run, target: Run) -> tuple[NextStep, ...]:
    """At most three experiments, the most telling first; none after an answer `same`."""
    if result.status == Status.SAME:
        return ()
    answer = _Answer(result, reference, target)
    rules = _AFTER_A_FAULT if result.findings else _TO_DECIDE
    steps: dict[str, NextStep] = {}
    for rule in rules:
        for step in rule(answer):
            steps.setdefault(step.command, step)
    return tuple(steps.values())[:MOST]


# ---- after a fault


def _reproduce(answer: _Answer) -> Iterator[NextStep]:
    first = answer.first
    if first is None or first.evidence != Evidence.REPLAY or not _can_run_again(answer):
        return
    yield NextStep(
        "whence repro -o repro",
        f"one script that runs {_name(first.name)} ({first.op_type}) alone: fails as the target "
        "ran it, passes as the reference did",
        takes_comparison=True,
    )


def _can_run_again(answer: _Answer) -> bool:
    return bool(answer.reference.programs)


def _look_at_parameter(answer: _Answer) -> Iterator[NextStep]:
    first = answer.first
    if first is None or first.verdict != VerdictKind.PARAM_DIFF or not first.slot:
        return
    for side, run in zip(_SIDES, answer.runs, strict=True):
        command = ["whence", "show", run.path, f"{first.name}:{first.slot}"]
        yield NextStep(shlex.join(command), f"the parameter as the {side} has it")


def _see_elements(answer: _Answer) -> Iterator[NextStep]:
    if answer.result.evidence == Evidence.STATISTICS:
        yield from _keep_elements(answer)


def _open_compiled(answer: _Answer) -> Iterator[NextStep]:
    """Of a compiled target: which kernel, and which stage of the compiler, is at fault."""
    if not _is_compiled(answer):
        return
    graph = f"{answer.target.path.rstrip('/')}-graph"
    capture = _with_command(
        answer.target, ("whence", "run", "--level", "graph", "-o", graph), "which kernel differs"
    )
    compare = shlex.join(["whence", "compare", answer.reference.path, graph])
    yield msgspec.structs.replace(capture, command=f"{capture.command} && {compare}")
    yield _with_command(
        answer.target,
        ("whence", "ladder", "-o", "ladder"),
        "which stage of torch.compile the error comes from",
    )


def _is_compiled(answer: _Answer) -> bool:
    """Does the target hide what the first finding's call called, and the reference not?"""
    first = answer.first
    calls = answer.calls_of(first.pair) if first is not None else None
    return calls is not None and bool(hidden_inside(calls[1])) and not hidden_inside(calls[0])


def _capture_operators(answer: _Answer) -> Iterator[NextStep]:
    """Where a finding names a module that runs several operators, and not which."""
    first = answer.first
    if first is None or first.operator or first.verdict == VerdictKind.PARAM_DIFF:
        return
    if _is_compiled(answer):
        return
    if any(_is_of_operators(run) for run in answer.runs) or not _are_captures(answer):
        return
    yield _captured_again(answer, _OPERATORS, f"which operator inside {_name(first.name)} differs")


def _explain_outputs(answer: _Answer) -> Iterator[NextStep]:
    """What part of the error at the outputs each finding explains."""
    if not _can_be_rerun(answer.target):
        return
    what = "each finding" if len(answer.result.findings) > 1 else "this finding"
    yield NextStep(
        "whence locate",
        f"runs the target again, to say how much of the error at the outputs {what} explains",
        takes_comparison=True,
    )


def _trace(answer: _Answer) -> Iterator[NextStep]:
    if answer.result.origin is not None:
        yield NextStep(
            "whence trace",
            "the way of the error, operator by operator, back to where it begins",
            takes_comparison=True,
        )


def _draw(answer: _Answer) -> Iterator[NextStep]:
    yield NextStep(
        "whence report -o report.html",
        "a page that shows the error along the run, every call and tensor",
        takes_comparison=True,
    )


# ---- to decide


def _pair_otherwise(answer: _Answer) -> Iterator[NextStep]:
    if answer.result.coverage.paired:
        return
    runs = [run.path for run in answer.runs]
    yield NextStep(
        shlex.join(["whence", "compare", *runs, "--match", "order"]),
        "pairs the calls line by line, whatever their names",
    )
    yield NextStep(
        shlex.join(["whence", "align", *runs, "-o", "map.yaml"]),
        "writes what could be paired as a map to correct, for --map",
    )


def _give_equal_inputs(answer: _Answer) -> Iterator[NextStep]:
    result = answer.result
    if not result.inputs_differ:
        return
    yield from _look_at_inputs(answer)
    if _are_captures(answer):
        yield _captured_again(
            answer, ("--seed", "0"), "whether both get the same inputs when the seed is the same"
        )


def _look_at_inputs(answer: _Answer) -> Iterator[NextStep]:
    """The first input of a model that differs, on both sides."""
    for row in answer.result.rows:
        if row.measured.identical or not is_input(row.reference_slot):
            continue
        calls = answer.calls_of(row.pair)
        if calls is None or calls[0].parent != -1:
            continue
        slots = row.reference_slot, row.target_slot
        for side, run, call, slot in zip(_SIDES, answer.runs, calls, slots, strict=True):
            words = ["whence", "show", run.path, f"{call.scope or call.root}:{slot}"]
            yield NextStep(shlex.join(words), f"what the {side} was given")
        return


def _keep_elements(answer: _Answer) -> Iterator[NextStep]:
    """Tensors were compared by statistics, or not at all, because elements were not kept."""
    if _all_kept(answer) or not _are_captures(answer) or answer.result.inputs_differ:
        return
    yield _captured_again(
        answer, _FULL, "compares every element, and replays every operator that was recorded"
    )


def _all_kept(answer: _Answer) -> bool:
    """Are there elements of every tensor? A record without them says why."""
    return not any(r.elements is None and r.why for run in answer.runs for r in run.records)


def _bring_model(answer: _Answer) -> Iterator[NextStep]:
    """Calls of the reference have no program that could be replayed."""
    coverage = answer.result.coverage
    if coverage.replayed + coverage.inside >= coverage.paired or not coverage.paired:
        return
    if answer.result.inputs_differ:
        return
    command = ["whence", "compare", *(run.path for run in answer.runs)]
    if not any(run.programs for run in answer.runs) and _are_captures(answer):
        yield _captured_again(
            answer,
            ("--programs",),
            "replays every operator of the reference on the target's inputs",
        )
        return
    yield NextStep(
        shlex.join([*command, "--model", "MODULE:FACTORY"]),
        "replays calls without a recorded program by the reference's own modules",
        fill_in=True,
    )


def _bring_third(answer: _Answer) -> Iterator[NextStep]:
    result = answer.result
    if result.third is not None or result.inputs_differ or not result.coverage.paired:
        return
    if not result.coverage.root_outputs_measured:
        return
    command = ["whence", "compare", *(run.path for run in answer.runs), "--third", "RUN_IN_FLOAT64"]
    yield NextStep(
        shlex.join(command),
        "which of both is nearer to the reference in higher precision",
        fill_in=True,
    )


def _show_plan(answer: _Answer) -> Iterator[NextStep]:
    runs = [run.path for run in answer.runs]
    if answer.result.inputs_differ:
        return
    if answer.result.unmatched or not answer.result.coverage.root_outputs_measured:
        yield NextStep(
            shlex.join(["whence", "compare", *runs, "--plan"]),
            "which calls and tensors are paired, by which rule, and which are not",
        )


_AFTER_A_FAULT: tuple[Rule, ...] = (
    _look_at_parameter,
    _see_elements,
    _reproduce,
    _open_compiled,
    _trace,
    _capture_operators,
    _explain_outputs,
    _draw,
)
_TO_DECIDE: tuple[Rule, ...] = (
    _pair_otherwise,
    _give_equal_inputs,
    _keep_elements,
    _bring_model,
    _show_plan,
    _bring_third,
)


# ---- commands


def _can_be_rerun(run: Run) -> bool:
    """Was the run made by `whence run`, so that its command can be typed again?"""
    return bool(run.info.command and run.info.interpreter)


def _are_captures(answer: _Answer) -> bool:
    return all(run.info.kind == "whence" for run in answer.runs)


def _is_of_operators(run: Run) -> bool:
    return any(call.kind == "operator" for call in run.calls)


def _captured_again(answer: _Answer, options: tuple[str, ...], decides: str) -> NextStep:
    """Both programs captured again with these options, and compared."""
    paths = [f"{run.path.rstrip('/')}{_SUFFIX[options[0]]}" for run in answer.runs]
    captures = [
        _with_command(run, ("whence", "run", *options, "-o", path), "")
        for run, path in zip(answer.runs, paths, strict=True)
    ]
    commands = [*(step.command for step in captures), shlex.join(["whence", "compare", *paths])]
    return NextStep(" && ".join(commands), decides, any(step.fill_in for step in captures))


_SUFFIX = {"--level": "-op", "--keep": "-full", "--programs": "-programs", "--seed": "-seed"}


def _with_command(run: Run, start: tuple[str, ...], decides: str) -> NextStep:
    """A command of whence around the one that made a run, which is the user's to fill in where
    nobody recorded it.
    """
    command = run.info.command
    if not _can_be_rerun(run):
        return NextStep(f"{shlex.join([*start, '--'])} COMMAND", decides, fill_in=True)
    folder = run.info.cwd
    if not folder or folder == str(Path.cwd()):
        return NextStep(shlex.join([*start, "--", *command]), decides)
    here = [
        str(Path(word).resolve()) if start[i - 1] == "-o" else word for i, word in enumerate(start)
    ]
    inside = shlex.join([*here, "--", *command])
    return NextStep(f"(cd {shlex.quote(folder)} && {inside})", decides)


def _name(scope: str) -> str:
    return scope or "the model"
