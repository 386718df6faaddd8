"""Copy a run to an object store.

\b
    whence upload runs/ref s3://bucket/ref
    whence compare s3://bucket/ref runs/tgt

`whence run -o s3://bucket/run` does so while the command runs. Where that failed, the run is still
on this machine; this command uploads it. Needs fsspec and the package for the URL (s3fs for s3://).
"""

from __future__ import annotations

import click

from whence.cli._options import HERE, argument, option, verb


@verb(
    argument("run", "RUN", HERE),
    argument("url", "URL", str),
    option("--force", "Replace a run that lies there."),
)
def command(run: str, url: str, force: bool) -> None:
    """Words -> `api.upload`."""
    from whence import api
    from whence.report import tables

    files = api.upload(run, url, force=force)
    click.echo(f"uploaded to {tables.clean(url)}: {tables.count(files, 'file')}")
