"""Write a comparison as an HTML page, plots, or a build report.

\b
    whence report cmp -o report.html
    whence report cmp -o report.html --tokens tokens.json
    whence report tokens.json -o report.html
    whence report cmp --plots plots
    whence report cmp --format markdown --junit whence.xml
    whence report cmp --parquet pairs.parquet
    whence report cmp --format sarif > whence.sarif
    whence report cmp --onnx model.onnx --netron annotated.onnx

CMP is a folder written by `whence compare -o CMP`, or the output of `whence tokens --format json`;
without CMP, the last comparison made in this folder is used. The page is one file that loads
nothing else and opens in any browser. While both runs are still in their places, it also shows
tensors of the findings and of the calls around them; otherwise it says what is missing. With
--plots, --parquet, --format, --annotations, --junit or a file for a viewer, the page is only
written when -o names it.

Exit code: 0 when it was written, 3 when there is no such comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from whence.cli import _answers, _files, _progress
from whence.cli._options import HERE, PATH, argument, option, verb


@verb(
    argument("comparison", "[CMP]"),
    "Page",
    option(
        "-o, --output FILE",
        "File for the page.  [default: CMP/report.html, or ./report.html without CMP]",
        HERE,
    ),
    option(
        "--details N", "Show the tensors of at most so many calls.", click.IntRange(0), default=40
    ),
    option(
        "--tokens FILE",
        "Output of `whence tokens --format json`: shows the texts of both sides on the page. Or "
        "the model's tokenizer.json, or its folder: shows generated tokens as text.",
        PATH,
    ),
    "Other forms",
    option(
        "--plots DIR",
        "Write the error along the run as PNG and SVG to this new folder (needs matplotlib).",
        HERE,
    ),
    option("--parquet FILE", "Write a table of it as a Parquet file (needs pyarrow).", HERE),
    option(
        "--table NAME",
        "Which table goes into it; `whence query CMP --tables` lists them.",
        default="pairs",
    ),
    option(
        "--model-explorer FILE",
        "Write the error of each node as node data for Model Explorer; with --onnx by the values "
        "of that model.",
        HERE,
    ),
    option("--tensorboard DIR", "Write the error by module and step as scalars.", HERE),
    option("--onnx MODEL", "The ONNX model that the reference ran.", HERE),
    option(
        "--netron COPY",
        "Write a copy of --onnx MODEL with the error and verdict of each node, which Netron shows.",
        HERE,
    ),
    *_answers.options(None),
    _answers.JUNIT,
    "Files",
    option("--force", "Replace files that exist."),
)
def command(
    comparison: str | None,
    output: str | None,
    form: str | None,
    annotations: bool,
    junit: str | None,
    plots: str | None,
    parquet: str | None,
    table: str,
    details: int,
    tokens: str | None,
    force: bool,
    model_explorer: str | None,
    tensorboard: str | None,
    onnx: str | None,
    netron: str | None,
) -> None:
    """Words -> `api.report_html`, `api.plots`, `api.load_comparison` -> report -> exit code."""
    from whence import api
    from whence.report import tables

    _answers.check(form, annotations, junit, force)
    viewers = {
        "model_explorer": model_explorer,
        "tensorboard": tensorboard,
        "onnx": onnx,
        "netron": netron,
    }
    chosen = _answers.latest() if comparison is None else comparison
    answers = form is not None or annotations
    if answers or junit is not None:
        result = api.load_comparison(chosen) if isinstance(chosen, str) else chosen
        _answers.put(_answers.said(result, form or "github", annotations) if answers else "")
        _answers.junit(result, junit)
    elif not any((plots, output, parquet, *viewers.values())):
        output = str(api.page_beside(chosen))
    lines = []
    with _progress.shown() as line:
        how: dict[str, Any] = {"details": details, "force": force}
        if line.count is not None:
            how["progress"] = line.count
        if parquet is not None:
            _files.check(parquet, force)
            rows = api.to_parquet(chosen, parquet, table=table)
            lines.append(f"written to {tables.clean(parquet)}: {tables.count(rows, 'row')}")
        if plots is not None:
            files = api.plots(chosen, plots, force=force)
            lines.append(f"written to {tables.clean(plots)}: {tables.count(len(files), 'file')}")
        if output is not None:
            page = api.report_html(chosen, output, tokens=tokens, **how)
            lines.append(f"written to {tables.clean(page)}: {tables.size(page.stat().st_size)}")
        lines += _for_viewers(chosen, force, **viewers)
    for text in lines:
        click.echo(text, err=answers)


def _for_viewers(
    chosen: Any,
    force: bool,
    *,
    onnx: str | None,
    netron: str | None,
    model_explorer: str | None,
    tensorboard: str | None,
) -> Iterator[str]:
    """Write what was asked for, and say so."""
    from whence import api
    from whence.report import tables

    if (netron is None) != (onnx is None) and model_explorer is None:
        raise click.UsageError(
            "--netron COPY writes a copy of --onnx MODEL: give both, or --onnx with "
            "--model-explorer FILE"
        )
    if netron is not None and onnx is not None:
        nodes = api.annotate_onnx(chosen, onnx, netron, force=force)
        yield f"written to {tables.clean(netron)}: {tables.count(nodes, 'node')} annotated"
    if model_explorer is not None:
        api.model_explorer_data(chosen, model_explorer, model=onnx, force=force)
        yield f"written to {tables.clean(model_explorer)}"
    if tensorboard is not None:
        scalars = api.tensorboard(chosen, tensorboard)
        yield f"written to {tables.clean(tensorboard)}: {tables.count(scalars, 'scalar')}"
