"""Runs one program of this process in several equally correct ways."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.workflows.rounding.named_values import named_arrays, named_texts

Arrays = dict[str, Array]
_DRAWS = 3
"""Number of runs with every operator, and every input, off by one rounding."""


@dataclass
class Ways:
    """The values of a program in several ways of rounding.

    own: as the program runs here. exact: in float64, {} when it cannot run in float64. others: by
    the name of the way. moved: in float64 with inputs off by one rounding, one entry a draw. terms:
    most terms that one element sums. notes: ways that could not be run, with the reason.
    """

    own: Arrays
    exact: Arrays = field(default_factory=dict)
    others: dict[str, Arrays] = field(default_factory=dict)
    moved: list[Arrays] = field(default_factory=list)
    terms: int = 1
    notes: list[str] = field(default_factory=list)


def run_ways(program: Callable[..., Any], inputs: Any, *, threads: bool = True) -> Ways:
    """Run a program unchanged, repeated, on other threads and kernels, with every operator and
    every input off by one rounding, and in float64.

    program: a function or a module; its random numbers begin where they are now in every run.
    inputs: a tuple is the positional arguments, a mapping the named ones. Arrays of numpy and
    tensors of torch are copied for each run. Raises what the program raises as it is.
    """
    runs = _Runs(program, inputs)
    ways = runs.ways
    try:
        ways.own = runs.run()
        unit = min(_roundoffs(inputs, ways.own), default=2.0**-24)
        runs.other("again")
        runs.exact()
        if "torch" in sys.modules:
            _torch_ways(runs, threads)
        for draw in range(_DRAWS):
            runs.other(f"inputs off by one rounding, {draw + 1}", change=_Shake(draw))
            how: dict[str, Any] = {"change": _Shake(draw, unit)}
            if "torch" in sys.modules:
                from whence.workflows.rounding.torch_modes import in_float64

                how |= {"scope": in_float64(), "double": True}
            if (values := runs.attempt("in float64, moved", **how)) is not None:
                ways.moved.append(values)
    finally:
        runs.state.restore()
    return ways


def run_exact(program: Callable[..., Any], inputs: Any) -> Arrays:
    """Run a program, as `run_ways` does, in float64 alone; {} when it cannot run so."""
    runs = _Runs(program, inputs)
    try:
        return runs.exact()
    finally:
        runs.state.restore()


class _Runs:
    """Runs of one program on copies of its inputs, all with the same random numbers."""

    def __init__(self, program: Callable[..., Any], inputs: Any) -> None:
        self.program, self.inputs = program, inputs
        self.state, self.ways = Generators.now(), Ways({})

    def run(
        self, scope: Any = None, change: Callable[[Any], Any] | None = None, double: bool = False
    ) -> Arrays:
        """The values of one run."""
        self.state.restore()
        called = _doubled(self.program) if double else _copied(self.program)
        args, kwargs = arguments(with_leaves(self.inputs, change or _same))
        with scope if scope is not None else contextlib.nullcontext():
            return _values(called(*args, **kwargs))

    def attempt(self, name: str, **how: Any) -> Arrays | None:
        """The values of one run; None, with a note, when it raises."""
        try:
            return self.run(**how)
        except Exception as error:  # noqa: BLE001 - whatever a user's program raises in another way
            first = (str(error).splitlines() or [""])[0][:120]
            self.ways.notes.append(f"{name}: {type(error).__name__}: {first}")
            return None

    def other(self, name: str, **how: Any) -> None:
        """Run another way and keep its values."""
        if (values := self.attempt(name, **how)) is not None:
            self.ways.others[name] = values

    def exact(self) -> Arrays:
        """Run in float64 and keep the values; {} when it cannot run so."""
        ways, how = self.ways, {"change": _widened}
        if "torch" not in sys.modules:
            ways.exact = self.attempt("in float64", **how) or {}
            return ways.exact
        from whence.workflows.rounding.torch_modes import in_float64

        with in_float64() as mode:
            ways.exact = self.attempt("in float64", double=True, **how) or {}
        ways.terms = mode.length
        if mode.is_narrow and ways.exact:
            ways.exact = {}
            ways.notes.append(
                "in float64: it writes to tensors that were made before it began, which stay as "
                "they are; make the model inside the program"
            )
        return ways.exact


def _torch_ways(runs: _Runs, threads: bool) -> None:
    import torch

    from whence.replay.stepwise import without_onednn
    from whence.workflows.rounding.torch_modes import OffByOne, on_threads

    if threads:
        runs.other("on other threads", scope=on_threads(2 if torch.get_num_threads() == 1 else 1))
    runs.other("without oneDNN", scope=without_onednn())
    for draw in range(_DRAWS):
        runs.other(f"every operator off by one rounding, {draw + 1}", scope=OffByOne(draw))


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split inputs into positional and named arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)), {}


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with a function applied to every array and tensor in it."""
    if isinstance(value, np.ndarray) or _is_tensor(value) or _is_module(value):
        return change(value)
    if isinstance(value, Mapping):
        return {key: with_leaves(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_leaves(item, change) for item in value)
    return value


@dataclass(frozen=True)
class Generators:
    """States of the generators of random numbers."""

    python: Any
    numpy: Any
    torch: Any

    @staticmethod
    def now() -> Generators:
        """The current states of this process."""
        torch = sys.modules.get("torch")
        state = torch.get_rng_state() if torch is not None else None
        return Generators(random.getstate(), np.random.get_state(), state)

    def restore(self) -> None:
        """Restore these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.torch is not None:
            sys.modules["torch"].set_rng_state(self.torch)


def generators_now() -> Generators:
    """Where the generators of random numbers of this process stand."""
    return Generators.now()


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _copied(program: Any) -> Any:
    return copy.deepcopy(program) if _is_module(program) else program


def _doubled(program: Any) -> Any:
    return copy.deepcopy(program).double() if _is_module(program) else program


def _same(leaf: Any) -> Any:
    """A copy with the same memory layout."""
    if _is_module(leaf):
        return copy.deepcopy(leaf)
    if _is_tensor(leaf):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf.copy(order="K")


def _is_float(leaf: Any) -> bool:
    if _is_module(leaf):
        return False
    if _is_tensor(leaf):
        return bool(leaf.is_floating_point())
    return dtypes.of(leaf).is_floating and not np.iscomplexobj(leaf)


def _widened(leaf: Any) -> Any:
    if _is_module(leaf):
        return copy.deepcopy(leaf).double()
    if not _is_float(leaf):
        return _same(leaf)
    if _is_tensor(leaf):
        return leaf.detach().double().clone().requires_grad_(leaf.requires_grad)
    return leaf.astype(np.float64)


class _Shake:
    """Changes every element by up to `unit` of its size.

    With a unit the result is in float64 if `is_wide`. Without one, the change is up to a unit
    roundoff of the element's dtype, in that dtype.
    """

    def __init__(self, seed: int, unit: float = 0.0, is_wide: bool = True) -> None:
        self._noise, self._unit = np.random.default_rng(seed), unit
        self._is_wide = is_wide and unit > 0

    def __call__(self, leaf: Any) -> Any:
        if _is_module(leaf) and self._is_wide:
            return _widened(leaf)
        if not _is_float(leaf):
            return _same(leaf)
        # half of the changes by at most one unit roundoff would round back to the original value
        unit = self._unit or 2 * dtypes.unit_roundoff(str(leaf.dtype).removeprefix("torch."))
        factor = 1 + unit * self._noise.uniform(-1, 1, tuple(leaf.shape))
        if not _is_tensor(leaf):
            with np.errstate(over="ignore", invalid="ignore"):
                moved = leaf.astype(np.float64) * factor
                return moved if self._is_wide else moved.astype(leaf.dtype)
        import torch

        wide = leaf.detach().double() * torch.from_numpy(np.asarray(factor))
        return wide if self._is_wide else wide.to(leaf.dtype)


def _values(result: Any) -> Arrays:
    return named_arrays(result) | dict(named_texts(result))


def _roundoffs(inputs: Any, own: Arrays) -> Iterator[float]:
    """Unit roundoffs of the dtypes in which sums may be computed; float32 is the coarsest."""
    names = [dtypes.of(array).name for array in own.values() if array.dtype.kind != "U"]

    def note(leaf: Any) -> Any:
        if _is_module(leaf):
            return leaf
        names.append(str(leaf.dtype).removeprefix("torch."))
        return leaf

    with_leaves(inputs, note)
    for name in names:
        if dtypes.is_floating(name):
            yield min(dtypes.unit_roundoff(name), 2.0**-24)


def run_once(
    program: Callable[..., Any], inputs: Any, change: Callable[[Any], Any] | None = None
) -> Arrays:
    """Run the program once with the current random numbers, whose state is restored.

    change: applied to every array of the inputs.
    """
    state = Generators.now()
    try:
        args, kwargs = arguments(with_leaves(inputs, change or _same))
        return _values(_copied(program)(*args, **kwargs))
    finally:
        state.restore()


def run_coarser(program: Callable[..., Any], inputs: Any, unit: float) -> dict[str, Arrays]:
    """Run a torch program with every operator and input off by one rounding of a coarser dtype.

    Returns the values by the name of the way.
    """
    from whence.workflows.rounding.torch_modes import OffByOne

    ways = {}
    for draw in range(2 * _DRAWS):
        with OffByOne(draw, unit):
            moved = run_once(program, inputs, _Shake(draw, unit, is_wide=False))
        ways[f"every operator off by one rounding, {draw + 1}"] = moved
    return ways
