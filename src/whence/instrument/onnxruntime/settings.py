"""What a reader of two runs asks first of a session: release, model, options, providers, inputs and
outputs.
"""

from __future__ import annotations

import os
from typing import Any

from whence.instrument.engines.files import facts_of_bytes, facts_of_file, files_beside


def of_session(python_session: Any, model: Any, disabled: tuple[str, ...]) -> dict[str, Any]:
    """Facts of a session. model: its file as read (`readers/encodings/onnx_model.py`), None where
    it is not known. disabled: names of optimisers that the program switched off.
    """
    import onnxruntime

    options = python_session.get_session_options()
    facts: dict[str, Any] = {
        "onnxruntime": str(onnxruntime.__version__),
        **_of_file(python_session),
        "optimization": _name(options.graph_optimization_level),
        "disabled_optimizers": sorted(disabled),
        "execution_mode": _name(options.execution_mode),
        "threads": int(options.intra_op_num_threads),
        "threads_between": int(options.inter_op_num_threads),
        "deterministic": bool(getattr(options, "use_deterministic_compute", False)),
        "providers": {name: _options(python_session, name) for name in _providers(python_session)},
        "inputs": {v.name: _form(v) for v in python_session.get_inputs()},
        "outputs": {v.name: _form(v) for v in python_session.get_outputs()},
    }
    if model is not None:
        facts["opset"] = {domain or "ai.onnx": version for domain, version in model.opsets.items()}
        facts["producer"] = model.producer
        facts["ir_version"] = model.ir_version
        facts["parameter_dtypes"] = _parameter_dtypes(model)
        tensors = model.graph.initializers.values()
        beside = {t.external.get("location", "") for t in tensors if t.external}
        if beside and model_path(python_session):
            facts["external_data"] = files_beside(model_path(python_session), beside)
    if not disabled:
        del facts["disabled_optimizers"]
    return facts


def model_path(python_session: Any) -> str:
    """The file that a session was made from, "" for a model given as bytes."""
    return os.fspath(getattr(python_session, "_model_path", None) or "")


def _of_file(python_session: Any) -> dict[str, Any]:
    path = model_path(python_session)
    if path:
        return facts_of_file(path)
    return facts_of_bytes(getattr(python_session, "_model_bytes", None) or b"")


def _name(value: Any) -> str:
    """The name of a value of an enumeration of the runtime."""
    return str(getattr(value, "name", value)).rpartition(".")[2]


def _providers(python_session: Any) -> list[str]:
    return [str(name) for name in python_session.get_providers()]


def _options(python_session: Any, name: str) -> dict[str, str]:
    stated = python_session.get_provider_options().get(name) or {}
    return {str(key): str(value) for key, value in stated.items()}


def _form(value: Any) -> str:
    """ "tensor(float) [N, 3]"."""
    shape = ", ".join("?" if n is None else str(n) for n in value.shape)
    return f"{value.type} [{shape}]"


def _parameter_dtypes(model: Any) -> dict[str, int]:
    """How many initialisers of each dtype the user's model has, those of shapes and indices
    apart.
    """
    kinds: dict[str, int] = {}
    for tensor in model.graph.initializers.values():
        if tensor.dtype not in ("bool", "int64", "string"):
            kinds[tensor.dtype] = kinds.get(tensor.dtype, 0) + 1
    return kinds
