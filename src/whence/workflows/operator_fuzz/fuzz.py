"""`whence ops fuzz`: tests a kernel against its reference on inputs that a test of one
shape lacks.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from whence import disk, dtypes
from whence.dtypes import Array
from whence.errors import UsageError
from whence.results.fuzz import FaultKind, Fuzzed, KernelFault
from whence.workflows.operator_fuzz import kernels, pytest_file
from whence.workflows.operator_fuzz.c_functions import Crashed, WritesOutside
from whence.workflows.operator_fuzz.forms import Extent, Form, dimensions, elements, form
from whence.workflows.operator_fuzz.kernels import Kernel
from whence.workflows.operator_fuzz.recorded import is_recorded, recorded_call
from whence.workflows.rounding import Ways, named_arrays, run_exact, run_ways
from whence.workflows.saved import storing

if TYPE_CHECKING:
    from whence.judge.band import Band


# One call of a kernel, judged by the result of its reference on the same inputs in float64.

_REFUSALS = (ValueError, TypeError, AssertionError, NotImplementedError, RuntimeError)
"""Exceptions by which code refuses an input on purpose."""


class NotValid(Exception):
    """The reference raises on these inputs, so the kernel is not tested on them."""


class Refused(Exception):
    """The kernel refuses the inputs."""


@dataclass(frozen=True)
class Fault:
    """An error of the kernel in one call.

    output, index: where it is. got, exact: the two values there. alone: for an error in a later
    call with other values, its kind when the same call is wrong as a first call too.
    """

    kind: FaultKind
    words: str
    output: str = ""
    index: tuple[int, ...] = ()
    got: float | None = None
    exact: float | None = None
    times: float | None = None
    alone: FaultKind | None = None


class Checker:
    """A kernel and its reference. arguments: non-tensor arguments of the reference, by name."""

    def __init__(self, kernel: Kernel, reference: Kernel) -> None:
        self.kernel, self.reference = kernel, reference
        self.not_repeated = 0

    def fault(
        self, inputs: Arrays, layout: str = "contiguous", *, again: bool = False
    ) -> Fault | None:
        """The error of the call on these inputs; None for none.

        again: call the kernel afterwards on other values of the same shapes, and on the first
        values again. Raises NotValid, Refused.
        """
        wanted = Wanted(self.reference, inputs)
        first, fault = self._call(inputs, layout, wanted)
        if fault is not None or not again:
            return fault
        others = {name: turned(array) for name, array in inputs.items()}
        try:
            fault = self._call(others, layout, Wanted(self.reference, others))[1]
        except (NotValid, Refused):
            fault = None
        if fault is not None:
            return _later(fault, "called next with these values turned")
        second, fault = self._call(inputs, layout, wanted)
        if fault is not None:
            return replace(_later(fault, "called again with the same values"), alone=None)
        self.not_repeated += any(
            first[name].tobytes() != array.tobytes() for name, array in second.items()
        )
        return None

    def _call(
        self, inputs: Arrays, layout: str, wanted: Wanted | None = None
    ) -> tuple[Arrays, Fault | None]:
        layout = layout if self.kernel.strided else "contiguous"
        held = {name: LaidOut(a, layout, self.kernel.is_torch) for name, a in inputs.items()}
        try:
            with np.errstate(all="ignore"):
                results = named_arrays(self.kernel.call({k: v.value for k, v in held.items()}))
        except WritesOutside as error:
            return {}, Fault(FaultKind.WRITES_OUTSIDE, str(error))
        except Crashed as error:
            return {}, Fault(FaultKind.RAISES, f"it crashes: {error}")
        except _REFUSALS as error:
            raise Refused(
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            ) from error
        except Exception as error:  # noqa: BLE001 - a crash of a kernel is what is looked for
            return {}, Fault(FaultKind.RAISES, f"it raises {type(error).__name__}: {error}")
        results = {name: np.array(array) for name, array in results.items()}
        written = [name for name, value in held.items() if value.is_written()]
        if written:
            return results, Fault(FaultKind.WRITES_INPUT, f"it changes its input {written[0]}")
        return results, wanted.fault(results) if wanted is not None else None


def _later(fault: Fault, when: str) -> Fault:
    """The same error, marked as one that shows only in a later call."""
    words = f"{when}: {fault.words}"
    return replace(fault, kind=FaultKind.KEEPS_STATE, words=words, alone=fault.kind)


class Wanted:
    """What a reference gives on some inputs: the exact result, and its ways of rounding where that
    does not answer. Raises NotValid, and UsageError for a reference that does not run in float64.
    """

    def __init__(self, reference: Kernel, inputs: Arrays) -> None:
        self._reference, self._inputs = reference, inputs
        self._given = _given(inputs, reference.is_torch)
        exact = run_exact(self._referred, self._given)
        self._exact = {name: _wide(array) for name, array in exact.items()}
        if not exact:
            self._bands()

    def fault(self, results: Arrays) -> Fault | None:
        """The worst error among the results of a kernel."""
        if len(results) == len(self._exact) == 1:
            results = dict(zip(self._exact, results.values()))
        if missing := [name for name in self._exact if name not in results]:
            return Fault(FaultKind.SHAPE, f"it gives no {missing[0] or 'result'}")
        if any(not np.isfinite(_wide(a)).all() for a in self._inputs.values()):
            results = self._alike_fill(results)
        if all(_is_near(results[name], exact) for name, exact in self._exact.items()):
            return None
        faults = [_judged(name, results[name], around) for name, around in self._bands().items()]
        return next((fault for fault in faults if fault is not None), None)

    def _bands(self) -> dict[str, Band]:
        """The band of allowed values for every output."""
        try:
            ways = run_ways(self._referred, self._given, threads=False)
        except Exception as error:  # whatever a reference raises on sizes that it does not take
            raise NotValid(f"{type(error).__name__}: {error}") from error
        if set(ways.exact) != set(ways.own):
            why = "; ".join(ways.notes) or "it gives other results there"
            raise UsageError(f"{self._reference.words} does not run in float64: {why}")
        is_torch = self._reference.is_torch
        return {name: _band(name, ways, self._inputs, is_torch) for name in ways.own}

    def _referred(self, **inputs: Any) -> Any:
        with np.errstate(all="ignore"):
            return self._reference.call(inputs)

    def _alike_fill(self, results: Arrays) -> Arrays:
        """Replace non-finite results by the reference's where both are not finite.

        With infinite or NaN inputs, the kind of non-finite result depends on the formula: inf - inf
        is NaN in one formula and inf in an equivalent one.
        """
        changed = dict(results)
        for name, exact in self._exact.items():
            array = results[name]
            if array.shape == exact.shape and dtypes.of(array).is_floating:
                both = ~np.isfinite(_wide(array)) & ~np.isfinite(exact)
                changed[name] = np.where(both, exact, _wide(array)).astype(array.dtype)
        return changed


def _is_near(result: Array, exact: Any) -> bool:
    """Whether rounding of the result alone explains its distance from the exact result.

    Every band is at least as wide, so its ways need not be run.
    """
    from whence.judge.band import Band

    if result.shape != exact.shape or not dtypes.of(result).is_floating:
        return result.shape == exact.shape and bool((_wide(result) == exact).all())
    narrowest = Band(exact, np.zeros(exact.shape), 1, True, alike=True)
    placed = _for_result(narrowest, *_unit(result)).place(result)
    return placed.z <= placed.limit_z and placed.rho <= 1 and not placed.mismatches


def _wide(array: Array) -> Any:
    return array.astype(np.float64)


def _judged(name: str, result: Array, around: Band) -> Fault | None:
    from whence.judge.band import Placed

    if result.shape != around.centre.shape:
        words = f"its shape is {list(result.shape)}, of the reference {list(around.centre.shape)}"
        return Fault(FaultKind.SHAPE, words, name)
    if dtypes.of(result).is_floating:
        unit, smallest = _unit(result)
        around = _for_result(around, unit, smallest)
        placed = around.place(result)
    else:
        wrong = result.astype(np.float64) != around.centre
        for way in around.ways:
            wrong &= result.astype(np.float64) != way
        place = np.unravel_index(int(np.argmax(wrong)), wrong.shape) if wrong.any() else ()
        placed = Placed(float("inf") if wrong.any() else 0.0, index=tuple(int(i) for i in place))
    if placed.is_inside:
        return None
    got, exact = _at(result, placed.index), _at(around.centre, placed.index)
    kind = FaultKind.NOT_FINITE if placed.mismatches else FaultKind.WRONG
    what = "NaN or infinite on one side alone" if placed.mismatches else (
        f"{max(placed.z, placed.rho):.3g} times what rounding makes"
    )  # fmt: skip
    return Fault(kind, what, name, placed.index, got, exact, placed.score)


def _at(array: Array, index: tuple[int, ...]) -> float:
    return float(array[index]) if index or array.ndim == 0 else float(array.reshape(-1)[0])


def _unit(result: Array) -> tuple[float, float]:
    """(unit roundoff, magnitude below which numbers may be flushed to zero) of a result's dtype."""
    kind = dtypes.of(result)
    import ml_dtypes

    info = ml_dtypes.finfo(result.dtype)
    # float16 is usually not flushed to zero, and its smallest normal number is fairly large
    smallest = info.smallest_subnormal if kind.bits <= 16 and kind.name == "float16" else info.tiny
    return float(kind.unit_roundoff or 0.0), float(smallest)


def _for_result(around: Band, unit: float, smallest: float) -> Band:
    """Widen the band by the rounding of the result to its dtype."""
    size = np.where(np.isfinite(around.centre), np.abs(around.centre), 0.0)
    wider = np.maximum(around.deviation, unit * size + smallest)
    return replace(around, deviation=wider)


def _band(name: str, ways: Ways, inputs: Arrays, is_torch: bool) -> Band:
    from whence.judge.band import band, with_sums

    own, exact = ways.own[name], ways.exact[name]
    kind = dtypes.of(own)
    rows = [
        own,
        *(w[name] for w in ways.others.values() if w.get(name, own[:0]).shape == own.shape),
    ]
    if not kind.is_floating:
        return band(exact, rows, 0.0, alike=True)
    unit, smallest = _unit(own)
    around = band(exact, rows, unit, smallest=smallest, alike=True)
    with np.errstate(all="ignore"):
        offs = [
            np.nan_to_num(_wide(m[name]) - _wide(exact), nan=0.0, posinf=0.0, neginf=0.0)
            for m in ways.moved
        ]
    moved = np.sqrt(np.mean(np.square(offs), axis=0)) if offs else np.zeros(exact.shape)
    longest = max((n for a in inputs.values() for n in a.shape), default=1)
    return with_sums(around, moved, ways.terms if is_torch else longest, kind.name)


def _given(inputs: Arrays, is_torch: bool) -> dict[str, Any]:
    if not is_torch:
        return dict(inputs)
    from whence.frameworks.torch_arrays import from_host

    return {name: from_host(np.array(array)) for name, array in inputs.items()}


def turned(array: Array) -> Array:
    """Other values with the same shapes and ranges."""
    flipped: Any = np.ascontiguousarray(np.flip(array))
    if array.dtype == np.bool_:
        flipped = np.logical_not(flipped)
    elif dtypes.of(array).is_floating:
        flipped = (-flipped).astype(array.dtype)
    return np.asarray(flipped)


def history(calls: Sequence[Arrays], checker: Checker) -> None:
    """Make calls whose results are discarded; they only leave state behind."""
    for inputs in calls:
        try:
            checker._call(inputs, "contiguous")
        except (Refused, NotValid):
            continue


# Arrays laid out in memory as a caller may have them: views into larger memory, transposed, every
# second element.


class LaidOut:
    """One input in the memory layout that the kernel receives.

    value: numpy array or torch tensor. memory: the buffer that it is a view of.
    """

    def __init__(self, array: Array, layout: str, is_torch: bool) -> None:
        self._content = array
        self._memory, self._take = _memory(array, layout)
        self._before = self._memory.copy()
        if not is_torch:
            self._held: Any = self._memory
            self.value: Any = self._take(self._memory)
            return
        from whence.frameworks.torch_arrays import from_host

        self._held = from_host(self._memory)
        self.value = _torch_view(self._held, self._memory, self._take(self._memory))

    def is_written(self) -> bool:
        """Whether the call changed the input or the memory around it."""
        return self._now().tobytes() != self._before.tobytes()

    def _now(self) -> Array:
        if isinstance(self._held, np.ndarray):
            return self._held
        from whence.frameworks.torch_arrays import to_host

        return to_host(self._held)


def _memory(array: Array, layout: str) -> tuple[Array, Any]:
    """(memory that contains the array, index that takes the array from it)."""
    last = array.shape[-1] if array.ndim else 0
    if layout == "offset":
        memory = np.ones(array.size + 1, array.dtype)
        memory[1:] = array.reshape(-1)
        return memory, lambda m: m[1:].reshape(array.shape)
    if layout == "transposed" and array.ndim > 1:
        return np.ascontiguousarray(array.swapaxes(-1, -2)), lambda m: m.swapaxes(-1, -2)
    if layout == "rows apart" and array.ndim > 1:
        memory = np.ones((*array.shape[:-1], last + 3), array.dtype)
        memory[..., :last] = array
        return memory, lambda m: m[..., :last]
    if layout == "every second" and array.ndim:
        memory = np.ones((*array.shape[:-1], 2 * last), array.dtype)
        memory[..., ::2] = array
        return memory, lambda m: m[..., ::2]
    if layout == "one row repeated" and array.ndim > 1 and array.shape[0]:
        memory = np.ascontiguousarray(array[:1])
        return memory, lambda m: np.broadcast_to(m, array.shape)
    return np.array(array, order="C"), lambda m: m


def _torch_view(held: Any, memory: Array, view: Array) -> Any:
    """The view of a tensor that corresponds to a numpy view; torch counts strides in elements,
    numpy in bytes.
    """
    if memory.size == 0 or view.size == 0:
        return held.new_empty(view.shape)
    size = memory.itemsize
    start = (view.ctypes.data - memory.ctypes.data) // size
    return held.as_strided(view.shape, [s // size for s in view.strides], start)


CASES = 160
_AGAIN = 4096
"""A case with at most this many elements is called three times, with other values in between."""


class Trials(TypedDict, total=False):
    """Limits of a search. cases: most cases to try. tests: folder for a pytest file of
    each fault.
    """

    cases: int
    tests: str | Path | None


@dataclass
class _Failing:
    """Cases that fail in one way: the first case, its fault, and how many cases there are."""

    case: Case
    fault: Fault
    before: Case | None
    count: int = 1


@dataclass
class _Count:
    cases: int = 0
    skipped: int = 0
    refused: int = 0
    refusal: str = ""
    failing: dict[FaultKind, _Failing] = field(default_factory=dict)


def fuzz(
    kernel: str | Callable[..., Any],
    reference: str | Callable[..., Any] = "",
    inputs: Sequence[str] = (),
    *,
    arguments: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    order: str = "",
    without: Sequence[str] = (),
    **trials: Unpack[Trials],
) -> Fuzzed:
    """Try a kernel on about 160 inputs against its reference in float64.

    kernel: "module:function" (of torch, numba, numpy), "library.so:function", "file.onnx",
    "run:call" for the program of a recorded module or operator, or the function. reference: the
    same, of any dtype; of an ONNX file or a recorded call it may be left out. inputs: of each
    tensor in order its form, as "x: float32[rows, cols]"; equal names are equal sizes; where a
    recorded call is given, they are its own, and dtypes vary too.
    arguments: further ones, by name. outputs: forms of what a function of C writes. order: of its
    parameters, as "x, y, rows:i32". without: kinds of values that it need not take ("nan", ...).
    trials: as `Trials` has them. Raises UsageError, StoreFailed.
    """
    if unknown := set(without) - set(VALUES):
        raise UsageError(f"no values are called {min(unknown)!r}; known: {', '.join(VALUES)}")
    forms = [form(text) for text in inputs]
    signature, checker = _prepared(kernel, reference, forms, arguments or {}, outputs, order)
    count, seen = _Count(), None
    for case in plan(signature.inputs, trials.get("cases", CASES), without, signature.sizes):
        _tried(checker, signature, case, count, seen)
        seen = case
    if not count.cases and count.refused:
        raise UsageError(f"{checker.kernel.words} refuses every input: {count.refusal}")
    call = {
        "kernel": kernel if isinstance(kernel, str) else "",
        "reference": checker.reference.words if reference or signature.sizes else "",
        "arguments": dict(arguments or {}),
        "forms": list(inputs),
        "outputs": list(outputs),
        "order": order,
    }
    tests = trials.get("tests")
    if tests and not call["kernel"]:
        raise UsageError("a test names the kernel: give it as module:function")
    faults = [
        _smallest(checker, signature, failing, call, Path(tests) if tests else None, number)
        for number, failing in enumerate(_settled(count.failing, signature, call), 1)
    ]
    return Fuzzed(
        checker.kernel.words,
        checker.reference.words,
        tuple(faults),
        count.cases,
        count.skipped,
        count.refused,
        count.refusal,
        checker.not_repeated,
    )


def check_kernel(
    kernel: str, reference: str, inputs: Mapping[str, Any], **call: Any
) -> Fault | None:
    """What is wrong with a kernel on the inputs of a pytest file; None for nothing. call: as the
    file gives it. Raises UsageError.
    """
    names = [form(text) for text in call.get("forms", ())]
    _, checker = _prepared(
        kernel,
        reference,
        names or [_form_of(k, v) for k, v in inputs.items()],
        call.get("arguments", {}),
        call.get("outputs", ()),
        call.get("order", ""),
    )
    history([pytest_file.read(before) for before in call.get("before", ())], checker)
    layout = call.get("layout", "contiguous")
    return checker.fault(pytest_file.read(inputs), layout, again=not call.get("once"))


def _form_of(name: str, value: Any) -> Form:
    return Form(name, value[0], tuple(map(Extent, value[1])))


def _prepared(
    kernel: Any, reference: Any, inputs: Sequence[Form], arguments: Mapping[str, Any],
    outputs: Sequence[str], order: str,
) -> tuple[kernels.Signature, Checker]:  # fmt: skip
    is_onnx = isinstance(kernel, str) and kernel.endswith(".onnx")
    taken = tuple(inputs)
    sizes: Mapping[str, int] = {}
    run_again = [words for words in (reference, kernel) if is_recorded(words)]
    if not taken and is_onnx:
        taken = kernels.onnx_forms(kernel)
    elif not taken and run_again:
        call = recorded_call(run_again[0])
        taken, sizes = call.inputs, call.sizes
    if not taken:
        raise UsageError("say what the kernel takes (--input 'x: float32[rows, cols]')")
    reference = reference or ("" if is_onnx else "".join(run_again))
    parameters = tuple(part.strip() for part in order.split(",") if part.strip())
    signature = kernels.Signature(taken, tuple(map(form, outputs)), arguments, parameters, sizes)
    if not reference and not is_onnx:
        raise UsageError("give the reference that the kernel is compared with")
    right = _kernel(reference, signature) if reference else kernels.onnx_reference(kernel)
    return signature, Checker(_kernel(kernel, signature), right)


def _kernel(words: Any, signature: kernels.Signature) -> Kernel:
    if is_recorded(words):
        return recorded_call(words).kernel()
    return kernels.kernel(words, signature)


def _tried(
    checker: Checker, signature: kernels.Signature, case: Case, count: _Count, before: Case | None
) -> None:
    inputs = arrays(signature.inputs, case)
    is_small = max((a.size for a in inputs.values()), default=0) <= _AGAIN
    try:
        fault = checker.fault(inputs, case.layout, again=is_small)
    except NotValid:
        count.skipped += 1
        return
    except Refused as error:
        count.refused += 1
        count.refusal = count.refusal or f"{case}: {error}"
        return
    count.cases += 1
    if fault is None:
        return
    known = count.failing.get(fault.kind)
    if known is None:
        count.failing[fault.kind] = _Failing(case, fault, before)
    else:
        known.count += 1


def _settled(
    failing: Mapping[FaultKind, _Failing], signature: kernels.Signature, call: Mapping[str, Any]
) -> list[_Failing]:
    """The faults to report.

    A fault of a later call is not one of kept state when a fresh process shows it in a first call
    too.
    """
    later = failing.get(FaultKind.KEEPS_STATE)
    if later is None or later.fault.alone is None or not call["kernel"]:
        return list(failing.values())
    inputs = arrays(signature.inputs, later.case)
    others = {name: turned(array) for name, array in inputs.items()}
    with tempfile.TemporaryDirectory(prefix="whence-fuzz-") as folder:
        path = Path(folder, "test_alone.py")
        _write(path, "test_alone", {**call, "once": True}, others, "Is it wrong alone?")
        if not _fails(path):
            return list(failing.values())
    rest = [f for kind, f in failing.items() if kind != FaultKind.KEEPS_STATE]
    return rest or [replace(later, fault=replace(later.fault, kind=later.fault.alone))]


def _smallest(
    checker: Checker, signature: kernels.Signature, failing: _Failing, call: Mapping[str, Any],
    tests: Path | None, number: int,
) -> KernelFault:  # fmt: skip
    """The fault on the smallest input that still shows it, with its test written."""

    def fault_of(inputs: Mapping[str, Array], layout: str) -> Fault | None:
        try:
            return checker.fault(dict(inputs), layout, again=True)
        except (NotValid, Refused):
            return None

    def fails(inputs: Mapping[str, Array], layout: str) -> bool:
        there = fault_of(inputs, layout)
        return there is not None and failing.fault.kind in (there.kind, there.alone)

    case = smallest_case(failing.case, lambda c: fails(arrays(signature.inputs, c), c.layout))
    inputs = arrays(signature.inputs, case)
    fault = failing.fault
    if fails(inputs, case.layout):
        inputs = with_fewer_values(inputs, lambda i: fails(i, case.layout))
        fault = fault_of(inputs, case.layout) or fault
    test = ""
    if tests is not None:
        earlier = arrays(signature.inputs, failing.before) if failing.before is not None else None
        test = _test(tests, number, case, inputs, fault, call, earlier)
    return KernelFault(
        failing.fault.kind, str(case), str(failing.case), failing.count, fault.words, fault.output,
        fault.index, fault.got, fault.exact, test,
    )  # fmt: skip


def _test(
    folder: Path, number: int, case: Case, inputs: Mapping[str, Array], fault: Fault,
    call: Mapping[str, Any], earlier: Mapping[str, Array] | None,
) -> str:  # fmt: skip
    """Write the test and check that it fails in a fresh process.

    The test includes the preceding call when the fault needs the state that it leaves.
    """
    name = pytest_file.test_name(str(call["kernel"]), fault.kind, number)
    title = f"{call['kernel']} against {call['reference']}: {fault.words} ({case})."
    path = folder / f"{name}.py"
    how = {**call, "layout": case.layout if case.layout != "contiguous" else ""}
    _write(path, name, how, inputs, title)
    if _fails(path) or earlier is None:
        return str(path)
    before = {k: (str(a.dtype), a.shape, a.reshape(-1).tolist()) for k, a in earlier.items()}
    _write(path, name, {**how, "before": [before]}, inputs, title)
    return str(path)


def _write(
    path: Path, name: str, call: Mapping[str, Any], inputs: Mapping[str, Array], title: str
) -> None:
    text, kept = pytest_file.written(name, call, inputs, title)
    with storing(f"write {path}"):
        disk.make_folders(path.parent)
        disk.write_file(path, text)
        if kept:
            with disk.whole_file(path.with_suffix(".npz")) as file:
                np.savez(file, allow_pickle=False, **kept)


def _fails(path: Path) -> bool:
    """Whether the test fails in a fresh process with the module search path of this one."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(words, capture_output=True, check=False, env=environment)
    return done.returncode == 1


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments that are written as name=value, values as JSON has them. Raises UsageError."""
    values: dict[str, Any] = {}
    for text in arguments:
        name, is_there, value = text.partition("=")
        if not is_there or not name.isidentifier():
            raise UsageError(f"an argument is written name=value, not {text!r}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


# The smallest input on which a kernel is still wrong in the same way.

Arrays = dict[str, Array]
_MOST_TRIES = 120


class Budget:
    """Asks `fails` (does a case still fail in the same way?) a bounded number of times, with a
    cache.
    """

    def __init__(self, fails: Callable[[Case], bool], tries: int = _MOST_TRIES) -> None:
        self._fails, self._left = fails, tries
        self._known: dict[Case, bool] = {}

    def fails(self, case: Case) -> bool:
        """Whether the case still fails; False once the budget is used up."""
        if case not in self._known:
            if self._left <= 0:
                return False
            self._left -= 1
            self._known[case] = self._fails(case)
        return self._known[case]


def smallest_case(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The failing case reduced to the plainest layout and values and to the smallest sizes."""
    budget = Budget(fails)
    if case.dtype and budget.fails(plain := replace(case, dtype="")):
        case = plain
    for simpler in _simpler(case):
        if budget.fails(simpler):
            case = simpler
            break
    if case.layout != "contiguous" and budget.fails(plain := replace(case, layout="contiguous")):
        case = plain
    is_moving = True
    while is_moving:
        is_moving = False
        for name, size in case.sizes:
            least = _least(case, name, budget)
            if least < size:
                case, is_moving = case.with_size(name, least), True
    return case


def _simpler(case: Case) -> Iterator[Case]:
    for values in SIMPLEST:
        if values == case.values:
            return
        yield replace(case, values=values, layout="contiguous")
        yield replace(case, values=values)


def _least(case: Case, name: str, budget: Budget) -> int:
    """The smallest failing size of a dimension, as far as small numbers and halving find it."""
    size = case.size_of[name]
    for small in range(min(size, 4)):
        if budget.fails(case.with_size(name, small)):
            return small
    low, high = min(size, 4) - 1, size  # passes at low, fails at high
    while high - low > 1:
        middle = (low + high) // 2
        is_failing = budget.fails(case.with_size(name, middle))
        low, high = (low, middle) if is_failing else (middle, high)
    return high


def with_fewer_values(inputs: Arrays, fails: Callable[[Arrays], bool], tries: int = 40) -> Arrays:
    """The inputs with as many elements as possible set to 0, or to a small whole number."""
    for name, array in inputs.items():
        if not dtypes.of(array).is_floating or array.size < 2:
            continue
        rounded = np.where(np.isfinite(array.astype(np.float64)), np.rint(array), array)
        candidate = inputs | {name: rounded.astype(array.dtype)}
        if tries > 0 and fails(candidate):
            inputs = candidate
        block, tries = inputs[name].size // 2, tries - 1
        while block >= 1 and tries > 0:
            for start in range(0, array.size, block):
                if tries <= 0:
                    break
                candidate = inputs | {name: _zeroed(inputs[name], start, block)}
                if candidate[name].tobytes() != inputs[name].tobytes():
                    tries -= 1
                    inputs = candidate if fails(candidate) else inputs
            block //= 2
    return inputs


def _zeroed(array: Array, start: int, count: int) -> Array:
    flat = array.reshape(-1).copy()
    flat[start : start + count] = 0
    return flat.reshape(array.shape)


# The cases that a kernel is tried on: sizes of its dimensions, values, and layouts in memory.

SIZES = (
    0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65, 127, 128, 129, 251, 255, 256,
    257, 511, 512, 513, 1000, 1023, 1024, 1025, 2048, 2049, 4099,
)  # fmt: skip
"""Sizes to try: 0, 1, edges of tiles and vectors, and primes."""
MOST_ELEMENTS = 1 << 16
_BASE = (3, 37, 5, 2)
"""Sizes of the other dimensions while one is varied: multiples of no tile or vector width."""
_DTYPES = ("", "", "", "bfloat16", "", "float16")
"""Dtypes of a recorded call, in turn; "" is its own."""
LAYOUTS = ("contiguous", "offset", "transposed", "rows apart", "every second", "one row repeated")


@dataclass(frozen=True)
class Case:
    """One call to try. sizes: by dimension. values: a key of VALUES. layout: one of LAYOUTS. dtype:
    of floating inputs, "" for the declared ones.
    """

    sizes: tuple[tuple[str, int], ...]
    values: str = "ordinary"
    layout: str = "contiguous"
    seed: int = 0
    dtype: str = ""

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
        words += [self.dtype] if self.dtype else []
        return ", ".join(words)


def plan(
    forms: Sequence[Form],
    count: int,
    without: Sequence[str] = (),
    recorded: Mapping[str, int] | None = None,
) -> Iterator[Case]:
    """Cases in the order in which they are tried.

    First every kind of values, every layout and every size of each dimension, then random
    combinations. recorded: sizes to vary around; then every third case has another dtype.
    """
    names = dimensions(forms)
    base = Case(tuple(zip(names, itertools.cycle(_BASE))))
    if recorded and _fits(forms, sized := Case(tuple((n, recorded[n]) for n in names))):
        base = sized
    kinds = [kind for kind in VALUES if kind not in without]
    cases = [replace(base, values=kind, seed=n) for n, kind in enumerate(kinds)]
    wide = base.with_size(names[-1], 64) if names else base
    cases += [replace(base, layout=layout, seed=n) for n, layout in enumerate(LAYOUTS[1:])]
    cases += [replace(wide, layout=layout, seed=n) for n, layout in enumerate(LAYOUTS)]
    by_name = [_by_size(forms, base, name) for name in names]
    cases += [case for row in itertools.zip_longest(*by_name) for case in row if case is not None]
    random = np.random.default_rng(0)
    mixed = (_mixed(forms, base, kinds, random, n) for n in range(count - len(cases)))
    for number, case in enumerate(itertools.chain(cases[:count], mixed)):
        yield replace(case, dtype=_DTYPES[number % len(_DTYPES)]) if recorded else case


def _by_size(forms: Sequence[Form], base: Case, name: str) -> list[Case]:
    """Every size of a dimension, large and small in turn, so that state left by a call meets
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
            # only one of the inputs gets the NaN, infinities or outliers
            is_special = case.values in _ONE_INPUT
            chosen = floating[case.seed % len(floating)] if is_special else f.name
            kind = case.values if chosen == f.name else "ordinary"
            drawn[f.name] = _floats(case.dtype or f.dtype, shape, kind, random)
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
    """The cube root of the largest finite number: its square does not overflow."""
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
"""Kinds of values that a failing case is reduced to, the simplest first."""
