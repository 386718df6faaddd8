"""Decides which calls, slots and ranks a capture records, from names and numbers alone; decisions
are remembered per module.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Sequence

from whence.instrument.options import CaptureOptions
from whence.instrument.step_choice.windows import holds
from whence.records.slots import is_input

Matcher = Callable[[str], bool]


def matcher(pattern: str) -> Matcher:
    """A test on whole names. pattern: shell style, case-sensitive (`*` also crosses dots), or `re:`
    with a regular expression that must match the whole name.

    The pattern was checked before (`option_values.check_pattern`).
    """
    compiled = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
    return lambda name: compiled.fullmatch(name) is not None


def any_of(patterns: Sequence[str]) -> Matcher:
    """A test that is true if any of the patterns matches; false without patterns."""
    tests = [matcher(p) for p in patterns]
    return lambda name: any(test(name) for test in tests)


def within(number: str, ids: Sequence[str], *, children: bool = True) -> bool:
    """Whether the call with tree number `number` is one of `ids` or, with children, in the subtree
    of one of them. "0" is the root of all.
    """
    if number in ids:
        return True
    return children and any(i == "0" or number.startswith(i + "_") for i in ids)


class Selector:
    """Decides for one process what is recorded in full. Decisions are cached per (scope, class,
    number).
    """

    def __init__(self, options: CaptureOptions) -> None:
        self._options = options
        self._include = [(p, matcher(p)) for p in options.include]
        self._exclude = any_of(options.exclude)
        self._classes = [(p, matcher(p)) for p in options.classes]
        self._no_inputs = any_of(options.no_inputs)
        self._print = None if options.print_pattern is None else matcher(options.print_pattern)
        self._ranges = options.ranges
        self.only: frozenset[int] | None = None
        self._answers: dict[tuple[str, str, str], bool] = {}
        self._elements: dict[tuple[str, str], bool] = {}
        self._printed: dict[str, bool] = {}
        self._everything = (
            not (options.include or options.exclude or options.classes or options.ids)
            and options.max_depth is None
        )
        self._numbered = bool(options.ids)
        self._used: set[tuple[str, str]] = set()
        self._scopes: set[str] = set()
        self._types: set[str] = set()
        self._numbers: set[str] = set()

    def wants(self, scope: str, op_type: str, depth: int, number: str, step: int) -> bool:
        """Whether this call is recorded. depth: 0 for a root call. number: its tree number. step:
        of its root.
        """
        if self._ranges and not holds(self._ranges, step):
            return False
        if self.only is not None and step not in self.only:
            return False
        if self._everything:
            return True
        # Without --ids the number cannot change the answer, and a number per call would grow the
        # table for ever.
        key = (scope, op_type, number if self._numbered else "")
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._decide(scope, op_type, depth, number)
        return answer

    def leave_steps(self) -> None:
        """Accept every step in `wants` from now on, because steps are chosen elsewhere."""
        self._ranges = ()

    def slots(self, kind: str) -> bool:
        """Whether tensors in slots of this kind ("input", "output", "mutated", "param", "grad") are
        recorded. Parameters always are.
        """
        if kind == "param" or self._options.slots == "both":
            return True
        # Tensors that a call changed in place count as its results.
        return (kind == "input") == (self._options.slots == "input")

    def rank(self, rank: int) -> bool:
        """Whether the process of this rank is captured at all."""
        return self._options.ranks is None or rank in self._options.ranks

    def elements(self, scope: str, slot: str) -> bool:
        """Whether elements of this slot may be kept. False for names in `no_inputs`, which keep
        statistics only.

        A name is a scope ("embed"), a slot ("input.input_ids"), both ("embed:input.0"), or the
        argument alone ("input_ids").
        """
        if not self._options.no_inputs:
            return True
        answer = self._elements.get((scope, slot))
        if answer is None:
            names = (
                f"{scope}:{slot}",
                slot,
                slot.partition(".")[2],
                *((scope,) if is_input(slot) else ()),
            )
            answer = self._elements[scope, slot] = not any(
                name and self._no_inputs(name) for name in names
            )
        return answer

    def prints(self, scope: str) -> bool:
        """Whether each record of this scope is printed live."""
        if self._print is None:
            return False
        answer = self._printed.get(scope)
        if answer is None:
            answer = self._printed[scope] = self._print(scope)
        return answer

    def unmatched(self) -> list[str]:
        """A sentence for every include, class or id that has matched no call so far, with the
        nearest names.
        """
        sentences = []
        for option, patterns, met, noun in (
            ("include", self._options.include, self._scopes, "module"),
            ("classes", self._options.classes, self._types, "class"),
            ("ids", self._options.ids, self._numbers, "tree number"),
        ):
            names = sorted(n for n in met if n)
            for pattern in patterns:
                if (option, pattern) in self._used:
                    continue
                close = (
                    difflib.get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3)
                    or names[:3]
                )
                plural = noun + ("es" if noun == "class" else "s")
                nearest = f"nearest: {', '.join(close)}" if close else "none was called"
                sentences.append(
                    f"{option}: {pattern!r} matched none of {len(names)} {plural}; {nearest}"
                )
        return sentences

    def _decide(self, scope: str, op_type: str, depth: int, number: str) -> bool:
        self._scopes.add(scope)
        self._types.add(op_type)
        options = self._options
        if self._numbered:
            self._numbers.add(number)
        # Every test runs, also after one failed, so that `unmatched` blames only patterns that
        # match nothing by themselves.
        included = self._mark("include", self._include, scope) or not options.include
        classed = self._mark("classes", self._classes, op_type) or not options.classes
        numbered = not options.ids
        for i in options.ids:
            if within(number, (i,), children=not options.no_children):
                self._used.add(("ids", i))
                numbered = True
        shallow = options.max_depth is None or depth <= options.max_depth
        return included and classed and numbered and shallow and not self._exclude(scope)

    def _mark(self, option: str, tests: Sequence[tuple[str, Matcher]], name: str) -> bool:
        hits = [pattern for pattern, test in tests if test(name)]
        self._used.update((option, pattern) for pattern in hits)
        return bool(hits)
