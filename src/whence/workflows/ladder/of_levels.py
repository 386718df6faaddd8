"""Climbs the optimisation levels of ONNX Runtime, for a command or for a model file in this
process.

To bisect, it counts ONNX Runtime's optimisers in the order in which they run and finds how many
must be on until the results change.
"""

from __future__ import annotations

import abc
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whence.errors import CaptureError, UsageError
from whence.instrument.onnxruntime.what_optimized import Optimized, of_run
from whence.instrument.rungs import RUNGS
from whence.records import Call, Run
from whence.records.marks import EngineModel
from whence.results import LadderKind, Pass, Rung, RungKind
from whence.workflows.ladder.climbers import FINE, Climber, Judge, Stairs, first_outside
from whence.workflows.notebook_progress import Tell

_OFF = RUNGS["onnxruntime"][0]
# Domains that occur in graphs written by the runtime but not by exporters.
_WRITTEN = ("com.microsoft.nchwc", "com.ms.internal.nhwc")


class _OfLevels(Climber):
    """Shared by a command and a model file."""

    stairs = Stairs(LadderKind.LEVELS, _OFF, sees_inside=True, bisects=True)

    @abc.abstractmethod
    def capture(self, path: Path, rung: str, disabled: Sequence[str] = ()) -> float:
        """Capture a run. disabled: names of optimisers to switch off."""

    def optimized(self, path: Path, run: Run) -> list[Optimized]:
        """How the sessions of a run were optimised, by process."""
        return of_run(run)

    def facts(self, path: Path, run: Run) -> dict[str, Any]:
        """The number of nodes after optimisation, and the optimisers that changed a graph."""
        names = (name for o in self.optimized(path, run) for name in o.optimizers)
        return {"nodes": nodes_of(run), "optimizers": tuple(dict.fromkeys(names))}

    def rungs(self, base: Run) -> Sequence[str]:
        """The optimisation levels that the program's release has."""
        processes = self.optimized(Path(base.path), base)
        return [r for r in (processes[0].levels if processes else ()) if r != _OFF]

    def notes(self, base: Run) -> list[str]:
        """Notes about files that were optimised before the program loaded them."""
        before = dict.fromkeys(
            name for o in self.optimized(Path(base.path), base) for name in o.ort_format
        )
        out = [
            f"{name} is in ONNX Runtime's own format: what optimised it when it was written is "
            "part of it, and no rung undoes that; climb with the .onnx file it was made of"
            for name in before
        ]
        return out + [
            f"{name} was written by ONNX Runtime after optimising it: rung {_OFF} does not undo "
            "that; climb with the file it was made of"
            for name in _written_by_the_runtime(base)
        ]

    def bisect(self, rungs: Sequence[Rung], base: Run, judge: Judge, tell: Tell) -> Pass | None:
        """Find the first optimiser that makes the difference."""
        rung = first_outside(rungs)
        if rung is None:
            return None

        def run_without(disabled: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
            judged = judge(lambda path: self.capture(path, rung.name, disabled))
            found = () if judged.run is None else self._names(judged.run)
            return judged.verdict, judged.node, found

        return first_optimizer(rung, run_without, tell)

    def _names(self, run: Run) -> tuple[str, ...]:
        return tuple(self.facts(Path(run.path), run)["optimizers"])


class LevelsCommand(_OfLevels):
    """A command; every session that it creates gets the level of the rung."""

    def __init__(self, command: Sequence[str], options: Mapping[str, Any]) -> None:
        from whence.workflows.rerun import Command

        self._subject, self._options = Command(command), dict(options)
        self.words = self._subject.words

    def capture(self, path: Path, rung: str, disabled: Sequence[str] = ()) -> float:
        """Run the command on a rung."""
        return self._subject.capture(
            path, rung=rung, disabled_optimizers=tuple(disabled), **self._options
        )

    def nothing(self, rungs: Sequence[Rung]) -> str:
        """The reason to stop: the command creates no session."""
        if rungs[-1].name == _OFF and not rungs[-1].nodes:
            return (
                "the program runs no graph of ONNX Runtime whose inside is seen, so there is no "
                "level to try"
            )
        return ""


class LevelsModel(_OfLevels):
    """A model file, bytes or a session of this process; each rung creates a session from it.

    feeds: inputs, one dict for each step. options: of InferenceSession.
    """

    def __init__(
        self,
        model: Any,
        feeds: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        seed: int,
    ) -> None:
        self._feeds, self._options, self._seed = list(feeds), dict(options), seed
        self._source = model
        if not isinstance(model, (str, os.PathLike, bytes)):  # a session
            if options:
                raise UsageError(
                    f"unknown option {min(options)!r}: a session is made again with its own "
                    "options; give the model file with others"
                )
            self._source = model._model_path or model._model_bytes
            stated = model.get_provider_options()
            names = model.get_providers()
            self._options = {
                "sess_options": model.get_session_options(),
                "providers": names,
                "provider_options": [stated.get(name) or {} for name in names],
            }
        is_file = isinstance(self._source, (str, os.PathLike))
        if is_file and not Path(self._source).is_file():
            raise UsageError(f"there is no model file {os.fspath(self._source)}")
        self.words = os.fspath(self._source) if is_file else "the model given as bytes"
        self._optimized: dict[Path, Optimized] = {}

    def capture(self, path: Path, rung: str, disabled: Sequence[str] = ()) -> float:
        """Make a session on a rung, and run it."""
        from onnxruntime import InferenceSession

        from whence.instrument.onnxruntime.levels import made
        from whence.workflows.capture.capture import capture

        began = time.monotonic()
        try:
            session, self._optimized[path] = made(
                lambda: InferenceSession(self._source, **self._options), rung, disabled
            )
            with capture(session, path, seed=self._seed):
                for feeds in self._feeds:
                    session.run(None, dict(feeds))
        except Exception as error:  # what the runtime raises has many types
            shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, UsageError):
                raise
            raise CaptureError(
                f"{self.words} cannot be run on rung {rung}: {type(error).__name__}: {error}"
            ) from error
        return time.monotonic() - began

    def optimized(self, path: Path, run: Run) -> list[Optimized]:
        """How the session of a run was optimised."""
        return [self._optimized[path]]


def sessions_of(run: Run) -> list[Call]:
    """Calls of ONNX Runtime sessions in a run."""
    return [call for call in run.calls if call.op_type == EngineModel.ONNX_RUNTIME]


def nodes_of(run: Run) -> int:
    """Number of nodes that the graphs of sessions ran in their first step."""
    roots = {call.id for call in sessions_of(run) if call.step == 0}
    return sum(call.parent in roots for call in run.calls)


def settings_of(run: Run) -> list[dict[str, Any]]:
    """The facts that a capture recorded for each session."""
    return [json.loads(note.text) for note in run.notes if note.kind == "settings"]


def _written_by_the_runtime(run: Run) -> list[str]:
    written = [
        f for f in settings_of(run) if any(domain in f.get("opset", ()) for domain in _WRITTEN)
    ]
    return list(dict.fromkeys(str(f.get("model", "")) for f in written))


RULES = (
    "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout",
    "ExpandElimination", "CastElimination", "CastChainElimination", "PreShapeNodeElimination",
    "ShapeToInitializer", "NoopElimination", "DivMulFusion", "FuseReluClip", "GemmSumFusion",
    "GemmTransposeFusion", "NotWhereFusion", "ConvAddFusion", "ConvMulFusion", "ConvBNFusion",
    "Pad_Fusion", "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion", "ClipQuantRewrite",
    "ReluQuantRewrite",
)  # fmt: skip
"""Rewrite rules of any release, which one transformer applies, and which are switched off by names
of their own. The log names the transformer alone.
"""
_OF_RULES = "_RuleBasedTransformer"

_RunWithout = Callable[[Sequence[str]], tuple[str, str, tuple[str, ...]]]
"""Runs the rung without these optimisers -> (its verdict, the first node that differs, optimisers
that changed a graph).
"""


def first_optimizer(rung: Rung, run_without: _RunWithout, tell: Tell) -> Pass:
    """Find the first optimiser that makes the difference.

    rung: the first one outside the noise, with the optimisers that changed a graph there.
    """
    return _Bisection(rung, run_without, tell).named()


class _Bisection:
    def __init__(self, rung: Rung, run_without: _RunWithout, tell: Tell) -> None:
        self._rung, self._run_without, self._tell = rung, run_without, tell
        self._runs = self._broken = 0
        self._nodes: dict[int, str] = {}
        self._outside: set[int] = set()

    def named(self) -> Pass:
        """The optimiser, or the reason why there is none."""
        names = with_rules(self._rung.optimizers)
        if not names:
            return self._pass("", why="the log of this release names no optimiser that did a thing")
        verdict, names = self._without_all(names)
        if verdict not in FINE:
            every = f"with all {len(names)} optimisers off that changed a graph"
            return self._pass(
                "",
                why=f"no optimiser by name: {every}, {self._rung.name} is {verdict} all the same",
            )
        fine, bad = 0, len(names)
        self._nodes[bad], self._outside = self._rung.node, {bad}
        while bad - fine > 1:
            middle = (fine + bad) // 2
            self._tell(f"{self._rung.name} with {middle} of {len(names)} optimisers")
            if self._try(names[middle:], middle) in FINE:
                fine = middle
            else:
                bad = middle
        name = names[bad - 1]
        if bad not in self._outside:
            why = f"with {name} and those before it on, it could not be run or decided"
            return self._pass(name, why=why)
        self._tell(f"{self._rung.name} without {name}")
        return self._pass(name, node=self._nodes[bad], alone=self._try([name], -1))

    def _without_all(self, names: list[str]) -> tuple[str, list[str]]:
        """(verdict with all named optimisers off, names).

        Optimisers that change a graph only while others are off are added to the names.
        """
        while True:
            self._tell(f"{self._rung.name} without {len(names)} optimisers")
            self._runs += 1
            verdict, _, found = self._run_without(names)
            new = [name for name in with_rules(found) if name not in names]
            if verdict in FINE or not new:
                self._broken += verdict not in (*FINE, RungKind.OUTSIDE)
                return verdict, names
            names = [*names, *new]

    def _try(self, disabled: Sequence[str], place: int) -> str:
        self._runs += 1
        verdict, node, _ = self._run_without(disabled)
        if verdict == RungKind.OUTSIDE:
            self._outside.add(place)
            self._nodes[place] = node
        elif verdict not in FINE:
            self._broken += 1
        return verdict

    def _pass(self, name: str, *, node: str = "", alone: str = "", why: str = "") -> Pass:
        return Pass(
            "onnxruntime" if name else "",
            self._rung.name if name else "",
            info=name,
            node=node,
            alone=alone,
            runs=self._runs,
            broken=self._broken,
            why=why,
        )


def with_rules(optimizers: Sequence[str]) -> list[str]:
    """Expand optimisers: one that applies rewrite rules is followed by the names of its rules."""
    names: dict[str, None] = {}
    for name in optimizers:
        names[name] = None
        if name.endswith(_OF_RULES):
            names |= dict.fromkeys(RULES)
    return list(names)
