"""Bisects by the names of ONNX Runtime's optimisers: how many of them, in the order in which they
run, must be on until the program computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whence.results import Pass, Rung, RungKind
from whence.workflows.ladder.climbers import FINE

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

RunWithout = Callable[[Sequence[str]], tuple[str, str, tuple[str, ...]]]
"""Runs the rung without these optimisers -> (its verdict, the first node that differs, optimisers
that changed a graph).
"""


def first_optimizer(rung: Rung, run_without: RunWithout, tell: Callable[[str], None]) -> Pass:
    """Name the first optimiser that makes the difference. rung: the first one outside the noise,
    with the optimisers that changed a graph there.
    """
    return _Bisection(rung, run_without, tell).named()


class _Bisection:
    def __init__(self, rung: Rung, run_without: RunWithout, tell: Callable[[str], None]) -> None:
        self._rung, self._run_without, self._tell = rung, run_without, tell
        self._runs = self._broken = 0
        self._nodes: dict[int, str] = {}
        self._outside: set[int] = set()

    def named(self) -> Pass:
        """The optimiser, or why there is none."""
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
        """(the verdict with all of them off, names). What only changes a graph where others are off
        is added.
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
    """Optimisers, each that applies rules followed by the names of these."""
    names: dict[str, None] = {}
    for name in optimizers:
        names[name] = None
        if name.endswith(_OF_RULES):
            names |= dict.fromkeys(RULES)
    return list(names)
