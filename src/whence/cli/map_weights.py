"""Which parameter of one run faces which of another, and how it is brought there.

\b
    whence map-weights runs/torch runs/paddle -o map.yaml
    whence compare runs/torch runs/paddle --map map.yaml

Linear weights that lie transposed, names and orders of another framework, fused ones. The comments say of each parameter whether both hold
the same. The file is a map of `whence compare --map`, to be corrected where it is wrong (docs/alignment.md).

Exit code: 0 all parameters face each other and are equal, 1 one differs, 2 one could not be compared or has no partner, 3 none face
each other.
"""

from __future__ import annotations

from pathlib import Path

import click

from whence.errors import OutputExists, StoreFailed


@click.command("map-weights", help=__doc__)
@click.argument("reference", metavar="REF")
@click.argument("target", metavar="TGT")
@click.option("-o", "--output", metavar="FILE", help="Write to this file instead of the terminal.")
@click.option("--force", is_flag=True, help="Replace FILE when it exists.")
@click.option("--map", "chart", metavar="FILE", help="Start from this map.")
def command(reference: str, target: str, output: str | None, force: bool, chart: str | None) -> int:
    """Words -> `api.map_weights` -> `report.weights_map` -> exit code."""
    from whence import api, report

    if output is not None and Path(output).exists() and not force:
        raise OutputExists(f"{output} exists; --force replaces it, or choose another -o")
    found = api.map_weights(reference, target, mapping=chart)
    text = report.weights_map(found)
    if output is None:
        click.echo(text, nl=False)
    else:
        try:
            Path(output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StoreFailed(f"cannot write {output}: {error.strerror or error}") from error
    if any(w.state == "differs" for w in found.pairs):
        return 1
    return 2 if found.only_reference or found.only_target or any(w.state != "equal" for w in found.pairs) else 0
