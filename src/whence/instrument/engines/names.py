"""How calls of a graph are called after the values that its nodes make."""

from __future__ import annotations

import re

_EXPORTED = re.compile(r"/(.+)_output_\d+")  # what torch's TorchScript exporter calls values


def scope_of(value: str) -> str:
    """The name of the node that makes a value: "/encoder/layer.0/MatMul_output_0" is
    encoder.layer.0.MatMul, others stay.
    """
    exported = _EXPORTED.fullmatch(value)
    return exported[1].replace("/", ".") if exported else value
