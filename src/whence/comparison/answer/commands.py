"""Two runs that were compared, and commands about them that can be typed as they stand."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whence.records import Call, Run
from whence.records.marks import EngineModel
from whence.records.places import absolute
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
    first = answer.first
    calls = answer.calls_of(first.pair) if first is not None else None
    return calls is not None and calls[1].parent != -1


def have_inputs(answer: AnsweredRuns) -> bool:
    """Do both runs say what any call read?"""
    return all(any(is_input(r.slot) for c in run.calls for r in c.refs) for run in answer.runs)


def shown_as(call: Call) -> str:
    """What `whence show` takes for a call: a name of digits would be a number of the tree."""
    name = call.scope or call.root
    return call.number if name.replace("_", "").isdigit() and call.number else name


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
    paths = [f"{run.path.rstrip('/')}{suffix}" for run in answer.runs]
    return captured(answer, options, paths, decides)


def captured(
    answer: AnsweredRuns,
    options: tuple[str, ...],
    paths: Sequence[str],
    decides: str,
    command: str = "compare",
) -> NextStep:
    """Both programs captured with these options into these folders, and compared: by a command of
    whence that takes two runs.
    """
    outputs = [free(path) for path in paths]
    captures = [
        with_command(run, ("whence", "run", *options, "-o", output), "")
        for run, output in zip(answer.runs, outputs, strict=True)
    ]
    commands = [*(step.command for step in captures), shlex.join(["whence", command, *outputs])]
    return NextStep(" && ".join(commands), decides, any(step.fill_in for step in captures))


_SUFFIX = {"--level": "-op", "--keep": "-full", "--programs": "-programs", "--seed": "-seed"}


def with_command(run: Run, start: tuple[str, ...], decides: str) -> NextStep:
    """A command of whence around the one that made a run, which is the user's to fill in where
    nobody recorded it.
    """
    command = run.info.command
    if not can_be_rerun(run):
        return NextStep(f"{shlex.join([*start, '--'])} COMMAND", decides, fill_in=True)
    folder = run.info.cwd
    if not folder or folder == str(Path.cwd()):
        return NextStep(shlex.join([*start, "--", *command]), decides)
    # The program runs in its own folder, so the path of the run has to hold from there.
    words = [
        absolute(word) if before == "-o" else word for before, word in zip(("", *start), start)
    ]
    line = shlex.join([*words, "--", *command])
    return NextStep(f"(cd {shlex.quote(folder)} && {line})", decides)


def name_of(scope: str) -> str:
    return scope or "the model"
