"""Pair the parameters of two runs, as a map for --map.

\b
    whence map-weights runs/torch runs/paddle -o map.yaml
    whence compare runs/torch runs/paddle --map map.yaml
    whence map-weights model.safetensors model.onnx
    whence map-weights model.safetensors gptq.safetensors     AWQ and compressed-tensors too

It finds transposed weights, fused weights, and names and orders of another framework; those of an
ONNX file by their elements, whatever an exporter made of them. A comment at each parameter says
whether the two are equal, or the one holds codes of the other within half a step. Correct the file
where it is wrong, and pass it to `whence compare --map` (docs/alignment.md).

Exit code: 0 all parameters are paired and equal, 1 one differs, 2 one has no partner or could not
be compared, 3 none could be paired.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _files
from whence.cli._options import FIRST_MAP, OUTPUT_FILE, REPLACE_FILE, argument, verb


@verb(
    argument("reference", "REF"),
    argument("target", "TGT"),
    OUTPUT_FILE,
    REPLACE_FILE,
    FIRST_MAP,
)
def command(output: str | None, force: bool, **options: Any) -> int:
    """Words -> `api.map_weights` -> `report.weights_map` -> exit code."""
    from whence import api
    from whence.report.weights import weights_map

    _files.check(output, force)
    weights = api.map_weights(**options)
    _files.leave(weights_map(weights), output, force)
    if any(w.state == "differs" for w in weights.pairs):
        return 1
    return (
        2
        if weights.only_reference
        or weights.only_target
        or any(w.state not in ("equal", "codes") for w in weights.pairs)
        else 0
    )
