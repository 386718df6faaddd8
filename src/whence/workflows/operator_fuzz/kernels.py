"""Callable kernels: a function of Python (torch, numba, numpy), a function of C, or an
ONNX file.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whence import dtypes, extras
from whence.errors import UsageError
from whence.workflows.operator_fuzz import c_functions
from whence.workflows.operator_fuzz.forms import Form, dimensions, form


@dataclass(frozen=True)
class Signature:
    """What a kernel takes and, for a C function, returns.

    arguments: non-tensor arguments, by name. order: parameters of the C function ("x", "rows:i32");
    () means inputs, outputs, sizes, arguments. sizes: of each dimension in a recorded call, around
    which sizes and dtypes are varied; {} without one.
    """

    inputs: tuple[Form, ...]
    outputs: tuple[Form, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be called.

    call: takes the inputs by name, as arrays of the kernel's own kind. is_torch: whether these are
    torch tensors. strided: whether it accepts non-contiguous views.
    """

    words: str
    call: Callable[[Mapping[str, Any]], Any]
    is_torch: bool
    strided: bool = True


def kernel(words: str | Callable[..., Any], signature: Signature) -> Kernel:
    """Load the kernel written as module:function, library.so:function or file.onnx. Raises
    UsageError.
    """
    if callable(words):
        return _python(words, getattr(words, "__name__", "kernel"), signature)
    path, _, name = words.rpartition(":")
    if words.endswith(".onnx"):
        return _onnx(words)
    if Path(path).suffix in (".so", ".dylib", ".dll"):
        return _c(path, name, signature)
    from whence.comparison.replays import user_model

    if extras.is_here("triton") and not extras.needed("torch", "Triton").cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when its kernels are defined
    function = user_model.imported(words)
    if not callable(function):
        raise UsageError(f"{words} is not a function but {type(function).__name__}")
    return _python(function, words, signature)


def _python(function: Any, words: str, signature: Signature) -> Kernel:
    def call(inputs: Mapping[str, Any]) -> Any:
        return function(*inputs.values(), **signature.arguments)

    return Kernel(words, call, _takes_tensors(function))


def _takes_tensors(function: Any) -> bool:
    """Whether the function takes torch tensors, judged by the libraries that its code and module
    use.
    """
    if hasattr(function, "py_func"):  # of numba
        return False
    if not inspect.isfunction(inspect.unwrap(function)):  # built in, or an operator of a library
        return "torch" in sys.modules
    inner = inspect.unwrap(function)
    known = getattr(inner, "__globals__", {})
    named = [known[n] for n in getattr(inner, "__code__", _NOTHING).co_names if n in known]
    kinds = {_library(value) for value in named} or {""}
    if kinds & {"torch", "triton"}:
        return True
    is_numpy = bool(kinds & {"numpy", "numba"})
    return not is_numpy and any(_library(value) == "torch" for value in known.values())


class _NOTHING:
    """Placeholder for the code of an object that has none."""

    co_names: tuple[str, ...] = ()


def _library(value: Any) -> str:
    """The library of a module or of a compiled function; "" for other objects."""
    if hasattr(value, "py_func"):
        return "numba"
    return str(value.__name__).partition(".")[0] if inspect.ismodule(value) else ""


def _c(path: str, name: str, signature: Signature) -> Kernel:
    if not signature.outputs:
        raise UsageError(f"{path}:{name}: say what it writes (--output 'y: float32[rows, cols]')")
    function = c_functions.Function(path, name)
    forms = (*signature.inputs, *signature.outputs)
    order = signature.order or (
        *(f.name for f in forms), *dimensions(forms), *signature.arguments
    )  # fmt: skip

    def call(inputs: Mapping[str, Any]) -> Any:
        sizes = _sizes(signature.inputs, inputs)
        held = {f.name: np.array(inputs[f.name], order="C") for f in signature.inputs}
        for f in signature.outputs:
            empty = np.zeros(f.shape(sizes), dtypes.named(f.dtype).numpy)
            empty.view(np.uint8).reshape(-1)[:] = 0xFF if empty.size else 0  # NaN
            held[f.name] = empty
        others = {**signature.arguments, **sizes}
        parts = (entry.partition(":") for entry in order)
        function(held, [(key, kind, others.get(key)) for key, _, kind in parts])
        results = {f.name: held[f.name] for f in signature.outputs}
        return next(iter(results.values())) if len(results) == 1 else results

    return Kernel(f"{path}:{name}", call, False, strided=False)


def _sizes(forms: Sequence[Form], inputs: Mapping[str, Any]) -> dict[str, int]:
    return {
        extent.name: size // extent.factor
        for f in forms
        for extent, size in zip(f.extents, inputs[f.name].shape)
        if extent.name
    }


def _onnx(path: str) -> Kernel:
    onnxruntime = extras.needed("onnxruntime", "an ONNX file as a kernel")
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # of the runtime's own kinds, which derive from nothing else
        raise UsageError(f"ONNX Runtime does not load {path}: {str(error)[:300]}") from error
    names = [i.name for i in session.get_inputs()]

    def call(inputs: Mapping[str, Any]) -> Any:
        return session.run(None, dict(zip(names, map(np.ascontiguousarray, inputs.values()))))

    return Kernel(path, call, False, strided=False)


def onnx_reference(path: str) -> Kernel:
    """A reference that runs the operators of a file as the onnx package defines them, in numpy."""
    extras.needed("onnx", "the reference of an ONNX file")
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(path)
    names = evaluator.input_names

    def call(inputs: Mapping[str, Any]) -> Any:
        return evaluator.run(None, dict(zip(names, inputs.values())))

    return Kernel(f"{path}, as the onnx package defines its operators", call, False)


def onnx_forms(path: str) -> tuple[Form, ...]:
    """The inputs that an ONNX file declares; named dimensions are varied."""
    onnx = extras.needed("onnx", "the inputs of an ONNX file")
    graph = onnx.load(path, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    forms = []
    for entry in graph.input:
        if entry.name in constants:
            continue
        kind = entry.type.tensor_type
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        extents = [d.dim_param or str(d.dim_value) for d in kind.shape.dim]
        forms.append(form(f"{entry.name}: {dtype}[{', '.join(extents)}]"))
    return tuple(forms)
