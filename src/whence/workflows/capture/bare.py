"""Compares a captured command with the same command without a capture: what its compiled graphs
return must be equal bit by bit.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from whence.errors import WhenceError
from whence.instrument.options import CaptureOptions
from whence.instrument.torch.compiled import what_returned
from whence.instrument.torch.compiled.what_returned import Returned
from whence.records.marks import OBSERVER
from whence.records.observed import SETTING, SWITCHED, Effect, Observed

_ATTACH = "whence.api:attach_bare"
_ON_PURPOSE = ("patch", "inject", "force_tokens")
_NOT_ASKED = "left out by --no-bare"


class Bare:
    """One command that is captured and then run again without a capture.

    wanted: whether to measure the effect of the capture. environment: variables that the captured
    command needs.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: CaptureOptions,
        variables: Mapping[str, str] | None,
        tell: Callable[[str], None],
        *,
        wanted: bool,
    ) -> None:
        self._command, self._options, self._tell = tuple(command), options, tell
        self._variables = dict(os.environ if variables is None else variables)
        self._place = tempfile.TemporaryDirectory(prefix="whence-bare-")
        self._why_not = "" if wanted else _NOT_ASKED
        if any(getattr(options, name) for name in _ON_PURPOSE):
            self._why_not = "the captured program was changed on purpose"
        self._runs = 0

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *error: object) -> None:
        self._place.cleanup()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the captured command."""
        return {**self._variables, **what_returned.environment(self._folder("captured"))}

    def _folder(self, name: str) -> Path:
        folder = Path(self._place.name) / name
        folder.mkdir(exist_ok=True)
        return folder

    def measure(self, run_path: str) -> None:
        """Run the command without a capture when the capture changed settings of the command, and
        note in the run how the results of both compare.
        """
        from whence import store

        if not store.is_run(Path(run_path)):  # nothing was captured
            return
        try:
            run = store.open_run(run_path)
            if not any(note.kind == SWITCHED for note in run.notes):
                return
            observed = self._observed(run.info.settings.get("exit_code", 0))
            settings = {**run.info.settings, SETTING: msgspec.to_builtins(observed)}
            store.update_info(run_path, settings=settings)
        except WhenceError as error:  # the run cannot be read, and whoever reads it is told so
            self._tell(f"whence: the observer effect could not be noted: {error}")
            return
        self._tell(f"whence: {OBSERVER}{observed.words}")

    def _observed(self, exit_code: int) -> Observed:
        if self._why_not:
            return Observed(Effect.UNMEASURED, self._why_not)
        captured = what_returned.read(self._folder("captured"))
        if not captured:
            return Observed(Effect.UNMEASURED, "no process of the captured command came to its end")
        self._tell(
            "whence: running the command once more without a capture, to see whether being watched "
            "changed it (--no-bare leaves this out)"
        )
        try:
            bare = self._run(exit_code)
            if _are_equal(captured, bare):
                return Observed(Effect.NONE, f"{_executions(captured)} bit-equal without a capture")
            if not _are_equal(bare, again := self._run(exit_code)):
                return Observed(
                    Effect.UNMEASURED,
                    "without a capture the command does not compute the same twice "
                    f"({_first_difference(bare, again)}); --seed N and --deterministic may make it",
                )
            return Observed(Effect.CHANGED, self._changed(captured, bare, exit_code))
        except WhenceError as error:
            return Observed(Effect.UNMEASURED, str(error))

    def _changed(
        self, captured: Sequence[Returned], bare: Sequence[Returned], exit_code: int
    ) -> str:
        first = _first_difference(captured, bare)
        for name in sorted({name for returned in captured for name in returned.switched}):
            if _are_equal(captured, self._run(exit_code, off=(name,))):
                return (
                    f"{name} are off while graphs are captured, and without a capture the command "
                    f"computes something else with them than without, first {first}"
                )
        return f"without a capture the command computes something else, first {first}"

    def _run(self, exit_code: int, off: tuple[str, ...] = ()) -> list[Returned]:
        """Run the command without a capture. off: names of `SWITCHES`."""
        from whence.instrument.launch import child_process, launcher
        from whence.instrument.launch.outcome import ended_words

        self._runs += 1
        folder = self._folder(f"bare-{self._runs}")
        environment = launcher.child_environment(
            {**self._variables, **what_returned.environment(folder, off)},
            str(self._folder("launched")),
            self._options,
            _ATTACH,
        )
        with tempfile.TemporaryFile() as log:
            ended = child_process.execute(self._command, environment, log)
        if ended.exit_code != exit_code:
            raise WhenceError(
                f"without a capture the command {ended_words(ended.exit_code)}, captured it "
                f"{ended_words(exit_code)}; run again, it is given nothing to read from its "
                "standard input, and finds the files that it wrote before"
            )
        returned = what_returned.read(folder)
        if problem := next((r.problem for r in returned if r.problem), ""):
            raise WhenceError(f"a result could not be read: {problem}")
        return returned


def _executions(returned: Sequence[Returned]) -> str:
    number = sum(r.count for r in returned)
    return f"{number} {'result of a graph is' if number == 1 else 'results of graphs are'}"


def _are_equal(one: Sequence[Returned], other: Sequence[Returned]) -> bool:
    """Whether both runs returned the same results; several threads may return them in any order."""
    if len(one) != len(other):
        return False
    return all(
        a.whole == b.whole
        or (a.count == b.count == len(a.executions) and _digests(a) == _digests(b))
        for a, b in zip(one, other, strict=True)
    )


def _digests(returned: Returned) -> Counter[str]:
    return Counter(execution.digest for execution in returned.executions)


def _first_difference(one: Sequence[Returned], other: Sequence[Returned]) -> str:
    """Describe the first place at which the second run differs."""
    if len(one) != len(other):
        return f"in the number of processes that compile ({len(one)} against {len(other)})"
    for a, b in zip(one, other, strict=True):
        if a.whole == b.whole:
            continue
        of_rank = f" of rank {a.rank}" if len(one) > 1 else ""
        for number, (x, y) in enumerate(zip(a.executions, b.executions)):
            if x != y:
                what = "the gradients of its inputs" if x.backward else "what it returned"
                return (
                    f"in execution {number + 1} of a graph{of_rank}: graph {a.graphs[x.graph]}, "
                    f"{what}"
                )
        return f"in the number of executions of graphs{of_rank} ({a.count} against {b.count})"
    return ""


def attach_bare(options: CaptureOptions, run_path: str, framework: str) -> None:
    """Watch what compiled graphs return, and nothing else. Called in the child of a command that
    runs without a capture, after its import of a framework.
    """
    wanted = what_returned.asked()
    if framework != "torch" or wanted is None:
        return
    from whence.instrument.framework import stage_of
    from whence.instrument.torch.compiled.results import Results
    from whence.workflows.capture.process_end import at_the_end

    results = Results(*wanted)
    stage: Any = stage_of(framework, options)
    results.install()
    if stage is not None:
        stage.install()
    at_the_end(results.finish, results.renew)
