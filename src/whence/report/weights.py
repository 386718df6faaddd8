"""The pairs of parameters as a map for `whence compare --map`, with comments on the evidence for
each.
"""

from __future__ import annotations

from typing import Any

import yaml

from whence.report.tables import clean, count
from whence.results import FacedWeight, WeightMap


def weights_map(result: WeightMap) -> str:
    """The map as text (YAML)."""
    equal = sum(w.state == "equal" for w in result.pairs)
    lines = [
        f"# {count(len(result.pairs), 'parameter')} paired, {count(equal)} equal; use it with "
        "whence compare REF TGT --map FILE"
    ]
    groups: dict[tuple[str, str], list[FacedWeight]] = {}
    for weight in result.pairs:
        groups.setdefault((weight.reference, weight.target), []).append(weight)
    lines.append("pairs:" if groups else "pairs: []")
    for (reference, target), weights in groups.items():
        entry: dict[str, Any] = {"reference": reference, "target": target}
        slots = {
            f"param.{w.name}": _made(w)
            for w in weights
            if not w.rows and not w.why and (w.dims or w.name != w.target_name)
        }
        text = yaml.safe_dump(
            [{**entry, "slots": slots} if slots else entry], sort_keys=False, width=140
        )
        lines += [f"  {line}" for line in text.rstrip("\n").split("\n")]
        lines += [f"  # {_said(w)}" for w in weights]
    lines += [f"# only reference: {clean(name)}" for name in result.only_reference]
    lines += [f"# only target: {clean(name)}" for name in result.only_target]
    return "\n".join(lines) + "\n"


def _made(weight: FacedWeight) -> Any:
    if weight.name == weight.target_name:
        return weight.dims
    return {"dims": weight.dims or "x", "x": f"param.{weight.target_name}"}


def _said(weight: FacedWeight) -> str:
    how = f", {clean(weight.dims)}" if weight.dims else ""
    state = weight.state if not weight.rel_l2 else f"{weight.state}, rel_l2 {weight.rel_l2:.2g}"
    return (
        f"{clean(weight.name)}{weight.rows} {list(weight.shape)}: {clean(weight.target_name)} "
        f"{list(weight.target_shape)}{how}: {state}{f', {clean(weight.why)}' if weight.why else ''}"
    )
