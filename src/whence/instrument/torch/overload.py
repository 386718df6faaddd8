"""Properties of an operator overload that every call needs, computed once."""

from __future__ import annotations

from typing import Any

from whence.frameworks.torch_schema import (
    BY_GRAD_MODE,
    STATISTICS_WRITERS,
    UNINITIALISED,
    draws,
    schema_of,
)

# In-place operators that do not look at what they write.
_OVERWRITE = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_",
    "log_normal_", "geometric_", "cauchy_", "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip
_NO_OPERATORS = ("profiler.", "debug_mode_ops.")  # marks of tools


class Overload:
    """The properties of an operator overload."""

    __slots__ = (
        "base", "by_grad_mode", "func", "implied", "key", "listed", "name", "overwritten", "plain",
        "positional", "random", "sizes", "slots", "statistics", "tool", "uninitialised", "view",
        "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        facts, schema = schema_of(func), func._schema
        self.func, self.name, self.base = func, facts.name, facts.base
        self.positional, self.view = facts.positional, facts.view
        self.key = f"/{self.name}"
        self.tool = self.name.startswith(_NO_OPERATORS)
        self.slots = {a.name: f"input.{a.name}" for a in schema.arguments}
        self.statistics = facts.base in STATISTICS_WRITERS
        self.writes = facts.writes
        out = {a.name for a in schema.arguments if a.is_out}
        blind = out | (set(facts.writes) if facts.base in _OVERWRITE else set())
        self.overwritten = frozenset(f"input.{name}" for name in blind)
        self.by_grad_mode = facts.base in BY_GRAD_MODE
        self.uninitialised = facts.base in UNINITIALISED
        # True if every result is a new tensor or a view, and nothing else is written.
        self.plain = not self.writes and not self.statistics and not self.uninitialised
        self.random = facts.random
        self.sizes = any("int" in str(a.real_type) for a in schema.arguments)
        # (argument, result) that the schema says are one tensor.
        sets = {
            a.name: set(a.alias_info.before_set)
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        }
        self.implied = {
            (f"input.{name}", f"output.{i}")
            for i, r in enumerate(schema.returns)
            if r.alias_info is not None and r.alias_info.is_write
            for name, aliases in sets.items()
            if aliases & set(r.alias_info.before_set)
        }
        self.listed = len(schema.returns) == 1 and str(schema.returns[0].real_type).startswith(
            "List"
        )

    def draws(self, named: dict[str, Any]) -> bool:
        """Whether a call with these arguments draws random numbers."""
        return self.random and draws(schema_of(self.func), named)


# By id, for the hash of an overload is a function of Python's; an `Overload` keeps it alive.
_OVERLOADS: dict[int, Overload] = {}


def overload_of(func: Any) -> Overload:
    """The properties of an overload."""
    overload = _OVERLOADS.get(id(func))
    if overload is None:
        overload = _OVERLOADS[id(func)] = Overload(func)
    return overload
