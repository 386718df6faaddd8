"""The cases that a kernel is tried on: sizes of its dimensions, values, and layouts in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.workflows.operator_fuzz.forms import Form, dimensions, elements

SIZES = (
    0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65, 127, 128, 129, 251, 255, 256,
    257, 511, 512, 513, 1000, 1023, 1024, 1025, 2048, 2049, 4099,
)  # fmt: skip
"""Nothing and one, edges of tiles and of vectors, and primes."""
MOST_ELEMENTS = 1 << 16
_BASE = (3, 37, 5, 2)
"""Sizes of the dimensions where another one is tried: no multiple of anything."""
LAYOUTS = ("contiguous", "offset", "transposed", "rows apart", "every second", "one row repeated")


@dataclass(frozen=True)
class Case:
    """One call. sizes: by dimension. values: a key of VALUES. layout: one of LAYOUTS."""

    sizes: tuple[tuple[str, int], ...]
    values: str = "ordinary"
    layout: str = "contiguous"
    seed: int = 0

    @property
    def size_of(self) -> dict[str, int]:
        """Sizes by dimension."""
        return dict(self.sizes)

    def with_size(self, name: str, size: int) -> Case:
        """The same case with another size."""
        return replace(self, sizes=tuple({**dict(self.sizes), name: size}.items()))

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in self.sizes]
        words += [f"{self.values} values"] if self.values != "ordinary" else []
        words += [self.layout] if self.layout != "contiguous" else []
        return ", ".join(words)


def plan(forms: Sequence[Form], count: int, without: Sequence[str] = ()) -> Iterator[Case]:
    """Cases in the order in which they are tried: every kind of values, every layout, every size
    of each dimension, then mixtures drawn at random.
    """
    names = dimensions(forms)
    base = Case(tuple(zip(names, itertools.cycle(_BASE))))
    kinds = [kind for kind in VALUES if kind not in without]
    cases = [replace(base, values=kind, seed=n) for n, kind in enumerate(kinds)]
    wide = base.with_size(names[-1], 64) if names else base
    cases += [replace(base, layout=layout, seed=n) for n, layout in enumerate(LAYOUTS[1:])]
    cases += [replace(wide, layout=layout, seed=n) for n, layout in enumerate(LAYOUTS)]
    by_name = [_by_size(forms, base, name) for name in names]
    cases += [case for row in itertools.zip_longest(*by_name) for case in row if case is not None]
    yield from cases[:count]
    random = np.random.default_rng(0)
    for number in range(count - len(cases)):
        yield _mixed(forms, base, kinds, random, number)


def _by_size(forms: Sequence[Form], base: Case, name: str) -> list[Case]:
    """Every size of a dimension, from large to small and back: what a call leaves behind meets
    another size.
    """
    fitting = [c for s in SIZES if _fits(forms, c := base.with_size(name, s))]
    both = [case for pair in zip(reversed(fitting), fitting) for case in pair]
    return both[: len(fitting)]


def _mixed(
    forms: Sequence[Form], base: Case, kinds: Sequence[str], random: Any, number: int
) -> Case:
    case = replace(
        base,
        values=str(random.choice(kinds)),
        layout=str(random.choice(LAYOUTS)),
        seed=100 + number,
    )
    for name, _ in base.sizes:
        larger = case.with_size(name, int(random.choice(SIZES)))
        case = larger if _fits(forms, larger) else case
    return case


def _fits(forms: Sequence[Form], case: Case) -> bool:
    return elements(forms, case.size_of) <= MOST_ELEMENTS


def arrays(forms: Sequence[Form], case: Case) -> dict[str, Array]:
    """The inputs of a case by name, contiguous."""
    drawn: dict[str, Array] = {}
    floating = [f.name for f in forms if f.is_floating]
    for number, f in enumerate(forms):
        random = np.random.default_rng([case.seed, number])
        shape = f.shape(case.size_of)
        if f.is_floating:
            # what is no number, or stands out, is in one of the inputs
            is_special = case.values in _ONE_INPUT
            chosen = floating[case.seed % len(floating)] if is_special else f.name
            kind = case.values if chosen == f.name else "ordinary"
            drawn[f.name] = _floats(f.dtype, shape, kind, random)
        else:
            drawn[f.name] = _whole(f, shape, case, random)
        if case.layout == "one row repeated" and drawn[f.name].ndim > 1 and drawn[f.name].size:
            drawn[f.name] = np.repeat(drawn[f.name][:1], shape[0], axis=0)
    return drawn


def _floats(dtype: str, shape: tuple[int, ...], kind: str, random: Any) -> Array:
    info = dtypes.named(dtype)
    with np.errstate(over="ignore"):
        drawn: Array = VALUES[kind](random, shape, info).astype(info.numpy)
    return drawn


def _whole(form: Form, shape: tuple[int, ...], case: Case, random: Any) -> Array:
    kind = dtypes.named(form.dtype)
    if kind.kind == "bool":
        return np.asarray(random.random(shape) < 0.7)
    high = case.size_of[form.below] if form.below else 16
    if case.values == "ties":
        return np.full(shape, max(high - 1, 0), kind.numpy)
    return np.asarray(random.integers(0, max(high, 1), shape)).astype(kind.numpy)


def _reach(info: dtypes.DType) -> float:
    """A magnitude whose square is still far from the largest number."""
    return float(2.0 ** (np.log2(info.max_finite or 1.0) / 3))


def _placed(value: float) -> Callable[..., Any]:
    def draw(random: Any, shape: tuple[int, ...], info: dtypes.DType) -> Any:
        drawn = random.normal(size=shape)
        if drawn.size:
            drawn.reshape(-1)[int(random.integers(drawn.size))] = value
        return drawn

    return draw


def _filled_row(random: Any, shape: tuple[int, ...], info: dtypes.DType) -> Any:
    drawn = random.normal(size=shape)
    if drawn.ndim and drawn.size:
        drawn[-1] = -np.inf
    return drawn


def _spike(random: Any, shape: tuple[int, ...], info: dtypes.DType) -> Any:
    drawn = random.normal(size=shape)
    if drawn.size:
        drawn.reshape(-1)[-1] = min(1e4, _reach(info))
    return drawn


VALUES: Mapping[str, Callable[..., Any]] = {
    "ordinary": lambda random, shape, info: random.normal(size=shape),
    "positive": lambda random, shape, info: random.random(shape) + 0.5,
    "large": lambda random, shape, info: random.normal(size=shape) * _reach(info),
    "tiny": lambda random, shape, info: random.normal(size=shape) / _reach(info),
    "small": lambda random, shape, info: random.normal(size=shape) * 1e-3,
    "cancelling": lambda random, shape, info: random.normal(size=shape) + min(1e3, _reach(info)),
    "wide": lambda random, shape, info: (
        random.normal(size=shape) * np.exp2(random.uniform(-12, 12, shape))
    ),
    "ties": lambda random, shape, info: random.integers(-2, 3, shape).astype(float),
    "halves": lambda random, shape, info: random.integers(-8, 8, shape) + 0.5,
    "zero": lambda random, shape, info: np.zeros(shape),
    "equal": lambda random, shape, info: np.ones(shape),
    "negative": lambda random, shape, info: -5.0 - 5 * random.random(shape),
    "spike": _spike,
    "nan": _placed(np.nan),
    "inf": _placed(np.inf),
    "-inf": _placed(-np.inf),
    "row of -inf": _filled_row,
}
_ONE_INPUT = ("spike", "nan", "inf", "-inf", "row of -inf")
SIMPLEST = ("equal", "zero", "ties", "ordinary")
"""Kinds of values that a failing case is brought to, the simplest first."""
