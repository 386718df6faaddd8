"""What whence answers about a pair of captures, and whether that names a planted fault."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import whence
from whence import align
from whence.align.values.value_graph import is_move
from whence.comparison.programs.programs import apply_programs
from whence.records import Call, Run
from whence.results import Comparison

NODES, MODULES = 15, 6
"""How many nodes of the graph that runs, and parts of the torch model, a finding may span:
attention that is written out, with its mask, has 12 to 15 nodes."""


@dataclass(frozen=True)
class Aligned:
    """A comparison with the calls that it paired."""

    result: Comparison
    reference: Run
    target: Run

    @classmethod
    def of(cls, reference: Path, target: Path) -> Aligned:
        """Compare two captures, and align them again: a comparison keeps no aligned runs."""
        result = whence.compare(str(reference), str(target))
        runs = (whence.open_run(str(path)) for path in (reference, target))
        first, second, _ = apply_programs(*runs, ())
        alignment = align.align(first, second)
        return cls(result, alignment.reference, alignment.target)

    @property
    def replayed(self) -> float:
        """Share of the reference's calls that were judged by replay, or are bit-equal."""
        coverage = self.result.coverage
        return coverage.replayed / coverage.calls if coverage.calls else 0.0

    def nodes_replayed(self) -> float:
        """Share of the target's nodes that lie in a call that was judged by replay, or is
        bit-equal; moves (reshapes, transposes, layouts) aside.
        """
        judged = {
            v.pair for v in self.result.verdicts
            if v.evidence == "replay" or v.verdict == "identical"
        }  # fmt: skip
        pairs = self.result.plan.pairs
        calls = [self.target.calls[k] for p in judged for k in (pairs[p].target, *pairs[p].also)]
        seen = {(call.step, name) for call in calls for name in nodes_of(call)}
        run = whence.open_run(self.result.target)
        nodes = [call for call in run.calls if call.parent != -1 and not is_move(call)]
        return sum(bool({(c.step, n) for n in nodes_of(c)} & seen) for c in nodes) / len(nodes)


def nodes_of(call: Call) -> set[str]:
    """The nodes, or modules, that a call stands for."""
    return {call.scope, *call.origins}


@dataclass(frozen=True)
class Named:
    """How a planted fault was answered. first: the first finding holds the wrong node; any: some
    finding does; wrong: the first does not. span, modules: nodes of the graph and parts of the
    torch model that the first finding takes together.
    """

    status: str
    first: bool
    any: bool
    wrong: bool
    span: int
    modules: int
    words: str


def named(aligned: Aligned, outputs: Collection[str], module: str) -> Named:
    """Is the node that makes `outputs`, exported from `module`, named?"""
    result = aligned.result
    holding, span, parts = [], 0, 0
    for finding in result.findings:
        pair = result.plan.pairs[finding.pair] if finding.pair >= 0 else None
        calls = [aligned.target.calls[k] for k in (pair.target, *pair.also)] if pair else []
        nodes = set().union(*map(nodes_of, calls)) if calls else set()
        modules = nodes_of(aligned.reference.calls[pair.reference]) if pair else set()
        is_node = any(_is_value(name, value) for name in nodes for value in outputs)
        holding.append(is_node or module in modules)
        if len(holding) == 1:
            span = len(nodes - {call.scope for call in calls if call.origins})
            span, parts = max(span, 1), max(len(modules - {finding.name}), 1)
    words = "; ".join(f"{f.name or f.root}: {f.sentence}" for f in result.findings[:3])
    return Named(
        str(result.status),
        first=bool(holding) and holding[0] and span <= NODES and parts <= MODULES,
        any=any(holding),
        wrong=bool(holding) and not holding[0],
        span=span,
        modules=parts,
        words=words or result.headline,
    )


def _is_value(node: str, value: str) -> bool:
    """Is a call named by its first output this one? Paths are written with dots."""
    return node == value or node == value.strip("/").replace("/", ".")
