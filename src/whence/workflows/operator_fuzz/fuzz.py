"""`whence ops fuzz`: a kernel against its reference on inputs that no test of one shape has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from whence import disk
from whence.dtypes import Array
from whence.errors import UsageError
from whence.results.fuzz import FaultKind, Fuzzed, KernelFault
from whence.workflows.operator_fuzz import kernels, pytest_file
from whence.workflows.operator_fuzz.checks import Checker, Fault, NotValid, Refused, history, turned
from whence.workflows.operator_fuzz.draws import VALUES, Case, arrays, plan
from whence.workflows.operator_fuzz.forms import form
from whence.workflows.operator_fuzz.shrink import smallest_case, with_fewer_values
from whence.workflows.saved import storing

CASES = 160
_AGAIN = 4096
"""Elements up to which a case is called three times, with other values in between."""


class Trials(TypedDict, total=False):
    """cases: most of them. tests: a folder for a pytest file of each fault."""

    cases: int
    tests: str | Path | None


@dataclass
class _Failing:
    """Cases that fail in one way: the first, what is wrong there, and how many there are."""

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

    kernel: "module:function" (of torch, numba, numpy), "library.so:function", or "file.onnx", or
    the function. reference: the same, of any dtype; of an ONNX file it may be left out. inputs: of
    each tensor in order its form, as "x: float32[rows, cols]"; equal names are equal sizes.
    arguments: further ones, by name. outputs: forms of what a function of C writes. order: of its
    parameters, as "x, y, rows:i32". without: kinds of values that it need not take ("nan", ...).
    trials: as `Trials` has them. Raises UsageError, StoreFailed.
    """
    if unknown := set(without) - set(VALUES):
        raise UsageError(f"no values are called {min(unknown)!r}; known: {', '.join(VALUES)}")
    signature, checker = _prepared(kernel, reference, inputs, arguments or {}, outputs, order)
    count, seen = _Count(), None
    for case in plan(signature.inputs, trials.get("cases", CASES), without):
        _tried(checker, signature, case, count, seen)
        seen = case
    if not count.cases and count.refused:
        raise UsageError(f"{checker.kernel.words} refuses every input: {count.refusal}")
    call = {
        "kernel": kernel if isinstance(kernel, str) else "",
        "reference": checker.reference.words if reference else "",
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
    names = call.get("forms") or [_form_of(k, v) for k, v in inputs.items()]
    _, checker = _prepared(
        kernel,
        reference,
        names,
        call.get("arguments", {}),
        call.get("outputs", ()),
        call.get("order", ""),
    )
    history([pytest_file.read(before) for before in call.get("before", ())], checker)
    layout = call.get("layout", "contiguous")
    return checker.fault(pytest_file.read(inputs), layout, again=not call.get("once"))


def _form_of(name: str, value: Any) -> str:
    return f"{name}: {value[0]}[{', '.join(map(str, value[1]))}]"


def _prepared(
    kernel: Any, reference: Any, inputs: Sequence[str], arguments: Mapping[str, Any],
    outputs: Sequence[str], order: str,
) -> tuple[kernels.Signature, Checker]:  # fmt: skip
    is_onnx = isinstance(kernel, str) and kernel.endswith(".onnx")
    taken = tuple(form(text) for text in inputs)
    if not taken and is_onnx:
        taken = kernels.onnx_forms(kernel)
    if not taken:
        raise UsageError("say what the kernel takes (--input 'x: float32[rows, cols]')")
    parameters = tuple(part.strip() for part in order.split(",") if part.strip())
    signature = kernels.Signature(taken, tuple(map(form, outputs)), arguments, parameters)
    if not reference and not is_onnx:
        raise UsageError("give the reference that the kernel is compared with")
    right = kernels.kernel(reference, signature) if reference else kernels.onnx_reference(kernel)
    return signature, Checker(kernels.kernel(kernel, signature), right)


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
    """The faults, those of later calls being no state that is kept where a process of its own
    shows them in a first call too.
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
    """The fault on the smallest input, with its test written."""

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
    """Write the test and see it fail in a process of its own; with the call before it, where what
    that left is needed.
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
    """Does the test fail in a process of its own, which finds the modules that this one finds?"""
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
