"""Climbs the stages of torch.compile, up to one stage a rung: for a command in processes of its
own, or for a model in this process.

Torch's own compiler bisector, with whence's verdict as its test, finds the pass, lowering or
decomposition that makes the difference.

Its state lies in files that the program reads while it compiles
(`torch._inductor.compiler_bisector`, torch 2.6 and later).
"""

from __future__ import annotations

import abc
import contextlib
import copy
import inspect
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from whence import extras
from whence.errors import UsageError
from whence.instrument.torch.compiled.what_compiled import Compiled, of_run
from whence.records import Run
from whence.records.slots import is_input, is_output
from whence.results import GraphOperator, LadderKind, Pass, Place, Rung, RungKind
from whence.workflows.ladder.climbers import FINE, Climber, Judge, Judgement, Stairs, first_outside
from whence.workflows.ladder.of_levels import LevelsCommand, sessions_of
from whence.workflows.notebook_progress import Tell

RUNGS = ("aot_eager", "aot_eager_decomp_partition", "inductor")
_STATIC, _UNCACHED = "inductor_dynamic_off", "inductor_caches_off"
_PARTED = {"aot_eager": ("dynamo",), "inductor": (_STATIC, _UNCACHED)}
"""A rung that is not fine -> extra rungs to run before it, until one is outside the noise."""
_STAGES = {
    "dynamo": "dynamo",
    "aot_eager": "aot_autograd",
    "aot_eager_decomp_partition": "decomposition",
    _UNCACHED: "dynamic_shapes",
    "inductor": "graph_caches",
}


class _OfTorch(Climber):
    """Shared by a command and a model."""

    stairs = Stairs(LadderKind.STAGES, "eager", sees_inside=False, rounded="rounded")

    def rungs(self, base: Run) -> Sequence[str]:
        """The rungs; "dynamo", which separates dynamo from AOTAutograd, runs only when needed."""
        return RUNGS

    def parted_by(self, rung: Rung) -> Sequence[str]:
        """Extra rungs: dynamo alone before AOTAutograd; the program's backend without dynamic
        shapes and without caches before all others.
        """
        fine = FINE if rung.name == RUNGS[0] else (*FINE, RungKind.FAILED)
        return () if rung.verdict in fine else _PARTED.get(rung.name, ())

    def nothing(self, rungs: Sequence[Rung]) -> str:
        """The reason to stop: nothing is compiled on the first rung."""
        first = rungs[-1]
        if first.name != RUNGS[0] or first.verdict not in FINE or first.graphs:
            return ""
        none = "compiled no graph" if first.backends else "is never asked for anything"
        return f"the program never compiles (torch.compile {none}), so there is no stage to try"

    def stage(self, rung: str, top: Rung) -> str:
        """The stage of the compiler, or the program's own backend."""
        backend = next((b for b in top.backends if b != "inductor"), "inductor")
        return {**_STAGES, _STATIC: backend}[rung]

    def place(self, rungs: Sequence[Rung], judge: Judge, tell: Tell) -> Place | None:
        """The smallest piece of the traced graphs that goes wrong when it is compiled alone."""

        rung = first_outside(rungs)
        if rung is None:
            return None

        def run(name: str, environment: Mapping[str, str], **options: Any) -> Judgement:
            return judge(lambda path: self.capture(path, name, environment, **options))

        if rung.name == "dynamo":
            return first_not_traced(run, self.compiled)
        return Pieces(rung.name, run, self.compiled, tell).place()

    def bisect(self, rungs: Sequence[Rung], base: Run, judge: Judge, tell: Tell) -> Pass:
        """Torch's own bisector, over runs of the program."""

        def good(environment: Mapping[str, str]) -> bool | None:
            verdict = judge(lambda path: self.capture(path, "inductor", environment)).verdict
            return verdict in FINE if verdict in (*FINE, RungKind.OUTSIDE) else None

        return _no_pass(rungs) or _bisect_passes(good, _answers(rungs), self.bisecting(base), tell)

    def bisecting(self, eager: Run) -> Path | None:
        """Where the program finds the state of torch's bisector; None in this process."""
        return None

    @abc.abstractmethod
    def capture(
        self,
        path: Path,
        rung: str,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> float:
        """Run the program with these variables; options of the capture."""

    @abc.abstractmethod
    def compiled(self, run: Run) -> Sequence[Compiled]:
        """What was compiled for a run, by process."""

    def facts(self, path: Path, run: Run) -> dict[str, Any]:
        """What its processes compiled."""
        return _facts(self.compiled(run))


class TorchCommand(_OfTorch):
    """A command; torch.compile gets the rung's backend in every process that it starts.

    chooses: climb by the levels of ONNX Runtime when the program compiles nothing and runs its
    sessions.
    """

    def __init__(
        self, command: Sequence[str], options: Mapping[str, Any], *, chooses: bool
    ) -> None:
        from whence.workflows.rerun import Command

        self._subject, self._options = Command(command), dict(options)
        self._command, self._chooses = tuple(command), chooses
        self.words = self._subject.words

    @contextlib.contextmanager
    def ready(self, place: Path) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="whence-compiled-") as folder:
            self._cache, self._state = Path(folder) / "cache", Path(folder) / "state"
            self._cache.mkdir()
            yield

    def capture(
        self,
        path: Path,
        rung: str,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> float:
        cache = {
            "TORCHINDUCTOR_CACHE_DIR": str(self._cache),
            "TRITON_CACHE_DIR": str(self._cache / "triton"),
        }
        options = {**self._options, **options, "rung": rung}
        return self._subject.capture(path, environment={**cache, **(environment or {})}, **options)

    def compiled(self, run: Run) -> Sequence[Compiled]:
        """What its processes noted."""
        return of_run(run)

    def instead(self, base: Run) -> Climber | None:
        """The climber by ONNX Runtime levels, when the program uses only that."""
        if not self._chooses or any(c.requests for c in of_run(base)) or not sessions_of(base):
            return None
        return LevelsCommand(self._command, self._options)

    def notes(self, base: Run) -> list[str]:
        """Notes about sessions of ONNX Runtime, which this ladder does not vary."""
        if not sessions_of(base):
            return []
        return [
            "climbed were the stages of torch.compile; the program's sessions of ONNX Runtime "
            "ran as they are on every rung: --of onnxruntime climbs their levels"
        ]

    def bisecting(self, eager: Run) -> Path:
        """Set up the state of torch's bisector where the program finds it. Raises UsageError."""
        import torch

        version = eager.info.versions.get("torch", "")
        if version != torch.__version__:
            raise UsageError(
                "--bisect-pass works through files that torch's bisector writes here and reads "
                f"there: the program has torch {version}, "
                f"this whence torch {torch.__version__}; run whence with the program's Python"
            )
        # The bisector removes its whole folder when it begins; the compiled headers in the cache
        # are kept for its next run.
        (self._cache / "bisect").unlink(missing_ok=True)
        (self._cache / "bisect").symlink_to(self._state / "bisect")
        return self._state


class TorchModel(_OfTorch):
    """A model of this process, created or copied for each rung."""

    def __init__(
        self, model: Any, inputs: Any, compile_options: Mapping[str, Any], seed: int
    ) -> None:
        torch = extras.needed("torch", "a ladder")
        options = set(inspect.signature(torch.compile).parameters) - {"model", "backend", "disable"}
        if unknown := set(compile_options) - options:
            raise UsageError(
                f"unknown option {min(unknown)!r}; torch.compile takes "
                f"{', '.join(sorted(options))} here"
            )
        if not callable(model):
            raise UsageError(
                f"whence.ladder takes a torch.nn.Module or a function, not a {type(model).__name__}"
            )
        self._model, self._inputs, self._compile_options, self._seed = (
            model,
            inputs,
            dict(compile_options),
            seed,
        )
        self._compiled: dict[str, Compiled] = {}
        self._makes = not isinstance(model, torch.nn.Module) and _takes_nothing(model)
        self.words = getattr(model, "__name__", type(model).__name__)

    @contextlib.contextmanager
    def ready(self, place: Path) -> Iterator[None]:
        import torch
        from torch._inductor import utils

        fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
        with fresh(), torch.random.fork_rng():
            try:
                yield
            finally:
                torch._dynamo.reset()

    def capture(
        self,
        path: Path,
        rung: str,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> float:
        from unittest import mock

        import torch

        from whence.instrument.torch.compiled.stages import Rung
        from whence.workflows.doctor import caller
        from whence.workflows.rerun import Program

        torch._dynamo.reset()
        torch.manual_seed(self._seed)
        around = Rung(rung)
        around.install()
        try:
            with mock.patch.dict(os.environ, environment or {}):
                model = self._made()
                return Program(model, caller(self._inputs)).capture(path, **options)
        finally:
            self._compiled[str(path)] = around.remove()

    def compiled(self, run: Run) -> Sequence[Compiled]:
        """What this process compiled."""
        return [self._compiled[run.path]]

    def _made(self) -> Any:
        """The model for this rung: created or copied, and compiled unless it is compiled
        already.
        """
        import torch

        from whence.instrument.torch.compiled.stages import SHELL, Function

        if self._makes:
            model = self._model()
        else:
            plain = getattr(
                self._model,
                "_orig_mod",
                getattr(self._model, "_torchdynamo_orig_callable", self._model),
            )
            model = copy.deepcopy(plain)
        if hasattr(model, SHELL):
            return getattr(model, SHELL)
        if not isinstance(model, torch.nn.Module):
            model = Function(model)
        if type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None:
            return model
        return torch.compile(model, **self._compile_options)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _facts(compiled: Sequence[Compiled]) -> dict[str, Any]:
    return {
        "backends": tuple(dict.fromkeys(b for c in compiled for b in c.backends)),
        "graphs": sum(c.graphs for c in compiled),
        "breaks": sum(c.breaks for c in compiled),
    }


def _no_pass(rungs: Sequence[Rung]) -> Pass | None:
    """A result that names no pass, when the backend of the program gives right results without
    dynamic shapes or caches; None otherwise.
    """
    right = next((r for r in rungs if r.name in (_STATIC, _UNCACHED) and r.verdict in FINE), None)
    if right is None:
        return None
    return Pass("", why=f"no pass: {right.name} has them all, and is within the noise")


def _answers(rungs: Sequence[Rung]) -> dict[str, bool]:
    """Verdicts for backends that torch's bisector need not run again.

    The bisector's backend "eager" is the rung dynamo, which is fine whenever the next rung is.
    Rungs that could not be judged count as right.
    """
    answers = {
        r.name: r.verdict != RungKind.OUTSIDE
        for r in rungs[1:]
        if r.name not in (_STATIC, _UNCACHED)
    }
    answers["eager"] = answers.pop("dynamo", answers["aot_eager"])
    return answers


def _bisect_passes(
    good: Callable[[Mapping[str, str]], bool | None],
    answers: Mapping[str, bool],
    state: Path | None,
    tell: Tell,
) -> Pass:
    """Run `good` until the bisector names a pass.

    good(environment): whether the program, run with these variables, agrees with eager; None
    (unknown) counts as no. answers: verdicts for backends that need no run. state: the folder of
    the bisector's files for the program; None for this process. Raises UsageError when torch has no
    bisector.
    """
    try:
        from torch._inductor.compiler_bisector import CompilerBisector
    except ImportError as error:
        raise UsageError(
            f"--bisect-pass uses torch's compiler bisector, which this torch has not ({error}); "
            "torch 2.6 has it"
        ) from error
    runs = broken = 0

    def test() -> bool:
        nonlocal runs, broken
        backend = CompilerBisector.get_backend() or ""
        subsystem = CompilerBisector.get_subsystem() or ""
        if not subsystem and backend in answers:
            return answers[backend]
        runs += 1
        tell(f"torch's bisector: {backend} {subsystem} (run {runs})")
        answer = good(_variables(CompilerBisector, backend, subsystem) if state is not None else {})
        broken += answer is None
        return answer is True

    if state is not None:
        state.mkdir(parents=True, exist_ok=True)
        CompilerBisector.in_process_cache = str(state)
    why = ""
    result = None
    with contextlib.redirect_stdout(io.StringIO()):  # it tells each of its steps
        try:
            result = CompilerBisector.do_bisect(test)
        except RuntimeError as error:
            why = f"torch's bisector gave up: {error}"
    if result is None:
        return Pass(
            "",
            runs=runs,
            broken=broken,
            why=why or "every stage is within the noise when torch's bisector compiles it",
        )
    return Pass(
        result.backend,
        result.subsystem or "",
        result.bisect_number,
        result.debug_info or "",
        runs=runs,
        broken=broken,
    )


def _variables(bisector: Any, backend: str, subsystem: str) -> dict[str, str]:
    """Variables that tell a process that it is being bisected; it reads everything else
    from files.
    """
    out = {"TORCH_BISECT_BACKEND": backend}
    if subsystem:
        out["TORCH_BISECT_SUBSYSTEM"] = subsystem
        if bisector.get_run_state(backend, subsystem) == "test_disable":
            out["TORCH_BISECT_MAX"] = "-1"
    return out


# Narrows a stage of torch.compile down to operators of the program, by runs in which only a piece
# of the traced graphs is compiled.

_LEFT_OUT_ONE_BY_ONE = 16
"""A piece with more operators is shown as it is."""


class Runs(Protocol):
    """Runs a rung with variables and options of the capture, and judges it."""

    def __call__(
        self, rung: str, environment: Mapping[str, str], /, *, level: str = ...
    ) -> Judgement: ...


class Pieces:
    """Pieces of the graphs, compiled on `rung`. compiled: what a run compiled, by process."""

    def __init__(
        self, rung: str, run: Runs, compiled: Callable[[Run], Sequence[Compiled]], tell: Tell
    ) -> None:
        self._rung, self._run, self._compiled, self._tell = rung, run, compiled, tell
        self._runs = 0

    def place(self) -> Place:
        """The smallest piece that is outside the noise when it alone is compiled."""
        whole = self._judged(0, None)
        operators = () if whole.run is None else _operators(self._compiled(whole.run))
        if not operators or whole.verdict != RungKind.OUTSIDE:
            why = (
                f"with its operators compiled as pieces of their own the program is "
                f"{whole.verdict}: it goes wrong between them, or in how a graph is entered"
            )
            return Place((), len(operators), self._runs, why)
        last = _first(0, len(operators), lambda n: self._is_outside(0, n))
        first = last - _first(0, last, lambda n: self._is_outside(last - n, last))
        without = self._without(first, last)
        piece = tuple(operators[n] for n in range(first, last) if n not in without)
        return Place(piece, len(operators), self._runs)

    def _without(self, first: int, last: int) -> tuple[int, ...]:
        """Operators between the first and the last that make no difference."""
        without: tuple[int, ...] = ()
        between = range(first + 1, last - 1) if last - first <= _LEFT_OUT_ONE_BY_ONE else range(0)
        # what runs behind the piece is left out from its end, what runs before it from its start
        for number in (*reversed(between), *between):
            if number not in without and self._is_outside(first, last, (*without, number)):
                without = (*without, number)
        # what writes in place may not run in another order: then it is wrong uncompiled too
        wrong = without and self._judged(first, last, without, "dynamo").verdict not in FINE
        return () if wrong else without

    def _is_outside(self, first: int, last: int, without: tuple[int, ...] = ()) -> bool:
        return self._judged(first, last, without).verdict == RungKind.OUTSIDE

    def _judged(
        self, first: int, last: int | None, without: tuple[int, ...] = (), rung: str = ""
    ) -> Judgement:
        from whence.instrument.torch.compiled.cuts import Cut

        self._runs += 1
        self._tell(f"compiling operators {first} to {last or 'the last'} (run {self._runs})")
        return self._run(rung or self._rung, Cut(first, last, without).variables())


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first number above `low` from which on `holds` is true, as it is of `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _operators(compiled: Sequence[Compiled]) -> tuple[GraphOperator, ...]:
    """Those of the process that compiled most."""
    return max((each.operators for each in compiled), key=len, default=())


def first_not_traced(run: Runs, compiled: Callable[[Run], Sequence[Compiled]]) -> Place:
    """The first operator of the eager program that reads what the traced graphs hold too, and whose
    result they do not compute.
    """
    from whence.instrument.torch.compiled.cuts import Cut

    traced = run("dynamo", Cut(values=True).variables()).run
    values = {value for each in (compiled(traced) if traced else ()) for value in each.values}
    eager = run("eager", {}, level="op")
    if eager.run is None or not values:
        return Place((), runs=2, why="the program fails when its operators are recorded")
    records = eager.run.records
    for call in eager.run.calls:
        hashes = {ref.slot: records[ref.record].hash for ref in call.refs}
        reads = {value for slot, value in hashes.items() if is_input(slot)}
        gives = {value for slot, value in hashes.items() if is_output(slot)}
        if call.source and reads and reads <= values and gives - values - {""}:
            return Place(
                (GraphOperator("", call.op_type, call.source, _line(call.source)),), runs=2
            )
    return Place((), runs=2, why="the traced graphs compute everything that eager operators give")


def _line(source: str) -> str:
    import linecache

    file, _, number = source.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
