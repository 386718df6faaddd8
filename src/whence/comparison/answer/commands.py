"""Two runs that were compared, and commands about them that can be typed as they stand."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whence.records import Call, Run
from whence.records.marks import EngineModel
from whence.records.places import absolute, is_url
from whence.records.slots import is_input
from whence.results import Comparison, Finding, NextStep
from whence.results.free_names import free_name

SIDES = ("reference", "target")


@dataclass(frozen=True, slots=True)
class AnsweredRuns:
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

    @property
    def paths(self) -> tuple[str, str]:
        return self.reference.path, self.target.path

    @property
    def first_calls(self) -> tuple[Call, Call] | None:
        """The calls of the first finding, as `calls_of` has them."""
        return self.calls_of(self.first.pair) if self.first is not None else None

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


def free(path: str) -> str:
    """The path, with a number where something lies there already."""
    return free_name(path, lambda name: not Path(name).exists())


def is_inside(answer: AnsweredRuns) -> bool:
    """Is the first finding about a call that another one made, so that its outputs can be put in
    place of the target's?
    """
    calls = answer.first_calls
    return calls is not None and calls[1].parent != -1


def have_inputs(answer: AnsweredRuns) -> bool:
    """Do both runs say what any call read?"""
    return all(any(is_input(r.slot) for c in run.calls for r in c.refs) for run in answer.runs)


def command(
    words: Sequence[str], decides: str, *, fill_in: bool = False, takes_comparison: bool = False
) -> NextStep:
    """A command of whence."""
    line = shlex.join(["whence", *words])
    return NextStep(line, decides, fill_in=fill_in, takes_comparison=takes_comparison)


def shown(run: Run, call: Call, slot: str, decides: str) -> NextStep:
    """`whence show` of a tensor of a call. A name of digits would be a number of the tree."""
    name = call.module_name
    is_number = call.number and name.replace("_", "").isdigit()
    return command(["show", run.path, f"{call.number if is_number else name}:{slot}"], decides)


def can_be_rerun(run: Run) -> bool:
    """Was the run made by `whence run`, so that its command can be typed again?"""
    return bool(run.info.command and run.info.interpreter)


def are_captures(answer: AnsweredRuns) -> bool:
    """Are both runs of whence, not dumps of another tool?"""
    return all(run.info.kind == "whence" for run in answer.runs)


def is_of_engine(run: Run) -> bool:
    """Is it of a model that an engine loaded from a file, which has no modules?"""
    return any(call.op_type in list(EngineModel) for call in run.calls if call.parent == -1)


def is_of_operators(run: Run) -> bool:
    return any(call.kind == "operator" for call in run.calls)


def captured_again(answer: AnsweredRuns, options: tuple[str, ...], decides: str) -> NextStep:
    """Both programs captured again with these options, and compared."""
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
    """Both programs captured with these options into these folders, and compared: by a command of
    whence that takes two runs.
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
    """A command of whence around the one that made a run, in its folder, by its Python and with its
    variables. It is the user's to fill in where nobody recorded it.
    """
    if not can_be_rerun(run):
        return NextStep(f"{shlex.join([*start, '--'])} COMMAND", decides, fill_in=True)
    folder = run.info.cwd
    is_here = not folder or folder == str(Path.cwd())
    # The program runs in its own folder, so the path of the run has to hold from there.
    words = [
        absolute(word) if before == "-o" and not is_here else word
        for before, word in zip(("", *start), start)
    ]
    line = f"{_variables(run)}{shlex.join([*words, '--', *_by_its_python(run)])}"
    return NextStep(line if is_here else f"(cd {shlex.quote(folder)} && {line})", decides)


_MASKED = "***"
# Set anew by whatever starts a job; what they were then is not what they have to be.
_OF_A_JOB = re.compile(r"SLURM_|(LOCAL_|GROUP_|ROLE_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_|CONDA_")


def _variables(run: Run) -> str:
    """What a shell needs in front of a command: the recorded variables that have another value
    here; "" for none.
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
    """The command of a run; with the path of its Python, where `python` is another one here."""
    program, *arguments = run.info.command
    python = Path(run.info.interpreter)
    if not re.fullmatch(r"python[\d.]*", program) or not python.is_file():
        return run.info.command
    here = shutil.which(program)
    if here is not None and Path(here).parent.resolve() == python.parent.resolve():
        return run.info.command
    return str(python), *arguments


def can_be_typed(step: NextStep, answer: AnsweredRuns) -> bool:
    """Is every run that a line names where it says? Labels of one program and arrays of this
    process are runs without a folder.
    """
    words = shlex.split(step.command)
    return all(_is_there(run) for run in answer.runs if run.path in words)


def _is_there(run: Run) -> bool:
    return is_url(run.path) or Path(run.path).exists()


def name_of(scope: str) -> str:
    return scope or "the model"
