"""Chooses the experiments that take an answer further, as commands that can be typed as they
stand.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from whence.align.calls.by_order import line_by_line
from whence.comparison.verdicts.after_steps import AFTER_STEP
from whence.comparison.verdicts.parameter_drift import STEPS_BEFORE
from whence.errors import UsageError
from whence.records import Call, Lack, Run
from whence.records.marks import EngineModel, hidden_inside
from whence.records.places import absolute, is_url
from whence.records.slots import is_input, is_of_child
from whence.results import (
    Comparison,
    Evidence,
    Finding,
    NextStep,
    Status,
    VerdictKind,
)
from whence.results.free_names import free_name

# Two compared runs, and commands about them that can be typed as they stand.

SIDES = ("reference", "target")


@dataclass(frozen=True, slots=True)
class AnsweredRuns:
    """An answer and the two runs it is about, as they were read."""

    result: Comparison
    reference: Run
    target: Run

    @property
    def first(self) -> Finding | None:
        return next(iter(self.result.findings), None)

    @property
    def runs(self) -> tuple[Run, Run]:
        return self.reference, self.target

    @property
    def paths(self) -> tuple[str, str]:
        return self.reference.path, self.target.path

    @property
    def first_calls(self) -> tuple[Call, Call] | None:
        """The calls of the first finding, by `calls_of`."""
        return self.calls_of(self.first.pair) if self.first is not None else None

    def calls_of(self, pair: int) -> tuple[Call, Call] | None:
        """The two calls of a pair; None where alignment cut or joined calls, so that the pair
        refers to other calls than those read.
        """
        pairs = self.result.plan.pairs
        if not 0 <= pair < len(pairs):
            return None
        reference, target = pairs[pair].reference, pairs[pair].target
        if reference >= len(self.reference.calls) or target >= len(self.target.calls):
            return None
        return self.reference.calls[reference], self.target.calls[target]


def free(path: str) -> str:
    """The path, with a number appended where it exists already."""
    return free_name(path, lambda name: not Path(name).exists())


def is_inside(answer: AnsweredRuns) -> bool:
    """Whether another call made the call of the first finding, so that its outputs can be put in
    the place of the target's.
    """
    calls = answer.first_calls
    return calls is not None and calls[1].parent != -1


def have_inputs(answer: AnsweredRuns) -> bool:
    """Whether both runs recorded the inputs of calls."""
    return all(any(is_input(r.slot) for c in run.calls for r in c.refs) for run in answer.runs)


def command(
    words: Sequence[str], decides: str, *, fill_in: bool = False, takes_comparison: bool = False
) -> NextStep:
    """A step that runs a whence command."""
    line = shlex.join(["whence", *words])
    return NextStep(line, decides, fill_in=fill_in, takes_comparison=takes_comparison)


def shown(run: Run, call: Call, slot: str, decides: str) -> NextStep:
    """A step that runs `whence show` for a tensor of a call. A name of digits only would be taken
    for a number of the tree, so the call's number replaces it.
    """
    name = call.module_name
    is_number = call.number and name.replace("_", "").isdigit()
    return command(["show", run.path, f"{call.number if is_number else name}:{slot}"], decides)


def can_be_rerun(run: Run) -> bool:
    """Whether `whence run` made the run, so that its command can be typed again."""
    return bool(run.info.command and run.info.interpreter)


def are_captures(answer: AnsweredRuns) -> bool:
    """Whether both runs were captured by whence, and are not dumps of another tool."""
    return all(run.info.kind == "whence" for run in answer.runs)


def is_of_engine(run: Run) -> bool:
    """Whether the run is of a model that an engine loaded from a file, which has no modules."""
    return any(call.op_type in list(EngineModel) for call in run.calls if call.parent == -1)


def is_of_operators(run: Run) -> bool:
    return any(call.kind == "operator" for call in run.calls)


def captured_again(answer: AnsweredRuns, options: tuple[str, ...], decides: str) -> NextStep:
    """A step that captures both programs again with these options, and compares them."""
    suffix = _SUFFIX[options[0]]
    paths = [
        f"{run.path.rstrip('/') if _is_there(run) else f'runs/{side}'}{suffix}"
        for side, run in zip(SIDES, answer.runs, strict=True)
    ]
    return captured(answer, options, paths, decides)


def captured(
    answer: AnsweredRuns,
    options: tuple[str, ...],
    paths: Sequence[str],
    decides: str,
    verb: str = "compare",
) -> NextStep:
    """A step that captures both programs with these options into these folders, and compares them
    by `whence VERB`.
    """
    outputs = [free(path) for path in paths]
    captures = [
        with_command(run, ("whence", "run", *options, "-o", output), "")
        for run, output in zip(answer.runs, outputs, strict=True)
    ]
    commands = [*(step.command for step in captures), shlex.join(["whence", verb, *outputs])]
    return NextStep(" && ".join(commands), decides, any(step.fill_in for step in captures))


_SUFFIX = {"--level": "-op", "--keep": "-full", "--programs": "-programs", "--seed": "-seed"}


def with_command(run: Run, start: tuple[str, ...], decides: str) -> NextStep:
    """A step that runs a whence command around the command that made a run, in its folder, by its
    Python and with its variables. Where the command was not recorded, the user fills it in.
    """
    if not can_be_rerun(run):
        return NextStep(f"{shlex.join([*start, '--'])} COMMAND", decides, fill_in=True)
    folder = run.info.cwd
    is_here = not folder or folder == str(Path.cwd())
    # The program runs in its own folder, so the path of the run must be valid from there.
    words = [
        absolute(word) if before == "-o" and not is_here else word
        for before, word in zip(("", *start), start)
    ]
    line = f"{_variables(run)}{shlex.join([*words, '--', *_by_its_python(run)])}"
    return NextStep(line if is_here else f"(cd {shlex.quote(folder)} && {line})", decides)


_MASKED = "***"
# A job's launcher sets these anew; their recorded values do not apply to another job.
_OF_A_JOB = re.compile(r"SLURM_|(LOCAL_|GROUP_|ROLE_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_|CONDA_")


def _variables(run: Run) -> str:
    """Assignments before a command in a shell: the recorded variables that have another value now;
    "" for none.
    """
    recorded = run.info.environment
    if recorded and os.environ.get("PYTHONPATH"):
        recorded = {"PYTHONPATH": "", **recorded}
    return "".join(
        f"{name}={shlex.quote(value)} "
        for name, value in recorded.items()
        if os.environ.get(name) != value and _MASKED not in value and not _OF_A_JOB.match(name)
    )


def _by_its_python(run: Run) -> tuple[str, ...]:
    """The command of a run, with the full path of its Python where `python` now is another one."""
    program, *arguments = run.info.command
    python = Path(run.info.interpreter)
    if not re.fullmatch(r"python[\d.]*", program) or not python.is_file():
        return run.info.command
    here = shutil.which(program)
    if here is not None and Path(here).parent.resolve() == python.parent.resolve():
        return run.info.command
    return str(python), *arguments


def can_be_typed(step: NextStep, answer: AnsweredRuns) -> bool:
    """Whether every run that a command names exists on disk. Labels of one program and arrays of
    this process are runs without a folder.
    """
    words = shlex.split(step.command)
    return all(_is_there(run) for run in answer.runs if run.path in words)


def _is_there(run: Run) -> bool:
    return is_url(run.path) or Path(run.path).exists()


def name_of(scope: str) -> str:
    return scope or "the model"


MOST = 3
_FULL = ("--keep", "full")
_OPERATORS = ("--level", "op")
_ENDS = ("io", "logits")
"""Levels that record only the inputs and outputs of a model."""


Rule = Callable[[AnsweredRuns], Iterator[NextStep]]


def next_steps(result: Comparison, reference: Run, target: Run) -> tuple[NextStep, ...]:
    """At most three experiments, the most telling first; none after an answer `same`."""
    if result.status == Status.SAME:
        return ()
    answer = AnsweredRuns(result, reference, target)
    rules = _AFTER_A_FAULT if result.findings else _TO_DECIDE
    # Rules are asked one by one, because later rules search whole runs.
    steps = (step for rule in rules for step in rule(answer))
    typed = (step for step in steps if can_be_typed(step, answer))
    # Commands that can be typed as they stand come first.
    return tuple(sorted(itertools.islice(typed, MOST), key=lambda step: step.fill_in))


# ---- after a fault


def _reproduce(answer: AnsweredRuns) -> Iterator[NextStep]:
    first = answer.first
    if first is None or first.evidence != Evidence.REPLAY or not _can_run_again(answer, first):
        return
    yield command(
        ["repro", "-o", free("repro")],
        f"one script that runs {name_of(first.name)} ({first.op_type}) alone: fails as the target "
        "ran it, passes as the reference did",
        takes_comparison=True,
    )


def _can_run_again(answer: AnsweredRuns, first: Finding) -> bool:
    """Whether the reference has a program of the first finding's call that runs operators. A
    container that only passes a tensor on to a child (positions, or a tensor that only the target
    computes) has no operator that could be run alone.
    """
    if first.numbers.get("floor_rel") == 0 and not first.operator:
        return False
    calls = answer.calls_of(first.pair)
    program = answer.reference.programs.get(calls[0].program) if calls is not None else None
    if program is not None and is_of_child(first.slot):
        return "op" in dict(program.outputs).get(first.slot, {})
    return bool(answer.reference.programs)


def _look_at_parameter(answer: AnsweredRuns) -> Iterator[NextStep]:
    first = answer.first
    if first is None or first.verdict != VerdictKind.PARAM_DIFF or not first.slot:
        return
    calls = answer.calls_of(first.pair)
    # A compiled target has no recorded call of that name.
    if calls is None or any(all(r.slot != first.slot for r in call.refs) for call in calls):
        return
    for side, run, call in zip(SIDES, answer.runs, calls, strict=True):
        yield shown(run, call, first.slot, f"the parameter as the {side} has it")


def _see_elements(answer: AnsweredRuns) -> Iterator[NextStep]:
    if answer.result.evidence == Evidence.STATISTICS:
        yield from _keep_elements(answer)


def _open_compiled(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For a compiled target: finds the kernel, and the compiler stage, at fault."""
    if not _is_compiled(answer) or _is_parameter(answer.first):
        return
    graph = free(f"{answer.target.path.rstrip('/')}-graph")
    capture = with_command(
        answer.target,
        ("whence", "run", "--level", "graph", "-o", graph),
        "which kernel differs (in the environment that compiled it)",
    )
    compare = shlex.join(["whence", "compare", answer.reference.path, graph])
    yield msgspec.structs.replace(capture, command=f"{capture.command} && {compare}")
    yield with_command(
        answer.target,
        ("whence", "ladder", "-o", free("ladder")),
        "which stage of torch.compile the error comes from",
    )


def _is_parameter(finding: Finding | None) -> bool:
    return finding is not None and finding.verdict == VerdictKind.PARAM_DIFF


def _is_compiled(answer: AnsweredRuns) -> bool:
    """Whether the target does not show the calls inside the first finding's call, although the
    reference does.
    """
    calls = answer.first_calls
    return calls is not None and bool(hidden_inside(calls[1])) and not hidden_inside(calls[0])


def _capture_operators(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For a finding that names a module and not which of its operators differs."""
    first = answer.first
    if first is None or first.operator or _is_parameter(first) or AFTER_STEP in first.numbers:
        return
    if _is_compiled(answer) or _is_of_logits(answer.result):
        return
    if any(is_of_operators(run) for run in answer.runs) or not are_captures(answer):
        return
    yield captured_again(answer, _OPERATORS, f"which operator inside {name_of(first.name)} differs")


def _capture_modules(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For logits alone: captures every module up to the first bad token, or the first at which the
    texts part, to see which differs first.
    """
    if not _is_of_logits(answer.result) or not answer.result.coverage.calls:
        return
    decides = "which module makes the difference, if one does"
    if all(map(_has_command, answer.runs)):
        yield command(["compare", *answer.paths, "--layers", free("layers")], decides)
        return
    steps = ("--steps", f":{answer.first.step + 1}") if answer.first is not None else ()
    if are_captures(answer):
        yield captured_again(answer, (*_FULL, *steps), decides)
    elif answer.first is not None:
        paths = [f"runs/{side}" for side in SIDES]
        yield captured(answer, (*_FULL, *steps), paths, decides)


def _has_command(run: Run) -> bool:
    """Whether the command that made the run was recorded, be it by the program itself."""
    words = run.info.command
    return can_be_rerun(run) or bool(words and words[0].endswith(".py"))


def _force_text(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For logits of texts that part at a token that is no fault."""
    generation = answer.result.generation
    if generation is None or not generation.logits_only or generation.forced:
        return
    if not any(prompt.passes and prompt.first >= 0 for prompt in generation.prompts):
        return
    outputs = [free(f"runs/{side}") for side in SIDES]
    options = ("--level", "logits"), ("--level", "logits", "--force-tokens", outputs[0])
    captures = [
        with_command(run, ("whence", "run", *words, "-o", output), "")
        for run, words, output in zip(answer.runs, options, outputs, strict=True)
    ]
    yield NextStep(
        " && ".join(
            [*(step.command for step in captures), shlex.join(["whence", "compare", *outputs])]
        ),
        "whether the tokens behind differ, the target going on with the reference's",
        any(step.fill_in for step in captures),
    )


def _is_of_logits(result: Comparison) -> bool:
    return result.generation is not None and result.generation.logits_only


def _explain_outputs(answer: AnsweredRuns) -> Iterator[NextStep]:
    """Computes which part of the error at the outputs each finding explains."""
    if not can_be_rerun(answer.target) or not is_inside(answer):
        return
    if not any(finding.is_of_module for finding in answer.result.findings):
        return
    what = "each finding" if len(answer.result.findings) > 1 else "this finding"
    yield command(
        ["locate"],
        f"runs the target again, to say how much of the error at the outputs {what} explains",
        takes_comparison=True,
    )


def _trace(answer: AnsweredRuns) -> Iterator[NextStep]:
    if answer.result.origin is not None:
        yield command(
            ["trace"],
            "the way of the error, operator by operator, back to where it begins",
            takes_comparison=True,
        )


def _draw(answer: AnsweredRuns) -> Iterator[NextStep]:
    yield command(
        ["report", "-o", free("report.html")],
        "a page that shows the error along the run, every call and tensor",
        takes_comparison=True,
    )


# ---- to decide


def _pair_otherwise(answer: AnsweredRuns) -> Iterator[NextStep]:
    if answer.result.coverage.paired:
        return
    if _agree_line_by_line(answer):
        yield command(
            ["compare", *answer.paths, "--match", "order"],
            "pairs the calls line by line, whatever their names",
        )
    yield command(
        ["align", *answer.paths, "-o", free("map.yaml")],
        "writes what could be paired as a map to correct, for --map",
    )


def _agree_line_by_line(answer: AnsweredRuns) -> bool:
    try:
        line_by_line(*answer.runs)
    except UsageError:
        return False
    return True


def _give_equal_inputs(answer: AnsweredRuns) -> Iterator[NextStep]:
    result = answer.result
    if not result.inputs_differ:
        return
    yield from _look_at_inputs(answer)
    if are_captures(answer) and _may_be_drawn(answer):
        yield captured_again(
            answer, ("--seed", "0"), "whether both get the same inputs when the seed is the same"
        )


def _may_be_drawn(answer: AnsweredRuns) -> bool:
    """Whether the differing inputs may have been drawn at random. Shapes and masks are not
    drawn.
    """
    records = tuple(run.records for run in answer.runs)
    for row in answer.result.rows:
        calls = answer.calls_of(row.pair)
        if row.measured.identical or not is_input(row.reference_slot):
            continue
        if calls is None or calls[0].parent != -1:
            continue
        sides = zip(records, calls, (row.reference_slot, row.target_slot), strict=True)
        shapes = {of[r.record].shape for of, c, slot in sides for r in c.refs if r.slot == slot}
        if len(shapes) > 1 or "mask" in row.reference_slot:
            return False
    return True


def _look_at_inputs(answer: AnsweredRuns) -> Iterator[NextStep]:
    """Shows the first differing input of a model, on both sides."""
    for row in answer.result.rows:
        if row.measured.identical or not is_input(row.reference_slot):
            continue
        calls = answer.calls_of(row.pair)
        if calls is None or calls[0].parent != -1:
            continue
        slots = row.reference_slot, row.target_slot
        for side, run, call, slot in zip(SIDES, answer.runs, calls, slots, strict=True):
            yield shown(run, call, slot, f"what the {side} was given")
        return


def _keep_elements(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For tensors that were compared by statistics, or not at all, because their elements were not
    stored.
    """
    if _all_kept(answer) or not are_captures(answer) or answer.result.inputs_differ:
        return
    yield captured_again(
        answer, _FULL, "compares every element, and replays every operator that was recorded"
    )


def _all_kept(answer: AnsweredRuns) -> bool:
    """Whether the elements of every tensor were stored. A record without them gives a reason."""
    return not any(r.elements is None and r.why for run in answer.runs for r in run.records)


def _look_before(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For parameters that differ in the first recorded step, if that is not the first step of the
    program.
    """
    if not are_captures(answer):
        return
    if not any(v.numbers.get(STEPS_BEFORE) for v in answer.result.verdicts):
        return
    paths = [f"{run.path.rstrip('/')}-stats" for run in answer.runs]
    decides = "at which step the trainings part, and in what; record that step then"
    yield captured(answer, ("--keep", "stats"), paths, decides, "diverge")


def _bring_model(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For calls of the reference without a program that could be replayed."""
    coverage = answer.result.coverage
    if coverage.replayed + coverage.inside >= coverage.paired or not coverage.paired:
        return
    if (
        answer.result.inputs_differ
        or not have_inputs(answer)
        or any(map(is_of_engine, answer.runs))
    ):
        return
    if not any(run.programs for run in answer.runs) and are_captures(answer):
        yield captured_again(
            answer,
            ("--programs",),
            "replays every operator of the reference on the target's inputs",
        )
        return
    yield command(
        ["compare", *answer.paths, "--model", "MODULE:FACTORY"],
        "replays calls without a recorded program by the reference's own modules",
        fill_in=True,
    )


def _see_inside(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For engines of which only inputs and outputs were captured."""
    if not are_captures(answer) or answer.result.inputs_differ:
        return
    sides = [run for run in answer.runs if run.info.options.get("level") in _ENDS]
    if not sides:
        return
    paths = {run.path: run.path for run in answer.runs}
    captures = []
    for run in sides:
        paths[run.path] = free(f"{run.path.rstrip('/')}-inside")
        captures.append(with_command(run, ("whence", "run", "-o", paths[run.path]), ""))
    compare = shlex.join(["whence", "compare", *(paths[run.path] for run in answer.runs)])
    yield NextStep(
        " && ".join([*(step.command for step in captures), compare]),
        "what the engine computes inside, to say where the error begins",
        any(step.fill_in for step in captures),
    )


def _capture_instead(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For dumps that record results but not their inputs."""
    if are_captures(answer) or have_inputs(answer) or answer.result.inputs_differ:
        return
    yield captured(
        answer,
        (),
        [f"runs/{side}" for side in SIDES],
        "captures inputs and programs too, so that each call is judged by itself",
    )


def _repeat_what_failed(answer: AnsweredRuns) -> Iterator[NextStep]:
    """For a command that failed, or whose run is incomplete or lacks a rank."""
    for side, run in zip(SIDES, answer.runs, strict=True):
        lacks = {one.kind for one in answer.result.missing if one.side == side and not one.accepted}
        has_failed = bool(run.info.settings.get("exit_code", 0))
        if (has_failed or lacks & {Lack.CUT, Lack.RANK}) and can_be_rerun(run):
            start = ("whence", "run", "-o", free(f"{run.path.rstrip('/')}-again"))
            yield with_command(
                run,
                start,
                f"whether the {side} fails again, and why"
                if has_failed
                else f"what the {side} does behind its end, or on the ranks that are not there",
            )


def _bring_third(answer: AnsweredRuns) -> Iterator[NextStep]:
    result = answer.result
    if result.third is not None or result.inputs_differ or not result.coverage.paired:
        return
    if not any(v.verdict == VerdictKind.UNDETERMINED for v in result.verdicts):
        return
    if not result.coverage.root_outputs_measured:
        return
    yield command(
        ["compare", *answer.paths, "--third", "RUN_IN_FLOAT64"],
        "which of both is nearer to the reference in higher precision",
        fill_in=True,
    )


def _show_plan(answer: AnsweredRuns) -> Iterator[NextStep]:
    if answer.result.inputs_differ:
        return
    if answer.result.unmatched or not answer.result.coverage.root_outputs_measured:
        yield command(
            ["compare", *answer.paths, "--plan"],
            "which calls and tensors are paired, by which rule, and which are not",
        )


_AFTER_A_FAULT: tuple[Rule, ...] = (
    _look_at_parameter,
    _see_elements,
    _reproduce,
    _open_compiled,
    _trace,
    _capture_modules,
    _capture_operators,
    _explain_outputs,
    _draw,
)
_TO_DECIDE: tuple[Rule, ...] = (
    _repeat_what_failed,
    _capture_modules,
    _force_text,
    _pair_otherwise,
    _give_equal_inputs,
    _look_before,
    _keep_elements,
    _capture_instead,
    _see_inside,
    _bring_model,
    _show_plan,
    _bring_third,
)
