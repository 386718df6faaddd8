"""What a reader of two runs asks first of a model of OpenVINO: release, file, device, properties,
inputs and outputs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from whence.instrument.engines.files import facts_of_bytes, facts_of_file, files_beside
from whence.instrument.openvino.source_graph import SourceGraph
from whence.instrument.openvino.values import form_of, port_name

_PROPERTIES = (
    "EXECUTION_DEVICES", "INFERENCE_PRECISION_HINT", "PERFORMANCE_HINT", "EXECUTION_MODE_HINT",
    "NUM_STREAMS", "INFERENCE_NUM_THREADS", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE",
)  # fmt: skip
_STATED = 200  # characters of a property


class Compiled(NamedTuple):
    """How the program had a model compiled. path: its file, "" where there is none; content: its
    bytes, where it was given as such. core: the Core that did it, None where that is not known.
    device: as asked for.
    """

    path: str = ""
    content: bytes = b""
    core: Any = None
    device: str = ""
    config: Any = None


def of_model(compiled_model: Any, how: Compiled, source: SourceGraph | None) -> dict[str, Any]:
    """Facts of a compiled model. source: the graph that it was compiled from, None where that is
    not known.
    """
    import openvino

    facts: dict[str, Any] = {"openvino": str(openvino.__version__), **_of_file(how)}
    if how.device:
        facts["device"] = how.device
    if how.config:
        facts["config"] = {str(k): str(v)[:_STATED] for k, v in dict(how.config).items()}
    facts["properties"] = properties(compiled_model)
    for kind in ("inputs", "outputs"):
        ports = getattr(compiled_model, kind)
        facts[kind] = {port_name(p, k): form_of(p) for k, p in enumerate(ports)}
    if source is not None:
        facts["opset"] = dict(sorted(source.opsets.items()))
        if source.variables:
            facts["variables"] = list(source.variables)
    return facts


def properties(compiled_model: Any) -> dict[str, str]:
    """Properties of a compiled model that decide what it computes, as its device states them."""
    stated: dict[str, str] = {}
    for name in _PROPERTIES:
        try:
            value = compiled_model.get_property(name)
        except RuntimeError:  # the device has none of this name
            continue
        stated[name] = _plain(value)
    return stated


def _plain(value: Any) -> str:
    named = getattr(value, "get_type_name", None)
    return str(named() if named else value)[:_STATED]


def _of_file(how: Compiled) -> dict[str, Any]:
    if how.content:
        return facts_of_bytes(how.content)
    if not how.path:
        return {"model": "(in memory)"}
    facts = facts_of_file(how.path)
    weights = Path(how.path).with_suffix(".bin")
    if how.path.endswith(".xml") and weights.is_file():
        facts["external_data"] = files_beside(how.path, [weights.name])
    return facts


def name_of(how: Compiled) -> str:
    """What the model is called in its run."""
    if how.path:
        return os.path.basename(how.path)  # noqa: PTH119
    return "(bytes)" if how.content else "(in memory)"
