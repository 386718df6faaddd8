"""Which parameter of one run faces which of another, and how it is brought there.

\b
    whence map-weights runs/torch runs/paddle -o map.yaml
    whence compare runs/torch runs/paddle --map map.yaml

Linear weights that lie transposed, names and orders of another framework, fused ones. The comments
say of each parameter whether both hold the same. The file is a map of `whence compare --map`, to be
corrected where it is wrong (docs/alignment.md).

Exit code: 0 all parameters face each other and are equal, 1 one differs, 2 one could not be
compared or has no partner, 3 none face each other.
"""

from __future__ import annotations

import click

from whence.cli import _files, _options


@click.command("map-weights", help=__doc__)
@click.argument("reference", metavar="REF")
@click.argument("target", metavar="TGT")
@_options.OUTPUT_FILE
@_options.REPLACE_FILE
@_options.FIRST_MAP
def command(reference: str, target: str, output: str | None, force: bool, chart: str | None) -> int:
    """Words -> `api.map_weights` -> `report.weights_map` -> exit code."""
    from whence import api
    from whence.report.weights import weights_map

    _files.check(output, force)
    weights = api.map_weights(reference, target, mapping=chart)
    _files.leave(weights_map(weights), output, force)
    if any(w.state == "differs" for w in weights.pairs):
        return 1
    return (
        2
        if weights.only_reference
        or weights.only_target
        or any(w.state != "equal" for w in weights.pairs)
        else 0
    )
