"""Conditions on loss and gradient norm under which steps are recorded: `nan`, `loss > 10`, `norm
spike`.
"""

from __future__ import annotations

import enum
import math
import re
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from whence.errors import UsageError

RECENT = 128
"""Number of recent values that define what is usual."""
_ENOUGH = 16
_SPREADS = 10.0
_TIMES = 1.25
"""A spike exceeds the median of the recent values by _SPREADS times their median absolute
deviation, and _TIMES times the largest of them.
"""


class Quantity(enum.Enum):
    """The quantity that a condition tests. NORM: of all gradients, before clipping."""

    LOSS = "loss"
    NORM = "norm"


class Kind(enum.Enum):
    """When a condition holds. ASKED: when `whence trigger` requests it."""

    NAN = "nan"
    SPIKE = "spike"
    ABOVE = ">"
    ASKED = "asked"


class Condition(msgspec.Struct, frozen=True):
    """One condition. quantity: None for both, as far as the program computes them. limit: for
    ABOVE.
    """

    kind: Kind
    quantity: Quantity | None = None
    limit: float = math.inf


_GRAMMAR = re.compile(
    r"(?:(?P<quantity>loss|norm)\s+)?(?P<kind>nan|spike)"
    r"|(?P<alone>asked)"
    r"|(?P<of>loss|norm)\s*>\s*(?P<limit>[-+.\deE]+)"
)


def parse_condition(text: str) -> Condition:
    """Read "nan", "spike", "loss nan", "norm spike", "loss > 10", "norm > 100" or "asked". Raises
    UsageError.
    """
    match = _GRAMMAR.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(
            f"when: {text!r} is not a condition; write nan, spike (each also after loss or norm), "
            "loss > NUMBER, norm > NUMBER or asked"
        )
    if match["alone"]:
        return Condition(Kind(match["alone"]))
    if match["kind"]:
        quantity = Quantity(match["quantity"]) if match["quantity"] else None
        return Condition(Kind(match["kind"]), quantity)
    try:
        limit = float(match["limit"])
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise UsageError(f"when: {match['limit']!r} in {text!r} is not a number")
    return Condition(Kind.ABOVE, Quantity(match["of"]), limit)


class _Usual:
    """The usual values of one quantity: the limit above which a value is a spike."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._limit = math.inf
        self._new = 0

    def is_spike(self, value: float) -> bool:
        """Whether a finite value is far above the recent ones. The value is then added to these."""
        found = value > self._limit
        self._recent.append(min(value, self._limit))
        self._new += 1
        if len(self._recent) >= _ENOUGH and self._new >= len(self._recent) // _ENOUGH:
            self._limit, self._new = self._limit_now(), 0
        return found

    def _limit_now(self) -> float:
        import statistics  # which loads decimal and fractions

        median = statistics.median(self._recent)
        spread = statistics.median([abs(value - median) for value in self._recent])
        largest = max(self._recent)
        return max(median + _SPREADS * spread, largest + (_TIMES - 1) * abs(largest))


class Watcher:
    """Follows loss and norm. At the end of a step, tells which conditions began to hold in it.

    A condition that continues to hold is reported once.
    """

    def __init__(self, conditions: Iterable[Condition]) -> None:
        self._conditions = [c for c in conditions if c.kind is not Kind.ASKED]
        self._usual: dict[tuple[Quantity, int], _Usual] = {}
        self._held: set[Condition] = set()
        self._holds: dict[Condition, str] = {}
        self._places: dict[Quantity, int] = {}

    def needs(self, quantity: Quantity) -> bool:
        """Whether a condition names this quantity."""
        return any(c.quantity is quantity for c in self._conditions)

    def may_use(self, quantity: Quantity) -> bool:
        """Whether a condition may use this quantity: it names it, or names none."""
        return any(c.quantity in (None, quantity) for c in self._conditions)

    def saw(self, quantity: Quantity, value: float) -> None:
        """Add a value of this step. With several values of one quantity (micro-batches), each is
        compared with those at the same position in earlier steps.
        """
        place = self._places[quantity] = self._places.get(quantity, -1) + 1
        is_spike: bool | None = None
        for condition in self._conditions:
            if condition.quantity not in (None, quantity):
                continue
            if condition.kind is Kind.NAN:
                holds = not math.isfinite(value)
            elif condition.kind is Kind.ABOVE:
                holds = value > condition.limit
            else:
                if is_spike is None:
                    is_spike = self._is_spike(quantity, place, value)
                holds = is_spike
            if holds:
                self._holds.setdefault(condition, f"{quantity.value} is {value:g}")

    def _is_spike(self, quantity: Quantity, place: int, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self._usual.setdefault((quantity, place), _Usual()).is_spike(value)

    def step_ended(self) -> str:
        """The conditions that began to hold in this step, in words; "" for none."""
        if not self._holds and not self._held:
            self._places.clear()
            return ""
        began = [text for condition, text in self._holds.items() if condition not in self._held]
        self._held = set(self._holds)
        self._holds = {}
        self._places.clear()
        return ", ".join(dict.fromkeys(began))


def conditions_of(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Parse conditions. Raises UsageError."""
    return tuple(parse_condition(text) for text in texts)
