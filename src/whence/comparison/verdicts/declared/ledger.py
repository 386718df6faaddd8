"""Counts which declared differences occurred, and writes the `DECLARED` lines of the answer."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from whence import align
from whence.judge.policy import Entry, Policy, Scheme
from whence.records import Call
from whence.results import Declared, Verdict, VerdictKind

PASSES = (VerdictKind.IDENTICAL, VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED)
Schemes = tuple[Scheme, Scheme | None]
"""The schemes of weights and of activations."""


class _Statement(NamedTuple):
    call: Call
    sqnr: float | None
    words: str


class DeclarationLedger:
    """Keeps which entries of a policy were consulted, which explained an error, and where.

    leaves: (scope, operator type) of all paired leaves. wrong: scopes of calls with wrong weights.
    """

    def __init__(self, policy: Policy, leaves: Sequence[tuple[str, str]]) -> None:
        self._policy, self._leaves = policy, leaves
        self._consulted: Counter[int] = Counter()
        self._applied: Counter[int] = Counter()
        self._statements: dict[tuple[Entry | None, Schemes | None], list[_Statement]] = {}
        self.wrong: set[str] = set()

    def consult(self, *entries: Entry) -> None:
        """Note that entries cover a differing call."""
        for entry in entries:
            self._consulted[entry.number] += 1

    def apply(self, *entries: Entry) -> None:
        """Note that entries changed a replay or a limit."""
        for entry in entries:
            self._applied[entry.number] += 1

    def met(self, entry: Entry, call: Call, sqnr: float | None) -> None:
        """Note that an entry explained the error of a call."""
        self._statements.setdefault((entry, None), []).append(_Statement(call, sqnr, str(entry)))

    def undeclared(self, schemes: Schemes, call: Call, sqnr: float | None, words: str) -> None:
        """Note that a call is quantised and nothing declares it."""
        self._statements.setdefault((None, schemes), []).append(_Statement(call, sqnr, words))

    @property
    def quantised(self) -> set[int]:
        """Ids of the reference's calls of which quantisation, declared or not, explains the
        error.
        """
        return {
            statement.call.id
            for (entry, schemes), statements in self._statements.items()
            for statement in statements
            if schemes is not None or (entry is not None and entry.declare == "quantisation")
        }

    def ignored(self, entry: Entry, call: Call, verdict: Verdict) -> Verdict:
        """The verdict of a call that an entry says to ignore."""
        self.consult(entry)
        self.apply(entry)
        if verdict.verdict in PASSES:
            return verdict
        self.met(entry, call, sqnr_of(verdict.numbers.get("e_out")))
        return verdict.withdrawn(
            VerdictKind.DECLARED, f"ignored as declared; without that: {verdict.sentence}"
        )

    def summary(self) -> tuple[Declared, ...]:
        """One statement for each declaration that explained an error, and for each undeclared
        quantisation, with the worst SQNR and its place.
        """
        return tuple(
            self._stated(entry, schemes, statements)
            for (entry, schemes), statements in self._statements.items()
        )

    def _stated(
        self, entry: Entry | None, schemes: Schemes | None, statements: Sequence[_Statement]
    ) -> Declared:
        ratios = [(s.sqnr, s.call) for s in statements if s.sqnr is not None]
        sqnr, worst = min(ratios, key=lambda item: item[0]) if ratios else (None, None)
        calls = [statement.call for statement in statements]
        names = tuple(dict.fromkeys(c.module_name for c in calls))
        ops = tuple(dict.fromkeys(c.op_type for c in calls))
        snippet = (
            _snippet(schemes, self._selection(calls, names, ops)) if schemes is not None else ""
        )
        return Declared(
            statements[0].words,
            entry is not None,
            len(calls),
            names,
            ops,
            sqnr,
            worst.module_name if worst is not None else "",
            snippet,
            entry.why if entry is not None else "",
            bool(entry is not None and entry.ignore),
        )

    def _selection(self, calls: Sequence[Call], names: Sequence[str], ops: Sequence[str]) -> str:
        """The keys of a policy's entry that select these calls and no other leaf: operator types,
        if needed with a common module prefix, else the modules.
        """
        alike = [scope for scope, op in self._leaves if op in ops and scope not in self.wrong]
        if len(alike) == len(calls):
            return f"op: {_flow(ops)}"
        starred = tuple(dict.fromkeys(align.starred(n) for n in names))
        prefix = ".".join(
            part
            for part, *_ in itertools.takewhile(
                lambda parts: len(set(parts)) == 1, zip(*(n.split(".") for n in starred))
            )
        )
        pattern = f"{prefix}.*"
        if prefix and sum(fnmatch.fnmatchcase(scope, pattern) for scope in alike) == len(calls):
            return f'module: "{pattern}", op: {_flow(ops)}'
        return f"module: {_flow(starred)}, op: {_flow(ops)}"

    def notes(self) -> list[str]:
        """Notes about entries that select differing calls but apply to none of them."""
        needs = {
            "fast-gelu": "computes a GELU of another form",
            "tf32": "multiplies matrices",
            "quantisation": "is quantised",
        }
        return [
            f"policy entry {e.number} ({e}): none of the {self._consulted[e.number]} differing "
            f"calls it selects {needs[e.declare]}"
            for e in self._policy.entries
            if self._consulted[e.number] and not self._applied[e.number] and e.declare in needs
        ]


def sqnr_of(error_rel: float | None) -> float | None:
    """The SQNR in dB, 10 log10(sum r^2 / sum (r - y)^2), from ||y - r|| / ||r||; None if either sum
    is 0 or unknown.
    """
    if error_rel is None or not math.isfinite(error_rel) or error_rel <= 0:
        return None
    return -20.0 * math.log10(error_rel)


def _flow(names: Sequence[str]) -> str:
    quoted = [f'"{n}"' if not n.isidentifier() else n for n in names]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def _snippet(schemes: Schemes, selection: str) -> str:
    """A policy, as one line of YAML, that declares what was recognised."""
    weights, activations = schemes
    parts = [selection, "declare: quantisation", f"weights: {_scheme(weights)}"]
    if activations is not None:
        parts.append(f"activations: {_scheme(activations)}")
    return f"allow: [{{{', '.join(parts)}}}]"


def _scheme(scheme: Scheme) -> str:
    parts = [
        f"bits: {scheme.bits}" if scheme.format == "int" else f"format: {scheme.format}",
        f"per: {scheme.per}",
    ]
    parts += [f"mode: {scheme.mode}"] if scheme.mode else []
    parts += [f"axis: {scheme.axis}"] if scheme.axis else []
    parts += [f"group: {scheme.group}"] if scheme.group else []
    parts += ["symmetric: false"] if not scheme.symmetric else []
    parts += ["rounding: free"] if scheme.rounding == "free" else []
    return f"{{{', '.join(parts)}}}"
